"""Playing whole episodes inside a program: every member moves until its episode ends, the loop until all have.

Letters: L members, T decisions, D numbers of an observation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo.control.compiled.draws import quick
from grpo.control.compiled.networks import CompiledPolicy
from grpo.control.scaling import LIMIT
from grpo.envs.functions.task import FunctionTask


class Played(NamedTuple):
    """L episodes of up to T decisions."""

    observation_TLD: Any
    """As the environment gave them."""
    action_TL: Any
    logp_TL: Any
    reward_TL: Any
    length_L: Any
    """Decisions made."""
    steps_L: Any
    """Steps of the environment."""
    terminated_L: Any
    last_LD: Any
    """What was seen when the episode was over."""


class Scale(NamedTuple):
    """Running scaling of observations: what `grpo.control.scaling.Scaling` keeps."""

    count: Any
    mean_D: Any
    square_D: Any

    def __call__(self, seen: Any) -> Any:
        """As the policy sees them."""
        scaled = (seen - self.mean_D) / jnp.sqrt(self.square_D + 1e-8)
        return jnp.clip(scaled, -LIMIT, LIMIT).astype(jnp.float32)

    def updated(self, seen_MD: Any, mask_M: Any) -> Scale:
        """With further observations taken in."""
        weight_M1 = mask_M[:, None].astype(jnp.float64)
        added = weight_M1.sum()
        at_least = jnp.maximum(added, 1.0)
        mean_D = (seen_MD * weight_M1).sum(0) / at_least
        square_D = (jnp.square(seen_MD - mean_D) * weight_M1).sum(0) / at_least
        share, gap_D = added / (self.count + at_least), mean_D - self.mean_D
        mixed_D = (1 - share) * self.square_D + share * square_D + share * (1 - share) * jnp.square(gap_D)
        square_D = jnp.where(self.count > 0, mixed_D, square_D)
        return Scale(self.count + added, self.mean_D + share * gap_D, square_D)


@dataclass(frozen=True)
class Rules:
    """How episodes are played."""

    limit: int
    """Steps of the environment after which an episode is cut."""
    repeat: int
    """Steps that one action lasts."""

    @property
    def decisions(self) -> int:
        """T: the most that an episode has."""
        return -(-self.limit // self.repeat)


class Moment(NamedTuple):
    """Members in the middle of their episodes."""

    state_L: Any
    seen_LD: Any
    steps_L: Any
    going_L: Any
    terminated_L: Any


def begin(task: FunctionTask, state_L: Any) -> Moment:
    """Episodes from these states."""
    rows = len(jax.tree.leaves(state_L)[0])
    steps_L, flag_L = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool)
    return Moment(state_L, jax.vmap(task.see)(state_L).astype(jnp.float32), steps_L, ~flag_L, flag_L)


def _moved(task: FunctionTask, rules: Rules, now: Moment, action_L: Any, key: Any) -> tuple[Moment, Any]:
    """Those whose episode goes on, by one step of the environment; and what that paid."""
    keys_L = None if key is None else jax.random.split(key, len(now.going_L))
    state_L, reward_L, over_L = jax.vmap(task.step, in_axes=(0, 0, None if key is None else 0))(
        now.state_L, action_L, keys_L
    )

    def chosen(new: Any, old: Any) -> Any:
        return jnp.where(now.going_L.reshape(-1, *[1] * (new.ndim - 1)), new, old).astype(old.dtype)

    state_L = jax.tree.map(chosen, state_L, now.state_L)
    steps_L = now.steps_L + now.going_L
    ended_L = now.going_L & over_L
    going_L = now.going_L & ~over_L & (steps_L < rules.limit)
    seen_LD = jax.vmap(task.see)(state_L).astype(jnp.float32)
    moment = Moment(state_L, seen_LD, steps_L, going_L, now.terminated_L | ended_L)
    return moment, jnp.where(now.going_L, reward_L, 0.0)


def acted(task: FunctionTask, rules: Rules, now: Moment, action_L: Any, key: Any) -> tuple[Moment, Any]:
    """One decision of each: its action for as many steps as it lasts."""
    if rules.repeat == 1:
        return _moved(task, rules, now, action_L, key)

    def again(i: Any, carry: tuple[Moment, Any]) -> tuple[Moment, Any]:
        moment, paid_L = carry
        moment, reward_L = _moved(task, rules, moment, action_L, None if key is None else jax.random.fold_in(key, i))
        return moment, paid_L + reward_L

    moment, paid_L = _moved(task, rules, now, action_L, key)
    return jax.lax.fori_loop(1, rules.repeat, again, (moment, paid_L))


def play(
    task: FunctionTask, policy: CompiledPolicy, rules: Rules, flat_W: Any, scale: Scale | None, state_L: Any, key: Any
) -> Played:
    """One episode from each state with drawn actions."""
    now, ready, log_std_A = begin(task, state_L), policy.ready(flat_W), policy.log_std(flat_W)
    rows, size = now.seen_LD.shape
    act_key, env_key = jax.random.split(key)
    act_key = quick(act_key)
    noise = policy.head.noise(act_key, rows)
    recorded = jax.eval_shape(lambda: policy.head.sample(policy.out_of(ready, now.seen_LD), log_std_A, noise)[0])
    steps = rules.decisions

    def room(*shape: int, dtype: Any) -> Any:
        return jnp.zeros((steps, rows, *shape), dtype)

    record = {
        "seen": room(size, dtype=jnp.float32),
        "action": room(*recorded.shape[1:], dtype=recorded.dtype),
        "logp": room(dtype=jnp.float32),
        "reward": room(dtype=jnp.float64),
    }

    def decide(carry: tuple[Any, Moment, Any, Any]) -> tuple[Any, Moment, Any, Any]:
        t, now, length_L, record = carry
        seen_LD = now.seen_LD if scale is None else scale(now.seen_LD)
        noise = policy.head.noise(jax.random.fold_in(act_key, t), rows)
        action_L, logp_L = policy.head.sample(policy.out_of(ready, seen_LD), log_std_A, noise)
        new, reward_L = acted(task, rules, now, policy.head.to_env(action_L), jax.random.fold_in(env_key, t))
        moment = {"seen": now.seen_LD, "action": action_L, "logp": logp_L, "reward": reward_L}
        record = {name: array.at[t].set(moment[name]) for name, array in record.items()}
        return t + 1, new, length_L + now.going_L, record

    carry = (jnp.int32(0), now, jnp.zeros(rows, jnp.int32), record)
    _, now, length_L, record = jax.lax.while_loop(lambda carry: carry[1].going_L.any(), decide, carry)
    return Played(
        record["seen"], record["action"], record["logp"], record["reward"], length_L, now.steps_L, now.terminated_L,
        now.seen_LD,
    )  # fmt: skip


def judge(
    task: FunctionTask,
    policy: CompiledPolicy,
    rules: Rules,
    flat_W: Any,
    scale: Scale | None,
    state_L: Any,
    key: Any,
    greedy: bool,
) -> tuple[Any, Any]:
    """Returns and lengths of episodes with the most likely actions, or with drawn ones; nothing is recorded.

    The return of an episode in which something was seen or paid that is no number is none either.
    """
    now, ready, log_std_A = begin(task, state_L), policy.ready(flat_W), policy.log_std(flat_W)
    act_key, env_key = jax.random.split(key)
    act_key, rows = quick(act_key), len(now.going_L)

    def decide(carry: tuple[Any, Moment, Any]) -> tuple[Any, Moment, Any]:
        t, now, total_L = carry
        out_LF = policy.out_of(ready, now.seen_LD if scale is None else scale(now.seen_LD))
        if greedy:
            action_L = policy.head.mode(out_LF)
        else:
            noise = policy.head.noise(jax.random.fold_in(act_key, t), rows)
            action_L, _ = policy.head.sample(out_LF, log_std_A, noise)
        new, reward_L = acted(task, rules, now, policy.head.to_env(action_L), jax.random.fold_in(env_key, t))
        return t + 1, new, total_L + jnp.where(jnp.isfinite(new.seen_LD).all(-1), reward_L, jnp.nan)

    carry = (jnp.int32(0), now, jnp.where(jnp.isfinite(now.seen_LD).all(-1), jnp.float64(0), jnp.nan))
    _, now, total_L = jax.lax.while_loop(lambda carry: carry[1].going_L.any(), decide, carry)
    return jnp.where(jnp.isfinite(total_L), total_L, jnp.nan), now.steps_L
