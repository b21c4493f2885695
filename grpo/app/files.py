"""Reading settings files: safe YAML, errors with file, line and column."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from grpo.config import ConfigError

MAX_BYTES = 1_000_000
"""A settings file is a page; anything larger is a mistake or an attack."""


class _Loader(yaml.SafeLoader):
    """SafeLoader without aliases: a few nested ones grow to gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "aliases are not allowed in settings", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 takes 1e6 for text, and only null for nothing; no schema mends that in the arguments of an environment.
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^None$"), ["N"])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]{1,2}$"), list("-+0123456789")
)


def read_settings(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} has more than {MAX_BYTES:,} bytes; that is not a settings file")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    return parse_settings(text, str(path))


def parse_settings(text: str, name: str) -> dict[str, Any]:
    """The mapping in YAML text; `name` is what errors call it."""
    try:
        loader = _Loader(text)  # a SafeLoader: tags that would build objects are refused
        found = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError(f"{place}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: expected settings as `key: value`, found a {type(found).__name__}")
    return {str(key): value for key, value in found.items()}
