"""Actors of a Ray cluster: the same numbers as in this process, whatever becomes of an actor; one cluster for all."""

import os
import signal
import socket
from pathlib import Path

import numpy as np
import pytest

from grpo import cluster
from grpo.config import ConfigError
from grpo.control import ControlConfig, GRPOTrainer
from grpo.envs.fleet import EnvError, Stepped
from grpo.envs.make import make_fleet
from grpo.envs.ray_fleet import RayFleet
from grpo.envs.serial import SerialFleet
from grpo.language.rewards import Rewards
from grpo.language.turns import hosts
from grpo.language.turns.tools import Call, Toolbox
from tests.extras import needs_ray
from tests.faults.ray_envs import Forgetful, Walk, double, longer
from tests.unit.language.slow_envs import Plain, Trouble
from tests.unit.language.test_slow_turns import play as play_slowly


@pytest.fixture(scope="module")
def ray():
    """A cluster of this machine, which outlives the fleets of the tests."""
    found = cluster.join()
    yield found
    cluster.leave()
    assert not found.is_initialized(), "the last to leave ends it"


def kill(ray, fleet, w):
    """As a machine that goes away: nobody is told."""
    process = ray.get(fleet._actors[w].__ray_call__.remote(lambda actor: os.getpid()))
    os.kill(process, signal.SIGKILL)


def play(fleet, actions, before=lambda step: None):
    """Rows of everything that was seen, over three resets."""
    rows = [fleet.reset(range(fleet.size), [3, 3, 4, 5])]
    for step, action_M in enumerate(actions):
        before(step)
        rows.append(fleet.step(range(fleet.size), np.array(action_M)))
    return rows


def equal(one, other):
    for a, b in zip(one, other, strict=True):
        assert dict(a.errors) == dict(b.errors)
        assert a.observation.tobytes() == b.observation.tobytes()
        if isinstance(a, Stepped):
            assert all((getattr(a, k) == getattr(b, k)).all() for k in ("reward_M", "terminated_M", "truncated_M"))


@needs_ray
def test_cartpole_over_two_actors_is_the_run_of_this_process_bit_for_bit(ray):
    def learned(**how):
        config = ControlConfig(env="CartPole-v1", seed=3, groups_per_step=1, group_size=4, hidden=(8,), **how)
        trainer = GRPOTrainer(config=config)
        try:
            reports = [dict(trainer.step()) for _ in range(2)]
            return reports, {name: w.detach().numpy().tobytes() for name, w in trainer.policy.parameters().items()}
        finally:
            trainer.source.close()

    assert learned(workers="ray:2") == learned(vector="serial")


@needs_ray
def test_an_actor_that_is_killed_at_any_point_costs_no_episode(ray):
    actions = [[1, 2, 3, 4]] * 5
    expected = play(SerialFleet(Walk, 4), actions)
    fleet = RayFleet(Walk, 4, "ray:2")
    kill(ray, fleet, 0)  # before the reset; then both in the middle of their episodes
    equal(
        play(fleet, actions, lambda step: [kill(ray, fleet, w) for w in {0: [0], 2: [0, 1], 4: [1]}.get(step, [])]),
        expected,
    )
    fleet.close()


@needs_ray
@pytest.mark.slow
def test_one_that_dies_in_a_step_is_asked_again_and_one_that_always_does_is_named(ray, tmp_path):
    fleet = make_fleet(lambda: Walk(str(tmp_path)), 4, workers="ray:2", timeout=3)
    # Member 1 takes its actor down once, as a machine would: nothing is lost. The factory is a lambda: Ray sends it.
    once = [[1, 1, 1, 1], [1, 6, 1, 1], [1, 1, 1, 1]]
    (tmp_path / "died").touch()
    expected = play(SerialFleet(lambda: Walk(str(tmp_path)), 4), once)
    (tmp_path / "died").unlink()
    equal(play(fleet, once), expected)
    # Member 0 always does: it alone is told of; member 2, of the same actor, goes on where it was.
    died = play(fleet, [[1, 1, 1, 1], [9, 1, 1, 1], [1, 1, 1, 1]])
    assert list(died[2].errors) == [0] and "member 0 (actor 0): its process died" in died[2].errors[0]
    assert list(died[3].errors) == [0] and "reset it first" in died[3].errors[0]
    assert died[3].observation[1:].tobytes() == expected[3].observation[1:].tobytes()
    # One that hangs is killed; one that raises is told of as ever; both are fit again after a reset.
    stuck = play(fleet, [[1, 1, 1, 1], [8, 7, 1, 1]])
    assert "hung for 3 s" in stuck[2].errors[0] and "it does not like 7" in stuck[2].errors[1]
    equal(play(fleet, once), expected)
    fleet.close()


@needs_ray
@pytest.mark.slow
def test_an_episode_that_goes_otherwise_the_second_time_is_an_error_that_says_so(ray):
    fleet = RayFleet(Forgetful(), 4, "ray:2")
    rows = play(fleet, [[1] * 4] * 2, lambda step: step == 1 and kill(ray, fleet, 0))
    assert sorted(rows[2].errors) == [0, 2] and "its episode went otherwise" in rows[2].errors[0]
    fleet.close()


@needs_ray
@pytest.mark.slow
def test_a_pool_of_actors_makes_calls_in_their_order_and_its_failures_are_data(ray):
    with cluster.RayPool(double, "ray:2", timeout=2) as pool:
        found = pool.map([1, 13, 2, 14, 3, 15, 4])
    assert [outcome.value for outcome in found] == [2, None, 4, None, 6, None, 8]
    assert "died twice" in found[1].error and "no answer in 2 s" in found[3].error and "not 15" in found[5].error


@needs_ray
@pytest.mark.slow
def test_conversations_in_actors_are_those_of_this_process_and_none_is_lost_with_an_actor(ray, tmp_path):
    where = [str(tmp_path / "first"), str(tmp_path / "second"), "x", "x"]
    for place in where[:2]:
        Path(place).touch()
    expected, _ = play_slowly(Plain, where, count=2)
    for place in where[:2]:
        Path(place).unlink()
    found, _ = play_slowly(Plain, where, count=2, workers="ray:2", timeout=20)  # two of them take their actor down
    assert [(s.ids.tolist(), s.reward, s.error, s.messages) for s in found] == [
        (s.ids.tolist(), s.reward, s.error, s.messages) for s in expected
    ]
    broken, _ = play_slowly(Plain, ["x", "dies", "x", "hangs"], workers="ray:2", timeout=2)
    assert [s.reward for s in broken] == [3.0, None, 3.0, None]
    assert "its process died" in broken[1].error and "no answer in 2 s" in broken[3].error


@needs_ray
@pytest.mark.slow
def test_an_async_environment_that_holds_its_actors_loop_fails_alone(ray, monkeypatch):
    monkeypatch.setattr(hosts, "GRACE", 0.5)
    found, _ = play_slowly(Trouble, ["x", "holds for ever"], workers="ray:2", timeout=1)
    assert found[0].reward == 3.0 and "its process died" in found[1].error


@needs_ray
@pytest.mark.slow
def test_an_actor_for_which_there_is_no_room_is_not_waited_for_without_end(ray, monkeypatch):
    monkeypatch.setattr(cluster, "START_TIMEOUT", 3.0)
    blocker = ray.remote(num_cpus=cluster.cluster_processors())(Walk).remote()
    ray.get(blocker.__ray_ready__.remote())
    try:
        with pytest.raises(ConfigError, match=r"workers=ray:2: no answer in 3 s; has the cluster room for it"):
            play_slowly(Plain, ["x"], workers="ray:2")
        with pytest.raises(EnvError, match=r"Walk: actor 0 cannot be started: no answer in 3 s; has the cluster room"):
            RayFleet(Walk, 4, "ray:2")
    finally:
        ray.kill(blocker)


@needs_ray
@pytest.mark.slow
def test_rewards_and_tools_run_in_the_same_cluster(ray):
    with Rewards([longer], cluster="ray:2") as rewards:
        samples, _ = play_slowly(Plain, ["x", "y"])
        assert rewards.judge(samples, step=0).parts_NK.tolist() == [[1.0], [1.0]]
    box = Toolbox([double], workers="ray:2")
    assert [a.text for a in box.run([Call("double", {"item": 4}), Call("double", {"item": 15})])] == [
        "8", "error: ValueError: not 15",
    ]  # fmt: skip
    box.close()


@needs_ray
def test_a_cluster_of_our_own_is_closed_to_others(ray):
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64
    nodes = ray.nodes()
    assert [node["NodeManagerAddress"] for node in nodes] == ["127.0.0.1"]
    assert cluster.counted("ray:7") == 7 and cluster.counted("ray", most=1) == 1


def test_ray_that_is_missing_or_too_old_is_one_line_with_the_remedy(monkeypatch):
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Ray, which is not installed; pip install 'anygrpo\[ray\]'"):
        make_fleet("CartPole-v1", 2, workers="ray")
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(cluster.importlib.metadata, "version", lambda name: "2.9.1")
    with pytest.raises(ConfigError, match=r"Ray 2.9.1 cannot close a cluster by a token, 2.52 can; pip install"):
        make_fleet("CartPole-v1", 2, workers="ray:2")


def test_what_is_no_number_of_workers_is_refused_and_so_is_a_place_that_cannot_be():
    for wrong in ("rya", "ray:0", 0):
        with pytest.raises(ConfigError, match="workers"):
            ControlConfig(workers=wrong)
    assert ControlConfig(workers="ray", envs=5).num_envs == 5
    with pytest.raises(ConfigError, match="workers has no effect here: it needs vector=auto"):
        ControlConfig(workers="ray", vector="serial")


def test_an_address_at_which_nobody_listens_is_told_at_once(monkeypatch):
    """Ray itself asks there for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
        cluster.expect_reachable(place)
        cluster.expect_reachable("auto")
    monkeypatch.setenv("RAY_ADDRESS", place)
    with pytest.raises(cluster.RayMissing, match=f"no Ray cluster answers at {place} .*ray start --head.*RAY_ADDRESS"):
        cluster._connect(None)


def test_a_cluster_that_somebody_else_started_is_not_joined(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    assert cluster.address() == "10.0.0.1:6379"
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert cluster.address() is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert cluster.address() == "10.0.0.2:6379"
    with pytest.warns(UserWarning, match="RAY_AUTH_MODE=token"):
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
        cluster.warn_if_open("10.0.0.2:6379")
