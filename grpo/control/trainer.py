"""The front door for environments: an env, an actor and an optimizer, given or made for you.

    GRPOTrainer(env="CartPole-v1").train(steps=50)                        # tuned defaults
    GRPOTrainer(env=gym.make("CartPole-v1"), actor=my_actor, optimizer=my_optimizer,
                clip_ratio=0.2, beta=0.001, gamma=0.99, epochs=10, batch_size=32, group_size=200)  # a tutorial's words

The second spelling has the tutorial's meaning, see `grpo.control.tutorial`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import torch
from torch import nn

from grpo.config import ConfigError
from grpo.control import tutorial
from grpo.control.acting import Players
from grpo.control.chunks import ChunkColumns
from grpo.control.compiled.obstacles import obstacle
from grpo.control.config import COMPILED_DRAWS, ControlConfig
from grpo.control.dialect import expect_settings
from grpo.control.evaluate import MOST_ENVS, watch
from grpo.control.export import export_policy
from grpo.control.groups import EVALUATION, seeds
from grpo.control.networks import check_fits, make_network
from grpo.control.policy import ActorPolicy
from grpo.control.scaling import Scaling
from grpo.control.source import ControlSource
from grpo.envs.copies import EnvCopies
from grpo.envs.evaluate import EnvPlayer, Evaluation
from grpo.envs.fleet import EnvError, Fleet
from grpo.envs.functions.named import find_task, is_function
from grpo.envs.functions.task import NotAFunction
from grpo.envs.heads import make_head
from grpo.envs.make import EnvFactory, limited, make_fleet
from grpo.envs.rules import EpisodeRules
from grpo.envs.video import can_show
from grpo.errors import warn
from grpo.models import moved
from grpo.optimizers import Adam
from grpo.protocols import State
from grpo.reference import FrozenReference
from grpo.report import StepReport
from grpo.run.config import RunConfig
from grpo.run.door import door
from grpo.run.trainer import GRPOTrainer as RunTrainer
from grpo.threads import few_threads
from grpo.trainer import Hook, Trainer

if TYPE_CHECKING:
    from grpo.control.compiled.room import CompiledRoom


class WarmStart:
    """Before the first step: imitate the expert; what the KL is measured to is the policy that comes of it."""

    def __init__(self, source: ControlSource) -> None:
        self._source = source
        self._found: dict[str, float | None] = {}

    def before(self, trainer: Trainer) -> None:
        """Once, where the source is cold."""
        self._found = {}
        if not self._source.cold:
            return
        with trainer.phase("warm_start"):
            self._found = self._source.warm_up()
        if trainer.reference is not None:
            trainer.reference.sync(trainer.policy.parameters(), 1.0)

    def after(self, trainer: Trainer, report: StepReport) -> None:
        """What it came to."""
        report.metrics |= self._found


class GRPOTrainer(RunTrainer):
    """GRPO for a Gymnasium environment.

    env: an id, a factory, or an environment. actor: an `nn.Module` from observations to the numbers the action space
    needs (logits; means), or None for an MLP or CNN that fits. Settings: the fields of `ControlConfig`.
    """

    source: ControlSource
    config: ControlConfig
    task, measure, evaluates_every = "control", "return", 5
    commands = ("view", "eval", "export")
    clip_ratio, beta, gamma, epochs, batch_size, group_size = (tutorial.Setting() for _ in range(6))

    @door
    def __init__(
        self,
        env: str | gym.Env[Any, Any] | Callable[[], gym.Env[Any, Any]] | None = None,
        actor: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        clip_ratio: float | None = None,
        beta: float | None = None,
        gamma: float | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        group_size: int | None = None,
        *,
        config: ControlConfig | None = None,
        teacher: Any = None,
        **settings: Any,
    ) -> None:
        words = {"clip_ratio": clip_ratio, "epochs": epochs, "batch_size": batch_size}
        words |= {"beta": beta, "gamma": gamma, "group_size": group_size}
        given = {name: value for name, value in words.items() if value is not None} | settings
        if config is not None and given:
            raise TypeError(f"give config or single settings, not both: {', '.join(given)}")
        if config is not None and isinstance(env, str) and env != config.env:
            raise TypeError(f"config says env={config.env}; leave env={env} out, or change the config")
        self.tutorial = config is None and tutorial.is_meant(given, actor is not None and optimizer is not None)
        if config is None:
            config = _config(env, given, self.tutorial)
        idle = [name for name in ("learning_rate", "weight_decay") if optimizer is not None and name in given]
        if idle:
            raise ConfigError(f"{idle[0]} has no effect with an optimizer of your own; set it there")
        fleet, copies = _envs(config, env)
        self.env = env if isinstance(env, gym.Env) else copies.single
        policy, scaling = _policy(config, fleet, actor)
        source = ControlSource(policy, scaling, fleet, copies, config)
        recipe = config.recipe
        reference = FrozenReference.copy_of(policy) if recipe.beta and recipe.kl_to == "reference" else None
        hooks: list[Hook] = [WarmStart(source)]
        if self.tutorial:
            self.ep_rewards: list[float] = []
            hooks.append(tutorial.Reported(source, self.ep_rewards))
        given_optimizer, optimizer = optimizer, _optimizer(optimizer, policy, config)
        own = {"actor": actor, "optimizer": given_optimizer, "teacher": teacher}
        self.compiled = compiled_room(source, optimizer, config.env if env is None else env, own)
        """The step as a program, where that was asked for and can be."""
        self._was_compiled: bool | None = None
        """As the checkpoint says that was gone on from."""
        super().__init__(config, policy, reference, optimizer=optimizer, source=source, hooks=hooks, teacher=teacher)
        if self.compiled is not None and self.ranks.size > 1:
            warn("not compiled: several ranks share the step; it is played the ordinary way")
            self.compiled = None
        if self.compiled is not None and config.draws is not None:  # as functions are by default
            raise ConfigError(f"draws has no effect here: {COMPILED_DRAWS}", {"draws": COMPILED_DRAWS})

    def step(self, states: Sequence[Any] | None = None) -> StepReport:
        """Sample a group from each start, compare, learn; starts of the caller's are played the ordinary way."""
        if self._was_compiled and self.compiled is None:
            raise ConfigError(
                "the checkpoint is of a run that was compiled, and here it cannot be: its numbers would be others from "
                "here on; the warning before says what is in the way, or begin a new run"
            )
        if not self._goes_compiled or self.compiled is None or states is not None:
            with self._threads():
                return super().step(states)
        for hook in self.hooks:
            hook.before(self)
        report, updates = self.compiled.step(self)
        self.steps_done += 1
        for hook in self.hooks:
            hook.after(self, report)
        self._raise_if_diverged(updates, report)
        return report

    def _threads(self) -> AbstractContextManager[None]:
        """One, where minibatches of a small network are known to be small; convolutions want them all."""
        weights, decisions = list(self.policy.parameters().values()), self.config.decisions_per_minibatch
        if decisions is None or any(weight.ndim > 2 for weight in weights):
            return nullcontext()
        return few_threads(decisions * sum(weight.numel() for weight in weights), weights[0].device)

    @property
    def evaluation(self) -> Callable[[int], Mapping[str, Any]] | None:
        """On starts that training never uses."""
        by_program = self.compiled if self._goes_compiled else None
        return super().evaluation if by_program is None else by_program.evaluate

    @property
    def _goes_compiled(self) -> bool:
        """Whether steps are a program's: a run goes on the way it began."""
        return self.compiled is not None and self._was_compiled is not False

    @property
    def actor(self) -> nn.Module:
        """The trained network."""
        return self.source.policy.network

    def __getattr__(self, name: str) -> Any:
        if name in tutorial.ELSEWHERE:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}; {tutorial.ELSEWHERE[name]}"
            )
        return object.__getattribute__(self, name)  # raises what a property raised, or that there is none

    # --- its runs ---------------------------------------------------------------------------------------------------

    @property
    def run_name(self) -> str:
        """The environment's name, as a folder can be called."""
        return "".join(c if c.isalnum() or c in "-_" else "-" for c in self.source.fleet.name)

    def planned(self, asked: Mapping[str, Any], kept: bool) -> RunConfig:
        """The only copy of an environment, busy with its stream, is not evaluated unless somebody asks."""
        if self.tutorial and not {"steps", "env_steps", "stop_at"} & set(asked):
            asked = {**asked, "steps": tutorial.UPDATES}
        return super().planned(asked, kept and not self._busy)

    def settings(self) -> dict[str, Any]:
        """With what the command must know to make an environment again that was passed ready-made."""
        return super().settings() | _remade(self.env)

    def load_state(self, state: State) -> None:
        """Go on exactly where `state` was taken; see `grpo.trainer.Trainer.load_state`."""
        self.source.expect_way(state.values["source"])  # before weights are compared, which says less
        self._was_compiled = bool(state.values["source"].get("compiled", False))
        super().load_state(state)
        if self.compiled is not None and not self._was_compiled:
            warn("not compiled: the run was played the ordinary way when it was saved, and goes on so")

    def state(self) -> State:
        """Everything the next step depends on."""
        state = super().state()
        if self._goes_compiled:
            state.values["source"]["compiled"] = True
        return state

    # --- looking ----------------------------------------------------------------------------------------------------

    @door
    def evaluate(self, episodes: int = 20, greedy: bool = True, seed: int | None = None) -> Evaluation:
        """Whole episodes on starts that training never uses."""
        return self.source.evaluator.evaluate(episodes, greedy, seed)

    def test(
        self,
        env: gym.Env[Any, Any] | None = None,
        actor: nn.Module | None = None,
        episodes: int = 5,
        render: bool = False,
        video: str | Path | None = None,
    ) -> list[float]:
        """Greedy episodes, one line each; `render` opens a window, or without a display writes a video."""
        own = self.source.policy
        policy = own if actor is None else ActorPolicy(actor, own.head, own.columns)
        scaling = self.source.scaling if actor is None else Scaling(self.source.fleet.observation_space, False)
        shown = self.source.evaluator.copies.single if env is None or env is self.env else env
        with self._aside():
            return _tell(shown, policy, scaling, EpisodeRules(self.config.action_repeat), episodes, render, video)

    def player(self) -> EnvPlayer:
        """The policy for episodes that somebody else plays."""
        policy, scaling, rules = self.source.policy, self.source.scaling, EpisodeRules(self.config.action_repeat)
        return EnvPlayer(self.source.fleet.observation_space, partial(Players, policy, scaling, rules))

    def watch(self, episodes: int = 3, render: bool = False, video: str | Path | None = None) -> list[float]:
        """Greedy episodes on independent starts, in a window or a video; their returns."""
        with self._aside():
            return self.source.evaluator.watch(episodes, render, video)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """What is looked at may be the only copy, in the middle of a stream: that goes on as if nothing had been."""
        state = self.source.state() if self._busy else None
        try:
            yield
        finally:
            if state is not None:
                self.source.load_state(state)

    @property
    def _busy(self) -> bool:
        """Whether the only copy there is plays a stream, so that nothing else can be played with it meanwhile."""
        return self.source.windows is not None and isinstance(self.source.evaluator.copies.single, gym.Env)

    def record(self, path: str | Path, episodes: int = 20, seed: int | None = None) -> Path:
        """Greedy episodes that did not fail as an .npz file: somebody else's `warm_start`."""
        with self._aside():
            return self.source.evaluator.record(Path(path), self.source.fleet, episodes, seed)

    def export(self, path: str | Path) -> Path:
        """The greedy policy as an ONNX file, checked against this one."""
        space, repeat = self.source.fleet.observation_space, self.config.action_repeat
        return export_policy(self.source.policy, self.source.scaling, space, Path(path), repeat)


def test(
    env: gym.Env[Any, Any] | str,
    actor: nn.Module,
    episodes: int = 5,
    render: bool = False,
    video: str | Path | None = None,
) -> list[float]:
    """Greedy episodes of an actor, one line each: `Test Episode 1 | Reward: 500.0`."""
    single = EnvFactory(env) if isinstance(env, str) else env
    fleet = make_fleet(single, 1, kind="serial")
    head = make_head(fleet.action_space)
    check_fits(actor, fleet.observation_space, head.size, "actor", fleet.action_space)
    policy, scaling = ActorPolicy(actor, head), Scaling(fleet.observation_space, False)
    return _tell(single, policy, scaling, EpisodeRules(), episodes, render, video)


def _tell(
    env: Any, policy: ActorPolicy, scaling: Scaling, rules: EpisodeRules, episodes: int, render: bool, video: Any
) -> list[float]:
    returns = watch(env, policy, scaling, rules, seeds(0, 0, EVALUATION, episodes), render, video)
    for number, total in enumerate(returns, 1):
        print(f"Test Episode {number} | Reward: {total}")
    if render and not can_show():
        print(f"no display: the episodes are in {video or 'test.mp4'}")
    return returns


def make_trainer(config: ControlConfig) -> GRPOTrainer:
    """The trainer of a configuration, as the command line makes it."""
    trainer = GRPOTrainer(config=config)
    if trainer.compiled is not None:
        trainer.compiled.remember(trainer.state())
    return trainer


# --- what is made where nothing is given ----------------------------------------------------------------------------


def _config(env: Any, given: dict[str, Any], of_the_tutorial: bool) -> ControlConfig:
    """Settings as given, the tutorial's in its own dialect and with its own defaults."""
    expect_settings(env, given)
    if isinstance(env, str):
        given = {"env": env} | given
    elif env is not None:
        given = {"env": _name(env)} | given
    if not of_the_tutorial:
        return ControlConfig(_dialect="tutorial", **given)
    return tutorial.configured(given)


def _remade(env: Any) -> dict[str, Any]:
    """What the command line must know to make an environment again that was passed ready-made."""
    spec = env.spec if isinstance(env, gym.Env) else None
    if spec is None:
        return {}
    kwargs = {name: value for name, value in spec.kwargs.items() if name != "render_mode"}
    limit = {} if spec.max_episode_steps is None else {"max_episode_steps": spec.max_episode_steps}
    return ({"env_kwargs": kwargs} if kwargs else {}) | limit


def _name(env: Any) -> str:
    """What a run folder keeps of an environment that was not given by name: its id, or where its class is."""
    spec = getattr(env, "spec", None)
    kind = env if hasattr(env, "__qualname__") else type(env)
    return spec.id if spec is not None else f"{kind.__module__}:{kind.__qualname__}"


def _envs(config: ControlConfig, env: Any) -> tuple[Fleet, EnvCopies]:
    """The fleet that trains, and how further copies are made."""
    given = config.env if env is None or isinstance(env, str) else env
    size = config.groups_per_step if config.group_by == "steps" else min(config.num_envs or MOST_ENVS, config.episodes)
    horizon = config.max_episode_steps
    unasked = config.group_by == "start" and "group_by" not in config.model_fields_set

    def made(of: Any, count: int) -> Fleet:
        workers, timeout = config.workers, config.env_timeout
        return make_fleet(
            of, count, kind=config.vector, horizon=horizon, workers=workers, timeout=timeout, alike=unasked
        )

    if not isinstance(given, gym.Env):
        factory = EnvFactory(given, config.env_kwargs, horizon)
        return made(factory, size), EnvCopies(factory, partial(made, factory))
    if config.env_kwargs:
        raise ConfigError("env_kwargs has no effect on an environment that is made already; pass its id")
    # A wrapper that does not say how it was made cannot be made again, and so nor can what it wraps.
    if given.spec is not None and all(wrapper.kwargs is not None for wrapper in given.spec.additional_wrappers):
        spec = copy.deepcopy(given.spec)
        spec.kwargs.pop("render_mode", None)  # one window is enough
        factory = EnvFactory(spec, horizon=horizon)
        return made(given, size), EnvCopies(factory, partial(made, factory))
    fleet = made(given, 1)  # the only one there is: episodes are played one after the other, also to evaluate

    def same(count: int) -> Fleet:
        if config.group_by == "steps":
            raise EnvError(
                f"{fleet.name} is the only copy and busy with its stream; pass an id or a factory to evaluate"
            )
        return fleet

    return fleet, EnvCopies(given if horizon is None else limited(given, horizon), same, only=True)


def _policy(config: ControlConfig, fleet: Fleet, actor: nn.Module | None) -> tuple[ActorPolicy, Scaling]:
    """The actor, ours or theirs, with the head that the action space needs."""
    head = make_head(fleet.action_space, config.action_head, config.log_std)
    columns = ChunkColumns(config.action_chunk, head.tokens, config.logprob_type, config.entropy_type)
    size = head.size * columns.size
    if actor is None:
        network: nn.Module = make_network(
            fleet.observation_space, size, config.hidden, config.activation, config.memory, config.seed
        )
    else:
        unused = [name for name in ("hidden", "activation", "memory") if name in config.model_fields_set]
        if unused:
            raise ConfigError(f"{unused[0]} has no effect with an actor of your own")
        network = actor
        check_fits(network, fleet.observation_space, size, "actor", fleet.action_space)
    for module in (network, head):
        moved(module, "cpu" if config.device == "auto" and actor is None else config.device)
    return ActorPolicy(network, head, columns), Scaling(fleet.observation_space, config.scale_observations)


def is_asked(config: ControlConfig, env: Any) -> bool:
    """Whether steps shall be a program's."""
    return is_function(env) if config.compiled is None else config.compiled


def compiled_room(
    source: ControlSource, optimizer: torch.optim.Optimizer, env: Any, own: dict[str, Any]
) -> CompiledRoom | None:
    """The step as a program, where that is asked for; where it cannot be, a warning says why. own: what was passed."""
    config = source.config
    if not is_asked(config, env):
        return None
    why = obstacle(config, source.policy, source.fleet.observation_space, own)
    if why is None:
        from grpo.control.compiled.room import CompiledRoom

        try:
            return CompiledRoom(source, find_task(env), optimizer)
        except NotAFunction as error:
            why = str(error)
    warn(f"not compiled: {why}; it is played the ordinary way")
    return None


def _optimizer(
    given: torch.optim.Optimizer | None, policy: ActorPolicy, config: ControlConfig
) -> torch.optim.Optimizer:
    """Adam, or the user's with the head's own numbers (a Gaussian's deviation) added."""
    if given is None:
        tensors = list(policy.parameters().values())
        # One call for all tensors: for a small network the separate ones cost more than the arithmetic.
        fused = all(p.device.type in ("cpu", "cuda") for p in tensors)
        return Adam(tensors, lr=config.learning_rate, weight_decay=config.weight_decay, fused=fused)
    known = {id(p) for group in given.param_groups for p in group["params"]}
    missing = [p for p in policy.head.parameters() if id(p) not in known]
    if missing:
        given.add_param_group({"params": missing})
    return given
