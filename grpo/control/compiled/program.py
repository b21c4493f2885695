"""One step of the control room as one function: starts, episodes, baseline, advantages, passes.

    adam, scale, seed's key, step ─► play ─► linear baseline ─► Experience ─► learn ─► adam, scale, what was played

It is pure: a seed and a step's number say all that is drawn, and mapping it over seeds trains many at once.

Letters: N trajectories, T decisions, M = N·T, D numbers of an observation, E episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo.control.baselines.linear import RIDGES
from grpo.control.baselines.room import place_in_group
from grpo.control.compiled.learn import Adam, Passes, Told, Tries, learn
from grpo.control.compiled.networks import CompiledPolicy
from grpo.control.compiled.play import Played, Rules, Scale, judge, play
from grpo.control.config import ControlConfig
from grpo.control.groups import EVALUATION, TRAINING
from grpo.core import advantages as adv
from grpo.envs.functions.task import FunctionTask
from grpo.experience import Experience
from grpo.rollouts import Rollouts, Status


class Step(NamedTuple):
    """What one step leaves."""

    adam: Adam
    scale: Scale | None
    seen_NTD: Any
    """As the policy saw them."""
    action_NT: Any
    logp_NT: Any
    """When sampled."""
    last_logp_NT: Any
    """When last scored."""
    reward_NT: Any
    """As the environment paid them."""
    advantage_NT: Any
    teaches_NT: Any
    present_N: Any
    baseline_NT: Any
    length_N: Any
    steps_N: Any
    terminated_N: Any
    failed_N: Any
    """Episodes in which something was seen or paid that is no number."""
    explained: Any
    """Share of the returns' variance that the baseline explains; NaN where they do not vary, or there is none."""
    told: Told


@dataclass(frozen=True)
class Program:
    """What the function is made of; everything here is fixed when it is compiled."""

    task: FunctionTask
    policy: CompiledPolicy
    rules: Rules
    passes: Passes
    starts: int
    """Starts of a step."""
    each: int
    """Episodes from each of them."""
    one_group: bool
    """Whether all episodes are compared with each other; else those of one start."""
    linear: bool
    """Whether returns are compared with a linear fit."""
    batch_step: bool
    """Whether they are compared with those of the whole batch at the same step."""
    clip_rewards: float | None
    reward_scale: float

    @staticmethod
    def of(task: FunctionTask, policy: CompiledPolicy, horizon: int, passes: Passes, config: ControlConfig) -> Program:
        """As the settings say."""
        batch = config.group_by == "batch"
        return Program(
            task=task,
            policy=policy,
            rules=Rules(horizon, config.action_repeat),
            passes=passes,
            starts=config.episodes if batch else config.groups_per_step,
            each=1 if batch else config.group_size,
            one_group=batch,
            linear=config.judged_by == "linear",
            batch_step=config.judged_by == "batch_step",
            clip_rewards=config.clip_rewards,
            reward_scale=config.reward_scale,
        )

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells programs apart that compute different things."""
        return (self.task.start, self.task.step, self.task.see, *self.told)

    @property
    def told(self) -> tuple[Any, ...]:
        """The same in words, the same ones in every process: but for what the task's functions do."""
        policy, own = self.policy, {name: value for name, value in vars(self).items() if name not in ("task", "policy")}
        return (self.task.name, str(self.task.action_space), policy.weights, policy.activation, repr(own))

    @property
    def group_N(self) -> np.ndarray:
        """Which episodes are compared with each other."""
        starts_N = np.repeat(np.arange(self.starts), self.each)
        return np.asarray(starts_N * 0 if self.one_group else starts_N)

    def step(self, adam: Adam, scale: Scale | None, key: Any, number: Any) -> Step:
        """Sample a group from each start, compare, learn; number: steps done before."""
        start_key, play_key, learn_key = jax.random.split(_stream(key, TRAINING, number), 3)
        state_P = jax.vmap(self.task.start)(jax.random.split(start_key, self.starts))
        state_N = jax.tree.map(lambda x: jnp.repeat(x, self.each, 0), state_P)
        played = play(self.task, self.policy, self.rules, adam.flat_W, scale, state_N, play_key)
        return self.learned(adam, scale, played, learn_key)

    def learned(self, adam: Adam, scale: Scale | None, played: Played, key: Any) -> Step:
        """The step once the episodes are there."""
        raw_NTD, action_NT, logp_NT, paid_NT = (jnp.swapaxes(x, 0, 1) for x in played[:4])
        seen_NTD = raw_NTD if scale is None else scale(raw_NTD)
        made_NT = jnp.arange(self.rules.decisions) < played.length_L[:, None]
        # As it came: scaling cuts what is infinite to its limit.
        sound_NT = jnp.isfinite(paid_NT) & jnp.isfinite(raw_NTD).all(-1)
        failed_N = (made_NT & ~sound_NT).any(1)
        failed_N = failed_N | ~jnp.isfinite(played.last_LD).all(-1)
        counted_NT = made_NT & ~failed_N[:, None]
        seen_NTD = jnp.where(counted_NT[..., None], seen_NTD, 0.0)
        # An action that is no number would be in the gradient as 0 · NaN, whatever masks it.
        action_NT = jnp.where(counted_NT.reshape(*counted_NT.shape, *[1] * (action_NT.ndim - 2)), action_NT, 0)
        reward_NT = jnp.where(counted_NT, paid_NT, 0.0)
        if self.clip_rewards is not None:
            reward_NT = reward_NT.clip(-self.clip_rewards, self.clip_rewards)
        reward_NT = reward_NT * self.reward_scale
        baseline_NT, explained = None, jnp.nan
        if self.linear:
            baseline_NT, explained = self._linear(seen_NTD, reward_NT, counted_NT)
        status_N = jnp.where(played.terminated_L, int(Status.TERMINATED), int(Status.TRUNCATED))
        status_N = jnp.where(failed_N, int(Status.FAILED), status_N)
        logp_NT = jnp.where(counted_NT, logp_NT, 0.0)
        experience = self._compared(made_NT, logp_NT, reward_NT, baseline_NT, status_N)
        tries = Tries(
            seen_NTD, action_NT, logp_NT, experience.advantage_NT, made_NT, experience.mask_NT, experience.present_N
        )
        adam, told, last_NT = learn(self.policy, self.passes, adam, tries, experience.denominators, key)
        if scale is not None:
            raw_MD = jnp.where(counted_NT[..., None], raw_NTD, 0.0).reshape(-1, raw_NTD.shape[-1])
            scale = scale.updated(raw_MD.astype(jnp.float64), counted_NT.reshape(-1))
        return Step(
            adam, scale, seen_NTD, action_NT, logp_NT, last_NT, paid_NT, experience.advantage_NT, experience.mask_NT,
            experience.present_N, baseline_NT, played.length_L, played.steps_L, played.terminated_L, failed_N,
            explained, told,
        )  # fmt: skip

    def _compared(self, made_NT: Any, logp_NT: Any, reward_NT: Any, baseline_NT: Any, status_N: Any) -> Experience:
        """Advantages and masks, by the recipe."""
        inner_NT = None
        if self.batch_step:
            inner_NT = jnp.broadcast_to(jnp.arange(made_NT.shape[1]), made_NT.shape)
        with jax.ensure_compile_time_eval():  # known while it is traced: else ids are sorted, at every step
            group_N = jnp.asarray(self.group_N)
        rollouts = Rollouts(
            group_N=group_N,
            mask_NT=made_NT,
            old_logp_NT=logp_NT,
            reward_NT=reward_NT.astype(jnp.float32),
            group_NT=inner_NT,
            baseline_NT=None if baseline_NT is None else baseline_NT.astype(jnp.float32),
            status_N=status_N,
        )
        return Experience.build(rollouts, self.passes.recipe, detached=self.passes.detached)

    def _linear(self, seen_NTD: Any, reward_NT: Any, made_NT: Any) -> tuple[Any, Any]:
        """What `grpo.control.baselines.linear` expects of each decision, and how much of the returns that explains."""
        rows, steps = made_NT.shape
        return_NT = adv.reward_to_go(reward_NT, made_NT, self.passes.recipe.gamma)
        time_M = jnp.tile(jnp.arange(steps) / self.rules.limit, rows)
        seen_MD = seen_NTD.reshape(rows * steps, -1).astype(jnp.float64)
        feature_MD = jnp.concatenate(
            [time_M[:, None], time_M[:, None] ** 2, time_M[:, None] ** 3, seen_MD, seen_MD**2], 1
        )
        half_M = jnp.repeat(jnp.asarray(place_in_group(self.group_N) % 2), steps)
        weight_M, return_M = made_NT.reshape(-1).astype(jnp.float64), return_NT.reshape(-1)
        expected_KM = adv.ridge_baselines(feature_MD, return_M, half_M, RIDGES, weight_M)
        left_K = (weight_M * jnp.square(return_M - expected_KM)).sum(1)
        baseline_M = expected_KM[left_K.argmin()]
        spread = _variance(return_M, weight_M)
        left = _variance(return_M - baseline_M, weight_M)
        explained = jnp.where(spread > 1e-12, 1.0 - left / spread, jnp.nan)
        return baseline_M.reshape(rows, steps), explained

    def judged(self, flat_W: Any, scale: Scale | None, state_E: Any, key: Any, greedy: bool) -> tuple[Any, Any]:
        """Returns and lengths of episodes from these states; NaN of those that failed."""
        key = _stream(key, EVALUATION, 0)
        return judge(self.task, self.policy, self.rules, flat_W, scale, state_E, key, greedy)


def _stream(key: Any, stream: int, number: Any) -> Any:
    """The key of a step, from that of a seed: streams never share one."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key), stream), number)


def _variance(x_M: Any, weight_M: Any) -> Any:
    count = jnp.maximum(weight_M.sum(), 1.0)
    return (weight_M * jnp.square(x_M - (weight_M * x_M).sum() / count)).sum() / count
