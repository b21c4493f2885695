"""The language room's front door: a model, reward functions and prompts, in the words TRL's and EasyDeL's users know.

    from grpo.language import GRPOConfig, GRPOTrainer
    trainer = GRPOTrainer(model="path", reward_funcs=correctness, args=GRPOConfig(…), train_dataset=rows)
    trainer.train()

It builds a policy and a source and hands them to the trainer that everyone shares.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from grpo.config import ConfigError
from grpo.language import preflight
from grpo.language.build import Given, Parts, build, name_of, prompts_of
from grpo.language.compat.callbacks import Callbacks
from grpo.language.compat.easydel import vInference
from grpo.language.config import LanguageConfig
from grpo.language.evaluate import EVALUATION, Evaluation
from grpo.language.model import output
from grpo.language.model.teacher import NoTeacher
from grpo.language.model.warmup import warm_start
from grpo.language.rewards.builtin import BUILTIN
from grpo.language.rewards.lookup import Unloaded
from grpo.language.samples import Message
from grpo.language.scoring.policy import LanguagePolicy
from grpo.language.source import PREFLIGHT, LanguageSource
from grpo.language.tasks import TASKS
from grpo.protocols import Ranks, State
from grpo.report import StepReport
from grpo.run import hub
from grpo.run.config import RunConfig
from grpo.run.folder import RunFolder
from grpo.run.progress import printable
from grpo.run.trainer import GRPOTrainer as RunTrainer
from grpo.seeding import mixed
from grpo.together import by_chief, same_weights
from grpo.trainer import Trainer

EPOCHS = 3
"""Passes over the data set unless the settings say otherwise; TRL and EasyDeL have the same."""
ENOUGH = 8
"""Prompts that pre-flight looks at."""


class Around:
    """What happens around each step: before the first a warm start and a look at the rewards; then a learning rate."""

    def __init__(self, parts: Parts, scheduler: Any, watched: Callable[[], bool]) -> None:
        """scheduler: a `LambdaLR` of the user's, or None. watched: whether anybody would read a note."""
        self._watched = watched
        self.total: int | None = None
        """Steps of the run, once it is known."""
        self.last: tuple[int, Mapping[str, float | None]] = (0, {})
        """The last step and its metrics, evaluations too, for the model's card."""
        self._parts, self._factor = parts, rate_of(parts.config, scheduler)
        self._rates = [group["lr"] for group in parts.optimizer.param_groups]
        self._looked = False
        self._rate: float | None = None
        self._first: dict[str, float | None] = {}

    def before(self, trainer: Trainer) -> None:
        """What the first step needs, then the learning rate of this one, from its number alone."""
        self._first = self._begin(trainer) if trainer.steps_done == 0 else {}
        factor = self._factor(trainer.steps_done, self.total)
        groups = [] if trainer.optimizer is None else trainer.optimizer.param_groups
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self._rate = float(groups[0]["lr"]) if groups else None

    def after(self, trainer: Trainer, report: StepReport) -> None:
        """Numbers of the room's own."""
        epoch = self._parts.source.epoch(report.step)
        report.metrics |= {"learning_rate": self._rate, "epoch": epoch} | self._first
        self.last = report.step, report.metrics

    def _begin(self, trainer: Trainer) -> dict[str, float | None]:
        """Learn from references where that was asked for, and try the rewards."""
        config, source, found = self._parts.config, self._parts.source, dict[str, float | None]()
        if self._watched() and (unneeded := config.not_needed):
            told = "; ".join(f"{name} ({why})" for name, why in unneeded.items())
            print(printable(f"note: accepted, and not needed here: {told}"))
        if config.eval_on_start:
            found |= {f"before/{name}": value for name, value in source.evaluate(0).items()}
        if config.warm_start_steps:
            warm_start(self._parts.policy, source.prompts, self._parts.tokens, config)
            same_weights(trainer.ranks, [trainer.policy.parameters()])  # on a GPU additions have no fixed order
            if trainer.reference is not None:
                trainer.reference.sync(trainer.policy.parameters(), 1.0)
            found |= {f"warm_start/{name}": value for name, value in source.evaluate(0).items()}
        if config.preflight and not self._looked:
            self._refuse_waste(self._everybodys(trainer.ranks))
        return found

    def _everybodys(self, ranks: Ranks) -> list[preflight.Finding]:
        """What the chief finds: a few completions need no sharing, and a judge that is paid is asked once."""
        self._looked = True
        told = by_chief(ranks, "pre-flight", lambda: State({"found": [asdict(x) for x in self.preflight()]}, {}))
        return [preflight.Finding(**found) for found in told.values["found"]]

    def _refuse_waste(self, findings: list[preflight.Finding]) -> None:
        text = preflight.report(findings)
        if any(finding.level == "problem" for finding in findings):
            raise ConfigError(f"pre-flight found what would waste the run:\n{text}\n(preflight=false goes on anyway)")
        for finding in findings if self._parts.source.ranks.chief else ():
            if finding.level == "warning":
                warnings.warn(f"{finding.what}; {finding.remedy}", stacklevel=5)
            elif self._watched():
                print(printable(f"note: {finding.what}" + (f"; {finding.remedy}" if finding.remedy else "")))

    def preflight(self) -> list[preflight.Finding]:
        """Try the rewards on references and a few completions; nothing that training depends on is moved."""
        self._looked = True
        config, source = self._parts.config, self._parts.source
        rows = source.prompts.first(ENOUGH)
        seeds = [mixed(config.seed, PREFLIGHT, row) for row in range(len(rows))]
        made = source.sample(rows, 1, config.sampling, seeds)
        return preflight.check(
            source.rewards,
            rows,
            made,
            max_completion_length=config.max_completion_length,
            tokenizer=self._parts.tokens.tokenizer,
            config=config,
        )


class GRPOTrainer(RunTrainer):
    """Prompts in, better answers out.

    model: a hub id, a folder, a .gguf file, or a loaded model. reward_funcs: one or several functions, names of
    built-in ones, `file.py:name`, or reward models. args (or arguments): a `GRPOConfig`. train_dataset: rows, a
    `datasets` one, a file or a hub id. tools: Python functions, or a `Toolbox` that says how calls are written.
    """

    source: LanguageSource
    policy: LanguagePolicy
    config: LanguageConfig
    task, always_kept = "language", True
    looked_at_with = ("view", "eval", "chat", "export")

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: LanguageConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] = (),
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        environment: Any = None,
        *,
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
            quantization_config, peft_config, tools, environment, ref_model, teacher_model,
        )  # fmt: skip
        parts = build(config, given)
        self.tokens, self.chat = parts.tokens, parts.chat
        self._own = self._callbacks = Callbacks(callbacks)
        self._around = Around(parts, optimizers[1], lambda: self.watched)
        super().__init__(
            parts.config,
            parts.policy,
            parts.reference,
            optimizer=parts.optimizer,
            source=parts.source,
            hooks=[self._around],
            teacher=parts.teacher,
            ranks=parts.ranks,
        )
        self.source.output = self.save_model

    # --- its runs ---------------------------------------------------------------------------------------------------

    @property
    def run_name(self) -> str:
        """The model's name, as a folder can be called."""
        return name_of(self.config)

    @property
    def evaluation(self) -> Callable[[int], Mapping[str, Any]] | None:
        """On held-out rows, where there are some."""
        return None if self.source.held_out is None else self.source.evaluate

    def cannot_evaluate(self) -> str:
        """What is missing."""
        return (
            "there are no held-out rows; give --eval-dataset (eval_dataset in Python), or --eval-split test where the "
            "data set has that split, or leave it out"
        )

    def planned(self, asked: Mapping[str, Any], kept: bool) -> RunConfig:
        """As the settings say, which hold a plan of their own."""
        return self.config.run.model_copy(update=dict(asked))

    def total_steps(self, how: RunConfig) -> int:
        """Steps of the run: as given, or so many passes over the data; three where nothing is said."""
        if how.steps is not None:
            return how.steps
        return math.ceil((how.num_train_epochs or EPOCHS) * self.source.epoch_steps())

    def schedule(self, steps: int) -> None:
        """Tell how many steps the run will have: schedules, reward functions and callbacks want to know."""
        self._around.total = self.source.max_steps = steps
        self._callbacks.begin(steps)

    def listening(self, callbacks: Sequence[Any]) -> Sequence[Callable[[StepReport], Any]]:
        """All are told in one place, after those of the constructor: they may be transformers' own kind."""
        self._callbacks = Callbacks([*self._own.all, *callbacks])
        return ()

    def stops(self, report: StepReport) -> bool:
        """Whether a callback ends the run."""
        return self._callbacks.step_done(report, self._around.total or report.step)

    def finish(self, reason: str, folder: Path | None) -> None:
        """Tell the callbacks; upload the model where that was asked for."""
        self._callbacks.end(self._around.total or 0)
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

    def evaluate(self, dataset: Any = None, samples: int | None = None, limit: int | None = None) -> Evaluation:
        """Accuracy, pass@k and rewards on held-out rows: `eval_dataset`, or the ones given here."""
        prompts = self.source.held_out
        if dataset is not None:
            own = isinstance(dataset, str) and dataset == self.config.dataset
            split = self.config.eval_split if own and self.config.eval_split else "train"
            split = "test" if isinstance(dataset, str) and dataset in TASKS else split
            prompts = prompts_of(self.config, self.chat, dataset, split, self.source.engine.context)
        if prompts is None:
            raise ConfigError("there are no held-out rows; give eval_dataset, or a data set to evaluate on")
        return self.source.judge_rows(prompts, samples or self.config.eval_samples, limit)

    def reply(self, messages: Sequence[Message], **sampling: Any) -> str:
        """What the model answers to a conversation; one without a chat template answers the last message alone."""
        prompt = self.source.prompts.prompt(list(messages) if self.chat.templated else messages[-1]["content"])
        seed = mixed(self.config.seed, EVALUATION, len(messages))
        drawn = replace(self.config.sampling, **sampling)
        return self.source.sample([prompt], 1, drawn, [seed])[0].text

    def generate(self, prompts: Sequence[str | Sequence[Message]], count: int = 1, **sampling: Any) -> list[list[str]]:
        """So many answers to each prompt, as the settings sample, or otherwise: temperature, top_p, max_tokens …"""
        rows = [self.source.prompts.prompt(prompt if isinstance(prompt, str) else list(prompt)) for prompt in prompts]
        seeds = [mixed(self.config.seed, EVALUATION, number) for number in range(len(rows) * count)]
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

    def push_to_hub(self, folder: str | Path | None = None) -> str:
        """Upload a saved model (it is written first where no folder is given); returns where it is."""
        path = self.save_model() if folder is None else Path(folder)
        if self.ranks.chief and not path.exists():
            raise ConfigError(f"{path}: the model was not written, so that it cannot be uploaded; see events.jsonl")
        repo = self.config.hub_model_id or self.name or self.config.run.name or self.run_name
        return hub.push(path, repo, self.config.hub_private) if self.ranks.chief else str(repo)

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


def make_trainer(config: LanguageConfig) -> GRPOTrainer:
    """The trainer of a configuration, as the command line makes it."""
    return GRPOTrainer(args=config)


def make_speaker(config: LanguageConfig) -> GRPOTrainer:
    """The same for a model that is only talked to or saved: rewards are named, none of their code is loaded."""
    rewards = [word if word.partition(":")[0] in BUILTIN else Unloaded(word) for word in config.rewards]
    teacher = NoTeacher() if config.recipe.teacher_coef else None
    return GRPOTrainer(args=config.but(rewards=()) if rewards else config, reward_funcs=rewards, teacher_model=teacher)


def rate_of(config: LanguageConfig, given: Any) -> Callable[[int, int | None], float]:
    """The factor on the learning rate at a step, given how many there will be."""
    if given is not None:
        lambdas = getattr(given, "lr_lambdas", None)
        if not lambdas:
            raise ConfigError("a scheduler must be a LambdaLR (transformers.get_scheduler), so that a run can resume")
        return lambda step, total: float(lambdas[0](step))
    if config.lr_schedule == "constant" and not config.warmup_steps and not config.warmup_ratio:
        return lambda step, total: 1.0
    from transformers import get_scheduler

    name = {"constant": "constant_with_warmup"}.get(config.lr_schedule, config.lr_schedule)
    dummy = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    def factor(step: int, total: int | None) -> float:
        needs = name != "constant_with_warmup"
        if total is None and (needs or config.warmup_ratio):
            raise ConfigError(f"lr_schedule={config.lr_schedule} needs to know the length of the run; call train()")
        warmup = config.warmup_steps or round(config.warmup_ratio * (total or 0))
        made = get_scheduler(name, dummy, num_warmup_steps=warmup, num_training_steps=total)
        return float(made.lr_lambdas[0](step))

    try:
        factor(0, 10)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"lr_schedule={config.lr_schedule}: {error}") from None
    return factor
