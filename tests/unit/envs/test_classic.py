"""The classic tasks: Gymnasium's numbers to the last bit, members that stand still, snapshots, limits and errors."""

import warnings
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest

from grpo.envs.classic import CLASSIC, make_classic
from grpo.envs.fleet import EnvError, Snapshot

STEPS = 10_000
RANGES = {
    "CartPole-v0": [2.4, 5, 0.21, 5],
    "CartPole-v1": [2.4, 5, 0.21, 5],
    "Acrobot-v1": [np.pi, np.pi, 4 * np.pi, 9 * np.pi],
    "Pendulum-v1": [20, 8],
    "MountainCar-v0": [0.6, 0.07],
    "MountainCarContinuous-v0": [0.6, 0.07],
}
"""How far from zero each number of a state can be."""
everywhere = pytest.mark.parametrize("id", CLASSIC)


def gym_make(id):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CartPole-v0 is out of date, and is here on purpose
        return gym.make(id)


def rocking(id, observation):
    """Actions that get somewhere: a pole that stays up, a car and an acrobot that reach their goals."""
    last = observation[:, -1]
    if id.startswith("CartPole"):
        return (observation[:, 2] + last > 0).astype(int)
    if id == "Acrobot-v1":
        return np.where(observation[:, 4] > 0, 0, 2)
    return 1 + np.sign(last).astype(int) if id == "MountainCar-v0" else (1.2 * np.sign(last) + 0.3)[:, None]


def noise(fleet, rng, count):
    """Actions at random, beyond the limits too where they are clipped."""
    if fleet.action_space.shape == ():
        return rng.integers(0, fleet.action_space.n, count)
    return rng.normal(0, fleet.action_space.high, (count, 1)).astype(np.float32)


def assert_same(ours, theirs):
    theirs = np.asarray(theirs, ours.dtype)
    assert ours.shape == theirs.shape
    assert ours.tobytes() == theirs.tobytes(), f"{ours} is not {theirs}"


def state_of(fleet, member):
    """What Gymnasium calls the state: without the mark of a first step."""
    numbers = fleet.snapshot([member])[0].state["state"]
    return numbers[: len(RANGES[fleet.name])]


def assert_same_step(one, two):
    for name in ("observation", "reward_M", "terminated_M", "truncated_M"):
        assert_same(getattr(one, name), getattr(two, name))


def assert_same_snapshot(one, two):
    assert one.seed == two.seed
    assert_same(one.actions, two.actions)
    assert one.state.keys() == two.state.keys()
    for key in one.state:
        assert_same(one.state[key], two.state[key])


def played(id, size, steps, seed=0, **settings):
    """A fleet, all its members from the same seed, after some random steps that end no episode."""
    fleet, rng = make_classic(id, size, **settings), np.random.default_rng(seed)
    fleet.reset(range(size), [seed] * size)
    for _ in range(steps):
        stepped = fleet.step(range(size), noise(fleet, rng, size))
        assert not (stepped.terminated_M | stepped.truncated_M).any()
    return fleet


# --- Gymnasium's numbers --------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_steps_and_resets_equal_gymnasiums_bit_for_bit(id, seed):
    size, rng = 10, np.random.default_rng(seed)
    fleet, envs = make_classic(id, size), [gym_make(id) for _ in range(size)]
    ends = {"terminated": 0, "truncated": 0}
    observation = np.zeros((size, *fleet.observation_space.shape), np.float32)

    def reset(members):
        seeds = [int(seed) for seed in rng.integers(0, 2**31, len(members))]
        observation[members] = fleet.reset(members, seeds).observation
        for member, seed in zip(members, seeds, strict=True):
            assert_same(observation[member], envs[member].reset(seed=seed)[0])

    reset(np.arange(size))
    steps = 0
    while steps < STEPS:
        some = rng.random() < 0.5
        members = rng.permutation(size)[: rng.integers(1, size)] if some else np.arange(size)
        actions = noise(fleet, rng, len(members))
        sensible = (members < size // 2) & (rng.random(len(members)) < 0.9)
        actions[sensible] = rocking(id, observation[members])[sensible]
        stepped = fleet.step(members, actions)
        observation[members] = stepped.observation
        for i, member in enumerate(members):
            seen, reward, terminated, truncated, _ = envs[member].step(actions[i])
            assert seen.dtype == stepped.observation.dtype
            assert_same(stepped.observation[i], seen)
            assert_same(stepped.reward_M[i], reward)
            assert_same(state_of(fleet, member), envs[member].unwrapped.state)
            assert stepped.terminated_M[i] == terminated
            assert stepped.truncated_M[i] == (truncated and not terminated)
            ends["terminated"] += terminated
            ends["truncated"] += truncated
        steps += len(members)
        over = members[stepped.terminated_M | stepped.truncated_M]
        if len(over):
            reset(over)
    assert ends["truncated"] > 2, "not one whole episode was compared"
    assert ends["terminated"] > 2 or id == "Pendulum-v1"


@everywhere
def test_starts_equal_gymnasiums_for_many_seeds(id):
    fleet, env = make_classic(id, 300), gym_make(id)
    seen = fleet.reset(range(300), range(300)).observation
    for seed in range(300):
        assert_same(seen[seed], env.reset(seed=seed)[0])
        assert_same(state_of(fleet, seed), env.unwrapped.state)


def test_an_acrobots_start_is_seen_in_float32_as_gymnasium_sees_it():
    """Which is the cosine in float64, rounded, for all but one start in hundreds."""
    count, rng = 5_000, np.random.default_rng(5)
    fleet, env = make_classic("Acrobot-v1", count), gym_make("Acrobot-v1").unwrapped
    starts = rng.uniform(-0.1, 0.1, (count, 4)).astype(np.float32)
    seen = fleet.see(np.vstack([starts.T, np.ones(count)]))
    for i in range(count):
        env.state = starts[i]
        assert_same(seen[i], env._get_ob())


@everywhere
def test_a_step_from_any_state_equals_gymnasiums(id):
    """Also from where play hardly comes: speeds at their limits, angles far round."""
    count, rng = 500, np.random.default_rng(4)
    fleet, env = make_classic(id, count), gym_make(id)
    env.reset(seed=0)
    states = rng.uniform(-1, 1, (count, len(RANGES[id]))).astype(np.float32).astype(np.float64) * RANGES[id]
    if id == "MountainCarContinuous-v0":
        states = states.astype(np.float32)
    mark = [0.0] * (fleet.dimensions - len(RANGES[id]))
    nothing = np.zeros((0, *fleet.action_space.shape), fleet.action_space.dtype)
    fleet.restore(
        range(count),
        [Snapshot(0, nothing, {"state": np.array([*state, *mark]), "elapsed": np.array(0)}) for state in states],
    )
    actions = noise(fleet, rng, count)
    stepped = fleet.step(range(count), actions)
    for i in range(count):
        env.unwrapped.state, env.unwrapped.steps_beyond_terminated = states[i], None
        seen, reward, terminated, _, _ = env.unwrapped.step(actions[i])
        assert_same(stepped.observation[i], seen)
        assert_same(stepped.reward_M[i], reward)
        assert_same(state_of(fleet, i), env.unwrapped.state)
        assert stepped.terminated_M[i] == terminated


@everywhere
def test_a_member_plays_alike_alone_and_among_any_number(id):
    rng = np.random.default_rng(2)
    alone, crowd = make_classic(id, 1), make_classic(id, 37)
    assert_same(alone.reset([0], [5]).observation[0], crowd.reset(range(37), [5] * 37).observation[30])
    for _ in range(60):
        action = noise(alone, rng, 1)
        one, many = alone.step([0], action), crowd.step(range(30, 37), np.repeat(action, 7, axis=0))
        assert_same(one.observation[0], many.observation[6])
        assert_same(one.reward_M[0], many.reward_M[6])
        if one.terminated_M[0]:
            break


@everywhere
def test_spaces_limit_and_name_are_gymnasiums(id):
    fleet, env = make_classic(id, 3), gym_make(id)
    assert fleet.observation_space == env.observation_space
    assert fleet.action_space == env.action_space
    assert fleet.horizon == env.spec.max_episode_steps
    assert (fleet.name, fleet.size) == (id, 3)


@everywhere
def test_every_fleet_samples_its_spaces_on_its_own(id):
    one, two = make_classic(id, 1), make_classic(id, 1)
    one.action_space.seed(3)
    first = [one.action_space.sample() for _ in range(5)]
    one.action_space.seed(3)
    two.action_space.seed(4)
    assert [one.action_space.sample() for _ in range(5)] == first


# --- members --------------------------------------------------------------------------------------------------------


@everywhere
def test_members_with_the_same_seed_share_the_start(id):
    seen = make_classic(id, 4).reset([0, 1, 2, 3], seeds=[7, 9, 7, 9]).observation
    assert_same(seen[0], seen[2])
    assert_same(seen[1], seen[3])
    assert (seen[0] != seen[1]).any()


@everywhere
def test_members_that_are_not_named_stand_still(id):
    fleet = played(id, 5, steps=4)
    before = fleet.snapshot(range(5))
    fleet.step([1, 4], noise(fleet, np.random.default_rng(0), 2))
    fleet.reset([2], [99])
    after = fleet.snapshot(range(5))
    for member in (0, 3):
        assert_same_snapshot(before[member], after[member])
    assert [len(snapshot.actions) for snapshot in after] == [4, 5, 0, 4, 5]


def test_rows_come_in_the_order_in_which_members_are_named():
    fleet, other = played("CartPole-v1", 4, steps=3), played("CartPole-v1", 4, steps=3)
    stepped, mirrored = fleet.step([3, 0, 2], [1, 0, 0]), other.step([0, 2, 3], [0, 0, 1])
    assert_same(stepped.observation[[1, 2, 0]], mirrored.observation)


def test_an_answer_and_an_input_may_be_changed_afterwards():
    fleet, other = (played("CartPole-v1", 4, steps=2) for _ in range(2))
    members, actions = np.array([1, 3]), np.array([1, 0])
    stepped = fleet.step(members, actions)
    other.step([1, 3], [1, 0])
    for name in ("observation", "reward_M", "terminated_M", "truncated_M"):
        getattr(stepped, name)[:] = 1
    members[:], actions[:] = [0, 2], [0, 0]
    assert_same_step(fleet.step([1, 3], [0, 0]), other.step([1, 3], [0, 0]))
    snapshot = fleet.snapshot([1])[0]
    snapshot.actions[:] = 0
    snapshot.state["state"][:] = 0
    for one, two in zip(fleet.snapshot(range(4)), other.snapshot(range(4)), strict=True):
        assert_same_snapshot(one, two)


def test_a_call_for_no_member_answers_nothing():
    fleet = make_classic("Acrobot-v1", 2)
    assert fleet.reset([], []).observation.shape == (0, 6)
    assert fleet.step([], []).observation.shape == (0, 6)
    assert fleet.snapshot([]) == []
    assert fleet.restore([], []).observation.shape == (0, 6)


# --- snapshots ------------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("by", ["state", "replay"])
@pytest.mark.parametrize("steps", [0, 1, 6])
def test_restored_members_go_on_exactly_as_the_original(id, by, steps):
    fleet, rng = played(id, 3, steps), np.random.default_rng(3)
    taken = fleet.snapshot([1])[0]
    seen = fleet.see(fleet._state_DM)[1]
    snapshot = taken if by == "state" else replace(taken, state=None)

    elsewhere = make_classic(id, 6)
    elsewhere.reset(range(6), range(6))
    begun = elsewhere.restore([5, 0, 3], [snapshot] * 3)
    assert not begun.errors
    for row in begun.observation:
        assert_same(row, seen)
    for _ in range(3):
        action = noise(fleet, rng, 1)
        original, copies = fleet.step([1], action), elsewhere.step([0, 3, 5], np.repeat(action, 3, axis=0))
        for name in ("observation", "reward_M", "terminated_M", "truncated_M"):
            for row in getattr(copies, name):
                assert_same(row, getattr(original, name)[0])
    for again in elsewhere.snapshot([0, 3, 5]):
        assert_same_snapshot(again, fleet.snapshot([1])[0])


@everywhere
def test_a_snapshot_names_the_seed_and_every_action_of_a_long_episode(id):
    fleet, env = make_classic(id, 2, horizon=200), gym_make(id)
    fleet.reset([0, 1], [11, 12])
    seen, _ = env.reset(seed=12)
    actions = []
    while True:
        action = noise(fleet, np.random.default_rng(len(actions)), 1)
        if not id.startswith("Pendulum"):
            action = np.asarray(rocking(id, seen[None]), action.dtype)
        if id.startswith("MountainCar"):
            action[:] = 1  # stay in the valley
        seen, _, terminated, truncated, _ = env.step(action[0])
        fleet.step([1], action)
        actions.append(action[0])
        if terminated or truncated or len(actions) == 200:
            break
    snapshot = fleet.snapshot([1])[0]
    assert snapshot.seed == 12
    assert_same(snapshot.actions, np.array(actions))
    assert len(actions) > 64, "too short to outgrow the first room"
    assert_same(make_classic(id, 1).restore([0], [replace(snapshot, state=None)]).observation[0], seen)


def test_a_long_snapshot_fits_a_fleet_that_has_played_nothing():
    fleet, fresh = played("Pendulum-v1", 1, steps=150), make_classic("Pendulum-v1", 2)
    fresh.restore([1], fleet.snapshot([0]))
    for _ in range(40):
        assert_same_step(fresh.step([1], [[0.3]]), fleet.step([0], [[0.3]]))
    assert_same_snapshot(fresh.snapshot([1])[0], fleet.snapshot([0])[0])


def test_one_call_restores_by_state_and_by_replay_at_different_steps():
    early, late = (played("Pendulum-v1", 1, steps, seed=steps).snapshot([0])[0] for steps in (2, 9))
    fleet = make_classic("Pendulum-v1", 4)
    fleet.restore([0, 1, 2, 3], [replace(late, state=None), early, replace(early, state=None), late])
    for snapshot, expected in zip(fleet.snapshot(range(4)), [late, early, early, late], strict=True):
        assert_same_snapshot(snapshot, expected)


def test_an_ended_episode_is_restored_as_ended():
    fleet = make_classic("CartPole-v1", 2, horizon=3)
    fleet.reset([0, 1], [0, 0])
    for _ in range(3):
        fleet.step([0], [1])
    snapshot = fleet.snapshot([0])[0]
    for by in (snapshot, replace(snapshot, state=None)):
        fleet.restore([1], [by])
        with pytest.raises(EnvError, match="member 1 is over since step 3; reset it first"):
            fleet.step([1], [0])


def test_a_state_made_by_hand_is_taken():
    fleet = make_classic("CartPole-v1", 1)
    state = {"state": np.array([1.0, 0.0, 0.1, 0.0]), "elapsed": np.array(0)}
    begun = fleet.restore([0], [Snapshot(0, np.zeros(0, np.int64), state)])
    assert_same(begun.observation, [[1.0, 0.0, 0.1, 0.0]])
    env = gym_make("CartPole-v1")
    env.reset()
    env.unwrapped.state = state["state"]
    assert_same(fleet.step([0], [1]).observation[0], env.step(1)[0])


def test_a_replay_that_goes_wrong_is_reported_and_the_others_arrive():
    fleet = make_classic("CartPole-v1", 3, horizon=4)
    good = Snapshot(1, np.array([0, 1, 0]))
    begun = fleet.restore([2, 0, 1], [Snapshot(1, np.array([0, 1, 0, 1, 0, 0])), good, Snapshot(1, np.array([0, 5]))])
    assert set(begun.errors) == {0, 2}
    assert "member 2 is over since step 4" in begun.errors[0] and "6 actions" in begun.errors[0]
    assert "member 1 at step 1" in begun.errors[2]
    assert not begun.observation[[0, 2]].any() and begun.observation[1].any()
    fleet.step([0], [1])


@pytest.mark.parametrize(
    "change",
    [
        {"state": {"state": np.zeros(3), "elapsed": np.array(2)}},
        {"state": {"elapsed": np.array(2)}},
        {"state": {"state": np.zeros(4), "elapsed": np.array(5)}},
        {"actions": np.zeros((2, 1))},
    ],
)
def test_a_snapshot_of_another_environment_is_refused(change):
    fleet = played("CartPole-v1", 1, steps=2)
    snapshot = replace(fleet.snapshot([0])[0], **change)
    with pytest.raises(EnvError, match="CartPole-v1: member 0 cannot go to a snapshot"):
        fleet.restore([0], [snapshot])


# --- limits ---------------------------------------------------------------------------------------------------------


@everywhere
def test_the_horizon_truncates_and_can_be_set(id):
    fleet = played(id, 2, steps=4, horizon=5)
    assert fleet.horizon == 5
    stepped = fleet.step([1], noise(fleet, np.random.default_rng(0), 1))
    assert stepped.truncated_M.all() and not stepped.terminated_M.any()
    assert not fleet.step([0], noise(fleet, np.random.default_rng(0), 1)).terminated_M.any()


def test_terminated_wins_where_both_happen():
    def fall(horizon):
        fleet = make_classic("CartPole-v1", 1, horizon)
        fleet.reset([0], [0])
        for t in range(1, 100):
            stepped = fleet.step([0], [1])
            if stepped.terminated_M[0] or stepped.truncated_M[0]:
                return t, bool(stepped.terminated_M[0]), bool(stepped.truncated_M[0])

    steps, *how = fall(None)
    assert how == [True, False]
    assert fall(steps) == (steps, True, False)
    assert fall(steps - 1) == (steps - 1, False, True)


def test_an_ended_member_is_not_stepped_until_it_is_reset():
    fleet = played("MountainCar-v0", 3, steps=1, horizon=2)
    fleet.step([1], [0])
    before = fleet.snapshot(range(3))
    for members in ([0, 1, 2], [2, 1]):
        with pytest.raises(EnvError, match="MountainCar-v0: member 1 is over since step 2; reset it first"):
            fleet.step(members, [0] * len(members))
    for one, two in zip(before, fleet.snapshot(range(3)), strict=True):
        assert_same_snapshot(one, two)  # nobody moved
    fleet.reset([1], [0])
    fleet.step([0, 1, 2], [0, 0, 0])


def test_a_member_that_was_never_reset_is_refused():
    fleet = make_classic("CartPole-v1", 2)
    fleet.reset([0], [0])
    with pytest.raises(EnvError, match="member 1 has no episode yet; reset it first"):
        fleet.step([0, 1], [0, 0])
    with pytest.raises(EnvError, match="member 1 has no episode yet; reset it first"):
        fleet.snapshot([1])


# --- errors ---------------------------------------------------------------------------------------------------------

BAD = [
    ("CartPole-v1", 2, "an integer from 0 to 1"),
    ("CartPole-v1", -1, "an integer from 0 to 1"),
    ("CartPole-v1", 2**40, "an integer from 0 to 1"),
    ("CartPole-v1", [1], "an integer from 0 to 1"),
    ("CartPole-v1", 1.0, "an integer from 0 to 1"),
    ("CartPole-v1", None, "an integer from 0 to 1"),
    ("Acrobot-v1", 3, "an integer from 0 to 2"),
    ("Pendulum-v1", [float("nan")], "finite numbers"),
    ("Pendulum-v1", [1e300], "finite numbers"),
    ("Pendulum-v1", [0.0, 0.0], "finite numbers"),
    ("Pendulum-v1", 0.5, "finite numbers"),
    ("Pendulum-v1", ["left"], "finite numbers"),
    ("MountainCarContinuous-v0", [float("inf")], "finite numbers"),
]


@pytest.mark.parametrize(("id", "bad", "wanted"), BAD)
def test_an_action_outside_the_space_costs_that_position_only(id, bad, wanted):
    fleet, other = played(id, 4, steps=3), played(id, 4, steps=3)
    good = 1 if fleet.action_space.shape == () else [0.5]
    stepped, expected = fleet.step([3, 1, 0], [good, bad, good]), other.step([3, 0], [good, good])

    assert set(stepped.errors) == {1}
    assert "member 1 at step 3 must be " + wanted in stepped.errors[1] and id in stepped.errors[1]
    assert "\n" not in stepped.errors[1] and repr(bad)[:10] in stepped.errors[1]
    for name in ("observation", "reward_M", "terminated_M", "truncated_M"):
        assert_same(getattr(stepped, name)[[0, 2]], getattr(expected, name))
        assert not getattr(stepped, name)[1].any()

    with pytest.raises(EnvError, match="member 1 is over since step 3; reset it first"):
        fleet.step([1], [good])
    fleet.reset([1], [0])
    assert not fleet.step([1], [good]).errors


def test_a_whole_batch_of_bad_actions_is_reported_for_every_position():
    for actions in (np.full(4, 0.5), np.full((4, 1), 1), np.ones(4, bool), [None] * 4, np.full(4, 9, np.uint64)):
        stepped = played("CartPole-v1", 4, steps=1).step(range(4), actions)
        assert set(stepped.errors) == {0, 1, 2, 3}
        assert not stepped.observation.any()


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint64])
def test_integers_of_any_type_are_choices(dtype):
    one, two = played("Acrobot-v1", 3, steps=2), played("Acrobot-v1", 3, steps=2)
    assert_same_step(one.step(range(3), np.array([0, 1, 2], dtype)), two.step(range(3), [0, 1, 2]))


def test_torques_of_any_type_are_rounded_to_the_spaces():
    one, two = played("Pendulum-v1", 2, steps=2), played("Pendulum-v1", 2, steps=2)
    assert_same_step(
        one.step(range(2), np.array([[0.1], [9.0]])), two.step(range(2), np.array([[0.1], [2.0]], np.float32))
    )


@pytest.mark.parametrize("members", [[0, 0], [-1], [4], [0.0], [[0, 1]], [True], ["a"], 0])
def test_members_that_do_not_exist_are_refused(members):
    fleet = make_classic("CartPole-v1", 4)
    with pytest.raises(EnvError, match=r"CartPole-v1: members must be distinct numbers from 0 to 3; got"):
        fleet.reset(members, [0])


def test_members_are_checked_again_when_bytes_alone_are_alike():
    fleet = make_classic("CartPole-v1", 2)
    fleet.reset([0], [0])
    for alike in (np.array([0, 0], np.int32), np.array([0.0])):
        with pytest.raises(EnvError, match="members must be"):
            fleet.step(alike, [0])


@pytest.mark.parametrize("call", ["reset", "step", "restore"])
def test_one_thing_is_wanted_for_each_member(call):
    fleet = make_classic("CartPole-v1", 3)
    fleet.reset(range(3), [0, 0, 0])
    given = {"reset": [0], "step": [0], "restore": fleet.snapshot([0])}[call]
    with pytest.raises(EnvError, match=r"CartPole-v1: give one \w+ a member; got 1 for 2"):
        getattr(fleet, call)([0, 2], given)
    with pytest.raises(EnvError, match="give one action a member; got 1"):
        fleet.step([0], 1)


@pytest.mark.parametrize("seed", [-1, 0.5, None, "a"])
def test_seeds_that_gymnasium_would_not_take_are_refused(seed):
    with pytest.raises(EnvError, match="a seed must be an integer from 0 up; got"):
        make_classic("CartPole-v1", 1).reset([0], [seed])


def test_what_cannot_be_built_is_refused():
    with pytest.raises(EnvError, match="Ant-v5 is not built in; these are: CartPole-v0"):
        make_classic("Ant-v5", 1)
    with pytest.raises(EnvError, match="CartPole-v1: size and horizon must be at least 1; got 0 and 500"):
        make_classic("CartPole-v1", 0)
    with pytest.raises(EnvError, match="got 1 and 0"):
        make_classic("CartPole-v1", 1, horizon=0)
