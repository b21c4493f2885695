"""The tutorial's constructor means the tutorial's arithmetic: one update on the same data, to 1e-6."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from grpo.control import GRPOTrainer, test
from grpo.protocols import CollectRequest

test.__test__ = False  # a function of the library, not one of ours


def make_actor(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def make(actor, **settings) -> GRPOTrainer:
    optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
    given = {"clip_ratio": 0.2, "beta": 0.001, "gamma": 0.99, "epochs": 10, "batch_size": 32, "group_size": 200}
    return GRPOTrainer(env=gym.make("CartPole-v1"), actor=actor, optimizer=optimizer, **given | settings)


def by_hand(actor, observation, action, reward, done, order, beta=0.001, clip=0.2, gamma=0.99) -> None:
    """The tutorial's update in plain torch, on a window and an order of minibatches."""
    returns, running = [], 0.0
    for r, d in zip(reversed(reward), reversed(done), strict=True):
        running = r + gamma * running * (1 - d)
        returns.append(running)
    value = torch.tensor(returns[::-1], dtype=torch.float32)
    advantage = (value - value.mean()) / (value.std() + 1e-8)
    with torch.no_grad():
        old = torch.distributions.Categorical(logits=actor(observation))
        old_logp = old.log_prob(action)
    optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
    for rows in order:
        now = torch.distributions.Categorical(logits=actor(observation[rows]))
        ratio = torch.exp(now.log_prob(action[rows]) - old_logp[rows])
        gain = torch.min(ratio * advantage[rows], ratio.clamp(1 - clip, 1 + clip) * advantage[rows])
        before = torch.distributions.Categorical(logits=old.logits[rows])
        loss = -gain.mean() + beta * torch.distributions.kl_divergence(before, now).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
        optimizer.step()


@pytest.mark.parametrize("beta", [0.001, 0.5])
def test_one_update_equals_the_tutorials(beta):
    actor = make_actor()
    theirs = copy.deepcopy(actor)
    ours, twin = make(actor, beta=beta), make(copy.deepcopy(actor), beta=beta)
    window = twin.source.collect(CollectRequest(0)).rollouts
    mask_NT = window.mask_NT
    ends = np.cumsum(mask_NT.sum(1).numpy()) - 1
    done = np.zeros(200)
    done[ends[:-1]] = 1.0  # the last part is cut by the window, not ended
    order = list(ours._minibatches(window.decisions()))
    assert [len(rows) for rows in order] == ([32] * 6 + [8]) * 10
    by_hand(
        theirs,
        window.inputs["observation"][mask_NT],
        window.inputs["action"][mask_NT],
        window.reward_NT[mask_NT].tolist(),
        done.tolist(),
        order,
        beta,
    )
    before = copy.deepcopy(actor)
    report = ours.step()
    moved = [(p - q).abs().max() for p, q in zip(actor.parameters(), before.parameters(), strict=True)]
    assert max(moved) > 1e-3
    for mine, other in zip(actor.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    assert report["updates"] == 70


def test_its_names_are_reported_beside_ours():
    ours = make(make_actor(), epochs=1)
    reports = ours.train(total_updates=3, progress=None)
    assert [r["update"] for r in reports] == [0, 1, 2]
    for report in reports:
        assert report["kl_divergence"] == report["kl"] >= 0
        assert report["avg_reward"] == report["return"] > 0
        assert "policy_loss" in report and "env_steps" in report


def test_defaults_are_the_tutorials_when_its_words_are_used():
    ours = GRPOTrainer(env="CartPole-v1", clip_ratio=0.2)
    config, recipe = ours.config, ours.recipe
    assert (config.group_by, config.group_size, config.num_iterations) == ("steps", 200, 10)
    assert (config.decisions_per_minibatch, config.max_grad_norm, config.learning_rate) == (32, 0.5, 3e-4)
    assert (recipe.beta, recipe.gamma, recipe.kl_estimator, recipe.kl_to) == (0.001, 0.99, "exact", "old")
    tuned = GRPOTrainer(env="CartPole-v1", group_size=8)
    assert tuned.config.group_by == "start" and tuned.recipe.name == "control"


def test_episodes_longer_than_the_window_are_counted_whole():
    class Balanced(nn.Module):
        """Keeps the pole up: left or right of a linear rule."""

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            lean = 20 * (x @ torch.tensor([0.1, 0.5, 2.0, 1.0])) * self.scale
            return torch.stack([-lean, lean], -1)

    actor = Balanced()
    ours = GRPOTrainer(
        env=gym.make("CartPole-v1"), actor=actor, clip_ratio=0.2, group_size=50, epochs=1, learning_rate=1e-9
    )
    reports = ours.train(total_updates=22, progress=None)
    assert reports[0]["return"] is None  # nothing has ended yet
    assert reports[-1]["return"] == 500 and reports[-1]["episodes"] == 2


def test_the_test_function_prints_each_episode(capsys):
    env = gym.make("CartPole-v1")
    returns = test(env, make_actor(), episodes=2)
    assert capsys.readouterr().out.splitlines() == [
        f"Test Episode {n} | Reward: {total}" for n, total in enumerate(returns, 1)
    ]
    assert make(make_actor()).test(episodes=1) and "Test Episode 1 | Reward: " in capsys.readouterr().out


def test_rendering_without_a_display_writes_a_video(tmp_path, monkeypatch, capsys):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    make(make_actor()).test(episodes=1, render=True)
    assert (tmp_path / "test.mp4").stat().st_size > 1000
    assert "no display: the episodes are in test.mp4" in capsys.readouterr().out
