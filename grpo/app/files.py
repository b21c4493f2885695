"""Reading settings files: safe YAML, errors with file, line and column."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn

import yaml

from grpo.config import ConfigError
from grpo.run.files import DEEPEST, FolderError, read_text

MAX_BYTES = 1_000_000
"""A settings file is a page; anything larger is a mistake or an attack."""


TAGS = {f"tag:yaml.org,2002:{kind}": kind for kind in ("null", "bool", "int", "float", "str", "seq", "map")}
"""What a value may be; dates, sets and bytes mean nothing to any setting."""


class _Loader(yaml.SafeLoader):
    """SafeLoader for settings alone: no aliases, of which a few nested ones grow to gigabytes, and nothing deep."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            _refuse("aliases are not allowed in settings", self.peek_event())  # type: ignore[no-untyped-call]
        if self._depth > DEEPEST:
            _refuse(f"nested deeper than {DEEPEST} levels", self.peek_event())  # type: ignore[no-untyped-call]
        self._depth += 1
        found = super().compose_node(parent, index)
        self._depth -= 1
        return found

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        if node.tag not in TAGS:
            _refuse(f"the tag {node.tag} is not allowed in settings; they are words, numbers, lists and blocks", node)
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):  # of a tag that does not fit
            _refuse(f"{node.value!s:.60} is no {TAGS[node.tag]}; leave the tag out, or put it in quotes", node)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                _refuse("a setting's name is a word, not a list or a block", key)
            if key.value in seen:
                _refuse(f"{key.value} is given twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _refuse(what: str, at: Any) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, what, at.start_mark)


# A date is text: no setting is one.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag in TAGS or tag.endswith(":merge")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# YAML 1.1 takes 1e6 for text, and only null for nothing; no schema mends that in the arguments of an environment.
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^None$"), ["N"])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]{1,2}$"), list("-+0123456789")
)


def read_settings(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        return parse_settings(read_text(path, MAX_BYTES), str(path))
    except FolderError as error:
        raise ConfigError(str(error)) from None


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
        raise ConfigError(f"{name}: {' '.join(str(error).split())}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: expected settings as `key: value`, found a {type(found).__name__}")
    return {str(key): value for key, value in found.items()}
