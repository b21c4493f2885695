"""Processes that `--ranks` starts: variables, exit codes, signals, and a line for each that is killed."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from grpo.cli import main
from grpo.distributed import start as module
from grpo.distributed.places import Machine
from grpo.distributed.start import start
from grpo.errors import ConfigError

TWO = Machine(0, 1, 2, "127.0.0.1", 0)


def shell(words, machine=TWO, **extra):
    return start(machine, ["bash", "-c", words], extra, seconds=5)


def test_every_rank_gets_its_variables(tmp_path):
    said = 'echo "$WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $MASTER_PORT $OURS" > "$FOLDER/$RANK"'
    assert shell(said, FOLDER=str(tmp_path), OURS="x") == 0
    first, second = (path.read_text().split() for path in sorted(tmp_path.iterdir()))
    assert (first[:3], second[:3]) == (["2", "0", "127.0.0.1"], ["2", "1", "127.0.0.1"])
    assert first[3:] == second[3:] and int(first[3]) > 1023 and first[4] == "x"


def test_the_second_machine_finds_the_first(tmp_path):
    held = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    said = 'echo "$WORLD_SIZE $LOCAL_RANK" > "$FOLDER/$RANK"'
    assert shell(said, Machine(1, 2, 2, "127.0.0.1", held.port), FOLDER=str(tmp_path)) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"2": "4 0\n", "3": "4 1\n"}


def test_the_first_failure_is_the_exit_code_and_ends_the_others():
    assert shell("if [ $RANK = 1 ]; then exit 2; else sleep 60; fi") == 2


def test_a_killed_rank_is_told_in_a_line(capfd):
    assert shell("if [ $RANK = 1 ]; then kill -9 $$; else sleep 60; fi") == 1
    said = capfd.readouterr().err
    assert "rank 1 was ended by SIGKILL" in said and "out of memory" in said and said.count("\n") == 1


def test_a_rank_that_hangs_until_it_is_killed_is_not_said_to_be_out_of_memory(capfd, monkeypatch):
    """It waits for the others' end, hears nothing of theirs, and torch kills it: memory has nothing to do with it."""
    close = SubprocessContext.close
    monkeypatch.setattr(module, "GRACE", 3)
    monkeypatch.setattr(SubprocessContext, "close", lambda self: close(self, timeout=module.GRACE))
    assert shell('if [ $RANK = 1 ]; then trap "" TERM; while true; do sleep 0.1; done; else sleep 1; exit 2; fi') == 2
    said = capfd.readouterr().err
    assert said.startswith("grpo: rank 1 hung in 'not there yet'") and "was killed" in said and said.count("\n") == 1
    assert "memory" not in said


def ask_once_they_run(folder):
    """Where signals go on to ranks that are ready for them; before, they would end whoever starts these."""
    while len(list(folder.iterdir())) < 2 or "pass_on" not in repr(signal.getsignal(signal.SIGTERM)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def test_signals_go_on_to_the_ranks(tmp_path):
    polite = 'trap "exit 75" TERM; touch "$FOLDER/$RANK"; sleep 30 & wait'

    def ask():
        ask_once_they_run(tmp_path)

    before = signal.getsignal(signal.SIGTERM)
    asking = threading.Thread(target=ask)
    asking.start()
    assert shell(polite, FOLDER=str(tmp_path)) == 75
    asking.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_third_signal_ends_ranks_that_hear_none(tmp_path, capfd):
    """Each waits until the one before has arrived: a system delivers two of a kind that come together as one."""
    deaf = 'trap "echo no >> $FOLDER/$RANK" TERM; touch "$FOLDER/$RANK"; while true; do sleep 0.05; done'

    def ask():
        ask_once_they_run(tmp_path)
        for times in (1, 2):
            while any(path.read_text().count("no") < times for path in tmp_path.iterdir()):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    assert shell(deaf, FOLDER=str(tmp_path)) == 1
    asking.join()


def test_a_port_in_use_is_one_line(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} cannot be used.*MASTER_PORT"):
            shell("exit 0", Machine(0, 1, 2, "127.0.0.1", port))


def test_nothing_is_started_where_settings_are_wrong(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    cases = {
        ("train", "bandit", "--ranks", "2"): "2 ranks would share 1 group a step",
        ("train", "bandit", "--ranks", "2", "--nonsense", "3"): "nonsense",
        ("train", "bandit", "--shared-gpu"): "--shared-gpu means nothing for one process",
        ("train", "bandit", "--shard", "states"): "divides among ranks, and there is one",
        ("train", "bandit", "--rank-timeout", "3"): "--rank-timeout means nothing",
        ("doctor", "--ranks", "2", "--config", "bandit"): "give one of them",
    }
    for words, said in cases.items():
        assert main(list(words)) == 2
        assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_tries_what_lies_between_two_ranks(capfd, tmp_path):
    assert main(["doctor", "--ranks", "2", "--logdir", str(tmp_path / "runs")]) == 0
    said = capfd.readouterr()
    assert [word for word in ("sum", "gather", "broadcast") if f"{word.ljust(10)}  right" in said.out] == [
        "sum", "gather", "broadcast",
    ]  # fmt: skip
    assert "GB/s" in said.out and "shared by all ranks" in said.out and "clocks" in said.out
    assert said.err == "" and list(Path(tmp_path).iterdir()) == []


HANGS = """
import os, pathlib, sys, time
from grpo.distributed.group import join
from grpo.errors import RanksLost
from grpo.protocols import State
folder = pathlib.Path(os.environ["FOLDER"])
(folder / os.environ["RANK"]).touch()
while len(list(folder.iterdir())) < 2:  # importing takes as long as it takes
    time.sleep(0.01)
ranks = join()
ranks.gather(State({}, {}), "comparing the step")
if ranks.rank == 1:
    time.sleep(600)
try:
    ranks.gather(State({}, {}), "collecting")
except RanksLost as error:
    sys.exit(f"grpo: {error}")
"""


def test_a_hang_ends_with_a_line_that_names_the_rank_and_its_phase(capfd, tmp_path):
    began = time.monotonic()
    assert start(TWO, [sys.executable, "-c", HANGS], {"GRPO_RANKS_TIMEOUT": "4", "FOLDER": str(tmp_path)}) == 1
    said = capfd.readouterr().err
    assert (
        "rank 0 lost the others after 4 s: it waited at collecting for rank 1, last seen past comparing the step"
        in said
    )
    assert "--rank-timeout" in said and time.monotonic() - began < 500


KILLED = (
    HANGS.replace("import os,", "from grpo.app import builders\nimport os,")
    .replace("time.sleep(600)", "os.kill(os.getpid(), 9)")
    .partition("try:")[0]
    + 'sys.exit(builders._guarded(lambda: ranks.gather(State({}, {}), "collecting")))'
)


def test_a_rank_that_is_killed_is_named_by_the_others_and_by_who_started_it(capfd, tmp_path):
    """Its end is no hang, and what a survivor says of it is not why it ended."""
    assert start(TWO, [sys.executable, "-c", KILLED], {"FOLDER": str(tmp_path)}) == 1
    said = [text for text in capfd.readouterr().err.splitlines() if text.startswith("grpo: ")]
    starter = said.pop()
    assert starter.startswith("grpo: rank 1 was ended by SIGKILL") and "out of memory" in starter
    assert "rank 0" not in starter and starter.count("go on from") == 1
    for survivor in said:  # unless it is ended before it says anything
        assert "rank 1 has ended or its machine has gone, while this one waited at collecting" in survivor


def two_nodes(tmp_path, *words, others=()):
    """Exit code and words of one rank on each of two machines, which share neither settings nor disk."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    between = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    between |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    between["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    nodes = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir(exist_ok=True)
        command = [sys.executable, "-m", "grpo", "train", *words, *(others if rank else ()), "--logdir", "runs"]
        nodes.append(
            subprocess.Popen(
                command, cwd=tmp_path / str(rank), env={**os.environ, **between, "RANK": str(rank)}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    said = [node.communicate(timeout=300) for node in nodes]
    return [(node.returncode, *texts) for node, texts in zip(nodes, said, strict=True)]


def expect_refused(tmp_path, found, told):
    """Everywhere in one line with the remedy, and no folder of a run is left."""
    for rank, (code, out, err) in enumerate(found):
        assert code == 2 and out == "" and err.count("\n") == 1, err
        assert told in err and "on rank 0" in err and "on rank 1" in err and "start every rank with the same" in err
        assert not (tmp_path / str(rank) / "runs").exists()


def test_two_nodes_with_different_settings_are_refused_on_both(tmp_path):
    found = two_nodes(tmp_path, "bandit", "--groups-per-step", "2", others=("--learning-rate", "0.3"))
    expect_refused(tmp_path, found, "grpo: rank")
    assert all("the setting learning_rate differs: " in err and "0.3 on rank 1" in err for *_, err in found)


def test_two_nodes_whose_data_differ_are_refused_on_both(tmp_path):
    for rank, answer in enumerate((2, 3)):
        (tmp_path / str(rank)).mkdir()
        rows = f'{{"prompt": "1+1=", "answer": "2"}}\n{{"prompt": "1+2=", "answer": "{answer}"}}\n'
        (tmp_path / str(rank) / "rows.jsonl").write_text(rows)
    found = two_nodes(tmp_path, "tiny-language", "--dataset", "rows.jsonl")
    expect_refused(tmp_path, found, "what dataset names (rows.jsonl) differs: ")
