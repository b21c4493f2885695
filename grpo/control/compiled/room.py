"""The control room's step as a program: weights in and out of the policy, what was played into the source's record.

The policy's and the optimizer's tensors stay the truth: a checkpoint, an export or an evaluation knows no difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from grpo import optimizers
from grpo.control.compiled.learn import BETAS, EPS, Adam, Passes, Told
from grpo.control.compiled.networks import CompiledPolicy, Weights, compiled_head, flat
from grpo.control.compiled.play import Scale
from grpo.control.compiled.program import Program, Step
from grpo.control.config import ControlConfig
from grpo.control.groups import EVALUATION, seeds
from grpo.control.play import Episodes
from grpo.control.policy import ActorPolicy
from grpo.control.scaling import Scaling
from grpo.control.source import ControlSource, learned_from
from grpo.envs.evaluate import Evaluation
from grpo.envs.functions.numbers import numbers
from grpo.envs.functions.task import FunctionTask
from grpo.errors import ConfigError
from grpo.experience import Experience, count
from grpo.report import StepReport, Update, Updates, reward_metrics
from grpo.rollouts import Rollouts, Scores, Status
from grpo.seeding import derive

if TYPE_CHECKING:
    from grpo.trainer import Trainer


BROKEN = "an observation or a reward of this episode is not a finite number; --compiled false says which step it was"


def seed_key(seed: int) -> np.ndarray:
    """The key that everything of a seed is drawn from, as two words."""
    drawn = derive(seed, 0, "compiled")
    return np.array([drawn >> 32, drawn & 0xFFFFFFFF], np.uint32)


def make_program(task: FunctionTask, policy: ActorPolicy, horizon: int, config: ControlConfig) -> Program:
    """The step of these settings as a function."""
    head = compiled_head(policy.head)
    assert head is not None
    recipe, decisions = config.recipe, config.decisions_per_minibatch
    single = recipe.ratio == "token" and recipe.reduction == "token_mean" and not recipe.surrogate.whole_rows
    passes = Passes(
        recipe=recipe,
        num_iterations=config.num_iterations,
        decisions=decisions,
        apart=decisions is not None or single,
        detached=config.old_logp == "detached" or (config.old_logp == "auto" and config.one_update),
        entropy=bool(recipe.entropy_coef) or config.report_entropy,
        target_kl=config.target_kl,
        max_ratio=config.max_ratio,
        max_grad_norm=config.max_grad_norm,
        weight_decay=config.weight_decay,
    )
    compiled = CompiledPolicy(Weights.of(policy.parameters()), config.activation, head)
    return Program.of(task, compiled, horizon, passes, config)


_MADE: dict[Any, tuple[Any, Any]] = {}
"""Functions of programs that this process has asked for: a second run of the same settings compiles nothing."""
MOST_MADE = 16


def made_once(program: Program) -> tuple[Any, Any]:
    """Step and evaluation of a program, compiled when first called."""
    if program.key not in _MADE:
        if len(_MADE) >= MOST_MADE:
            _MADE.pop(next(iter(_MADE)))
        _MADE[program.key] = jax.jit(program.step), jax.jit(program.judged, static_argnames="greedy")
    return _MADE[program.key]


class CompiledRoom:
    """Steps and evaluations of one run by a program."""

    def __init__(self, source: ControlSource, task: FunctionTask, optimizer: torch.optim.Optimizer) -> None:
        self.source, self._optimizer, self._config = source, optimizer, source.config
        self.program = make_program(task, source.policy, source.fleet.horizon or task.limit, source.config)
        self._key = seed_key(source.config.seed)
        self._step, self._judge = made_once(self.program)
        self._starts: Any = None

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self, trainer: Trainer) -> tuple[StepReport, Updates]:
        """One step of the trainer, all of it in the program; what it left is in the policy, optimizer and source."""
        self._optimizer = expect_adam(trainer.optimizer, self.source.policy, self.program.passes.weight_decay)
        with trainer.phase("compiled"), numbers():
            adam, scale = self._adam(), self._scale()
            made = self._step(adam, scale, self._key, np.int32(trainer.steps_done))
            made.told.count.block_until_ready()
        self._keep(made)
        longest = int(np.asarray(made.length_N).max())
        episodes = _episodes(made, longest, self.source.fleet.name)
        first = self.source.note(episodes)
        experience = self._experience(made, episodes, longest, first)
        updates = told(made.told, self.program.passes.names, experience)
        self.source.policy.version += int(np.asarray(made.told.taken_K).sum())
        metrics = reward_metrics(experience.rollouts, self._config.recipe) | updates.metrics()
        metrics |= dict(self.source.metrics()) | explained(self.program, made)
        scores = Scores(_tensor(made.last_logp_NT, longest))
        return StepReport(trainer.steps_done + 1, metrics, experience, scores), updates

    def _experience(self, made: Step, episodes: Episodes, longest: int, first: int) -> Experience:
        """What was learned from, as the ordinary way records it."""
        rows = len(episodes)
        status_N = np.where(episodes.terminated_N, int(Status.TERMINATED), int(Status.TRUNCATED))
        status_N[~episodes.ok_N] = int(Status.FAILED)
        mask_NT = torch.from_numpy(episodes.mask_NT)
        rollouts = Rollouts(
            group_N=torch.from_numpy(self.program.group_N),
            mask_NT=mask_NT,
            old_logp_NT=_tensor(made.logp_NT, longest),
            reward_NT=torch.as_tensor(learned_from(episodes, self._config), dtype=torch.float32),
            inputs={
                "observation": torch.from_numpy(episodes.observation),
                "action": torch.from_numpy(episodes.action_NT),
                "row": first + torch.arange(rows)[:, None].expand(mask_NT.shape),
            },
            baseline_NT=None if made.baseline_NT is None else _tensor(made.baseline_NT, longest).float(),
            status_N=torch.from_numpy(status_N),
        )
        teaches_NT, present_N = _tensor(made.teaches_NT, longest), torch.from_numpy(np.array(made.present_N))
        return Experience(
            rollouts=rollouts,
            mask_NT=teaches_NT,
            present_N=present_N,
            advantage_NT=_tensor(made.advantage_NT, longest),
            old_logp_NT=None if self.program.passes.detached else rollouts.old_logp_NT,
            ref_logp_NT=None,
            mismatch_NT=None,
            denominators=count(teaches_NT, self._config.recipe, present_N=present_N),
        )

    # --- weights, in and out ----------------------------------------------------------------------------------------

    def _adam(self) -> Adam:
        return read_adam(self.source.policy, self._optimizer)

    def _scale(self) -> Scale | None:
        return read_scale(self.source.scaling)

    def _keep(self, made: Step) -> None:
        write_adam(made.adam, self.program.policy.weights, self.source.policy, self._optimizer)
        write_scale(made.scale, self.source.scaling)

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, step: int) -> Mapping[str, float | None]:
        """Metrics on the starts that the ordinary way would use, by the same dynamics."""
        config, policy = self._config, self.source.policy
        if self._starts is None:
            self._starts = evaluation_starts(self.program.task, config.seed, config.eval_episodes)
        with numbers():
            scale, weights = self._scale(), flat(policy.parameters())
            return_E, length_E = self._judge(weights, scale, self._starts, self._key, greedy=config.eval_greedy)
            return_E, length_E = np.asarray(return_E), np.asarray(length_E)
        ok_E = ~np.isnan(return_E)
        nothing_E, failed = np.full(int(ok_E.sum()), np.nan), int((~ok_E).sum())
        return Evaluation(return_E[ok_E], length_E[ok_E], nothing_E, failed, BROKEN if failed else "").metrics()


def evaluation_starts(task: FunctionTask, seed: int, episodes: int) -> Any:
    """States of starts that training never uses."""
    with numbers():
        return stacked([task.seeded(one) for one in seeds(seed, 0, EVALUATION, episodes)])


def stacked(trees: Sequence[Any]) -> Any:
    """One of many, whose arrays have an axis more in front. JAX's own keys, which NumPy cannot hold, are taken too."""

    def joined(*x: Any) -> Any:
        if all(isinstance(one, np.ndarray | np.generic) for one in x):
            return np.stack(x)  # JAX would compile that, for every number of them
        return jnp.stack([jnp.asarray(one) for one in x])

    return jax.tree.map(joined, *trees)


def expect_adam(
    optimizer: torch.optim.Optimizer | None, policy: ActorPolicy, weight_decay: float
) -> torch.optim.Optimizer:
    """The trainer's optimizer, which may have been replaced or changed; an error where a program does otherwise."""
    expected = {"betas": BETAS, "eps": EPS, "weight_decay": weight_decay, "amsgrad": False, "maximize": False}
    expected["decoupled_weight_decay"] = False
    groups: list[dict[str, Any]] = [] if optimizer is None else optimizer.param_groups
    if optimizer is None or type(optimizer) not in (torch.optim.Adam, optimizers.Adam):
        why = f"trainer.optimizer is {type(optimizer).__name__}"
    elif len(groups) != 1 or {*map(id, groups[0]["params"])} != {*map(id, policy.parameters().values())}:
        why = "trainer.optimizer has not all weights in one group"
    else:
        has = {name: groups[0].get(name, value) for name, value in expected.items()}
        has["betas"] = tuple(has["betas"])  # a list once it was loaded
        other = [name for name, value in expected.items() if has[name] != value]
        if not other:
            return optimizer
        why = f"trainer.optimizer has {other[0]}={has[other[0]]}, not {expected[other[0]]}"
    raise ConfigError(
        f"{why}, and a compiled step is Adam's with its usual numbers, whose learning rate alone may change; pass "
        "optimizer= to the trainer, which then goes the ordinary way, or compiled=False"
    )


def read_adam(policy: ActorPolicy, optimizer: torch.optim.Optimizer) -> Adam:
    """Weights and moments as a program takes them; before the first step there are no moments."""
    parameters = policy.parameters()
    kept = {name: optimizer.state.get(p, {}) for name, p in parameters.items()}

    def moment(key: str) -> np.ndarray:
        return flat({name: kept[name].get(key, torch.zeros_like(p)) for name, p in parameters.items()})

    count = np.float32(next(iter(kept.values())).get("step", 0.0))
    rate = np.float32(optimizer.param_groups[0]["lr"])
    return Adam(flat(parameters), moment("exp_avg"), moment("exp_avg_sq"), count, rate)


@torch.no_grad()
def write_adam(adam: Adam, weights: Weights, policy: ActorPolicy, optimizer: torch.optim.Optimizer) -> None:
    """Back into the policy and its optimizer, where whoever saves, plays or exports looks."""
    flat_W, mean_W, square_W = (weights.apart(np.array(x)) for x in adam[:3])
    count = float(adam.count)
    for name, p in policy.parameters().items():
        p.copy_(torch.from_numpy(flat_W[name]))
        state = optimizer.state[p]
        if not state:
            state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        state["step"].fill_(count)
        state["exp_avg"].copy_(torch.from_numpy(mean_W[name]))
        state["exp_avg_sq"].copy_(torch.from_numpy(square_W[name]))


def read_scale(scaling: Scaling) -> Scale | None:
    """As a program takes it; None: nothing is scaled."""
    if not scaling.mean:
        return None
    return Scale(np.float64(scaling.count), scaling.mean[""], scaling.square[""])


def write_scale(scale: Scale | None, scaling: Scaling) -> None:
    """Back to where the policy's own is."""
    if scale is not None:
        arrays = {"mean/": np.array(scale.mean_D), "square/": np.array(scale.square_D)}
        scaling.load(float(scale.count), arrays)


def told(made: Told, names: Sequence[str], experience: Experience) -> Updates:
    """The step's updates as the trainer counts them."""
    updates, nothing, values_KV = Updates(experience), torch.zeros(0), np.asarray(made.values_KV)
    finite_K, taken_K, skipped_K = (np.asarray(x) for x in (made.finite_K, made.taken_K, made.skipped_K))
    for k in range(int(made.count)):
        own = dict(zip(names, values_KV[k].tolist(), strict=True))
        updates.add(Update(range(0), nothing, own, bool(finite_K[k]), bool(taken_K[k]), bool(skipped_K[k])))
    return updates


def explained(program: Program, made: Step) -> dict[str, float | None]:
    """How well the baseline foresaw the returns, where there is one."""
    share = float(made.explained)
    return {"baseline_explained": None if np.isnan(share) else share} if program.linear else {}


def _tensor(x: Any, longest: int) -> torch.Tensor:
    return torch.from_numpy(np.array(np.asarray(x)[:, :longest]))  # NumPy cuts: JAX would compile each length


def _episodes(made: Step, longest: int, name: str) -> Episodes:
    """What was played, as players record it; padding beyond the longest episode is cut off."""

    def cut(x: Any) -> np.ndarray:
        return np.array(np.asarray(x)[:, :longest])

    seen_NTD, length_N = cut(made.seen_NTD), np.asarray(made.length_N)
    action_NT = cut(made.action_NT)
    terminated_N = np.array(made.terminated_N)
    return Episodes(
        observation=seen_NTD,
        raw=seen_NTD,
        action_NT=action_NT.astype(np.int64) if action_NT.dtype.kind == "i" else action_NT,
        logp_NT=cut(made.logp_NT),
        out_NTF=None,
        reward_NT=cut(made.reward_NT),
        mask_NT=np.arange(longest)[None] < length_N[:, None],
        offset_N=np.zeros(len(length_N), np.int64),
        terminated_N=terminated_N,
        truncated_N=~terminated_N,
        success_N=np.full(len(length_N), np.nan),
        last=seen_NTD[:, -1],
        errors={int(row): f"{name}: {BROKEN}" for row in np.flatnonzero(np.asarray(made.failed_N))},
        steps_N=np.asarray(made.steps_N),
    )
