"""Episodes as flat arrays, to travel between ranks: of every row only the decisions that were made.

Letters: K decisions of all rows, end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo.control.play import INSIDE, Episodes, named
from grpo.envs.fleet import Tree
from grpo.protocols import State, as_part, part

ROWS = ("offset_N", "terminated_N", "truncated_N", "success_N", "steps_N")
DECISIONS = ("action_NT", "logp_NT", "reward_NT")


def flat(episodes: Episodes) -> State:
    """The episodes without their padding."""
    of = vars(episodes)
    kept_K = {name: of[name][episodes.mask_NT] for name in (*DECISIONS, "out_NTF") if of[name] is not None}
    kept_K |= {name: x[episodes.mask_NT] for name, x in named("observation", episodes.observation).items()}
    if episodes.raw is not episodes.observation:
        kept_K |= {name: x[episodes.mask_NT] for name, x in named("raw", episodes.raw).items()}
    rows = {"length_N": episodes.length_N} | {name: of[name] for name in ROWS} | named("last", episodes.last)
    errors = [[row, message] for row, message in episodes.errors.items()]
    return State({"errors": errors}, as_part("decision", kept_K) | as_part("row", rows))


def whole(states: Sequence[State]) -> Episodes:
    """The way back, for the parts of several ranks, their rows in this order; a rank without rows has sent nothing."""
    states = [state for state in states if state.arrays]
    rows = _joined([part(state.arrays, "row") for state in states])
    made = [part(state.arrays, "decision") for state in states]
    kept = _joined([one for one in made if len(one["logp_NT"])] or made[:1])  # where all failed, less is written
    length_N = rows["length_N"]
    mask_NT = np.arange(max(int(length_N.max()), 1))[None] < length_N[:, None]

    def table(x_K: np.ndarray) -> np.ndarray:
        x_NT = np.zeros((*mask_NT.shape, *x_K.shape[1:]), x_K.dtype)
        x_NT[mask_NT] = x_K
        return x_NT

    tables = {name: table(x_K) for name, x_K in kept.items()}
    seen = _tree("observation", tables)
    errors: dict[int, str] = {}
    first = 0
    for state in states:
        errors |= {first + row: message for row, message in state.values["errors"]}
        first += len(state.arrays["row/length_N"])
    return Episodes(
        observation=seen,
        raw=_tree("raw", tables) if any(name.split(INSIDE)[0] == "raw" for name in tables) else seen,
        last=_tree("last", rows),
        mask_NT=mask_NT,
        errors=errors,
        out_NTF=tables.get("out_NTF"),
        **{name: tables[name] for name in DECISIONS},
        **{name: rows[name] for name in ROWS},
    )


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([np.asarray(arrays[name]) for arrays in parts]) for name in parts[0]}


def _tree(name: str, arrays: Mapping[str, np.ndarray]) -> Tree:
    """An observation's arrays, laid out as it was."""
    if name in arrays:
        return arrays[name]
    inside = dict.fromkeys(
        key.removeprefix(name + INSIDE).split(INSIDE)[0] for key in arrays if key.startswith(name + INSIDE)
    )
    return {key: _tree(name + INSIDE + key, arrays) for key in inside}
