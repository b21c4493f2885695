"""Token ids of a prompt with the pictures that some of them stand for: to everybody else a sequence of ids."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from grpo.errors import ConfigError

if TYPE_CHECKING:
    from grpo.language.pictures.processor import Pictures
    from grpo.language.pictures.reading import Picture


class PicturedIds(tuple[int, ...]):
    """A tuple of ids that knows its images."""

    shown: tuple[Picture, ...]
    by: Pictures
    """Who makes tensors of them."""

    def __new__(cls, ids: Iterable[int], shown: Sequence[Picture], by: Pictures) -> PicturedIds:
        """The same ids, and what they stand for."""
        made = super().__new__(cls, ids)
        made.shown, made.by = tuple(shown), by
        return made


def thumbnails(prompts: Sequence[Sequence[int]]) -> list[dict[str, bytes]]:
    """Of each prompt small PNG files of its images, named by what they show; made once for all tries of a prompt."""
    made = {id(ids): _thumbnails(ids) for ids in {id(ids): ids for ids in prompts}.values()}
    return [made[id(ids)] for ids in prompts]


def _thumbnails(ids: Sequence[int]) -> dict[str, bytes]:
    """Those that can still be read."""
    found = {}
    shown = ids.shown if isinstance(ids, PicturedIds) else ()
    for picture in shown:
        with contextlib.suppress(ConfigError):
            small = picture.thumbnail()
            found[f"image-{hashlib.sha256(small).hexdigest()[:16]}.png"] = small
    return found


def then(ids: Sequence[int], more: Sequence[int]) -> Sequence[int]:
    """The ids with others behind them, which show nothing."""
    together = [*ids, *more]
    return PicturedIds(together, ids.shown, ids.by) if isinstance(ids, PicturedIds) else together


def alike(ids: Sequence[int]) -> tuple[object, ...]:
    """What two prompts have in common that the model reads the same way: equal ids may show different images."""
    shown = tuple(map(id, ids.shown)) if isinstance(ids, PicturedIds) else ()
    return (tuple(ids), shown)
