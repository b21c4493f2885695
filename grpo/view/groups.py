"""The groups that a run kept: lists, filters and search.

What spans all steps of a run is read piece by piece: an answer says how far it got, and the next question goes on from
there. Nothing is read that nobody asked for.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo.run.folder import FolderError, Row
from grpo.run.inside import Gone
from grpo.view.files import Stamp, parse_line, shown, stamp
from grpo.view.index import BADGES, GROUP, Index, badges, key_text, length_of, make_index, open_samples, reward_of
from grpo.view.patience import Patience
from grpo.view.runs import MEDIA, Run, run_id

MOST_IMAGES = 3
"""Of a prompt, in a line of the list."""

HEAD = 200
"""Characters of a prompt in a list."""
MOST_TRIES = 1024
"""Of one group that are shown."""
SORTS = ("group", "mean", "std", "length", "advantage", "step")


@dataclass(frozen=True)
class Query:
    """What a list is asked for."""

    words: tuple[str, ...] = ()
    badges: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    sort: str = "group"
    descending: bool = False
    offset: int = 0
    limit: int = 100

    @staticmethod
    def words_of(text: str) -> tuple[str, ...]:
        """Words, and "quoted phrases" as one."""
        return tuple(dict.fromkeys((a or b).casefold() for a, b in re.findall(r'"([^"]+)"|(\S+)', text)))[:16]

    def fits(self, groups_P: np.ndarray) -> np.ndarray:
        """Which groups pass what needs no text."""
        fits_P = np.ones(len(groups_P), bool)
        for badge in self.badges:
            has_P = groups_P["badges"] >> BADGES.index(badge.removeprefix("-")) & 1 == 1
            fits_P &= ~has_P if badge.startswith("-") else has_P
        if self.low is not None:
            fits_P &= groups_P["mean"] >= self.low
        if self.high is not None:
            fits_P &= groups_P["mean"] <= self.high
        return fits_P

    def order(self, groups_P: np.ndarray) -> np.ndarray:
        """These groups as the list has them; what has no value comes last, whichever way it is turned."""
        value_P = groups_P[self.sort].astype(float)
        value_P = np.where(np.isnan(value_P), np.inf, -value_P if self.descending else value_P)
        return groups_P[np.lexsort((groups_P["place"], groups_P["step"], value_P))]


class Groups:
    """All groups of one run. Indexes and searches are kept within bounds."""

    def __init__(self, run: Run, rows: int = 2_000_000) -> None:
        self.run, self._most = run, rows
        self._indexes: OrderedDict[int, Index] = OrderedDict()
        self._rows = 0
        """Of all indexes together."""
        self._weights = run.rewards()[1]
        self._generation = run.metrics.generation
        self._found: OrderedDict[tuple[str, ...], dict[int, tuple[Stamp, np.ndarray]]] = OrderedDict()

    def index(self, step: int) -> Index:
        """Of one step; read again when the file was replaced."""
        if not self.run.has_samples(step):
            raise LookupError(f"step {step} of {self.run.path} has no groups; `sample_every` says which steps have")
        if step in self._indexes:
            with open_samples(self.run, step) as file:
                if stamp(file) != self._indexes[step].stamp:
                    self._drop(step)
        return self._index(step)

    def _index(self, step: int) -> Index:
        """As it was read, or read now."""
        if step not in self._indexes:
            self._indexes[step] = made = make_index(self.run, step, self._weights)
            self._rows += len(made.lines_N)
            while len(self._indexes) > 1 and self._rows > self._most:
                self._drop(next(iter(self._indexes)))
        self._indexes.move_to_end(step)
        return self._indexes[step]

    def _drop(self, step: int) -> None:
        self._rows -= len(self._indexes.pop(step).lines_N)

    def page(self, query: Query, step: int | None = None) -> Row:
        """One page of the groups of a step, or of all steps."""
        steps = self.run.sample_steps() if step is None else [step]
        known, complete, notes = self._indexed(steps)
        groups_P = _all([index.groups_P for index in known.values()])
        chosen_P, scanned = groups_P, len(known)
        if query.words:
            patience = Patience()
            found = {at: self._matched(at, index, query.words, patience) for at, index in known.items()}
            read = {at: matched for at, matched in found.items() if matched is not None}
            complete, scanned = complete and len(read) == len(known), len(read)
            chosen_P = _all([known[at].groups_P[matched] for at, matched in read.items()])
        chosen_P = chosen_P[query.fits(chosen_P)]
        listed_P = query.order(chosen_P)[query.offset : query.offset + query.limit]
        counts = {badge: int((groups_P["badges"] >> bit & 1).sum()) for bit, badge in enumerate(BADGES)}
        answer: Row = {
            "step": step,
            "groups": self.lines([(int(group["step"]), int(group["place"])) for group in listed_P]),
            "total": len(chosen_P),
            "all": len(groups_P),
            "badges": {badge: count for badge, count in counts.items() if count},
            "complete": complete,
            "scanned": scanned,
            "of": len(steps),
            "notes": notes,
        }
        return answer if step is None else answer | self.neighbours(step)

    def neighbours(self, step: int) -> Row:
        """Steps with samples before and after."""
        steps = np.array(self.run.sample_steps())
        before, after = steps[steps < step], steps[steps > step]
        return {"previous": int(before[-1]) if len(before) else None, "next": int(after[0]) if len(after) else None}

    def lines(self, places: Sequence[tuple[int, int]]) -> list[Row]:
        """What a list shows of these groups."""
        made: dict[tuple[int, int], Row] = {}
        for step in dict.fromkeys(step for step, _ in places):
            try:
                index = self.index(step)
                wanted = [place for at, place in places if at == step and place < len(index)]
                for place, rows in self._read(step, index, wanted).items():
                    made[step, place] = self._line(index, place, rows)
            except (FolderError, LookupError):
                continue  # deleted in between: the list is asked for again
        return [made[place] for place in places if place in made]

    def _line(self, index: Index, place: int, rows: Sequence[tuple[int, Row]]) -> Row:
        about = index.groups_P[place]
        rewards = [reward_of(row, self._weights) for _, row in rows]
        lengths = [length_of(row) for _, row in rows] or [0]
        prompt = next((row["prompt"] for _, row in rows if isinstance(row.get("prompt"), str)), None)
        known = [reward for reward in rewards if reward is not None]
        return {
            "step": int(about["step"]),
            "group": int(about["group"]),
            "size": len(rows),
            "prompt": None if prompt is None else _head(prompt),
            "images": [item["url"] for item in _images(self.run, rows)],
            "prompt_key": key_text(int(about["key"])),
            "rewards": [shown(reward) for reward in rewards],
            "rows": [number for number, _ in rows],
            "mean": shown(about["mean"]),
            "std": shown(about["std"]),
            "min": shown(min(known, default=None)),
            "max": shown(max(known, default=None)),
            "lengths": [min(lengths), shown(about["length"]), max(lengths)],
            "advantage_max": shown(about["advantage"]),
            "badges": badges(int(about["badges"])),
        }

    def rows(self, step: int, group: int) -> tuple[Index, int, list[tuple[int, Row]]]:
        """The tries of one group, each with its number in the file."""
        index = self.index(step)
        places = np.flatnonzero(index.groups_P["group"] == group)
        if not len(places):
            raise LookupError(f"step {step} of {self.run.path} has no group {group}; see the list of the step")
        place = int(places[0])
        return index, place, self._read(step, index, [place]).get(place, [])

    def _read(self, step: int, index: Index, places: Iterable[int]) -> dict[int, list[tuple[int, Row]]]:
        found: dict[int, list[tuple[int, Row]]] = {}
        with open_samples(self.run, step) as file:
            if stamp(file) != index.stamp:
                raise Gone(f"step {step} of {self.run.path} was written anew meanwhile; ask again")
            for place in places:
                for number, offset, size in index.members(place)[:MOST_TRIES].tolist():
                    file.seek(offset)
                    row = parse_line(file.read(size))
                    if row is not None:
                        found.setdefault(place, []).append((number, row))
        return found

    # --- all steps, piece by piece ----------------------------------------------------------------------------------

    def _indexed(self, steps: Sequence[int]) -> tuple[dict[int, Index], bool, list[str]]:
        """Indexes of these steps as far as time allows, whether these are all, and what could not be read."""
        if self._generation != self.run.metrics.generation:  # resumed: later steps are made again
            self._generation = self.run.metrics.generation
            self._indexes.clear()
            self._rows = 0
        known, complete, notes, damaged = dict[int, Index](), True, list[str](), 0
        patience = Patience()
        for step in reversed(steps):  # the newest first
            if step not in self._indexes and self._rows > 0.9 * self._most and len(steps) > 1:
                notes.append(f"only the newest {len(known)} of {len(steps)} steps are listed: there are too many tries")
                break
            if step not in self._indexes and not patience.more():
                complete = False
                continue
            try:
                known[step] = self.index(step) if len(steps) == 1 else self._index(step)
                damaged += known[step].damaged
            except (FolderError, LookupError) as error:
                if len(steps) == 1:
                    raise
                notes.append(str(error))
        if damaged:
            notes.append(f"{damaged} damaged lines were passed over")
        return known, complete, notes[:20]

    def _matched(self, step: int, index: Index, words: tuple[str, ...], patience: Patience) -> np.ndarray | None:
        """Which groups of a step hold all words; None: no time left to look."""
        memory = self._found.setdefault(words, {})
        self._found.move_to_end(words)
        while len(self._found) > 8:
            self._found.popitem(last=False)
        if step in memory and memory[step][0] == index.stamp:
            return memory[step][1]
        if not patience.more():
            return None
        memory[step] = index.stamp, self._search(step, index, words)
        return memory[step][1]

    def _search(self, step: int, index: Index, words: tuple[str, ...]) -> np.ndarray:
        matched = np.zeros(len(index), bool)
        escaped = [json.dumps(word)[1:-1].encode() for word in words if word.isascii()]
        try:
            with open_samples(self.run, step) as file:
                for place in range(len(index)):
                    texts = []
                    for _, offset, size in index.members(place).tolist():
                        file.seek(offset)
                        texts.append(file.read(size))
                    raw = b"\n".join(texts).lower()
                    if all(word in raw for word in escaped):  # bytes first: most groups need no parsing
                        said = "\n".join(text_of(row) for text in texts if (row := parse_line(text)) is not None)
                        matched[place] = all(word in said for word in words)
        except FolderError:
            pass  # deleted meanwhile
        return matched

    def with_prompt(self, key: int) -> tuple[list[tuple[int, int]], bool, int, int]:
        """(step, place) of every group with this prompt; whether all steps were read, how many, of how many."""
        steps = self.run.sample_steps()
        known, complete, _ = self._indexed(steps)
        groups_P = _all([index.groups_P for index in known.values()])
        found = [(int(group["step"]), int(group["place"])) for group in groups_P[groups_P["key"] == np.uint64(key)]]
        return sorted(found), complete, len(known), len(steps)


def _all(groups: Sequence[np.ndarray]) -> np.ndarray:
    """Groups of several steps as one array."""
    return np.concatenate(groups) if groups else np.zeros(0, GROUP)


def text_of(row: Mapping[str, Any]) -> str:
    """What search looks at: prompt, completion and what else was said or went wrong."""
    said = [row.get(name) for name in ("prompt", "completion", "error")]
    messages = row.get("messages")
    said += [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    return "\n".join(text for text in said if isinstance(text, str)).casefold()


def _head(text: str) -> str:
    return text[:HEAD] + ("…" if len(text) > HEAD else "")


def media_of(run: Run, row: Row) -> list[Row]:
    """Pictures and videos that a room names in a row: {kind, name, file}, the file below the run's samples."""
    items = row.get("media")
    found = []
    for item in items if isinstance(items, list) else ():
        file = item.get("file") if isinstance(item, dict) else None
        if (
            isinstance(file, str)
            and re.fullmatch(r"[A-Za-z0-9._+=-]{1,200}", file)
            and "." + file.rpartition(".")[2].lower() in MEDIA
        ):
            url = f"media/{run.id}/samples/{run_id(file)}"
            found.append({"kind": str(item.get("kind"))[:50], "name": str(item.get("name"))[:100], "url": url})
    return found


def _images(run: Run, rows: Sequence[tuple[int, Row]]) -> list[Row]:
    """Of a group's prompt, the first few."""
    found = media_of(run, rows[0][1]) if rows else []
    return [item for item in found if item["kind"] == "image"][:MOST_IMAGES]
