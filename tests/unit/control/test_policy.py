"""What was recorded while playing is what learning scores, for every kind of action and observation."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from torch import nn

from grpo.control import GRPOTrainer
from grpo.control.networks import make_network
from grpo.control.policy import ActorPolicy
from grpo.envs.heads import make_head
from grpo.protocols import CollectRequest
from grpo.reference import FrozenReference

VECTOR = gs.Box(-1, 1, (3,), np.float32)
ACTIONS = {
    "Discrete": (gs.Discrete(3, start=1), "auto"),
    "MultiDiscrete": (gs.MultiDiscrete([3, 2]), "auto"),
    "MultiBinary": (gs.MultiBinary(4), "auto"),
    "Gaussian": (gs.Box(-2, 3, (2,)), "gaussian"),
    "squashed": (gs.Box(-2, 3, (2,)), "squashed"),
    "Beta": (gs.Box(-2, 3, (2,)), "beta"),
}
SEEN = {
    "vector": VECTOR,
    "code": gs.Discrete(5, start=2),
    "codes": gs.MultiDiscrete([2, 3]),
    "picture": gs.Box(0, 255, (8, 8, 3), np.uint8),
    "parts": gs.Dict({"picture": gs.Box(0, 255, (8, 8, 1), np.uint8), "n": gs.Discrete(4), "x": VECTOR}),
    "pair": gs.Tuple((gs.Discrete(2), VECTOR)),
}


class Sampled(gym.Env):
    """Shows samples of its observation space, for two to five steps."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.left = int(self.np_random.integers(2, 6))
        return self.observation_space.sample(), {}

    def step(self, action):
        self.left -= 1
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), float(np.sum(action)), self.left == 0, False, {}


def make(seen=VECTOR, action=ACTIONS["Discrete"], **settings) -> GRPOTrainer:
    usual = {"vector": "serial", "group_size": 4, "groups_per_step": 3, "num_envs": 5, "action_head": action[1]}
    usual |= {} if "actor" in settings else {"hidden": (16,)}
    return GRPOTrainer(env=lambda: Sampled(seen, action[0]), **usual | settings)


@torch.no_grad()
def louder(made: GRPOTrainer, by: float = 80.0) -> GRPOTrainer:
    """Far from the uniform beginning, so that a wrong log-prob shows."""
    network = made.actor
    (network.out if hasattr(network, "out") else network.layers[-1]).weight.mul_(by)
    return made


def scored(made: GRPOTrainer):
    rollouts = made.source.collect(CollectRequest(0)).rollouts
    with torch.no_grad():
        return rollouts, made.policy.score(rollouts, entropy=True)


def expect_recorded(rollouts, scores):
    mask = rollouts.mask_NT
    assert 0 < int(mask.sum()) < mask.numel()  # rows of different lengths
    torch.testing.assert_close(scores.logp_NT[mask], rollouts.old_logp_NT[mask], rtol=1e-4, atol=1e-5)
    assert rollouts.old_logp_NT[mask].std() > 0.05
    assert scores.entropy_NT.shape == mask.shape and torch.isfinite(scores.entropy_NT[mask]).all()
    assert not scores.logp_NT[~mask].any() and not scores.entropy_NT[~mask].any()


@pytest.mark.parametrize("name", ACTIONS)
def test_every_action_is_scored_as_it_was_recorded(name):
    expect_recorded(*scored(louder(make(action=ACTIONS[name]))))


@pytest.mark.parametrize("name", SEEN)
def test_every_observation_is_scored_as_it_was_seen(name):
    expect_recorded(*scored(louder(make(SEEN[name], scale_observations=True))))


@pytest.mark.parametrize("name", ["vector", "parts"])
def test_a_whole_episode_is_remembered_as_it_was_played(name):
    """With fewer copies than episodes: a seat that is taken over begins with an empty memory."""
    rollouts, scores = scored(louder(make(SEEN[name], memory=8)))
    expect_recorded(rollouts, scores)


def test_what_is_remembered_matters():
    made = louder(make(memory=8))
    rollouts, scores = scored(made)
    alone = rollouts.decisions()
    with torch.no_grad():
        forgetful = made.policy.score(alone).logp_NT[:, 0]
    mask = rollouts.mask_NT
    first = torch.zeros_like(mask)
    first[:, 0] = True
    torch.testing.assert_close(forgetful[first[mask]], scores.logp_NT[mask & first], rtol=1e-4, atol=1e-5)
    assert (forgetful - scores.logp_NT[mask])[~first[mask]].abs().max() > 0.01


@pytest.mark.parametrize("name", ACTIONS)
def test_the_exact_divergence_is_from_the_policy_that_sampled(name):
    exact = {"beta": 0.1, "kl_estimator": "exact", "kl_to": "old", "kl_direction": "other_current"}
    made = louder(make(action=ACTIONS[name], **exact))
    rollouts, scores = scored(made)
    mask = rollouts.mask_NT
    assert scores.exact_kl_NT.shape == mask.shape
    torch.testing.assert_close(scores.exact_kl_NT[mask], torch.zeros(int(mask.sum())), atol=1e-4, rtol=0)
    with torch.no_grad():
        for parameter in made.policy.parameters().values():
            parameter.add_(0.1)
        moved = made.policy.score(rollouts).exact_kl_NT
    assert (moved[mask] > 0).all() and not moved[~mask].any()


def test_without_a_divergence_nothing_is_kept_for_it():
    rollouts, scores = scored(make())
    assert "old" not in rollouts.inputs and scores.exact_kl_NT is None
    assert make().policy.score(rollouts).entropy_NT is None


def test_rows_can_be_scored_in_parts():
    made = louder(make())
    rollouts, scores = scored(made)
    parts = made.policy.split(rollouts, 5)
    assert [len(part) for part in parts] == [5, 5, 2]
    with torch.no_grad():
        found = torch.cat([made.policy.score(rollouts.select(part)).logp_NT for part in parts])
    torch.testing.assert_close(found, scores.logp_NT)


# --- playing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_memory_is_ready_for_a_backward_pass_and_all_else_plays(mode):
    policy = ActorPolicy(make_network(VECTOR, 3, memory=4), make_head(gs.Discrete(3)))
    getattr(policy, mode)()
    assert policy.network.gru.training and not policy.network.layers.training and not policy.network.training
    forgetful = nn.ModuleDict({"rnn": nn.LSTM(3, 4, num_layers=2, dropout=0.5), "drop": nn.Dropout()})
    getattr(ActorPolicy(forgetful, make_head(gs.Discrete(3))), mode)()
    assert not any(module.training for module in forgetful.modules())  # another policy than what played


def test_greedy_is_the_likeliest_and_says_no_log_prob():
    head = make_head(gs.Discrete(3))
    policy = ActorPolicy(make_network(VECTOR, 3, (8,)), head)
    seen = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    acted = policy.act(seen, None)
    assert acted.recorded.tolist() == acted.out_MF.argmax(1).tolist() and not acted.logp_M.any()


def test_seats_that_are_taken_over_forget():
    policy = ActorPolicy(make_network(VECTOR, 3, (8,), memory=4), make_head(gs.Discrete(3)))
    memory = torch.arange(12.0).reshape(3, 4)
    found = policy.seated(memory, np.array([True, False, True]), 2)
    torch.testing.assert_close(found, torch.cat([memory[[0, 2]], torch.zeros(2, 4)]))
    assert ActorPolicy(make_network(VECTOR, 3, (8,)), make_head(gs.Discrete(3))).begin(3) is None


# --- the reference --------------------------------------------------------------------------------------------------


def test_the_reference_stays_until_it_is_told_to_follow():
    made = louder(make(action=ACTIONS["Gaussian"], beta=0.1))
    reference, policy = made.reference, made.policy
    assert isinstance(reference, FrozenReference)
    assert not any(p.requires_grad for p in reference.parameters().values())
    rollouts, _ = scored(made)
    made.source.policy.network.layers[-1].bias.data.add_(1.0)
    before = reference.score(rollouts)
    moved = policy.score(rollouts).logp_NT.detach()
    assert (before - moved)[rollouts.mask_NT].abs().min() > 1e-4
    own = {name: value.clone() for name, value in reference.parameters().items()}
    reference.sync(policy.parameters(), 0.25)
    for name, value in reference.parameters().items():
        torch.testing.assert_close(value, 0.75 * own[name] + 0.25 * policy.parameters()[name])
    reference.sync(policy.parameters(), 1.0)
    torch.testing.assert_close(reference.score(rollouts), moved)


# --- a user's own module and optimizer ------------------------------------------------------------------------------


class Own(nn.Module):
    """Reads a Dict, in float32."""

    def __init__(self, out=3):
        super().__init__()
        self.one, self.two = nn.Linear(3 + 1 + 64, 8), nn.Linear(8, out)

    def forward(self, seen):
        assert all(x.dtype == torch.float32 for x in seen.values())
        flat = torch.cat([seen["x"], seen["n"][:, None], seen["picture"].flatten(1) / 255], 1)
        return self.two(torch.tanh(self.one(flat)))


def test_a_users_module_plays_and_learns():
    actor = Own()
    nn.init.normal_(actor.two.weight, 0.0, 3.0)
    made = make(SEEN["parts"], actor=actor)
    assert made.actor is actor
    expect_recorded(*scored(made))
    before = actor.two.weight.clone()
    made.step()
    assert not torch.equal(actor.two.weight, before)


def test_a_module_with_another_output_is_refused_with_the_action_space():
    with pytest.raises(ValueError, match=r"^actor gives \(2, 5\), the action space Discrete\(3, .* needs \(2, 3\)$"):
        make(SEEN["parts"], actor=Own(5))
    with pytest.raises(ValueError, match=r"^actor cannot read two observations of Box\("):
        make(VECTOR, actor=nn.Linear(4, 3))
    with pytest.raises(ValueError, match="hidden has no effect with an actor of your own"):
        make(VECTOR, actor=nn.Linear(3, 3), hidden=(8,))


def test_a_users_optimizer_gets_the_heads_own_numbers():
    actor = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.5)
    made = make(action=ACTIONS["Gaussian"], actor=actor, optimizer=optimizer)
    assert made.optimizer is optimizer
    log_std = made.source.policy.head.log_std_A
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
    assert optimizer.param_groups[1]["params"][0] is log_std and optimizer.param_groups[1]["lr"] == 0.5
    before = log_std.detach().clone()
    made.step()
    assert not torch.equal(log_std, before)


def test_an_optimizer_that_has_them_already_is_left_as_it_is():
    made = make(action=ACTIONS["Gaussian"])
    held = [*made.actor.parameters(), made.source.policy.head.log_std_A]
    assert [p for group in made.optimizer.param_groups for p in group["params"]] == held
    actor = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(actor.parameters())
    make(actor=actor, optimizer=optimizer)
    assert len(optimizer.param_groups) == 1


def test_an_optimizer_of_something_else_is_refused():
    with pytest.raises(ValueError, match="the optimizer holds 2 tensors that"):
        make(actor=nn.Linear(3, 3), optimizer=torch.optim.Adam(nn.Linear(3, 3).parameters()))


def test_part_of_a_users_module_may_stay_as_it_is():
    actor = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    frozen = actor[0].weight.clone()
    make(actor=actor, optimizer=torch.optim.Adam(actor[2].parameters())).step()
    assert torch.equal(actor[0].weight, frozen)
