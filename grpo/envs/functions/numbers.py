"""Where compiled programs are kept between processes: JAX's persistent cache, in the user's cache folder."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

# Videos are written by another program, which replaces the forked process at once.
warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)


WORTH = 0.2
"""Seconds of compiling that are worth a file."""


def folder() -> Path:
    """The user's own: XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anygrpo" / "jax"


@contextmanager
def numbers() -> Iterator[None]:
    """Environments are reckoned in float64, as Gymnasium's are; whatever else the process does with JAX is left alone.

    A cache that the user has chosen (JAX_COMPILATION_CACHE_DIR, or in a script) stays.
    """
    settings: Any = jax.config
    if settings.jax_compilation_cache_dir is None:
        settings.update("jax_compilation_cache_dir", str(folder()))
        settings.update("jax_persistent_cache_min_compile_time_secs", WORTH)
    with jax.enable_x64(True):
        yield


@contextmanager
def whole_programs() -> Iterator[None]:
    """The same for programs that a start consists of: each is kept, however little time it took to compile."""
    with numbers():
        settings: Any = jax.config
        name = "jax_persistent_cache_min_compile_time_secs"
        before = getattr(settings, name)
        settings.update(name, 0.0)
        try:
            yield
        finally:
            settings.update(name, before)
