"""Environments that misbehave inside a real run: told at once, counted later, never the end of the others."""

import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from grpo.cli import main
from grpo.control import GRPOTrainer, groups
from grpo.envs.fleet import EnvError
from grpo.errors import SamplesFailed
from grpo.run import checkpoint
from grpo.run.folder import RunFolder
from grpo.run.loop import run
from tests.faults import envs
from tests.faults.envs import SEEDS

ROOT = Path(__file__).parents[2]
QUICK = {"checkpoint_every": 3, "sample_every": None, "progress": None, "curve": False}
SMALL = {"group_size": 2, "groups_per_step": 4, "num_iterations": 2, "hidden": (8,), "video": False, "eval_episodes": 2}
UNRULY = "tests.faults.envs:Unruly"


def make(env=UNRULY, **settings) -> GRPOTrainer:
    return GRPOTrainer(env=env, **SMALL | {"vector": "processes", "workers": 2} | settings)


def make_folder(path) -> RunFolder:
    return RunFolder.create(path, task="control", config={}, created="2026-11-15T10:15:00Z", seed=0)


@pytest.fixture
def doomed(monkeypatch):
    """`doomed({3: "raises"})`: the second start of step 3 (or `every`) is one where the environment does that deed."""
    real = groups.seeds

    def plan(deeds, every=False):
        def seeds(seed, step, stream, count):
            found = real(seed, step, stream, count)
            deed = deeds.get(step + 1)
            if deed is not None and stream == groups.TRAINING:
                found = [SEEDS[deed] if every or i == 1 else start for i, start in enumerate(found)]
            return found

        monkeypatch.setattr(groups, "seeds", seeds)

    return plan


DEEDS = {
    "raises": "ValueError: no such state",
    "sleeps": "hung for 2 s; killed and started again",
    "dies": "its process died (exit code -9); started again",
    "NaN observation": "observation is not finite: nan",
    "wrong shape": "observation has shape (3, 1), its space (3,)",
}


@pytest.mark.parametrize("deed", DEEDS)
def test_on_the_first_step_it_is_an_error_that_says_who_and_when(deed, doomed, tmp_path):
    doomed({1: deed})
    apart = deed in ("raises", "sleeps", "dies")
    trainer = make(env_timeout=2.0) if apart else make(vector="serial", workers=None)
    with pytest.raises(SamplesFailed) as error:
        run(trainer, 3, make_folder(tmp_path / "run"), **QUICK)
    trainer.source.close()
    message = str(error.value)
    assert message.startswith("on the first step ") and " of 8 samples failed: Unruly " in message
    assert "member " in message and f"step {envs.STEP}: {DEEDS[deed]}" in message and "\n" not in message


def test_later_ones_are_counted_named_and_survived(doomed, tmp_path):
    doomed(dict(zip((2, 3, 5, 6, 7), DEEDS, strict=True)))
    trainer = make(env_timeout=2.0)
    summary = run(trainer, 8, make_folder(tmp_path / "run"), failure_budget=0.1, **QUICK)
    assert (summary.reason, summary.step, summary.events["samples_failed"]) == ("done", 8, 5)
    folder = RunFolder.open(tmp_path / "run")
    failed = [row["failed"] for row in folder.metrics()]
    assert [count > 0 for count in failed] == [False, True, True, False, True, True, True, False]
    assert failed[1] == failed[5] == failed[6] == 2 <= min(failed[2], failed[4])  # innocents go with their worker
    assert all(row["updates"] > 0 and row["updates_skipped"] == 0 for row in folder.metrics())
    messages = [event["message"] for event in folder.events() if event["event"] == "samples_failed"]
    for message, what in zip(messages, DEEDS.values(), strict=True):
        assert "Unruly member" in message and f"step {envs.STEP}: {what}" in message
    assert [row["episodes"] for row in folder.metrics()][-1] == 64 - sum(failed)
    trainer.source.close()


def test_beyond_the_budget_the_run_stops_with_a_checkpoint_and_can_go_on(doomed, tmp_path):
    doomed({3: "raises", 4: "NaN reward"}, every=True)
    trainer = make(vector="serial", workers=None)
    summary = run(trainer, 9, make_folder(tmp_path / "run"), **QUICK)
    assert (summary.reason, summary.exit_code, summary.step) == ("failures", 1, 4)  # 8 may fail, 16 did
    assert summary.checkpoint.name == "step-00000004" and summary.metrics["return"] is None
    before = checkpoint.load(checkpoint.steps(RunFolder.open(tmp_path / "run"))[0]).step
    assert before == 3
    again = make(vector="serial", workers=None)
    summary = run(again, 6, RunFolder.open(tmp_path / "run"), resume=True, failure_budget=0.5, **QUICK)
    assert (summary.reason, summary.step) == ("done", 6)


def test_the_command_ends_with_1(doomed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = f"train --env {UNRULY} --vector serial --group-size 2 --starts 4 --video false --steps 9".split()
    doomed({1: "raises"})
    assert main([*words, "--logdir", "runs/a"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("grpo: on the first step 2 of 8 samples failed: Unruly member 2, step 3: ValueError: no")
    assert error.count("\n") == 1
    doomed(dict.fromkeys(range(2, 10), "raises"), every=True)
    assert main([*words, "--logdir", "runs/b", "--seed", "1"]) == 1
    assert "ended=failures" in capsys.readouterr().out and Path("runs/b/checkpoints/step-00000003").is_dir()


def test_a_stream_outlives_an_episode_that_fails(monkeypatch, tmp_path):
    from grpo.control import stream

    real = stream.seeds

    def seeds(seed, step, number, count):
        return [SEEDS["dies"]] if step == 3 else real(seed, step, number, count)

    monkeypatch.setattr(stream, "seeds", seeds)
    window = {"group_by": "steps", "advantage": "step", "group_size": 12, "groups_per_step": 2}
    trainer = make(**window)
    summary = run(trainer, 6, make_folder(tmp_path / "run"), failure_budget=0.5, **QUICK)
    trainer.source.close()
    assert summary.reason == "done" and 0 < summary.events["samples_failed"] <= 2
    assert summary.metrics["episodes"] > 6


def test_failures_while_evaluating_are_counted_apart(monkeypatch, tmp_path):
    trainer = make(vector="serial", workers=None)
    monkeypatch.setattr("grpo.control.evaluate.seeds", lambda *_: [SEEDS["raises"], 1])
    found = trainer.source.evaluate(1)
    assert found["failed"] == 1 and found["return"] is not None
    monkeypatch.setattr("grpo.control.evaluate.seeds", lambda *_: [SEEDS["raises"], SEEDS["raises"]])
    judged = {"evaluate": trainer.source.evaluate, "evaluate_every": 1}
    summary = run(trainer, 2, make_folder(tmp_path / "run"), **QUICK, **judged)
    assert summary.reason == "done" and summary.metrics["eval/return"] is None and summary.metrics["failed"] == 0


@pytest.mark.parametrize(
    "env, message",
    [
        ("tests.faults.envs:Shy", "its process died"),
        ("tests.faults.envs:Older", "must give"),
        ("tests.faults.envs:Undecided", "its action space Dict"),
    ],
)
def test_what_cannot_work_is_refused_before_a_folder_is_made(env, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--env", env, "--workers", "1", "--steps", "1", "--logdir", "run"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "run").exists()


# --- interrupted ----------------------------------------------------------------------------------------------------


def started() -> set[int]:
    """Processes that this one has started and not lost; multiprocessing's own tracker, which stays, is none of them."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            tracks = b"resource_tracker" in (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z" and not tracks:
            found.add(int(folder.name))
    return found


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_ctrl_c_saves_ends_with_130_and_goes_on_exactly(tmp_path, capsys):
    settings = "--env tests.faults.envs:Walk --workers 2 --group-size 2 --starts 2 --num-iterations 2 --hidden [8]"
    settings += " --scale-observations true --video false --evaluate-every 2"
    path, before, workers = tmp_path / "cut", started(), {}

    def press():
        until = time.monotonic() + 120
        while time.monotonic() < until:
            if (path / "metrics.jsonl").exists() and (path / "metrics.jsonl").read_bytes().count(b"\n") >= 3:
                break
            time.sleep(0.01)
        workers.update({pid: os.getpgid(pid) for pid in started() - before})
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    assert main(["train", *settings.split(), "--steps", "100000", "--logdir", str(path)]) == 130
    presser.join()
    assert f"go on with: grpo train --resume {path}" in capsys.readouterr().out
    assert len(workers) == 4  # two that train, two that evaluate
    assert os.getpgid(0) not in workers.values()  # a terminal tells the whole group
    assert started() == before
    done = len(RunFolder.open(path).metrics())
    assert checkpoint.load(checkpoint.steps(RunFolder.open(path))[-1]).step == done
    assert main(["train", "--resume", str(path), "--steps", str(done + 3)]) == 0
    assert main(["train", *settings.split(), "--steps", str(done + 3), "--logdir", str(tmp_path / "whole")]) == 0
    assert (path / "metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    last = f"checkpoints/step-{done + 3:08d}/arrays.safetensors"
    assert (path / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


# --- leaks ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts what Linux lists")
@pytest.mark.slow
def test_a_hundred_steps_leave_nothing_behind(tmp_path):
    seen = {}

    def held():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(started())

    def look(report):
        if report.step in (20, 100):
            seen[report.step] = held()

    def a_run(name):
        trainer = make("tests.faults.envs:Walk", env_kwargs={"length": 1}, groups_per_step=1, num_iterations=1)
        how = QUICK | {"evaluate": trainer.source.evaluate, "evaluate_every": 10, "checkpoint_every": 50}
        summary = run(trainer, 100, make_folder(tmp_path / name), stop=look, **how)
        assert summary.step == 100 and seen[100] == seen[20]
        trainer.source.close()
        return held()

    before = held()
    first = a_run("first")  # of its own multiprocessing keeps a pipe to its resource tracker, and memory to share again
    assert first[1:] == before[1:]
    assert a_run("second") == first


def test_nothing_can_be_asked_of_a_source_that_is_closed():
    trainer = make("tests.faults.envs:Walk")
    trainer.source.close()
    trainer.source.close()
    with pytest.raises(EnvError, match="Walk: the fleet is closed"):
        trainer.step()
