"""Settings as scripts for TRL use them: its words are taken, read back whether or not they were given, and assigned.

A word that nobody gave answers with what the run does, where there is something to tell, else with TRL's own default.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import PrivateAttr

from grpo.config import ConfigError, GRPOConfig
from grpo.dialects import Translation, key_of
from grpo.dialects.spelling import spelled
from grpo.language.compat.dialect import world_size
from grpo.language.compat.easydel_dialect import with_its_defaults
from grpo.language.compat.strategies import BY_EPOCH, apart, evaluated
from grpo.models import device_of
from grpo.run.config import RunConfig
from grpo.run.dialect import RUN, RUN_NAMES, run_config, translate_run

if TYPE_CHECKING:
    from typing import Self

EPOCHS = 3
"""Passes over the data set unless the settings say otherwise; TRL and EasyDeL have the same."""


@cache
def defaults() -> dict[str, Any]:
    """TRL's own, by field."""
    path = Path(__file__).with_name("trl_1_16_fields.json")
    return dict(json.loads(path.read_text(encoding="utf-8"))["fields"])


class ScriptConfig(GRPOConfig):
    """What every domain shares, with the words of scripts; those about the run go to `config.run`."""

    _run: dict[str, Any] = PrivateAttr(default_factory=dict)
    _run_translations: list[Translation] = PrivateAttr(default_factory=list)
    _by_epoch: tuple[str, ...] = PrivateAttr(default=())
    _shares: dict[str, float] = PrivateAttr(default_factory=dict)
    _words: dict[str, Any] | None = PrivateAttr(default=None)
    _in_use: bool = PrivateAttr(default=False)

    def __init__(self, output_dir: str | None = None, *, _dialect: str = "trl", **settings: Any) -> None:
        words = settings if output_dir is None else {"output_dir": output_dir, **settings}
        given, by_epoch, shares = apart(evaluated(with_its_defaults(words)))
        try:
            given, run, translations = translate_run(given)
            run_config(run, translations)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from None
        super().__init__(_dialect=_dialect, **given)
        self._run, self._run_translations, self._by_epoch, self._shares = run, translations, by_epoch, shares
        self._words = words
        if spelled(words.get("save_strategy", "")) == "best" and "eval/" not in self.run.best_by:
            raise ConfigError("save_strategy=best needs metric_for_best_model, of evaluations: eval_reward, say")

    @property
    def run(self) -> RunConfig:
        """How the run is carried out: what output_dir, num_train_epochs, use_wandb and their like became."""
        return RunConfig(**self._run)

    @property
    def by_epoch(self) -> tuple[str, ...]:
        """What of `run` happens once a pass over the data: eval_strategy, save_strategy, logging_strategy of epoch."""
        return self._by_epoch

    def planned(self, how: RunConfig, once: int, steps: int) -> RunConfig:
        """A plan with what counts in passes over the data (`once`: steps of one) or shares of the run as steps."""
        shares = {name: max(1, math.ceil(steps * share)) for name, share in self._shares.items()}
        return how.model_copy(update=dict.fromkeys(self._by_epoch, once) | shares)

    @property
    def translations(self) -> list[Translation]:
        """What foreign spellings became."""
        return [*super().translations, *self._run_translations]

    def but(self, **settings: Any) -> Self:
        """These settings with some changed."""
        changed = super().but(**settings)
        spoken = {*changed._run, *(name for key, name in BY_EPOCH.items() if key in settings), *changed._shares}
        changed._by_epoch = (*changed._by_epoch, *(name for name in self._by_epoch if name not in spoken))
        changed._shares = {n: share for n, share in self._shares.items() if n not in spoken} | changed._shares
        changed._run = self._run | changed._run
        changed._run_translations = [*changed._run_translations, *self._run_translations]
        changed._words = None
        return changed

    def __eq__(self, other: object) -> bool:
        """The same settings, in whatever words."""
        return isinstance(other, ScriptConfig) and type(self) is type(other) and self._meant() == other._meant()

    def _meant(self) -> tuple[Any, ...]:
        own = {name: vars(self)[name] for name in type(self).model_fields}
        return own, self.run, {*self._by_epoch}, self._shares

    def __setattr__(self, name: str, value: Any) -> None:
        """Another value, as if it had been given at first; not while a trainer uses these settings."""
        if name.startswith("_"):
            super().__setattr__(name, value)
            return
        if self._in_use:
            raise ConfigError(f"{name}: a trainer uses these settings; make others for a new one: args.but({name}=…)")
        if self._words is None:
            made = self.but(**{name: value})
        else:
            others = {key: item for key, item in self._words.items() if key_of(key) != name}
            made = type(self)(_dialect=self._spoken, **others, **{name: value})
        for part in ("__dict__", "__pydantic_fields_set__", "__pydantic_private__"):
            object.__setattr__(self, part, getattr(made, part))

    def says(self, word: str) -> bool:
        """Whether this word was given."""
        return any(key_of(item.key) == word for item in self.translations)

    # --- reading them back ------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattr__(name)
        if name in EFFECTIVE and not self.says(name):
            return EFFECTIVE[name](self)
        if name in RUN_NAMES:
            return getattr(self.run, name)
        for item in self._run_translations:
            if key_of(item.key) == name:
                return item.value
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in EFFECTIVE:  # it was given, and has been changed by another word since
                return EFFECTIVE[name](self)
            if name in defaults():
                return defaults()[name]
            if (spelling := next((one for one in RUN if one.key == name), None)) is not None:
                raise AttributeError(f"{name} was not given; it is run.{spelling.becomes} here") from None
            raise

    def in_use(self, device: torch.device | None = None, folder: Path | None = None) -> Self:
        """A copy that a trainer keeps, which nobody changes; for scripts with its device and its run's folder."""
        made = self.model_copy(update={} if device is None else {"device": device})
        made._run = dict(self._run) if folder is None else self._run | {"logdir": str(folder)}
        made._in_use = True
        return made

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Steps of the warm-up, of a run with so many."""
        return int(self.warmup_steps or round(self.warmup_ratio * num_training_steps))

    def get_process_log_level(self) -> int:
        """Of Python's logging: warnings alone."""
        return logging.WARNING

    def to_dict(self) -> dict[str, Any]:
        """Every field of TRL's, as it stands here; a token is not shown."""
        found = {name: getattr(self, name) for name in defaults()}
        plain = {name: value.value if isinstance(value, Enum) else value for name, value in found.items()}
        return {name: f"<{name.upper()}>" if name.endswith("_token") and plain[name] else plain[name] for name in plain}

    def to_json_string(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """The same for a tracker: numbers and texts alone."""
        whole = self.to_dict() | {"train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {name: v if isinstance(v, bool | int | float | str) else str(v) for name, v in whole.items()}


def _rank(name: str) -> int:
    return int(os.environ.get(name) or 0)


def _when(name: str) -> Callable[[Any], str]:
    """`no`, `epoch` or `steps`."""

    def told(config: Any) -> str:
        if name in config._by_epoch:
            return "epoch"
        return "steps" if name in config._shares or getattr(config.run, name) is not None else "no"

    return told


def _every(name: str) -> Callable[[Any], Any]:
    return lambda config: config._shares.get(name, getattr(config.run, name))


def sampled_rows(config: Any) -> int:
    """Completions of a step."""
    return int(config.groups_per_step * config.group_size)


def update_rows(config: Any) -> int:
    """Completions of one optimizer step."""
    every = sampled_rows(config)
    if config.groups_per_minibatch:
        return min(every, int(config.groups_per_minibatch * config.group_size))
    return min(every, config.rows_per_minibatch or -(-every // (config.minibatches or 1)))


def updates(config: Any) -> int:
    """Optimizer steps of one step here: TRL counts these."""
    return int(config.num_iterations) * -(-sampled_rows(config) // update_rows(config))


def _per_device(config: Any) -> int:
    return max(1, update_rows(config) // (world_size() * int(config.gradient_accumulation_steps)))


def _bf16(config: Any) -> bool:
    on_gpu = device_of(str(config.device)).startswith("cuda") and torch.cuda.is_bf16_supported()
    return bool(config.dtype == "bfloat16" or (config.dtype == "auto" and on_gpu))


def _follows(config: Any) -> bool:
    return config.ref_sync_steps is not None


_SCALES: Mapping[str, str] = {"group_std": "group", "batch_std": "batch"}

EFFECTIVE: dict[str, Callable[[Any], Any]] = {
    # the run
    "output_dir": lambda config: config.run.logdir,
    "logging_dir": lambda config: str(Path(config.output_dir) / "runs"),
    "run_name": lambda config: config.run.name,
    "report_to": lambda config: list(config.run.trackers),
    "max_steps": lambda config: config.run.steps or -1,
    "num_train_epochs": lambda config: config.run.num_train_epochs or float(EPOCHS),
    "logging_strategy": _when("log_every"),
    "logging_steps": _every("log_every"),
    "eval_strategy": _when("evaluate_every"),
    "eval_steps": _every("evaluate_every"),
    "save_strategy": _when("checkpoint_every"),
    "save_steps": lambda config: _every("checkpoint_every")(config) or defaults()["save_steps"],
    "save_total_limit": lambda config: config.run.keep_last,
    "metric_for_best_model": lambda config: config.run.best_by.removeprefix("-").replace("eval/", "eval_"),
    "greater_is_better": lambda config: not config.run.best_by.startswith("-"),
    # batches
    "gradient_accumulation_steps": lambda config: 1,
    "per_device_train_batch_size": _per_device,
    "train_batch_size": lambda config: config.per_device_train_batch_size,
    "eval_batch_size": lambda config: config.per_device_eval_batch_size,
    "generation_batch_size": sampled_rows,
    "steps_per_generation": lambda config: max(
        1, sampled_rows(config) // (config.per_device_train_batch_size * world_size())
    ),
    # the machine
    "world_size": lambda config: world_size(),
    "process_index": lambda config: _rank("RANK"),
    "local_rank": lambda config: _rank("LOCAL_RANK") if "LOCAL_RANK" in os.environ else -1,
    "local_process_index": lambda config: _rank("LOCAL_RANK"),
    "should_log": lambda config: _rank("LOCAL_RANK") == 0,
    "should_save": lambda config: _rank("RANK") == 0,
    "n_gpu": lambda config: int(device_of(str(config.device)).startswith("cuda")),
    "use_cpu": lambda config: device_of(str(config.device)) == "cpu",
    "bf16": _bf16,
    "fp16": lambda config: config.dtype == "float16",
    # the algorithm
    "lr_scheduler_type": lambda config: config.lr_schedule,
    "lr_scheduler_kwargs": lambda config: config.lr_schedule_kwargs or None,
    "model_init_kwargs": lambda config: config.model_kwargs or None,
    "shuffle_dataset": lambda config: config.shuffle,
    "hub_private_repo": lambda config: config.hub_private,
    "num_generations_eval": lambda config: config.eval_samples,
    "max_tool_calling_iterations": lambda config: config.max_turns - 1,
    "use_vllm": lambda config: config.engine == "vllm",
    "scale_rewards": lambda config: _SCALES.get(config.recipe.scale, "none"),
    "importance_sampling_level": lambda config: config.recipe.ratio,
    "sync_ref_model": _follows,
    "ref_model_sync_steps": lambda config: config.ref_sync_steps if _follows(config) else 512,
    "ref_model_mixup_alpha": lambda config: config.ref_mixup_alpha if _follows(config) else 0.6,
}
"""What a run does, by TRL's and transformers' word for it."""
