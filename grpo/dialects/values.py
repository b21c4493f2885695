"""Words of a file or a command line as the values they stand for, the same for every setting of every system."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

NOTHING = ("none", "null")
"""How nothing is written."""


def fitting(value: Any, kind: Any) -> Any:
    """The value that a word stands for where a setting of this kind can hold it: none is nothing, 1e6 a whole number.

    kind: the setting's annotation. Any other value comes back as it is.
    """
    kinds = _alternatives(kind)
    if isinstance(value, list | tuple):
        items = [item for one in kinds if get_origin(one) is tuple for item in get_args(one) if item is not ...]
        return type(value)(fitting(item, Union[tuple(items)]) for item in value) if items else value  # noqa: UP007
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    if word in NOTHING and type(None) in kinds and not _is_a_choice(word, kinds):
        return None
    if int in kinds and not {str, float} & {one for one in kinds if isinstance(one, type)}:
        return _whole(value)
    return value


def _whole(word: str) -> Any:
    """A whole number that is written with an exponent; anything else is left for the schema to judge."""
    try:
        number = float(word)
    except ValueError:
        return word
    return int(number) if number.is_integer() and "e" in word.lower() else word


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """What a setting may be: the members of a union, without what is said about them."""
    if get_origin(kind) is Annotated:
        return _alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(one for item in get_args(kind) for one in _alternatives(item))
    return (kind,)


def _is_a_choice(word: str, kinds: tuple[Any, ...]) -> bool:
    return any(get_origin(one) is Literal and word in get_args(one) for one in kinds)


class Bare(str):
    """The `true` of a flag that came without a value."""
