"""Several actions from one look: what is played, recorded, compared and learned from."""

from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from grpo.config import ConfigError
from grpo.control import ControlConfig, GRPOTrainer
from grpo.control.chunks import ChunkColumns, paid_together
from grpo.control.evaluate import Player
from grpo.core.ratios import fold
from grpo.envs.rules import EpisodeRules
from grpo.experience import Experience
from grpo.objective import objective
from grpo.protocols import CollectRequest
from tests.unit.control.reach import Reach
from tests.unit.control.test_policy import ACTIONS, SEEN, louder
from tests.unit.control.test_policy import make as make_sampled

EPISODE = {"advantage": "episode"}
LEVELS = ("token_level", "action_level", "chunk_level")


def make(**settings) -> GRPOTrainer:
    usual = {"env": Reach, "vector": "serial", "hidden": (16,), "group_size": 4, "groups_per_step": 3, "num_envs": 5}
    return GRPOTrainer(**usual | {"action_chunk": 4} | settings)


def collected(made):
    return made.source.collect(CollectRequest(0)).rollouts


def gradient(made, batch) -> torch.Tensor:
    made.policy.train()
    scores = made.policy.score(batch.rollouts, entropy=True)
    objective(scores, batch, made.recipe).loss.backward()
    found = torch.cat([p.grad.flatten() for p in made.policy.parameters().values()])
    for parameter in made.policy.parameters().values():
        parameter.grad = None
    return found


# --- what is recorded is what is scored -----------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ACTIONS)
def test_every_action_of_a_chunk_is_scored_as_it_was_recorded(name, level):
    made = louder(make_sampled(action=ACTIONS[name], action_chunk=3, logprob_type=level))
    rollouts = collected(made)
    with torch.no_grad():
        scores = made.policy.score(rollouts, entropy=True)
    mask = rollouts.mask_NT
    assert 0 < int(mask.sum()) < mask.numel()
    torch.testing.assert_close(scores.logp_NT[mask], rollouts.old_logp_NT[mask], rtol=1e-4, atol=1e-5)
    assert not scores.logp_NT[~mask].any() and not scores.entropy_NT[~mask].any()
    tokens = made.policy.head.tokens if level == "token_level" else 1
    assert bool((mask.sum(1) % tokens == 0).all()) and int(mask.sum(1).max()) == 4 * tokens  # 3 and then 1 of a chunk


@pytest.mark.parametrize("more", [{"memory": 8}, {"scale_observations": True}], ids=["memory", "scaling"])
@pytest.mark.parametrize("seen", ["vector", "parts"])
def test_a_chunk_is_scored_by_what_was_seen_at_its_beginning(seen, more):
    made = louder(make_sampled(SEEN[seen], action_chunk=2, **more))
    rollouts = collected(made)
    mask = rollouts.mask_NT
    with torch.no_grad():
        scores = made.policy.score(rollouts)
    torch.testing.assert_close(scores.logp_NT[mask], rollouts.old_logp_NT[mask], rtol=1e-4, atol=1e-5)


def test_a_chunk_s_log_prob_is_the_sum_of_its_actions_and_theirs_the_sum_of_their_tokens():
    size, found = 4, {}
    for level in LEVELS:
        made = louder(make(logprob_type=level))
        rollouts = collected(made)
        with torch.no_grad():
            for parameter in made.policy.parameters().values():
                parameter.mul_(0.9)
            found[level] = made.policy.score(rollouts).logp_NT, rollouts.mask_NT, made.recipe.ratio
    token, action = (found[name][0] for name in ("token_level", "action_level"))
    torch.testing.assert_close(token.reshape(*action.shape, 2).sum(-1), action, rtol=1e-5, atol=1e-5)
    assert torch.equal(found["chunk_level"][0], action)  # folded by the objective:
    assert found["chunk_level"][2] == "chunk" and found["action_level"][2] == "token"
    by_hand = torch.stack([action[:, i : i + size].sum(1) for i in range(0, action.shape[1], size)], 1)
    torch.testing.assert_close(fold(action, found["action_level"][1], size), by_hand)


def test_the_log_prob_of_a_chunk_in_closed_form():
    """A Gaussian of known mean and deviation: −z²/2 − log σ − log √2π for each number of each action."""
    made = louder(make(log_std=0.2))
    rollouts = collected(made)
    with torch.no_grad():
        logp_NT = made.policy.score(rollouts).logp_NT
        seen, action = rollouts.inputs["observation"][0], rollouts.inputs["action"][0]
        for chunk in range(3):
            mean = made.actor(seen[4 * chunk][None]).reshape(4, 2)
            z = (action[4 * chunk : 4 * chunk + 4] - mean) / np.exp(0.2)
            expected = (-0.5 * z**2 - 0.2 - 0.5 * np.log(2 * np.pi)).sum(-1)
            torch.testing.assert_close(logp_NT[0, 4 * chunk : 4 * chunk + 4], expected, rtol=1e-5, atol=1e-5)


# --- playing --------------------------------------------------------------------------------------------------------


class Diary(gym.Env):
    """Counts steps, writes actions down; succeeds at a step that the seed chooses."""

    observation_space, action_space = gs.Box(0, 100, (1,), np.float32), gs.Box(-9, 9, (1,), np.float32)
    kept: ClassVar[list] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.when, self.mine = 0, int(self.np_random.integers(1, 8)), []
        self.kept.append(self.mine)
        return np.array([0], np.float32), {}

    def step(self, action):
        self.t += 1
        self.mine.append(float(action[0]))
        there = self.t == self.when
        return np.array([self.t], np.float32), float(there), False, self.t == 7, {"success": there}


def test_an_episode_ends_with_its_first_success_also_inside_a_chunk():
    made = make(env=Diary, action_chunk=3, end_on_success=True, groups_per_step=8, num_envs=7)
    Diary.kept.clear()
    rollouts = collected(made)
    lengths = rollouts.mask_NT.sum(1)
    assert len(set(lengths.tolist()) & {1, 2, 4, 5}) > 1  # inside chunks of 3
    assert torch.equal((rollouts.reward_NT * rollouts.mask_NT).argmax(1) + 1, lengths)
    played = Diary.kept
    assert sorted(map(len, played)) == sorted(lengths.tolist())  # nothing is played after it
    recorded = rollouts.inputs["action"][..., 0]
    mine = sorted([round(x, 4) for x in recorded[i, :n].clamp(-1, 1).tolist()] for i, n in enumerate(lengths.tolist()))
    assert mine == sorted([[round(x / 9, 4) for x in episode] for episode in played])
    on = make(env=Diary, action_chunk=3, groups_per_step=8)
    assert collected(on).mask_NT.sum(1).tolist() == [7] * 32


def test_the_policy_looks_once_a_chunk():
    made = make(env=Diary, action_chunk=3, group_size=2, groups_per_step=1)
    looked = []
    act = made.policy.act
    made.policy.act = lambda seen, *rest: looked.append(seen[:, 0].tolist()) or act(seen, *rest)
    collected(made)
    assert looked == [[0, 0], [3, 3], [6, 6]]


def test_a_held_action_lasts_within_its_chunk():
    made = make(env=Diary, action_chunk=2, action_repeat=2, group_size=2, groups_per_step=1)
    Diary.kept.clear()
    rollouts = collected(made)
    assert rollouts.mask_NT.sum(1).tolist() == [4, 4]  # 2 + 2, 2 + 1 steps: the time limit is 7
    for episode in Diary.kept:
        assert len(episode) == 7 and episode[0] == episode[1] != episode[2] == episode[3] != episode[4]


def test_a_player_plays_whole_chunks_and_ends_with_a_success():
    made = make(env=Diary, action_chunk=3, end_on_success=True)
    source = made.source
    returns = made.watch(3)
    judged = made.evaluate(3)
    assert returns == judged.return_E.tolist() == [1.0, 1.0, 1.0] and judged.success_E.tolist() == [1.0, 1.0, 1.0]
    player = Player(Diary(), source.policy, source.scaling, EpisodeRules(end_on_success=True))
    assert player.episode(5) == 1.0 and player.env.t == player.env.when


# --- masks and levels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_what_would_come_after_a_success_has_no_gradient(level):
    """Whatever stands in the columns after it, also inside its chunk: the gradient is the same, bit for bit."""
    settings = {"end_on_success": True, "entropy_coef": 0.1, "advantage": "episode", "groups_per_step": 6}
    made = make(env=lambda: Reach(near=1.0), logprob_type=level, **settings)
    rollouts = collected(made)
    mask = rollouts.mask_NT
    width = made.policy.columns.width
    cut = (mask.sum(1) // width % 4 != 0) & (rollouts.reward_NT.sum(1) > 0)
    assert bool(cut.any()), "no success inside a chunk"
    other = {name: x.clone() for name, x in rollouts.inputs.items()}
    other["action"][~mask] = 7.0
    other["observation"][~mask] = -3.0
    mine = gradient(made, Experience.build(rollouts, made.recipe))
    theirs = gradient(made, Experience.build(rollouts.but(inputs=other), made.recipe))
    assert mine.abs().max() > 0 and torch.equal(mine, theirs)


def test_entropies_of_tokens_actions_and_chunks():
    """One row of five actions in chunks of three, two tokens each, entropies 1 … 10; the last chunk has two actions."""
    token = torch.arange(1.0, 11.0).reshape(5, 2)
    action, chunk = token.sum(1), torch.tensor([21.0] * 3 + [34.0] * 2)
    wide = torch.ones(1, 12, dtype=torch.bool)
    wide[:, 10:] = False
    narrow = wide[:, ::2]

    def found(logprob, entropy):
        columns = ChunkColumns(3, 2, logprob, entropy)
        return columns.entropies(token, wide if logprob == "token_level" else narrow)[0]

    def padded(x, to):
        return torch.cat([x, torch.zeros(to - len(x))])

    assert torch.equal(found("token_level", "token_level"), padded(token.reshape(-1), 12))
    assert torch.equal(found("token_level", "action_level"), padded(action.repeat_interleave(2), 12))
    assert torch.equal(found("token_level", "chunk_level"), padded(chunk.repeat_interleave(2), 12))
    assert torch.equal(found("action_level", "token_level"), padded(action / 2, 6))
    assert torch.equal(found("action_level", "action_level"), padded(action, 6))
    assert torch.equal(found("action_level", "chunk_level"), padded(chunk, 6))
    for level, each in (("token_level", [3.5, 8.5]), ("action_level", [7.0, 17.0]), ("chunk_level", [21.0, 34.0])):
        folded = fold(found("chunk_level", level)[None], narrow, 3)
        torch.testing.assert_close(folded, torch.tensor([each]))


def test_a_chunk_s_rewards_are_paid_with_its_last_action():
    reward = np.array([[1.0, 2, 3, 4, 5], [1.0, 2, 0, 0, 0]])
    paid = paid_together(reward, np.array([5, 2]), 3)
    assert paid.tolist() == [[0, 0, 6, 0, 9], [0, 3, 0, 0, 0]]
    assert paid_together(reward, np.array([5, 2]), 1).tolist() == reward.tolist()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("reward_type", ("action_level", "chunk_level")),
        ("logprob_type", LEVELS),
        ("entropy_type", LEVELS),
        ("action_chunk", (1, 2, 4)),
        ("end_on_success", (False, True)),
    ],
)
def test_every_level_changes_what_is_learned(name, values):
    weights = []
    for value in values:
        made = make(**{"entropy_coef": 0.3, "groups_per_step": 4, "num_iterations": 3, "target_kl": None, name: value})
        made.step()
        weights.append(torch.cat([p.detach().flatten()[:8] for p in made.policy.parameters().values()]))
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[i + 1 :])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_by": "steps", "advantage": "step"}, "group_by=steps counts single steps; set action_chunk=1"),
        ({"group_by": "anchor", "advantage": "step"}, "set action_chunk=1"),
        ({"decisions_per_minibatch": 8}, "takes apart what action_chunk=4 decides at once; use rows_per_minibatch"),
        ({"logprob_type": "token_level", "gamma": 0.9}, "gamma counts actions, not tokens"),
        ({"logprob_type": "chunk_level", "loss_type": "gspo"}, "both choose the ratio"),
        ({"action_chunk": 0}, "action_chunk"),
        ({"reward_type": "token_level"}, "reward_type: input should be"),
        ({"filter_rewards": True}, "needs rewards_lower_bound, rewards_upper_bound or both"),
        ({"rewards_lower_bound": 0.1}, "rewards_lower_bound has no effect here: it needs filter_rewards=true"),
        ({"filter_rewards": True, "rewards_lower_bound": 2, "rewards_upper_bound": 1}, "is above"),
        (
            {"filter_rewards": True, "rewards_lower_bound": 0, **EPISODE, "no_signal": "resample"},
            "leave no_signal=resample out",
        ),
        ({"filter_rewards": True, "rewards_lower_bound": 0, "group_by": "branch"}, "not group_by=branch"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ControlConfig(**{"action_chunk": 4} | settings)


def test_an_actor_of_ones_own_gives_a_whole_chunk():
    settings = {"env": lambda: Reach(near=1.0), "vector": "serial", "action_chunk": 4}
    torch.manual_seed(0)
    assert GRPOTrainer(actor=torch.nn.Linear(2, 8), **settings).step()["grad_norm"] > 0
    with pytest.raises(ValueError, match=r"actor gives \(2, 2\), .* needs \(2, 8\)"):
        GRPOTrainer(actor=torch.nn.Linear(2, 2), **settings)


# --- groups that are kept -------------------------------------------------------------------------------------------


class Lucky(gym.Env):
    """Every second start is hopeless and every fourth a sure thing; the others pay what is done."""

    observation_space, action_space = gs.Box(-1, 1, (1,), np.float32), gs.Discrete(2)
    resets: ClassVar[list] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets.append(seed)
        self.kind = int(seed // 2 % 4)
        return np.array([self.kind / 4], np.float32), {}

    def step(self, action):
        reward = {0: 0.0, 2: 0.0, 1: 1.0}.get(self.kind, float(action))
        return np.array([0], np.float32), reward, True, False, {}


def filtered(**settings):
    usual = {"env": Lucky, "vector": "serial", "group_size": 8, "groups_per_step": 12, "advantage": "episode"}
    bounds = {"filter_rewards": True, "rewards_lower_bound": 0.1, "rewards_upper_bound": 0.9}
    made = GRPOTrainer(**usual | bounds | settings)
    Lucky.resets.clear()
    return made


def test_only_groups_within_bounds_are_kept_and_the_others_asked_for_again():
    made = filtered(max_attempts=3)
    starts = made.source.collect(CollectRequest(0)).starts
    Lucky.resets.clear()
    kinds = {slot: seed // 2 % 4 for slot, seed in enumerate(starts)}
    report = made.step()
    group_N = report.experience.rollouts.group_N
    kept = set(group_N.tolist())
    assert kept == {slot for slot, kind in kinds.items() if kind == 3} and 0 < len(kept) < 12
    assert all(int((group_N == slot).sum()) == 8 for slot in kept)
    hopeless = 12 - len(kept)
    assert len(Lucky.resets) == 8 * (12 + 2 * hopeless)
    assert (report["attempts"], report["filtered"]) == (3.0, float(hopeless))
    assert len(report.experience) == 8 * len(kept)


def test_without_any_group_within_bounds_nothing_is_learned():
    made = filtered(rewards_lower_bound=5.0, rewards_upper_bound=None, max_attempts=2)
    before = {name: p.detach().clone() for name, p in made.policy.parameters().items()}
    report = made.step()
    assert report["filtered"] == 12.0 and not report.experience.mask_NT.any()
    assert all(torch.equal(p, before[name]) for name, p in made.policy.parameters().items())


def test_bounds_are_in_the_units_of_scaled_rewards():
    made = filtered(reward_scale=5.0, rewards_lower_bound=0.5, rewards_upper_bound=4.5)
    assert made.step().experience.mask_NT.any()
    other = filtered(reward_scale=5.0, rewards_lower_bound=6.0, rewards_upper_bound=7.0)
    assert not other.step().experience.mask_NT.any()
