"""Small pictures to ask about."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image


def noise(seed: int, width: int = 24, height: int = 16) -> Any:
    """An image unlike any other."""
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def rows(count: int = 4, **sizes: int) -> list[dict[str, Any]]:
    """One image a row, in TRL's spelling."""
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    return [{"prompt": asked, "image": noise(i, **sizes), "answer": str(i)} for i in range(count)]
