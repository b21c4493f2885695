"""Copies of one environment in Ray's actors, on whatever machines: an actor that dies costs time, and no episode.

This side remembers how every member came to where it is: its seed and its actions. When an actor has died, with its
machine or by its own hand, another one plays the episodes of its members again, compares what they see with what was
seen before, and is asked once more. Only a member that takes its actor down when it is asked alone, or whose episode
goes otherwise the second time, is reported in `errors`; an environment that hangs takes its actor down, too.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo.cluster import Died, Handle, Home, awaited, begun, counted, hire, join, leave, sendable
from grpo.envs.fleet import Begun, EnvError, Snapshot, Stepped, Tree
from grpo.envs.processes import Alarm, allowed_for
from grpo.envs.serial import Make, SerialFleet, told
from grpo.envs.spaces import leaves, put, take, zeros
from grpo.envs.spread import SpreadFleet, calls, name_of_factory, picked
from grpo.errors import line
from grpo.run import output
from grpo.workers import CannotStart

BEGINS = ("reset", "restore")


@dataclass
class _Episode:
    """How a member came to where it is."""

    seed: int
    actions: list[np.ndarray] = field(default_factory=list)
    seen: bytes = b""
    """A digest of its last observation."""


class RayFleet(SpreadFleet):
    """`size` members in actors: `ray`, one a processor of the cluster, or `ray:N`. The factory must be sendable."""

    def __init__(self, make: Make, size: int, where: str = "ray", timeout: float = 30.0) -> None:
        self._ray = join()
        self._closed = False
        try:
            super().__init__(name_of_factory(make), size, counted(where, size))
            if size < 1 or timeout <= 0:
                raise EnvError(f"{self.name}: size and timeout must be above 0; got {size}, {timeout}")
            sendable(self._ray, make, self.name)
            self._made = make, self.name, size, timeout
            self._timeout = timeout
            self._episodes: dict[int, _Episode] = {}
            self._stale: set[int] = set()
            """Actors that may have done more than is known here."""
            self._actors = [self._hired() for _ in range(self._count)]
            for w in range(self._count):  # one that has no room in the cluster would be waited for without end
                self._begun(w, "cannot be started")
            about = self._ask({0: ("describe", ())})[0]
            if about is None:
                raise EnvError(self._lost[0])
            self._described(about)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave no actor behind."""
        if not self._closed:
            self._closed = True
            try:
                for actor in vars(self).get("_actors", ()):
                    self._ray.kill(actor)
            finally:
                leave()

    # --- calls ------------------------------------------------------------------------------------------------------

    def _ask(self, calls: Mapping[int, tuple[str, Any]]) -> dict[int, Any]:
        if self._closed:
            raise EnvError(f"{self.name}: the fleet is closed")
        stale = self._stale & {*calls}
        self._stale |= {*calls}
        references = {w: self._actors[w].call.remote(*call) for w, call in calls.items() if w not in stale}
        answers: dict[int, Any] = {}
        for w in calls:
            try:
                if w in stale:
                    raise Died
                answers[w] = self._heard(references[w], *calls[w])
            except Died:
                answers[w] = self._again(w, *calls[w])
            self._stale.discard(w)
        return answers

    def _one(self, w: int, how: str, arguments: Any) -> Any:
        """One actor's answer; Died."""
        return self._heard(self._actors[w].call.remote(how, arguments), how, arguments)

    def _heard(self, reference: Any, how: str, arguments: Any) -> Any:
        """An answer, and what is remembered of it."""
        answer, problem = awaited(self._ray, reference)
        if problem is not None:
            raise EnvError(problem)
        if isinstance(answer, Begun | Stepped):
            self._remember(how, arguments[0], arguments[1], answer)
        return answer

    def _remember(self, how: str, numbers: Sequence[int], given: Any, answer: Begun | Stepped) -> None:
        for at, number in enumerate(numbers):
            if at in answer.errors:
                self._episodes.pop(number, None)
                continue
            if how == "reset":
                self._episodes[number] = _Episode(given[at])
            elif how == "restore":
                self._episodes[number] = _Episode(given[at].seed, list(given[at].actions))
            else:
                self._episodes[number].actions.append(given[at])
            self._episodes[number].seen = _digest(answer.observation, at)

    # --- when an actor has died -------------------------------------------------------------------------------------

    def _again(self, w: int, how: str, arguments: Any) -> Any:
        """The answer of another actor, which is asked for all at once, and should that fail, member by member."""
        self._renew(w)
        try:
            self._recover(w, _under_way(how, arguments))
            if how != "step" or not self._lost.keys() & {*arguments[0]}:
                return self._one(w, how, arguments)
        except Died as error:
            self._renew(w)
            if how not in ("reset", "restore", "step"):  # about nobody in particular
                for number in range(w, self.size, self._count):
                    self._lose(number, str(error))
                return None
            self._recover(w, _under_way(how, arguments))
        return self._one_by_one(w, how, *arguments)

    def _one_by_one(self, w: int, how: str, numbers: Sequence[int], given: Any) -> Begun | Stepped:
        """Each member alone, so that one which takes its actor down is found."""
        parts: dict[int, Any] = {}
        errors: dict[int, str] = {}
        for at, number in enumerate(numbers):
            if number in self._lost and how == "step":  # over playing its episode again
                errors[at] = self._lost[number]
                continue
            began = time.monotonic()
            try:
                parts[at] = self._one(w, how, ([number], picked(given, [at])))
                errors |= dict.fromkeys([at] * len(parts[at].errors), "".join(parts[at].errors.values()))
            except Died as error:
                hung = time.monotonic() - began >= self._timeout
                self._lose(number, f"hung for {self._timeout:g} s" if hung else f"its process died ({error})")
                errors[at] = self._lost[number]
                self._renew(w)
                left = numbers[at + 1 :] if how in BEGINS else ()
                self._recover(w, left)
        return _joined(self.observation_space, how, len(numbers), parts, errors)

    def _recover(self, w: int, without: Sequence[int] = ()) -> None:
        """Play the episodes of an actor's members again, but for those that are about to begin another one."""
        mine = range(w, self.size, self._count)
        numbers = [n for n in mine if n in self._episodes and n not in self._lost and n not in without]
        try:
            self._replay(w, numbers)
        except Died:  # one of them is too much for it: find out which
            for number in numbers:
                self._renew(w)
                try:
                    self._replay(w, [number])
                except Died as error:
                    self._lose(number, f"its process died when it was played again ({error})")
            self._renew(w)
            self._replay(w, [number for number in numbers if number not in self._lost])

    def _replay(self, w: int, numbers: list[int]) -> None:
        if not numbers:
            return
        known = [self._episodes[number] for number in numbers]
        moments = [Snapshot(one.seed, np.array(one.actions)) for one in known]
        answer, problem = awaited(self._ray, self._actors[w].call.remote("restore", (numbers, moments)))
        for at, (number, one) in enumerate(zip(numbers, known, strict=True)):
            if problem is not None or at in answer.errors:
                self._lose(number, f"lost with its actor ({problem or answer.errors[at]})")
            elif _digest(answer.observation, at) != one.seen:
                self._lose(
                    number,
                    "lost with its actor: played again, its episode went otherwise; draw from self.np_random only",
                )

    def _lose(self, number: int, what: str) -> None:
        self._episodes.pop(number, None)
        self._lost[number] = f"{self.name} member {number} (actor {number % self._count}): {what}"

    def _hired(self) -> Handle:
        return hire(self._ray, _Host, self._count, *self._made)

    def _renew(self, w: int) -> None:
        """Another actor, on whatever machine has room for it."""
        self._ray.kill(self._actors[w])
        self._actors[w] = self._hired()
        self._begun(w, "has died, and no other can be started")

    def _begun(self, w: int, what: str) -> None:
        try:
            begun(self._ray, self._actors[w])
        except CannotStart as error:
            raise EnvError(f"{self.name}: actor {w} {what}: {error}") from None


def _under_way(how: str, arguments: Any) -> Sequence[int]:
    """Members whose episodes a call ends, because it begins others."""
    return list(arguments[0]) if how in BEGINS else ()


def _digest(seen: Tree, at: int) -> bytes:
    """Of what one member sees."""
    found = hashlib.blake2b(digest_size=16)
    for part in leaves(take(seen, np.array([at]))):
        found.update(np.ascontiguousarray(part).tobytes())
    return found.digest()


def _joined(space: Any, how: str, count: int, parts: Mapping[int, Any], errors: Mapping[int, str]) -> Begun | Stepped:
    """One answer of those to single members."""
    seen = zeros(space, count)
    for at, part in parts.items():
        put(seen, [at], part.observation)
    if how in BEGINS:
        return Begun(seen, errors)
    reward_M, success_M = np.zeros(count), np.full(count, np.nan)
    terminated_M, truncated_M = np.zeros(count, bool), np.zeros(count, bool)
    for at, part in parts.items():
        reward_M[at], terminated_M[at], truncated_M[at] = part.reward_M[0], part.terminated_M[0], part.truncated_M[0]
        success_M[at] = np.nan if part.success_M is None else part.success_M[0]
    return Stepped(seen, reward_M, terminated_M, truncated_M, told(success_M), errors)


# --- in the actor ---------------------------------------------------------------------------------------------------


class _Host:
    """The actor: a fleet of some members. One that stays in an environment for too long ends its own process."""

    def __init__(self, home: Home, make: Make, name: str, size: int, timeout: float) -> None:
        home.enter()
        output.install()  # what an environment prints is nobody's failure
        self._make, self._name, self._size, self._timeout = make, name, size, timeout
        self._fleet: SerialFleet | None = None
        self._alarm = Alarm(0.0, open(os.devnull, "w"))  # noqa: SIM115  # open for as long as the process

    def ready(self) -> None:
        """It is there."""

    def call(self, how: str, arguments: Any) -> tuple[Any, str | None]:
        """The fleet's answer, or what is wrong with the question."""
        try:
            self._fleet = self._fleet or SerialFleet(self._make, self._size, self._watch)
            return calls(self._fleet)[how](*arguments), None
        except EnvError as error:
            return None, str(error)
        except BaseException as error:  # also sys.exit: an environment has no say in when training ends
            return None, f"{self._name}: {line(error)}"
        finally:
            self._alarm.off()

    def _watch(self, member: int, step: int) -> None:
        self._alarm(allowed_for(step, self._timeout))
