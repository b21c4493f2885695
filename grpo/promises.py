"""What a policy, a source and a reference promise, each tried out by one function on a few rollouts.

A function yields a `Flaw` for every way in which its promise is broken. `grpo.check` runs them over somebody's room,
`tests/conformance` over those that are here.
"""

from __future__ import annotations

import difflib
import inspect
import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from grpo.capabilities import OF_A_SOURCE, Headlines, MakesRoom, Measures, Plots, TellsEntropy
from grpo.errors import line
from grpo.protocols import Collected, CollectRequest, Reference, RolloutSource, SequencePolicy, State
from grpo.rollouts import Rollouts
from grpo.seeding import seed_all

AGREE = 1e-3
"""How far two ways to the same log-prob may be apart: another order of additions, not another policy."""


@dataclass(frozen=True)
class Flaw:
    """One broken promise, and what to do about it."""

    what: str
    remedy: str
    serious: bool = True
    """False: it works, but not as somebody may expect."""
    promise: str = ""
    """The name of the function that found it."""

    def __str__(self) -> str:
        return f"{'✗' if self.serious else '!'} {self.what}   → {self.remedy}"


class Room:
    """What is tried out, and the first rollouts that it gave."""

    def __init__(self, policy: SequencePolicy, source: RolloutSource, reference: Reference | None) -> None:
        self.policy, self.source, self.reference = policy, source, reference
        self._first: Collected | None = None

    def collect(self, step: int, attempt: int = 0, starts: Sequence[Any] | None = None) -> Collected:
        """Tries, as a run asks for them: a step begins with its own seed."""
        seed_all(0, step, "check")
        self.policy.eval()
        return self.source.collect(CollectRequest(step, attempt, starts))

    @property
    def first(self) -> Collected:
        """Of step 0."""
        if self._first is None:
            self._first = self.collect(0)
        return self._first

    @property
    def rows(self) -> Rollouts:
        """Of step 0."""
        return self.first.rollouts

    @torch.no_grad()
    def logp(self, rows: Rollouts) -> Tensor:
        """The policy's log-probs of the decisions that were made; 0 elsewhere."""
        self.policy.eval()
        return made(self.policy.score(rows).logp_NT, rows)


Promise: TypeAlias = Callable[[Room], Iterator[Flaw]]


def flaws_of(promise: Promise, room: Room) -> list[Flaw]:
    """The flaws that a promise finds; what is raised meanwhile is one."""
    name, found = promise.__name__, []
    try:
        for flaw in promise(room):
            found.append(replace(flaw, promise=name))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f" ({where.filename}:{where.lineno})"
        found.append(Flaw(f"{_words(promise)}: {line(error)}{place}", "it must not raise here", promise=name))
    return found


# --- shapes -----------------------------------------------------------------------------------------------------------


def is_whole(room: Room) -> Iterator[Flaw]:
    """Every method of the protocol is there."""
    seats = {"policy": (room.policy, SequencePolicy), "source": (room.source, RolloutSource)}
    if room.reference is not None:
        seats["reference"] = (room.reference, Reference)
    for role, (thing, protocol) in seats.items():
        missing = [name for name in _members(protocol) if not hasattr(thing, name)]
        if missing:
            yield Flaw(
                f"the {role} {type(thing).__name__} has no {', '.join(missing)}",
                f"see the example of grpo.protocols.{protocol.__name__}",
            )


def declares_capabilities(room: Room) -> Iterator[Flaw]:
    """What it can do besides is called by its name and takes what it will be given."""
    source: Any = room.source
    known: dict[str, Any] = {name: capability for capability in OF_A_SOURCE for name in _members(capability)}
    for name, capability in known.items():
        if isinstance(source, capability) and inspect.isfunction(vars(capability).get(name)):
            yield from _takes(source, name, capability)
    listed = {"headline": source.headline} if isinstance(source, Headlines) else {}
    listed |= {"panels": source.panels} if isinstance(source, Plots) else {}
    for name, names in listed.items():
        if isinstance(names, str) or not all(isinstance(item, str) for item in names):
            yield Flaw(f"source.{name} is {names!r}", "give a tuple of metrics' names")
    lacking = [name for name, capability in known.items() if not isinstance(source, capability)]
    for name in dir(source):
        close = difflib.get_close_matches(name, lacking, n=1, cutoff=0.8)
        if close and name not in known and not name.startswith("_"):
            what = f"source.{name} looks like {close[0]} ({known[close[0]].__name__}), which nobody will find"
            yield Flaw(what, f"call it {close[0]}, or something else", serious=False)


def _takes(thing: object, name: str, capability: type) -> Iterator[Flaw]:
    """Whether the method can be called as the capability is."""
    parameters = list(inspect.signature(vars(capability)[name]).parameters)[1:]
    try:
        inspect.signature(getattr(thing, name)).bind(*parameters)  # by name: the capability is what is tried out
    except (TypeError, ValueError):
        what = f"{type(thing).__name__}.{name} is not a method that takes ({', '.join(parameters)})"
        remedy = f"see the example of grpo.capabilities.{capability.__name__}"
        yield Flaw(what, remedy)


# --- the source -------------------------------------------------------------------------------------------------------


def collects_groups(room: Room) -> Iterator[Flaw]:
    """collect gives rollouts, several tries from each start."""
    first: Any = room.first
    if not isinstance(first, Collected) or not isinstance(first.rollouts, Rollouts):
        found = f"collect returned {type(first).__name__}"
        yield Flaw(found, "return grpo.protocols.Collected(rollouts, starts)")
        return
    groups, starts = room.rows.group_N.tolist(), len(room.first.starts)
    if not set(groups) <= set(range(starts)):
        what = f"group_N has ids {sorted(set(groups))} for {starts} starts"
        yield Flaw(what, "number the groups as their starts: 0, 1, …")
    if len(set(groups)) == len(groups):
        what = "every group has a single try, so that there is nothing to compare"
        yield Flaw(what, "sample each start several times", serious=False)


def keeps_a_state(room: Room) -> Iterator[Flaw]:
    """state is JSON-able values and named arrays."""
    state = room.source.state()
    values = dict(state.values)
    try:
        if not _same(json.loads(json.dumps(values)), values):
            what = "state().values are others once written as JSON and read"
            yield Flaw(what, "keys must be text")
    except (TypeError, ValueError) as error:
        yield Flaw(f"state().values cannot be written as JSON ({error})", "arrays go into arrays")
    for name, array in state.arrays.items():
        if not isinstance(array, Tensor | np.ndarray) or array.dtype == np.dtype(object):
            what = f"state().arrays[{name!r}] is a {type(array).__name__}"
            yield Flaw(what, "give a tensor or a NumPy array of numbers")


def collects_the_same_again(room: Room) -> Iterator[Flaw]:
    """collect depends on the request and on state() alone."""
    for step in (1, 2):
        state = _saved(room.source.state())
        once = room.collect(step).rollouts
        room.source.load_state(state)
        again = room.collect(step).rollouts
        differ = [name for name, value in vars(once).items() if not _same(value, vars(again).get(name))]
        if differ:
            what = f"collect of step {step} gave other {', '.join(differ)} after load_state(state())"
            remedy = "draw from (seed, request.step, request.attempt); keep in state() what else it depends on"
            yield Flaw(what, remedy, serious=room.rows.mask_NT.device.type == "cpu")
            return


def collects_from_given_starts(room: Room) -> Iterator[Flaw]:
    """The same starts can be asked for again."""
    try:
        again = room.collect(0, 1, list(room.first.starts)[:1])
    except Exception as error:
        what = f"collect cannot be asked again for starts it gave ({line(error)})"
        remedy = "honour request.starts, or do not use no_signal=resample"
        yield Flaw(what, remedy, serious=False)
        return
    groups = set(again.rollouts.group_N.tolist())
    if groups != {0}:
        what = f"asked for one start, collect gave groups {sorted(groups)}"
        yield Flaw(what, "one group for each of request.starts, numbered from 0")


def tells_numbers(room: Room) -> Iterator[Flaw]:
    """metrics (and measures) are names with numbers or None."""
    told: dict[str, Any] = {"metrics": room.source.metrics()}
    if isinstance(room.source, Measures):
        told["measures"] = room.source.measures()
    for name, values in told.items():
        wrong = [key for key, value in values.items() if not isinstance(key, str) or not _is_number(value)]
        if wrong:
            what = f"{name}()[{wrong[0]!r}] is {values[wrong[0]]!r}"
            yield Flaw(what, "a float or an int for each name; None where there is none")
    if isinstance(room.source, MakesRoom) and not isinstance(room.source.make_room(), bool):
        yield Flaw("make_room() does not say whether there was any", "return True or False")


def shows_rows(room: Room) -> Iterator[Flaw]:
    """show gives one JSON-able dict a row; entropies one number a decision."""
    rows = room.rows.select(range(min(len(room.rows), 3)))
    shown = room.source.show(rows)
    if len(shown) != len(rows) or not all(isinstance(row, dict) for row in shown):
        found = f"{len(shown)} {type(shown[0]).__name__ if shown else 'thing'}s for {len(rows)} rows"
        yield Flaw(f"show gave {found}", "one dict a row, in the same order")
    try:
        json.dumps(list(shown))
    except (TypeError, ValueError) as error:
        yield Flaw(f"what show gave cannot be written as JSON ({error})", "use text and numbers")
    if isinstance(room.source, TellsEntropy):
        entropy_NT = room.source.entropies(rows)
        if entropy_NT is not None and tuple(entropy_NT.shape) != tuple(rows.mask_NT.shape):
            what = f"entropies has shape {tuple(entropy_NT.shape)} for decisions {tuple(rows.mask_NT.shape)}"
            yield Flaw(what, "one number a decision")


# --- the policy -------------------------------------------------------------------------------------------------------


def scores_every_decision(room: Room) -> Iterator[Flaw]:
    """score gives finite log-probs, one a decision, and entropies like them or none."""
    scores = room.policy.score(room.rows, entropy=True)
    shape = tuple(room.rows.mask_NT.shape)
    for name, array in (("logp_NT", scores.logp_NT), ("entropy_NT", scores.entropy_NT)):
        if array is None:
            continue
        if tuple(array.shape) != shape:
            what = f"score(…).{name} has shape {tuple(array.shape)}, the decisions {shape}"
            yield Flaw(what, "one number for each entry of mask_NT")
        elif not bool(torch.isfinite(array[room.rows.mask_NT]).all()):
            yield Flaw(f"score(…).{name} is not finite everywhere", "mask what cannot happen")
    if not isinstance(room.policy.version, int):
        yield Flaw(f"policy.version is {room.policy.version!r}", "begin with 0")


def scores_what_it_sampled(room: Room) -> Iterator[Flaw]:
    """The log-probs recorded while sampling are those that score gives."""
    apart = (room.logp(room.rows) - made(room.rows.old_logp_NT, room.rows)).abs()
    if float(apart.max()) > AGREE:
        row = int(apart.amax(1).argmax())
        what = f"old_logp_NT and score(…) are up to {float(apart.max()):.3g} apart (row {row})"
        remedy = "record the log-probs of the policy that samples, of the same inputs, without dropout"
        yield Flaw(what, remedy)


def scores_rows_alone(room: Room) -> Iterator[Flaw]:
    """A row's log-probs do not depend on the rows beside it."""
    rows, whole_NT = room.rows, room.logp(room.rows)
    order = list(range(len(rows)))[::-1]
    middle = len(order) // 2
    parts = [rows.select(part) for part in (order[:middle], order[middle:]) if part]
    found = {
        "some rows": torch.cat([room.logp(part) for part in parts]),
        "rows put together": room.logp(Rollouts.cat(parts)),
    }
    for name, logp_NT in found.items():
        apart = float((logp_NT - whole_NT[order]).abs().max())
        if apart > AGREE:
            what = f"score of {name} differs by {apart:.3g} from that of all"
            remedy = "score each row from its own inputs: Rollouts.select and cat pick these by row"
            yield Flaw(what, remedy)


def learns(room: Room) -> Iterator[Flaw]:
    """Gradients of the log-probs reach the parameters."""
    parameters = {name: p for name, p in room.policy.parameters().items() if p.requires_grad}
    if not parameters:
        yield Flaw("no parameter has requires_grad", "return the trained tensors themselves", serious=False)
        return
    room.policy.train()
    logp_NT = room.policy.score(room.rows).logp_NT
    room.policy.eval()
    weight_N = torch.cos(torch.arange(len(room.rows), device=logp_NT.device))  # rows do not cancel out
    loss: Any = (made(logp_NT, room.rows) * weight_N[:, None]).sum()
    if loss.requires_grad:
        loss.backward()
    without = [name for name, p in parameters.items() if p.grad is None]
    for parameter in parameters.values():
        parameter.grad = None
    if len(without) == len(parameters):
        what = "the log-probs do not depend on the parameters: nothing would be learned"
        yield Flaw(what, "parameters() must give the tensors that score computes with, not copies")
    elif without:
        what = f"no gradient reaches {', '.join(without[:3])}" + (" …" if without[3:] else "")
        yield Flaw(what, "leave out what is not trained by this loss", serious=False)


def splits_rows(room: Room) -> Iterator[Flaw]:
    """split has every row once, whatever the limit."""
    for limit, halvings in ((None, 0), (None, 1), (1, 0), (3, 0), (1000, 2)):
        parts = room.policy.split(room.rows, limit, halvings)
        rows = sorted(row for part in parts for row in part)
        if rows != list(range(len(room.rows))) or not all(len(part) for part in parts):
            what = f"split(rows, {limit}, {halvings}) gives rows {rows[:8]}… of {len(room.rows)}"
            yield Flaw(what, "every row in exactly one part; see grpo.rollouts.by_cost")
            return


# --- the reference ----------------------------------------------------------------------------------------------------


def reference_stays(room: Room) -> Iterator[Flaw]:
    """The reference scores every decision, and does not move when the policy learns."""
    if room.reference is None:
        return
    before = room.reference.score(room.rows)
    if tuple(before.shape) != tuple(room.rows.mask_NT.shape) or before.requires_grad:
        what = f"reference.score has shape {tuple(before.shape)}, requires_grad={before.requires_grad}"
        yield Flaw(what, "log-probs of the shape of mask_NT, without gradients")
        return
    before = made(before, room.rows).clone()
    with _elsewhere(room.policy.parameters()):
        apart = float((made(room.reference.score(room.rows), room.rows) - before).abs().max())
    if apart > 0:
        what = f"the reference moved by {apart:.3g} when the policy's weights did"
        yield Flaw(what, "keep a copy: policy.logits.detach().clone(), copy.deepcopy(policy)")


def reference_follows(room: Room) -> Iterator[Flaw]:
    """sync with alpha=1 makes it the policy; one that cannot follow says so."""
    if room.reference is None:
        return
    own = {name: p.detach().clone() for name, p in room.reference.parameters().items()}
    try:
        room.reference.sync(room.policy.parameters(), 1.0)
    except ValueError:
        return
    apart = float((made(room.reference.score(room.rows), room.rows) - room.logp(room.rows)).abs().max())
    with torch.no_grad():
        for name, parameter in room.reference.parameters().items():
            parameter.copy_(own[name])
    if apart > AGREE:
        what = f"after sync(policy.parameters(), 1.0) the reference is {apart:.3g} from the policy"
        yield Flaw(what, "reference ← α·policy + (1−α)·reference, in place")


# --- the end ----------------------------------------------------------------------------------------------------------


def closes_twice(room: Room) -> Iterator[Flaw]:
    """close lets go, and a second time does nothing."""
    room.source.close()
    room.source.close()
    yield from ()


PROMISES: tuple[Promise, ...] = (
    *(is_whole, declares_capabilities, collects_groups),
    *(scores_every_decision, scores_what_it_sampled, scores_rows_alone, learns, splits_rows),
    *(reference_stays, reference_follows),
    *(tells_numbers, shows_rows, keeps_a_state, collects_the_same_again, collects_from_given_starts),
    closes_twice,
)
"""In the order in which they are tried; the first two need no rollouts, the last ends the source."""

NEEDED = (is_whole, collects_groups, scores_every_decision)
"""Without these there is nothing to try the others on."""


# --- small tools ------------------------------------------------------------------------------------------------------


def _members(protocol: type) -> list[str]:
    """The names that a protocol asks for."""
    methods = [name for name in vars(protocol) if not name.startswith("_")]
    return list(dict.fromkeys([*inspect.get_annotations(protocol), *methods]))


def _words(promise: Promise) -> str:
    return (promise.__doc__ or promise.__name__).rstrip(".")


def made(x_NT: Tensor, rows: Rollouts) -> Tensor:
    """Where a decision was made; 0 elsewhere."""
    return torch.where(rows.mask_NT, x_NT.float(), 0.0)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float | np.number)


def _saved(state: State) -> State:
    """As a checkpoint gives it back: values through JSON, arrays of its own."""
    arrays = {name: a.clone() if isinstance(a, Tensor) else a.copy() for name, a in state.arrays.items()}
    return State(json.loads(json.dumps(dict(state.values))), arrays)


def _same(one: Any, other: Any) -> bool:
    """Equal to the last bit, NaN where NaN is, however deep."""
    if one is other:
        return True
    if isinstance(one, Tensor | np.ndarray):
        if type(one) is not type(other) or one.shape != other.shape or one.dtype != other.dtype:
            return False
        equal: Any = (one == other) | ((one != one) & (other != other))
        return bool(equal.all())
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        both = isinstance(other, list | tuple) and len(one) == len(other)
        return both and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if hasattr(one, "__dict__") and type(one) is type(other):
        return _same(vars(one), vars(other))
    return bool(one == other or (one != one and other != other))


@contextmanager
def _elsewhere(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """The weights a little off, as after an update; as they were, afterwards."""
    own = {name: p.detach().clone() for name, p in parameters.items()}
    try:
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.add_(0.1 * torch.randn_like(parameter))
        yield
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(own[name])
