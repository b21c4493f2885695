"""A data set as prompts: rendered, measured, and handed out in an order that follows from (seed, step).

rows.py      where rows come from: files, folders, the hub
columns.py   what their columns mean
stream.py    those that can only be read in order; they alone have a position to keep
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from grpo.errors import ConfigError, warn
from grpo.language.data.chat import Chat
from grpo.language.data.columns import ENOUGH, Columns
from grpo.language.data.rows import Row, Rows, load, read_rows
from grpo.language.data.stream import Position, Stream
from grpo.language.pictures.ids import PicturedIds
from grpo.language.pictures.pairing import column_of, holds_images, paired, undecoded
from grpo.language.pictures.reading import Picture
from grpo.language.samples import Prompt
from grpo.seeding import generator

__all__ = ["Prompts", "Rows", "load", "read_rows"]

BUFFER = 1_000
"""Rows of a stream among which the next is drawn."""
PROGRESS_FROM = 2_000
"""Rows from which on tokenising takes long enough to be watched."""
TOGETHER = 512
"""Rows whose texts are made tokens in one call."""
PEEK = 4
"""Rows of a stream that its fingerprint is made of."""


class Prompts:
    """Rows of a list, a `datasets.Dataset` or a stream (`datasets.IterableDataset`) as prompts.

    Every row is rendered beforehand, so that what is wrong with one, or too long, is known before training; a stream's
    rows as they come. Tokens are not kept: a prompt is rendered again when its turn comes. `num_proc`: processes that
    render beforehand, for a `datasets.Dataset`.
    """

    def __init__(
        self,
        rows: Any,
        chat: Chat,
        *,
        prompt_column: str | None = None,
        answer_column: str | None = None,
        answer_after: str | None = None,
        prompt_template: str | None = None,
        max_length: int | None = None,
        context: float = math.inf,
        overlong: Literal["drop", "truncate", "error"] = "drop",
        shuffle: bool = True,
        seed: int = 0,
        num_proc: int | None = None,
        origin: str = "",
        image_column: str | None = None,
    ) -> None:
        self._rows, self._chat, self._overlong = rows, chat, overlong
        room = context - 1  # the model has to say something, too
        self._limit: int | None = max_length
        self._limited_by = f"max_prompt_length={max_length}"
        if room < (max_length or math.inf):
            self._limit, self._limited_by = (
                int(room),
                f"what the model's context of {context:.0f} tokens leaves room for",
            )
        self._shuffle, self._seed, self._origin = shuffle, seed, origin
        self._orders: dict[int, np.ndarray[Any, Any]] = {}
        streamed = hasattr(rows, "set_epoch") and not hasattr(rows, "__len__")
        known: Any = list(islice(iter(rows), PEEK)) if streamed else _sequence(rows)
        if len(known) == 0:
            raise ConfigError(f"{origin or 'the data set'} has no rows")

        self.columns = self._names(known)
        """Of the rows, in the order they are met."""
        name = origin or getattr(rows, "origin", "the data set")
        given = (prompt_column, answer_column, answer_after, prompt_template)
        columns = Columns.choose(self.columns, name, *given)
        if chat.pictures is not None:
            folder = str(Path(rows.origin).parent) if isinstance(rows, Rows) else None
            columns = replace(columns, images=column_of(self.columns, image_column, name), pictured=True, folder=folder)
        elif image_column is not None:
            raise ConfigError("image_column: the model reads text alone; name an image-text model, or leave it out")
        else:
            _tell_of_images(known, column_of(self.columns, None, name), name)
        known = undecoded(known, columns.images)
        self._columns = columns.seen([known[i] for i in range(min(len(known), ENOUGH))], name)
        if streamed:
            ordered = rows.shuffle(seed=seed, buffer_size=BUFFER) if shuffle else rows
            self._stream: Stream | None = Stream(ordered, self._streamed)
            self._kept_P, digests = np.arange(0), [_digest(row) for row in known]
        else:
            self._stream = None
            self._kept_P, digests = self._measure(known, num_proc)
        self.fingerprint = self._print(digests, self._columns)
        """Of the rows' content, of what their columns mean and of which take part; of a stream, of its first rows."""
        self._fingerprint_whole = self._print(digests, self._columns.whole) if self._columns.found else None

    # --- prompts ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Prompts that take part."""
        if self._stream is not None:
            raise TypeError("a stream has no length")
        return len(self._kept_P)

    def __getitem__(self, i: int) -> Prompt:
        """Prompt i of those that take part, in the order of the rows."""
        if self._stream is not None:
            raise TypeError("a stream can only be read in order: use batch or first")
        number = int(self._kept_P[i])
        return self._prompt(self._rows[number], number, self._place(number), self._columns)

    def prompt(self, start: Any) -> Prompt:
        """A prompt of what a caller has: one of ours, its number, a row, a text or a list of messages."""
        if isinstance(start, Prompt):
            return start
        if isinstance(start, int):
            return self[start]
        row = dict(start) if isinstance(start, Mapping) else {"prompt": start}
        own = "prompt" not in row or self._columns.wanted <= row.keys()
        return self._prompt(row, -1, "the given prompt", self._columns if own else Columns(tuple(row)))

    def first(self, count: int | None = None) -> list[Prompt]:
        """The first prompts in the order of the rows; None: all."""
        if self._stream is not None:
            return self._stream.first(count)
        return [self[i] for i in range(len(self))[:count]]

    def batch(self, step: int, size: int) -> list[Prompt]:
        """The prompts of a step: the same ones whenever it is asked for."""
        if self._stream is not None:
            return self._stream.batch(step * size, size)
        count = len(self)
        if count < size and not self._orders:
            warn(f"{count} prompts for {size} in a step: some come more than once in it")
        places = [divmod(place, count) for place in range(step * size, (step + 1) * size)]
        return [self[self._order(epoch)[i]] for epoch, i in places]

    @property
    def streamed(self) -> bool:
        """Whether they can only be read in order."""
        return self._stream is not None

    @property
    def told(self) -> list[str]:
        """Columns by the names under which rewards, and a teacher, are told of them."""
        return self._columns.told

    def without(self, names: Collection[str]) -> tuple[str, str] | None:
        """Where the first row is in which one of these columns is empty, and which; of a stream nothing is known."""
        for number in () if self._stream is not None or not names else self._kept_P.tolist():
            row = self._columns.rest_of(self._rows[number], self._place(number))
            for name in names:
                if row.get(name) in (None, ""):
                    return self._place(number), name
        return None

    def epoch_steps(self, size: int) -> float:
        """Steps of one pass over the data."""
        if self._stream is not None:
            raise ConfigError(
                "a stream has no known length, so that no epoch can be counted; say how long to train with max_steps "
                "(run.steps)"
            )
        return len(self) / size

    @property
    def counts(self) -> dict[str, int]:
        """Prompts over the limit: rows left out, rows cut; of a stream, so far."""
        found = self._found if self._stream is None else self._stream.position
        return {"dropped": found.dropped, "truncated": found.truncated}

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep: nothing, but for a stream how far it has been read."""
        return {} if self._stream is None else {"stream": asdict(self._stream.position)}

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Go on from there."""
        if self._stream is not None:
            self._stream.load(Position(**values["stream"]))

    def goes_on(self, fingerprint: str) -> bool:
        """Whether a run that began with this fingerprint can go on with these rows.

        One that began before a mark was looked for goes on with all of the text as the answer.
        """
        if fingerprint == self._fingerprint_whole:
            warn("this run began with all of the text as the answer and goes on so")
            self.take_whole()
        return fingerprint == self.fingerprint

    def take_whole(self) -> None:
        """All of the text is the answer, where a mark in it was found and not named."""
        if self._fingerprint_whole is not None:
            self._columns, self.fingerprint = self._columns.whole, self._fingerprint_whole
            self._fingerprint_whole = None

    def _print(self, digests: list[str], columns: Columns) -> str:
        told = json.dumps([columns.meaning, self._kept_P.tolist()])
        return hashlib.sha256("".join([*digests, told]).encode()).hexdigest()

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        """Prompt numbers in the order of an epoch."""
        if epoch not in self._orders:
            while len(self._orders) > 1:  # a batch may reach into the next epoch
                del self._orders[next(iter(self._orders))]
            random = generator(self._seed, epoch)
            self._orders[epoch] = random.permutation(len(self)) if self._shuffle else np.arange(len(self))
        return self._orders[epoch]

    # --- rows -------------------------------------------------------------------------------------------------------

    def _names(self, rows: Any) -> list[str]:
        if names := getattr(self._rows, "column_names", None):
            return list(names)
        for i, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise ConfigError(f"{self._place(i)} is of type {type(row).__name__}; a row is a dict of columns")
        return list(dict.fromkeys(name for row in rows for name in row))

    def _place(self, number: int) -> str:
        return self._rows.place(number) if isinstance(self._rows, Rows) else f"{self._origin} row {number}".strip()

    def _prompt(self, row: Row, number: int, place: str, columns: Columns) -> Prompt:
        ids, text, messages = _rendered(row, place, self._chat, columns)
        over = self._limit is not None and len(ids) > self._limit
        if over and self._overlong == "truncate":
            if isinstance(ids, PicturedIds):
                raise ConfigError(
                    f"{place}: the prompt has {len(ids)} tokens, over {self._limited_by}, and one with images cannot "
                    "be cut; raise that, lower max_pixels, or set overlong_prompts=drop"
                )
            ids = ids[len(ids) - (self._limit or 0) :]
            return Prompt(number, ids, self._chat.tokenizer.decode(ids), messages, columns.rest_of(row, place), True)
        return Prompt(number, ids, text, messages, columns.rest_of(row, place))

    def _streamed(self, row: Row, number: int) -> Prompt | None:
        """A row of the stream; None: it is too long."""
        prompt = self._prompt(row, number, self._place(number), self._columns)
        return prompt if prompt.truncated or self._fits(len(prompt.ids), number) else None

    def _fits(self, length: int, number: int) -> bool:
        """Whether a prompt is within the limit; one that must be is refused here."""
        fits = self._limit is None or length <= self._limit
        if not fits and self._overlong == "error":
            raise ConfigError(
                f"{self._place(number)}: the prompt has {length} tokens, over {self._limited_by}; raise that, or set "
                "overlong_prompts to drop or truncate"
            )
        return fits

    def _measure(self, rows: Any, num_proc: int | None) -> tuple[np.ndarray[Any, Any], list[str]]:
        """Render every row once: the numbers of those that take part, and the digest of each."""
        if num_proc and hasattr(rows, "map"):
            place, names = f"{self._origin} row".strip(), rows.column_names
            one = partial(_measured, chat=self._chat, columns=self._columns, place=place)
            found = rows.map(one, with_indices=True, num_proc=num_proc, remove_columns=names, desc="tokenising")
            length_N, digests, quotes_N = np.array(found["length"]), list(found["digest"]), np.array(found["quotes"])
        else:
            each = list(_all_measured(_watched(rows), self._place, self._chat, self._columns))
            length_N, digests = np.array([row["length"] for row in each]), [row["digest"] for row in each]
            quotes_N = np.array([row["quotes"] for row in each])
        if quotes_N.any():
            warn(
                f"{quotes_N.sum()} of {len(quotes_N)} prompts hold the text of the tokenizer's control tokens (the "
                f"first: {self._place(int(quotes_N.argmax()))}); it is read as text",
            )

        fits_N = np.array([self._fits(length, i) for i, length in enumerate(length_N.tolist())])
        over, cut = int((~fits_N).sum()), self._overlong == "truncate"
        if over == len(fits_N) and not cut:
            worst = int(length_N.argmax())
            raise ConfigError(
                f"all {over} prompts are over {self._limited_by}: {length_N[worst]} tokens in the longest "
                f"({self._place(worst)}), the shortest {length_N.min()}; raise it, or set overlong_prompts=truncate"
            )
        self._found = Position(truncated=over) if cut else Position(dropped=over)
        kept_P = np.arange(len(fits_N)) if cut else fits_N.nonzero()[0]
        if over:
            done = "cut at their beginning" if cut else "left out"
            warn(
                f"{over} of {len(fits_N)} prompts are over {self._limited_by} and are {done} (the first: "
                f"{self._place(int(fits_N.argmin()))}); raise that, or see overlong_prompts",
            )
        return kept_P, digests


def _sequence(rows: Any) -> Any:
    """Rows that can be counted and asked for by number."""
    if isinstance(rows, Mapping):
        raise ConfigError(f"the data set has the splits {', '.join(map(str, rows))}; pass one of them")
    if isinstance(rows, str) or not (hasattr(rows, "__getitem__") and hasattr(rows, "__len__")):
        raise ConfigError(f"rows are a list of dicts or a data set of `datasets`, not of type {type(rows).__name__}")
    return rows


def _tell_of_images(rows: Any, column: str | None, name: str) -> None:
    """Say that a model which reads text alone sees nothing of the images that rows hold."""
    if column is not None and any(holds_images(rows[i].get(column)) for i in range(min(len(rows), ENOUGH))):
        warn(
            f"{name}: the column {column} holds images and the model reads text alone: it is left out. Name an "
            "image-text model; of one that does both (Gemma 3) set image_column, or pass its processor as "
            "processing_class",
        )


def _measured(row: Row, number: int | None = None, *, chat: Chat, columns: Columns, place: str) -> dict[str, Any]:
    """A row's length in tokens and its digest; what is wrong with it shows here."""
    place = place if number is None else f"{place} {number}"
    columns.rest_of(row, place)
    return _told(row, place, chat, columns, _rendered(row, place, chat, columns)[0])


def _all_measured(rows: Any, place: Callable[[int], str], chat: Chat, columns: Columns) -> Iterator[dict[str, Any]]:
    """The same of every row; texts without images are made tokens many at a time."""
    numbered = enumerate(rows)
    if chat.pictures is not None:
        yield from (_measured(row, chat=chat, columns=columns, place=place(i)) for i, row in numbered)
        return
    while some := [(row, place(i)) for i, row in islice(numbered, TOGETHER)]:
        prompts, written = [], []
        for row, where in some:
            columns.rest_of(row, where)
            with _named(where):
                prompt = columns.prompt_of(row, where)
                text, messages = chat.written(prompt)
            prompts.append(prompt)
            written.append((text, messages is None))
        read_each = chat.read_together(written)
        for (row, where), prompt, one, read in zip(some, prompts, written, read_each, strict=True):
            with _named(where):
                ids = chat.encode(*one) if read is None else read
            _expect_any(prompt, ids, where)
            yield _told(row, where, chat, columns, ids)


def _told(row: Row, place: str, chat: Chat, columns: Columns, ids: Sequence[int]) -> dict[str, Any]:
    """What is kept of a row whose prompt became these tokens."""
    shown = [picture.digest() for picture in ids.shown] if isinstance(ids, PicturedIds) else []
    digest = _digest({**_without_images(row, columns), "images": shown} if shown else dict(row))
    asked = columns.prompt_of(row, place)
    if isinstance(asked, str) and shown and chat.pictures is not None:
        asked = asked.replace(chat.pictures.mark, "")  # where its images stand
    return {"length": len(ids), "digest": digest, "quotes": chat.quotes(asked)}


def _rendered(row: Row, place: str, chat: Chat, columns: Columns) -> tuple[Sequence[int], str, Any]:
    prompt: Any = columns.prompt_of(row, place)
    shown: list[Picture] = []
    if chat.pictures is not None:
        held = None if columns.images is None else row.get(columns.images)
        prompt, shown = paired(prompt, held, place, columns.folder, chat.pictures.max_pixels)
    with _named(place):
        ids, text, messages = chat.render(prompt, shown)
    _expect_any(prompt, ids, place)
    return ids, text, messages


def _expect_any(prompt: Any, ids: Sequence[int], place: str) -> None:
    if not prompt or not ids:
        raise ConfigError(f"{place}: the prompt is empty")


@contextmanager
def _named(place: str) -> Iterator[None]:
    """What is wrong with a row is said with its place."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error) if str(error).startswith(place) else f"{place}: {error}") from error


def _without_images(row: Row, columns: Columns) -> Row:
    """The row as it is told apart from others besides its images: an image object says nothing of what it shows."""
    rest = {name: value for name, value in row.items() if name != columns.images}
    prompt = rest.get(columns.prompt)
    if isinstance(prompt, list):
        rest[columns.prompt] = paired(columns.prompt_of(row, ""), row.get(columns.images or ""), "", None, None)[0]
    return rest


def _digest(row: Row) -> str:
    """Of a row's content, the same in every process."""

    def plain(value: Any) -> Any:
        if hasattr(value, "tolist"):
            return value.tolist()
        return value.hex() if isinstance(value, bytes) else re.sub(r" at 0x[0-9a-f]+", "", str(value))

    return hashlib.sha256(json.dumps(row, sort_keys=True, default=plain).encode()).hexdigest()


def _watched(rows: Any) -> Any:
    """The rows, with a bar while there are many."""
    if len(rows) <= PROGRESS_FROM:
        return rows
    from rich.console import Console
    from rich.progress import track

    return track(rows, "tokenising prompts", console=Console(stderr=True), transient=True)
