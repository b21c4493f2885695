"""A fleet of Gymnasium's walkers whose physics is stepped by MuJoCo's own threads (`mujoco.rollout`).

    MuJoCoFleet("Hopper-v5", size=64)

Starts, observations, rewards and ends are those of Gymnasium's environments, computed for all members at once; no
member has a process or an environment of its own. Two things differ. Contacts are solved afresh at each step instead of
from the forces of the step before, which `rollout` does not give: the same to the solver's tolerance, so that long
episodes part as they do between two machines. And a moment is its physical state and nothing else, so that snapshots
are exact and cost a copy.

Tasks whose observation is more than positions and velocities (Ant, Humanoid: forces of contacts) are not here.

Letters: M members, S numbers of a state, P positions, V velocities.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from grpo.envs.batched import BatchedFleet, Members
from grpo.envs.fleet import Begun, EnvError, Snapshot, Tree
from grpo.errors import install
from grpo.processors import processors


@dataclass(frozen=True)
class Walker:
    """What tells one walker from another, beside what its environment says."""

    hidden: int
    """Positions that say how far it has come, and are not seen."""
    fastest: float | None = None
    """Velocities are shown within ± this."""
    whole: bool = False
    """Whether everything but the first two numbers must stay in a range, too."""


WALKERS: Mapping[str, Walker] = {
    "HalfCheetah-v5": Walker(hidden=1),
    "Hopper-v5": Walker(hidden=1, fastest=10.0, whole=True),
    "Swimmer-v5": Walker(hidden=2),
    "Walker2d-v5": Walker(hidden=1, fastest=10.0),
}


class MuJoCoFleet(BatchedFleet):
    """Members that are rows of one array of states; a thread for each core steps its share of them."""

    def __init__(self, id: str, size: int, kwargs: Mapping[str, Any] | None = None, horizon: int | None = None) -> None:
        if id not in WALKERS:
            raise EnvError(f"{id}: vector='mujoco' is for {', '.join(WALKERS)}; use vector='serial' or 'processes'")
        try:
            mujoco: Any = importlib.import_module("mujoco")
            rollout: Any = importlib.import_module("mujoco.rollout")
            self._env: Any = gym.make(id, disable_env_checker=True, **(kwargs or {})).unwrapped
        except (ImportError, gym.error.DependencyNotInstalled) as error:
            raise EnvError(f"{id}: MuJoCo is not installed ({error}); {install('control')}") from error
        except TypeError as error:
            raise EnvError(f"{id} cannot be made with {dict(kwargs or {})}: {error}") from error
        env: Any = self._env
        self._walker = WALKERS[id]
        limit = horizon or gym.registry[id].max_episode_steps or 1000
        super().__init__(id, size, env.observation_space, env.action_space, limit)
        self._spec = mujoco.mjtState.mjSTATE_FULLPHYSICS
        self._get = mujoco.mj_getState
        self._state_MS = np.zeros((size, mujoco.mj_stateSize(env.model, self._spec)))
        threads = min(processors(), size)
        self._pool = rollout.Rollout(nthread=threads if threads > 1 else 0)
        self._data = [mujoco.MjData(env.model) for _ in range(threads)]

    def close(self) -> None:
        """End the threads."""
        self._pool.close()
        self._env.close()
        self._over_M[:] = True

    def restore(self, members: Members, snapshots: Sequence[Snapshot]) -> Begun:
        """Put members into moments: by their state where they have one, else by playing the actions again."""
        states = [one.state for one in snapshots if one.state is not None]
        if not states or len(states) < len(snapshots):
            return super().restore(members, snapshots)
        members = self._numbers(members)
        for member, one, state in zip(members.tolist(), snapshots, states, strict=True):
            self._make_room(len(one.actions))
            self._state_MS[member], self._over_M[member] = state["physics"], bool(state["over"])
            self._seed_M[member], self._length_M[member] = one.seed, len(one.actions)
            self._action_MT[member, : len(one.actions)] = one.actions
        return Begun(self._seen(self._state_MS[members]))

    def _state_of(self, member: int) -> Mapping[str, np.ndarray]:
        return {"physics": self._state_MS[member].copy(), "over": self._over_M[member].copy()}

    def _start(self, members: np.ndarray, seeds: list[int]) -> Tree:
        starts: dict[int, np.ndarray] = {}
        for member, seed in zip(members.tolist(), seeds, strict=True):
            if seed not in starts:
                self._env.reset(seed=seed)
                starts[seed] = np.empty(self._state_MS.shape[1])
                self._get(self._env.model, self._env.data, starts[seed], self._spec)
            self._state_MS[member] = starts[seed]
        return self._seen(self._state_MS[members])

    def _advance(self, members: np.ndarray, action_M: np.ndarray) -> tuple[Tree, Any, Any, Any, np.ndarray | None]:
        env, frames, before_MS = self._env, self._env.frame_skip, self._state_MS[members]
        control = np.repeat(action_M[:, None].astype(np.float64), frames, axis=1)
        found, _ = self._pool.rollout(env.model, self._data, before_MS, control)
        after_MS = found[:, -1]
        lost_M = after_MS[:, 0] < before_MS[:, 0] + (frames - 0.5) * env.model.opt.timestep  # it exploded on the way
        after_MS[lost_M] = np.nan
        self._state_MS[members] = after_MS
        speed_M = (after_MS[:, 1] - before_MS[:, 1]) / env.dt
        reward_M = env._forward_reward_weight * speed_M
        reward_M -= env._ctrl_cost_weight * np.square(action_M).sum(1)
        fallen_M = np.zeros(len(members), bool)
        if hasattr(env, "_healthy_reward"):
            healthy_M = self._healthy(after_MS)
            reward_M += env._healthy_reward * healthy_M
            if env._terminate_when_unhealthy:
                fallen_M = ~healthy_M & ~lost_M
        late_M = self._length_M[members] + 1 >= (self.horizon or np.inf)
        return self._seen(after_MS), reward_M, fallen_M, late_M & ~fallen_M, None

    def _healthy(self, state_MS: np.ndarray) -> np.ndarray:
        env, (height_M, angle_M) = self._env, state_MS[:, 2:4].T
        within_M = _between(height_M, env._healthy_z_range) & _between(angle_M, env._healthy_angle_range)
        if self._walker.whole:
            within_M &= _between(state_MS[:, 3 : 1 + env.model.nq + env.model.nv], env._healthy_state_range).all(1)
        return np.asarray(within_M)

    def _seen(self, state_MS: np.ndarray) -> np.ndarray:
        end, walker = 1 + self._env.model.nq, self._walker
        hidden = walker.hidden if self._env._exclude_current_positions_from_observation else 0
        place_MP, speed_MV = state_MS[:, 1 + hidden : end], state_MS[:, end : end + self._env.model.nv]
        if walker.fastest is not None:
            speed_MV = speed_MV.clip(-walker.fastest, walker.fastest)
        return np.concatenate([place_MP, speed_MV], axis=1)


def _between(x: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    return np.asarray((bounds[0] < x) & (x < bounds[1]))
