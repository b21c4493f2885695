"""What a run of the world model asks of the whole process: whoever begins one calls it, nobody who makes a model."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

import torch

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""What glibc's malloc.h calls them."""


def prepare(device: torch.device, precision: str) -> None:
    """Memory that is freed stays here; on a CUDA device float32 products leave their last bits out, if they may."""
    keep_freed()
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"


@cache
def keep_freed() -> bool:
    """Let later operations of this process have what earlier ones freed; whether the C library can be told so.

    It gives large blocks back to the system as soon as they are freed and asks for them again at the next operation;
    the system then clears them page by page. With pictures that is half the time of an update.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
