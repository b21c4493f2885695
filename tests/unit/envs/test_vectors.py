"""Fleets over batched environments keep what a fleet promises, whatever the batch does by itself."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from grpo.envs.envpool import EnvPoolFleet
from grpo.envs.fleet import EnvError
from grpo.envs.vectors import GymVectorFleet, has_vector_entry_point
from tests.extras import needs_envpool

MODES = {"Next": AutoresetMode.NEXT_STEP, "Same": AutoresetMode.SAME_STEP, "Off": AutoresetMode.DISABLED}


class Line(gym.Env):
    """Starts where the seed says, walks by the action, ends after 1 + seed % 5 steps with success if it went right."""

    observation_space = spaces.Dict({"x": spaces.Box(-np.inf, np.inf, (2,), np.float32)})
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, broken_seed=None, max_episode_steps=None):
        self.broken_seed, self.limit = broken_seed, max_episode_steps

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed = seed if seed is not None else 1000
        self.x, self.t = float(self.np_random.uniform()), 0
        return self._seen(), {}

    def step(self, action):
        self.t += 1
        self.x += float(action[0])
        if self.seed == self.broken_seed:
            self.x = np.nan
        over, cut = self.t > self.seed % 5, self.limit is not None and self.t >= self.limit
        return self._seen(), self.x, over, cut, {"success": self.x > 1} if over else {}

    def _seen(self):
        return {"x": np.array([self.x, self.t], np.float32)}


class DeafLine(SyncVectorEnv):
    """A batch that ignores the mask."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)


class OneSeedLine(SyncVectorEnv):
    """A batch that takes one seed for all."""

    def reset(self, *, seed=None, options=None):
        if isinstance(seed, list):
            raise TypeError("one seed, please")
        return super().reset(seed=seed)


def batch(kind, mode, num_envs, **kwargs):
    return kind([partial(Line, **kwargs)] * num_envs, autoreset_mode=mode)


@pytest.fixture(scope="module", autouse=True)
def registered():
    made = {f"Line{name}-v0": partial(batch, SyncVectorEnv, mode) for name, mode in MODES.items()}
    made |= {"Deaf-v0": partial(batch, DeafLine, AutoresetMode.NEXT_STEP)}
    made |= {"DeafOff-v0": partial(batch, DeafLine, AutoresetMode.DISABLED)}
    made |= {"OneSeed-v0": partial(batch, OneSeedLine, AutoresetMode.NEXT_STEP)}
    for id, entry in made.items():
        gym.register(id, entry_point=Line, vector_entry_point=entry)
    yield
    for id in made:
        del gym.registry[id]


def alone(seed, actions, id="CartPole-v1", **kwargs):
    """The same episode in one environment by itself: what was seen first, then every step's four."""
    env = gym.make(id, **kwargs)
    seen, _ = env.reset(seed=seed)
    steps = []
    for action in actions:
        steps.append(env.step(int(action))[:4])
        if steps[-1][2] or steps[-1][3]:
            break
    return seen, steps


def test_only_registered_batches_that_need_no_jax_count_as_batched():
    assert has_vector_entry_point("CartPole-v1") and has_vector_entry_point("LineNext-v0")
    assert not has_vector_entry_point("Acrobot-v1")
    assert not has_vector_entry_point("phys2d/CartPole-v0")
    assert not has_vector_entry_point("NoSuchEnv-v0")
    with pytest.raises(EnvError, match=r"Acrobot-v1.*vector='serial'"):
        GymVectorFleet("Acrobot-v1", 2)


def test_cartpole_in_a_batch_is_cartpole_alone_though_members_end_and_begin_at_different_times():
    random, fleet, seed = np.random.default_rng(0), GymVectorFleet("CartPole-v1", 5, horizon=40), 0
    assert (fleet.horizon, fleet.size, fleet.action_space) == (40, 5, spaces.Discrete(2))
    seeds, actions, steps, first, finished = {}, {}, {}, {}, []
    for _ in range(300):
        idle = [m for m in range(5) if m not in seeds]
        if idle:
            begun = fleet.reset(idle, range(seed, seed + len(idle)))
            for p, m in enumerate(idle):
                seeds[m], actions[m], steps[m], first[m] = seed + p, [], [], begun.observation[p]
            seed += len(idle)
        members = random.permutation(5)[: random.integers(1, 6)]
        # A pole that leans right is pushed right, mostly: some episodes reach the horizon, some fall.
        action_M = random.integers(2, size=len(members))
        for p, m in enumerate(members):
            last = steps[m][-1][0] if steps[m] else first[m]
            if m < 3:
                action_M[p] = last[2] + 0.5 * last[3] > 0
        stepped = fleet.step(members, action_M)
        assert not stepped.errors and stepped.success_M is None
        for p, m in enumerate(members):
            fields = (stepped.observation, stepped.reward_M, stepped.terminated_M, stepped.truncated_M)
            actions[m].append(action_M[p])
            steps[m].append(tuple(field[p] for field in fields))
            if steps[m][-1][2] or steps[m][-1][3]:
                finished.append((seeds.pop(m), actions.pop(m), first.pop(m), steps.pop(m)))
    endings = {(bool(steps[-1][2]), bool(steps[-1][3])) for *_, steps in finished}
    assert len(finished) > 10 and {(True, False), (False, True)} <= endings
    for seed, played, seen, steps in finished:
        expected_first, expected = alone(seed, played, max_episode_steps=40)
        np.testing.assert_array_equal(seen, expected_first)
        assert len(expected) == len(steps)
        for (seen, *rest), (expected_seen, *expected_rest) in zip(steps, expected, strict=True):
            np.testing.assert_array_equal(seen, expected_seen)
            assert rest == expected_rest


@pytest.mark.parametrize("make", [GymVectorFleet, pytest.param(EnvPoolFleet, marks=needs_envpool)])
def test_equal_seeds_are_equal_starts_in_every_call(make):
    fleet = make("CartPole-v1", 4)
    begun = fleet.reset([0, 1, 2], [7, 7, 9]).observation
    np.testing.assert_array_equal(begun[0], begun[1])
    assert not np.array_equal(begun[0], begun[2])
    fleet.step([0, 1, 2], [1, 1, 0])
    later = fleet.reset([3, 1], [7, 2**40]).observation
    np.testing.assert_array_equal(later[0], begun[0])
    again = fleet.reset([2], [2**40]).observation
    np.testing.assert_array_equal(again[0], later[1])
    fleet.close()


@pytest.mark.parametrize("make", [GymVectorFleet, pytest.param(EnvPoolFleet, marks=needs_envpool)])
def test_members_that_are_not_named_stand_still(make):
    fleet, straight = make("CartPole-v1", 16), make("CartPole-v1", 1)
    random = np.random.default_rng(1)
    fleet.reset(range(10), range(10))
    fleet.reset(range(10, 16), range(10, 16))
    played, seen = {m: [] for m in range(16)}, {}
    for _ in range(40):
        members = random.permutation(16)[: random.integers(1, 17)]
        members = [m for m in members if len(played[m]) < 8]  # nobody falls before its eighth step
        action_M = random.integers(2, size=len(members))
        stepped = fleet.step(members, action_M)
        assert not stepped.errors and len(stepped.reward_M) == len(members)
        for p, m in enumerate(members):
            played[m].append(action_M[p])
            seen[m] = stepped.observation[p]
    for m in range(16):
        straight.reset([0], [m])
        for action in played[m]:
            last = straight.step([0], [action])
        np.testing.assert_array_equal(seen[m], last.observation[0])


@pytest.mark.parametrize("make", [GymVectorFleet, pytest.param(EnvPoolFleet, marks=needs_envpool)])
def test_an_episode_that_has_ended_shows_its_end_and_waits(make):
    fleet = make("CartPole-v1", 2)
    fleet.reset([0, 1], [3, 3])
    for length in range(1, 30):  # noqa: B007
        stepped = fleet.step([0], [1])
        if stepped.terminated_M[0]:
            break
    assert abs(stepped.observation[0, 2]) > 0.2 and not stepped.truncated_M[0]  # fallen, not a fresh start
    assert stepped.reward_M[0] == 1 and length < 20
    late = fleet.step([0, 1], [1, 0])
    assert "member 0" in late.errors[0] and "reset" in late.errors[0] and list(late.errors) == [0]
    assert not late.observation[0].any() and late.observation[1].any() and late.reward_M.tolist() == [0, 1]
    assert not late.terminated_M.any()
    assert not fleet.reset([0], [3]).errors and not fleet.step([0, 1], [0, 0]).errors


@pytest.mark.parametrize("make", [GymVectorFleet, pytest.param(EnvPoolFleet, marks=needs_envpool)])
def test_the_horizon_truncates_and_does_not_terminate(make):
    fleet = make("CartPole-v1", 1, horizon=5)
    assert fleet.horizon == 5 and make("CartPole-v1", 1).horizon == 500
    fleet.reset([0], [0])
    steps = [fleet.step([0], [t % 2]) for t in range(5)]
    assert [bool(s.truncated_M[0]) for s in steps] == [False] * 4 + [True]
    assert not any(s.terminated_M[0] for s in steps)


@pytest.mark.parametrize("make", [GymVectorFleet, pytest.param(EnvPoolFleet, marks=needs_envpool)])
def test_a_snapshot_restored_elsewhere_goes_on_alike(make):
    fleet = make("CartPole-v1", 5)
    fleet.reset([0, 1, 2], [4, 5, 6])
    for t in range(6):
        fleet.step([0, 1], [t % 2, 1 - t % 2])
    fleet.step([2], [1])
    saved = fleet.snapshot([0, 1, 2])
    assert [s.seed for s in saved] == [4, 5, 6] and [len(s.actions) for s in saved] == [6, 6, 1]
    begun = fleet.restore([3, 4], [saved[0], saved[2]])
    assert not begun.errors
    there, here = fleet.step([3, 4], [1, 0]), fleet.step([0, 2], [1, 0])
    np.testing.assert_array_equal(there.observation, here.observation)
    assert not fleet.step([1], [0]).errors  # not named in the restore, so not moved by it
    assert [s.actions.tolist() for s in fleet.snapshot([3, 4])] == [[0, 1, 0, 1, 0, 1, 1], [1, 0]]


def test_cartpole_is_restored_by_its_state_as_by_its_actions():
    fleet = GymVectorFleet("CartPole-v1", 3)
    seen = fleet.reset([0], [4]).observation[0]
    for _ in range(80):  # more actions than there is room for at first
        seen = fleet.step([0], [int(seen[2] + 0.5 * seen[3] > 0)]).observation[0]
    (saved,) = fleet.snapshot([0])
    by_state = fleet.restore([1], [saved])
    by_actions = fleet.restore([2], [type(saved)(saved.seed, saved.actions)])
    assert saved.state is not None and len(saved.actions) == 80 and not by_state.errors
    np.testing.assert_array_equal(by_state.observation, by_actions.observation)
    np.testing.assert_array_equal(by_state.observation[0], seen)


def test_wrong_actions_are_named_and_cost_only_their_member():
    fleet = GymVectorFleet("CartPole-v1", 3)
    fleet.reset([0, 1, 2], [1, 1, 1])
    stepped = fleet.step([0, 1, 2], [0, 2, 0])
    assert list(stepped.errors) == [1] and "member 1" in stepped.errors[1] and "Discrete(2)" in stepped.errors[1]
    np.testing.assert_array_equal(stepped.observation[0], stepped.observation[2])
    assert "reset" in fleet.step([1], [0]).errors[0]
    with pytest.raises(EnvError, match="float64"):
        fleet.step([0], [0.5])


def test_calls_that_name_nobody_do_nothing():
    fleet = GymVectorFleet("CartPole-v1", 2)
    assert fleet.reset([], []).observation.shape == (0, 4)
    assert fleet.step([], np.zeros(0, int)).observation.shape == (0, 4)
    assert fleet.snapshot([]) == [] and fleet.restore([], []).observation.shape == (0, 4)


# Batches of others, in each of the three ways in which a batch can begin anew.


@pytest.mark.parametrize("mode", MODES)
def test_the_last_observation_is_the_episode_s_own_in_every_autoreset_mode(mode):
    fleet = GymVectorFleet(f"Line{mode}-v0", 3)
    first = fleet.reset([0, 1, 2], [3, 1, 3]).observation["x"]  # they last 4, 2 and 4 steps
    np.testing.assert_array_equal(first[0], first[2])
    a = fleet.step([0, 1, 2], [[0.5]] * 3)
    b = fleet.step([2, 1, 0], [[0.5]] * 3)
    assert b.terminated_M.tolist() == [False, True, False] and not a.terminated_M.any()
    np.testing.assert_allclose(b.observation["x"][1], first[1] + [1.0, 2.0], rtol=1e-6)
    assert b.success_M[1] == (first[1, 0] > 0) and np.isnan(b.success_M[[0, 2]]).all()
    fleet.step([0, 2], [[0.5]] * 2)
    again = fleet.reset([1], [3]).observation["x"]  # while the others are in the middle of theirs
    np.testing.assert_array_equal(again[0], first[0])
    d = fleet.step([0, 1, 2], [[0.5], [-0.5], [0.5]])
    assert d.terminated_M.tolist() == [True, False, True] and not d.errors
    np.testing.assert_allclose(d.observation["x"], [first[0] + [2, 4], first[0] + [-0.5, 1], first[0] + [2, 4]], 1e-6)
    assert d.success_M[0] == 1
    for _ in range(3):  # the sleepers end again and again, unseen
        last = fleet.step([1], [[-0.5]])
        assert not last.errors
    assert last.terminated_M[0] and last.success_M[0] == 0
    np.testing.assert_allclose(last.observation["x"][0], first[0] + [-2, 4], 1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_snapshots_of_different_lengths_arrive_together_where_nobody_can_stand_still(mode):
    fleet = GymVectorFleet(f"Line{mode}-v0", 3)
    fleet.reset([0, 1], [4, 3])
    fleet.step([0, 1], [[0.25], [0.5]])
    fleet.step([0, 1], [[0.25], [0.5]])
    early = fleet.snapshot([1])[0]
    seen = fleet.step([0, 1], [[0.25], [0.5]])
    late = fleet.snapshot([0])[0]
    begun = fleet.restore([0, 1, 2], [early, late, late])
    assert not begun.errors and late.state is None
    np.testing.assert_array_equal(begun.observation["x"][1], seen.observation["x"][0])
    np.testing.assert_array_equal(begun.observation["x"][2], seen.observation["x"][0])
    assert begun.observation["x"][0, 1] == 2
    np.testing.assert_array_equal(fleet.step([0, 1, 2], [[0.5]] * 3).observation["x"][0], seen.observation["x"][1])


def test_nan_is_an_error_of_its_member_and_of_nobody_else():
    fleet = GymVectorFleet("LineNext-v0", 3, kwargs={"broken_seed": 4})
    fleet.reset([0, 1, 2], [3, 4, 3])
    stepped = fleet.step([0, 1, 2], [[0.5]] * 3)
    assert list(stepped.errors) == [1] and "LineNext-v0 member 1, step 1" in stepped.errors[1]
    assert not stepped.observation["x"][1].any() and stepped.reward_M[1] == 0
    assert not fleet.step([0, 2], [[0.5]] * 2).errors  # it waits, so it need not be named
    assert not fleet.reset([1], [3]).errors and not fleet.step([0, 1, 2], [[0.5]] * 3).errors


def test_what_a_batch_cannot_do_is_said_with_the_remedy():
    fleet = GymVectorFleet("LineNext-v0", 2)
    fleet.reset([0, 1], [3, 3])
    with pytest.raises(EnvError, match=r"members \[1\] cannot stand still.*vector='serial'"):
        fleet.step([0], [[0.5]])
    with pytest.raises(EnvError, match=r"OneSeed-v0.*one seed, please.*vector='serial'"):
        GymVectorFleet("OneSeed-v0", 2)
    with pytest.raises(EnvError, match=r"DeafOff-v0.*reset_mask.*vector='serial'"):
        GymVectorFleet("DeafOff-v0", 2)
    with pytest.raises(EnvError, match=r"LineNext-v0.*no_such"):
        GymVectorFleet("LineNext-v0", 2, kwargs={"no_such": 1})


def test_without_a_mask_members_are_reset_together():
    fleet = GymVectorFleet("Deaf-v0", 2)
    first = fleet.reset([0, 1], [1, 3]).observation["x"]
    fleet.step([0, 1], [[0.5]] * 2)
    assert fleet.step([0, 1], [[0.5]] * 2).terminated_M.tolist() == [True, False]
    with pytest.raises(EnvError, match=r"Deaf-v0.*cannot reset members \[0\].*vector='serial'"):
        fleet.reset([0], [1])
    fleet.step([1], [[0.5]])
    assert fleet.step([1], [[0.5]]).terminated_M[0]
    np.testing.assert_array_equal(fleet.reset([1], [1]).observation["x"][0], first[0])  # nobody plays: one may begin


# EnvPool


@needs_envpool
def test_an_unknown_envpool_id_is_answered_with_those_that_are_near():
    with pytest.raises(EnvError, match="HalfCheetah-v4"):
        EnvPoolFleet("HalfCheetah-v7", 2)
    with pytest.raises(EnvError, match="no_such"):
        EnvPoolFleet("CartPole-v1", 2, kwargs={"no_such": 1})


@needs_envpool
def test_envpool_s_continuous_and_numbered_spaces_are_played():
    pendulum = EnvPoolFleet("Pendulum-v1", 2, kwargs={"num_threads": 1})
    pendulum.reset([0, 1], [5, 5])
    stepped = pendulum.step([0, 1], [[0.5], [0.5]])
    np.testing.assert_array_equal(stepped.observation[0], stepped.observation[1])
    assert "Box" in pendulum.step([0], [[np.nan]]).errors[0]
    taxi = EnvPoolFleet("Taxi-v3", 2)
    assert taxi.reset([0, 1], [5, 5]).observation.shape == (2,)
    assert taxi.step([0], [0]).reward_M.tolist() == [-1]


@needs_envpool
def test_what_envpool_showed_stays_as_it_was_shown():
    fleet = EnvPoolFleet("CartPole-v1", 4)
    kept = [fleet.reset(range(4), range(4)).observation]
    copies = [kept[0].copy()]
    for t in range(8):
        kept.append(fleet.step(range(4), [t % 2] * 4).observation)
        copies.append(kept[-1].copy())
    np.testing.assert_array_equal(kept, copies)
