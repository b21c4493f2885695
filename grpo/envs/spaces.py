"""Reading Gymnasium spaces: what of an observation a network can use, and how it is laid out.

Observations of M members are a `Tree`: an array (M, …), or a dict of trees where the space is a Dict. A Tuple reads as
a Dict with the keys "0", "1", …; text, graphs and sequences are left out. Nothing here needs a neural library, so
the processes that only step environments stay light.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from grpo.envs.fleet import EnvError, Tree

Space: TypeAlias = gym.Space[Any]

_LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_CHANNELS = 16
"""More than this along an axis is a side of a picture, not a stack of frames or colours."""
_SIDE = 5
"""Fewer pixels along a side are a table of numbers."""
NATURE_SIDE = 36
"""From here on a picture is looked at in large steps, and one without a channel axis is taken for grey; below it is a
board."""


@dataclass(frozen=True)
class Numbers:
    """A part that is read as a vector: as it is, or one-hot where `choices` says how many values each code has."""

    path: tuple[str, ...]
    """Keys from the root of the observation; empty: the whole of it."""
    shape: tuple[int, ...]
    choices: tuple[int, ...] | None = None
    start: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Numbers it becomes."""
        return math.prod(self.shape) if self.choices is None else sum(self.choices)


@dataclass(frozen=True)
class Picture:
    """A part that is read by convolutions."""

    path: tuple[str, ...]
    frames: tuple[int, int, int, int]
    """Its shape with a leading stack axis: (K, H, W, C), or (K, C, H, W)."""
    channels_last: bool
    high: float
    """Its largest value, which becomes 1."""

    @property
    def size(self) -> tuple[int, int, int]:
        """(channels of all frames, height, width)."""
        stack, a, b, c = self.frames
        return (stack * c, a, b) if self.channels_last else (stack * a, b, c)

    @property
    def is_board(self) -> bool:
        """Whether it has cells with codes rather than pixels with colours."""
        return min(self.size[1:]) < NATURE_SIDE


@dataclass(frozen=True)
class Layout:
    """What a network reads of an observation: one vector of `size` numbers, and pictures."""

    numbers: tuple[Numbers, ...]
    pictures: tuple[Picture, ...]

    @property
    def size(self) -> int:
        """D, the length of the vector."""
        return sum(part.size for part in self.numbers)


def numeric(space: Space) -> Space | None:
    """The space without what a network cannot read, Tuples as Dicts; None: nothing is left."""
    if isinstance(space, _LEAVES):
        return space
    found = {key: kept for key, part in _parts(space) if (kept := numeric(part)) is not None}
    return spaces.Dict(found) if found else None


def is_image(space: Space) -> bool:
    """A uint8 or boolean Box that is a picture: channels first or last, alone or a stack of frames."""
    return _frames(space) is not None


def layout(space: Space) -> Layout:
    """How the numeric parts of a space are read; an error where there are none."""
    numbers: list[Numbers] = []
    pictures: list[Picture] = []
    _lay_out(space, (), numbers, pictures)
    found = Layout(tuple(numbers), tuple(pictures))
    if not found.size and not pictures:
        raise EnvError(f"observation space {space}: no network can read any of it; wrap the environment to give a Box")
    return found


def stack(observations: Sequence[Any], space: Space) -> Tree:
    """Single observations as one tree, a row each."""
    if not isinstance(space, _LEAVES):
        at = int if len(observations) and isinstance(observations[0], tuple) else str
        return {key: stack([one[at(key)] for one in observations], part) for key, part in _parts(space)}
    try:
        return np.array(observations, dtype=space.dtype).reshape(len(observations), *_shape(space))
    except (ValueError, TypeError) as error:
        shapes = sorted({np.shape(one) for one in observations})
        raise EnvError(f"observations of shape {shapes} do not fit the observation space {space}") from error


def as_rows(observation: Any, space: Space) -> tuple[Tree, bool]:
    """One observation, or several that stand in arrays already, as a tree with a row each; and whether it was one."""
    if not isinstance(space, _LEAVES):
        at = int if isinstance(observation, tuple) else str
        parts = {key: as_rows(observation[at(key)], part) for key, part in _parts(space)}
        return {key: tree for key, (tree, _) in parts.items()}, all(single for _, single in parts.values())
    shape, given = _shape(space), np.asarray(observation)
    if given.shape == shape:
        return given.astype(space.dtype)[None], True
    if given.shape[1:] != shape or given.ndim != len(shape) + 1:
        expected = f"expected {shape}, or (rows, …) of that"
        raise EnvError(f"an observation of shape {given.shape} does not fit the observation space {space}; {expected}")
    return given.astype(space.dtype), False


def zeros(space: Space, count: int) -> Tree:
    """`count` empty observations."""
    if isinstance(space, _LEAVES):
        return np.zeros((count, *_shape(space)), dtype=space.dtype)
    return {key: zeros(part, count) for key, part in _parts(space)}


def take(tree: Tree, index: Any) -> Tree:
    """These rows."""
    return {key: take(part, index) for key, part in tree.items()} if isinstance(tree, dict) else tree[index]


def put(tree: Tree, index: Any, values: Tree) -> None:
    """Write these rows, in place."""
    if isinstance(tree, dict):
        for key, part in tree.items():
            put(part, index, values[key])
    else:
        tree[index] = values


def each(tree: Tree, change: Callable[[Any], Any]) -> Tree:
    """`change` on every array."""
    return {key: each(part, change) for key, part in tree.items()} if isinstance(tree, dict) else change(tree)


def leaves(tree: Tree) -> list[Any]:
    """Every array, in order."""
    return [x for part in tree.values() for x in leaves(part)] if isinstance(tree, dict) else [tree]


def joined(trees: Sequence[Tree]) -> Tree:
    """Several trees as one, row after row."""
    if len(trees) == 1:
        return trees[0]
    if isinstance(trees[0], dict):
        return {key: joined([tree[key] for tree in trees]) for key in trees[0]}
    return np.concatenate(list(trees))


def leaf(tree: Tree, path: tuple[str, ...]) -> Any:
    """The array at a path."""
    for key in path:
        tree = tree[key]
    return tree


def flatten(tree: Tree, of: Layout) -> np.ndarray:
    """The vector part as (M, D) float32, codes one-hot; no copy where it is that already."""
    rows = []
    for part in of.numbers:
        array = leaf(tree, part.path)
        flat = array.reshape(len(array), math.prod(part.shape)).astype(np.float32, copy=False)
        if part.choices is None:
            rows.append(flat)
        else:
            codes = zip(part.choices, part.start, strict=True)
            rows += [flat[:, i, None] == np.arange(first, first + n) for i, (n, first) in enumerate(codes)]
    return rows[0] if len(rows) == 1 and part.choices is None else np.concatenate(rows, axis=1, dtype=np.float32)


def bounds(space: Space) -> tuple[Any, Any]:
    """Lowest and highest values that make sense. Floats may leave their box, as many environments clip them."""
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, spaces.Box):
        if np.issubdtype(space.dtype, np.floating):
            return np.finfo(space.dtype).min, np.finfo(space.dtype).max
        return space.low, space.high
    return 0, 1


def _parts(space: Space) -> list[tuple[str, Space]]:
    """Named sub-spaces that can be used."""
    named: list[tuple[str, Space]] = []
    if isinstance(space, spaces.Dict):
        named = list(space.spaces.items())
    elif isinstance(space, spaces.Tuple):
        named = [(str(at), part) for at, part in enumerate(space.spaces)]
    return [(key, part) for key, part in named if isinstance(part, _LEAVES) or _parts(part)]


def _shape(space: Space) -> tuple[int, ...]:
    return tuple(space.shape or ())


def _lay_out(space: Space, path: tuple[str, ...], numbers: list[Numbers], pictures: list[Picture]) -> None:
    shape = _shape(space) if isinstance(space, _LEAVES) else ()
    if isinstance(space, spaces.Discrete):
        numbers.append(Numbers(path, shape, (int(space.n),), (int(space.start),)))
    elif isinstance(space, spaces.MultiDiscrete):
        start = tuple(int(first) for first in np.ravel(space.start))
        numbers.append(Numbers(path, shape, tuple(int(n) for n in np.ravel(space.nvec)), start))
    elif (frames := _frames(space)) is not None:
        pictures.append(Picture(path, *frames, high=float(space.high.max()) or 1.0))  # type: ignore[attr-defined]
    elif isinstance(space, _LEAVES):
        numbers.append(Numbers(path, shape))
    else:
        for key, part in _parts(space):
            _lay_out(part, (*path, key), numbers, pictures)


def _frames(space: Space) -> tuple[tuple[int, int, int, int], bool] | None:
    """The shape as a stack of frames and whether their channels come last; None: not a picture."""
    if not isinstance(space, spaces.Box) or space.dtype not in (np.uint8, np.bool_):
        return None
    shape = space.shape
    if len(shape) == 2 and min(shape) >= NATURE_SIDE:
        return (1, *shape, 1), True
    if len(shape) not in (3, 4):
        return None
    k, a, b, c = shape if len(shape) == 4 else (1, *shape)
    if c <= min(a, _CHANNELS) and min(a, b) >= _SIDE:
        return (k, a, b, c), True
    if a <= _CHANNELS and min(b, c) >= _SIDE:
        return (k, a, b, c), False
    return None
