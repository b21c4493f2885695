"""The pool outlives whatever a call does."""

import os
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from grpo.run.guard import unguarded_script
from grpo.workers import Feed, Pool
from tests.faults import calls

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pool():
    with Pool(calls.behave, workers=2, timeout=1.5) as made:
        yield made


@pytest.mark.parametrize(
    "what, error",
    [
        ("raises", "behave: ValueError: no such reward"),
        ("exits", "behave: SystemExit: 0"),
        ("interrupt", "behave: KeyboardInterrupt"),
        ("ends", "behave: its process died (exit code 3)"),
        ("killed", "behave: its process died (exit code -9)"),
        ("unsendable", "behave: its value cannot be sent"),
        ("unheard of", "behave: KeyError"),
    ],
)
def test_a_failure_is_data_that_names_the_function(what, error, pool):
    first, bad, last = pool.map(["pid", what, "pid"])
    assert first.ok and last.ok
    assert not bad.ok and bad.value is None
    assert bad.error.startswith(error)


def test_hangs_are_killed_and_cost_only_themselves(pool):
    """Asleep, busy, deaf to SIGTERM, inside C with the interpreter locked: two at a time."""
    items = ["sleeps", "pid", "spins", "deaf", "pid", "stuck in C"]
    outcomes = pool.map(items)
    assert [outcome.ok for outcome in outcomes] == [False, True, False, False, True, False]
    assert {o.error for o in outcomes if not o.ok} == {"behave: no answer in 1.5 s, killed"}


@contextmanager
def frozen(worker):
    """Its process stands still; not for ever, should nobody replace it."""
    pid = worker._process.pid
    thaw = threading.Timer(20, os.kill, (pid, signal.SIGCONT))
    os.kill(pid, signal.SIGSTOP)
    thaw.start()
    yield
    assert thaw.is_alive(), "it was waited for until it moved again by itself"
    thaw.cancel()


def test_a_worker_frozen_between_calls_is_replaced(pool):
    """An argument that fits no pipe would wait for it for ever."""
    assert all(outcome.ok for outcome in pool.map(["pid", "pid"]))  # both are up
    with frozen(pool._workers[-1]):
        assert pool.map(["x" * 10**6])[0].error == "behave: no answer in 1.5 s, killed"
    assert all(outcome.ok for outcome in pool.map(["pid", "pid"]))


def test_what_a_call_prints_is_not_its_failure(pool):
    assert pool.map(["prints to nobody"])[0].ok


def test_values_come_in_order_and_whole(pool):
    outcomes = pool.map(["big", "odd text", "big"])
    assert [len(outcome.value) for outcome in outcomes] == [3_000_000, 7, 3_000_000]
    assert pool.map([]) == []


def test_items_that_come_later_are_taken_by_whoever_is_free(pool):
    """Fed from here while a thread runs it; the seeds are the item's own, not its position's."""
    with closing(Feed()) as feed, ThreadPoolExecutor(1) as thread:
        running = thread.submit(pool.run, feed)
        for item, seed in [("sleeps", "a"), ("draw", "b"), ("raises", "c"), ("draw", "b")]:
            feed.put(item, seed)
        feed.end()
        asleep, first, bad, second = running.result()
    assert "killed" in asleep.error and "no such reward" in bad.error
    assert first.value == second.value != pool.map(["draw"], seed="b")[0].value


def test_a_feed_that_is_dropped_ends_at_once_and_leaves_the_pool_in_order():
    with Pool(calls.behave, workers=1, timeout=1000) as pool:
        with closing(Feed()) as feed, ThreadPoolExecutor(1) as thread:
            running = thread.submit(pool.run, feed)
            feed.put("sleeps", "a")
            feed.put("pid", "b")
            feed.drop()
            assert running.result() == []
        assert pool.map(["where"])[0].value == (os.getcwd(), os.environ.get("MOVED"))


def test_more_items_than_a_bell_can_ring_for():
    """Its pipe holds 65,536 rings; nobody listens yet."""
    with closing(Feed()) as feed:
        for number in range(70_000):
            feed.put(number, "")
        assert len(feed.items) == 70_000


def test_what_a_call_changes_ends_with_it(pool):
    here = (os.getcwd(), os.environ.get("MOVED"))
    assert [outcome.value for outcome in pool.map(["moves", "moves"] + ["where"] * 4)][2:] == [here] * 4
    assert (os.getcwd(), os.environ.get("MOVED")) == here


def test_a_worker_whose_python_was_patched_is_replaced():
    with Pool(calls.behave, workers=1, timeout=30) as pool:
        before, patched, after, same = pool.map(["pid", "patches", "pid", "pid"])
    assert (patched.value, patched.changed) == (2, "builtins.all")
    assert before.value != after.value == same.value
    assert before.changed == after.changed == ""


def test_draws_depend_on_seed_and_position_only(pool):
    draws = [[outcome.value for outcome in pool.map(["draw"] * 6, seed=seed)] for seed in ("1", "1", "2")]
    assert draws[0] == draws[1]
    assert len({*draws[0], *draws[2]}) == 12


def test_arguments_are_not_changed_and_bad_ones_are_data():
    with Pool(calls.clear, workers=1, timeout=30) as pool:
        given = [[1, 2], lambda: None, [3], calls.Unreadable()]
        outcomes = pool.map(given)
    assert given[0] == [1, 2]
    assert [outcome.ok for outcome in outcomes] == [True, False, True, False]
    assert "argument cannot be sent" in outcomes[1].error
    assert "argument cannot be read" in outcomes[3].error


def test_a_value_that_cannot_be_read_is_data():
    with Pool(calls.give_unreadable, workers=1, timeout=30) as pool:
        assert "value cannot be read" in pool.map([1])[0].error


def test_what_cannot_be_sent_runs_here_with_one_warning():
    with pytest.warns(UserWarning, match="lambda.*cannot run in another process.*without a time limit"):
        pool = Pool(lambda x: 1 // x)
    with pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pool.inline
        good, bad = pool.map([1, 0])
    assert good.value == 1
    assert "ZeroDivisionError" in bad.error


def test_a_function_only_this_process_knows_runs_here(monkeypatch):
    """As in a notebook: found by name over here, not over there."""
    made_up = type(calls)("made_up")

    def score(x):
        return x + 1

    score.__module__, score.__qualname__, made_up.score = "made_up", "score", score
    monkeypatch.setitem(sys.modules, "made_up", made_up)
    with pytest.warns(UserWarning, match="score cannot run in another process"):
        pool = Pool(score, workers=1)
    assert [outcome.value for outcome in pool.map([1, 2])] == [2, 3]


def test_close_leaves_no_process():
    pool = Pool(calls.behave, workers=2, timeout=30)
    pids = {outcome.value for outcome in pool.map(["pid"] * 8)}
    pool.close()
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="closed"):
        pool.map(["pid"])


SCRIPT = """
import sys
from grpo.workers import Pool
from tests.faults import calls
if __name__ == "__main__":
    pool = Pool(calls.behave, workers=1, timeout={timeout})
    print(pool.map(["pid"])[0].value, flush=True)
    {then}
"""


@pytest.mark.parametrize(
    "timeout, then",
    [(60, "pass"), (5, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")],
    ids=["exit", "kill -9"],
)
def test_workers_end_with_their_parent(timeout, then, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(timeout=timeout, then=then))
    gone(run_script(script)[1])


def test_a_busy_worker_ends_itself_when_its_parent_is_gone(tmp_path):
    """Inside C, where no Python runs: the limit is kept by a thread that needs none."""
    script = tmp_path / "script.py"
    script.write_text(
        "import grpo.workers as w, os, signal, threading\n"
        "from tests.faults import calls\n"
        "if __name__ == '__main__':\n"
        "    w.ORPHAN_GRACE = 0.2\n"
        "    pool = w.Pool(calls.behave, workers=1, timeout=3)\n"
        "    print(pool.map(['pid'])[0].value, flush=True)\n"
        "    pool._workers[0].ask('stuck in C', '0')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    code, worker = run_script(script)
    assert code == -signal.SIGKILL
    gone(worker)


def test_a_kill_reaches_what_the_call_started(tmp_path):
    with Pool(calls.starts_another, workers=1, timeout=4) as pool:
        assert "killed" in pool.map([str(tmp_path / "pid")])[0].error
        gone(int((tmp_path / "pid").read_text()))


def run_script(script):
    """Its exit code and the number it prints; through a file, which an orphan cannot keep us waiting for."""
    with (script.parent / "printed").open("w+") as printed:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        code = subprocess.run([sys.executable, script], stdout=printed, env=environment, timeout=300).returncode
        printed.seek(0)
        return code, int(printed.read())


def gone(pid):
    """Wait until no such process runs (a zombie that nobody collects counts as gone)."""
    for _ in range(1200):
        try:
            if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")


def test_a_program_without_the_usual_guard_is_not_run_again_by_workers(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("trainer.train()\n")
    main = types.ModuleType("__main__")
    main.__file__, main.__spec__ = str(script), None
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.warns(UserWarning, match=r"would run all of script\.py; put its work under"), Pool(len, 2) as pool:
        assert pool.inline and [outcome.value for outcome in pool.map(["ab", "c"])] == [2, 1]
    script.write_text("if __name__ == '__main__':\n    trainer.train()\n")
    assert unguarded_script() is None
