"""What scripts written for TRL's trainer ask of it: its attributes, its log, its callbacks and its files.

Each is translated here to what the room has; the step itself knows nothing of it.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo.agreement import by_chief
from grpo.language.build import Given
from grpo.language.compat.callbacks import Callbacks
from grpo.language.compat.environments import EnvironmentConversation
from grpo.language.compat.history import evaluation_row
from grpo.language.compat.state import RunState
from grpo.language.config import LanguageConfig
from grpo.language.evaluate import Evaluation
from grpo.language.model.reference import FrozenCopy
from grpo.language.rewards.models import RewardModel
from grpo.language.scoring.policy import LanguagePolicy
from grpo.language.source import LanguageSource
from grpo.language.turns.conversation import Conversation
from grpo.protocols import State
from grpo.report import StepReport
from grpo.run import checkpoint
from grpo.run.files import write_atomic
from grpo.run.folder import RunFolder
from grpo.run.progress import printable
from grpo.run.trainer import GRPOTrainer as RunTrainer
from grpo.trainer import Trainer


class Reports(list[StepReport]):
    """The reports of a run's steps, with the three fields of transformers' TrainOutput beside them."""

    def __init__(self, reports: Sequence[StepReport], global_step: int, metrics: Mapping[str, float]) -> None:
        super().__init__(reports)
        self.global_step, self.metrics = global_step, dict(metrics)
        self.training_loss = self.metrics.get("train_loss", 0.0)


STATE = "trainer_state.json"
"""What transformers' trainers call their state's file."""


@dataclass(frozen=True)
class LearningRate:
    """What scripts read of a scheduler."""

    last_epoch: int
    """Steps that are done."""
    rates: tuple[float, ...]

    def get_last_lr(self) -> list[float]:
        """Of each group of the optimizer's."""
        return list(self.rates)


class KnownTrainer(RunTrainer):
    """The attributes and methods of transformers' and TRL's trainers."""

    config: LanguageConfig
    source: LanguageSource
    policy: LanguagePolicy
    tokens: Any
    given: Given
    """What the script handed over."""
    _callbacks: Callbacks
    _record: RunState | None = None
    _ended: Mapping[str, float] = {}

    # --- attributes -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> RunState:
        """transformers' TrainerState, with `log_history`; called, as `Trainer.state` is, what a checkpoint keeps."""
        if self._record is None:
            chief = self.ranks.chief
            self._record = RunState(
                lambda: Trainer.state(self), is_world_process_zero=chief, is_local_process_zero=chief
            )
        return self._record

    @property
    def args(self) -> LanguageConfig:
        """The settings as they stand: every word of TRL's answers, with the run's folder and the model's device."""
        device = next(self.policy.model.parameters()).device
        return self.config.in_use(device, None if self.run_folder is None else Path(self.run_folder))

    @property
    def control(self) -> Any:
        """transformers' TrainerControl: the flags that callbacks set."""
        return self._callbacks.control

    @property
    def callback_handler(self) -> Callbacks:
        """Those that are told of events, as its `callbacks`."""
        return self._callbacks

    @property
    def is_in_train(self) -> bool:
        """Whether a run is under way."""
        return self._callbacks.running

    @property
    def lr_scheduler(self) -> LearningRate:
        """Of the last step; what comes follows from `lr_schedule` and a step's number."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return LearningRate(self.steps_done, tuple(float(group["lr"]) for group in groups))

    @property
    def num_generations(self) -> int:
        """Completions of each prompt."""
        return self.config.group_size

    @property
    def beta(self) -> float:
        """Weight of the KL to the reference."""
        return float(self.recipe.beta)

    @property
    def temperature(self) -> float:
        """Of the sampling."""
        return self.config.temperature

    @property
    def max_completion_length(self) -> int:
        """Longest completion in tokens."""
        return self.config.max_completion_length

    @property
    def train_dataset(self) -> Any:
        """As it was given: rows, or the name of a data set."""
        return self.config.dataset if self.given.train_dataset is None else self.given.train_dataset

    @property
    def eval_dataset(self) -> Any:
        """As it was given: rows, several sets by name, a name, or None."""
        return self.config.eval_dataset if self.given.eval_dataset is None else self.given.eval_dataset

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        return self.given.processing_class or self.tokens.tokenizer

    @property
    def reward_funcs(self) -> list[Any]:
        """Functions and loaded reward models, in their order."""
        found = [call.function for call in self.source.rewards.calls]
        return [function.model if isinstance(function, RewardModel) else function for function in found]

    @property
    def reward_func_names(self) -> list[str]:
        """What each reward is called in metrics."""
        return list(self.source.rewards.names)

    @property
    def reward_weights(self) -> torch.Tensor:
        """Of each reward."""
        weights = self.config.recipe.reward_weights or ()
        return torch.tensor([*weights, *[1.0] * (len(self.reward_func_names) - len(weights))])

    @property
    def reward_processing_classes(self) -> list[Any]:
        """The tokenizer of each reward model; None beside functions."""
        found = [call.function for call in self.source.rewards.calls]
        return [function.tokenizer if isinstance(function, RewardModel) else None for function in found]

    @property
    def ref_model(self) -> Any:
        """The module that the KL is measured to; None: there is none, or it is the model without its adapter."""
        return self.reference.model if isinstance(self.reference, FrozenCopy) else None

    @property
    def tools(self) -> list[Any]:
        """What the model may call: functions, and the methods of environments."""
        player = self.source.player
        if isinstance(player, EnvironmentConversation):
            return list(dict.fromkeys(tool for box in player.boxes.values() for tool in box.functions))
        return player.tools.functions if isinstance(player, Conversation) and player.tools is not None else []

    @property
    def environments(self) -> list[Any] | None:
        """Of the last conversations, in their order; None: there are none."""
        player = self.source.player
        return player.environments if isinstance(player, EnvironmentConversation) else None

    def is_world_process_zero(self) -> bool:
        """Whether this process is the one that writes."""
        return bool(self.ranks.chief)

    # --- callbacks and log ------------------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """A `TrainerCallback`, its class, or a function of a step's report."""
        self._callbacks.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Take a callback away, by itself or its class; it comes back, or None."""
        return self._callbacks.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        """The same, and nothing comes back."""
        self._callbacks.pop(callback)

    def log(self, logs: Mapping[str, float], start_time: float | None = None) -> None:
        """A row of `state.log_history`; the numbers also go along with the next step's metrics."""
        self._callbacks.say(dict(logs))

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print them, one a line."""
        if self.ranks.chief:
            wide = max((len(name) for name in metrics), default=0)
            lines = [f"  {name:<{wide}} = {_shown(value):>12}" for name, value in sorted(metrics.items())]
            print(printable("\n".join([f"***** {split} metrics *****", *lines])))

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write them to {split}_results.json of the run's folder, and to all_results.json where all are to be there."""
        if not self.ranks.chief:
            return
        place = self._place()
        place.mkdir(parents=True, exist_ok=True)
        write_atomic(place / f"{split}_results.json", json.dumps(dict(metrics), indent=4, sort_keys=True))
        if combined:
            path = place / "all_results.json"
            known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            write_atomic(path, json.dumps(known | dict(metrics), indent=4, sort_keys=True))

    def save_state(self) -> None:
        """Write trainer_state.json, as transformers' trainers do: what `state` says."""
        if self.ranks.chief:
            place = self._place()
            place.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(place / STATE))

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | Sequence[str] | None = None
    ) -> None:
        """Write README.md of the run's folder: how the model was trained and what was measured."""
        if self.ranks.chief:
            place = self._place()
            place.mkdir(parents=True, exist_ok=True)
            self._write_card(place, model_name, dataset_name, [tags] if isinstance(tags, str) else list(tags or ()))

    # --- what the room's trainer has --------------------------------------------------------------------------------

    @abstractmethod
    def _place(self) -> Path:
        """Where the run's folder is, or would be."""

    @abstractmethod
    def _write_card(self, path: Path, name: str | None, data: str | None, tags: Sequence[str]) -> None:
        """A model card."""

    # --- a run ------------------------------------------------------------------------------------------------------

    def _introduce_callbacks(self) -> None:
        """What their events hand over."""
        handed = {"model": self.policy.model, "processing_class": self.processing_class, "optimizer": self.optimizer}
        self._callbacks.attach(lambda: self.args, self.state, handed)

    def told(self, reports: list[StepReport]) -> list[StepReport]:
        """What `train` returns: the reports, and what TRL's would."""
        return Reports(reports, self.steps_done, self._ended)

    def saves_too(self, report: StepReport) -> bool:
        """Whether a callback set should_save."""
        return self._callbacks.wishes("should_save")

    def saved(self, step: int) -> None:
        """A checkpoint was taken."""
        self._mark(step)
        self._callbacks.tell("on_save")

    def _mark(self, step: int) -> None:
        """Where a script said output_dir, checkpoint-STEP in it stands for a checkpoint, as transformers looks for
        them (`get_last_checkpoint`), with trainer_state.json; those of checkpoints that are gone go."""
        if self.run_folder is None or not self.ranks.chief or not self.config.says("output_dir"):
            return
        with suppress(OSError):  # a full disk ends no run
            self._mark_in(Path(self.run_folder), step)

    def _mark_in(self, place: Path, step: int) -> None:
        there = {path.name.removeprefix("step-").lstrip("0") for path in checkpoint.steps(RunFolder(place))}
        for old in place.glob("checkpoint-*"):
            if old.name.removeprefix("checkpoint-") not in {*there, str(step)}:
                (old / STATE).unlink(missing_ok=True)
                with suppress(OSError):  # a callback keeps something there
                    old.rmdir()
        made = place / f"checkpoint-{step}"
        made.mkdir(exist_ok=True)
        self.state.save_to_json(str(made / STATE))

    def _load_best(self, folder: Path | None) -> None:
        """Go on with the best checkpoint's weights."""

        def work() -> State:
            found = None if folder is None else checkpoint.best(RunFolder.open(folder))
            return State({}, {}) if found is None else found.state

        best = by_chief(self.ranks, "loading the best model", work)
        if best.values:
            self.load_state(best)
            self.state.best_model_checkpoint = str(Path(self.args.output_dir) / f"checkpoint-{self.steps_done}")

    def _measures(self, judged: Evaluation) -> dict[str, float | None]:
        """For the run's metrics; with what TRL alone tells where that says which checkpoint is the best."""
        own, best = judged.metrics(), self.config.run.best_by.removeprefix("-").removeprefix("eval/")
        theirs = self._in_their_words(judged)
        return {best: theirs[f"eval_{best}"], **own} if f"eval_{best}" in theirs else own

    def _in_their_words(self, made: Evaluation, prefix: str = "eval") -> dict[str, float]:
        return evaluation_row(made, self.config.recipe, prefix)


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
