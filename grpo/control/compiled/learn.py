"""Learning inside a program: passes over what was played, minibatches, Adam; the trainer's step, traced by JAX.

The loss is `grpo.objective`, of JAX arrays. A minibatch of single decisions is gone through in parts of `PART`, as many
as it fills: what a step costs follows what was played, not what could have been.

Letters: M decisions, W all weights, K updates, V values that an update has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo.control.compiled.draws import quick
from grpo.control.compiled.networks import CompiledPolicy
from grpo.core.reductions import Denominators
from grpo.experience import Experience
from grpo.objective import objective
from grpo.recipes import Recipe
from grpo.rollouts import Rollouts, Scores

PART = 512
"""Decisions that are scored together."""
BETAS, EPS = (0.9, 0.999), 1e-8
"""As torch's Adam has them."""


@dataclass(frozen=True)
class Passes:
    """How often and in what portions the same tries are learned from: the trainer's settings of these names."""

    recipe: Recipe
    num_iterations: int
    decisions: int | None
    """In a minibatch; None: all tries are one."""
    apart: bool
    """Whether decisions are scored one by one; else whole trajectories."""
    detached: bool
    entropy: bool
    target_kl: float | None
    max_ratio: float | None
    max_grad_norm: float | None
    weight_decay: float

    @property
    def names(self) -> tuple[str, ...]:
        """What is told of an update, the gradient's norm last."""
        clipped = () if self.recipe.surrogate.limits is None else ("low_mean", "high_mean", "region_mean")
        entropy = ("entropy",) if self.entropy else ()
        shares = tuple(f"clip_ratio/{name}" for name in clipped)
        return ("loss", "policy_loss", *entropy, "ratio", "approx_kl", *shares, "grad_norm")


class Adam(NamedTuple):
    """Weights and what moves them."""

    flat_W: Any
    mean_W: Any
    square_W: Any
    count: Any
    rate: Any
    """The learning rate, which a script may change between steps."""

    def moved(self, gradient_W: Any, passes: Passes) -> Adam:
        """After a step along this gradient."""
        if passes.weight_decay:
            gradient_W = gradient_W + passes.weight_decay * self.flat_W
        first, second = BETAS
        count = self.count + 1
        mean_W = self.mean_W + (1 - first) * (gradient_W - self.mean_W)
        square_W = second * self.square_W + (1 - second) * gradient_W * gradient_W
        spread_W = jnp.sqrt(square_W) / jnp.sqrt(1 - second**count) + EPS
        moved_W = self.flat_W - self.rate / (1 - first**count) * mean_W / spread_W
        return Adam(moved_W, mean_W, square_W, count, self.rate)


class Tries(NamedTuple):
    """What is learned from; the first dimensions are (N, T) of trajectories, or (M, 1) of single decisions."""

    seen: Any
    action: Any
    old_logp: Any
    advantage: Any
    made: Any
    """Decisions that were made."""
    mask: Any
    """Those of them that teach."""
    present: Any
    """Rows, (N,) or (M,), that are in the batch."""

    def apart(self) -> Tries:
        """Each decision as a row of its own, also those that were not made."""
        rows, steps = self.made.shape
        own = {name: x.reshape(rows * steps, 1, *x.shape[2:]) for name, x in self._asdict().items() if x.ndim > 1}
        return self._replace(**own, present=jnp.repeat(self.present, steps))


class Told(NamedTuple):
    """What the updates of a step came to, a place for each that could have been."""

    values_KV: Any
    """In the order of `Passes.names`."""
    finite_K: Any
    taken_K: Any
    skipped_K: Any
    count: Any
    """Updates that were made or skipped."""


Found = tuple[Any, Any, Any, Any]
"""Gradient, values_V of the minibatch, whether all log-probs are finite, log-probs of all tries when last scored."""


def _terms(policy: CompiledPolicy, passes: Passes, flat_W: Any, tries: Tries, over: Denominators) -> tuple[Any, Any]:
    """The loss of some tries, its parts, and their log-probs."""
    rows, steps = tries.made.shape
    out = policy.out(flat_W, tries.seen.reshape(rows * steps, *tries.seen.shape[2:]))
    log_std_A = policy.log_std(flat_W)
    logp_NT = policy.head.logp(out, log_std_A, tries.action.reshape(rows * steps, *tries.action.shape[2:]))
    logp_NT = logp_NT.reshape(rows, steps)
    entropy_NT = policy.head.entropy(out, log_std_A).reshape(rows, steps) if passes.entropy else None
    batch = Experience(
        rollouts=Rollouts(
            group_N=jnp.zeros(rows, jnp.int32), mask_NT=tries.made, old_logp_NT=tries.old_logp,
            reward_NT=jnp.zeros_like(tries.old_logp),
        ),
        mask_NT=tries.mask,
        present_N=tries.present,
        advantage_NT=tries.advantage,
        old_logp_NT=None if passes.detached else tries.old_logp,
        ref_logp_NT=None,
        mismatch_NT=None,
        denominators=over,
    )  # fmt: skip
    terms = objective(Scores(logp_NT, entropy_NT), batch, passes.recipe)
    named = {"loss": terms.loss, "policy_loss": terms.policy_loss, "entropy": terms.entropy, **terms.metrics}
    values = [jnp.asarray(named[name], jnp.float32) for name in passes.names[:-1]]
    return terms.loss, jax.lax.stop_gradient((jnp.stack(values), logp_NT))


def _counted(passes: Passes, mask: Any, present: Any) -> Denominators:
    """The denominators of single decisions, as `grpo.core.reductions.count` has them."""

    def some(of: Any) -> Any:
        return jnp.maximum(of.sum(dtype=jnp.int32).astype(jnp.float32), 1.0)

    tokens = some(mask)
    rows = some(mask | present) if passes.recipe.count_empty_rows else tokens
    return Denominators(tokens, rows, tokens, passes.recipe.length or 1.0)


def _finite(logp: Any, mask: Any) -> Any:
    return jnp.isfinite(jnp.where(mask, logp, 0.0)).all()


class _Turn(NamedTuple):
    """The decisions of a pass in their order, with room for a part that begins at the last."""

    index_M: Any
    teaches_M: Any
    present_M: Any


class _Apart:
    """Minibatches of single decisions, in an order that is drawn for each pass."""

    def __init__(self, policy: CompiledPolicy, passes: Passes, tries: Tries) -> None:
        self._policy, self._passes, self._tries = policy, passes, tries.apart()
        self._most = len(self._tries.present)
        self._size = min(passes.decisions or self._most, self._most)
        self._count = tries.made.sum(dtype=jnp.int32)
        self.batches = jnp.maximum(-(-self._count // self._size), 1)
        self.most_batches = -(-self._most // self._size)
        self.first_logp = self._tries.old_logp[:, 0]
        self._in_turn = self._turn(self._made_first())

    def order(self, key: Any) -> _Turn:
        """Decisions that were made, then the others, which nobody asks for."""
        made_M, number_M = self._tries.made[:, 0], jnp.arange(self._most, dtype=jnp.int32)

        def mixed() -> Any:
            drawn_M = jnp.where(made_M, jax.random.uniform(key, (self._most,), jnp.float32), 2.0)
            # Positive floats are in the order of their bits; XLA sorts one integer each five times as fast as pairs.
            bits_M = jax.lax.bitcast_convert_type(drawn_M, jnp.uint32).astype(jnp.uint64)
            sorted_M = jax.lax.sort((bits_M << 32) | number_M.astype(jnp.uint64), is_stable=False)
            return (sorted_M & 0xFFFFFFFF).astype(jnp.int32)

        if self.most_batches == 1:
            return self._in_turn
        return jax.lax.cond(self.batches > 1, lambda: self._turn(mixed()), lambda: self._in_turn)

    def _turn(self, index_M: Any) -> _Turn:
        index_M = jnp.pad(index_M, (0, PART))
        return _Turn(index_M, self._tries.mask[index_M, 0], self._tries.present[index_M])

    def _made_first(self) -> Any:
        """Decisions that were made, in their order, then anything."""
        made_M = self._tries.made[:, 0]
        # XLA's own cumulative sum takes ten times as long on a CPU.
        place_M = jax.lax.associative_scan(jnp.add, made_M.astype(jnp.int32)) - 1
        number_M = jnp.arange(self._most, dtype=jnp.int32)
        return jnp.zeros(self._most, jnp.int32).at[jnp.where(made_M, place_M, self._most)].set(number_M, mode="drop")

    def gradients(self, flat_W: Any, order: _Turn, number: Any, logp_M: Any) -> Found:
        """Of one minibatch."""
        tries, first = self._tries, number * self._size
        last = jnp.minimum(first + self._size, self._count)
        place_M = jnp.arange(len(order.index_M), dtype=jnp.int32)
        inside_M = (place_M >= first) & (place_M < last)
        over = _counted(self._passes, inside_M & order.teaches_M, inside_M & order.present_M)
        chunk = min(PART, self._most)

        def some(flat_W: Any, at: Any) -> tuple[Any, tuple[Any, Any, Any, Any]]:
            index = jax.lax.dynamic_slice(order.index_M, (at,), (chunk,))
            here = at + jnp.arange(chunk) < last
            part = Tries(*(x[index] for x in tries))
            part = part._replace(
                made=part.made & here[:, None], mask=part.mask & here[:, None], present=part.present & here
            )
            loss, (values, logp) = _terms(self._policy, self._passes, flat_W, part, over)
            return loss, (values, logp[:, 0], _finite(logp, part.mask), jnp.where(here, index, self._most))

        differentiated = jax.value_and_grad(some, has_aux=True)

        def add(carry: Any) -> Any:
            at, gradient_W, total_V, finite, logp_M = carry
            (_, (values_V, logp, fine, index)), part_W = differentiated(flat_W, at)
            logp_M = logp_M.at[index].set(logp.astype(logp_M.dtype), mode="drop")
            return at + chunk, gradient_W + part_W, total_V + values_V, finite & fine, logp_M

        total_V = jnp.zeros(len(self._passes.names) - 1, jnp.float32)
        carry = (first, jnp.zeros_like(flat_W), total_V, jnp.bool_(True), logp_M)
        _, gradient_W, total_V, finite, logp_M = jax.lax.while_loop(lambda carry: carry[0] < last, add, carry)
        return gradient_W, total_V, finite, logp_M


class _Whole:
    """All trajectories at once: for ratios and means that are of whole ones."""

    def __init__(self, policy: CompiledPolicy, passes: Passes, tries: Tries, over: Denominators) -> None:
        self._policy, self._passes, self._tries, self._over = policy, passes, tries, over
        self.batches, self.most_batches = jnp.int32(1), 1
        self.first_logp = tries.old_logp

    def order(self, key: Any) -> Any:
        """There is one."""
        return jnp.zeros((), jnp.int32)

    def gradients(self, flat_W: Any, order: Any, number: Any, logp_M: Any) -> Found:
        """Of all."""

        def loss(flat_W: Any) -> Any:
            return _terms(self._policy, self._passes, flat_W, self._tries, self._over)

        (_, (values, logp)), gradient_W = jax.value_and_grad(loss, has_aux=True)(flat_W)
        return gradient_W, values, _finite(logp, self._tries.mask), logp.astype(logp_M.dtype)


def _update(passes: Passes, adam: Adam, found: Found) -> tuple[Adam, Any, Any, Any]:
    """One optimizer step, or none; the minibatch's values, whether they are finite, whether the step was taken."""
    gradient_W, values_V, finite, _ = found
    norm = jnp.sqrt((gradient_W * gradient_W).sum())
    values_V = jnp.append(values_V, norm)
    for name in ("loss", "ratio", "grad_norm"):
        finite = finite & jnp.isfinite(values_V[passes.names.index(name)])
    taken = finite
    if passes.max_ratio is not None:
        taken = finite & ~(values_V[passes.names.index("ratio")] > passes.max_ratio)
    if passes.max_grad_norm is not None:
        gradient_W = gradient_W * jnp.minimum(passes.max_grad_norm / (norm + 1e-6), 1.0)
    moved = adam.moved(gradient_W, passes)
    adam = Adam(*(jnp.where(taken, new, old).astype(old.dtype) for new, old in zip(moved, adam, strict=True)))
    return adam, values_V, finite, taken


def learn(
    policy: CompiledPolicy, passes: Passes, adam: Adam, tries: Tries, over: Denominators, key: Any
) -> tuple[Adam, Told, Any]:
    """The passes of one step; also each decision's log-prob when it was last scored."""
    key = quick(key)
    batches = _Apart(policy, passes, tries) if passes.apart else _Whole(policy, passes, tries, over)
    most = passes.num_iterations * batches.most_batches
    flag_K = jnp.zeros(most, bool)
    told = Told(jnp.zeros((most, len(passes.names)), jnp.float32), flag_K, flag_K, flag_K, jnp.int32(0))

    def one(order: Any) -> Callable[[Any], Any]:
        def body(carry: Any) -> Any:
            number, adam, told, logp, _ = carry
            found = batches.gradients(adam.flat_W, order, number, logp)
            adam, values_V, finite, taken = _update(passes, adam, found)
            k = told.count
            told = Told(
                told.values_KV.at[k].set(values_V), told.finite_K.at[k].set(finite), told.taken_K.at[k].set(taken),
                told.skipped_K.at[k].set(~taken), k + 1,
            )  # fmt: skip
            far = jnp.bool_(False)
            if passes.target_kl is not None:
                far = values_V[passes.names.index("approx_kl")] > passes.target_kl
            return number + 1, adam, told, found[3], far

        return body

    def go_through(carry: Any) -> Any:
        number, adam, told, logp, _ = carry
        order = batches.order(jax.random.fold_in(key, number))
        inner = (jnp.int32(0), adam, told, logp, jnp.bool_(False))
        _, adam, told, logp, far = jax.lax.while_loop(
            lambda carry: (carry[0] < batches.batches) & ~carry[4], one(order), inner
        )
        return number + 1, adam, told, logp, far

    carry = (jnp.int32(0), adam, told, batches.first_logp, jnp.bool_(False))
    _, adam, told, logp, _ = jax.lax.while_loop(
        lambda carry: (carry[0] < passes.num_iterations) & ~carry[4], go_through, carry
    )
    return adam, told, logp.reshape(tries.made.shape)
