"""Acting beside learning: while the learner learns, a copy of the agent plays the steps of the next round.

    collect n      take in what was played ─► copy the agent ─┬─► learn, imagine, improve the actor
                                                             └─► a thread: play the steps of n + 1 onto a tape

A round's steps are taken in when it is over, whole, and what is random about them comes from its number: nothing that
is learned depends on which of the two is faster. The copy lives on the CPU, so nothing of the thread's waits for, or
gets into, what the learner has queued on another device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from torch import Tensor, nn

from grpo.worldmodel.learner import WorldModel
from grpo.worldmodel.policy import ActorPolicy
from grpo.worldmodel.replay import Replay


class Tape:
    """Steps with their latents, to be remembered later; it takes what a replay takes."""

    def __init__(self) -> None:
        self._steps: list[tuple[dict[str, np.ndarray], np.ndarray]] = []
        self._latents: list[tuple[Tensor, Tensor]] = []

    def add_batch(self, steps: dict[str, np.ndarray], lanes: np.ndarray) -> np.ndarray:
        """One step of these lanes; their place on the tape."""
        self._steps.append((steps, lanes))
        return np.array(len(self._steps) - 1)

    def write_latents(self, at: np.ndarray, deter: Tensor, stoch: Tensor) -> None:
        """The latents of the step that was added last."""
        self._latents.append((deter, stoch))

    def remember(self, replay: Replay) -> None:
        """Give the replay everything, in order."""
        for (steps, lanes), latent in zip(self._steps, self._latents, strict=True):
            replay.write_latents(replay.add_batch(steps, lanes), *latent)


class Beside:
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
        self._pool = ThreadPoolExecutor(1, "acting")
        self._round: Future[Tape] | None = None

    def refresh(self) -> None:
        """Be the agent as it is now; nothing may be playing."""
        for own, learner in self._pairs:
            own.load_state_dict(learner.state_dict())

    def begin(self, play: Callable[[Tape], object]) -> None:
        """Play with the agent as it is now, and come back at once."""

        def round() -> Tape:
            tape = Tape()
            play(tape)
            return tape

        self.refresh()
        # A thread keeps the number of threads of its first question: asked in the middle of a scan, that may be one.
        self._pool.submit(torch.get_num_threads).result()
        self._round = self._pool.submit(round)

    def finish(self) -> Tape | None:
        """Wait for the round that is being played, and raise what it raised, every time; None: there is none."""
        tape = None if self._round is None else self._round.result()
        self._round = None
        return tape

    def forget(self) -> None:
        """Wait for it, and let it and its errors be."""
        if self._round is not None:
            wait([self._round])
        self._round = None

    def close(self) -> None:
        """End the thread, once it is done with what it is at."""
        self.forget()
        self._pool.shutdown()
