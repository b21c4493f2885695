"""The algorithm's settings: one frozen, validated model for Python, YAML and the command line.

A setting is either one of the fields below or a column of the recipe table (`epsilon`, `beta`, `top_entropy`, …); both
are given by name, in our spelling or another system's (`grpo.dialects`). What is not given is the recipe's own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from grpo.blocks import Blocks, unfolded
from grpo.core.surrogates import Surrogate, flattened, owners
from grpo.dialects import OWN, SYSTEMS, Spelling, Translation, Words, key_of, spellings, translate
from grpo.dialects.values import fitting
from grpo.errors import ConfigError, nearest
from grpo.recipes import COLUMNS, RECIPES, Recipe, column_types, foreign, says_nothing, without_effect
from grpo.recipes import recipe as row

if TYPE_CHECKING:
    from typing import Self

__all__ = ["COLUMNS", "MINIBATCHES", "ConfigError", "GRPOConfig", "NamedCode", "RayWorkers", "Worded", "wrong_values"]

MINIBATCHES = ("groups_per_minibatch", "rows_per_minibatch", "decisions_per_minibatch", "minibatches")
"""Sizes of a minibatch, in what it is made of, or how many there are."""


BLOCKS: Blocks = {
    "sampling": (
        "group_size", "select", "select_by", "groups_per_step", "no_signal", "filter_rewards", "rewards_lower_bound",
        "rewards_upper_bound", "max_attempts", "staleness",
    ),
    "update": (
        "groups_per_minibatch", "rows_per_minibatch", "decisions_per_minibatch", "minibatches", "rows_per_microbatch",
        "num_iterations", "learning_rate", "lr_schedule", "weight_decay", "max_grad_norm", "max_ratio", "target_kl",
        "shard",
    ),
    "general": ("seed", "device"),
    "algorithm": ("loss_type", "old_logp", "report_entropy", "ref_sync_steps", "ref_mixup_alpha", *column_types()),
}  # fmt: skip
"""Block → settings, of what every domain shares."""

RayWorkers: TypeAlias = Annotated[str, StringConstraints(pattern=r"^ray(:[1-9][0-9]*)?$")]
"""A setting: `ray`, one actor of a Ray cluster for each of its processors, or `ray:8`, so many."""


@dataclass(frozen=True)
class NamedCode:
    """A word of the settings that makes code run."""

    setting: str
    word: str
    kind: Literal["name", "argument", "model"] = "name"
    """It names code (file.py:name, module:name, an id) · it is an argument of another library, which may load some for
    it · it is a model that brings its own."""

    @classmethod
    def all_of(cls, setting: str, value: Any) -> Iterator[NamedCode]:
        """Every text in a setting: any of them may name code."""
        if isinstance(value, str):
            yield cls(setting, value)
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        for item in inside:
            yield from cls.all_of(setting, item)


MOST = {"group_size": 10**6, "groups_per_step": 10**6, "seed": 2**64 - 1}
"""The largest value of a whole number, in every room: more tries fit into no memory, and generators take 64 bits."""
MOST_OF_ANYTHING = 2**53
"""No other is larger; a float still tells it from its neighbours."""


class Worded(BaseModel):
    """Settings whose values may be words of a file or a command line: none for nothing, 1e6 for a whole number."""

    @field_validator("*", mode="before")
    @classmethod
    def _fitting(cls, value: Any, info: ValidationInfo) -> Any:
        return fitting(value, cls.model_fields[str(info.field_name)].annotation)

    @field_validator("*", mode="after")
    @classmethod
    def _bounded(cls, value: Any, info: ValidationInfo) -> Any:
        most = MOST.get(str(info.field_name), MOST_OF_ANYTHING)
        if isinstance(value, int) and value > most:
            raise ValueError(f"input should be at most {most:,}")
        return value


class GRPOConfig(Worded):
    """What every domain shares."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, serialize_by_alias=True)
    dialect: ClassVar[str] = "grpo"
    """Whose words the constructor takes."""
    blocks: ClassVar[Blocks] = BLOCKS
    """Block → settings; every setting is in one, and may be given there or by its name alone."""
    first: ClassVar[tuple[str, ...]] = (
        "loss_type", "group_size", "groups_per_step", "learning_rate", "num_iterations", "beta", "epsilon", "seed",
        "device", "run.steps",
    )  # fmt: skip
    """The ten that matter first."""
    in_run_block: ClassVar[tuple[str, ...]] = ()
    """Settings that a dialect of the room writes into its `run:` block."""
    goes_with: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Setting → those that say more about its value: what a preset says of them does not hold for another value."""
    beside: ClassVar[tuple[str, ...]] = ()
    """Words that the constructor takes for something else than these settings."""
    words: ClassVar[Words] = SYSTEMS
    """What these words are, by system: those about the algorithm, and in a room its own."""

    loss_type: str = "plain"
    """The recipe: a row of the table that `grpo presets --recipes` prints."""
    group_size: int = Field(default=8, ge=2)
    """Tries from each start. A group of one has nothing to be compared with."""
    groups_per_step: int = Field(default=8, ge=1)
    """Starts (prompts, states, seeds) sampled in one step, where the trainer chooses them."""
    select: int | None = Field(default=None, ge=1)
    """Of those, so many of each group learn: an update costs as much as that. The others are compared with, too. None:
    all."""
    select_by: Literal["variance", "extremes", "length", "random"] = "variance"
    """Which: those whose rewards vary most (PODS) · the best and the worst · the shortest (GFPO) · any."""
    groups_per_minibatch: int | None = Field(default=None, ge=1)
    """Starts in one optimizer step; None: all of them."""
    rows_per_minibatch: int | None = Field(default=None, ge=1)
    """Instead: single trajectories in one optimizer step."""
    decisions_per_minibatch: int | None = Field(default=None, ge=1)
    """Instead: single decisions in one optimizer step, of any trajectory; for policies without memory."""
    minibatches: int | None = Field(default=None, ge=1)
    """Instead: optimizer steps a pass, with about equally many starts each."""
    rows_per_microbatch: int | None = Field(default=None, ge=1)
    """Trajectories in one forward and backward pass; changes memory, not the gradient. None: all."""
    num_iterations: int = Field(default=1, ge=1)
    """Passes over the same tries."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Of the AdamW that is made when no optimizer is given."""
    lr_schedule: str = "constant"
    """Of the learning rate over the run: constant, or falling to 0, linear or cosine."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Of that AdamW."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm; None: never."""
    max_ratio: float | None = Field(default=None, gt=1)
    """A minibatch whose mean ratio is above this is skipped whole; None: never."""
    target_kl: float | None = Field(default=None, gt=0)
    """Passes stop once the mean of log π_old − log π over a minibatch reaches this; None: never."""
    shard: Literal["none", "states", "gradients", "weights"] = "none"
    """What ranks divide among them instead of keeping all of it each: the optimizer's states, the gradients too, or the
    weights as well (language models; slower). The same updates, to rounding; see docs/scaling.md."""
    staleness: float = Field(default=0.0, ge=0, le=64)
    """Steps by which tries may be asked for before their own, while others are learned from: at most (staleness + 1) ×
    groups_per_step groups are under way. 0.3: three of ten groups of a step are. 0: none. Needs a sampler with weights
    of its own; see docs/servers.md."""
    old_logp: Literal["auto", "recorded", "recomputed", "detached"] = "auto"
    """Log-probs the ratio compares with: as recorded when sampled, computed again before the first pass, or the current
    ones (ratio 1, for one pass and one minibatch). auto: detached where that is the case, else recorded."""
    no_signal: Literal["recipe", "keep", "drop", "resample"] = "recipe"
    """Groups whose rewards are all equal: keep them in the denominators, drop them, or sample their starts again.
    recipe: as the recipe says, and kept beside a teacher, who teaches them, too."""
    filter_rewards: bool = False
    """Groups whose mean reward is outside of the two bounds are sampled again, at most max_attempts times in all, and
    then left out."""
    rewards_lower_bound: float | None = None
    """For filter_rewards; None: open."""
    rewards_upper_bound: float | None = None
    """For filter_rewards; None: open."""
    report_entropy: bool = False
    """Report the mean entropy of the decisions where no bonus asks for it: it costs a little more time and memory."""
    max_attempts: int = Field(default=4, ge=1)
    """Times a start may be sampled in one step, for no_signal=resample and filter_rewards."""
    ref_sync_steps: int | None = Field(default=None, ge=1)
    """The reference follows the policy every so many steps; None: never."""
    ref_mixup_alpha: float = Field(default=1.0, gt=0, le=1)
    """Weight of the policy in that: reference ← α·policy + (1−α)·reference."""
    seed: int = Field(default=0, ge=0)
    """Same seed, same numbers, in a run and for a room. What your own policy draws in a bare step is yours to seed."""
    device: str = "auto"
    """cpu, cuda or mps. auto: your own models stay where they are; a room takes the first of cuda, mps, cpu."""
    changed: dict[str, Any] = Field(default_factory=dict, alias="recipe")
    """Columns of the recipe that are changed; given and kept as the block `recipe`, or directly by name."""

    _translations: list[Translation] = PrivateAttr(default_factory=list)
    _spoken: str = PrivateAttr(default=OWN)

    @field_validator("device", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return str(value) if type(value).__name__ == "device" else value  # torch's own

    def __init__(self, *, _dialect: str = "grpo", **settings: Any) -> None:
        translations: list[Translation] = []
        try:
            given, translations = translate(self._unfolded(settings, _dialect), _dialect, self.words)
            super().__init__(**_sorted_out(type(self), given, _dialect))
            self._translations, self._spoken = translations, _dialect
            _check(self)
        except ValidationError as error:
            raise wrong_values(error).calling(_as_written(translations)) from None
        except ConfigError as error:
            raise error.calling(_as_written(translations)) from None
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @classmethod
    def _unfolded(cls, settings: Mapping[str, Any], dialect: str) -> dict[str, Any]:
        """Settings without blocks."""
        return unfolded(settings, cls.blocks, cls.model_fields, spellings(dialect, cls.words))

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe in force: the row that loss_type names, with the changed columns."""
        columns = self._columns()
        alien = foreign(self._surrogate(columns), columns)
        return row(self.loss_type, **{name: value for name, value in columns.items() if name not in alien})

    @property
    def algorithm(self) -> Recipe:
        """The same by its older name."""
        return self.recipe

    def _columns(self) -> dict[str, Any]:
        """Columns that are not the recipe's own; a room may add those that its settings stand for."""
        drops = {} if self.no_signal == "recipe" else {"drop_no_signal": self.no_signal != "keep"}
        older: dict[str, Any] = {}
        if self.staleness and RECIPES[self.loss_type].mismatch == "none":  # the sampler's policy is an older one
            older = {"mismatch": "truncate", "mismatch_level": "token", "mismatch_high": 2.0}
        taught = {"drop_no_signal": False} if self.changed.get("teacher_coef") else {}  # every group has a signal then
        return older | taught | self.changed | drops

    def _surrogate(self, columns: Mapping[str, Any]) -> str:
        """The kind of surrogate that these columns ask for."""
        return str(columns.get("surrogate", RECIPES[self.loss_type].surrogate.kind))

    @property
    def one_update(self) -> bool:
        """Whether a step makes a single optimizer step: one pass, one minibatch."""
        return self.num_iterations == 1 and not any(getattr(self, name) for name in MINIBATCHES)

    @property
    def microbatch(self) -> int | None:
        """Most that one forward and backward pass may hold, in what the policy counts; None: everything."""
        return self.rows_per_microbatch

    def expect_ranks(self, ranks: int) -> None:
        """Refuse settings that so many ranks cannot follow; here there are none."""

    @property
    def idle(self) -> dict[str, str]:
        """Settings that were given and cannot change anything, each with what it would need."""
        alien = foreign(self._surrogate(self._columns()), self.changed)
        idle = {name: needs for name, needs in alien.items() if not says_nothing(self.changed[name])}
        idle |= without_effect(self.recipe, self.changed)
        if self.select_by != "variance" and self.select is None:
            idle["select_by"] = "it needs select, how many of each group learn"
        if self.max_attempts != 4 and self.no_signal != "resample" and not self.filter_rewards:
            idle["max_attempts"] = "it needs no_signal=resample or filter_rewards=true"
        for name in () if self.filter_rewards else ("rewards_lower_bound", "rewards_upper_bound"):
            if getattr(self, name) is not None:
                idle[name] = "it needs filter_rewards=true"
        if self.ref_mixup_alpha != 1.0 and self.ref_sync_steps is None:
            idle["ref_mixup_alpha"] = "it needs ref_sync_steps"
        if self.ref_sync_steps is not None and not (self.recipe.beta and self.recipe.kl_to == "reference"):
            idle["ref_sync_steps"] = "it needs beta > 0 and kl_to=reference"
        return idle

    @property
    def translations(self) -> list[Translation]:
        """What foreign spellings became."""
        return list(self._translations)

    @property
    def not_needed(self) -> dict[str, str]:
        """Foreign settings that were given and have the same outcome whatever they say, each with why."""
        known = spellings(self._spoken, self.words)
        found = {key_of(item.key): item.value for item in self.translations}
        asked = {key: value for key, value in found.items() if key in known and known[key].accepted}
        return {
            key: known[key].default for key, value in asked.items() if value not in (None, [], {}, known[key].theirs)
        }

    def title(self, given: Collection[str], preset: str) -> str:
        """What a person would call a run with these settings; `given`: those that no preset brought."""
        return preset

    def named_code(self) -> Iterator[NamedCode]:
        """What in these settings makes code run that is not this library's."""
        yield from ()

    def but(self, **settings: Any) -> Self:
        """These settings with some changed."""
        given = {name: getattr(self, name) for name in self.model_fields_set if name != "changed"} | self.changed
        speaks = self.dialect if self._spoken == OWN else self._spoken
        changed, done = translate(self._unfolded(settings, speaks), speaks, self.words)  # the rest has been translated
        for item in self._translations:
            if set(item.settings) & set(changed):  # what it brought along goes with it
                given = {name: value for name, value in given.items() if name not in item.along}
        made = type(self)(_dialect=OWN, **given | changed)
        made._translations, made._spoken = [*done, *self._translations], self._spoken
        return made

    def __getattr__(self, name: str) -> Any:
        if name in COLUMNS or name in owners():
            return self.recipe.columns().get(name)
        if not name.startswith("_") and (spelling := spellings(self._spoken, self.words).get(name)) is not None:
            return self._read_back(spelling)
        return super().__getattr__(name)  # type: ignore[misc]

    def _read_back(self, spelling: Spelling) -> Any:
        """A setting by another system's word: as it is now where only the name differs, else as it was given."""
        if spelling.convert is None and spelling.together is None:
            return getattr(self, spelling.becomes)
        for item in self.translations:
            if key_of(item.key) == spelling.key and all(getattr(self, n) == v for n, v in item.settings.items()):
                return item.value
        if spelling.accepted:
            return spelling.theirs
        ours = f"it is {spelling.becomes} here" if spelling.becomes else "it asks for nothing here"
        raise AttributeError(f"{spelling.key} was not given; {ours}")


def _sorted_out(model: type[GRPOConfig], given: dict[str, Any], dialect: str) -> dict[str, Any]:
    """Fields as they are, recipe columns (coerced) under `recipe`; anything else is refused with what was meant."""
    nested = given.pop("recipe", None) or {}
    if not isinstance(nested, Mapping):
        raise ConfigError(f"recipe is a block of columns, got {nested!r}; a recipe is chosen with loss_type")
    own, columns = {}, _flat(nested)
    for name, value in _flat(given).items():
        if name in model.model_fields:
            own[name] = value
        else:
            columns[name] = value
    hints = column_types()
    known = [*model.model_fields, *hints, *spellings(dialect, model.words), *model.beside]
    for name, value in columns.items():
        if name not in hints:
            meant = [*known, *model.blocks] if isinstance(value, Mapping) else known
            raise ConfigError(f"unknown setting {name!r}{nearest(name, meant)}")
        try:
            columns[name] = TypeAdapter(hints[name]).validate_python(fitting(value, hints[name]))
        except ValidationError as error:
            finding = f"{error.errors()[0]['msg'].lower()}, got {value!r}"
            raise ConfigError(f"{name}: {finding}", wrong={name: finding}) from None
    return {**own, "recipe": columns}


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A surrogate that is given as a record or a block of its numbers, as settings by name."""
    found = dict(settings)
    given = found.get("surrogate")
    if isinstance(given, Surrogate):
        own = {name: value for name, value in given.settings().items() if name not in given.idle}
        found |= {"surrogate": given.kind, **own}
    elif isinstance(given, Mapping):
        del found["surrogate"]
        found |= flattened(given)
    return found


def _check(config: GRPOConfig) -> None:
    """What no single field can know."""
    if config.loss_type not in RECIPES:
        known = ", ".join(RECIPES)
        raise ConfigError(
            f"loss_type={config.loss_type!r} is unknown{nearest(config.loss_type, list(RECIPES))}; known: {known}"
        )
    if config.idle:
        told = "; ".join(f"{name} has no effect here: {remedy}" for name, remedy in config.idle.items())
        raise ConfigError(told, config.idle)
    if config.old_logp == "detached" and not config.one_update:
        raise ConfigError("old_logp=detached needs num_iterations=1 and a single minibatch; use recorded")
    sizes = [name for name in MINIBATCHES if getattr(config, name)]
    if len(sizes) > 1:
        raise ConfigError(f"{' and '.join(sizes)} say the same thing; give one of them")
    _check_filter(config)
    _check_staleness(config)
    if config.select is not None and config.select > config.group_size:
        raise ConfigError(
            f"select={config.select} of each group cannot learn where group_size={config.group_size} are sampled; "
            "generate more (group_size), or select fewer"
        )
    recipe = config.recipe
    alone = recipe.ratio == "token" and recipe.reduction == "token_mean" and not recipe.surrogate.whole_rows
    if config.decisions_per_minibatch and not alone:
        raise ConfigError(
            "decisions_per_minibatch takes trajectories apart, and this recipe needs them whole; set "
            "reduction=token_mean and ratio=token, or use rows_per_minibatch",
            idle={"decisions_per_minibatch": "this recipe needs trajectories whole"},
        )


def _check_staleness(config: GRPOConfig) -> None:
    """Tries of an older policy need to be told from the present one's."""
    if config.staleness and config.old_logp == "recorded":
        raise ConfigError("old_logp=recorded are an older policy's where staleness > 0; leave it out")
    if config.staleness and config.recipe.mismatch == "none":
        raise ConfigError("staleness > 0 needs mismatch=truncate or mask, which corrects for the older policy")
    if config.staleness and config.recipe.baseline == "optimal_token":
        raise ConfigError(
            "baseline=optimal_token (otb) scores tries with the policy while they are sampled, and with staleness > 0 "
            "it learns meanwhile; leave one of them out"
        )


def _check_filter(config: GRPOConfig) -> None:
    """What filtering by rewards needs to mean something."""
    low, high = config.rewards_lower_bound, config.rewards_upper_bound
    if not config.filter_rewards:
        return
    if low is None and high is None:
        raise ConfigError("filter_rewards=true needs rewards_lower_bound, rewards_upper_bound or both")
    if low is not None and high is not None and low > high:
        raise ConfigError(f"rewards_lower_bound={low:g} is above rewards_upper_bound={high:g}")
    if config.no_signal == "resample":
        raise ConfigError("filter_rewards samples groups again by itself; leave no_signal=resample out")


def _as_written(translations: Iterable[Translation]) -> dict[str, str]:
    """Our settings' names → what a message calls them that were given in another system's words."""
    return {name: item.said(name) for item in translations for name in item.settings}


def wrong_values(error: ValidationError) -> ConfigError:
    """pydantic's findings as one sentence each."""
    wrong: dict[str, str] = {}
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"]) or "settings"
        message = item["msg"].removeprefix("Value error, ")
        wrong[place] = f"{message[:1].lower()}{message[1:]}, got {item['input']!r}"
    return ConfigError("; ".join(f"{place}: {finding}" for place, finding in wrong.items()), wrong=wrong)
