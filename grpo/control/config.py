"""The control room's settings: the algorithm's with the environment's, the policy's and the group's own.

The defaults are what solves small tasks fastest: whole episodes, reward-to-go, a baseline fitted in closed form to the
group, batch-std scaling, many passes that stop when the policy has moved far enough.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, FiniteFloat

from grpo.blocks import Blocks, extended
from grpo.config import ConfigError, GRPOConfig, NamedCode, RayWorkers
from grpo.control.dialect import HERE, WORDS
from grpo.dialects import SYSTEMS, Words, joined
from grpo.envs.rules import EpisodeRules
from grpo.recipes import RECIPES

ADVANTAGES: dict[str, dict[str, Any]] = {
    "linear": {"credit": "reward_to_go", "baseline": "given"},
    "auto": {"credit": "reward_to_go", "baseline": "given"},
    "fitted": {"credit": "reward_to_go", "baseline": "given"},
    "critic": {"credit": "reward_to_go", "baseline": "given"},
    "step": {"credit": "reward_to_go", "baseline": "group_mean"},
    "batch_step": {"credit": "reward_to_go", "baseline": "group_mean"},
    "leave_one_out": {"credit": "reward_to_go", "baseline": "leave_one_out"},
    "episode": {"credit": "trajectory", "baseline": "group_mean"},
}
"""What each way of judging a decision means in the recipe; the room itself gives the baseline of the first four."""
ROOM_BASELINES = ("linear", "auto", "fitted", "critic")
BOOTSTRAPS = ("critic", "fitted")
"""Those that know what comes after a row that was cut off, so that it need not be a whole episode."""
COMPILED_DRAWS = "a compiled program draws in its own way; leave it out, or set compiled=false"
"""Why `draws` is idle there."""


BLOCKS: Blocks = {
    "env": (
        "env", "env_kwargs", "max_episode_steps", "vector", "num_envs", "workers", "double_buffer", "env_timeout",
        "action_repeat", "end_on_success", "compiled",
    ),
    "policy": ("hidden", "activation", "memory", "action_head", "action_chunk", "log_std", "scale_observations"),
    "rewards": (
        "clip_rewards", "reward_scale", "reward_type", "filter_rewards", "rewards_lower_bound", "rewards_upper_bound",
    ),
    "group": ("group_by", "draws", "logprob_type", "entropy_type"),
    "advantage": (
        "advantage", "gae_lambda", "baseline_features", "baseline_memory", "credit_until_reward",
        "critic_learning_rate", "critic_passes",
    ),
    "warm_start": (
        "warm_start", "warm_start_episodes", "warm_start_passes", "warm_start_weight_decay", "warm_start_lr_schedule",
    ),
    "eval": ("eval_episodes", "eval_greedy", "video", "films"),
}  # fmt: skip
"""The room's own."""


class ControlConfig(GRPOConfig):
    """The algorithm's settings with those of environments and policies."""

    blocks: ClassVar[Blocks] = extended(GRPOConfig.blocks, BLOCKS)
    first: ClassVar[tuple[str, ...]] = (
        "env", "max_episode_steps", "hidden", "advantage", "group_size", "groups_per_step", "learning_rate", "seed",
        "run.steps", "run.evaluate_every",
    )  # fmt: skip
    words: ClassVar[Words] = joined(SYSTEMS, WORDS, HERE)

    # --- the environment
    env: str = "CartPole-v1"
    """A registered id, or module:Name of an environment class or factory; a path/to/file.py:Name works too."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""
    max_episode_steps: int | None = Field(default=None, ge=1)
    """Time limit of an episode; None: the environment's own, or 1000 where it has none."""
    vector: Literal["auto", "classic", "vector", "mujoco", "envpool", "serial", "processes"] = "auto"
    """How copies are stepped: our own vectorised ones, the environment's vector form, MuJoCo's own threads (Hopper,
    Walker2d, HalfCheetah, Swimmer), EnvPool, one after the other, or in killable processes. auto: ours, its vector
    form, one after the other; environments of your own run in processes."""
    num_envs: int | None = Field(default=None, ge=1)
    """Copies that play at a time; None: all of the step's episodes, at most 64."""
    workers: Annotated[int, Field(ge=1)] | RayWorkers | None = None
    """Processes, for vector=processes; None: one a core. ray: actors of a Ray cluster, one for each of its processors;
    ray:8: so many."""
    double_buffer: bool = False
    """For group_by=steps in processes: one half of the streams steps while the other half's actions are computed."""
    env_timeout: float = Field(default=30.0, gt=0)
    """Seconds a process may take for one step before it is killed and the episode counted as failed."""
    action_repeat: int = Field(default=1, ge=1)
    """Environment steps that one action lasts: temporally extended exploration, and shorter trajectories."""
    end_on_success: bool = False
    """An episode ends with its first success (info's is_success or success), also in the middle of a chunk: nothing
    after it is played, rewarded or learned from."""
    compiled: bool | None = None
    """Play and learn in one compiled program (JAX): Gymnasium's classic tasks, and environments that are functions.
    What cannot be compiled says why and is played the ordinary way. None: functions are, Gymnasium's tasks are not,
    whose numbers stay those of before."""

    # --- the policy
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the policy's hidden layers."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Between them."""
    memory: int = Field(default=0, ge=0)
    """Width of a GRU before the output; 0: the policy has no memory."""
    action_head: Literal["auto", "gaussian", "squashed", "beta"] = "auto"
    """How continuous actions are drawn: Gaussian and clipped, Gaussian and squashed, or Beta on the bounds."""
    action_chunk: int = Field(default=1, ge=1)
    """Actions that the policy gives at one look and that are then played without looking again."""
    log_std: FiniteFloat = -0.5
    """Where the logarithm of a Gaussian's standard deviation starts; ±1 are the action's bounds."""
    scale_observations: bool = False
    """Divide observations by their running mean and deviation; kept with the policy."""
    clip_rewards: float | None = Field(default=None, gt=0)
    """Rewards are cut to ± this before the algorithm sees them; reported returns are the environment's own."""
    reward_scale: float = Field(default=1.0, gt=0)
    """Rewards are multiplied by this before the algorithm sees them; reported returns are the environment's own."""

    # --- the group and what it is compared with
    group_by: Literal["start", "branch", "anchor", "steps", "batch"] = "start"
    """What makes a group: episodes from one initial state · continuations from a visited state · equal observations
    in the batch · a window of steps of one stream · the whole batch, each episode from a start of its own."""
    draws: Literal["step", "episode"] | None = None
    """What actions are drawn with: one generator for all episodes of a step, or one for each, so that ranks can divide
    them. None: episode where several ranks begin the run, else step, whose numbers stay those of before."""
    advantage: (
        Literal["linear", "auto", "fitted", "critic", "step", "batch_step", "leave_one_out", "episode"] | None
    ) = None
    """What a decision's return is compared with: a linear fit on the other half of the group · the best of linear,
    step and batch_step by held-out variance · GAE with a value that is solved for · GAE with a learned critic · the
    group's mean at the same step · the batch's · the group's without its own · the whole episode's return with the
    group's. None: linear, or as the recipe says."""
    reward_type: Literal["action_level", "chunk_level"] = "action_level"
    """When a chunk's rewards are paid: each with its action, or all together with the last one."""
    logprob_type: Literal["token_level", "action_level", "chunk_level"] = "action_level"
    """What the ratio is of: each number (or choice) of an action, an action, or a chunk as a whole."""
    entropy_type: Literal["token_level", "action_level", "chunk_level"] = "action_level"
    """What the entropy bonus is the mean of."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """For advantage=fitted and critic: how far real rewards reach before the value is believed."""
    baseline_features: int = Field(default=256, ge=0)
    """For advantage=fitted: random features of the observation, beside its numbers and their squares."""
    baseline_memory: float = Field(default=0.95, ge=0, lt=1)
    """For advantage=fitted: how much of what earlier steps told is kept from each step to the next."""
    credit_until_reward: bool = False
    """For advantage=fitted: a decision is judged by what comes until the next reward, which ends a try inside the
    episode, as a point does in Pong."""
    critic_learning_rate: float = Field(default=1e-3, gt=0)
    """For advantage=critic."""
    critic_passes: int = Field(default=10, ge=1)
    """For advantage=critic: passes over the step's decisions."""

    # --- a warm start
    warm_start: str | None = None
    """Imitate before the first step: file.py:function (or module:function) from one observation to one action, which
    plays here; or an .npz file of recorded episodes."""
    warm_start_episodes: int = Field(default=50, ge=1)
    """Episodes that the function plays; those that are known to have failed are not imitated."""
    warm_start_passes: int = Field(default=100, ge=1)
    """Passes over what was shown."""
    warm_start_weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's, while imitating: what a few episodes do not tell apart weighs less."""
    warm_start_lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate of the imitation falls from pass to pass, to 0 after the last."""

    # --- evaluation
    eval_episodes: int = Field(default=20, ge=1)
    """Episodes of one evaluation, on starts that training never uses."""
    eval_greedy: bool = True
    """Evaluate the most likely actions rather than drawn ones."""
    video: bool = True
    """Leave a video of the best policy in the run folder, where the environment can be drawn."""
    films: bool = True
    """Play the episodes of a kept group again and film them for `grpo view`, where the environment can be drawn and
    repeats itself. At the first kept step (`run.sample_every`) and then at every fourfold of it: it costs seconds."""

    # --- the algorithm, tuned for small tasks
    loss_type: str = "control"
    """The recipe: a row of the table that `grpo presets --recipes` prints."""
    group_size: int = Field(default=8, ge=2)
    """Tries from each start; for group_by=steps, steps of the window."""
    groups_per_step: int = Field(default=2, ge=1)
    """Starts in one step."""
    num_iterations: int = Field(default=20, ge=1)
    """Passes over the same tries, at most: see target_kl."""
    target_kl: float | None = Field(default=0.04, gt=0)
    """Passes stop once the mean of log π_old − log π over a minibatch reaches this; None: never."""
    learning_rate: float = Field(default=5e-3, gt=0)
    """Of the Adam that is made when no optimizer is given."""
    max_grad_norm: float | None = Field(default=0.5, gt=0)
    """Gradients are scaled down to this norm; None: never."""
    device: str = "auto"
    """cpu, cuda or mps. auto: the CPU, where small policies are fastest."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        _check(self)

    def title(self, given: Collection[str], preset: str) -> str:
        """After its environment, if that is not the preset's."""
        return self.env if "env" in given else preset

    def named_code(self) -> Iterator[NamedCode]:
        """The environment, those it may be told to make, and an expert."""
        for setting in ("env", "env_kwargs", "warm_start"):
            yield from NamedCode.all_of(setting, dict(self)[setting])

    @property
    def judged_by(self) -> str | None:
        """The advantage in force; None: the recipe's own, without the room's help."""
        own = self.loss_type == "control" and not {"credit", "baseline"} & set(self.changed)
        return self.advantage or ("linear" if own else None)

    def _columns(self) -> dict[str, Any]:
        whole = self.logprob_type == "chunk_level" and self.action_chunk > 1
        chunks = {"ratio": "chunk", "chunk_size": self.action_chunk} if whole else {}
        return ADVANTAGES.get(self.judged_by or "", {}) | chunks | super()._columns()

    @property
    def rules(self) -> EpisodeRules:
        """How an episode is played, whoever plays it."""
        return EpisodeRules(self.action_repeat, self.end_on_success)

    @property
    def idle(self) -> dict[str, str]:
        """Settings that were given and cannot change anything, each with what it would need."""
        idle = super().idle
        given = self.model_fields_set
        needs = {"gae_lambda": BOOTSTRAPS} | dict.fromkeys(("critic_learning_rate", "critic_passes"), ("critic",))
        needs |= dict.fromkeys(
            self._changed("baseline_features", "baseline_memory", "credit_until_reward"), ("fitted",)
        )
        for name, kinds in needs.items():
            if name in given and self.judged_by not in kinds:
                idle[name] = f"it needs advantage={' or '.join(kinds)}"
        invariant = self.recipe.scale in ("group_std", "batch_std") and self.judged_by != "critic"
        if self.reward_scale != 1.0 and invariant and not self.filter_rewards:
            idle["reward_scale"] = f"scale={self.recipe.scale} divides it out; it needs scale=none"
        if "films" in given and self.group_by == "steps":
            idle["films"] = "it needs whole episodes, not group_by=steps"
        if "draws" in given and self.group_by == "steps":
            idle["draws"] = "it needs whole episodes, not group_by=steps"
        elif self.draws is not None and self.compiled:
            idle["draws"] = COMPILED_DRAWS
        if self.double_buffer and (self.group_by != "steps" or self.groups_per_step < 2):
            idle["double_buffer"] = "it needs two halves of streams: group_by=steps and groups_per_step=2 or more"
        home = ("auto",) if isinstance(self.workers, str) else ("auto", "processes")
        if self.workers is not None and self.vector not in home:
            idle["workers"] = f"it needs vector={home[-1]}"
        changed = self._changed(*(name for name in BLOCKS["warm_start"] if name != "warm_start"))
        if self.warm_start is None:
            idle |= dict.fromkeys(changed, "it needs warm_start")
        elif self.warm_start.endswith(".npz") and "warm_start_episodes" in changed:
            idle["warm_start_episodes"] = "recorded episodes are all imitated"
        return idle

    def _changed(self, *names: str) -> list[str]:
        """Those that are not at their defaults."""
        return [name for name in names if dict(self)[name] != type(self).model_fields[name].default]

    @property
    def episodes(self) -> int:
        """Tries in one step."""
        return self.group_size * self.groups_per_step


def _check(config: ControlConfig) -> None:
    """What the room alone knows."""
    given = [name for name in ("credit", "baseline") if name in config.changed]
    if config.advantage is not None and given:
        raise ConfigError(f"advantage={config.advantage} already says {given[0]}; give one of them")
    by, judged, recipe = config.group_by, config.judged_by, config.recipe
    if recipe.baseline == "given" and judged not in ROOM_BASELINES:
        raise ConfigError(f"baseline=given needs advantage, one of {', '.join(ROOM_BASELINES)}")
    fit = ("step", "leave_one_out", *(BOOTSTRAPS if by == "steps" else ()))
    if by in ("anchor", "steps") and judged not in (None, *fit):
        raise ConfigError(
            f"group_by={by} compares decisions with each other: it needs advantage={' or '.join(fit)}, "
            f"not {judged}" + ("" if config.advantage else " (the default)")
        )
    if by in ("anchor", "steps") and recipe.credit != "reward_to_go":
        raise ConfigError(f"group_by={by} compares single decisions: it needs credit=reward_to_go")
    for name in ("action_repeat", "action_chunk"):
        if by == "steps" and dict(config)[name] > 1:
            raise ConfigError(f"group_by=steps counts single steps; set {name}=1")
    if by == "steps" and config.end_on_success:
        raise ConfigError("group_by=steps plays until the environment itself ends; set end_on_success=false")
    if judged == "fitted" and recipe.gamma >= 1:
        raise ConfigError("advantage=fitted expects rewards after a cut, without end if gamma=1; set gamma=0.99 or so")
    if by in ("steps", "branch") and config.memory:
        raise ConfigError(f"group_by={by} begins rows inside episodes, where a memory would be lost; set memory=0")
    if config.memory and config.decisions_per_minibatch:
        raise ConfigError(
            "decisions_per_minibatch takes trajectories apart, and a policy with memory needs them whole; use "
            "rows_per_minibatch",
            idle={"decisions_per_minibatch": "a policy with memory needs trajectories whole"},
        )
    exact = bool(recipe.beta) and recipe.kl_estimator == "exact"
    if exact and (recipe.kl_to != "old" or recipe.kl_direction != "other_current"):
        raise ConfigError(
            "kl_estimator=exact is KL(old‖π) here: set kl_to=old and kl_direction=other_current, or use k3"
        )
    if config.no_signal == "resample" and by in ("branch", "steps"):
        raise ConfigError(f"no_signal=resample needs starts that can be asked for again, not group_by={by}")
    if config.select is not None and by in ("batch", "steps"):
        raise ConfigError(f"select chooses among the group_size tries from one start, which group_by={by} has not")
    _check_chunks(config)
    if config.filter_rewards and by in ("branch", "steps"):
        raise ConfigError(f"filter_rewards needs starts that can be asked for again, not group_by={by}")


def _check_chunks(config: ControlConfig) -> None:
    """What chunks and finer log-probs cannot go with."""
    recipe, tokens, chunks = config.recipe, config.logprob_type == "token_level", config.action_chunk > 1
    if config.group_by == "anchor" and chunks:
        raise ConfigError("group_by=anchor compares what was decided on one look; set action_chunk=1")
    if config.decisions_per_minibatch and (chunks or tokens):
        name = f"action_chunk={config.action_chunk}" if chunks else "logprob_type=token_level"
        raise ConfigError(
            f"decisions_per_minibatch takes apart what {name} decides at once; use rows_per_minibatch",
            idle={"decisions_per_minibatch": f"{name} decides several at once"},
        )
    if config.logprob_type == "chunk_level" and chunks and RECIPES[config.loss_type].ratio != "token":
        raise ConfigError(
            f"logprob_type=chunk_level and loss_type={config.loss_type} both choose the ratio; leave one of them out"
        )
    if tokens and recipe.credit == "reward_to_go" and recipe.gamma < 1:
        raise ConfigError("gamma counts actions, not tokens: logprob_type=token_level needs gamma=1 or action_level")
    if tokens and config.group_by == "steps":
        raise ConfigError("group_by=steps counts single steps; it needs logprob_type=action_level")
    if tokens and recipe.beta and recipe.kl_estimator == "exact":
        raise ConfigError("kl_estimator=exact is of whole actions; use k3 with logprob_type=token_level")
