"""Around each step of a language model: numbers of its own; before the first a warm start and a look at the rewards.

And its learning rate: all of transformers' schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from grpo.agreement import by_chief
from grpo.config import ConfigError
from grpo.errors import warn
from grpo.language import preflight
from grpo.language.build import Parts
from grpo.language.comparing import learn_values
from grpo.language.config import LanguageConfig
from grpo.language.model.teacher import AveragedTeacher
from grpo.language.model.warmup import warm_start
from grpo.language.source import PREFLIGHT
from grpo.optimizers import SGD
from grpo.protocols import Ranks, State
from grpo.rates import Factor
from grpo.report import StepReport
from grpo.run.progress import printable
from grpo.seeding import mixed
from grpo.together import same_weights
from grpo.trainer import Trainer

ENOUGH = 8
"""Prompts that pre-flight looks at."""
NOT_BY_STEP = dict.fromkeys(
    ("reduce_lr_on_plateau", "greedy"), "follows what was measured, and a rate here follows from the step's number"
)
"""Schedules of transformers' that a run could not resume."""


def rate_of(config: LanguageConfig, given: Any) -> Factor:
    """The schedule that was handed over, or that the settings name."""
    if given is not None:
        lambdas = getattr(given, "lr_lambdas", None)
        if not lambdas:
            raise ConfigError("a scheduler must be a LambdaLR (transformers.get_scheduler), so that a run can resume")
        return lambda step, total: float(lambdas[0](step))
    if config.lr_schedule == "constant" and not config.warmup_steps and not config.warmup_ratio:
        return lambda step, total: 1.0
    if config.lr_schedule in NOT_BY_STEP:
        raise ConfigError(f"lr_schedule={config.lr_schedule} {NOT_BY_STEP[config.lr_schedule]}; use linear, cosine, …")
    from transformers import get_scheduler

    name = {"constant": "constant_with_warmup"}.get(config.lr_schedule, config.lr_schedule)
    dummy = SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)  # min_lr and lr_end are compared with it

    def factor(step: int, total: int | None) -> float:
        needs = name != "constant_with_warmup"
        if total is None and (needs or config.warmup_ratio):
            raise ConfigError(f"lr_schedule={config.lr_schedule} needs to know the length of the run; call train()")
        warmup = config.warmup_steps or round(config.warmup_ratio * (total or 0))
        made = get_scheduler(name, dummy, warmup, total, dict(config.lr_schedule_kwargs))
        return float(made.lr_lambdas[0](step))

    try:
        factor(0, 10)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"lr_schedule={config.lr_schedule}: {error}") from None
    return factor


class Around:
    """What happens around each step: before the first a warm start and a look at the rewards."""

    def __init__(self, parts: Parts, watched: Callable[[], bool]) -> None:
        """watched: whether anybody would read a note."""
        self._watched = watched
        self.last: tuple[int, Mapping[str, float | None]] = (0, {})
        """The last step and its metrics, evaluations too, for the model's card."""
        self._parts = parts
        self._looked = False
        self._first: dict[str, float | None] = {}

    def before(self, trainer: Trainer) -> None:
        """What the first step needs."""
        self._first = self._begin(trainer) if trainer.steps_done == 0 else {}

    def after(self, trainer: Trainer, report: StepReport) -> None:
        """Numbers of the room's own."""
        epoch = self._parts.source.epoch(report.step)
        report.metrics |= {"epoch": epoch} | self._first
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
            if isinstance(trainer.teacher, AveragedTeacher):
                trainer.teacher.average.begin(trainer.policy.parameters())
            found |= {f"warm_start/{name}": value for name, value in source.evaluate(0).items()}
        if config.preflight and not self._looked:
            self._refuse_waste(self._everybodys(trainer.ranks))
        if config.recipe.baseline == "optimal_value":
            learn_values(source)
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
                warn(f"{finding.what}; {finding.remedy}")
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
