"""A policy nobody planned for: a flow that turns noise into a whole plan, trained by GRPO through the public Protocols.

    python examples/flow_policy.py --seeds 3

A point stands before a wall with a gap on its left and one on its right, and must reach a place behind it. A plan is
eight steps, sixteen numbers. A few demonstrations go both ways, so that their mean runs into the wall: a flow imitates
them (arXiv:2210.02747), a single Gaussian could not. Imitation alone succeeds now and then; GRPO takes it from there
with nothing but success as reward.

Log-probs: a flow's ODE has none that are cheap, so the plan is sampled by the SDE with the same marginals (Flow-GRPO,
arXiv:2505.05470). With x = (1 − t)·noise + t·plan and v the flow's velocity,

    x ← x + (v − η²/2 · (x − t·v))·dt + η·√((1 − t)·dt)·ε

is a Gaussian at every step: the sampler's steps are the decisions that GRPO compares, and "the action" is its path.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor, nn

from grpo import GRPOConfig, GRPOTrainer

PLAN, WALL, REACH, NEAR = 8, 0.6, 0.5, 0.3
"""Steps of a plan; half the wall's width; the longest step on either axis; how near to the goal counts."""


# --- the task -------------------------------------------------------------------------------------------------------


def walked(state_NS: Tensor, plan_NA: Tensor) -> Tensor:
    """(N, PLAN + 1, 2): where the point is after each step; a state is the start's and the goal's x."""
    start_N2 = torch.stack([state_NS[:, 0], -torch.ones(len(state_NS))], 1)
    step_NP2 = plan_NA.reshape(-1, PLAN, 2).clamp(-1, 1) * REACH
    return torch.cat([start_N2[:, None], start_N2[:, None] + step_NP2.cumsum(1)], 1)


def succeeds(state_NS: Tensor, plan_NA: Tensor) -> Tensor:
    """Whether the wall (y = 0, |x| < WALL) is never crossed and the goal (y = 1) is where it ends."""
    place_NP2 = walked(state_NS, plan_NA)
    here, there = place_NP2[:, :-1], place_NP2[:, 1:]
    crosses = (here[..., 1] < 0) != (there[..., 1] < 0)
    share = here[..., 1] / (here[..., 1] - there[..., 1]).where(crosses, torch.ones(()))
    x = here[..., 0] + share * (there[..., 0] - here[..., 0])
    goal_N2 = torch.stack([state_NS[:, 1], torch.ones(len(state_NS))], 1)
    near = (place_NP2[:, -1] - goal_N2).norm(dim=1) < NEAR
    return near & ~(crosses & (x.abs() < WALL)).any(1)


def drawn_states(count: int, random: torch.Generator) -> Tensor:
    """Starts and goals."""
    return 0.6 * torch.rand(count, 2, generator=random) - 0.3


def demonstrations(state_NS: Tensor, random: torch.Generator) -> Tensor:
    """Plans around the wall, half of them on either side, with an unsteady hand."""
    side_N = torch.where(torch.rand(len(state_NS), generator=random) < 0.5, -1.0, 1.0)
    corner = torch.stack([1.1 * side_N, torch.zeros(len(state_NS))], 1)
    start = torch.stack([state_NS[:, 0], -torch.ones(len(state_NS))], 1)
    goal = torch.stack([state_NS[:, 1], torch.ones(len(state_NS))], 1)
    half = PLAN // 2
    legs = torch.cat([((corner - start) / half)[:, None].expand(-1, half, -1),
                      ((goal - corner) / half)[:, None].expand(-1, half, -1)], 1)  # fmt: skip
    hand = 0.12 * torch.randn(legs.shape, generator=random)
    return ((legs + hand) / REACH).flatten(1)


# --- the policy: grpo.protocols.PolicyModel -------------------------------------------------------------------------


class FlowPolicy(nn.Module):
    """Noise to plan in `steps` steps of the sampler; an action is the path (steps + 1, A), its end the plan."""

    def __init__(self, states: int = 2, size: int = 2 * PLAN, steps: int = 10, noise: float = 0.7, hidden: int = 128):
        super().__init__()
        self.size, self.steps, self.noise = size, steps, noise
        self.net = nn.Sequential(
            nn.Linear(states + size + 2, hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.SiLU(),
            nn.Linear(hidden, size),
        )

    def velocity(self, x_NA: Tensor, t: Tensor, state_NS: Tensor) -> Tensor:
        """v(x, t | state), where the plan is minus the noise on average."""
        time = torch.stack([t, torch.cos(math.pi * t)], -1).expand(len(x_NA), 2)
        return self.net(torch.cat([x_NA, time, 3 * state_NS], 1))

    def moments(self, x_NA: Tensor, step: int, state_NS: Tensor) -> tuple[Tensor, float]:
        """Mean and deviation of where the sampler goes next."""
        t, dt = torch.full((len(x_NA),), step / self.steps), 1 / self.steps
        v_NA = self.velocity(x_NA, t, state_NS)
        drift_NA = v_NA - 0.5 * self.noise**2 * (x_NA - t[:, None] * v_NA)
        return x_NA + drift_NA * dt, self.noise * math.sqrt((1 - step / self.steps) * dt)

    @torch.no_grad()
    def paths(self, state_NS: Tensor) -> Tensor:
        """(N, steps + 1, A): every place that the sampler came through."""
        places = [torch.randn(len(state_NS), self.size)]
        for step in range(self.steps):
            mean_NA, deviation = self.moments(places[-1], step, state_NS)
            places.append(mean_NA + deviation * torch.randn_like(mean_NA))
        return torch.stack(places, 1)

    def generate_actions(self, states: list[Any], num_actions_per_state: int, **kwargs: Any) -> list[list[Tensor]]:
        """A group of paths for each state."""
        each_NS = torch.stack(list(states)).repeat_interleave(num_actions_per_state, 0)
        return [list(group) for group in self.paths(each_NS).split(num_actions_per_state)]

    def get_log_probabilities(self, states: list[Any], actions: list[Any]) -> Tensor:
        """(N, steps): of every step of the sampler. The noise it began with is nobody's decision."""
        state_NS, path = torch.stack(list(states)), torch.stack(list(actions))
        found = []
        for step in range(self.steps):
            mean_NA, deviation = self.moments(path[:, step], step, state_NS)
            z_NA = (path[:, step + 1] - mean_NA) / deviation
            found.append((-0.5 * z_NA**2 - math.log(deviation) - 0.5 * math.log(2 * math.pi)).sum(1))
        return torch.stack(found, 1)

    def get_mask(self, states: list[Any], actions: list[Any]) -> Tensor:
        """Every step counts."""
        return torch.ones(len(states), self.steps, dtype=torch.bool)

    def get_parameters(self) -> dict[str, Tensor]:
        """What is trained."""
        return dict(self.named_parameters())


class Success(nn.Module):
    """grpo.protocols.RewardModel: 1 for a plan that arrives."""

    def compute_rewards(self, states: list[Any], actions: list[Any]) -> Tensor:
        """Only where the path ends matters."""
        return succeeds(torch.stack(list(states)), torch.stack(list(actions))[:, -1]).float()


# --- imitation, GRPO, and what came of it ---------------------------------------------------------------------------


def imitate(policy: FlowPolicy, state_NS: Tensor, plan_NA: Tensor, updates: int) -> None:
    """Flow matching: v(x_t) ≈ plan − noise, on the line between them."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for _ in range(updates):
        row = torch.randint(len(plan_NA), (128,))
        noise, t = torch.randn(128, policy.size), torch.rand(128)
        x = (1 - t[:, None]) * noise + t[:, None] * plan_NA[row]
        loss = (policy.velocity(x, t, state_NS[row]) - (plan_NA[row] - noise)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def judged(policy: FlowPolicy, count: int = 1000) -> tuple[float, float]:
    """Share of plans that succeed on fresh states, and share of those that go round the left."""
    state_NS = drawn_states(count, torch.Generator().manual_seed(10_000))
    plan_NA = policy.paths(state_NS)[:, -1]
    good = succeeds(state_NS, plan_NA)
    left = walked(state_NS, plan_NA)[good][:, PLAN // 2, 0] < 0
    return float(good.float().mean()), float(left.float().mean()) if len(left) else math.nan


def trained(
    seed: int, steps: int = 60, shown: int = 64, updates: int = 400
) -> tuple[FlowPolicy, list[tuple[float, float]]]:
    """A flow that imitates and then learns; what `judged` says before, in between and after."""
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    policy = FlowPolicy()
    found = [judged(policy)]
    state_NS = drawn_states(shown, random)
    imitate(policy, state_NS, demonstrations(state_NS, random), updates)
    found.append(judged(policy))
    config = GRPOConfig(loss_type="grpo", group_size=16, num_iterations=4, groups_per_minibatch=16, learning_rate=5e-4,
                        epsilon=0.1, seed=seed)  # fmt: skip
    trainer = GRPOTrainer(config, policy, reward_model=Success())
    for _ in range(steps):
        trainer.step(list(drawn_states(32, random)))
    return policy, [*found, judged(policy)]


def main() -> None:
    """Some seeds, a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="of GRPO")
    given = parser.parse_args()
    print("seed   untrained   imitation       GRPO   (round the left)")
    for seed in range(given.seeds):
        _, found = trained(seed, given.steps)
        shares = "".join(f"{share:11.1%}" for share, _ in found)
        print(f"{seed:4d} {shares}   {found[1][1]:.0%} → {found[-1][1]:.0%}", flush=True)


if __name__ == "__main__":
    main()
