"""Functions through torch.compile: as they are where that fails, with a warning; a run never ends for want of speed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from grpo.errors import line, warn


def wanted(asked: bool | None, device: torch.device) -> bool:
    """Whether to compile; where nobody said, on CUDA devices, for which it writes Triton."""
    return device.type == "cuda" and find_spec("triton") is not None if asked is None else asked


class Compiled:
    """`function`, compiled for the shapes it meets; `instead` is called if that fails, by default the same."""

    def __init__(self, function: Callable[..., Any], instead: Callable[..., Any] | None = None) -> None:
        self._function, self._instead = function, instead or function
        self._run: Callable[..., Any] | None = None

    def __call__(self, *given: Any) -> Any:
        """What it gives."""
        try:
            if self._run is None:  # there are Pythons that torch.compile refuses
                self._run = torch.compile(self._function, dynamic=False)
            return self._run(*given)
        except torch.OutOfMemoryError:  # no compiler's fault, and part of the work may be done already
            raise
        except Exception as error:  # compilers fail in many ways
            if self._run is self._instead:
                raise
            warn(f"goes on without torch.compile, which failed: {line(error)}")
            self._run = self._instead
            return self._run(*given)
