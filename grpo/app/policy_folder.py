"""A policy for others: a folder with one checkpoint of a run, its settings, metrics, curve, film, and a card.

It is a run folder, only smaller: `grpo.load`, `grpo eval`, `grpo view` and `--init-from` take it as they take a run.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from grpo.config import ConfigError
from grpo.run import hub
from grpo.run.files import FolderError, dumps, read_json, write_atomic
from grpo.run.folder import RunFolder
from grpo.run.inside import expect_no_links
from grpo.run.trainer import GRPOTrainer

KEPT = {"config.json": "config.json", "metrics.jsonl": "metrics.jsonl", "status.json": "status.json"}
SHOWN = {"curve.png": "curve.png", "video.mp4": "replay.mp4", "policy.onnx": "policy.onnx"}
"""Files of a run, and what they are called there; the hub plays a replay.mp4."""


def write_policy(trainer: GRPOTrainer, run: Path, checkpoint: Path | None, folder: Path) -> Path:
    """Write it, beside nothing else."""
    if checkpoint is None:
        raise ConfigError(f"{run} has no checkpoint to save")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} holds something already; choose another folder")
    try:
        if not hub.is_fetched(run):  # there links lead to the hub's own store
            expect_no_links(run)
        return _written(trainer, run, checkpoint, folder)
    except FolderError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"cannot write to {folder} ({error.strerror}); choose another folder") from None


def _written(trainer: GRPOTrainer, run: Path, checkpoint: Path, folder: Path) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    source = RunFolder.open(run)
    for name, there in (KEPT | SHOWN).items():
        place = run / name if (run / name).exists() else run / there  # of a run, or of what was saved before
        if place.exists():
            shutil.copyfile(place, folder / there)
    about = read_json(run / "run.json") | {"argv": []}
    write_atomic(folder / "run.json", lambda file: file.write(dumps(about).encode()))
    shutil.copytree(checkpoint, folder / "checkpoints" / checkpoint.name)
    write_atomic(folder / "checkpoints" / "latest", lambda file: file.write(f"{checkpoint.name}\n".encode()))
    card = _card(trainer, source, folder)
    write_atomic(folder / "README.md", lambda file: file.write(card.encode()))
    return folder


def _card(trainer: GRPOTrainer, source: RunFolder, folder: Path) -> str:
    """How it was trained, what was measured, what it looks like, and how to use it."""
    config: Any = trainer.config
    rows = [row for row in source.metrics() if row["step"] <= trainer.steps_done]
    last = {name: value for row in rows for name, value in row.items() if value is not None}
    score = last.get(f"eval/{trainer.measure}", last.get(trainer.measure))
    name = config.env
    head = ["---", "library_name: anygrpo", "pipeline_tag: reinforcement-learning", "tags:", "- reinforcement-learning"]
    head += ["- grpo", "- anygrpo", f"- {name}", *(_result(name, score) if score is not None else []), "---", ""]
    lines = [*head, f"# GRPO on {name}", ""]
    lines += ["A policy trained with [anygrpo](https://pypi.org/project/anygrpo).", "", "```python", "import grpo", ""]
    lines += ['policy = grpo.load("owner/name")  # or the folder that this file lies in']
    lines += ["action, state = policy.predict(observation)", "print(policy.evaluate(episodes=20))", "```", ""]
    lines += ["![the curve of its training](curve.png)", ""] if (folder / "curve.png").exists() else []
    film = '<video src="replay.mp4" controls autoplay loop muted></video>'
    lines += [film, ""] if (folder / "replay.mp4").exists() else []
    told = {"steps": trainer.steps_done, "recipe": config.loss_type, "seed": config.seed}
    told |= {key: last[key] for key in ("env_steps", "eval/return", "eval/return_std", "eval/success") if key in last}
    return "\n".join(
        [*lines, "| | |", "|---|---|", *(f"| {key} | {_short(value)} |" for key, value in told.items()), ""]
    )


def _result(env: str, score: float) -> list[str]:
    """What the hub's tables read."""
    return [
        "model-index:", "- name: GRPO", "  results:", "  - task:", "      type: reinforcement-learning",
        "    dataset:", f"      name: {env}", f"      type: {env}", "    metrics:", "    - type: mean_reward",
        f"      value: {score:.6g}",
    ]  # fmt: skip


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
