"""Completions as a table: printed, kept as Parquet, and shown at Weights & Biases and Trackio (`log_completions`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from grpo.language.config import LanguageConfig
from grpo.language.pictures.ids import PicturedIds
from grpo.report import StepReport
from grpo.run.inside import make_folder_inside, write_inside
from grpo.run.progress import printable

LONGEST = 500
"""Characters of a prompt or completion that are printed."""


def completions(report: StepReport) -> dict[str, list[Any]]:
    """A column each: step, prompt, completion, every reward, what was logged beside it, advantage."""
    experience = report.experience
    samples = list(experience.rollouts.inputs)
    mask_NT, advantage_NT = (np.asarray(a.cpu()) for a in (experience.rollouts.mask_NT, experience.advantage_NT))
    first_N = mask_NT.argmax(1)
    found: dict[str, list[Any]] = {
        "step": [report.step] * len(samples),
        "prompt": [sample.prompt.text for sample in samples],
        "completion": [sample.text for sample in samples],
    }
    for name in dict.fromkeys(name for sample in samples for name in sample.rewards):
        found[name] = [sample.rewards.get(name) for sample in samples]
    for name in dict.fromkeys(name for sample in samples for name in sample.extras):
        found[name] = [sample.extras.get(name) for sample in samples]
    found["advantage"] = [float(advantage_NT[row, first_N[row]]) for row in range(len(samples))]
    return found


def images(report: StepReport) -> list[list[Any]]:
    """Of each completion the images of its prompt, where there are any."""
    prompts = [sample.prompt.ids for sample in report.experience.rollouts.inputs]
    return [[one.image() for one in ids.shown] if isinstance(ids, PicturedIds) else [] for ids in prompts]


def show(report: StepReport, config: LanguageConfig, folder: Path | None, watched: bool) -> None:
    """Print a step's table where somebody watches, keep it in the run's folder, and send it to trackers that are
    open, there with the images that prompts hold."""
    table = completions(report)
    if folder is not None:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet

        with suppress(FileExistsError):
            make_folder_inside(folder, "completions")
        made, name = pyarrow.table(dict(table)), f"completions/completions_{table['step'][0]:05d}.parquet"
        write_inside(folder, name, lambda file: parquet.write_table(made, file))
    for name in ("wandb", "trackio"):
        tracker = sys.modules.get(name)
        if tracker is not None and not (hasattr(tracker, "run") and tracker.run is None):
            _send(tracker, report, table, config)
    if watched:
        _print(table, config.num_completions_to_print)


def _unique(table: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """The first completion of each prompt."""
    rows = list({prompt: row for row, prompt in reversed(list(enumerate(table["prompt"])))}.values())
    return {name: [values[row] for row in sorted(rows)] for name, values in table.items()}


def _send(tracker: Any, report: StepReport, table: Mapping[str, Sequence[Any]], config: LanguageConfig) -> None:
    """To a run that is open there."""
    import pandas  # type: ignore[import-untyped]

    shown = images(report) if config.log_multimodal else []
    if any(shown):
        table = {**table, "image": [[tracker.Image(image) for image in some] for some in shown]}
    table = _unique(table) if config.log_unique_prompts else table
    tracker.log({"completions": tracker.Table(dataframe=pandas.DataFrame(dict(table)))})


def _print(table: Mapping[str, Sequence[Any]], most: int | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(show_lines=True, title=f"step {table['step'][0]}")
    names = [name for name in table if name != "step"]
    for name in names:
        shown.add_column(name, no_wrap=False)
    for row in range(len(table["step"]))[:most]:
        shown.add_row(*(Text(printable(_cell(table[name][row]))) for name in names))
    Console().print(shown)


def _cell(value: Any) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else "" if value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
