"""Rewards: whatever judges completions, called in its own way, in time-limited processes, its failures data.

    rewards = Rewards([correctness, "my_rewards.py:brevity", "think", "path/to/reward-model"])
    judgement = rewards.judge(samples, step=0)
    judgement.parts_NK, judgement.errors

    pending = rewards.open(columns, rows=64, step=0)           the same, begun before the last sample is made
    rewards.add(pending, {8: sample, 9: sample})               groups in any order, each sample under its row
    judgement = rewards.finish(pending)

Plain and asynchronous functions run in worker processes and get copies; what cannot be sent there (a lambda, a
notebook's function) runs in this process with a warning, without a time limit. Reward models run in this process.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo.errors import ConfigError, line, warn
from grpo.language.rewards.calling import Call, Desk, Messages, Reply, Task, Verdict, answer, messages
from grpo.language.rewards.given import name_of, resolve, tokenizers_of, unique
from grpo.language.rewards.maths import Correctness
from grpo.lazy import lazily
from grpo.processors import processors
from grpo.run.functions import FromFile
from grpo.run.guard import again, unguarded_script
from grpo.workers import CannotStart, Feed, Outcome, Pool

if TYPE_CHECKING:
    from grpo.language.rewards.known import (
        accuracy_reward,
        get_cosine_scaled_reward,
        get_repetition_penalty_reward,
        get_soft_overlong_punishment,
        reasoning_accuracy_reward,
        think_format_reward,
    )
    from grpo.language.samples import Sample

__all__ = [
    "FromFile", "Judgement", "Messages", "Pending", "Rewards", "accuracy_reward", "get_cosine_scaled_reward",
    "get_repetition_penalty_reward", "get_soft_overlong_punishment", "messages", "reasoning_accuracy_reward",
    "think_format_reward",
]  # fmt: skip

_OF_TRL = ("accuracy_reward", "get_cosine_scaled_reward", "get_repetition_penalty_reward",
           "get_soft_overlong_punishment", "reasoning_accuracy_reward", "think_format_reward")  # fmt: skip
"""What scripts import from trl.rewards."""

__getattr__, __dir__ = lazily(__name__, dict.fromkeys(_OF_TRL, "grpo.language.rewards.known"))

ASYNC_GRACE = 5.0
"""Seconds over the limit that a whole batch of awaited calls gets, each of them being limited already."""
MOST_WORKERS = 8
MOST_ACTORS = 10_000
"""As many as the cluster has processors."""
TAKEN_FOR_MESSAGES = ("string indices must be integers", "'str' object has no attribute 'get'")
"""What Python says when a text is read as a list of messages."""
EMPTY = "string index out of range"
"""What it says when that text is empty."""


@dataclass(frozen=True)
class Judgement:
    """What the rewards say of a batch."""

    parts_NK: np.ndarray
    """A column a function, float64; NaN: no opinion, or a row that failed."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Of the rows that failed: which function, and what happened."""
    tracebacks: Mapping[int, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, list[Any]] = field(default_factory=dict)
    """Columns from log_extra, a value a row; None where nothing was said."""
    logged: Mapping[str, list[float]] = field(default_factory=dict)
    """What was told beside the rewards, by name: the metrics are means of these."""


@dataclass(eq=False)
class Pending:
    """A batch that is being judged, some rows after others."""

    rows: int
    state: Mapping[str, Any]
    """What functions get as `trainer_state`."""
    columns: Sequence[str]
    first: int
    """The place of its first row in the whole step, where ranks share one …"""
    of: int
    """… of so many rows: what a function draws does not depend on who asks it."""
    samples: dict[int, Sample] = field(default_factory=dict)
    """By row, as far as there are any."""
    feeds: list[tuple[Feed, Future[list[Outcome]], list[tuple[int, Task]]]] = field(default_factory=list)
    """For each pool what it is fed through, its outcomes, and the tasks they are of, with the function's number."""


class Rewards:
    """Reward functions and models, ready to judge."""

    def __init__(
        self,
        functions: Any,
        *,
        names: Sequence[str] | None = None,
        processing_classes: Any = None,
        timeout: float = 30.0,
        workers: int | None = None,
        cluster: str | None = None,
        model_device: str = "cpu",
        trust_remote_code: bool = False,
        settings: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        functions = list(functions) if isinstance(functions, (list, tuple)) else [functions]
        if names is not None and len(names) != len(functions):
            raise ConfigError(f"{len(names)} names for {len(functions)} reward functions")
        tokenizers = tokenizers_of(processing_classes, len(functions))
        found = [
            resolve(function, tokenizer, settings or {}, model_device, trust_remote_code)
            for function, tokenizer in zip(functions, tokenizers, strict=True)
        ]
        self.names = unique(names or [name_of(function) for function in found])
        """What each is called in metrics."""
        self.calls = tuple(Call.of(function, name) for function, name in zip(found, self.names, strict=True))
        self.timeout, self._seed, self._cluster = timeout, seed, cluster
        self._pools: list[tuple[Pool, list[int], ThreadPoolExecutor]] = []
        """With the numbers of its functions, and the one thread that drives it: a pool is not shared by threads."""
        self._pending: list[Pending] = []
        try:
            self._start(workers or (MOST_ACTORS if cluster else min(processors(), MOST_WORKERS)))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def grader(self) -> str | None:
        """The reward that is positive just where an evaluation, left to itself, would call an answer right."""
        own = (call.name for call in self.calls if isinstance(call.function, Correctness) and call.function.value > 0)
        return next(own, None)

    # --- judging ----------------------------------------------------------------------------------------------------

    def judge(self, samples: Sequence[Sample], step: int, state: Mapping[str, Any] | None = None) -> Judgement:
        """What the functions say of these samples."""
        return self.finish(self.begin(samples, step, state))

    def begin(self, samples: Sequence[Sample], step: int, state: Mapping[str, Any] | None = None) -> Pending:
        """Set the worker processes to it, and return at once."""
        columns = list(dict.fromkeys(name for sample in samples for name in sample.prompt.columns))
        pending = self.open(columns, len(samples), step, state)
        try:
            self.add(pending, dict(enumerate(samples)))
        except BaseException:
            self.drop(pending)
            raise
        for feed, _, _ in pending.feeds:
            feed.end()
        return pending

    def open(
        self,
        columns: Sequence[str],
        rows: int,
        step: int,
        state: Mapping[str, Any] | None = None,
        first: int = 0,
        of: int | None = None,
    ) -> Pending:
        """Get ready to judge so many rows, which are added as they are made; then `finish`, or `drop` in an emergency.

        columns: of the data, in whatever part they occur. first, of: where the rows are in a step that ranks share.
        """
        known = {"max_steps": None, "epoch": None, **(state or {}), "global_step": step, "step": step}
        pending = Pending(rows, known, columns, first, rows if of is None else of)
        self._pending.append(pending)
        for pool, _, thread in self._pools:
            feed = Feed()
            pending.feeds.append((feed, thread.submit(pool.run, feed), []))
        return pending

    def add(self, pending: Pending, samples: Mapping[int, Sample]) -> None:
        """Some rows, whole groups of them. Worker processes begin with these at once; asynchronous functions, which
        take as long for many as for one, and functions of this process wait for the last."""
        own = (name for sample in samples.values() for name in sample.prompt.columns)
        pending.columns = list(dict.fromkeys([*pending.columns, *own]))  # whoever makes samples may add some
        for call in self.calls:
            if samples:
                call.check(pending.columns)
            if _is_model(call):
                call.function.check(list(samples.values()))  # type: ignore[attr-defined]
        pending.samples |= samples
        everything = pending.samples if len(pending.samples) == pending.rows else {}
        for (_, here, _), (feed, _, sent) in zip(self._pools, pending.feeds, strict=True):
            given = {k: everything if self.calls[k].asynchronous else samples for k in here}
            new = [(k, task) for k in here for task in self._tasks(pending, k, given[k])]
            for k, task in sorted(new, key=lambda item: -len(item[1].rows)):  # whole batches first: they take longest
                sent.append((k, task))
                feed.put((here.index(k), task), f"{self._seed}/{pending.state['step']}/{self._place(pending, k, task)}")

    def finish(self, pending: Pending) -> Judgement:
        """Wait for the workers, and run what must run in this process."""
        replies = self._replies(pending)
        return _judgement(self.names, [pending.samples[row] for row in range(pending.rows)], replies)

    def drop(self, pending: Pending) -> None:
        """Forget about it: what is being judged is killed. Nothing happens where it is finished."""
        for feed, running, _ in pending.feeds:
            feed.drop()
            if not running.cancel():
                wait([running])
            feed.close()
        if pending in self._pending:  # last: where this is interrupted, `close` does it again
            self._pending.remove(pending)

    def verdicts(self, samples: Sequence[Sample], step: int = 0, played: bool = True) -> list[list[Verdict]]:
        """What each function says of each sample, as it says it: a failure of one does not touch the others.

        played: whether samples went through environments; where not, functions that ask these are not asked.
        """
        found = [[Verdict()] * len(samples) for _ in self.calls]
        for k, task, reply in self._replies(self.begin(samples, step), played):
            for row, verdict in zip(task.rows, reply.verdicts, strict=True):
                found[k][row] = verdict
        return found

    def _replies(self, pending: Pending, played: bool = True) -> list[tuple[int, Task, Reply]]:
        try:
            for feed, _, _ in pending.feeds:
                feed.end()
            outside = {*range(len(self.calls))} - {k for _, here, _ in self._pools for k in here}
            outside = {k for k in outside if played or not self.calls[k].asks_environments}  # they are always here
            tasks = [(k, task) for k in sorted(outside) for task in self._tasks(pending, k, pending.samples)]
            found = [(k, task, self._here(self.calls[k], task)) for k, task in tasks]
            for _, running, sent in pending.feeds:
                for (k, task), outcome in zip(sent, running.result(), strict=True):
                    reply: Reply = outcome.value if outcome.ok else _lost(task, outcome)
                    found.append((k, task, _changed(reply, self.names[k], outcome.changed)))
            return self._heard_as_messages(pending, found)
        finally:
            self.drop(pending)

    def _heard_as_messages(
        self, pending: Pending, found: list[tuple[int, Task, Reply]]
    ) -> list[tuple[int, Task, Reply]]:
        """The same, for functions that read each completion as messages, TRL's way with chats: they get these from
        now on, and are asked again about what they could not read as text."""
        if any(sample.prompt.messages is None for sample in pending.samples.values()):
            return found
        for k, call in enumerate(self.calls):
            said = [verdict for other, _, reply in found if other == k for verdict in reply.verdicts]
            if call.wants_messages or not said or not all(_took_for_messages(verdict) for verdict in said):
                continue
            new = replace(call, wants_messages=True)
            tasks = self._tasks(pending, k, pending.samples, new)
            replies = [(k, task, self._here(new, task)) for task in tasks]
            if any(verdict.error is None for _, _, reply in replies for verdict in reply.verdicts):
                self.calls = tuple(new if call is other else other for other in self.calls)
                found = [item for item in found if item[0] != k] + replies
        return found

    def _tasks(self, pending: Pending, k: int, samples: Mapping[int, Sample], call: Call | None = None) -> list[Task]:
        """The calls of one function for these rows."""
        rows, call = sorted(samples), call or self.calls[k]
        made = call.tasks([samples[row] for row in rows], pending.columns, pending.state) if rows else []
        return [replace(task, rows=tuple(rows[i] for i in task.rows)) for task in made]

    def _place(self, pending: Pending, k: int, task: Task) -> str:
        """A call's number in the whole step, whatever part it comes in: what it draws follows from it."""
        at_once = [call.batched or call.asynchronous for call in self.calls]
        here = next(here for _, here, _ in self._pools if k in here)
        order = sorted(here, key=lambda k: pending.of == 1 or not at_once[k])
        first = sum(1 if at_once[other] else pending.of for other in order[: order.index(k)])
        row = pending.first + task.rows[0]
        return f"{first}.{row}" if at_once[k] and row else str(first + row)

    def _here(self, call: Call, task: Task) -> Reply:
        """In this process, on copies; awaited in a thread, since a notebook's own has a loop already."""
        try:
            task = task if call.asks_environments else copy.deepcopy(task)
        except Exception as error:  # a column that cannot be copied cannot be protected
            warn(f"reward {call.name}: its arguments cannot be copied ({line(error)})")
        if not call.asynchronous:
            return answer(call, task, self.timeout)
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(answer, call, task, self.timeout).result()

    # --- processes --------------------------------------------------------------------------------------------------

    def _start(self, workers: int) -> None:
        """One pool for the plain functions, one for the asynchronous; the rest stays here, with a warning."""
        able = [k for k, call in enumerate(self.calls) if not self._stays(call)]
        for asynchronous in (False, True):
            here = [k for k in able if self.calls[k].asynchronous == asynchronous]
            each = not asynchronous and any(not self.calls[k].batched for k in here)
            self._open(here, workers if each else min(workers, len(here)), self.timeout + asynchronous * ASYNC_GRACE)

    def _open(self, here: list[int], workers: int, timeout: float) -> None:
        if not here:
            return
        try:
            desk = Desk([self.calls[k] for k in here], self.timeout)
            if self._cluster is None:
                pool = Pool(desk, workers, timeout, or_inline=False)
            else:
                from grpo.cluster import RayPool

                pool = RayPool(desk, self._cluster, timeout, most=workers)
            self._pools.append((pool, here, ThreadPoolExecutor(1, thread_name_prefix="rewards")))
        except CannotStart as error:
            if len(here) == 1:
                _warn_inline(self.calls[here[0]], error.reason)
            else:  # one of them cannot be loaded over there: find out which
                for k in here:
                    self._open([k], workers, timeout)

    def _stays(self, call: Call) -> bool:
        """Whether it must run in this process; says so, once, unless that is as it should be."""
        if _is_model(call) or call.asks_environments:
            return True
        if self._cluster is not None:  # Ray sends what it is given, or says why it cannot
            return False
        script = unguarded_script()
        if script is not None:
            _warn_inline(call, again(script))
            return True
        if getattr(call.function, "__module__", "") == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
            _warn_inline(call, "a new process cannot load it from a notebook or shell; put it into a module or file")
            return True
        try:
            ForkingPickler.dumps(call)
        except Exception as error:  # each kind of object fails to be sent in its own way
            _warn_inline(call, f"{line(error)}; define it at the top of a module")
            return True
        return False

    def close(self) -> None:
        """Leave no process behind, whatever is being judged."""
        while self._pending:
            self.drop(self._pending[-1])
        for pool, _, thread in self._pools:
            thread.shutdown(wait=True)
            pool.close()
        self._pools.clear()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _took_for_messages(verdict: Verdict) -> bool:
    """Whether a function failed because it read a text as a list of messages."""
    return verdict.error is not None and any(sign in verdict.error for sign in (*TAKEN_FOR_MESSAGES, EMPTY))


def _is_model(call: Call) -> bool:
    return getattr(call.function, "runs_here", False) is True


def _warn_inline(call: Call, reason: str) -> None:
    warn(f"reward {call.name} runs in this process, without a time limit, not in one of its own: {reason}")


def _changed(reply: Reply, name: str, changed: str) -> Reply:
    """The reply, and that the call changed Python itself where it did."""
    if not changed:
        return reply
    warn(
        f"reward {name} changed {changed}: its process is replaced, so that later calls do not see it; patch at the "
        "top of its module, or not at all",
    )
    return replace(reply, metrics=(*reply.metrics, (f"rewards/{name}/changed_python", 1.0)))


def _lost(task: Task, outcome: Outcome) -> Reply:
    """A call whose process was killed or died."""
    return Reply((Verdict(error=outcome.reason),) * len(task.rows))


def _judgement(
    names: Sequence[str], samples: Sequence[Sample], replies: Sequence[tuple[int, Task, Reply]]
) -> Judgement:
    parts_NK = np.full((len(samples), len(names)), np.nan)
    problems: dict[int, list[tuple[str, Verdict]]] = {}
    logged: dict[str, list[float]] = {}
    extras: dict[str, list[Any]] = {}
    for k, task, reply in sorted(replies, key=lambda item: (item[0], item[1].rows)):
        for row, verdict in zip(task.rows, reply.verdicts, strict=True):
            if verdict.error is not None:
                problems.setdefault(row, []).append((names[k], verdict))
            elif verdict.value is not None:
                parts_NK[row, k] = verdict.value
            for part, value in verdict.parts.items():
                logged.setdefault(f"rewards/{names[k]}/{part}", []).append(value)
        for name, value in reply.metrics:
            logged.setdefault(name, []).append(value)
        for column, row, value in reply.extras:
            extras.setdefault(column, [None] * len(samples))[row] = value
    errors = {row: "; ".join(f"{name}: {v.error}" for name, v in found) for row, found in sorted(problems.items())}
    unjudged_N = np.isnan(parts_NK).all(1) & np.array([sample.reward is None for sample in samples], dtype=bool)
    if names and any(row not in errors for row in np.flatnonzero(unjudged_N).tolist()):
        warn(  # in words that do not change: once is enough
            "all reward functions returned None for some completions, and nothing is learned from what nobody judges: "
            "a missing return? Give at least one reward that applies to every row",
        )
    parts_NK[list(errors)] = np.nan
    metrics = told(names, parts_NK, logged)
    tracebacks = {row: "\n".join(v.trace for _, v in found if v.trace) for row, found in problems.items()}
    traces = {row: text for row, text in tracebacks.items() if text}
    return Judgement(parts_NK, errors, traces, metrics, extras, logged)


def told(names: Sequence[str], parts_NK: np.ndarray, logged: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The metrics of a batch."""
    return {name: float(np.mean(values)) for name, values in logged.items()} | spread(names, parts_NK)


def spread(names: Sequence[str], parts_NK: np.ndarray) -> dict[str, float]:
    """Mean and deviation of each reward, over the rows it has an opinion on."""
    metrics: dict[str, float] = {}
    for k, name in enumerate(names):
        if len(known := parts_NK[~np.isnan(parts_NK[:, k]), k]):
            metrics[f"rewards/{name}/mean"] = float(known.mean())
            metrics[f"rewards/{name}/std"] = float(known.std(ddof=1)) if len(known) > 1 else 0.0
    return metrics
