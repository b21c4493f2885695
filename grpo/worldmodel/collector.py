"""Playing in the environment and remembering it: the steps that are due, the replay they go to, the updates they earn.

    advance(step) ─► play the steps of this round into the replay ─► how many updates of the world model are due

With `acting=beside` the round was played while the last one was learned from, and `advance` begins the next one first.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo.config import ConfigError
from grpo.envs.fleet import Fleet
from grpo.errors import SamplesFailed, line, warn
from grpo.protocols import State, as_part, part
from grpo.run.files import UNFIT, FolderError
from grpo.seeding import derive, generator
from grpo.worldmodel.acting import Lanes
from grpo.worldmodel.background import BackgroundActor, RoundBuffer
from grpo.worldmodel.config import WorldModelConfig
from grpo.worldmodel.model.learner import Learner
from grpo.worldmodel.policy import ActorPolicy
from grpo.worldmodel.replay.buffer import Replay, Sample, TrainRatio
from grpo.worldmodel.replay.chunks import REMEDY
from grpo.worldmodel.replay.ownership import Kept, claimed, sign
from grpo.worldmodel.views import View


@dataclass(frozen=True)
class Round:
    """What was played, and what follows from it."""

    replay: Replay
    updates: int
    """Of the world model, that are due."""
    metrics: dict[str, float | None]
    """How playing went."""
    random: np.random.Generator
    """What is left of the round's randomness."""


class Collector:
    """Owns the environments, the replay, the train ratio and, with `acting=beside`, the actor in the background.

    The replay and the environments are woken when they are needed: looking at an agent needs neither.
    """

    def __init__(
        self, learner: Learner, policy: ActorPolicy, fleet: Fleet, view: View, config: WorldModelConfig
    ) -> None:
        self._model, self._policy, self._frozen = learner.model, policy, learner.frozen
        self.fleet, self._view, self._config = fleet, view, config
        self.folder: Path | None = None
        """Where the replay may keep what memory is too small for; set it before the first step."""
        self.background = BackgroundActor(learner.model, policy) if config.acting == "beside" else None
        self._ratio = TrainRatio(0 if learner.frozen else config.train_ratio, config.batch_size * config.batch_length)
        self._lanes: Lanes | None = None
        self._replay: Replay | None = None
        self._saved: State | None = None
        """What was loaded and has not been needed yet."""
        self._named: Path | None = None
        """The folder of its files that the settings name, and the id that says whose it is."""
        self._owner: str | None = None
        self._counted = 0
        """Environment steps that were reported."""
        self._ahead: int | None = None
        """With a background actor: the round whose steps were played already, or are being played."""
        self._before: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        """The lanes before that round."""

    def advance(self, step: int) -> Round:
        """Play what is due; with a background actor: take it in, and have the next round begun."""
        lanes, replay = self._awake()
        if self.background is None:
            random = self._play(lanes, replay, step)
        else:
            random = generator(self._config.seed, step, 1)
            self._settle()
            if self._ahead != step:
                self.background.refresh()
                self._play(lanes, replay, step)
        _expect_sound(lanes, step)
        metrics, due = self._told(lanes), self._ratio.due(lanes.stream.env_steps)
        if self.background is not None:
            self._before, self._ahead = (lanes.values(), lanes.arrays()), step + 1
            self.background.begin(lambda buffer: self._play(lanes, buffer, step + 1))
        due += self._config.pretrain if step == 0 and not self._frozen else 0
        return Round(replay, due, metrics, random)

    def _play(self, lanes: Lanes, memory: Replay | RoundBuffer, step: int) -> np.random.Generator:
        """The steps of a round, into the replay or into a buffer for it; what is left of the round's randomness."""
        config = self._config
        noise = torch.Generator().manual_seed(derive(config.seed, step, "act"))
        random = generator(config.seed, step, 0)
        until = max(config.prefill, lanes.stream.env_steps + config.steps_per_collect)
        while lanes.stream.env_steps < until or (isinstance(memory, Replay) and not memory.sequences):
            lanes.tick(memory, random, noise)
        return random

    def _settle(self) -> None:
        """Wait for what is being played in the background, and remember it."""
        buffer = None if self.background is None else self.background.finish()
        if buffer is not None and self._replay is not None:
            buffer.remember(self._replay)

    def _told(self, lanes: Lanes) -> dict[str, float | None]:
        """How playing went since somebody last asked."""
        stream = lanes.stream
        done, played = stream.finished, stream.env_steps - self._counted
        failed, stream.failures = len(stream.failures), []
        self._counted = stream.env_steps
        return {
            "return": float(np.mean([total for total, _ in done])) if done else None,
            "episode_length": float(np.mean([length for _, length in done])) if done else None,
            "env_steps": float(stream.env_steps),
            "episodes": float(stream.episodes),
            "failed": float(failed),
            "samples": float(played),
        }

    # --- what it owns, woken when it is needed ----------------------------------------------------------------------

    def _awake(self) -> tuple[Lanes, Replay]:
        """The environments and the replay, as they were saved if there is a state to go on from."""
        if self._lanes is None or self._replay is None or self._saved is not None:
            self._close_replay()
            config, size = self._config, self._model.size
            model, policy = self._model, self._policy
            if self.background is not None:
                model, policy = self.background.model, self.background.policy
            self._lanes = Lanes(self.fleet, self._view, model, policy, config.seed)
            self._replay = Replay(
                config.replay_capacity,
                config.batch_length,
                self._place(),
                lanes=config.envs,
                seed=config.seed,
                latent=(size.deter, size.stoch, size.classes),
                latent_dtype=config.replay_latents,
                memory=config.replay_memory,
                ends=config.replay_ends,
                reach=config.horizon + config.batch_length,
            )
            saved, self._saved = self._saved, None
            if saved is not None and saved.values["lanes"] is not None:
                try:
                    self._lanes.load(saved.values["lanes"], part(saved.arrays, "lanes"))
                    self._replay.load_state(State(saved.values["replay"], part(saved.arrays, "replay")))
                except UNFIT as error:
                    raise FolderError(f"the checkpoint's replay is damaged ({line(error)}); {REMEDY}") from error
        return self._lanes, self._replay

    def _place(self) -> Path | None:
        """Where the replay's files go."""
        named = self._config.replay_folder
        if named is None:
            return None if self.folder is None else self.folder / "replay"
        if self.folder is None:
            raise ConfigError(
                f"replay_folder={named} keeps the files of a run, and this one has no folder; give it one"
            )
        kept = None if self._saved is None else self._saved.values["replay"]
        place = Path(named).expanduser().absolute()
        self._owner = claimed(place, self.folder, None if kept is None else Kept.of(kept))
        self._named = place
        return place

    def _signed(self) -> dict[str, Any]:
        """What a state says of a folder that was named, and the folder of the state."""
        if self._named is None or self.folder is None:
            return {}
        if self._owner is None:
            self._owner = uuid.uuid4().hex
            sign(self._named, self.folder, self._owner)
        return {"owner": self._owner, "folder": str(self._named)}

    @property
    def replay(self) -> Replay:
        """What was seen."""
        return self._awake()[1]

    def peek(self, sequences: int) -> Sample | None:
        """Some of what was seen, to look at; None: nothing is awake yet."""
        return self._replay.peek(sequences, 0) if self._replay is not None and self._replay.sequences else None

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._replay.close()

    def state(self) -> State:
        """Everything the next round depends on; what is being played in the background is waited for.

        A round that failed does not count: who goes on from here plays it again, and this run's next step tells why.
        """
        ahead, before = self._ahead, None
        try:
            self._settle()
        except Exception:  # as above
            ahead, before = None, self._before
        values: dict[str, Any] = {"ratio": dict(self._ratio.state().values), "ahead": ahead, "counted": self._counted}
        if self._saved is not None:
            kept = {name: x for name, x in self._saved.arrays.items() if name.startswith(("lanes/", "replay/"))}
            return State(values | {name: self._saved.values[name] for name in ("lanes", "replay")}, kept)
        if self._lanes is None or self._replay is None:
            return State(values | {"lanes": None, "replay": None}, {})
        replay = self._replay.state()
        values["lanes"], lanes = before or (self._lanes.values(), self._lanes.arrays())
        values["replay"] = dict(replay.values) | self._signed()
        arrays = as_part("lanes", lanes) | as_part("replay", replay.arrays)
        return State(values, {name: _kept(x) for name, x in arrays.items()})

    def load_state(self, state: State) -> None:
        """Go on from there; the replay and the environments when they are needed."""
        if self.background is not None:
            self.background.forget()
        # Older states do not say: they are of lockstep, where nobody plays ahead and what was played has been told.
        told = (state.values["lanes"] or {"env_steps": 0})["env_steps"]
        self._ahead, self._counted = state.values.get("ahead"), state.values.get("counted", told)
        self._ratio.load_state(State(state.values["ratio"], {}))
        self._saved = state

    def close(self) -> None:
        """End the background actor and the environments, close the files."""
        if self.background is not None:
            self.background.close()
        self._close_replay()
        self.fleet.close()


def _expect_sound(lanes: Lanes, step: int) -> None:
    """Environments that failed: an error on the first step, later a warning; the run counts them."""
    failures = lanes.stream.failures
    if failures and step == 0:
        raise SamplesFailed(f"on the first step the environment failed: {failures[0]}")
    for message in dict.fromkeys(failures):
        warn(f"an episode was given up: {message}")


def _kept(x: Any) -> Any:
    """As a checkpoint wants it."""
    return x if isinstance(x, torch.Tensor) else torch.as_tensor(np.ascontiguousarray(x))
