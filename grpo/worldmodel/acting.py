"""Playing in the real environment, one step of every lane at a time, and remembering it.

A lane is an endless stream of episodes of one copy. A tick moves each by one step: the actor decides from the lane's
latent, the environment answers, the world model looks at the answer. Where an episode has ended the tick begins the
next one instead. An episode that fails is given up and counted, and its lane begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from grpo.envs.fleet import Begun, EnvError, Fleet, Snapshot, Tree
from grpo.envs.spaces import put, zeros
from grpo.errors import SamplesFailed
from grpo.seeding import start_seeds
from grpo.worldmodel.background import Tape
from grpo.worldmodel.model.rssm import Latent
from grpo.worldmodel.model.world_model import WorldModel
from grpo.worldmodel.policy import ActorPolicy
from grpo.worldmodel.replay.buffer import Replay
from grpo.worldmodel.views import View

RESETS = 5
"""Times in a row that a lane tries to begin an episode before it gives up."""
REMEMBERED = 20
"""Whole episodes whose mean return is reported."""
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
    """L streams of episodes in the environment."""

    def __init__(self, fleet: Fleet, view: View, model: WorldModel, policy: ActorPolicy, seed: int) -> None:
        lanes = fleet.size
        self._fleet, self._policy, self._seed = fleet, policy, seed
        self._eyes = Eyes(model, view, lanes)
        self._over_L = np.ones(lanes, bool)
        """Whose next tick begins an episode."""
        self._begun_L, self._length_L = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
        self._return_L = np.zeros(lanes)
        self._seeds = [0] * lanes
        self._made: list[list[np.ndarray]] = [[] for _ in range(lanes)]
        """Where the running episodes began and what was done since: enough to come back."""
        self.env_steps, self.episodes = 0, 0
        self.finished: list[tuple[float, int]] = []
        """(return, length) of the last whole episodes."""
        self.failures: list[str] = []
        """What went wrong since somebody last looked."""

    def tick(self, replay: Replay | Tape, random: np.random.Generator, noise: torch.Generator) -> int:
        """One step of every lane; how many of them the environment made."""
        lanes, head = len(self._over_L), self._policy.head
        device = self._policy.device
        record: dict[str, np.ndarray] = {
            "action": np.zeros((lanes, self._policy.actions.width), np.float32),
            "reward": np.zeros(lanes, np.float32),
            "is_first": self._over_L.copy(),
            "is_last": np.zeros(lanes, bool),
            "is_terminal": np.zeros(lanes, bool),
        }
        observation, fit_L = zeros(self._fleet.observation_space, lanes), np.ones(lanes, bool)
        live, over = np.flatnonzero(~self._over_L), np.flatnonzero(self._over_L)
        if len(live):
            recorded, _ = head.sample(self._decided(live), random)
            action_M = head.to_env(recorded)
            stepped = self._fleet.step(live, action_M)
            record["action"][live] = self._policy.actions.code(torch.from_numpy(recorded)).numpy()
            record["reward"][live] = stepped.reward_M
            record["is_terminal"][live] = stepped.terminated_M
            record["is_last"][live] = stepped.terminated_M | stepped.truncated_M
            put(observation, live, stepped.observation)
            for lane, action in zip(live.tolist(), action_M, strict=True):
                self._made[lane].append(action)
            self._count(live, stepped.reward_M, record["is_last"][live])
            fit_L[live[list(stepped.errors)]] = False
            self.failures += stepped.errors.values()
        if len(over):
            put(observation, over, self._fresh(over).observation)
        code_LA = torch.from_numpy(record["action"]).to(device)
        record |= self._eyes.look(observation, code_LA, record["is_first"], noise)
        self._over_L = record["is_last"] | ~fit_L
        kept = np.flatnonzero(fit_L)
        ids = replay.add_batch({key: x[kept] for key, x in record.items()}, kept)
        latent = self._eyes.latent if len(kept) == lanes else self._eyes.latent[torch.from_numpy(kept).to(device)]
        replay.write_latents(ids, latent.deter, latent.stoch)
        self.env_steps += len(live)
        return len(live)

    @torch.no_grad()
    def _decided(self, live: np.ndarray) -> np.ndarray:
        """The actor's numbers for these lanes."""
        flat = self._eyes.latent.flat[torch.from_numpy(live).to(self._policy.device)]
        out: np.ndarray = self._policy.network(flat).float().cpu().numpy()
        return out

    def _count(self, live: np.ndarray, reward_M: np.ndarray, last_M: np.ndarray) -> None:
        self._return_L[live] += reward_M
        self._length_L[live] += 1
        ended = live[last_M]
        self.episodes += len(ended)
        self.finished += [(float(self._return_L[lane]), int(self._length_L[lane])) for lane in ended]
        self.finished = self.finished[-REMEMBERED:]

    def _fresh(self, lanes: np.ndarray) -> Begun:
        """The next episode of these lanes; one that cannot begin is passed over, a few times."""
        self._return_L[lanes], self._length_L[lanes] = 0.0, 0
        for _ in range(RESETS):
            chosen = [episode_seed(self._seed, lane, int(self._begun_L[lane])) for lane in lanes.tolist()]
            self._begun_L[lanes] += 1
            for lane, seed in zip(lanes.tolist(), chosen, strict=True):
                self._seeds[lane], self._made[lane] = seed, []
            begun = self._fleet.reset(lanes, chosen)
            if not begun.errors:
                return begun
            self.failures += begun.errors.values()
        raise SamplesFailed(f"no episode could begin in {RESETS} tries: {next(iter(begun.errors.values()))}")

    # --- going on later ---------------------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """Numbers to go on from."""
        return {
            "over": self._over_L.tolist(),
            "begun": self._begun_L.tolist(),
            "length": self._length_L.tolist(),
            "return": self._return_L.tolist(),
            "seeds": list(self._seeds),
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "finished": [list(item) for item in self.finished],
            "failures": list(self.failures),
        }

    def arrays(self) -> dict[str, Any]:
        """Latents, and the running episodes' actions, which lead back to where they are."""
        space = self._fleet.action_space
        shape = (-1, *(space.shape or ()))
        made = {f"made/{lane}": np.array(x, space.dtype).reshape(shape) for lane, x in enumerate(self._made)}
        return made | {"deter": self._eyes.latent.deter, "stoch": self._eyes.latent.stoch}

    def load(self, values: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Play the running episodes up to where they were."""
        self._over_L = np.array(values["over"])
        self._begun_L, self._length_L = np.array(values["begun"]), np.array(values["length"])
        self._return_L = np.array(values["return"], np.float64)
        self._seeds = [int(seed) for seed in values["seeds"]]
        self.env_steps, self.episodes = int(values["env_steps"]), int(values["episodes"])
        self.finished = [(float(a), int(b)) for a, b in values["finished"]]
        self.failures = list(values.get("failures", ()))  # older states were saved when all had been told
        like = self._eyes.latent
        self._eyes.latent = Latent(
            torch.as_tensor(arrays["deter"]).to(like.deter), torch.as_tensor(arrays["stoch"]).to(like.stoch)
        )
        self._made = [list(np.asarray(arrays[f"made/{lane}"])) for lane in range(len(self._over_L))]
        live = np.flatnonzero(~self._over_L)
        if not len(live):
            return
        saved = [Snapshot(self._seeds[lane], np.asarray(arrays[f"made/{lane}"])) for lane in live.tolist()]
        begun = self._fleet.restore(live, saved)
        if begun.errors:
            raise EnvError(f"the running episodes cannot be resumed: {next(iter(begun.errors.values()))}")
