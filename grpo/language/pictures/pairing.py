"""Which image belongs to which place of a prompt: `{"type": "image"}` parts, and the columns `image` and `images`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.errors import ConfigError
from grpo.language.pictures.reading import DATA, Picture

if TYPE_CHECKING:
    from grpo.language.samples import Message

COLUMNS = ("images", "image")
"""Where a row's images are looked for unless the settings name another column."""
HELD = ("image", "url", "path", "bytes", "base64", "image_url")
"""Keys of a part under which it may hold its own image."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Endings by which a text is known as an image's path, where nobody said so."""
MARK = {"type": "image"}
"""A part as templates take it: where an image stands, not which one."""


def column_of(names: Sequence[str], asked: str | None, place: str) -> str | None:
    """The column that holds images; None: there is none."""
    if asked is not None and asked not in names:
        raise ConfigError(f"{place}: no column {asked}; found {', '.join(names)} — set image_column to one of them")
    return asked or next((name for name in COLUMNS if name in names), None)


def holds_images(held: Any) -> bool:
    """Whether what a column holds looks like an image, or several, and not like text that is merely called so."""
    given = next(iter(held), None) if isinstance(held, list | tuple) else held
    if isinstance(given, str):
        return bool(DATA.match(given)) or Path(given).suffix.lower() in SUFFIXES
    return (
        isinstance(given, bytes | bytearray | Path)
        or hasattr(given, "convert")
        or (isinstance(given, Mapping) and bool({"bytes", "path"} & {*given}))
    )


def undecoded(rows: Any, column: str | None) -> Any:
    """The rows of a `datasets.Dataset` with their images as bytes: to measure them, none needs decoding."""
    features = getattr(rows, "features", None)
    if column is None or not features or not hasattr(rows, "cast_column"):
        return rows
    import datasets

    bare, kind = datasets.Image(decode=False), features[column]
    if isinstance(kind, datasets.Image):
        return rows.cast_column(column, bare)
    if isinstance(getattr(kind, "feature", None), datasets.Image):
        return rows.cast_column(column, datasets.List(bare))
    return rows


def is_image(part: Any) -> bool:
    """Whether a part of a message stands for an image."""
    return isinstance(part, Mapping) and (part.get("type") in ("image", "image_url") or "image" in part)


def paired(
    prompt: str | Sequence[Message], held: Any, place: str, base: str | None, max_pixels: int | None
) -> tuple[str | list[Message], list[Picture]]:
    """The prompt with bare marks where its images stand, and the images in that order.

    held: what the row's column has. Where no message says where they stand, they come first in the user's first one.
    """
    given = [] if held is None else list(held) if isinstance(held, list | tuple) else [held]
    column = iter([Picture(one, place, base, max_pixels) for one in given])
    if isinstance(prompt, str):
        return prompt, list(column)
    shown: list[Picture] = []
    messages = []
    for message in prompt:
        content = message.get("content")
        if isinstance(content, list):
            content = [_marked(part, column, shown, place, base, max_pixels) for part in content]
        messages.append({**message, "content": content})
    rest = list(column)
    if rest and not shown:
        first = next((i for i, m in enumerate(messages) if m.get("role") == "user"), None)
        if first is None:
            raise ConfigError(f"{place}: there are images and no user message to show them in")
        messages[first]["content"] = [*[dict(MARK) for _ in rest], *_parts(messages[first]["content"])]
        return messages, rest
    if rest:
        raise ConfigError(
            f'{place}: {len(given)} images for {len(given) - len(rest)} {{"type": "image"}} parts; write one for each'
        )
    return messages, shown


def as_parts(message: Message) -> Message:
    """The message with its content as a list of parts, as templates of image-text models take it."""
    return {**message, "content": _parts(message["content"])} if "content" in message else message


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())


def _marked(
    part: Any, column: Iterator[Picture], shown: list[Picture], place: str, base: str | None, max_pixels: int | None
) -> Any:
    """The part as templates take it; the image that belongs to it goes to `shown`."""
    if not is_image(part):
        return part
    own = next((part[key] for key in HELD if part.get(key) is not None), None)
    own = own.get("url") if isinstance(own, Mapping) and "url" in own else own
    picture = next(column, None) if own is None else Picture(own, place, base, max_pixels)
    if picture is None:
        raise ConfigError(f'{place}: more {{"type": "image"}} parts than images; give each its own, or fill the column')
    shown.append(picture)
    return dict(MARK)
