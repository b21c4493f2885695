"""TRL's adaptive entropy bonus: its weight moves after each step, towards an entropy that was asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping

from grpo.language.config import LanguageConfig
from grpo.report import StepReport
from grpo.trainer import Trainer


class AdaptiveEntropy:
    """A hook around each step. What it remembers is part of the run's state, so that a resumed run goes on alike."""

    def __init__(self, config: LanguageConfig) -> None:
        self._config = config
        self.coef = float(config.recipe.entropy_coef)
        """The weight, as it was moved last."""
        self.entropy = math.inf
        """Of the last step; before the first the bonus does not count."""

    def before(self, trainer: Trainer) -> None:
        """The bonus counts where the policy has become too certain."""
        counts = self.entropy <= self._config.entropy_target
        trainer.recipe = trainer.recipe.but(entropy_coef=self.coef if counts else 0.0)

    def after(self, trainer: Trainer, report: StepReport) -> None:
        """Move the weight by what was measured."""
        found, config = report.metrics.get("entropy"), self._config
        if found is not None:
            self.entropy = found
            step = config.entropy_coef_delta if found <= config.entropy_target else -config.entropy_coef_delta
            self.coef = min(max(self.coef + step, config.entropy_coef_min), config.entropy_coef_max)
        report.metrics["entropy_coef"] = self.coef

    def state(self) -> dict[str, float | None]:
        """What a checkpoint keeps."""
        return {"coef": self.coef, "entropy": self.entropy if math.isfinite(self.entropy) else None}

    def load_state(self, values: Mapping[str, float | None]) -> None:
        """Go on from there."""
        known, found = values["coef"], values["entropy"]
        self.coef = self.coef if known is None else known
        self.entropy = math.inf if found is None else found
