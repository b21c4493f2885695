"""Settings in blocks: `model: {lora_rank: 16}` and `model.lora_rank` say the same as `lora_rank`.

A room's settings class has a table `blocks`: block → names. A block may be called like a setting (`model`): what is
given for it is then a block where it is a mapping, and the setting's value where it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from grpo.dialects import Spelling, key_of
from grpo.errors import ConfigError, nearest

Blocks = Mapping[str, tuple[str, ...]]

Leaf = Callable[[str, Any], Any]
"""Reads a value that is given by a path into a setting that is a mapping itself: nobody else knows its type."""

DIALECT_BLOCKS = ("algorithm", "run")
"""Blocks that are read elsewhere: one speaks a dialect of its own, the other is no part of what is learned."""


def as_it_is(key: str, value: Any) -> Any:
    """A value that has its type already."""
    return value


def extended(blocks: Blocks, own: Blocks) -> dict[str, tuple[str, ...]]:
    """A room's blocks before those that every room has; a name that the room puts elsewhere is there alone."""
    moved = {name for names in own.values() for name in names}
    rest = {block: tuple(name for name in names if name not in moved) for block, names in blocks.items()}
    found = {block: (*names, *rest.pop(block, ())) for block, names in own.items()}
    return {block: names for block, names in (found | rest).items() if names}


def block_of(blocks: Blocks) -> dict[str, str]:
    """Setting → its block."""
    return {name: block for block, names in blocks.items() for name in names}


def unfolded(
    settings: Mapping[str, Any],
    blocks: Blocks,
    fields: Collection[str],
    known: Mapping[str, Spelling],
    leaf: Leaf = as_it_is,
) -> dict[str, Any]:
    """Settings without blocks.

    fields: our settings' names; known: foreign words, which stand in the block of what they become.
    """
    found: dict[str, Any] = {}
    given_as: dict[str, str] = {}

    def put(name: str, value: Any, key: str) -> None:
        if name in found and found[name] != value:
            raise ConfigError(f"{key} and {given_as[name]} both set {name}; keep one of them")
        found[name], given_as[name] = value, key

    for key, value in settings.items():
        head, dot, rest = key.partition(".")
        head = key_of(head)
        if head in blocks and head not in DIALECT_BLOCKS and (dot or isinstance(value, Mapping) or head not in fields):
            inside = {rest: value} if dot else value
            if not isinstance(inside, Mapping):
                example = f"{head}.{blocks[head][0]}"
                raise ConfigError(f"{head} is a block of settings, {example} and others; it has no value of its own")
            for name, item in unfolded(inside, {}, fields, known, leaf).items():
                _expect_in(head, key_of(name), blocks, known)
                put(name, item, f"{head}.{name}")
        elif dot:
            before = found.get(head, {})
            if not isinstance(before, Mapping):
                raise ConfigError(f"{key}: {head} is a value, not a block")
            found[head], given_as[head] = _set(before, rest, leaf(key, value)), head
        else:
            put(key, value, key)
    return found


def _set(mapping: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The mapping with one more value, at a path with dots."""
    head, dot, rest = path.partition(".")
    inner = mapping.get(head, {})
    return {**mapping, head: _set(inner if isinstance(inner, Mapping) else {}, rest, value) if dot else value}


def _expect_in(block: str, name: str, blocks: Blocks, known: Mapping[str, Spelling]) -> None:
    """Make sure that a setting, or what a foreign word becomes, belongs to the block it stands in."""
    homes = block_of(blocks)
    spelling = known.get(name)
    names = [name] if spelling is None else [one.strip() for one in spelling.becomes.split(",") if one.strip()]
    if not names or any(homes.get(one) == block for one in names):
        return
    home = next((homes[one] for one in names if one in homes), None)
    if home is not None:
        raise ConfigError(f"{name} is no setting of the block {block}; it is {home}.{name}")
    words = [f"{block}.{one}" for one in blocks[block]]
    raise ConfigError(f"unknown setting '{block}.{name}'{nearest(f'{block}.{name}', words)}")
