"""An image-text model of our own learns where a shape is: GRPO makes more of what a weak start answers right."""

from pathlib import Path

import pytest
import yaml

from grpo.language import GRPOConfig, GRPOTrainer

PRESET = Path(__file__).parents[2] / "grpo" / "app" / "presets" / "shapes.yaml"


def drawn(seed: int, steps: int = 60) -> list[float]:
    """The share of right answers among those drawn, step by step; chance is a ninth."""
    preset = yaml.safe_load(PRESET.read_text())
    settings = {name: value for name, value in preset.items() if name not in ("description", "task", "run")}
    trainer = GRPOTrainer(args=GRPOConfig(seed=seed, preflight=False, reward_workers=1, **settings))
    try:
        trainer.schedule(steps)
        return [float(trainer.step()["rewards/exact/mean"]) for _ in range(steps)]
    finally:
        trainer.source.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pictures_are_answered_better(seed: int) -> None:
    right = drawn(seed)
    first, last = sum(right[:10]) / 10, sum(right[-10:]) / 10
    assert last > first + 0.08, (first, last)
