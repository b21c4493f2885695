"""Looking at what a run learned: `grpo eval`, `grpo chat` and `grpo export`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from grpo.app.builders import TASKS, saved_settings
from grpo.capabilities import ChecksData, EvaluatesEpisodes, EvaluatesPrompts, Exports, SavesModel, Watches
from grpo.config import ConfigError, GRPOConfig
from grpo.run import checkpoint, hub
from grpo.run.files import FolderError, read_json
from grpo.run.folder import RunFolder
from grpo.run.inside import expect_no_links
from grpo.run.progress import printable
from grpo.run.trainer import GRPOTrainer

FRESH = 1_000_000
"""Added to a run's seed for starts that its own evaluations, which chose the best checkpoint, have not seen."""


def trained(
    path: Path,
    which: str = "best",
    *,
    judged: bool = True,
    trust: bool = False,
    complete: Callable[[GRPOConfig], GRPOConfig] = lambda config: config,
) -> tuple[GRPOTrainer, checkpoint.Checkpoint]:
    """The trainer of a run as one of its checkpoints left it: best, last, or a step's number.

    judged: with its rewards, which saving and talking do not need. trust: also where that runs code which lies inside
    of the folder. complete: gives the settings what a script had as objects.
    """
    if which not in ("best", "last") and not (which.isdecimal() and len(which) <= 15):
        raise ConfigError(f"--checkpoint {which}: give best, last or the number of a step")
    try:
        folder = RunFolder.open(path)
        resolved = saved_settings(folder, trust=trust, unused=() if judged else ("rewards",))
        found = checkpoint.best(folder) if which == "best" else None
        found = found or checkpoint.resume_point(folder, int(which) if which.isdecimal() else None)
    except FolderError as error:
        raise ConfigError(str(error)) from None
    if found is None:
        raise ConfigError(f"{path} has no checkpoint yet; train longer, or lower run.checkpoint_every")
    task = TASKS[resolved.task]
    trainer = task.looked_at(complete(resolved.config), judged, folder.path)
    if isinstance(trainer.source, ChecksData):
        trainer.source.same_data = False  # looking is not going on
    trainer.name, trainer.run_folder = resolved.name, folder.path
    try:
        checkpoint.restore(trainer, found)
    except (FolderError, ConfigError) as error:
        trainer.source.close()
        unfit = isinstance(error, ConfigError) and error.__cause__ is not None  # of another policy
        own = "; a run with a model of your own is evaluated in Python" if unfit else ""
        raise ConfigError(f"{error}{own}") from None
    return trainer, found


def task_of(path: Path) -> str:
    """The task of a run, by its folder; language where it is a model's, or may be one's of the hub."""
    if not (path / "run.json").exists() and (
        (path / "config.json").exists() or (path / "adapter_config.json").exists() or hub.is_id(str(path))
    ):
        return "language"
    try:
        return str(RunFolder.open(path).config.get("task", ""))
    except FolderError as error:
        raise ConfigError(str(error)) from None


def evaluate_prompts(
    path: Path,
    which: str,
    dataset: str | None,
    samples: int | None,
    limit: int | None,
    as_json: bool,
    trust: bool = False,
    rewards: Sequence[str] = (),
) -> str:
    """A model's answers to held-out prompts: accuracy, pass@k and rewards with 95 % intervals, or JSON.

    rewards: who judges a model that has no run; correctness unless somebody else is named.
    """
    trainer, step = _judged(path, which, dataset, rewards, trust)
    with closing(trainer.source):
        if not isinstance(trainer, EvaluatesPrompts):
            raise ConfigError(f"{path}: this task has no prompts to answer")
        found = trainer.evaluate(dataset, samples, limit)
    rows, (prompts, each) = found.table(), found.length_PS.shape
    if as_json:
        about = {"run": str(path), "checkpoint": step, "dataset": dataset, "prompts": prompts, "samples": each}
        failures = {"failed": found.failed} | ({"why": found.why} if found.failed else {})
        return json.dumps({**about, **failures, "results": rows}, indent=2)
    answers = "the likeliest answer each" if each == 1 else f"{each} sampled answers each"
    at = "" if step is None else f", step {step}"
    lines = [f"{path}{at}, {prompts} held-out prompts, {answers}", _table(rows)]
    if found.failed:
        lines.append(f"{found.failed} of {prompts * each} answers failed and are not counted: {printable(found.why)}")
    return "\n".join(lines)


def _judged(
    path: Path, which: str, dataset: str | None, rewards: Sequence[str], trust: bool
) -> tuple[GRPOTrainer, int | None]:
    """The trainer of a run with the step it stands at, or one around a model alone."""
    if (path / "run.json").exists():
        trainer, saved = trained(path, which, trust=trust, complete=partial(_complete, dataset, rewards))
        return trainer, saved.step
    if dataset is None:
        raise ConfigError(f"{path} is a model without a run: say what to ask it with --dataset FILE_OR_ID")
    config: Any = TASKS["language"].settings()
    settings = config(**_model_in(str(path)), dataset=dataset, rewards=tuple(rewards) or ("correctness",))
    return TASKS["language"].trainer(settings), None


def _complete(dataset: str | None, rewards: Sequence[str], config: Any) -> Any:
    """The settings of a run with rows and rewards that are named now, where its script had its own."""
    if config.rewards and rewards:
        raise ConfigError("--reward is for a model without a run; this run has its own, leave it out")
    if not config.rewards and not rewards and not config.environment:
        raise ConfigError("a script judged this run: name its reward again, --reward file.py:function or correctness")
    if not config.dataset and dataset is None:
        raise ConfigError("a script had this run's rows: name those to ask, --dataset FILE_OR_ID")
    named = {} if config.dataset else {"dataset": dataset}
    return config.but(**named, **({"rewards": tuple(rewards)} if rewards else {}))


def evaluate(
    path: Path,
    which: str,
    episodes: int,
    greedy: bool,
    seed: int | None,
    as_json: bool,
    render: bool,
    video: str | None,
    trust: bool = False,
) -> str:
    """Fresh episodes of a trained policy: a table with 95 % intervals, or JSON."""
    trainer, saved = trained(path, which, trust=trust)
    with closing(trainer.source):
        if not isinstance(trainer, EvaluatesEpisodes):
            raise ConfigError(f"{path}: this task has nothing to evaluate")
        found = trainer.evaluate(episodes, greedy, trainer.config.seed + FRESH if seed is None else seed)
        rows = found.table()
        lines = [_table(rows)]
        if found.failed:
            lines.append(f"{found.failed} of {episodes} episodes failed and are not counted: {found.why}")
        if (render or video) and isinstance(trainer, Watches):
            place = Path(video or path / "eval.mp4")
            trainer.watch(min(episodes, 3), render, place)
            if place.exists():
                lines.append(f"video: {place}")
    if as_json:
        about = {"run": str(path), "checkpoint": saved.step, "episodes": episodes, "greedy": greedy}
        failures = {"failed": found.failed} | ({"why": found.why} if found.failed else {})
        return json.dumps({**about, **failures, "results": rows}, indent=2)
    mode = "greedy" if greedy else "sampled"
    return "\n".join([f"{path}, step {saved.step}, {episodes} {mode} episodes on fresh starts", *lines])


def _table(rows: list[dict[str, Any]]) -> str:
    """A bootstrap of values that are all alike knows no spread, and is not shown; which interval is which is said."""
    cells = [("", "mean", "95 % interval", "std", "min", "max")]
    for row in rows:
        alike = row["interval"] == "bootstrap" and row["min"] == row["max"]
        between = "–" if alike else f"{row['low']:.4g} … {row['high']:.4g}"
        numbers = [f"{row[name]:.4g}" for name in ("std", "min", "max")]
        cells.append((row["quantity"], f"{row['mean']:.4g}", between, *numbers))
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    shares = ", ".join(row["quantity"] for row in rows if row["interval"] == "wilson")
    by = f"Wilson's for shares ({shares}), else a bootstrap" if shares else "a bootstrap"
    return "\n".join([*lines, f"interval of the mean: {by}; –: all alike"])


def export(path: Path, which: str, target: Path, trust: bool = False) -> str:
    """The policy as an ONNX file, checked against the original."""
    trainer, found = trained(path, which, judged=False, trust=trust)
    with closing(trainer.source):
        if not isinstance(trainer, Exports):
            raise ConfigError(f"{path}: this task has no policy that can be exported")
        try:
            made = trainer.export(target)
        except ImportError as error:
            raise ConfigError(str(error)) from None
    return f"{made}: the policy of step {found.step}, checked with onnxruntime"


def save_model(path: Path, which: str, target: Path, merge: bool, trust: bool = False) -> str:
    """The model as a folder that transformers (or PEFT) loads."""
    trainer, found = trained(path, which, judged=False, trust=trust)
    with closing(trainer.source):
        if not isinstance(trainer, SavesModel):
            raise ConfigError(f"{path}: this task has no model that can be saved")
        try:
            if target.is_relative_to(path):
                expect_no_links(path)
            made = trainer.save_model(target, merge=merge)
        except FolderError as error:
            raise ConfigError(str(error)) from None
    return f"{made}: the model of step {found.step}"


# --- talking --------------------------------------------------------------------------------------------------------


def talk(
    path: Path,
    which: str,
    system: str | None,
    temperature: float | None,
    message: str | None,
    trust: bool = False,
) -> None:
    """A conversation on the terminal, with a run's model or one that `save_model` wrote; one message: its answer."""
    answerer = speaker(str(path), which, trust)
    drawn = {} if temperature is None else {"temperature": temperature}
    beginning = [] if system is None else [{"role": "system", "content": system}]
    try:
        if message is not None:
            _say(answerer.reply([*beginning, {"role": "user", "content": message}], **drawn))
            return
        print("Ctrl-D or /exit ends, /reset forgets what was said")
        said = list(beginning)
        while (line := _line()) not in (None, "/exit"):
            if line == "/reset":
                said = list(beginning)
            elif line:
                said.append({"role": "user", "content": line})
                answer = answerer.reply(said, **drawn)
                said.append({"role": "assistant", "content": answer})
                _say(answer)
    finally:
        answerer.source.close()


def _say(text: str) -> None:
    """What a model wrote, line by line: it may hold anything, the terminal's own commands too."""
    print("\n".join(printable(line) for line in text.split("\n")))


def _line() -> str | None:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None


def speaker(given: str, which: str, trust: bool) -> Any:
    """A trainer that can reply: of a run, or around the model in a folder or of the hub."""
    path = Path(given)
    if (path / "run.json").exists():
        if task_of(path) != "language":
            raise ConfigError(f"{path}: the task {task_of(path)} has nobody to talk to")
        return trained(path, which, judged=False, trust=trust)[0]
    config: Any = TASKS["language"].settings()
    settings = config(**_model_in(given))
    return TASKS["language"].front_door()(args=settings, reward_funcs=_nothing, train_dataset=[{"prompt": "?"}])


def _model_in(name: str) -> dict[str, Any]:
    """The settings that name a model: one of the hub, or in a folder, where an adapter names its base."""
    path = Path(name)
    if hub.is_id(name):
        return {"model": name}
    adapter = path / "adapter_config.json"
    if not adapter.exists() and not (path / "config.json").exists():
        raise ConfigError(f"{path} is no run folder, nor a model's folder that save_model wrote")
    if not adapter.exists():
        return {"model": str(path)}
    try:
        base = read_json(adapter).get("base_model_name_or_path")
    except FolderError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(base, str):
        raise ConfigError(f"{adapter} names no base model (base_model_name_or_path); save the adapter again")
    return {"model": base, "adapter": str(path)}


def _nothing(completion: str) -> float:
    """A reward nobody asks for: a model that is only talked to learns nothing."""
    return 0.0
