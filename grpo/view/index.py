"""An index of one step's file of samples: numbers and byte offsets of its groups; text is read when it is shown."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo.run.folder import Row
from grpo.run.inside import open_inside
from grpo.view.files import Stamp, finite, lines, parse_line, stamp
from grpo.view.runs import Run

BADGES = (
    "no_signal",
    "all_right",
    "all_wrong",
    "truncated",
    "reward_error",
    "failed",
    "refilled",
    "duplicates",
    "masked",
    "unusable",
)
MOST = 10**9
"""No step, group, row or length is larger."""
GROUP = np.dtype(
    [
        ("step", np.int64),
        ("place", np.int32),
        ("group", np.int64),
        ("mean", float),
        ("std", float),
        ("length", float),
        ("advantage", float),
        ("badges", np.int32),
        ("key", np.uint64),
    ]
)
"""What is known of a group: `place` is its number in the index, `badges` a bit each, `key` its prompt's (0: none)."""
TOKENS = b', "tokens": ['
LINE = np.dtype([("number", np.int32), ("offset", np.int64), ("size", np.int32)])
"""Where a try's line is in the file."""


@dataclass(frozen=True)
class Index:
    """One step's file: P groups of N tries."""

    stamp: Stamp
    groups_P: np.ndarray
    lines_N: np.ndarray
    """Sorted by group …"""
    first: np.ndarray
    """… and where in that order each group begins."""
    damaged: int

    def __len__(self) -> int:
        return len(self.groups_P)

    def members(self, place: int) -> np.ndarray:
        """The lines of a group's tries."""
        return self.lines_N[self.first[place] : self.first[place + 1]]


def make_index(run: Run, step: int, weights: Sequence[float] | None) -> Index:
    """Read a step's file once. `weights`: of the reward's parts."""
    with open_samples(run, step) as file:
        now, damaged = stamp(file), 0
        tallies: dict[int, Tally] = {}
        found, places = [], []
        for number, line in enumerate(lines(file)):
            row = _head(line.text) or parse_line(line.text)
            group = row.get("group") if row is not None else None
            if row is None or not isinstance(group, int) or not 0 <= group <= MOST:
                damaged += 1
                continue
            tally = tallies.get(group) or tallies.setdefault(group, Tally(len(tallies)))
            tally.add(row, weights)
            found.append((number, line.offset, len(line.text)))
            places.append(tally.place)
        damaged += not _ends_a_line(file, now[1])
    every = [reward for tally in tallies.values() for reward in tally.rewards]
    low, high = (min(every), max(every)) if every else (0.0, 0.0)
    groups = [(step, tally.place, group, *tally.verdict(low, high), tally.key) for group, tally in tallies.items()]
    place_N = np.array(places, np.int32)
    return Index(
        stamp=now,
        groups_P=np.array(groups, GROUP),
        lines_N=np.array(found, LINE)[np.argsort(place_N, kind="stable")],
        first=np.concatenate([[0], np.bincount(place_N, minlength=len(tallies)).cumsum()]),
        damaged=damaged,
    )


@dataclass
class Tally:
    """What is gathered of one group while its file is read."""

    place: int
    rewards: list[float] = field(default_factory=list)
    """Of the tries that were judged."""
    lengths: list[int] = field(default_factory=list)
    texts: list[int] = field(default_factory=list)
    """Hashes of what was said."""
    flags: set[str] = field(default_factory=set)
    advantage: float = 0.0
    signal: float | None = None
    """Largest advantage of a single decision that teaches; None: the folder does not say."""
    key: int = 0

    def add(self, row: Row, weights: Sequence[float] | None) -> None:
        """One more try."""
        reward = reward_of(row, weights)
        self.rewards += [] if reward is None else [reward]
        self.lengths.append(length_of(row))
        self.advantage = max(self.advantage, abs(finite(row.get("advantage")) or 0.0))
        if (signal := finite(row.get("signal"))) is not None:
            self.signal = max(self.signal or 0.0, abs(signal))
        if isinstance(text := row.get("completion"), str):
            self.texts.append(hash(text))
        if (status := row.get("status")) in ("truncated", "failed"):
            self.flags.add(status)
        if row.get("error") is not None or row.get("traceback") is not None:
            self.flags.add("reward_error")
        if row.get("attempt"):
            self.flags.add("refilled")
        if row.get("teaching") == 0:
            self.flags.add("masked")
        self.key = self.key or prompt_key(row.get("prompt"), row.get("media"))

    def verdict(self, low: float, high: float) -> tuple[float, float, float, float, int]:
        """Mean, deviation, length, largest advantage, badges. `low`, `high`: of all rewards of the step."""
        known, flags = self.rewards, set(self.flags)
        mean = sum(known) / len(known) if known else math.nan
        std = math.sqrt(sum((r - mean) * (r - mean) for r in known) / (len(known) - 1)) if len(known) > 1 else math.nan
        equal = len(known) > 1 and max(known) - min(known) <= 1e-9 * max(1.0, abs(known[0]))
        if len(known) < 2:
            flags.add("unusable")
        elif equal if self.signal is None else self.signal == 0.0:
            flags.add("no_signal")
        if equal:
            right = known[0] >= high if high > low else known[0] > 0
            wrong = known[0] <= low if high > low else not right
            flags |= {*(["all_right"] if right else ["all_wrong"] if wrong else [])}
        if len({*self.texts}) < len(self.texts):
            flags.add("duplicates")
        bits = sum(1 << bit for bit, badge in enumerate(BADGES) if badge in flags)
        return mean, std, statistics.fmean(self.lengths), self.advantage, bits


def badges(bits: int) -> list[str]:
    """Bits as names."""
    return [badge for bit, badge in enumerate(BADGES) if bits >> bit & 1]


def open_samples(run: Run, step: int) -> Any:
    """The rows of a step."""
    return open_inside(run.root, f"{run.path}/samples/step-{step:08d}.jsonl")


def _head(line: bytes) -> Row | None:
    """A row without its tokens, most of its bytes, where something else tells their number; None: read all of it.

    In JSON a quote after a space begins or ends a string, so what is cut at is a key. A cut that ends inside a token or
    begins in an object inside the row leaves something that does not parse. Where nothing seems to follow the tokens,
    no quote before a colon may be left in them, unless it is escaped: it would end a key that is cut off.
    """
    cut = line.find(TOKENS)
    if cut < 0 or line.find(b'"decisions": ', 0, cut) < 0:
        return None
    end = line.find(b'], "', cut)
    maybe = end < 0 and line.find(b'":', cut + len(TOKENS)) >= 0
    if maybe and line.count(b'":', cut + len(TOKENS)) != line.count(b'\\":', cut):
        return None
    row = parse_line(line[:cut] + (b"}" if end < 0 else line[end + 1 :]))
    return row if row is not None and "decisions" in row else None


def _ends_a_line(file: Any, size: int) -> bool:
    """Whether the file's last byte ends a line."""
    file.seek(max(size - 1, 0))
    return size == 0 or bool(file.read(1) == b"\n")


# --- a row -----------------------------------------------------------------------------------------------------------


def reward_of(row: Row, weights: Sequence[float] | None) -> float | None:
    """A try's reward; the weighted sum of its parts where the folder has only those."""
    reward, parts = finite(row.get("reward")), row.get("reward_parts")
    if reward is not None or row.get("status") == "failed" or not isinstance(parts, list):
        return reward
    scales = weights if weights is not None and len(weights) == len(parts) else [1.0] * len(parts)
    known = [w * p for w, part in zip(scales, parts, strict=True) if (p := finite(part)) is not None]
    return finite(sum(known)) if known else None


def length_of(row: Row) -> int:
    """Decisions of a try."""
    for name in ("length", "decisions"):
        if (length := finite(row.get(name))) is not None:
            return int(min(max(length, 0), MOST))
    return len(row["tokens"]) if isinstance(row.get("tokens"), list) else 1


def prompt_key(prompt: Any, media: Any = None) -> int:
    """A number that is the same for the same prompt, its images too, in every step and run; 0 where there is none."""
    if not isinstance(prompt, str):
        return 0
    items = [item for item in media if isinstance(item, dict)] if isinstance(media, list) else []
    prompt += "".join(f"\0{item.get('file')}" for item in items if item.get("kind") == "image")
    return int.from_bytes(hashlib.sha256(prompt.encode(errors="surrogatepass")).digest()[:8], "big") or 1


def key_text(key: int) -> str | None:
    """As it stands in URLs."""
    return f"{key:016x}" if key else None
