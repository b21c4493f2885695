"""Names that are looked up when first used, so that importing a package loads none of its libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from grpo.errors import install


def lazily(
    package: str, homes: Mapping[str, str], extra: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package; homes: name → its module, or `module:what it is called there`.

    extra: what brings the libraries that these modules need.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, there = homes[name].partition(":")
        try:
            return getattr(import_module(module), there or name)
        except ModuleNotFoundError as error:
            if not extra or (error.name or "").partition(".")[0] == "grpo":
                raise
            needed = f"{package} needs {error.name}: {install(extra)}"
            raise ModuleNotFoundError(needed, name=error.name) from None

    def known() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return find, known
