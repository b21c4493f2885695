"""Tries that are asked for ahead of their step, so that neither the sampler nor the learner waits for the other.

    steps done          0                          1                          2
    asked for, up to    all of 0, all of 1         all of 2                   all of 3              staleness 1
                        all of 0, 0.3 of 1         0.7 of 1, 0.3 of 2         0.7 of 2, 0.3 of 3    staleness 0.3
    learned from        0                          1                          2

With k steps done, groups are admitted up to place (k + 1 + staleness) × P, P groups a step: as many are under way at
most as that leaves, and a try is at most ⌈staleness⌉ steps old when it is learned from. A step learns from its own
groups, whichever end first: none is ever thrown away (that would favour short ones) and the order of the data is that
of a run that does not ask ahead. Groups that have ended are saved with a checkpoint; the others are asked for again.
"""

from __future__ import annotations

import atexit
import math
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo import together
from grpo.agreement import attempted
from grpo.capabilities import CollectsAhead, Divides
from grpo.config import ConfigError
from grpo.core import kl
from grpo.keeping import copies
from grpo.protocols import Collected, CollectRequest, Ranks, RolloutSource, Slots, State, as_part, part
from grpo.rollouts import Rollouts

PARTING = 5.0
"""Seconds for which a process that ends waits for its samplers."""
TEND = 2.0
"""Seconds after which a learner that waits has its source look after itself."""
NO_COPY = (
    "staleness > 0 needs a sampler with weights of its own, which goes on while the policy learns: a language model's, "
    "with --engine vllm (--servers …) or --engine inline; leave staleness out here"
)


@dataclass(frozen=True)
class Asked:
    """Groups of one step that have been asked for."""

    step: int
    begin: int
    end: int
    """Places of the step: begin, …, end − 1."""
    part: Future[State]


class Pace:
    """Asks a source for tries, ahead of their step where settings allow it, and puts them together again."""

    def __init__(self, ranks: Ranks, source: RolloutSource, groups: int, staleness: float) -> None:
        if staleness and not (isinstance(source, CollectsAhead) and isinstance(source, Divides)):
            raise ConfigError(NO_COPY)
        self._ranks, self.source, self._groups, self._staleness = ranks, source, groups, staleness
        self.until: int | None = None
        """Steps of the run, where they are known: nothing is asked for beyond."""
        self._asked: list[Asked] = []
        self._samplers = _Samplers() if staleness else None
        self._waited, self._since = 0.0, time.monotonic()

    def collect(self, request: CollectRequest) -> Collected:
        """Everybody's tries of a step; what is asked for with starts of its own, or again, is not asked for ahead."""
        if self._samplers is None:
            return together.collect(self._ranks, self.source, request)
        if request.starts is not None and not request.attempt:
            raise ConfigError("staleness > 0 needs a source that knows its next starts; leave out states, or staleness")
        assert isinstance(self.source, Divides)
        attempted(self._ranks, "new weights for the sampler", lambda: self._follow(request.step))
        if request.attempt:
            return together.collect(self._ranks, self.source, request)
        self._admit(request.step)
        mine = sorted((asked for asked in self._asked if asked.step == request.step), key=lambda asked: asked.begin)
        self._wait(mine, request.step)
        frame = self.source.collect_part(replace(request, slots=Slots(window=(0, 0))))
        told = [state for asked in mine for state in attempted(self._ranks, "collecting", asked.part.result)]
        self._asked = [asked for asked in self._asked if asked.step != request.step]
        return together.joined(frame, told)

    def _follow(self, step: int) -> State:
        """Have the source sample with the present weights; a failure of it is told to the other ranks."""
        assert self._samplers is not None and isinstance(self.source, CollectsAhead)
        self._samplers.most = self.source.follow(step)
        if self._samplers.most < 1:  # nobody would ever collect what is asked for
            raise ConfigError(NO_COPY)
        return State({}, {})

    def under_way(self) -> int:
        """Groups that have been asked for and not been learned from."""
        return sum(asked.end - asked.begin for asked in self._asked)

    def measures(self) -> dict[str, float]:
        """Shares of the time since this was last asked in which the learner waited for tries, the sampler for work."""
        if self._samplers is None:
            return {}
        now = time.monotonic()
        passed, waited = max(now - self._since, 1e-9), self._waited
        self._waited, self._since = 0.0, now
        return {"learner_waits": waited / passed, "sampler_waits": 1.0 - min(self._samplers.busy(now) / passed, 1.0)}

    # --- admission --------------------------------------------------------------------------------------------------

    def _admit(self, step: int) -> None:
        """Ask for what the bound allows and nobody has been asked for, the oldest first."""
        assert self._samplers is not None and isinstance(self.source, Divides)
        last = math.floor((step + 1 + self._staleness) * self._groups + 1e-9)
        last = last if self.until is None else max(min(last, self.until * self._groups), (step + 1) * self._groups)
        for found, begin, end in self._gaps(step * self._groups, last):
            slots = Slots(self._ranks.rank, self._ranks.size, (begin, end))
            self._asked.append(
                Asked(found, begin, end, self._samplers.put(self.source, CollectRequest(found, slots=slots)))
            )

    def _gaps(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Runs of places, numbered through all steps, that nobody has been asked for, cut where a step ends."""
        taken = {asked.step * self._groups + place for asked in self._asked for place in range(asked.begin, asked.end)}
        begin: int | None = None
        for place in range(first, last + 1):
            free = place < last and place not in taken
            if begin is not None and (not free or place % self._groups == 0):
                step, at = divmod(begin, self._groups)
                yield step, at, at + place - begin
                begin = None
            begin = place if free and begin is None else begin

    def _wait(self, mine: Sequence[Asked], step: int) -> None:
        began = time.monotonic()
        parts = [asked.part for asked in mine]
        while wait(parts, TEND).not_done:
            self._follow(step)  # a server that was lost may be back
        self._waited += time.monotonic() - began

    # --- what must be kept ------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Groups that have ended and wait for their step. Several ranks keep none: they are asked for again."""
        done = [asked for asked in self._asked if asked.part.done() and asked.part.exception() is None]
        done = done if self._ranks.size == 1 else []
        values, arrays = [], dict[str, Any]()
        for number, asked in enumerate(done):
            found = asked.part.result()
            values.append({"step": asked.step, "begin": asked.begin, "end": asked.end, "part": dict(found.values)})
            arrays |= as_part(str(number), copies(found.arrays))
        return State({"ahead": values} if values else {}, arrays)

    def load_state(self, state: State, step: int) -> None:
        """Go on with these; what was under way is forgotten, and asked for again when its step comes."""
        self._asked = []
        if self._samplers is None or self._ranks.size > 1:
            return
        for number, told in enumerate(state.values.get("ahead", ())):
            if told["step"] >= step and told["end"] <= self._groups:
                ended: Future[State] = Future()
                ended.set_result(State(told["part"], part(state.arrays, str(number))))
                self._asked.append(Asked(told["step"], told["begin"], told["end"], ended))


def age_metrics(rollouts: Rollouts, step: int) -> dict[str, float | None]:
    """How old tries are, and how far the policy has moved away from whoever made them: KL(sampler ‖ policy), by k3."""
    metrics: dict[str, float | None] = {}
    mask_NT = rollouts.mask_NT if rollouts.learns_N is None else rollouts.mask_NT & rollouts.learns_N[:, None]
    if rollouts.version_NT is not None:
        age_M = (step - rollouts.version_NT)[rollouts.mask_NT].float()
        metrics |= {"staleness": float(age_M.mean()), "staleness/max": float(age_M.max())} if len(age_M) else {}
    if rollouts.sampled_logp_NT is not None:
        known_NT = mask_NT & ~torch.isnan(rollouts.sampled_logp_NT)
        if bool(known_NT.any()):
            gap_M = kl.k3(rollouts.sampled_logp_NT[known_NT], rollouts.old_logp_NT[known_NT])
            metrics["mismatch_kl"] = float(gap_M.mean())
    return metrics


class _Samplers:
    """Threads that collect parts, first come, first served; they end with the process, which waits a little for what
    is being computed: torch aborts a process that ends under its feet."""

    def __init__(self) -> None:
        self.most = 1
        """Threads, at most."""
        self._idle, self._over = threading.Event(), False
        self._idle.set()
        atexit.register(_let_go, weakref.ref(self))
        self._waiting: queue.SimpleQueue[tuple[Divides, CollectRequest, Future[State]]] = queue.SimpleQueue()
        self._threads = 0
        self._lock, self._running, self._began, self._busy = threading.Lock(), 0, 0.0, 0.0

    def put(self, source: Divides, request: CollectRequest) -> Future[State]:
        """Have it collected; returns at once."""
        found: Future[State] = Future()
        self._waiting.put((source, request, found))
        if self._threads < self.most:
            self._threads += 1
            threading.Thread(target=self._work, daemon=True, name=f"sampler-{self._threads}").start()
        return found

    def busy(self, now: float) -> float:
        """Seconds since the last question in which something was collected."""
        with self._lock:
            spent = self._busy + (now - self._began if self._running else 0.0)
            self._busy, self._began = 0.0, now
        return spent

    def let_go(self, seconds: float) -> None:
        """Begin nothing more, and wait for what is under way."""
        self._over = True
        self._idle.wait(seconds)

    def _work(self) -> None:
        while not self._over:
            source, request, found = self._waiting.get()
            self._count_running(1)
            try:
                if self._over:
                    return
                made = together.packed(source.collect_part(request))
                found.set_result(State(made.values, {name: x.cpu() for name, x in made.arrays.items()}))
            except BaseException as error:
                found.set_exception(error)
            finally:
                self._count_running(-1)

    def _count_running(self, more: int) -> None:
        with self._lock:
            now = time.monotonic()
            if self._running:
                self._busy += now - self._began
            self._began, self._running = now, self._running + more
            (self._idle.clear if self._running else self._idle.set)()


def _let_go(samplers: weakref.ref[_Samplers]) -> None:
    if (found := samplers()) is not None:
        found.let_go(PARTING)
