"""Fleets outlive whatever an environment does; only the member that did it is concerned."""

import gc
import os
import re
import signal
import sys
import threading
import tracemalloc
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from grpo.envs.fleet import EnvError, Snapshot
from grpo.envs.make import DEFAULT_HORIZON, EnvFactory, make_fleet
from grpo.envs.processes import ProcessFleet
from grpo.envs.serial import SerialFleet
from grpo.envs.video import frames_of
from grpo.run.signals import StopSignals
from tests.faults import envs
from tests.faults.test_workers import frozen, gone, run_script

UNRULY = EnvFactory(envs.Unruly)
ANSWERS = {
    "raises": "ValueError: no such state",
    "exits": "SystemExit: 1",
    "NaN observation": "observation is not finite: nan",
    "infinite observation": "observation is not finite: -inf",
    "too large for its type": "observation is not finite: inf",
    "wrong shape": "observation has shape (3, 1), its space (3,)",
    "wrong type": "observation is <U4, its space float32",
    "no observation": "observation has shape (), its space (3,)",
    "NaN reward": "reward is nan, not a finite number",
    "infinite reward": "reward is inf, not a finite number",
    "large reward": "reward is 1e+39, which float32 cannot hold; scale it",
    "long reward": "reward is a int, not a finite number",
    "many rewards": "reward is array([0., 0., 0.]), not a finite number",
    "no reward": "reward is None, not a finite number",
    "odd end": "terminated is 'yes', not True or False",
    "odd info": "info is a NoneType, not a dict",
    "old interface": "ValueError: not enough values to unpack (expected 5, got 4)",  # says the wrapper
    "grows": "observation has shape (5,), its space (3,)",
}


def walk(fleet, seeds, steps, members=None):
    """Observations and errors of every step from these seeds on; an error ends a member."""
    members = list(range(len(seeds)) if members is None else members)
    begun = fleet.reset(members, seeds)
    seen, errors = [begun.observation], dict(begun.errors)
    for _ in range(steps):
        stepped = fleet.step(members, np.ones(len(members), int))
        seen.append(stepped.observation)
        for at, text in stepped.errors.items():
            errors.setdefault(at, text)
            assert not stepped.observation[at].any() and not stepped.reward_M[at]
            assert not stepped.terminated_M[at] and not stepped.truncated_M[at]
    return np.array(seen), {at: unplaced(text) for at, text in errors.items()}


def unplaced(text):
    """What an environment raised names its file and line, which are its own."""
    said, place, _ = text.partition(f" ({envs.__file__}:")
    assert bool(place) == any(name in text for name in ("no such state", "SystemExit", "KeyboardInterrupt", "made"))
    return said


@pytest.fixture(scope="module")
def well_behaved():
    """Four members of one class whose seeds mean nothing to it."""
    return walk(SerialFleet(EnvFactory(envs.Walk), 4), [1, 2, 3, 4], 5)[0]


@pytest.fixture(scope="module")
def processes():
    fleet = ProcessFleet(UNRULY, 4, workers=2, timeout=2)
    yield fleet
    fleet.close()


@pytest.mark.parametrize("deed", ANSWERS)
def test_a_deed_costs_its_member_the_episode_and_nothing_else(deed, well_behaved):
    fleet = SerialFleet(UNRULY, 4)
    seen, errors = walk(fleet, [1, envs.SEEDS[deed], 3, 4], 5)
    assert errors == {1: f"Unruly member 1, step {envs.STEP}: {ANSWERS[deed]}"}
    np.testing.assert_array_equal(np.delete(seen, 1, 1), np.delete(well_behaved, 1, 1))
    stepped = fleet.step([1], [0])
    assert stepped.errors == {0: "Unruly member 1: it failed; reset it first"}
    again, errors = walk(fleet, [2], 5, members=[1])
    assert not errors
    np.testing.assert_array_equal(again[:, 0], well_behaved[:, 1])


def test_terminated_and_truncated_together_count_as_terminated():
    fleet = SerialFleet(UNRULY, 1)
    fleet.reset([0], [envs.SEEDS["both ends"]])
    for _ in range(envs.STEP):
        stepped = fleet.step([0], [0])
    assert (stepped.terminated_M[0], stepped.truncated_M[0]) == (True, False)


@pytest.mark.parametrize("action", [-1, 2, 10**9])
def test_an_action_out_of_range_reaches_no_environment(action):
    fleet = SerialFleet(UNRULY, 2)
    fleet.reset([0, 1], [1, 2])
    stepped = fleet.step([0, 1], [action, 1])
    assert stepped.errors == {0: f"Unruly member 0, step 1: action {action} is not in Discrete(2)"}
    assert stepped.observation[1].any()
    assert not fleet.reset([0], [1]).errors and not fleet.step([0], [1]).errors


@pytest.mark.parametrize("actions", [[0.5, 1.0], [[0, 1]], [0], ["up", "down"]])
def test_actions_of_another_kind_are_the_callers_mistake(actions):
    fleet = SerialFleet(UNRULY, 2)
    fleet.reset([0, 1], [1, 2])
    with pytest.raises(EnvError, match=r"Unruly: 2 actions of shape \(\) and type int64 are needed"):
        fleet.step([0, 1], actions)


@pytest.mark.parametrize(
    "deed, error",
    [
        ("dies", "its process died (exit code -9); started again"),
        ("leaves", "its process died (exit code 3); started again"),
        ("sleeps", "hung for 2 s; killed and started again"),
        ("spins", "hung for 2 s; killed and started again"),
    ],
)
def test_a_lost_worker_is_replaced_and_the_others_are_heard(deed, error, processes, well_behaved):
    """Members 1 and 3 share a worker: the innocent one learns who cost it its episode."""
    seen, errors = walk(processes, [1, envs.SEEDS[deed], 3, 4], 5)
    cause = f"member 1 (worker 1), step {envs.STEP}: {error}"
    assert errors == {1: f"Unruly {cause}", 3: f"Unruly member 3 was lost with its worker ({cause})"}
    np.testing.assert_array_equal(seen[:, ::2], well_behaved[:, ::2])
    assert processes.step([3], [0]).errors[0].endswith("; reset it first")
    with pytest.raises(EnvError, match="member 3 was lost"):
        processes.snapshot([3])
    seen, errors = walk(processes, [1, 2, 3, 4], 5)
    assert not errors
    np.testing.assert_array_equal(seen, well_behaved)


def test_what_raises_in_a_worker_costs_no_worker(processes, well_behaved):
    pids = [worker._process.pid for worker in processes._workers]
    seen, errors = walk(processes, [1, envs.SEEDS["raises"], 3, 4], 5)
    assert errors == {1: f"Unruly member 1, step {envs.STEP}: ValueError: no such state"}
    np.testing.assert_array_equal(seen[:, [0, 2, 3]], well_behaved[:, [0, 2, 3]])
    assert [worker._process.pid for worker in processes._workers] == pids


def test_a_keyboard_interrupt_of_its_own_is_a_failure_like_any_other(processes, well_behaved):
    """In a worker, which no Ctrl-C reaches, and in this process while a run listens for one."""
    for fleet in (processes, SerialFleet(UNRULY, 4)):
        with StopSignals() as asked:
            try:
                seen, errors = walk(fleet, [1, envs.SEEDS["interrupts"], 3, 4], 5)
            except KeyboardInterrupt:
                pytest.fail("it was taken for a person's")
            assert errors == {1: f"Unruly member 1, step {envs.STEP}: KeyboardInterrupt"}
            np.testing.assert_array_equal(np.delete(seen, 1, 1), np.delete(well_behaved, 1, 1))
            assert asked.reason is None
    with pytest.raises(KeyboardInterrupt):  # nobody listens: it may be a person's
        walk(SerialFleet(UNRULY, 1), [envs.SEEDS["interrupts"]], 5)


def test_a_second_ctrl_c_gets_past_an_environment():
    fleet = SerialFleet(EnvFactory(envs.Walk), 1)
    with StopSignals(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        with mock.patch.object(envs.Walk, "reset", lambda self, **_: os.kill(os.getpid(), signal.SIGINT)):
            fleet.reset([0], [1])


def test_drawing_and_closing_that_hang_are_given_up(monkeypatch):
    monkeypatch.setattr("grpo.envs.video.RENDER_TIMEOUT", 0.1)
    monkeypatch.setattr("grpo.envs.serial.CLOSE_TIMEOUT", 0.1)
    stuck = envs.Stuck(render_mode="rgb_array")
    with pytest.raises(EnvError, match=r"Stuck cannot be drawn \(TimeoutError: render\(\) did not end in 0.1 s\)"):
        frames_of(stuck)
    with pytest.warns(UserWarning, match=r"Stuck: 2 of 2 environments did not close in 0.1 s and are left as they are"):
        SerialFleet([stuck, envs.Stuck()]).close()


def test_a_frozen_worker_is_replaced_whatever_is_sent_to_it(processes):
    assert not walk(processes, [1, 2, 3, 4], 1)[1]
    long = Snapshot(1, np.ones(10**6, int))  # more than a pipe holds
    with frozen(processes._workers[0]):
        begun = processes.restore([0, 1], [long, Snapshot(1, np.ones(1, int))])
    assert set(begun.errors) == {0}
    assert "hung for 2 s; killed and started again" in begun.errors[0]
    assert not walk(processes, [1, 2, 3, 4], 1)[1]


def test_a_worker_that_dies_while_idle_is_noticed(processes):
    assert not walk(processes, [1, 2, 3, 4], 1)[1]
    os.kill(processes._workers[0]._process.pid, signal.SIGKILL)
    stepped = processes.step([0, 1, 2, 3], [1, 1, 1, 1])
    assert set(stepped.errors) == {0, 2}
    assert "member 0 (worker 0): its process died (exit code -9)" in stepped.errors[0]
    assert not walk(processes, [1, 2, 3, 4], 1)[1]


def test_a_long_replay_is_not_a_hang():
    fleet = ProcessFleet(EnvFactory(envs.Slow), 1, workers=1, timeout=1.5)
    begun = fleet.restore([0], [Snapshot(1, np.ones(7, int))])
    assert not begun.errors
    np.testing.assert_array_equal(begun.observation[0], walk(SerialFleet(EnvFactory(envs.Walk), 1), [1], 7)[0][-1, 0])
    fleet.close()


def test_a_kill_reaches_what_an_environment_started_and_close_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("UNRULY_STARTED", str(tmp_path / "pid"))
    fleet = ProcessFleet(UNRULY, 2, workers=2, timeout=2)
    assert 0 in walk(fleet, [envs.SEEDS["starts another"], 2], 3)[1]
    gone(int((tmp_path / "pid").read_text()))
    pids = [worker._process.pid for worker in fleet._workers]
    fleet.close()
    fleet.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(EnvError, match="Unruly: the fleet is closed"):
        fleet.reset([0], [1])


SCRIPT = """
import grpo.workers, os, signal
from grpo.envs import processes
from grpo.envs.make import EnvFactory
from tests.faults import envs
if __name__ == "__main__":
    grpo.workers.ORPHAN_GRACE = 0.2
    fleet = processes.ProcessFleet(EnvFactory(envs.Unruly), 1, workers=1, timeout=0.5)
    print(fleet._workers[0]._process.pid, flush=True)
    fleet.reset([0], [envs.SEEDS["spins"]])
    {then}
"""
ORPHANED = """
    fleet.step([0], [0]), fleet.step([0], [0])
    fleet._workers[0].ask(("step", ([0], [0])), "")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("then", ["pass", ORPHANED.strip()], ids=["at exit", "orphaned while it spins"])
def test_workers_end_with_their_parent(then, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(then=then))
    gone(run_script(script)[1])


def test_one_that_dies_as_it_is_made_is_refused():
    with pytest.raises(EnvError, match=r"Shy member 0 \(worker 0\): its process died \(exit code -9\)"):
        ProcessFleet(EnvFactory(envs.Shy), 1, workers=1)


def test_a_worker_that_cannot_make_any_is_an_error_of_its_members(tmp_path, monkeypatch):
    monkeypatch.setenv("ONLY_ONCE", str(tmp_path / "made"))
    fleet = ProcessFleet(EnvFactory(envs.Once), 2, workers=2)
    begun = fleet.reset([0, 1], [1, 2])
    assert begun.observation[0].any()
    said = {at: unplaced(text) for at, text in begun.errors.items()}
    assert said == {1: "Once member 1 (worker 1): Once cannot be made: FileExistsError: made already"}
    fleet.close()


def test_a_member_that_cannot_be_made_is_an_error_of_its_reset(monkeypatch):
    monkeypatch.setattr(envs.Strict, "made", 0)
    begun = SerialFleet(EnvFactory(envs.Strict), 3).reset([0, 1, 2], [1, 2, 3])
    assert set(begun.errors) == {2}
    assert re.fullmatch(r"Strict member 2, its making: .*RuntimeError: enough of these", unplaced(begun.errors[2]))
    assert begun.observation[0].any() and not begun.observation[2].any()


@pytest.mark.parametrize(
    "env, message",
    [
        (envs.Old, r"Old member 0, reset: reset\(\) gave a ndarray, not \(observation, info\)"),
        (
            envs.Older,
            r"Older member 0, step 1: .*; step\(\) must give \(observation, reward, terminated, truncated, info",
        ),
        (envs.Wordy, "Wordy: no part of its observation space Text.* is numbers"),
        (envs.Undecided, "Undecided: its action space Dict.* is not supported; wrap it into Discrete"),
        (lambda: "no environment", "makes a str, not a gymnasium.Env"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(env, message):
    with pytest.raises(EnvError, match=message):
        make_fleet(env, 2, kind="serial")


def test_a_reset_that_ignores_its_seed_is_remarked_and_never_branched():
    with pytest.warns(UserWarning, match="Forgetful: two resets with one seed began differently"):
        fleet = make_fleet(envs.Forgetful, 2, kind="serial")
    fleet.reset([0], [1])
    for _ in range(2):  # found out once, said each time
        with pytest.raises(EnvError, match="Forgetful cannot be branched: it does not repeat itself: with seed"):
            fleet.snapshot([0])


def test_every_episode_ends():
    fleet = make_fleet(envs.Endless, 1, kind="serial")
    assert fleet.horizon == DEFAULT_HORIZON
    fleet.reset([0], [1])
    ends = [fleet.step([0], [1]).truncated_M[0] for _ in range(DEFAULT_HORIZON)]
    assert ends == [False] * (DEFAULT_HORIZON - 1) + [True]


def test_episodes_of_one_step_are_episodes():
    fleet = make_fleet(envs.Brief, 2, kind="serial")
    for _ in range(3):
        assert not fleet.reset([0, 1], [1, 2]).errors
        stepped = fleet.step([0, 1], [1, 1])
        assert stepped.terminated_M.all() and not stepped.errors
    assert set(fleet.step([0], [1]).errors) == {0}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts what Linux lists")
def test_a_thousand_resets_and_failures_leave_nothing_behind():
    def held():
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), children

    fleet = SerialFleet(UNRULY, 2)
    walk(fleet, [envs.SEEDS["raises"], 1], 4)
    before = held()
    tracemalloc.start()
    for i in range(1000):
        if i == 100:  # as much as it will ever hold
            gc.collect()
            traced = tracemalloc.get_traced_memory()[0]
        fleet.reset([0, 1], [envs.SEEDS["raises"] if i % 10 == 0 else i, i])
        if i % 10 == 0:
            for _ in range(envs.STEP):
                fleet.step([0], [0])
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - traced
    tracemalloc.stop()
    assert grown < 40_000  # of 900 resets, not one kept fifty bytes
    fleet.close()
    assert held() == before


def test_an_interrupted_call_leaves_no_answer_for_the_next(processes, well_behaved, monkeypatch):
    assert not walk(processes, [1, 2, 3, 4], 1)[1]

    def interrupt(busy):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("grpo.envs.processes.finished", interrupt)
        with pytest.raises(KeyboardInterrupt):
            processes.step([0], [0])
    errors = processes.step([0, 1], [1, 1]).errors
    assert set(errors) == {0} and "interrupted; started again" in errors[0]
    seen, errors = walk(processes, [1, 2, 3, 4], 5)
    assert not errors
    np.testing.assert_array_equal(seen, well_behaved)


def test_a_step_that_was_begun_and_never_heard_leaves_no_answer_for_the_next(processes, well_behaved):
    assert not walk(processes, [1, 2, 3, 4], 1)[1]
    processes.send([0], [0])  # whoever sent it was interrupted before it was heard
    errors = processes.step([0, 1], [1, 1]).errors
    assert set(errors) == {0} and "interrupted; started again" in errors[0]
    seen, errors = walk(processes, [1, 2, 3, 4], 5)
    assert not errors
    np.testing.assert_array_equal(seen, well_behaved)


def test_a_class_only_this_process_knows_runs_here(monkeypatch):
    """As in a notebook: found by name over here, not over there."""

    class Walk(envs.Walk):
        pass

    made_up = type(envs)("made_up")
    Walk.__module__, Walk.__qualname__, made_up.Walk = "made_up", "Walk", Walk
    monkeypatch.setitem(sys.modules, "made_up", made_up)
    with pytest.warns(UserWarning, match="Walk cannot run in other processes"):
        fleet = make_fleet(Walk, 1)
    assert type(fleet) is SerialFleet


def test_an_unguarded_script_is_not_run_again(tmp_path, monkeypatch):
    script = tmp_path / "mine.py"
    script.write_text("open('ran', 'a').write('x')")
    main = type(sys)("__main__")
    main.__file__, main.__spec__ = str(script), None
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="Walk cannot run in other processes and runs in this one.*mine.py") as warned:
        fleet = make_fleet(envs.Walk, 2)
    assert type(fleet) is SerialFleet and len(warned) == 1 and "if __name__" in str(warned[0].message)
    assert not (tmp_path / "ran").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once, although a run makes several fleets
        make_fleet(envs.Walk, 2)
    with pytest.raises(EnvError, match="use vector='serial'"):
        make_fleet(envs.Walk, 2, kind="processes")
