"""`examples/preferences.py` finds every target from noisy comparisons, three seeds."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "examples" / "preferences.py"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_targets_are_found(seed):
    spec = importlib.util.spec_from_file_location("preferences", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    learned = module.main(steps=60, seed=seed)
    assert all(abs(learned[name] - target) <= 1 for name, target in module.TARGETS.items()), learned
