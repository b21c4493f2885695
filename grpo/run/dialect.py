"""Words about the run: its folder, length, checkpoints, trackers. They become fields of `grpo.run.config.RunConfig`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from grpo.config import ConfigError, wrong_values
from grpo.dialects import Settings, Spelling, Translation, interpret, key_of
from grpo.dialects.spelling import absent, given, spelled, switched, truth, whole
from grpo.run.config import RunConfig

RUN_NAMES = tuple(name for name in RunConfig.model_fields if name not in ("name", "trackers"))
"""Our own that are taken as they are. Not `name`, which is too plain a word outside a `run:` block; `trackers` is one
of several words for one list."""

_NO_SAVES: Settings = {"checkpoint_every": None, "checkpoint_minutes": None}

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "swanlab", "comet")


def _steps(name: str) -> Callable[[Any], Settings]:
    """A number of steps; a share of the run is not known when it begins."""

    def convert(value: Any) -> Settings:
        if 0 < float(value) < 1:
            raise ValueError(f"{value!r} is a share of the run; give a number of steps")
        return {name: whole(value)}

    return lambda value: {} if absent(value) else convert(value)


def _strategy(name: str, never: Settings, remedy: str, *more: str) -> Callable[[Any], Settings]:
    """When something is done: by steps, or not at all; `more`: words that leave it to something else."""

    def convert(value: Any) -> Settings:
        word = spelled(value).lower()
        if word not in ("no", "steps", "false", *more):  # YAML reads `no` as false
            raise ValueError(f"{value!r} is not done here: {remedy}, which counts steps")
        return {} if word == "steps" else never

    return convert


def _trackers(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """Trackers from report_to, use_wandb and our own word, in one list; none beside some is a contradiction."""
    lists = {key: _listed(key, value) for key, value in words.items() if key != "use_wandb"}
    if switched(words, "use_wandb"):
        lists["use_wandb"] = ("wandb",)
    none = [key for key, names in lists.items() if not names]
    if none and any(lists.values()):
        some = next(key for key, names in lists.items() if names)
        raise ValueError(f"{none[0]} says none and {some} asks for one: both set trackers; keep one of them")
    every = tuple(dict.fromkeys(name for names in lists.values() for name in names))
    return {key: {"trackers": every} for key in lists}


def _logged(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """EasyDeL counts lines and reports apart; whoever wants more gets both."""
    asked: dict[str, int] = {}
    for key, value in words.items():
        if not absent(value):
            try:
                asked[key] = whole(value)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
    return {key: {"log_every": min(asked.values())} for key in asked}


def _listed(key: str, value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else [] if value is None else list(value)
    names = tuple(str(part).strip() for part in parts if not absent(str(part).strip()))
    if "all" in names:
        raise ValueError(f"{key}=all is refused: name what is meant, of {', '.join(TRACKERS)}")
    return names


def _best(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """metric_for_best_model, with greater_is_better as its sign."""
    metric, greater = words.get("metric_for_best_model"), words.get("greater_is_better")
    if absent(metric):
        if greater is not None and not truth(greater):
            raise ValueError("greater_is_better=false needs metric_for_best_model: of which metric")
        return {}
    name = "eval/" + str(metric).removeprefix("eval_") if str(metric).startswith("eval_") else str(metric)
    low = name.endswith("loss") if absent(greater) else not truth(greater)
    return {"metric_for_best_model": {"best_by": f"-{name}" if low else name}}


RUN = (
    Spelling("output_dir", "logdir", "trainer_output; ours runs/{name}-{timestamp}", given("logdir", str)),
    Spelling("save_directory", "logdir", "EasyDeL: a folder of runs", given("logdir", lambda at: f"{at}/{{name}}")),
    Spelling("model_name", "name", "EasyDeL: what the run is called", given("name", str)),
    Spelling("run_name", "name", "none", given("name", str)),
    Spelling(
        "max_steps",
        "steps",
        "-1: as num_train_epochs says. There an optimizer step counts, here a step of sampling and updates",
        lambda value: {} if absent(value) or whole(value) <= 0 else {"steps": whole(value)},
    ),
    Spelling(
        "max_training_steps",
        "steps",
        "EasyDeL none: as num_train_epochs says; there an optimizer step counts",
        lambda value: {} if absent(value) else {"steps": whole(value)},
    ),
    Spelling("total_timesteps", "env_steps", "Stable-Baselines3: none", given("env_steps", whole)),
    Spelling("verbose", "", "Stable-Baselines3 0; train(progress=…) here", lambda value: {}, accepted=True),
    Spelling("save_steps", "checkpoint_every", "500; ours 25", _steps("checkpoint_every")),
    Spelling(
        "save_strategy",
        "checkpoint_every",
        "steps; no: the last alone, which is always saved; best: evaluations by which metric_for_best_model is judged",
        _strategy("save_strategy", _NO_SAVES, "use save_steps (run.checkpoint_every)", "best"),
    ),
    Spelling(
        "save_total_limit",
        "keep_last",
        "none: all; ours 2, and the best",
        lambda value: {"keep_last": None if absent(value) else whole(value)},
    ),
    Spelling("save_interval_minutes", "checkpoint_minutes", "EasyDeL none; ours 10", given("checkpoint_minutes")),
    Spelling("evaluation_steps", "evaluate_every", "EasyDeL none: never, as ours", _steps("evaluate_every")),
    Spelling("eval_steps", "evaluate_every", "as logging_steps; ours: never", _steps("evaluate_every")),
    Spelling(
        "eval_strategy",
        "evaluate_every",
        "no",
        _strategy("eval_strategy", {"evaluate_every": None}, "use eval_steps (run.evaluate_every)"),
    ),
    Spelling("logging_steps", "log_every", "10; ours 1. The run folder has every step", _steps("log_every")),
    Spelling("log_steps", "log_every", "EasyDeL 10; the smaller of this and report_steps", together=_logged),
    Spelling("report_steps", "log_every", "EasyDeL 5; the smaller of this and log_steps", together=_logged),
    Spelling("wandb_name", "name", "EasyDeL none: as model_name says", given("name", str)),
    Spelling(
        "logging_strategy",
        "trackers",
        "steps; no: no tracker",
        _strategy("logging_strategy", {"trackers": ()}, "use logging_steps (run.log_every)"),
    ),
    Spelling("report_to", "trackers", "none, as ours", together=_trackers),
    Spelling("use_wandb", "trackers", "EasyDeL true; ours: no tracker unless asked for", together=_trackers),
    Spelling("trackers", "trackers", "none", together=_trackers),
    Spelling(
        "metric_for_best_model", "best_by", "none: the loss; ours the reward", together=_best
    ),
    Spelling("greater_is_better", "best_by", "by the metric's name; ours true", together=_best),
)  # fmt: skip
"""TRL's, EasyDeL's and our own words, accepted wherever settings are read."""


def translate_run(settings: Mapping[str, Any]) -> tuple[Settings, Settings, list[Translation]]:
    """Settings that do not concern the run, those that do (as RunConfig has them), and what each foreign key became."""
    known = {spelling.key: spelling for spelling in RUN}
    about = {raw: value for raw, value in settings.items() if key_of(raw) in known or key_of(raw) in RUN_NAMES}
    run, soft, done = interpret(about, known, {})
    return {raw: value for raw, value in settings.items() if raw not in about}, soft | run, done


def run_config(run: Mapping[str, Any], translations: Iterable[Translation] = ()) -> RunConfig:
    """How a run is carried out; a value that cannot be is told by the word it was given as."""
    try:
        return RunConfig(**run)
    except ValidationError as error:
        wrong = {f"run.{name}": finding for name, finding in wrong_values(error).wrong.items()}
    told = "; ".join(f"{name}: {finding}" for name, finding in wrong.items())
    written = {f"run.{name}": item.said(f"run.{name}") for item in translations for name in item.settings}
    raise ConfigError(told, wrong=wrong).calling(written)
