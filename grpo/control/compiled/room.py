"""The control room's step as a program: weights in and out of the policy, what was played into the source's record.

The policy's and the optimizer's tensors stay the truth: a checkpoint, an export or an evaluation knows no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from grpo import optimizers
from grpo.control.compiled import record, starts
from grpo.control.compiled.learn import BETAS, EPS, Adam, Passes
from grpo.control.compiled.networks import CompiledPolicy, compiled_head
from grpo.control.compiled.play import Scale
from grpo.control.compiled.program import Program, Step
from grpo.control.compiled.record import Facts
from grpo.control.compiled.starts import Start
from grpo.control.compiled.weights import Weights, flat
from grpo.control.config import ControlConfig
from grpo.control.groups import EVALUATION, seeds
from grpo.control.policy import ActorPolicy
from grpo.control.scaling import Scaling
from grpo.control.source import ControlSource
from grpo.envs.functions.classic import TASKS
from grpo.envs.functions.numbers import numbers, whole_programs
from grpo.envs.functions.task import FunctionTask
from grpo.envs.heads import Categorical, Head
from grpo.errors import ConfigError
from grpo.experience import Experience
from grpo.protocols import State, as_part
from grpo.report import StepReport, Updates, reward_metrics
from grpo.rollouts import Scores
from grpo.seeding import derive

if TYPE_CHECKING:
    from grpo.trainer import Trainer


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


def names(program: Program, scaled: bool, config: ControlConfig) -> tuple[str, str]:
    """What step and evaluation are called: of our own tasks by what they compute, so that JAX's cache tells them apart.

    What a function of the user's computes cannot be told by its name.
    """
    if program.task.name not in TASKS:
        return "step", "judged"
    told = *program.told, scaled
    judged = *told, config.eval_episodes, config.eval_greedy
    return starts.program_name("step", told), starts.program_name("judged", judged)


def made_once(program: Program, named: tuple[str, str], greedy: bool) -> tuple[Any, Any]:
    """Step and evaluation of a program, compiled when first called."""
    key = (program.key, named, greedy)
    if key not in _MADE:
        if len(_MADE) >= MOST_MADE:
            _MADE.pop(next(iter(_MADE)))
        step, judged = named
        _MADE[key] = _compiled(program.step, step), _compiled(partial(program.judged, greedy=greedy), judged)
    return _MADE[key]


def _compiled(function: Callable[..., Any], name: str) -> Any:
    """A function that JAX compiles under this name, and that takes all that it is given, whatever it needs of it."""

    def called(*given: Any) -> Any:
        return function(*given)

    called.__name__ = name
    return jax.jit(called, keep_unused=True)


class CompiledRoom:
    """Steps and evaluations of one run by a program."""

    def __init__(self, source: ControlSource, task: FunctionTask, optimizer: torch.optim.Optimizer) -> None:
        self.source, self._optimizer, self._config = source, optimizer, source.config
        self.program = make_program(task, source.policy, source.fleet.horizon or task.limit, source.config)
        passes, name = self.program.passes, source.fleet.name
        self.facts = Facts(name, passes.names, self.program.group_N, self.program.linear, passes.detached)
        self._key = seed_key(source.config.seed)
        self._named = names(self.program, bool(source.scaling.mean), source.config)
        self._step, self._judge = made_once(self.program, self._named, source.config.eval_greedy)
        self._starts: Any = None
        self._begun: State | None = None
        """Before the first step, where the start is to be kept."""
        self._outs: dict[str, list[str]] = {}
        """What the programs that have run give, by name."""

    # --- a start that is kept ---------------------------------------------------------------------------------------

    def remember(self, state: State) -> None:
        """Told how the trainer begins, where its settings alone say all about it."""
        on_cpu = jax.default_backend() == "cpu" and self._config.device in ("auto", "cpu")
        if on_cpu and self.program.task.name in TASKS and self._config.lr_schedule == "constant":
            self._begun = state

    def _keep_start(self) -> None:
        """Leave what the next run of these settings needs for its first step, once both programs have run."""
        files = {what: starts.compiled(name) for what, name in zip(self._outs, self._named, strict=False)}
        if self._begun is None or len(files) < 2 or None in files.values():
            return
        begun, self._begun = self._begun, None  # once
        policy, facts = self.source.policy, self.facts
        values = {
            "values": dict(begun.values),
            "files": files,
            "outs": self._outs,
            "facts": {"env": facts.env, "names": facts.names, "linear": facts.linear, "detached": facts.detached},
            "shapes": self.program.policy.weights.shapes,
            "head": head_values(policy.head),
            "video": seeds(self._config.seed, 0, EVALUATION, 1)[0],
        }
        arrays = as_part("state", {name: np.asarray(x) for name, x in begun.arrays.items()})
        arrays |= {f"starts/{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(self._starts))}
        arrays |= as_part("head", {name: np.asarray(x) for name, x in policy.head.named_buffers()})
        arrays |= {"group_N": facts.group_N, "key": self._key}
        starts.write(starts.key(self._config), Start(values, arrays))

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self, trainer: Trainer) -> tuple[StepReport, Updates]:
        """One step of the trainer, all of it in the program; what it left is in the policy, optimizer and source."""
        self._optimizer = expect_adam(trainer.optimizer, self.source.policy, self.program.passes.weight_decay)
        with trainer.phase("compiled"), whole_programs():
            adam, scale = self._adam(), self._scale()
            made = self._step(adam, scale, self._key, np.int32(trainer.steps_done))
            made.told.count.block_until_ready()
            self._outs.setdefault("step", leaf_names(made))
        self._keep(made)
        played = record.episodes(made, self.facts)
        learned = record.experience(made, self.facts, self._config, played, self.source.note(played))
        updates = record.updates(made.told, self.facts.names, learned)
        self.source.policy.version += int(np.asarray(made.told.taken_K).sum())
        metrics = {**reward_metrics(learned.rollouts, self._config.recipe), **updates.metrics()}
        metrics |= dict(self.source.metrics()) | record.explained(made, self.facts)
        scores = Scores(torch.from_numpy(record.cut(made.last_logp_NT, record.longest(made))))
        return StepReport(trainer.steps_done + 1, metrics, _tensors(learned), scores), updates

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
        with whole_programs():
            scale, weights = self._scale(), flat(policy.parameters())
            found = self._judge(weights, scale, self._starts, self._key)
            self._outs.setdefault("judged", leaf_names(found))
        self._keep_start()
        return record.judged(*(np.asarray(x) for x in found))


def head_values(head: Head) -> dict[str, Any]:
    """What `grpo.control.compiled.plain` must know of a head beside its bounds."""
    if isinstance(head, Categorical):
        return {"start": int(head.to_env(np.zeros(1, np.int64))[0])}
    return {"shape": head.to_env(np.zeros((1, *head.shape), np.float32)).shape[1:]}


def leaf_names(tree: Any) -> list[str]:
    """Of a tree's arrays, in their order: `.adam.flat_W`, `[0]`."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


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


def _tensors(learned: Experience) -> Experience:
    """The same as a trainer of PyTorch's has it."""
    own = {name: x for name, x in vars(learned).items() if isinstance(x, np.ndarray)}
    arrays: dict[str, Any] = {name: torch.from_numpy(x) for name, x in own.items()}
    inputs = {name: torch.from_numpy(x) for name, x in learned.rollouts.inputs.items()}
    return replace(learned, rollouts=learned.rollouts.each(torch.from_numpy).but(inputs=inputs), **arrays)
