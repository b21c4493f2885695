"""What a room says about its runs: their name, what they are judged by, how long they are, what it does around them.

A trainer of PyTorch's inherits this (`grpo.run.trainer`), and so does one that does without it; the loop asks nothing
else of either but what `grpo.trainer.Trainer` has by these names: config, recipe, source, ranks, pace, phase,
steps_done, run_folder, step, state, load_state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from grpo.capabilities import Evaluates, Exports
from grpo.config import ConfigError, GRPOConfig
from grpo.errors import install
from grpo.protocols import RolloutSource
from grpo.rates import LearningRate
from grpo.report import StepReport
from grpo.run.config import ENDLESS, RunConfig

if TYPE_CHECKING:
    from grpo.trainer import Hook


class Runs:
    """How runs of a trainer are carried out, where a room does not say otherwise."""

    config: GRPOConfig
    source: RolloutSource
    hooks: tuple[Hook, ...]

    task: ClassVar[str] = "own"
    """What a run's folder calls this room."""
    measure: ClassVar[str] = "reward"
    """The metric that says how good a policy is, as the steps report it; evaluations call it eval/…"""
    evaluates_every: ClassVar[int] = 50
    """Steps between two evaluations where nobody says."""
    sample_every: ClassVar[int] = 10
    """Steps between samples that are kept, where nobody says."""
    always_kept: ClassVar[bool] = False
    """Whether a run has a folder, whoever asks for one."""

    commands: ClassVar[tuple[str, ...]] = ("view",)
    """What makes something of the folder of a run of this room."""

    name: str | None = None
    """What the run that is under way is called, where somebody said."""
    watched: bool = False
    """Whether somebody watches that run: what is worth knowing may be printed."""

    @property
    def run_name(self) -> str:
        """What a person would call a run of this trainer."""
        return self.task

    @property
    def evaluation(self) -> Callable[[int], Mapping[str, Any]] | None:
        """Measures the policy of a step; None where there is nothing to measure it on."""
        return self.source.evaluate if isinstance(self.source, Evaluates) else None

    def cannot_evaluate(self) -> str:
        """Why `evaluation` is None, and what to do."""
        return f"the task {self.task} has no evaluation; leave it out"

    def planned(self, asked: Mapping[str, Any], kept: bool) -> RunConfig:
        """How a run is carried out, from what `train` was asked for; `kept`: something of it will stay."""
        if not {"steps", "env_steps", "stop_at"} & set(asked):
            raise ValueError("train() needs total_updates, steps, env_steps or stop_at; or states, a batch a step")
        looks = self.evaluation is not None and ("stop_at" in asked or kept)
        every = asked.get("evaluate_every", self.evaluates_every if looks else None)
        given = {"steps": ENDLESS, **asked, "evaluate_every": every}
        best_by = f"eval/{self.measure}" if every else self.measure
        return RunConfig(**given, checkpoint_every=every or 50, best_by=best_by, sample_every=self.sample_every)

    def settings(self) -> dict[str, Any]:
        """The settings as a run's folder keeps them: those that were given, as the command line would write them."""
        kept = self.config.model_dump(mode="json", exclude_unset=True)
        return {**kept.pop("recipe", {}), **kept}

    def looked_at_with(self) -> tuple[Sequence[str], str]:
        """Commands that make something of this run's folder, with what they lack; what to do in place of others."""
        lacks = {"export": f"({install('export')})"} if find_spec("onnx") is None else {}
        lacks = lacks if isinstance(self, Exports) else {}
        return [f"{name} {lacks.get(name, '')}".rstrip() for name in self.commands], ""

    def settle_in(self, folder: Path) -> None:
        """Told where a run's results go, before its first step: to keep there what is needed beside checkpoints."""

    def total_steps(self, how: RunConfig) -> int:
        """Steps of a run, where its plan may count in something else."""
        if how.num_train_epochs is not None and how.steps is None:
            raise ConfigError("run.num_train_epochs: this task has no data set to pass over; use run.steps")
        return how.steps or 100

    def schedule(self, steps: int) -> None:
        """Told how many steps a run will have, before its first."""
        for hook in self.hooks:
            if isinstance(hook, LearningRate):
                hook.total = None if steps >= ENDLESS else steps

    def listening(self, callbacks: Sequence[Any]) -> Sequence[Callable[[StepReport], Any]]:
        """Those of `train`'s callbacks that are plain functions; a room may know others, and keep them to itself."""
        return callbacks

    def stops(self, report: StepReport) -> bool:
        """Told each step; True ends the run."""
        return False

    def saves_too(self, report: StepReport) -> bool:
        """Whether a checkpoint is wanted after this step, beside those that are due."""
        return False

    def saved(self, step: int) -> None:
        """Told of a checkpoint of this step, once its arrays are copied."""

    def finish(self, reason: str, folder: Path | None) -> None:
        """Told how a run ended, after its last."""

    def told(self, reports: list[StepReport]) -> list[StepReport]:
        """What `train` returns."""
        return reports
