"""The world-model room's settings: the algorithm's with the environment's, the model's and imagination's own."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, FiniteFloat, field_validator

from grpo.blocks import Blocks, extended
from grpo.config import ConfigError, GRPOConfig, NamedCode, RayWorkers
from grpo.dialects import SYSTEMS, Words, joined
from grpo.worldmodel.dialect import IN_RUN_BLOCK, WORDS
from grpo.worldmodel.model.rssm import SIZES

GAMMA = 0.997
"""Discount of a step where none is given: a horizon of about 333."""
HOUSE = "control"
"""The recipe that the room's own defaults belong to; any other is taken as it is."""
ACTORS: dict[str, dict[str, Any]] = {
    "group": {"entropy_coef": 1e-3},
    "bootstrap": {"scale": "none", "entropy_coef": 3e-4},
    "critic": {"scale": "none", "entropy_coef": 3e-4},
}
"""What each actor changes in that recipe. Scale none: returns come divided by their own range, see `return_scale`."""
CRITIC = {"credit": "reward_to_go", "baseline": "given"}
"""What a critic means, in any recipe."""


BLOCKS: Blocks = {
    "env": (
        "env", "env_kwargs", "max_episode_steps", "vector", "envs", "workers", "env_timeout", "action_repeat",
        "pixels", "image_size",
    ),
    "model": (
        "size", "scale_observations", "model_learning_rate", "model_warmup", "batch_size", "batch_length",
        "train_ratio", "pretrain", "free_nats", "reconstruction",
    ),
    "replay": (
        "prefill", "steps_per_collect", "acting", "replay_capacity", "replay_memory", "replay_folder",
        "replay_latents", "replay_ends",
    ),
    "imagination": (
        "horizon", "reward", "actor", "tail", "return_scale", "critic_learning_rate", "gae_lambda", "slow_rate",
    ),
    "policy": ("actor_layers", "action_head", "log_std", "max_std"),
    "adapters": ("init_from", "adapter_rank", "adapt"),
    "eval": ("eval_episodes", "eval_greedy", "video", "films"),
    "general": ("cuda_graphs", "torch_compile", "precision"),
}  # fmt: skip
"""The room's own."""


class WorldModelConfig(GRPOConfig):
    """The algorithm's settings with those of environments, world model and imagination."""

    blocks: ClassVar[Blocks] = extended(GRPOConfig.blocks, BLOCKS)
    first: ClassVar[tuple[str, ...]] = (
        "env", "pixels", "size", "envs", "train_ratio", "horizon", "group_size", "groups_per_step", "learning_rate",
        "run.env_steps",
    )  # fmt: skip
    words: ClassVar[Words] = joined(SYSTEMS, WORDS)
    in_run_block: ClassVar[tuple[str, ...]] = IN_RUN_BLOCK

    # --- the environment
    env: str = "CartPole-v1"
    """A registered id, or module:Name of an environment class or factory; a path/to/file.py:Name works too."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""
    max_episode_steps: int | None = Field(default=None, ge=1)
    """Time limit of an episode; None: the environment's own, or 1000 where it has none."""
    vector: Literal["auto", "classic", "vector", "envpool", "serial", "processes"] = "auto"
    """How copies are stepped: our own vectorised ones, the environment's vector form, EnvPool, one after the other, or
    in killable processes. auto: the first that applies; environments of your own run in processes."""
    envs: int = Field(default=4, ge=1)
    """Copies that play at a time."""
    workers: Annotated[int, Field(ge=1)] | RayWorkers | None = None
    """Processes, for vector=processes; None: one a core. ray: actors of a Ray cluster, one for each of its processors;
    ray:8: so many."""
    env_timeout: float = Field(default=30.0, gt=0)
    """Seconds a process may take for one step before it is killed and the episode given up."""
    action_repeat: int = Field(default=1, ge=1)
    """Environment steps that one action lasts, their rewards added up. What is counted elsewhere (env_steps,
    prefill, train_ratio, horizon) are decisions; max_episode_steps are the environment's own steps."""
    pixels: bool = False
    """See the environment's own drawing of itself instead of its observations."""
    image_size: int = Field(default=64, ge=16, multiple_of=16)
    """Height and width that pictures are brought to."""

    # --- the world model
    size: str = "1m"
    """How large the model and the actor are: 0.5m, 1m, 4m, 12m, 25m, 50m, 100m, 200m, 400m."""
    scale_observations: bool = False
    """Read and predict numbers in standard deviations, by what was seen before the first update, so that small ones
    count as much as large ones; false: as they come, as DreamerV3 does."""
    model_learning_rate: float = Field(default=1e-3, gt=0)
    """Of the world model's LaProp; 4e-5 is published for sizes from 12m on and long runs."""
    model_warmup: int = Field(default=100, ge=0)
    """Updates over which that rate rises from 0."""
    batch_size: int = Field(default=16, ge=1)
    """Replayed sequences in one update of the world model."""
    batch_length: int = Field(default=32, ge=2)
    """Steps of one of them."""
    train_ratio: float = Field(default=128.0, ge=0)
    """Replayed steps for each step of the environment; 0: the model stays as it is."""
    pretrain: int = Field(default=100, ge=0)
    """Updates of the world model before the first imagined future."""
    free_nats: float = Field(default=1.0, ge=0)
    """By so much (KL, in nats) what is seen of a step may differ from what was expected before the world model learns
    from it; slow motions in a small environment lie below DreamerV3's 1."""
    reconstruction: float = Field(default=1.0, gt=0)
    """Weight of the errors of predicted observations among the world model's losses; 1 as in DreamerV3."""

    # --- what was seen
    prefill: int = Field(default=500, ge=1)
    """Environment steps before anything is learned."""
    steps_per_collect: int = Field(default=16, ge=1)
    """Environment steps between two batches of imagined futures, over all copies."""
    acting: Literal["lockstep", "beside"] = "lockstep"
    """When those steps are played: before the world model learns, or beside it, in a thread and on the CPU, by a copy
    of the agent. What is learned from is then one batch of futures older, and so is who played it."""
    replay_capacity: int = Field(default=200_000, ge=1)
    """Steps that are remembered."""
    replay_memory: int | None = Field(default=None, ge=1)
    """Those of them that are kept in memory where the run has a folder for the rest; None: all."""
    replay_folder: str | None = None
    """Where the files of the replay lie, on a larger disk say; one for each run. None: replay/ in the run's folder."""
    replay_latents: Literal["float32", "float16"] = "float32"
    """How exactly the latents beside remembered steps are kept; float16 takes half of their room."""
    replay_ends: float = Field(default=0.0, ge=0, le=1)
    """Share of the replayed sequences that begin at most horizon + batch_length steps before one of the last 20 ends of
    episodes, so that ends are learned of and imagined from where they are rare; 0: all are drawn evenly."""

    # --- imagination
    horizon: int = Field(default=32, ge=1)
    """Steps of an imagined future."""
    reward: str | None = None
    """A function of yours that judges imagined futures instead of the world model's reward head: file.py:name or
    module:name, called with the batch; it returns one value for each future, or one for each of its steps."""
    actor: Literal["group", "bootstrap", "critic"] = "group"
    """What a future is judged by: the others of its group · the same, with a learned value of where each ends · a
    learned critic, as DreamerV3 does."""
    tail: Literal["none", "fitted", "critic"] | None = None
    """What a future is worth beyond its last step: nothing · a value of the latent it ends in, solved in closed form
    from imagined futures, without a network · a learned critic. None: none for actor=group, critic for bootstrap."""
    return_scale: Literal["percentile", "none"] = "percentile"
    """Divide imagined returns by the range between their 5th and 95th percentile, if that is above 1; used where the
    recipe does not scale by itself (scale=none)."""
    critic_learning_rate: float = Field(default=1e-3, gt=0)
    """For actor=critic and tail=critic."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """For actor=critic and tail=fitted: how far imagined rewards reach before the value is believed."""
    slow_rate: float = Field(default=0.02, gt=0, le=1)
    """For actor=critic and tail=critic: share of the critic that its slow copy takes over at each update."""

    # --- the actor
    actor_layers: int = Field(default=3, ge=1)
    """Hidden layers; their width goes with `size`."""
    action_head: Literal["auto", "gaussian", "squashed"] = "auto"
    """How continuous actions are drawn: Gaussian and clipped, or Gaussian and squashed. auto: the first."""
    log_std: FiniteFloat = -0.5
    """Where the logarithm of a Gaussian's standard deviation starts; ±1 are the action's bounds."""
    max_std: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The most that this deviation may be. 1: noise as wide as the bounds, beyond which an entropy bonus is paid for
    nothing and the mean means nothing. None: no limit."""

    # --- fine-tuning
    init_from: str | None = None
    """A run folder whose world model and actor this one begins with."""
    adapter_rank: int = Field(default=0, ge=0)
    """Train low-rank adapters of this rank on the dense layers and leave everything else as it is; 0: no adapters."""
    adapt: Literal["actor", "both"] = "both"
    """What gets adapters: the actor alone, whose world then stays as it is, or the world model too."""

    # --- evaluation
    eval_episodes: int = Field(default=20, ge=1)
    """Episodes of one evaluation, on starts that training never uses."""
    eval_greedy: bool = True
    """Evaluate the most likely actions rather than drawn ones."""
    video: bool = True
    """Leave films in the run folder: an episode of the best policy, where the environment can be drawn, and what the
    world model predicted."""
    films: bool = True
    """Show what the world model predicts of a replayed sequence, for `grpo view`: strips of pictures, or curves. At the
    first kept step (`run.sample_every`) and then at every fourfold of it."""

    # --- the algorithm
    loss_type: str = HOUSE
    """The recipe: a row of the table that `grpo presets --recipes` prints."""
    group_size: int = Field(default=8, ge=2)
    """Imagined futures from each start."""
    groups_per_step: int = Field(default=32, ge=1)
    """Starts in one step, drawn from what was replayed."""
    learning_rate: float = Field(default=5e-4, gt=0)
    """Of the actor's Adam."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Of that Adam."""
    device: str = "auto"
    """cpu, cuda or mps. auto: the first of cuda, mps, cpu."""
    cuda_graphs: bool = True
    """Record updates of the world model and imagination once and play them again; elsewhere than on a CUDA device there
    are no graphs."""
    torch_compile: bool | None = None
    """Compile a step of imagination and, on a CUDA device, what the recurrence does between its products. It takes some
    seconds at first, on the CPU also a C++ compiler. None: on a CUDA device, without adapters."""
    precision: Literal["float32", "tf32", "bfloat16"] = "tf32"
    """On a CUDA device: how exact products of float32 are there, in the whole process. bfloat16: the world model's
    encoder, decoder and heads learn in it, and it imagines in it; all else is as with tf32."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        _check(self)

    @field_validator("replay_folder")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        """Who goes on from another working directory means the same folder."""
        return None if value is None else str(Path(value).expanduser().absolute())

    def title(self, given: Collection[str], preset: str) -> str:
        """After its environment, if that is not the preset's."""
        return self.env if "env" in given else preset

    @property
    def discount(self) -> float:
        """What a step further away counts less; given as gamma."""
        return float(self.changed.get("gamma", GAMMA))

    @property
    def beyond(self) -> str:
        """What a group's futures are worth beyond their last step."""
        return self.tail or ("critic" if self.actor == "bootstrap" else "none")

    @property
    def valued(self) -> bool:
        """Whether a critic is learned."""
        return self.actor == "critic" or self.beyond == "critic"

    def expect_ranks(self, ranks: int) -> None:
        """Files that one rank alone has are missing on the others: several remember in memory and checkpoints."""
        for name in ("replay_folder", "replay_memory") if ranks > 1 else ():
            if (value := dict(self)[name]) is not None:
                raise ConfigError(
                    f"{name}={value} is for one process: {ranks} ranks remember in memory, and keep no files of it; "
                    "leave it out, and lower replay_capacity if memory is too small"
                )

    def named_code(self) -> Iterator[NamedCode]:
        """The environment, those it may be told to make, and what judges."""
        for setting in ("env", "env_kwargs", "reward"):
            yield from NamedCode.all_of(setting, dict(self)[setting])

    @property
    def frozen_model(self) -> bool:
        """Whether the world model stays as it is."""
        return self.train_ratio == 0 or bool(self.adapter_rank and self.adapt == "actor")

    @property
    def measures_observations(self) -> bool:
        """Whether their scale is this run's own: not that of the agent it begins with."""
        return self.scale_observations and not self.frozen_model and self.init_from is None

    def _columns(self) -> dict[str, Any]:
        own = ACTORS[self.actor] if self.loss_type == HOUSE else {}
        own = own | (CRITIC if self.actor == "critic" else {})
        columns: dict[str, Any] = own | super()._columns()
        if self.loss_type == "dr_grpo" or columns.get("reduction") == "fixed_length":
            columns = {"length": float(self.horizon)} | columns
        return columns | {"gamma": self.discount}

    @property
    def idle(self) -> dict[str, str]:
        """Settings that were given and cannot change anything, each with what it would need."""
        idle = super().idle
        idle.pop("gamma", None)  # imagined rewards are discounted, whatever the credit
        given = self.model_fields_set

        def unless(used: bool, needs: str, *names: str) -> None:
            idle.update({name: f"it needs {needs}" for name in names if name in given and not used})

        unless(self.valued, "actor=critic or tail=critic", "critic_learning_rate", "slow_rate")
        unless(self.actor == "critic" or self.beyond == "fitted", "actor=critic or tail=fitted", "gae_lambda")
        unless(self.recipe.scale == "none", "scale=none", "return_scale")
        unless(bool(self.adapter_rank), "adapter_rank", "adapt")
        unless(not self.frozen_model, "train_ratio > 0 and a model that is trained", "model_warmup")
        unless(not self.frozen_model, "train_ratio > 0 and a model that is trained", "model_learning_rate", "pretrain")
        unless(not self.frozen_model, "train_ratio > 0 and a model that is trained", "free_nats", "reconstruction")
        if self.precision == "bfloat16":
            unless(not self.frozen_model, "train_ratio > 0 and a model that is trained", "precision")
        home = ("auto",) if isinstance(self.workers, str) else ("auto", "processes")
        unless(self.vector in home, f"vector={home[-1]}", "workers")
        unless(self.vector in ("auto", "processes"), "vector=processes", "env_timeout")
        return idle


def _check(config: WorldModelConfig) -> None:
    """What the room alone knows."""
    if config.size not in SIZES:
        raise ConfigError(f"size={config.size!r} is not one of {', '.join(SIZES)}")
    recipe = config.recipe
    if recipe.baseline == "given" and config.actor != "critic":
        raise ConfigError("baseline=given needs actor=critic")
    if config.actor == "critic" and (recipe.baseline != "given" or recipe.credit != "reward_to_go"):
        raise ConfigError("actor=critic brings its own baseline; leave baseline and credit out, or use actor=bootstrap")
    if config.actor == "critic" and config.tail is not None:
        raise ConfigError("actor=critic sees past the horizon by itself; leave tail out, or use actor=group")
    if config.actor == "bootstrap" and config.tail == "none":
        raise ConfigError(
            "actor=bootstrap without a tail is actor=group with scale=none; write that, or leave tail out"
        )
    if recipe.credit == "per_reward":
        raise ConfigError("credit=per_reward needs several rewards, and a world model predicts one; leave it out")
    exact = bool(recipe.beta) and recipe.kl_estimator == "exact"
    if exact and (recipe.kl_to != "old" or recipe.kl_direction != "other_current"):
        raise ConfigError(
            "kl_estimator=exact is KL(old‖π) here: set kl_to=old and kl_direction=other_current, or use k3"
        )
    if config.max_std is not None and config.log_std > math.log(config.max_std):
        raise ConfigError(
            f"log_std={config.log_std} starts wider than max_std={config.max_std} allows; "
            f"lower it to {math.log(config.max_std):.2f} or less, or raise max_std"
        )
    if config.adapter_rank and config.init_from is None:
        raise ConfigError("adapter_rank leaves all other weights as they are; say with init_from whose they are")
    if config.adapter_rank and config.ref_sync_steps is not None:
        raise ConfigError("with adapters the reference is the agent without them, which cannot follow; leave "
                          "ref_sync_steps out")  # fmt: skip
    if config.adapter_rank and config.torch_compile:
        raise ConfigError("torch_compile cannot see through adapters; leave torch_compile or adapter_rank out")
    least = config.envs * (config.batch_length + 1)
    if config.replay_capacity < max(2 * least, config.prefill):
        raise ConfigError(f"replay_capacity={config.replay_capacity} is too small; at least {2 * least} and prefill")
