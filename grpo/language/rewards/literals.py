"""What a program wrote as a literal, read so that the reading cannot be made to take long.

A set or dict compares each key with all before it that have its hash: who chooses numbers well can make a few thousand
of them take minutes, in C, where no time limit reaches.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from typing import Any

MOST_ALIKE = 100
"""Keys of one hash."""


def literal(text: str) -> Any:
    """The value; ValueError, or another Exception, where it is none."""
    return _value(ast.parse(text, mode="eval").body)


def spread(keys: Iterable[Any]) -> list[Any]:
    """The keys of a set or dict; ValueError where their hashes were made to collide."""
    found = list(keys)
    if found and Counter(map(hash, found)).most_common(1)[0][1] > MOST_ALIKE:
        raise ValueError("keys whose hashes collide")
    return found


def _value(node: ast.expr) -> Any:
    match node:
        case ast.List():
            return list(map(_value, node.elts))
        case ast.Tuple():
            return tuple(map(_value, node.elts))
        case ast.Set():
            return set(spread(map(_value, node.elts)))
        case ast.Dict():
            keys = spread(_value(key) for key in node.keys if key is not None)
            return dict(zip(keys, map(_value, node.values), strict=True))
        case ast.Call(func=ast.Name(id="set"), args=[], keywords=[]):
            return set()
    return ast.literal_eval(node)
