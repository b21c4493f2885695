"""The language room's front door: a model, reward functions and prompts, in the words TRL's and EasyDeL's users know.

    from grpo.language import GRPOConfig, GRPOTrainer
    trainer = GRPOTrainer(model="path", reward_funcs=correctness, args=GRPOConfig(…), train_dataset=rows)
    trainer.train()

It builds a policy and a source and hands them to the trainer that everyone shares.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from grpo.config import ConfigError
from grpo.errors import warn
from grpo.language import preflight
from grpo.language.around import Around, rate_of
from grpo.language.build import Given, build, name_of, prompts_of
from grpo.language.checks import notices
from grpo.language.compat import tables
from grpo.language.compat.arguments import EPOCHS
from grpo.language.compat.callbacks import Callbacks
from grpo.language.compat.easydel import vInference
from grpo.language.compat.entropy import AdaptiveEntropy
from grpo.language.compat.known import KnownTrainer
from grpo.language.compat.rollouts import RolloutFunction
from grpo.language.config import LanguageConfig
from grpo.language.data.prompts import Prompts
from grpo.language.evaluate import EVALUATION, Evaluation, of_several
from grpo.language.later import LookedAtLater
from grpo.language.model import output
from grpo.language.samples import Message
from grpo.language.scoring.policy import LanguagePolicy
from grpo.language.source import LanguageSource
from grpo.language.tasks import TASKS
from grpo.rates import LearningRate
from grpo.report import StepReport
from grpo.run import hub
from grpo.run.config import RunConfig
from grpo.run.door import door
from grpo.run.folder import RunFolder
from grpo.seeding import mixed


class GRPOTrainer(LookedAtLater, KnownTrainer):
    """Prompts in, better answers out.

    model: a hub id, a folder, a .gguf file, or a loaded model. reward_funcs: one or several functions, names of
    built-in ones, `file.py:name`, or reward models. args (or arguments): a `GRPOConfig`. train_dataset: rows, a
    `datasets` one, a file or a hub id. tools: Python functions, or a `Toolbox` that says how calls are written.
    environment: answers completions (`reset`, `step`). environment_factory: TRL's kind, whose methods are tools; one or
    several by name. rollout_func: makes the completions itself, from prompts and this trainer.
    """

    source: LanguageSource
    policy: LanguagePolicy
    config: LanguageConfig
    task, always_kept = "language", True

    @door
    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: LanguageConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        environment: Any = None,
        *,
        rollout_func: Any = None,
        environment_factory: Any = None,
        arguments: LanguageConfig | None = None,
        vinference: vInference | None = None,
        ref_model: Any = None,
        teacher_model: Any = None,
    ) -> None:
        if args is not None and arguments is not None:
            raise TypeError("args and arguments are the same thing; give one of them")
        config = args or arguments or LanguageConfig()
        if not isinstance(config, LanguageConfig):
            raise TypeError(f"args must be a grpo.language.GRPOConfig, got {type(config).__name__}")
        if vinference is not None:
            config = vinference.applied(config)
            model = vinference.model if model is None else model
            processing_class = vinference.tokenizer if processing_class is None else processing_class
        given = Given(
            model, reward_funcs, train_dataset, eval_dataset, processing_class, reward_processing_classes, optimizers,
            quantization_config, peft_config, tools, environment, ref_model, teacher_model, rollout_func,
            environment_factory,
        )  # fmt: skip
        parts = build(config.in_use(), given)
        for notice in notices(parts.config):
            warn(notice)
        self.tokens, self.chat, self.given = parts.tokens, parts.chat, given
        self._callbacks, self._passing = Callbacks(callbacks or ()), list[Any]()
        adaptive = AdaptiveEntropy(parts.config) if parts.config.use_adaptive_entropy else None
        parts.source.adapts = adaptive
        self._around = Around(parts, lambda: self.watched)
        super().__init__(
            *(parts.config, parts.policy, parts.reference),
            optimizer=parts.optimizer,
            source=parts.source,
            rate=LearningRate(rate_of(parts.config, optimizers[1]), parts.optimizer),
            hooks=[self._around, *([adaptive] if adaptive else []), self._callbacks],
            teacher=parts.teacher,
            ranks=parts.ranks,
        )
        self.source.output = self.save_model
        self._judged: Evaluation | None = None
        self._answers = itertools.count()  # of `generate`
        if isinstance(self.source.player, RolloutFunction):
            self.source.player.trainer = self
        self._introduce_callbacks()

    # --- its runs ---------------------------------------------------------------------------------------------------

    @property
    def run_name(self) -> str:
        """The model's name, as a folder can be called."""
        return name_of(self.config)

    @property
    def evaluation(self) -> Callable[[int], Mapping[str, Any]] | None:
        """On held-out rows, where there are some."""
        return self._evaluated if self.source.held_out else None

    def _evaluated(self, step: int) -> Mapping[str, float | None]:
        """An evaluation during a run, which its log will tell of."""
        passed = self.source.epoch(step) or 0.0 if "evaluate_every" in self.config.by_epoch else step
        if passed < self.config.eval_delay:
            return {}
        self._judged = self.source.judge_held_out()
        return self._measures(self._judged)

    def cannot_evaluate(self) -> str:
        """What is missing."""
        return (
            "there are no held-out rows; give --eval-dataset (eval_dataset in Python), or --eval-split test where the "
            "data set has that split, or leave it out"
        )

    def planned(self, asked: Mapping[str, Any], kept: bool) -> RunConfig:
        """As the settings say, which hold a plan of their own; what they count in epochs becomes steps."""
        how = self.config.run.model_copy(update=dict(asked))
        return self.config.planned(how, self._once(), self.total_steps(how)).model_copy(update=dict(asked))

    def _once(self) -> int:
        """Steps of a pass over the data, where something counts these."""
        return max(1, round(self.source.epoch_steps())) if self.config.by_epoch else 1

    def total_steps(self, how: RunConfig) -> int:
        """Steps of the run: as given, or so many passes over the data; three where nothing is said."""
        if how.steps is not None:
            return how.steps
        return math.ceil((how.num_train_epochs or EPOCHS) * self.source.epoch_steps())

    def schedule(self, steps: int) -> None:
        """Tell how many steps the run will have: schedules, reward functions and callbacks want to know."""
        super().schedule(steps)
        self.source.max_steps = steps
        self._callbacks.begin(steps, self.config.planned(self.config.run, self._once(), steps))

    def listening(self, callbacks: Sequence[Any]) -> Sequence[Callable[[StepReport], Any]]:
        """All are told in one place, after those of the constructor: they may be transformers' own kind."""
        for callback in self._passing:  # of an earlier run
            self._callbacks.pop(callback)
        before = len(self._callbacks.callbacks)
        for callback in callbacks:
            self._callbacks.add(callback)
        self._passing = self._callbacks.callbacks[before:]
        return ()

    def stops(self, report: StepReport) -> bool:
        """Whether a callback ends the run; one that wants an evaluation gets it first."""
        judged, self._judged = self._judged, None
        row = {} if judged is None else self._in_their_words(judged)
        over = self._callbacks.step_done(report, self.source.max_steps or report.step, self.recipe, row)
        if self.config.log_completions and self.ranks.chief and report.step % self._callbacks.log_every == 0:
            folder = None if self.run_folder is None else Path(self.run_folder)
            tables.show(report, self.config, folder, self.watched)
        if self._callbacks.wishes("should_evaluate") and judged is None and self.source.held_out:
            judged = self.source.judge_held_out()
            report.metrics |= {f"eval/{name}": value for name, value in self._measures(judged).items()}
            self._callbacks.evaluated(self._in_their_words(judged))
        return over

    def finish(self, reason: str, folder: Path | None) -> None:
        """Tell the callbacks; upload the model where that was asked for."""
        self._mark(self.steps_done)
        if self.config.load_best_model_at_end and reason in ("done", "stopped"):
            self._load_best(folder)
        self._ended = self._callbacks.end()
        if folder is not None and reason in ("done", "stopped") and self.config.push_to_hub:
            print(f"uploaded: {self.push_to_hub(folder / 'model')}")

    def preflight(self) -> list[preflight.Finding]:
        """Try the rewards on references and a few completions; nothing that training depends on is moved."""
        return self._around.preflight()

    # --- what came of it --------------------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The trained module."""
        return self.policy.model

    @door
    def evaluate(
        self,
        dataset: Any = None,
        samples: int | None = None,
        limit: int | None = None,
        *,
        eval_dataset: Any = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> Evaluation:
        """Accuracy, pass@k and rewards on held-out rows: `eval_dataset`, or the ones given here (several by name).

        As a mapping it has TRL's metrics: eval_reward, eval_rewards/NAME/mean, eval_NAME_reward of several sets.
        """
        dataset = eval_dataset if dataset is None else dataset
        several = self.source.held_out if dataset is None else self._rows_of(dataset)
        if not several:
            raise ConfigError("there are no held-out rows; give eval_dataset, or a data set to evaluate on")
        count = samples or self.config.eval_samples
        each = {name: self.source.judge_rows(prompts, count, limit) for name, prompts in several.items()}
        made = each[""] if "" in each else of_several(each)
        made = replace(made, logs=self._in_their_words(made, metric_key_prefix))
        self._callbacks.evaluated(made.logs)
        return made

    def _rows_of(self, dataset: Any) -> Mapping[str, Prompts]:
        """Held-out prompts of rows that are given, of one data set or of several by name; a name may be a set's own."""
        if isinstance(dataset, str) and dataset in self.source.held_out:
            return {"": self.source.held_out[dataset]}
        found = {}
        for name, rows in (dataset if isinstance(dataset, Mapping) else {"": dataset}).items():
            own = isinstance(rows, str) and rows == self.config.dataset
            split = self.config.eval_split if own and self.config.eval_split else "train"
            split = "test" if isinstance(rows, str) and rows in TASKS else split
            found[str(name)] = prompts_of(self.config, self.chat, rows, split, self.source.engine.context)
        return found

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> Any:
        """Completions of these rows, with what the rewards say of them, as transformers' `PredictionOutput`."""
        from transformers.trainer_utils import PredictionOutput

        each = {name: self.source.judge_rows(p, self.config.eval_samples, None) for name, p in
                self._rows_of(test_dataset).items()}  # fmt: skip
        made = each[""] if "" in each else of_several(each)
        told = self._in_their_words(made, metric_key_prefix)
        self._callbacks.tell("on_predict", metrics=told)
        texts: Any = [sample.text for one in each.values() for sample in one.samples]
        return PredictionOutput(texts, None, told)

    def reply(self, messages: Sequence[Message], **sampling: Any) -> str:
        """What the model answers to a conversation; one without a chat template answers the last message alone."""
        prompt = self.source.prompts.prompt(list(messages) if self.chat.templated else messages[-1]["content"])
        seed = mixed(self.config.seed, EVALUATION, len(messages))
        drawn = replace(self.config.sampling, **sampling)
        return self.source.sample([prompt], 1, drawn, [seed])[0].text

    @door
    def generate(
        self, prompts: Sequence[str | Sequence[Message]], count: int = 1, seed: int | None = None, **sampling: Any
    ) -> list[list[str]]:
        """So many answers to each prompt, sampled as set or otherwise (top_p, …); anew at each call without a seed."""
        rows = [self.source.prompts.prompt(prompt if isinstance(prompt, str) else list(prompt)) for prompt in prompts]
        begin, numbers = (self.config.seed, self._answers) if seed is None else (seed, itertools.count())
        seeds = [mixed(begin, EVALUATION, next(numbers)) for _ in range(len(rows) * count)]
        made = self.source.sample(rows, count, replace(self.config.sampling, **sampling), seeds)
        return [[sample.text for sample in made[at : at + count]] for at in range(0, len(made), count)]

    def save_model(self, output_dir: str | Path | None = None, merge: bool = False) -> Path:
        """A folder that `AutoModelForCausalLM.from_pretrained` loads (or PEFT, unless merged), with its card."""
        if self.config.shard == "weights" and self.ranks.size > 1:
            raise ConfigError("the weights are divided among ranks; `grpo export RUN` writes the model of a checkpoint")
        path = Path(output_dir) if output_dir else self._place() / "model"
        if not self.ranks.chief:  # a script calls it on every rank
            return path
        return output.save_model(
            self.model,
            self.chat.processing,
            path,
            self.config,
            merge=merge,
            step=self.steps_done,
            metrics=self._measured(),
            name=self.name or self.config.run.name,
            rewards=tuple(self.source.rewards.names),
            data=self.config.dataset,
        )

    def _write_card(self, path: Path, name: str | None, data: str | None, tags: Sequence[str]) -> None:
        output.write_card(
            path,
            self.model,
            self.config,
            step=self.steps_done,
            metrics=self._measured(),
            rewards=tuple(self.source.rewards.names),
            data=data or self.config.dataset,
            name=name or self.name or self.config.run.name,
            tags=tags,
        )

    def push_to_hub(
        self,
        folder: str | Path | None = None,
        *,
        commit_message: str | None = None,
        revision: str | None = None,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> str:
        """Upload a saved model (it is written first where no folder is given); returns where it is.

        model_name, dataset_name, tags: for its card.
        """
        if isinstance(folder, str) and not Path(folder).exists():  # TRL's first argument is the message
            commit_message, folder = folder, None
        path = self.save_model() if folder is None else Path(folder)
        if self.ranks.chief and (model_name or dataset_name or tags):
            self._write_card(path, model_name, dataset_name, [tags] if isinstance(tags, str) else list(tags or ()))
        if self.ranks.chief and not path.exists():
            raise ConfigError(f"{path}: the model was not written, so that it cannot be uploaded; see events.jsonl")
        repo = self.config.hub_model_id or self.name or self.config.run.name or self.run_name
        how: dict[str, Any] = {"message": commit_message} if commit_message else {}
        how |= {"revision": revision} if revision else {}
        return hub.push(path, repo, self.config.hub_private, **how) if self.ranks.chief else str(repo)

    def _measured(self) -> Mapping[str, float | None]:
        """Metrics of the step whose weights these are (the best one's, say), evaluations too."""
        step, metrics = self._around.last
        if step == self.steps_done or self.run_folder is None:
            return metrics if step == self.steps_done else {}
        rows = RunFolder.open(self.run_folder).metrics()
        return next((row for row in reversed(rows) if row["step"] == self.steps_done), {})

    def _place(self) -> Path:
        """Where the run's folder is, or would be."""
        if self.run_folder is not None:
            return Path(self.run_folder)
        how, now = self.config.run, datetime.now().astimezone()
        return how.folder(how.name or self.run_name, self.task, self.config.seed, now)


def make_trainer(config: LanguageConfig, **given: Any) -> GRPOTrainer:
    """The trainer of a configuration, as the command line makes it; given: a model that no name leads to."""
    return GRPOTrainer(args=config, **given)
