"""What a model says of tokens that are not its own: its probabilities of the text, at the boundaries of other tokens.

A text is written by the student in tokens y_1 … y_n and by the teacher in z_1 … z_m, as its tokenizer cuts it. With b_i
the bytes up to the end of y_i, and log τ(b) the teacher's log-probability of texts that begin with the first b bytes,

    log τ(y_i | y_<i) = log τ(b_i) − log τ(b_{i−1})          Σ_i log τ(y_i | y_<i) = Σ_j log τ(z_j | z_<j)

so that log τ − log π of every token, credited to it, estimates KL(π‖τ) over the text. A boundary may lie within a token
of the teacher's, or at the end of one that could have been longer ("4" of "49"). So

    τ(b) = τ(z_1 … z_k) + Σ_{j≤k} τ(z_<j)·Σ_v τ(v | z_<j)

where z_k is the token that reaches b, and v every other one at place j that reaches beyond b, begins as the text goes
on up to there and then differs. v is looked for among the teacher's likeliest tokens; other ways to cut the same text
are left out. Where every token is a character, it is log τ of that token.

Bytes, not characters: a character may be several tokens. TRL's GOLD trainer puts tokens between boundaries that both
have into groups, merges distributions over a group and compares vocabularies, sorted or mapped. Sums over such groups
alone would blame "4" where the student went on with a letter: τ has "4" in longer tokens, and hardly ever alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate


def said_of(
    mine: Sequence[bytes],
    theirs: Sequence[bytes],
    logp: Sequence[float],
    others: Sequence[Mapping[bytes, float]],
) -> list[float]:
    """Log τ of each of `mine`; NaN behind the first in which the texts differ, which is charged with all the rest.

    logp: of each of `theirs`, given those before. others: at each place, tokens that might have stood there.

    >>> said_of([b"4", b"9"], [b"49"], [math.log(0.5)], [{b"41": math.log(0.25)}])  # 0.75, and 0.5 / 0.75
    [-0.2876820724517809, -0.40546510810816444]
    """
    text, ends = b"".join(theirs), [0, *accumulate(map(len, theirs))]
    same = shared(b"".join(mine), text)
    before = [0.0, *accumulate(logp)]
    reaching: list[list[float]] = [[] for _ in range(len(text) + 1)]
    """At each byte the log-probabilities of the ways to get there, or beyond."""
    for place, token in enumerate(theirs):
        start = ends[place]
        for at in range(start + 1, ends[place + 1] + 1):
            reaching[at].append(before[place + 1])
        for other, chance in others[place].items():
            agreed = 0 if other == token else shared(other, text[start : start + len(other)])
            for at in range(start + 1, start + agreed + 1) if agreed < len(other) else ():
                reaching[at].append(before[place] + chance)
    found, last = list[float](), 0.0
    for end in accumulate(map(len, mine)):
        if end > same:
            rest = min(before[-1] - last, 0.0)
            return [*found, rest, *[math.nan] * (len(mine) - len(found) - 1)]
        now = _log_sum(reaching[end]) if end else 0.0
        found.append(min(now - last, 0.0))
        last = now
    return found


def shared(one: bytes, other: bytes) -> int:
    """Bytes before the first that differs."""
    if one[:1] != other[:1]:
        return 0
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _log_sum(logs: Sequence[float]) -> float:
    if len(logs) == 1:
        return logs[0]
    most = max(logs)
    return most + math.log(sum(math.exp(value - most) for value in logs))
