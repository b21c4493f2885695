"""Ranks that meet, differ, fail, or do not come: as threads of one process, each with its own connection."""

import socket
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from grpo.distributed import meeting as module
from grpo.distributed.facts import contents, settings, versions
from grpo.distributed.meeting import WAITS, Meeting, connected, disagreements, meet, named, shared_gpus
from grpo.distributed.places import Place
from grpo.errors import ConfigError, RanksLost

LONG = 60.0


def met(seconds):
    """Three sides of one store, as `meet` makes them; at whatever port is free."""
    chief = meet(Place(0, 3, 0, 3, "127.0.0.1", 0, "a test"), seconds)
    port = _port([chief])
    return [chief, *(meet(Place(rank, 3, rank, 3, "127.0.0.1", port, "a test"), seconds) for rank in (1, 2))]


@pytest.fixture
def ranks(monkeypatch):
    """Who wait for each other for longer than any machine is busy."""
    monkeypatch.setattr(module, "LINGERS", 0.2)
    return met(LONG)


def at_once(*jobs):
    """What each job returned or raised, side by side."""
    found = [None] * len(jobs)

    def carried(number, job):
        try:
            found[number] = job()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=carried, args=(n, job)) for n, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LONG)
        assert not thread.is_alive()
    return found


def test_the_same_everywhere(ranks):
    found = at_once(*[lambda rank=rank: rank.agree({"seed": "3"}) for rank in ranks])
    assert [card["seed"] for card in found[2]] == ["3", "3", "3"] and found[0] == found[1] == found[2]


def test_what_differs_is_named_on_every_rank(ranks):
    rates = ["1e-6", "1e-6", "2e-6"]
    found = at_once(
        *[lambda r=r, x=x: r.agree({"the setting lr": x, "seed": "0"}) for r, x in zip(ranks, rates, strict=True)]
    )
    assert all(isinstance(error, ConfigError) for error in found)
    assert all("the setting lr differs: 1e-6 on ranks 0, 1, 2e-6 on rank 2" in str(error) for error in found)
    assert "seed" not in str(found[0]).replace("the setting", "")


def test_a_rank_that_cannot_start_is_not_waited_for(ranks):
    began = time.monotonic()
    found = at_once(
        lambda: ranks[0].agree({}), lambda: ranks[1].ready("starting"), lambda: ranks[2].excuse("there is no GPU")
    )
    assert [type(error) for error in found[:2]] == [ConfigError, ConfigError]
    assert all("rank 2: there is no GPU" in str(error) for error in found[:2])
    assert time.monotonic() - began < LONG


def test_a_rank_that_does_not_come_is_named():
    ranks = met(2.0)
    found = at_once(lambda: ranks[0].ready("starting"), lambda: ranks[2].ready("starting"))
    assert [type(error) for error in found] == [RanksLost, RanksLost]
    assert "rank 1 of 3 did not come within 2 s" in str(found[0]) and "--rank-timeout" in str(found[0])


@pytest.mark.parametrize(("first", "second"), [((0, 2), (3, 4)), ((1, 4), (1, 2))])
def test_machines_that_count_other_ranks_are_told_so_at_once(monkeypatch, first, second):
    """With other numbers of ranks two machines name the same rank, or wait for one that nobody starts."""
    monkeypatch.setattr(module, "LINGERS", 0.2)
    held = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LONG), wait_for_workers=False)

    def met_as(rank, ranks):
        return meet(Place(rank, ranks, rank, ranks, "127.0.0.1", held.port, "a test", store_runs=True), LONG)

    there, began = met_as(*first), time.monotonic()
    waiting, late = at_once(lambda: there.ready("starting"), lambda: met_as(*second))
    for error in (waiting, late):
        assert isinstance(error, ConfigError), error
        assert f"rank {second[0]} was started as one of {second[1]}, others as one of {first[1]}; start" in str(error)
    assert time.monotonic() - began < LONG


def test_who_is_waited_for_is_read_from_what_ranks_said(ranks):
    ranks[0].say(f"{WAITS}collecting")
    ranks[1].say("past comparing the step")
    ranks[2].say(f"{WAITS}collecting")
    assert ranks[0].blame("collecting") == ("it waited at collecting for rank 1, last seen past comparing the step")
    ranks[1].say(f"{WAITS}collecting")
    assert "the network" in ranks[0].blame("collecting")
    assert ranks[0].blame("collecting", cut=True).startswith("one of them has ended")
    ranks[1].excuse("out of memory")
    assert ranks[2].blame("collecting") == "rank 1: out of memory"


def test_the_chief_is_waited_for_at_the_end(ranks):
    order = []

    def chief():
        time.sleep(0.3)
        order.append("saved")
        ranks[0].end()

    at_once(chief, *[lambda rank=rank: (rank.end(), order.append("left")) for rank in ranks[1:]])
    assert order == ["saved", "left", "left"]


def test_a_port_in_use_and_one_where_something_else_listens(monkeypatch):
    monkeypatch.setattr(module, "ANSWERS", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use.*MASTER_PORT"):
            meet(Place(0, 2, 0, 2, "127.0.0.1", port, "a test"), 1.0)
        over = threading.Event()  # torch waits for an answer that does not come
        monkeypatch.setattr(module, "TCPStore", lambda *given, **named: over.wait())
        with pytest.raises(ConfigError, match=f"another program than rank 0 listens at 127.0.0.1:{port}; set MASTER_P"):
            meet(Place(1, 2, 1, 2, "127.0.0.1", port, "a test"), LONG)  # however long rank 0 would be waited for
        over.set()


def test_where_nobody_listens_one_line_says_so(capfd):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        place = Place(1, 2, 1, 2, "127.0.0.1", free.getsockname()[1], "a test")
        with pytest.raises(
            ConfigError, match=r"rank 1 cannot reach rank 0 at 127\.0\.0\.1.* within 0\.2 s \(.*refused\)"
        ):
            meet(place, 0.2)
        with pytest.raises(ConfigError, match=r"this machine cannot reach rank 0 at 127\.0\.0\.1"):
            connected("this machine", "127.0.0.1", place.port, 0.2)
    assert capfd.readouterr() == ("", "")  # nothing of torch's


def test_who_comes_before_rank_0_waits_for_it():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    early, chief = (Place(rank, 2, rank, 2, "127.0.0.1", port, "a test") for rank in (1, 0))
    there, late = at_once(lambda: meet(early, LONG), lambda: (time.sleep(0.3), meet(chief, LONG))[1])
    assert isinstance(there, Meeting) and isinstance(late, Meeting), (there, late)


def test_a_store_that_is_gone_ends_a_rank():
    class Gone:
        def set(self, *key_and_value):
            raise RuntimeError("connection reset")

        check = add = get = set

    with pytest.raises(RanksLost, match="rank 1 has lost the store"):
        Meeting(Gone(), 1, 2, 1.0).say("collect")
    with pytest.raises(RanksLost, match=r"rank 1 has lost the store.*start again"):
        Meeting(Gone(), 1, 2, 1.0).agree({})
    Meeting(Gone(), 1, 2, 1.0).leave()
    Meeting(Gone(), 1, 2, 1.0).end()


def test_shared_gpus_are_found_by_their_own_numbers():
    cards = [{"host": "a", "gpu": "GPU-1"}, {"host": "a", "gpu": "GPU-2"}, {"host": "b", "gpu": "GPU-1x"}]
    assert shared_gpus(cards) == [] and shared_gpus([{"host": "a", "gpu": ""}] * 2) == []
    (line,) = shared_gpus([*cards, {"host": "a", "gpu": "GPU-2"}])
    assert "ranks 1, 3 share one GPU (GPU-2 on a)" in line and "--shared-gpu" in line


def test_names_of_ranks_stay_short():
    assert named([3]) == "rank 3" and named(range(64)).endswith("7 and 56 more")
    assert disagreements([{"x": "1" * 99, "host": "a"}, {"x": "2", "host": "b"}])[0].count("1") < 62


def test_files_that_settings_name_are_compared(tmp_path):
    data, model = tmp_path / "rows.jsonl", tmp_path / "model"
    model.mkdir()
    data.write_text("{}\n")
    (model / "config.json").write_text("{}")
    code = tmp_path / "mine.py"
    code.write_text("x = 1")
    named = {"dataset": str(data), "model": str(model), "rewards": [f"{code}:f", "xml"], "run.logdir": "x", "seed": 3}
    named |= {"hub_token": "hf_abcdefghijklmnop"}
    before = settings(named)
    assert before["the setting seed"] == "3" and "the setting run.logdir" not in before
    assert "hf_abc" not in str(before)
    for path, key in ((data, "rows.jsonl"), (model / "config.json", "model"), (code, "mine.py")):
        path.write_text(path.read_text() + " ")
        after = settings(named)
        assert [name for name in after if after[name] != before[name]] == [
            name for name in after if key in name and "what" in name
        ]
        before = after
    assert contents(data) != contents(code)
    assert "the version of torch" in versions() and len(versions()["the code of anygrpo"]) == 12


def test_modules_that_settings_name_are_compared_and_not_imported_for_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mazes").mkdir()
    (tmp_path / "mazes" / "__init__.py").write_text("raise SystemExit('nobody asked for this')")
    code, level = tmp_path / "mazes" / "small.py", tmp_path / "level.txt"
    code.write_text("class Maze: ...")
    level.write_text("#")
    named = {
        "env": "mazes.small:Maze",
        "env_kwargs": {"level": str(level)},
        "teacher": "no.such:thing",
        "x": "http://a:b",
    }
    before = settings(named)
    assert {name for name in before if "what" in name} == {
        "what env names (small.py)",
        "what env_kwargs names (level.txt)",
    }
    for path in (code, level):
        path.write_text(path.read_text() + " ")
        after = settings(named)
        assert [name for name in after if after[name] != before[name]] == [name for name in after if path.name in name]
        before = after


def test_torch_has_its_own_part_of_the_store(ranks):
    ranks[0].store.set("phase/1", "not ours")
    assert ranks[0].phases()[1] == "not there yet" and isinstance(ranks[0].store, PrefixStore)
    assert connected("a test", "127.0.0.1", _port(ranks), 2.0) is not None


def _port(ranks):
    return ranks[0].store.underlying_store.underlying_store.port
