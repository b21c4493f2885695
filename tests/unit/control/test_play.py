"""Whole episodes, only live members, failures as data."""

import gymnasium as gym
import numpy as np
import torch

from grpo.control.networks import make_network
from grpo.control.play import INSIDE, Record, named, play
from grpo.control.policy import ActorPolicy
from grpo.control.scaling import Scaling
from grpo.envs.fleet import Begun, Snapshot, Stepped
from grpo.envs.heads import make_head
from grpo.envs.make import make_fleet
from grpo.envs.rules import EpisodeRules


class Countdown:
    """Member m's episode from seed s lasts s steps and sees how many are left; seed 0 fails at reset, 99 at step 2."""

    name, horizon = "Countdown", 100
    observation_space = gym.spaces.Box(0, 100, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, size: int) -> None:
        self.size = size
        self.left, self.start = np.zeros(size, int), np.zeros(size, int)
        self.calls: list[list[int]] = []

    def reset(self, members, seeds):
        self.left[members] = self.start[members] = seeds
        bad = {at: f"member {m}: reset failed" for at, (m, s) in enumerate(zip(members, seeds, strict=True)) if s == 0}
        return Begun(self._see(members), bad)

    def restore(self, members, snapshots):
        for member, saved in zip(members, snapshots, strict=True):
            self.start[member], self.left[member] = saved.seed, saved.seed - len(saved.actions)
        return Begun(self._see(members))

    def step(self, members, actions):
        self.calls.append(list(members))
        self.left[members] -= 1
        left = self.left[members]
        bad = {at: f"member {m}: fell over" for at, m in enumerate(members) if self.start[m] == 99 and left[at] == 97}
        done = (left == 0) & (self.start[members] % 2 == 1)
        cut = (left == 0) & (self.start[members] % 2 == 0)
        return Stepped(self._see(members), left + 1.0, done, cut, errors=bad)

    def _see(self, members):
        return self.left[members].astype(np.float32)[:, None]

    def close(self):
        pass


def players(fleet):
    head = make_head(fleet.action_space)
    policy = ActorPolicy(make_network(fleet.observation_space, head.size, (8,)), head)
    return policy, Scaling(fleet.observation_space, False)


def run(starts, size=3, **options):
    fleet = Countdown(size)
    policy, scaling = players(fleet)
    return fleet, play(fleet, policy, scaling, starts, np.random.default_rng(0), **options)


def test_every_episode_is_whole_and_in_its_own_row():
    fleet, episodes = run([3, 1, 5, 2, 4], size=2)
    assert episodes.length_N.tolist() == [3, 1, 5, 2, 4]
    assert episodes.return_N.tolist() == [6, 1, 15, 3, 10]
    assert episodes.terminated_N.tolist() == [True, True, True, False, False]
    assert episodes.truncated_N.tolist() == [False, False, False, True, True]
    np.testing.assert_array_equal(episodes.observation[2, :, 0], [5, 4, 3, 2, 1])
    np.testing.assert_array_equal(episodes.last[:, 0], 0)
    assert episodes.env_steps == sum(len(call) for call in fleet.calls) == 15
    assert all(len(call) <= 2 for call in fleet.calls)


def test_only_live_members_are_stepped():
    fleet, _ = run([1, 4, 2], size=3)
    assert [sorted(call) for call in fleet.calls] == [[0, 1, 2], [1, 2], [1], [1]]


def test_a_start_that_fails_and_an_episode_that_breaks_are_rows_with_errors():
    _, episodes = run([2, 0, 99, 3], size=2)
    assert episodes.errors == {1: "member 1: reset failed", 2: "member 1: fell over"}
    assert episodes.length_N.tolist() == [2, 0, 1, 3]
    assert episodes.ok_N.tolist() == [True, False, False, True]


def test_when_nothing_can_begin_every_row_has_its_reason():
    _, episodes = run([0, 0], keep_out=True)
    assert episodes.errors == {0: "member 0: reset failed", 1: "member 1: reset failed"}
    assert not episodes.mask_NT.any() and not episodes.ok_N.any()
    assert episodes.out_NTF.shape == (2, 1, 2)


def test_repeated_actions_are_one_decision():
    _, episodes = run([5, 4], rules=EpisodeRules(action_repeat=3))
    assert episodes.length_N.tolist() == [2, 2]
    assert episodes.reward_NT.tolist() == [[12, 3], [9, 1]]
    assert episodes.env_steps == 9
    assert episodes.terminated_N.tolist() == [True, False]


def test_continuations_know_how_much_lies_behind_them():
    saved = Snapshot(5, np.zeros(3, int))
    _, episodes = run([saved, saved])
    assert episodes.length_N.tolist() == [2, 2] and episodes.offset_N.tolist() == [3, 3]


def test_recorded_log_probs_are_the_policys():
    fleet = make_fleet("CartPole-v1", 4)
    policy, scaling = players(fleet)
    episodes = play(fleet, policy, scaling, [1, 1, 2, 2], np.random.default_rng(0), keep_out=True)
    mask = torch.as_tensor(episodes.mask_NT)
    out = policy.network(torch.as_tensor(episodes.observation)[mask])
    logp = policy.head.logp(out, torch.as_tensor(episodes.action_NT)[mask])
    np.testing.assert_allclose(episodes.logp_NT[episodes.mask_NT], logp.detach(), atol=1e-5)
    np.testing.assert_allclose(episodes.out_NTF[episodes.mask_NT], out.detach(), atol=1e-5)
    np.testing.assert_array_equal(episodes.observation[0, 0], episodes.observation[1, 0])


def test_greedy_play_repeats_itself():
    fleet = make_fleet("CartPole-v1", 2)
    policy, scaling = players(fleet)
    one = play(fleet, policy, scaling, [5, 5], None)
    np.testing.assert_array_equal(one.action_NT[0], one.action_NT[1])


def test_records_grow_and_keep_nested_observations():
    record = Record(2, 1)
    tree = {"a": np.ones((2, 3)), "b": {"c": np.arange(2)}}
    for t in range(5):
        record.write(np.full(2, t), np.arange(2), t, {"x": np.full(2, t)} | named("seen", tree))
    np.testing.assert_array_equal(record.table("x", 5), [[0, 1, 2, 3, 4]] * 2)
    found = record.tree("seen", 5)
    assert found["a"].shape == (2, 5, 3) and found["b"]["c"][:, 0].tolist() == [0, 1]
    assert record.tree("raw", 5) is None and INSIDE not in "abc"
