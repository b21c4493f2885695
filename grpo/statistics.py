"""95 % intervals of a mean, the same every time they are asked for."""

from __future__ import annotations

import numpy as np

RESAMPLES = 2000
Z = 1.959964
"""97.5 % of a standard normal lie below."""


def bootstrap(value_M: np.ndarray, share: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap of the mean."""
    random = np.random.default_rng(0)
    means = value_M[random.integers(0, len(value_M), (RESAMPLES, len(value_M)))].mean(1)
    tail = 50 * (1 - share)
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)


def wilson(value_M: np.ndarray, z: float = Z) -> tuple[float, float]:
    """Wilson's interval of a share of yes and no, which 20 of 20 does not shrink to a point."""
    count, share = len(value_M), float(value_M.mean())
    middle, spread = share + z * z / (2 * count), z * np.sqrt(share * (1 - share) / count + z * z / (4 * count**2))
    low, high = (middle - spread) / (1 + z * z / count), (middle + spread) / (1 + z * z / count)
    return max(float(low), 0.0), min(float(high), 1.0)
