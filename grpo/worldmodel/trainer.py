"""The front door for imagined futures: an environment, a horizon, and how many futures each remembered state gets.

GRPOTrainer(env="CartPole-v1", group_size=8, horizon=16).train(env_steps=10_000)
GRPOTrainer(env="CartPole-v1", reward_fn=upright).train(steps=500, folder="runs/upright")
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import gymnasium as gym
import torch

from grpo.config import ConfigError
from grpo.envs.action_repeat import ActionRepeatFactory
from grpo.envs.copies import EnvCopies
from grpo.envs.evaluate import EnvPlayer, Evaluation
from grpo.envs.fleet import Fleet
from grpo.envs.heads import LOG_STD, Gaussian, Head, make_head
from grpo.envs.make import TRUSTED, EnvFactory, Kind, make_fleet
from grpo.errors import warn
from grpo.models import device_of, moved
from grpo.optimizers import Adam
from grpo.protocols import Reference, part
from grpo.reference import FrozenReference
from grpo.run import checkpoint
from grpo.run.door import door
from grpo.run.folder import FolderError, RunFolder
from grpo.run.functions import function_of
from grpo.run.trainer import GRPOTrainer as RunTrainer
from grpo.together import here
from grpo.worldmodel.config import WorldModelConfig
from grpo.worldmodel.export import export_agent
from grpo.worldmodel.imagine import RewardFn
from grpo.worldmodel.model.adapters import adapt
from grpo.worldmodel.model.compiled import wanted
from grpo.worldmodel.model.learner import Learner
from grpo.worldmodel.model.world_model import WorldModel
from grpo.worldmodel.policy import ActorPolicy, WithoutAdapters, make_network
from grpo.worldmodel.source import WorldModelSource
from grpo.worldmodel.views import DrawnFactory, View

Env = str | Callable[[], gym.Env[Any, Any]]


class GRPOTrainer(RunTrainer):
    """GRPO in imagination.

    env: an id or a factory. reward_fn: your own rewards for imagined futures, `reward_fn(batch) -> (N,)` or (N, H);
    see `grpo.worldmodel.imagine.Futures`. Settings: the fields of `WorldModelConfig`; its `reward` names such a one.
    """

    source: WorldModelSource
    config: WorldModelConfig
    task, run_name, measure, sample_every = "worldmodel", "dreamer", "return", 50
    commands = ("view", "eval", "export")

    @door
    def __init__(
        self,
        env: Env | None = None,
        group_size: int | None = None,
        horizon: int | None = None,
        reward_fn: RewardFn | None = None,
        *,
        config: WorldModelConfig | None = None,
        teacher: Any = None,
        **settings: Any,
    ) -> None:
        given = {name: x for name, x in (("group_size", group_size), ("horizon", horizon)) if x is not None} | settings
        if config is not None and given:
            raise TypeError(f"give config or single settings, not both: {', '.join(given)}")
        if config is not None and isinstance(env, str) and env != config.env:
            raise TypeError(f"config says env={config.env}; leave env={env} out, or change the config")
        if isinstance(env, gym.Env):
            raise TypeError(
                "several copies are played at a time: pass the environment's id, or a function that makes it"
            )
        if config is None:
            named = {} if env is None else {"env": env if isinstance(env, str) else _name(env)}
            config = WorldModelConfig(_dialect="dreamer", **named | given)
        reward_fn = _judge(config, reward_fn)
        config.expect_ranks(here().size)  # first: several ranks have a GPU each
        fleet, copies = _environments(config, config.env if env is None or isinstance(env, str) else env)
        try:
            policy, learner, view, parentless = _agent(config, fleet)
        except BaseException:
            fleet.close()
            raise
        source = WorldModelSource(policy, learner, fleet, view, copies, config, reward_fn)
        source.parentless = parentless
        tensors = [p for p in policy.parameters().values() if p.requires_grad]
        optimizer = Adam(tensors, lr=config.learning_rate, weight_decay=config.weight_decay)
        super().__init__(
            config, policy, _reference(config, policy), optimizer=optimizer, source=source, teacher=teacher
        )

    # --- looking ----------------------------------------------------------------------------------------------------

    @door
    def evaluate(self, episodes: int = 20, greedy: bool = True, seed: int | None = None) -> Evaluation:
        """Whole episodes on starts that training never uses."""
        return self.source.judge(episodes, greedy, seed)

    def player(self) -> EnvPlayer:
        """The policy for episodes that somebody else plays."""
        return EnvPlayer(self.source.collector.fleet.observation_space, self.source.players)

    def watch(self, episodes: int = 3, render: bool = False, video: str | Path | None = None) -> list[float]:
        """Greedy episodes on independent starts, in a window or a video; their returns."""
        return self.source.watch(episodes, render, video)

    def export(self, path: str | Path) -> Path:
        """The greedy agent as an ONNX file, checked against this one; see `grpo.worldmodel.export.Agent`."""
        return export_agent(self.source.model, self.source.policy, self.source.view, Path(path))


def make_trainer(config: WorldModelConfig) -> GRPOTrainer:
    """The trainer of a configuration, as the command line makes it."""
    return GRPOTrainer(config=config)


# --- what is made where nothing is given ----------------------------------------------------------------------------


def _name(env: Callable[[], gym.Env[Any, Any]]) -> str:
    """What a run folder keeps of an environment that was not given by name: where its class is."""
    kind = env if hasattr(env, "__qualname__") else type(env)
    return f"{kind.__module__}:{kind.__qualname__}"


def _judge(config: WorldModelConfig, given: RewardFn | None) -> RewardFn | None:
    """Who judges imagined futures: a function that was given, or one that the settings name; None: the reward head."""
    if config.reward is None:
        return given
    if given is not None:
        raise TypeError(f"reward_fn and reward={config.reward} both judge imagined futures; give one of them")
    found = function_of(config.reward)
    if found is None:
        raise ConfigError(f"reward={config.reward!r} names no function; write file.py:NAME or module:NAME")
    return found


def _environments(config: WorldModelConfig, env: Env) -> tuple[Fleet, EnvCopies]:
    """The fleet that plays, and how further copies are made."""
    horizon, kind = config.max_episode_steps, cast("Kind", config.vector)
    factory = EnvFactory(env, config.env_kwargs, horizon)
    if config.pixels or config.action_repeat > 1:
        if kind in ("classic", "vector", "envpool"):
            what = "pixels=true" if config.pixels else f"action_repeat={config.action_repeat}"
            raise ConfigError(f"{what} needs environments one by one: vector=serial or processes, not {kind}")
        kind = _home(factory) if kind == "auto" and not isinstance(config.workers, str) else kind
    if config.action_repeat > 1:
        factory, horizon = EnvFactory(ActionRepeatFactory(factory, config.action_repeat)), None
    if config.pixels:
        factory = EnvFactory(DrawnFactory(factory.env, config.image_size, factory.kwargs, factory.horizon))

    def made(kind: Kind, count: int) -> Fleet:
        workers, timeout = config.workers, config.env_timeout
        return make_fleet(factory, count, kind=kind, horizon=horizon, workers=workers, timeout=timeout)

    return made(kind, config.envs), EnvCopies(factory, partial(made, kind))


def _home(factory: EnvFactory) -> Kind:
    """This process for packages that are known to behave, others otherwise."""
    source = factory.resolve()
    entry = getattr(source, "entry_point", source)
    module = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    return "serial" if module.replace(":", ".").split(".")[0] in TRUSTED else "processes"


def _agent(config: WorldModelConfig, fleet: Fleet) -> tuple[ActorPolicy, Learner, View, str | None]:
    """Actor and world model, fresh or another run's, with adapters if asked for; and why that run was not found."""
    view = View(fleet.observation_space, config.image_size)
    head = make_head(fleet.action_space, config.action_head, config.log_std, state_std=True)
    if config.max_std is not None and isinstance(head, Gaussian):
        head.limits = (LOG_STD[0], math.log(config.max_std))
    _expect_used(config, view, head)
    policy = ActorPolicy(torch.nn.Identity(), head)
    model = WorldModel(
        view.shapes,
        policy.actions.width,
        config.size,
        config.seed,
        config.scale_observations,
        config.free_nats,
        config.reconstruction,
    )
    units = model.size.units
    policy = ActorPolicy(make_network(model.flat_width, units, head, config.actor_layers, config.seed), head)
    parentless = None if config.init_from is None else _begin_with(Path(config.init_from), policy, model)
    if config.adapter_rank:
        policy.module.requires_grad_(False)
        adapt(policy.network, config.adapter_rank, config.seed)
        if config.adapt == "both":
            adapt(model, config.adapter_rank, config.seed)
    device = device_of(config.device)
    moved(model, device)
    moved(policy.module, device)
    return policy, _learner(config, model, torch.device(device)), view, parentless


def _learner(config: WorldModelConfig, model: WorldModel, device: torch.device) -> Learner:
    return Learner(
        model,
        config.model_learning_rate,
        config.model_warmup,
        config.frozen_model,
        graphs=config.cuda_graphs,
        compiled=not config.adapter_rank and wanted(config.torch_compile, device),
        coarse=config.precision == "bfloat16",
    )


def _expect_used(config: WorldModelConfig, view: View, head: Head) -> None:
    """Settings that this environment leaves nothing to do are refused."""
    given = config.model_fields_set
    if not isinstance(head, Gaussian):
        idle = "has no effect: this environment's actions are not drawn from a Gaussian"
        if "log_std" in given:
            raise ConfigError(f"log_std {idle}")
        if config.max_std is not None:  # a preset's, perhaps, beside another environment
            warn(f"max_std {idle}")
    if "image_size" in given and not config.pixels and not any(len(shape) == 3 for shape in view.shapes.values()):
        raise ConfigError("image_size has no effect: this environment shows no pictures; pixels=true draws some")


def _begin_with(path: Path, policy: ActorPolicy, model: WorldModel) -> str | None:
    """The weights of another run's best (or last) checkpoint; or why there is no such run.

    That is no error yet: a run that is resumed has its weights, wherever its parent went.
    """
    try:
        folder = RunFolder.open(path)
    except FolderError as error:
        return f"init_from: {error}"
    found = checkpoint.best(folder) or checkpoint.resume_point(folder, None)
    if found is None:
        raise ConfigError(f"init_from={path} has no checkpoint; train it first")
    arrays = found.state.arrays
    try:
        model.load_state_dict(part(arrays, "source/study/weights"))
        policy.module.load_state_dict(part(arrays, "policy"))
    except RuntimeError as error:
        why = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"init_from={path} is another agent than these settings make (size, env, layers, its own adapters): {why}"
        ) from None
    return None


def _reference(config: WorldModelConfig, policy: ActorPolicy) -> Reference | None:
    recipe = config.recipe
    if not recipe.beta or recipe.kl_to != "reference":
        return None
    return WithoutAdapters(policy) if config.adapter_rank else FrozenReference.copy_of(policy)
