"""A step that several ranks share: every rank knows everything, does its part, and the parts are put together again.

    rank r:  its starts ─► engine ─► rewards ─┐
                                              ├─ gather ─► the same Rollouts everywhere ─► advantages, minibatches
    rank s:  its starts ─► …                  ┘                                                      │
              my share of the rows ─► passes ─► gradients ─► sum ─► norm, clip, skip, stop ◄─────────┘

What spans rows is computed alike on every rank from the whole record, so that nothing has to divide evenly and a
denominator is never one rank's own. Every decision follows from numbers that all ranks have. Nothing here imports
torch.distributed: `grpo.protocols.Ranks` is three calls. Alone, each function does what it would without ranks.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from grpo.agreement import attempted
from grpo.agreement import here as here
from grpo.capabilities import Divides, Teaches
from grpo.errors import RankFailed, RanksDiffer
from grpo.experience import Experience
from grpo.parcels import flat, whole
from grpo.protocols import Collected, CollectRequest, Part, Ranks, RolloutSource, Slots, State, as_part, part
from grpo.resample import members_of
from grpo.rollouts import Rollouts, Scores, Taught
from grpo.shards import Again, Shards, Unsharded

WEIGHTS_EVERY = 50
"""Steps between two looks at whether all ranks have the same weights."""
LARGEST = ("microbatch_halvings",)
"""Of what a pass tells: the largest counts, all else is summed."""

Gradients = Callable[[Experience], tuple[dict[str, float], Tensor]]


# --- collect ----------------------------------------------------------------------------------------------------------


def collect(ranks: Ranks, source: RolloutSource, request: CollectRequest) -> Collected:
    """Everybody's tries, each rank's own part collected by it."""
    if ranks.size == 1:
        return source.collect(request)
    if not isinstance(source, Divides):
        found = source.collect(request)
        return Collected(found.rollouts.each(_on_cpu), found.starts)
    asked = replace(request, slots=Slots(ranks.rank, ranks.size))
    parts: list[Part] = []

    def mine() -> State:
        parts.append(collected := source.collect_part(asked))
        return packed(collected)

    told = attempted(ranks, "collecting", mine)
    return joined(parts[0], told)


def packed(collected: Part) -> State:
    """What a part of a step holds, as plain values and flat arrays."""
    rows = State({}, {}) if collected.rollouts is None else flat(collected.rollouts)
    values = {"rows": dict(rows.values), "beside": dict(collected.beside.values)}
    return State(values, as_part("rows", rows.arrays) | as_part("beside", collected.beside.arrays))


def joined(one: Part, told: Sequence[State]) -> Collected:
    """The step whose parts these are, in the order of their places; any one of them says what it is a part of."""
    besides = [State(x.values["beside"], part(x.arrays, "beside")) for x in told]
    if one.whole is not None:
        found = one.whole(besides)
        return Collected(found.rollouts.each(_on_cpu), found.starts)
    rows = [State(x.values["rows"], part(x.arrays, "rows")) for x in told if x.values["rows"]]
    found = Collected(whole(rows), one.starts)
    return found if one.finish is None else one.finish(found, besides)


# --- scores and gradients ---------------------------------------------------------------------------------------------


def shares(rollouts: Rollouts, size: int, cut: bool = True) -> list[list[int]]:
    """Rows for each rank, in order: whole groups, about as many decisions each. Some may have none.

    cut: a group that is more than an even share by itself is.
    """
    cost_N = (rollouts.mask_NT.sum(1) + 1).tolist()
    pieces = [(sum(cost_N[row] for row in rows), rows) for rows in members_of(rollouts)]
    most = sum(cost_N) / size
    if cut:
        pieces = [piece for cost, rows in pieces for piece in _cut(cost, rows, cost_N, most)]
    found: list[list[int]] = [[] for _ in range(size)]
    loads = [(0, rank) for rank in range(size)]
    for cost, rows in sorted(pieces, key=lambda piece: -piece[0]):  # the largest first, to whoever has least
        load, rank = heapq.heappop(loads)
        found[rank] += rows
        heapq.heappush(loads, (load + cost, rank))
    return [sorted(rows) for rows in found]


def _cut(cost: int, rows: list[int], cost_N: Sequence[int], most: float) -> list[tuple[int, list[int]]]:
    """A group as it is, or, where it is more than `most`, in pieces of no more unless a row is."""
    if cost <= most or len(rows) == 1:
        return [(cost, rows)]
    pieces: list[tuple[int, list[int]]] = []
    some: list[int] = []
    spent = 0
    for row in rows:
        if some and spent + cost_N[row] > most:
            pieces.append((spent, some))
            some, spent = [], 0
        some.append(row)
        spent += cost_N[row]
    return [*pieces, (spent, some)]


def scored(ranks: Ranks, rows: Rollouts, score: Callable[[Rollouts], Scores], device: torch.device) -> Scores:
    """Scores of all rows without gradient, each rank's share computed by it; where the rows are."""
    return score(rows) if ranks.size == 1 else Scores(**_shared(ranks, rows, score, device, "scoring"))


def teaching(ranks: Ranks, teacher: Teaches, device: torch.device) -> Teaches:
    """The teacher, asked by every rank about its share of the rows."""
    return teacher if ranks.size == 1 else _SharedTeacher(ranks, teacher, device)


class _SharedTeacher:
    def __init__(self, ranks: Ranks, teacher: Teaches, device: torch.device) -> None:
        self._ranks, self._teacher, self._device = ranks, teacher, device

    def teach(self, rows: Rollouts) -> Taught:
        """What it says of all rows."""
        # In whole groups: a try may be shown to the others of its group.
        return Taught(**_shared(self._ranks, rows, self._teacher.teach, self._device, "the teacher", cut=False))


def _shared(
    ranks: Ranks, rows: Rollouts, ask: Callable[[Rollouts], Any], device: torch.device, what: str, cut: bool = True
) -> dict[str, Tensor]:
    """The arrays of a record a row, each rank's share found by it."""
    shared = shares(rows, ranks.size, cut)
    mine = shared[ranks.rank]

    def work() -> State:
        found = vars(ask(rows.select(mine).each(lambda x: x.to(device)))) if mine else {}
        return State({}, {name: x.detach() for name, x in found.items() if x is not None})

    told = attempted(ranks, what, work)
    names = next(state.arrays for state in told if state.arrays)
    return {name: _laid(told, name, shared).to(rows.mask_NT.device) for name in names}


def shards(ranks: Ranks, kind: str, parameters: Mapping[str, Tensor]) -> Shards:
    """Who keeps what of optimizer and gradients; alone, and unless asked for, everybody everything."""
    if ranks.size == 1 or kind == "none":
        return Unsharded()
    if kind == "weights":
        cut: Shards = import_module("grpo.distributed.weights").WeightShards(ranks)
        return cut
    made: Shards = import_module("grpo.distributed.owners").made(kind, ranks, parameters)
    return made


def divided(ranks: Ranks, model: Any, device: torch.device) -> Ranks:
    """A module's weights cut among ranks (FSDP2), in place; the same ranks, who from then on compute in step."""
    same_weights(ranks, [dict(model.named_parameters())])
    company: Ranks = import_module("grpo.distributed.weights").divided(model, ranks, device)
    return company


def gradients(
    ranks: Ranks, shards: Shards, batch: Experience, parameters: Mapping[str, Tensor], compute: Gradients
) -> tuple[dict[str, float], Tensor]:
    """Values and log-probs of the minibatch and, in `parameters`, its gradients: each rank's share, summed."""
    if ranks.size == 1:
        return compute(batch)
    shared = shares(batch.rollouts, ranks.size)
    mine = shared[ranks.rank]

    def work() -> State:
        if not mine:
            _idle(shards, parameters)
            return State({"values": {}, "moved": []}, {})
        try:
            values, logp_NT = compute(batch.select(mine))
        except RankFailed:  # another one, which has told everybody
            raise
        except Exception:
            shards.fail()
            raise
        return State({"values": values, "moved": shards.moved(parameters)}, {"logp_NT": logp_NT})

    told = attempted(ranks, "the passes", work)
    shards.settle(ranks, parameters, {name for state in told for name in state.values["moved"]})
    return _summed([state.values["values"] for state in told]), _laid(told, "logp_NT", shared).to(batch.mask_NT.device)


def _idle(shards: Shards, parameters: Mapping[str, Tensor]) -> None:
    """No rows here: no gradients, and help for those who have some."""
    for p in parameters.values():
        p.grad = None
    while True:
        try:
            return shards.finish()
        except Again:
            continue


def _summed(told: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """In the order of ranks: the same number everywhere."""
    names = dict.fromkeys(name for values in told for name in values)
    each = {name: [values[name] for values in told if name in values] for name in names}
    return {name: max(values) if name in LARGEST else sum(values) for name, values in each.items()}


def _laid(told: Sequence[State], name: str, shared: Sequence[Sequence[int]]) -> Tensor:
    """What the ranks found of their rows, in the order of the whole."""
    found = torch.cat([torch.as_tensor(state.arrays[name]) for state in told if name in state.arrays])
    order = torch.as_tensor([row for rows in shared for row in rows])
    return found[order.argsort()]


# --- agreement --------------------------------------------------------------------------------------------------------


def agreed(ranks: Ranks, experience: Experience, device: torch.device, weights: Mapping[str, Tensor]) -> Experience:
    """The experience where it is learned from, once all ranks have the same; the chief's must be everybody's.

    It is built on the CPU, where sums have one order. weights: looked at, too, unless there are none.
    """
    if ranks.size == 1:
        return experience
    mine = {"decisions and advantages": _print([experience.mask_NT, experience.advantage_NT])}
    mine |= {"weights": weights_print(weights)} if weights else {}
    expect_same(ranks, mine, "comparing the step")
    return experience.each(lambda x: x.to(device))


def expect_same(ranks: Ranks, mine: Mapping[str, Any], what: str) -> None:
    """Raise on every rank where one knows something else than the chief; who, and what of."""
    found = [state.values for state in ranks.gather(State(mine, {}), what)]
    for rank, values in enumerate(found):
        other = [name for name, value in values.items() if value != found[0].get(name)]
        if other:
            raise RanksDiffer(
                f"rank {rank} has other {', '.join(other)} than rank 0: the same code, settings and data must be on "
                "every rank, and what is drawn must follow from the seed; see docs/scaling.md"
            )


def same_weights(ranks: Ranks, models: Sequence[Mapping[str, Tensor]]) -> None:
    """Begin alike: where weights were drawn differently, the chief's are everybody's."""
    if ranks.size == 1:
        return
    tensors = {f"{i}/{name}": p for i, model in enumerate(models) for name, p in model.items()}
    told = {"names": list(tensors), "shapes": [list(p.shape) for p in tensors.values()]}
    expect_same(ranks, {"parameters": told}, "comparing the policy")
    prints = ranks.gather(State({"weights": weights_print(tensors)}, {}), "weights")
    if len({state.values["weights"] for state in prints}) == 1:
        return
    chiefs = ranks.broadcast(State({}, {k: p.detach() for k, p in tensors.items()}) if ranks.chief else None, "weights")
    with torch.no_grad():
        for name, p in tensors.items():
            p.copy_(chiefs.arrays[name])


def weights_print(weights: Mapping[str, Tensor]) -> str:
    """A fingerprint of tensors that is exact, whatever the order of additions, and quick where they are."""
    return hashlib.sha256(repr([_bits(p) for p in weights.values()]).encode()).hexdigest()[:16]


def _bits(x: Tensor) -> int:
    """The sum of a tensor's bits, read as integers."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return int(x.detach().contiguous().view(kind).sum(dtype=torch.int64))


def _print(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(repr((tuple(x.shape), x.dtype)).encode())
        digest.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _on_cpu(x: Tensor) -> Tensor:
    return x.cpu()
