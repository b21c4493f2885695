"""An image-text model of our own learns where a shape is: from hardly better than chance to nearly always."""

from pathlib import Path

import pytest
import yaml

from grpo.language import GRPOConfig, GRPOTrainer

PRESET = Path(__file__).parents[2] / "grpo" / "app" / "presets" / "shapes.yaml"


def learned(seed: int) -> tuple[float, float]:
    """The share of right answers among those drawn at first, and among greedy ones at last; chance is a ninth."""
    preset = yaml.safe_load(PRESET.read_text())
    steps, named = preset["run"]["steps"], {"seed": seed, "preflight": False, "reward_workers": 1}
    settings = {name: value for name, value in preset.items() if name not in ("description", "task", "run")}
    trainer = GRPOTrainer(args=GRPOConfig(**settings | named))
    try:
        trainer.schedule(steps)
        drawn = [float(trainer.step()["rewards/exact/mean"]) for _ in range(steps)]
        return drawn[0], float(trainer.evaluate().metrics()["accuracy"] or 0.0)
    finally:
        trainer.source.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pictures_are_answered_right(seed: int) -> None:
    first, last = learned(seed)
    assert first < 0.5 and last >= 0.9, (first, last)
