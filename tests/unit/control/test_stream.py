"""Endless streams: cut into windows, continued, counted whole."""

import copy

import gymnasium as gym
import numpy as np
import pytest

from grpo.control import ControlConfig, GRPOTrainer
from grpo.control.networks import make_network
from grpo.control.policy import ActorPolicy
from grpo.control.scaling import Scaling
from grpo.control.stream import StepWindows
from grpo.envs.episodes import REMEMBERED
from grpo.envs.fleet import Begun, EnvError, Stepped
from grpo.envs.heads import make_head
from grpo.protocols import CollectRequest
from grpo.rollouts import Status
from tests.faults import envs


class Relay:
    """Stream p's episodes last 5 − 2p steps; the first stream's terminate, the second's are truncated.

    It sees (stream, step), pays the number of the step, and fails at the (episode, step) it is told.
    """

    name, horizon, size = "Relay", 10, 2
    observation_space = gym.spaces.Box(0, 100, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, fails=()) -> None:
        self.fails = dict(fails)
        self.seeds: list[list[int]] = [[], []]
        self.t = np.zeros(2, int)
        self.stuck: int | None = None

    def reset(self, members, seeds):
        bad = {}
        for at, (p, seed) in enumerate(zip(members, seeds, strict=True)):
            self.seeds[p].append(seed)
            self.t[p] = 0
            begins = len(self.seeds[p])
            if self.fails.get(p) == (begins, 0) or self.stuck == p:
                bad[at] = f"Relay member {p}, reset: no"
        return Begun(self._see(members), bad)

    def restore(self, members, snapshots):
        for p, saved in zip(members, snapshots, strict=True):
            self.seeds[p].append(saved.seed)
            self.t[p] = len(saved.actions)
        return Begun(self._see(members))

    def step(self, members, actions):
        self.t[members] += 1
        over = self.t[members] == 5 - 2 * np.asarray(members)
        first = np.asarray(members) == 0
        bad = {
            at: f"Relay member {p}, step {self.t[p]}: no"
            for at, p in enumerate(members)
            if self.fails.get(p) == (len(self.seeds[p]), self.t[p])
        }
        kept = ~np.isin(np.arange(len(members)), list(bad))
        return Stepped(self._see(members), self.t[members] * kept, over & first & kept, over & ~first & kept, None, bad)

    def _see(self, members):
        return np.stack([np.asarray(members), self.t[members]], 1).astype(np.float32)

    def close(self):
        pass


def make(fleet, window=4, **settings):
    config = ControlConfig(**{"group_by": "steps", "advantage": "step", "group_size": window} | settings)
    policy = ActorPolicy(make_network(fleet.observation_space, 2, (8,)), make_head(fleet.action_space))
    windows, scaling = StepWindows(fleet, config), Scaling(fleet.observation_space, False)
    random = np.random.default_rng(0)
    return windows, lambda: windows.next(policy, scaling, random)


def test_a_window_ends_episodes_and_the_next_goes_on_with_them():
    _, window = make(Relay())
    episodes, group_N = window()
    assert group_N.tolist() == [0, 1, 1]
    assert episodes.length_N.tolist() == [4, 3, 1]
    assert episodes.terminated_N.tolist() == [False, False, False]
    assert episodes.truncated_N.tolist() == [True, True, True]
    episodes, group_N = window()
    assert group_N.tolist() == [0, 0, 1, 1]
    assert episodes.length_N.tolist() == [1, 3, 2, 2]
    assert episodes.terminated_N.tolist() == [True, False, False, False]
    np.testing.assert_array_equal(episodes.observation[0, 0], [0, 4])  # where the first window left it
    np.testing.assert_array_equal(episodes.observation[1, :, 1], [0, 1, 2])
    assert episodes.reward_NT[0, 0] == 5 and episodes.reward_NT[1].tolist() == [1, 2, 3]
    assert episodes.env_steps == 8 and not episodes.errors


def test_a_window_that_was_handed_over_is_not_written_over_by_the_next():
    _, window = make(Relay(), window=2)  # nobody's episode ends in the first
    episodes, _ = window()
    kept = copy.deepcopy(vars(episodes))
    later, _ = window()
    for name, x in kept.items():
        np.testing.assert_equal(getattr(episodes, name), x, name)
    assert later.reward_NT[0].tolist() == [3, 4] and episodes.reward_NT[0].tolist() == [1, 2]


def test_rows_know_what_came_after_them_and_what_lies_behind():
    _, window = make(Relay())
    episodes, _ = window()
    np.testing.assert_array_equal(episodes.last, [[0, 4], [1, 3], [1, 1]])  # seen at the end, not the next beginning
    assert episodes.offset_N.tolist() == [0, 0, 0]
    episodes, _ = window()
    np.testing.assert_array_equal(episodes.last, [[0, 5], [0, 3], [1, 3], [1, 2]])
    assert episodes.offset_N.tolist() == [4, 0, 1, 0]


def test_whole_episodes_are_counted_whatever_cut_them():
    windows, window = make(Relay())
    window()
    assert windows.stream.finished == [(6.0, 3)] and windows.stream.ended == 1  # the second stream's first
    window()
    assert windows.stream.finished == [(6.0, 3), (15.0, 5), (6.0, 3)] and windows.stream.ended == 3
    for _ in range(20):
        window()
    assert len(windows.stream.finished) == REMEMBERED and set(windows.stream.finished) == {(6.0, 3), (15.0, 5)}


def test_rows_that_are_shorter_than_the_longest_are_padded_with_nothing():
    _, window = make(Relay(), window=6)
    episodes, _ = window()
    assert episodes.mask_NT.shape == (4, 5)
    assert not episodes.reward_NT[~episodes.mask_NT].any() and not episodes.logp_NT[~episodes.mask_NT].any()
    assert (episodes.logp_NT[episodes.mask_NT] < 0).all() and episodes.out_NTF.shape == (4, 5, 2)


def test_every_episode_of_every_stream_has_a_start_of_its_own():
    fleet = Relay()
    _, window = make(fleet)
    for _ in range(10):
        window()
    used = [seed for seeds in fleet.seeds for seed in seeds]
    assert len(used) > 15 and len(set(used)) == len(used) and all(seed % 2 == 0 for seed in used)


def test_a_failure_is_a_row_with_an_error_and_the_stream_goes_on():
    windows, window = make(Relay(fails={0: (1, 3)}))
    episodes, group_N = window()
    assert group_N.tolist() == [0, 0, 1, 1]
    assert episodes.length_N.tolist() == [2, 1, 3, 1]  # the step that failed was not made
    assert episodes.errors == {0: "Relay member 0, step 3: no"}
    assert episodes.terminated_N.tolist() == [False] * 4
    assert windows.stream.finished == [(6.0, 3)]
    episodes, _ = window()
    np.testing.assert_array_equal(episodes.observation[0, 0], [0, 1])


def test_a_failure_at_the_first_step_leaves_a_row_without_decisions():
    _, window = make(Relay(fails={0: (1, 1)}))
    episodes, _ = window()
    assert episodes.length_N.tolist() == [0, 3, 3, 1] and list(episodes.errors) == [0]


def test_an_episode_that_cannot_begin_is_passed_over():
    fleet = Relay(fails={1: (2, 0)})
    _, window = make(fleet)
    window()
    assert len(fleet.seeds[1]) == 3 and len(set(fleet.seeds[1])) == 3


def test_a_stream_that_cannot_begin_again_ends_it_all():
    fleet = Relay()
    _, window = make(fleet)
    window()
    fleet.stuck = 1
    with pytest.raises(EnvError, match="Relay member 1, reset: no"):
        window()


def test_a_stream_goes_on_from_what_is_kept():
    one, window = make(Relay())
    assert one.values()["seeds"] == [] and one.arrays() == {}
    window()
    values, arrays = one.values(), one.arrays()
    assert [len(arrays[f"actions/{p}"]) for p in (0, 1)] == [4, 1]
    fleet = Relay()
    other, again = make(fleet)
    other.load(values, arrays)
    assert fleet.t.tolist() == [4, 1] and [seeds[-1] for seeds in fleet.seeds] == values["seeds"]
    expected, found = window()[0], again()[0]
    np.testing.assert_array_equal(found.observation, expected.observation)
    assert other.stream.finished == one.stream.finished and other.stream.ended == one.stream.ended
    assert other.values()["begun"] == one.values()["begun"]


# --- in the room ----------------------------------------------------------------------------------------------------

WINDOW = {"group_by": "steps", "advantage": "step", "vector": "serial"}


def test_the_window_is_one_group_of_decisions():
    made = GRPOTrainer(env="tests.faults.envs:Walk", group_size=25, groups_per_step=2, **WINDOW)
    rollouts = made.source.collect(CollectRequest(0)).rollouts
    mask = rollouts.mask_NT
    assert mask.sum(1).tolist() == [10, 10, 5] * 2 and rollouts.group_N.tolist() == [0] * 3 + [1] * 3
    assert (rollouts.group_NT == rollouts.group_N[:, None])[mask].all()
    ended, cut = int(Status.TERMINATED), int(Status.TRUNCATED)
    assert rollouts.status_N.tolist() == [ended, ended, cut] * 2
    report = made.step()
    assert report["episodes"] == 10 and report["episode_length"] == 10 and report["env_steps"] == 100


def test_nothing_is_said_of_returns_before_an_episode_has_ended():
    made = GRPOTrainer(env="tests.faults.envs:Walk", group_size=4, groups_per_step=1, **WINDOW)
    reports = made.train(steps=3, progress=None)
    assert [report["return"] is None for report in reports] == [True, True, False]
    assert [report["episodes"] for report in reports] == [0, 0, 1]


def test_an_only_copy_can_be_a_single_stream_and_cannot_be_evaluated_meanwhile():
    made = GRPOTrainer(env=envs.Walk(), group_size=25, groups_per_step=1, group_by="steps", advantage="step")
    assert made.step()["episodes"] == 2
    with pytest.raises(EnvError, match="Walk is the only copy and busy with its stream; pass an id or a factory"):
        made.evaluate(2)
    with pytest.raises(EnvError, match="needs a copy for each group; set groups_per_step=1"):
        GRPOTrainer(env=envs.Walk(), group_size=25, groups_per_step=2, group_by="steps", advantage="step")


def test_one_that_never_repeats_itself_can_still_be_a_stream():
    """Only resuming needs repetition; nothing is proven before it is asked for."""
    made = GRPOTrainer(env=envs.Restless, group_size=25, groups_per_step=1, **WINDOW)
    assert made.step()["episodes"] == 2
    assert made.state().values["source"]["streams"]["length"] == [5]


def test_scaling_is_fed_what_the_environment_gave():
    both = []
    for settings in ({"group_by": "steps", "advantage": "step", "group_size": 200}, {"group_by": "start"}):
        made = GRPOTrainer(env="Pendulum-v1", scale_observations=True, groups_per_step=4, **settings)
        for _ in range(6):
            made.step()
        both.append(np.sqrt(made.source.scaling.square[""]))
    np.testing.assert_allclose(both[0], both[1], rtol=0.6)  # the speed's deviation is about 4, not 1
    assert both[0][2] > 2


# --- two halves in turn ---------------------------------------------------------------------------------------------


class Away(Relay):
    """A relay that steps while nobody looks: a step is made when it is waited for, and only one is under way."""

    def __init__(self, fails=()) -> None:
        super().__init__(fails)
        self.under_way = 0
        self.order: list[tuple[str, list[int]]] = []

    def send(self, members, actions):
        assert self.under_way == 0
        self.under_way += 1
        self.order.append(("sent", list(members)))

        def wait():
            self.under_way -= 1
            self.order.append(("heard", list(members)))
            return self.step(members, actions)

        return wait

    def reset(self, members, seeds):
        assert self.under_way == 0
        return super().reset(members, seeds)


@pytest.mark.parametrize("fails", [{}, {0: (1, 2)}, {1: (2, 1), 0: (1, 4)}, {1: (2, 0)}], ids=str)
def test_windows_of_two_halves_are_those_of_all_streams_together(fails):
    (whole, plain), (halves, window) = make(Relay(fails)), make(Away(fails), double_buffer=True)
    for _ in range(4):
        (one, group_N), (other, found_N) = plain(), window()
        assert group_N.tolist() == found_N.tolist()
        for name, x in vars(one).items():
            if name in ("out_NTF", "logp_NT"):  # products of one row and of two are rounded differently
                np.testing.assert_allclose(getattr(other, name), x, atol=1e-6)
            else:
                np.testing.assert_equal(getattr(other, name), x, name)
    assert halves.values() == whole.values()


def test_a_half_is_heard_only_after_the_other_half_has_decided(monkeypatch):
    fleet = Away()

    def noted(policy, seen, random):
        fleet.order.append(("decided", seen[:, 0].astype(int).tolist()))
        return act(policy, seen, random)

    act = ActorPolicy.act
    monkeypatch.setattr(ActorPolicy, "act", noted)
    _, window = make(fleet, window=2, double_buffer=True)
    window()
    first, second = [("decided", [0]), ("heard", [1]), ("sent", [0])], [("decided", [1]), ("heard", [0]), ("sent", [1])]
    expected = [*first, *second] * 2 + [("heard", [1])]
    del expected[1]  # nobody is under way yet
    assert fleet.order == expected


def test_halves_need_a_fleet_that_can_be_left_alone():
    with pytest.raises(EnvError, match=r"double_buffer.*vector=processes"):
        make(Relay(), double_buffer=True)


def test_a_run_in_processes_learns_the_same_in_two_halves():
    settings = {"env": "Pendulum-v1", "vector": "processes", "workers": 2, "group_by": "steps", "advantage": "fitted"}
    settings |= {"group_size": 16, "groups_per_step": 5, "gamma": 0.9, "num_iterations": 2, "max_episode_steps": 10}
    found = []
    for double in (False, True):
        made = GRPOTrainer(**settings, double_buffer=double)
        reports = made.train(steps=2, progress=None)
        found.append([reports[-1]["return"], reports[-1]["loss"]])
        found[-1] += [p.detach().numpy().sum() for p in made.policy.parameters().values()]
        made.source.close()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)
