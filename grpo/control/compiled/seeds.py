"""Runs from many seeds by one program: a run's steps, evaluations and checkpoints in one loop, mapped over seeds.

    runs of S seeds ─► leg: up to LEG steps of each, evaluated when due, until it has reached its goal or KEPT policies
                       are to be saved ─► runs, rows, policies to save

On a CPU seeds follow each other inside the program, each for as many steps as it needs; on an accelerator they go side
by side.

Letters: S seeds, L steps of a leg, K policies of a leg that are to be saved, V numbers that a step has, E episodes of
an evaluation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo.control.compiled.learn import Adam
from grpo.control.compiled.play import Scale
from grpo.control.compiled.program import Program, Step
from grpo.core.advantages import group_mean
from grpo.report import MAX_NONFINITE

LEG = 64
"""The most steps after which runs come back to be written down, and whoever wants to stop is heard."""
KEPT = 8
"""The most policies of a leg that are to be saved: the leg of a run ends there."""

PLAYED = ("reward", "reward_std", "frac_reward_zero_std", "length", "failed", "truncated")
COUNTED = ("updates", "updates_skipped", "return", "return_std", "episode_length", "env_steps", "episodes")
JUDGED = ("eval/return", "eval/return_std", "eval/length", "eval/failed")


@dataclass(frozen=True)
class Plan:
    """How runs are carried out: the settings of these names."""

    evaluate_every: int | None
    best_by: str
    stop_at: float | None
    env_steps: int | None
    greedy: bool
    checkpoint_every: int | None
    keep_best: int

    @property
    def saves_evaluated(self) -> bool:
        """Whether evaluations decide which is best: only what was evaluated can be."""
        return self.keep_best > 0 and self.best_by.removeprefix("-").startswith("eval/")


class Policy(NamedTuple):
    """What a checkpoint holds of a run."""

    adam: Adam
    scale: Scale | None
    number: Any
    """Steps done."""
    env_steps: Any
    episodes: Any
    version: Any
    """Updates taken."""


class Run(NamedTuple):
    """A run as it stands."""

    now: Policy
    lost: Any
    """Steps in a row without one finite update."""
    failed: Any
    """Whether episodes of its last step failed: whoever counts them says whether it may go on."""
    over: Any
    """Whether it has reached its goal."""


class Leg(NamedTuple):
    """What a leg leaves of a run beside the run."""

    row_LV: Any
    made: Any
    """Steps: rows that there are."""
    saved_K: Policy
    """As they were when a checkpoint was due."""
    saves: Any
    """How many that are."""


def names(program: Program) -> tuple[str, ...]:
    """V: what is told of a step, as the ordinary way calls it."""
    linear = ("baseline_explained",) if program.linear else ()
    return (*PLAYED, *program.passes.names, *COUNTED, *linear, *JUDGED)


def begun(policy: Policy) -> Run:
    """A run before its next step, or as its checkpoint left it."""
    return Run(policy, np.int32(0), np.bool_(False), np.bool_(False))


@functools.lru_cache(maxsize=8)
def _made(plan: Plan, same: _Same) -> Any:
    return jax.jit(functools.partial(_legs, same.program, plan))


def forget() -> None:
    """Programs are made anew."""
    _made.cache_clear()


class _Same:
    """A program that equals another of the same key."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.program.key == self.program.key

    def __hash__(self) -> int:
        return hash(self.program.key)


def legs(
    program: Program, plan: Plan, run_S: Run, key_S: np.ndarray, state_SE: Any, until: int, most: int
) -> tuple[Run, Leg]:
    """Every run further by up to `most` steps, to `until` at most; and what that leaves of each."""
    bounds = np.int32(until), np.int32(min(most, LEG))
    found: tuple[Run, Leg] = _made(plan, _Same(program))(run_S, key_S, state_SE, bounds)
    return found


def _legs(program: Program, plan: Plan, run_S: Run, key_S: Any, state_SE: Any, bounds: Any) -> tuple[Run, Leg]:
    def one(own: tuple[Run, Any, Any]) -> tuple[Run, Leg]:
        return _leg(program, plan, *own, bounds)

    each = (run_S, key_S, state_SE)
    return jax.lax.map(one, each) if jax.default_backend() == "cpu" else jax.vmap(one)(each)


def _leg(program: Program, plan: Plan, run: Run, key: Any, state_E: Any, bounds: Any) -> tuple[Run, Leg]:
    known, (until, most) = names(program), bounds

    def further(carry: tuple[Run, Leg]) -> tuple[Run, Leg]:
        run, leg = carry
        step = program.step(run.now.adam, run.now.scale, key, run.now.number)
        run, row_V, save = _after(program, plan, run, step, key, state_E)
        at = jnp.where(save, leg.saves, KEPT)
        saved_K = jax.tree.map(lambda x_K, x: x_K.at[at].set(x, mode="drop"), leg.saved_K, run.now)
        return run, Leg(leg.row_LV.at[leg.made].set(row_V), leg.made + 1, saved_K, leg.saves + save)

    def going(carry: tuple[Run, Leg]) -> Any:
        run, leg = carry
        left = (leg.made < most) & (run.now.number < until) & (leg.saves < KEPT)
        return left & ~run.over & ~run.failed & (run.lost < MAX_NONFINITE)

    nothing_LV = jnp.full((LEG, len(known)), jnp.nan, jnp.float64)
    none_K = jax.tree.map(lambda x: jnp.zeros((KEPT, *jnp.shape(x)), jnp.asarray(x).dtype), run.now)
    return jax.lax.while_loop(going, further, (run, Leg(nothing_LV, jnp.int32(0), none_K, jnp.int32(0))))


def _after(program: Program, plan: Plan, run: Run, step: Step, key: Any, state_E: Any) -> tuple[Run, Any, Any]:
    """The run after a step, the step's numbers, and whether a checkpoint is due."""
    told = _told(program, step)
    was = run.now
    now = Policy(
        step.adam,
        step.scale,
        was.number + 1,
        was.env_steps + step.steps_N.sum(dtype=was.env_steps.dtype),
        was.episodes + (~step.failed_N).sum(dtype=was.episodes.dtype),
        was.version + step.told.taken_K.sum(dtype=was.version.dtype),
    )
    told |= {"env_steps": now.env_steps, "episodes": now.episodes}
    due = jnp.bool_(False) if plan.evaluate_every is None else now.number % plan.evaluate_every == 0

    def judged() -> Any:
        return_E, length_E = program.judged(now.adam.flat_W, now.scale, state_E, key, plan.greedy)
        ok_E = ~jnp.isnan(return_E)
        of_ok = [return_E.mean(where=ok_E), return_E.std(where=ok_E), length_E.mean(where=ok_E)]
        return jnp.stack([*of_ok, (~ok_E).sum()]).astype(jnp.float64)

    found = jax.lax.cond(due, judged, lambda: jnp.full(len(JUDGED), jnp.nan, jnp.float64))
    told |= dict(zip(JUDGED, found, strict=True))
    value = told[plan.best_by.removeprefix("-")].astype(jnp.float64)
    sign = -1.0 if plan.best_by.startswith("-") else 1.0
    score = jnp.where(jnp.isfinite(value), sign * value, -jnp.inf)
    over = jnp.bool_(False) if plan.stop_at is None else score >= sign * plan.stop_at
    if plan.env_steps is not None:
        over = over | (now.env_steps >= plan.env_steps)
    save = due if plan.saves_evaluated else jnp.bool_(False)
    if plan.checkpoint_every is not None:
        save = save | (now.number % plan.checkpoint_every == 0)
    finite = (step.told.finite_K & (jnp.arange(len(step.told.finite_K)) < step.told.count)).any()
    lost = jnp.where(finite, 0, run.lost + 1).astype(run.lost.dtype)
    run = Run(now, lost, step.failed_N.any(), over)
    return run, jnp.stack([told[name].astype(jnp.float64) for name in names(program)]), save


def _told(program: Program, step: Step) -> dict[str, Any]:
    """A step's numbers, as `grpo.report` and the control room's source reckon them."""
    ok_N = ~step.failed_N
    made_NT = jnp.arange(step.reward_NT.shape[1]) < step.length_N[:, None]
    paid_NT = jnp.where(made_NT & ok_N[:, None], step.reward_NT, 0.0)
    return_N = paid_NT.sum(1)
    most = program.clip_rewards
    reward_N = ((paid_NT if most is None else paid_NT.clip(-most, most)) * program.reward_scale).sum(1)
    size_N = jnp.abs(paid_NT).sum(1).max() * program.reward_scale
    group_N = jnp.asarray(program.group_N)
    known_N = ok_N.astype(jnp.float64)
    off_N = jnp.abs(reward_N - group_mean(reward_N, group_N, known_N)) > 4 * float(np.finfo(np.float32).eps) * size_N
    alike_N = group_mean((off_N & ok_N).astype(jnp.float64), group_N) == 0
    count = step.told.count
    counted_KV = (jnp.arange(len(step.told.values_KV)) < count)[:, None] & jnp.isfinite(step.told.values_KV)
    value_V = jnp.where(counted_KV, step.told.values_KV, 0.0).sum(0) / counted_KV.sum(0)
    return {
        "reward": reward_N.mean(where=ok_N),
        "reward_std": reward_N.std(ddof=1, where=ok_N),
        "frac_reward_zero_std": alike_N.mean(),
        "length": step.length_N.mean(),
        "failed": step.failed_N.sum(),
        "truncated": (~step.terminated_N & ~step.failed_N).mean(),
        **dict(zip(program.passes.names, value_V, strict=True)),
        "updates": step.told.taken_K.sum(),
        "updates_skipped": step.told.skipped_K.sum(),
        "return": return_N.mean(where=ok_N),
        "return_std": return_N.std(where=ok_N),
        "episode_length": step.steps_N.mean(where=ok_N),
        "baseline_explained": jnp.asarray(step.explained),
    }
