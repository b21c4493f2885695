"""The smallest room, and the example for writing your own: a slot machine whose payoffs change while you play.

One decision, no state: a policy of V logits pulls an arm, the arm pays. Every `phase_length` steps the payoffs change;
the policy is never told, so it must settle on the best arm and still find the next one.

A room is four things around the shared trainer, here in this order:

    1. a config     `GRPOConfig` with what your domain adds; wrong settings are refused here, in one line
    2. a policy     scores recorded decisions, differentiably        grpo.protocols.SequencePolicy
    3. a source     samples tries, rewards them, makes `Rollouts`    grpo.protocols.RolloutSource
    4. make_trainer puts them into `GRPOTrainer`, which never hears what an arm is; if beta > 0 with a frozen copy of
                    the policy, which the KL is measured to          grpo.reference.FrozenReference

Two rules make a run repeatable and resumable. Randomness comes from (seed, step, attempt), never from a generator that
lives on between calls. What the next step depends on is in `parameters()` or in `state()`, nowhere else.

    from grpo.bandit import BanditConfig, make_trainer
    reports = make_trainer(BanditConfig(seed=1)).train(steps=100)
    sum(report["regret"] for report in reports)

The defaults are the preset's, whose payoffs begin with an arm that pays best: GRPO by the book, plain gradient steps,
and weight decay on the logits. A phase in which all arms pay alike teaches nothing, so the decay pulls the policy back
to uniform play, from where it finds the next best arm. It pulls in proportion to the logits, however certain the policy
is; an entropy bonus would pull in proportion to the probability of the arms it should bring back, which is next to
nothing when it matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, FiniteFloat, ValidationInfo, field_validator
from torch import Tensor

from grpo.blocks import Blocks, extended
from grpo.config import GRPOConfig
from grpo.core.kl import exact_entropy
from grpo.models import moved
from grpo.optimizers import SGD, AdamW
from grpo.protocols import Collected, CollectRequest, Part, Reference, State
from grpo.reference import FrozenReference
from grpo.rollouts import Rollouts, Scores, by_rows
from grpo.run.trainer import GRPOTrainer
from grpo.seeding import generator

FLAT = (0.4,) * 5
PAYOFFS = (FLAT, (0.1, 0.2, 0.0, 0.8, 0.3), FLAT, (0.7, 0.1, 0.3, 0.2, 0.0), FLAT)


# 1. the settings
class BanditConfig(GRPOConfig):
    """The algorithm's settings with the bandit's own; `grpo train bandit` has other payoffs."""

    blocks: ClassVar[Blocks] = extended(
        GRPOConfig.blocks, {"arms": ("payoffs", "phase_length", "noise"), "update": ("optimizer",)}
    )
    first: ClassVar[tuple[str, ...]] = (
        "payoffs", "phase_length", "noise", "loss_type", "group_size", "learning_rate", "weight_decay", "beta", "seed",
        "run.steps",
    )  # fmt: skip

    payoffs: tuple[tuple[FiniteFloat, ...], ...] = PAYOFFS
    """What each arm pays: a row a phase, a column an arm."""
    phase_length: int = Field(20, ge=1)
    """Steps a phase lasts; after the last phase the first comes again."""
    noise: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Standard deviation of the Gaussian noise on every payoff."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """sgd: steps in proportion to the gradient · adamw: steps of about learning_rate (try 2, and weight_decay 0.1)."""

    loss_type: str = "grpo"
    """The recipe: a row of the table that `grpo presets --recipes` prints."""
    group_size: int = Field(32, ge=2)
    """Pulls that are compared with each other."""
    groups_per_step: int = Field(1, ge=1)
    """Groups of pulls in one step."""
    learning_rate: float = Field(5.0, gt=0)
    """Of the optimizer. Large, because a logit's gradient is a probability times an advantage: a few tenths at most."""
    weight_decay: float = Field(0.02, ge=0, validate_default=True)
    """Share of the logits, times learning_rate, that each step takes off: the way back to uniform play."""
    device: str = "auto"
    """cpu, cuda or mps. auto: the CPU, where a handful of logits is fastest."""

    @field_validator("payoffs")
    @classmethod
    def _a_table(cls, payoffs: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        lengths = {len(phase) for phase in payoffs}
        if len(lengths) != 1:
            raise ValueError("give at least one phase, and every phase the same number of arms")
        if lengths.pop() < 2:
            raise ValueError("give at least two arms; with one there is nothing to choose")
        return payoffs

    @field_validator("weight_decay")
    @classmethod
    def _no_overshoot(cls, weight_decay: float, info: ValidationInfo) -> float:
        if weight_decay * info.data.get("learning_rate", 0.0) >= 1:
            raise ValueError("learning_rate × weight_decay must stay below 1, the whole logit; lower one of them")
        return weight_decay

    @property
    def arms(self) -> int:
        """V, the number of arms."""
        return len(self.payoffs[0])

    def phase(self, step: int) -> int:
        """Which row of `payoffs` holds at this step, counted from 0."""
        return step // self.phase_length % len(self.payoffs)


# 2. the policy
class SoftmaxPolicy:
    """π(arm) = softmax(logits). It sees no state, so it cannot know the phase."""

    def __init__(self, logits_V: Tensor) -> None:
        self.logits_V = logits_V.detach().clone().requires_grad_()
        self.version = 0

    def score(self, rows: Rollouts, entropy: bool = False) -> Scores:
        """log π of the arms that were pulled; the entropy exactly, since every arm is known."""
        logp_V = self.logits_V.log_softmax(0)
        entropy_NT = exact_entropy(logp_V).expand(len(rows), 1) if entropy else None
        return Scores(logp_V[rows.inputs][:, None], entropy_NT)

    def probabilities(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """π of every arm, in float64 on the CPU: the same draws on every device."""
        return self.logits_V.detach().cpu().double().softmax(0).numpy()

    def parameters(self) -> Mapping[str, Tensor]:
        """What is trained."""
        return {"logits": self.logits_V}

    split = staticmethod(by_rows)

    def to(self, device: str) -> None:
        """Move there, before an optimizer is made."""
        self.logits_V = self.logits_V.detach().to(device).requires_grad_()

    def train(self) -> None:
        """Nothing differs between learning …"""

    def eval(self) -> None:
        """… and sampling."""


# 3. the source
class BanditSource:
    """Pulls arms with the policy and pays for them. It alone knows the phase."""

    headline = ("regret_total", "best_arm_probability")
    """What a person wants to see first."""

    def __init__(self, policy: SoftmaxPolicy, config: BanditConfig) -> None:
        self._policy, self._config = policy, config
        self._regret_total = 0.0
        self._metrics: dict[str, Any] = {}

    @torch.no_grad()
    def collect(self, request: CollectRequest) -> Collected:
        """A group of pulls for each start; all starts are the same machine."""
        config, like = self._config, self._policy.logits_V
        starts = list(range(config.groups_per_step) if request.starts is None else request.starts)
        count = len(starts) * config.group_size
        payoff_V, p_V = np.array(config.payoffs[config.phase(request.step)]), self._policy.probabilities()

        random = generator(config.seed, request.step, request.attempt)
        arm_N = np.searchsorted(p_V.cumsum(), random.random(count), side="right").clip(max=config.arms - 1)
        reward_N = payoff_V[arm_N] + config.noise * random.standard_normal(count)
        if request.attempt == 0:
            self._measure(request.step, payoff_V, p_V)

        inputs = torch.as_tensor(arm_N, device=like.device)
        rollouts = Rollouts(
            group_N=torch.arange(len(starts), device=like.device).repeat_interleave(config.group_size),
            mask_NT=torch.ones(count, 1, dtype=torch.bool, device=like.device),
            old_logp_NT=like.log_softmax(0)[inputs][:, None],
            reward_N=torch.as_tensor(reward_N).to(like),
            inputs=inputs,
        )
        return Collected(rollouts, starts)

    def collect_part(self, request: CollectRequest) -> Part:
        """Of all pulls, which every rank draws alike, the groups that are asked for here."""
        everything = self.collect(request)
        own, size = request.slots.of(len(everything.starts)), self._config.group_size
        rows = range(own.start * size, own.stop * size)
        return Part(everything.rollouts.select(rows) if rows else None, everything.starts)

    def _measure(self, step: int, payoff_V: np.ndarray[Any, Any], p_V: np.ndarray[Any, Any]) -> None:
        """What the policy that samples is worth, before it learns: expectations, so no sampling noise."""
        best_V, flat = payoff_V == payoff_V.max(), bool(np.ptp(payoff_V) == 0)
        regret = 0.0 if flat else float(payoff_V.max() - p_V @ payoff_V)
        self._regret_total += regret
        self._metrics = {
            "phase": float(self._config.phase(step)),
            "regret": regret,
            "regret_total": self._regret_total,
            "best_arm": None if flat else float(best_V.argmax()),
            "best_arm_probability": None if flat else float(p_V[best_V].sum()),
        } | {f"arm_probability/{arm}": float(p) for arm, p in enumerate(p_V)}

    def state(self) -> State:
        """The regret so far; the step comes with each request, and so do the phase and the randomness."""
        return State({"regret_total": self._regret_total}, {})

    def load_state(self, state: State) -> None:
        """Go on counting from there."""
        self._regret_total = float(state.values["regret_total"])

    def metrics(self) -> Mapping[str, Any]:
        """Of the policy that sampled last; best arm None while all arms pay alike."""
        return self._metrics

    @torch.no_grad()
    def entropies(self, rows: Rollouts) -> Tensor | None:
        """Of the choice, by the policy as it is now."""
        return self._policy.score(rows, entropy=True).entropy_NT

    def show(self, rows: Rollouts) -> list[dict[str, Any]]:
        """The arm that each row pulled."""
        return [{"arm": arm} for arm in rows.inputs.tolist()]

    def close(self) -> None:
        """Nothing to close."""


# 4. the trainer
class BanditTrainer(GRPOTrainer):
    """The trainer that everyone shares; runs of it are called `bandit`."""

    task = "bandit"


def make_trainer(config: BanditConfig) -> GRPOTrainer:
    """A trainer that starts from uniform play."""
    policy: SoftmaxPolicy = moved(SoftmaxPolicy(torch.zeros(config.arms)), config.device)
    reference: Reference | None = FrozenReference.copy_of(policy) if config.recipe.beta else None
    make = {"sgd": SGD, "adamw": AdamW}[config.optimizer]
    optimizer = make([policy.logits_V], lr=config.learning_rate, weight_decay=config.weight_decay)
    return BanditTrainer(config, policy, reference, optimizer=optimizer, source=BanditSource(policy, config))
