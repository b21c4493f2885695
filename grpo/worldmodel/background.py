"""Acting beside learning: while the learner learns, a copy of the agent plays the steps of the next round.

    collect n      take in what was played ─► copy the agent ─┬─► learn, imagine, improve the actor
                                                             └─► a thread: play the steps of n + 1 into a buffer

A round's steps are taken in when it is over, whole, and what is random about them comes from its number: nothing that
is learned depends on which of the two is faster. The copy lives on the CPU, so nothing of the thread's waits for, or
gets into, what the learner has queued on another device.

Who leaves, at the end or by a second Ctrl-C, waits for the step that is being played, not for the round.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from grpo.worldmodel.model.world_model import WorldModel
from grpo.worldmodel.policy import ActorPolicy
from grpo.worldmodel.replay.buffer import Replay

T = TypeVar("T")
Work: TypeAlias = "SimpleQueue[Callable[[], None] | None]"


class _Left(BaseException):
    """Ends a round that nobody waits for any more."""


class RoundBuffer:
    """Steps of a round with their latents, to be remembered later; it takes what a replay takes, while it is wanted."""

    def __init__(self, left: threading.Event) -> None:
        self._left = left
        self._steps: list[tuple[dict[str, np.ndarray], np.ndarray]] = []
        self._latents: list[tuple[Tensor, Tensor]] = []

    def add_batch(self, steps: dict[str, np.ndarray], lanes: np.ndarray) -> np.ndarray:
        """One step of these lanes; their place in the buffer."""
        if self._left.is_set():
            raise _Left
        self._steps.append((steps, lanes))
        return np.array(len(self._steps) - 1)

    def write_latents(self, at: np.ndarray, deter: Tensor, stoch: Tensor) -> None:
        """The latents of the step that was added last."""
        self._latents.append((deter, stoch))

    def remember(self, replay: Replay) -> None:
        """Give the replay everything, in order."""
        for (steps, lanes), latent in zip(self._steps, self._latents, strict=True):
            replay.write_latents(replay.add_batch(steps, lanes), *latent)


class BackgroundActor:
    """A copy of the agent, and the thread that it plays in."""

    def __init__(self, model: WorldModel, policy: ActorPolicy) -> None:
        shared = (model.decoder, model.reward_head, model.continue_head)  # to play, nobody needs these
        self.model: WorldModel = copy.deepcopy(model, {id(module): module for module in shared})
        self.policy = copy.deepcopy(policy)
        self._pairs: list[tuple[nn.Module, nn.Module]] = [
            (self.model.encoder, model.encoder),
            (self.model.rssm, model.rssm),
            (self.policy.module, policy.module),
        ]
        for own, _ in self._pairs:
            own.to("cpu").requires_grad_(False)
        self._round: Future[RoundBuffer] | None = None
        self._left = threading.Event()
        """Set: the round that is being played is not wanted any more."""
        # One thread for all rounds: each new one starts OpenMP's threads anew, and rounds are several times slower. Not
        # an executor's: at exit the interpreter waits for those before anybody can tell them to leave.
        self._work: Work = SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._work,), name="acting", daemon=True)
        self._end = weakref.finalize(self, _ended, thread, self._work, self._left)  # also at exit
        thread.start()

    def refresh(self) -> None:
        """Be the agent as it is now; nothing may be playing."""
        for own, learner in self._pairs:
            own.load_state_dict(learner.state_dict())

    def begin(self, play: Callable[[RoundBuffer], object]) -> None:
        """Play with the agent as it is now, and come back at once."""

        def round() -> RoundBuffer:
            buffer = RoundBuffer(self._left)
            play(buffer)
            return buffer

        self.refresh()
        self._left.clear()
        # A thread keeps the number of threads of its first question: asked in the middle of a scan, that may be one.
        self._asked(torch.get_num_threads).result()
        self._round = self._asked(round)

    def finish(self) -> RoundBuffer | None:
        """Wait for the round that is being played, and raise what it raised, every time; None: there is none."""
        buffer = None if self._round is None else self._round.result()
        self._round = None
        return buffer

    def forget(self) -> None:
        """Have the round left after the step it is at, and let it and its errors be."""
        self._left.set()
        if self._round is not None:
            wait([self._round])
        self._round = None

    def close(self) -> None:
        """End the thread, once it is done with the step it is at."""
        self.forget()
        self._end()

    def _asked(self, work: Callable[[], T]) -> Future[T]:
        """Have the thread do this next."""
        outcome: Future[T] = Future()

        def job() -> None:
            try:
                outcome.set_result(work())
            except BaseException as error:  # whoever waits for it gets it
                outcome.set_exception(error)

        self._work.put(job)
        return outcome


def _serve(work: Work) -> None:
    """Do what is asked for until nothing more will be."""
    while (job := work.get()) is not None:
        job()
        del job  # it knows the environments, which nobody else may want by now


def _ended(thread: threading.Thread, work: Work, left: threading.Event) -> None:
    left.set()
    work.put(None)
    if thread is not threading.current_thread():  # which may be who finds that nobody wants the rest
        thread.join()
