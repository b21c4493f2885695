"""`grpo launch`: a job for SLURM, SkyPilot or Kubernetes, as a commented file that works as it stands."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from grpo.app.builders import TASKS
from grpo.app.ranks import expect_work
from grpo.app.settings import Resolved
from grpo.config import ConfigError
from grpo.errors import warn

FILES = {
    "slurm": ("slurm.sbatch",),
    "skypilot": ("skypilot.yaml",),
    "kubernetes": ("kubernetes.yaml", "kubernetes_workers.yaml"),
}
"""Templates of each place, the second for every machine but the first."""


@dataclass(frozen=True)
class Job:
    """What is asked for, of whom."""

    where: str
    nodes: int
    gpus: int
    """On each node."""
    time: str = "24:00:00"
    accelerator: str = "H100"
    image: str = "anygrpo:latest"

    @property
    def ranks(self) -> int:
        """In all."""
        return self.nodes * self.gpus


def text(job: Job, words: Sequence[str], resolved: Resolved) -> str:
    """The job's file; words: what `grpo train` is told, resolved: what that means."""
    lacking = _lacking(resolved)
    words, note = _with_work(words, resolved, job.ranks)
    resolved.config.expect_ranks(job.ranks)
    told = [word.partition("=")[0] for word in words]
    for name in ("--logdir", "--run.logdir", "--ranks", "--resume"):
        if name in told:
            raise ConfigError(
                f"{name} is set by the job itself; leave it out, and change the file where you want another"
            )
    if broken := next((word for word in words if "\n" in word), None):
        raise ConfigError(
            f"{broken.splitlines()[0][:40]}… has several lines, which a job's file cannot hold; put it into a YAML file"
        )
    name = re.sub(r"[^a-z0-9-]+", "-", resolved.name.lower()).strip("-") or "grpo"
    command = shlex.join(words)
    logdir = ["--ranks", str(job.ranks), "--logdir", f"/runs/{name}"]
    values = {
        "SUMMARY": f"grpo train {command}: {job.ranks} ranks on {job.nodes} x {job.gpus} GPUs. Made by `grpo launch`."
        + lacking
        + note,
        "NAME": name,
        "NODES": job.nodes,
        "GPUS": job.gpus,
        "RANKS": job.ranks,
        "WORKERS": job.nodes - 1,
        "TIME": job.time,
        "ACCELERATOR": job.accelerator,
        "IMAGE": job.image,
        "EXTRA": TASKS[resolved.task].extra or "control",
        "WORDS": command,
        "SHORT": words[0] if words else "",
        "COMMAND": json.dumps(["python", "-m", "grpo", "train", *words, *logdir]),
    }
    names = FILES[job.where][: 1 if job.nodes == 1 else 2]
    folder = resources.files("grpo.app") / "templates"
    whole = "".join((folder / name).read_text(encoding="utf-8") for name in names)
    return re.sub(r"\{\{(\w+)\}\}", lambda found: str(values[found[1]]), whole)


def _lacking(resolved: Resolved) -> str:
    """What the command cannot do without and is to be put into it: said now, not once the job's turn has come."""
    if missing := TASKS[resolved.task].lacking(resolved.config):
        warn(f"the job will be refused as it is: {missing}")
        return f"\n# NOT YET COMPLETE: {missing}, in the command below."
    return ""


def _with_work(words: Sequence[str], resolved: Resolved, ranks: int) -> tuple[list[str], str]:
    """The words, with a group a step for each rank where nobody has said how many; and a line that tells of it."""
    groups, origin = resolved.config.groups_per_step, resolved.origins.get("groups_per_step", "default")
    if groups >= ranks or not origin.startswith(("preset", "default")):
        expect_work(groups, ranks)
        return [*words], ""
    has = f"{groups} {'group' if groups == 1 else 'groups'}"
    note = f"\n# The {origin} has {has} a step: groups_per_step is {ranks} here, so that every rank has one."
    return [*words, "--groups-per-step", str(ranks)], note
