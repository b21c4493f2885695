"""Playing in the real environment, one step of every lane at a time, and remembering it.

A lane is an endless stream of episodes of one copy. A tick moves each by one step: the actor decides from the lane's
latent, the environment answers, the world model looks at the answer. Where an episode has ended the tick begins the
next one instead. An episode that fails is given up and counted, and its lane begins anew.

Letters: L lanes, M those of them that step, A width of an action.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from grpo.envs.episodes import CannotBegin, EpisodeStream
from grpo.envs.fleet import Fleet, Tree
from grpo.envs.spaces import put, zeros
from grpo.errors import SamplesFailed
from grpo.seeding import start_seeds
from grpo.worldmodel.background import RoundBuffer
from grpo.worldmodel.model.rssm import Latent
from grpo.worldmodel.model.world_model import WorldModel
from grpo.worldmodel.policy import ActorPolicy
from grpo.worldmodel.replay.buffer import Replay
from grpo.worldmodel.views import View

EVALUATION = 1_000_003
"""Stands in the seeds of evaluation where training has the lane."""


def episode_seed(seed: int, lane: int, number: int) -> int:
    """The seed of a lane's next episode."""
    return start_seeds([seed, lane, number], 1, held_out=lane == EVALUATION)[0]


class Eyes:
    """The world model as it looks at L lanes: their latents, moved on by every observation."""

    def __init__(self, model: WorldModel, view: View, lanes: int) -> None:
        self._model, self._view = model, view
        self.latent = model.rssm.initial(lanes)

    @torch.no_grad()
    def look(
        self, observation: Tree, code_LA: torch.Tensor, first_L: np.ndarray, random: torch.Generator
    ) -> dict[str, np.ndarray]:
        """Take in what every lane sees now, after the action that led there; what the model saw of it."""
        seen, device = self._view(observation), code_LA.device
        embed = self._model.encoder({key: torch.from_numpy(x).to(device) for key, x in seen.items()})
        begins = torch.from_numpy(first_L).to(device)
        self.latent, _ = self._model.rssm.observe_step(embed, code_LA, begins, self.latent, random)
        return seen


class Lanes:
    """L streams of episodes in the environment, and what the world model makes of each."""

    def __init__(self, fleet: Fleet, view: View, model: WorldModel, policy: ActorPolicy, seed: int) -> None:
        self._fleet, self._policy = fleet, policy
        self.stream = EpisodeStream(fleet, fleet.size, partial(episode_seed, seed))
        self._eyes = Eyes(model, view, fleet.size)

    def tick(self, replay: Replay | RoundBuffer, random: np.random.Generator, noise: torch.Generator) -> int:
        """One step of every lane; how many of them the environment made."""
        stream, head, device = self.stream, self._policy.head, self._policy.device
        lanes = len(stream)
        record: dict[str, np.ndarray] = {
            "action": np.zeros((lanes, self._policy.actions.width), np.float32),
            "reward": np.zeros(lanes, np.float32),
            "is_first": stream.over_S.copy(),
            "is_last": np.zeros(lanes, bool),
            "is_terminal": np.zeros(lanes, bool),
        }
        observation, fit_L = zeros(self._fleet.observation_space, lanes), np.ones(lanes, bool)
        live, over = np.flatnonzero(~stream.over_S), np.flatnonzero(stream.over_S)
        if len(live):
            recorded, _ = head.sample(self._decided(live), random)
            stepped = stream.step(live, head.to_env(recorded))
            record["action"][live] = self._policy.actions.code(torch.from_numpy(recorded)).numpy()
            record["reward"][live] = stepped.reward_M
            record["is_terminal"][live] = stepped.terminated_M
            record["is_last"][live] = stepped.terminated_M | stepped.truncated_M
            put(observation, live, stepped.observation)
            fit_L[live[list(stepped.errors)]] = False
        if len(over):
            put(observation, over, self._begun(over))
        code_LA = torch.from_numpy(record["action"]).to(device)
        record |= self._eyes.look(observation, code_LA, record["is_first"], noise)
        kept = np.flatnonzero(fit_L)
        ids = replay.add_batch({key: x[kept] for key, x in record.items()}, kept)
        latent = self._eyes.latent if len(kept) == lanes else self._eyes.latent[torch.from_numpy(kept).to(device)]
        replay.write_latents(ids, latent.deter, latent.stoch)
        return len(live)

    def _begun(self, lanes: np.ndarray) -> Tree:
        try:
            return self.stream.begin(lanes)
        except CannotBegin as error:
            raise SamplesFailed(str(error)) from None

    @torch.no_grad()
    def _decided(self, live: np.ndarray) -> np.ndarray:
        """The actor's numbers for these lanes."""
        flat = self._eyes.latent.flat[torch.from_numpy(live).to(self._policy.device)]
        out: np.ndarray = self._policy.network(flat).float().cpu().numpy()
        return out

    # --- going on later ---------------------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """Numbers to go on from."""
        return self.stream.values()

    def arrays(self) -> dict[str, Any]:
        """Latents, and the running episodes' actions, which lead back to where they are."""
        made = {f"made/{lane}": x for lane, x in enumerate(self.stream.actions())}
        return made | {"deter": self._eyes.latent.deter, "stoch": self._eyes.latent.stoch}

    def load(self, values: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Play the running episodes up to where they were."""
        like = self._eyes.latent
        self._eyes.latent = Latent(
            torch.as_tensor(arrays["deter"]).to(like.deter), torch.as_tensor(arrays["stoch"]).to(like.stoch)
        )
        made = [arrays[f"made/{lane}"] for lane in range(len(values["seeds"]))]  # none before the first episode
        self.stream.load(values, made)
