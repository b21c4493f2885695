"""A fleet over an environment's registered batched form: Gymnasium's vector entry points.

GymVectorFleet("CartPole-v1", size=64)   # one NumPy program steps all members

Letters: M members.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from grpo.envs.batched import BatchedFleet, Members, success_of
from grpo.envs.fleet import Begun, EnvError, Snapshot, Tree
from grpo.envs.serial import close
from grpo.envs.snapshot import same
from grpo.envs.spaces import put, take
from grpo.errors import line

_CARTPOLE_STATE = ("state", "steps", "prev_done")
"""Where `CartPoleVectorEnv` keeps its members, one on each last index. No other attribute changes as they play."""


def has_vector_entry_point(id: str) -> bool:
    """Whether `id` is registered with a batched form of its own that is not a JAX one, going by its name."""
    module, _, name = id.rpartition(":")
    if module:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    spec = gym.registry.get(name)
    entry = None if spec is None else spec.vector_entry_point
    if entry is None:
        return False
    return "jax" not in (entry if isinstance(entry, str) else f"{entry.__module__}:{entry}").lower()


class GymVectorFleet(BatchedFleet):
    """Members of `gymnasium.make_vec(id, vectorization_mode="vector_entry_point")`.

    CartPole's state can be read and written, so its members do all that a fleet promises, step for step as the single
    environment. Of other batched environments only what the interface offers can be used, and it is tried out at once:

        seeds of their own (`reset(seed=[…])`)   needed, else refused
        `options={"reset_mask": …}`              without it, members that still play must be reset together
        standing still                           not in the interface, so a call must name every member that still
                                                 plays; one that has ended plays on unseen until its reset
    """

    def __init__(self, id: str, size: int, kwargs: Mapping[str, Any] | None = None, horizon: int | None = None) -> None:
        options = dict(kwargs or {}) | ({} if horizon is None else {"max_episode_steps": horizon})
        self._env, limit = _made(id, size, options), options.get("max_episode_steps")
        spec = self._env.spec
        super().__init__(
            name=id,
            size=size,
            observes=self._env.single_observation_space,
            acts=self._env.single_action_space,
            horizon=limit if limit is not None or spec is None else spec.max_episode_steps,
        )
        self._lockstep = type(self._env) is not CartPoleVectorEnv
        mode = self._env.metadata.get("autoreset_mode")
        self._autoreset = getattr(mode, "name", "NEXT_STEP")  # Gymnasium 1.0 has this one and does not name it
        self._done_M = np.zeros(size, bool)
        acts = self.action_space
        rest = np.clip(0, acts.low, acts.high) if isinstance(acts, spaces.Box) else self._low
        self._rest_M = np.broadcast_to(rest, (size, *self._action_MT.shape[2:])).astype(self._action_MT.dtype)
        if self._lockstep:
            self._masked = self._try_out()
        else:
            self._scout = _made(id, 1, options)
            self._env.reset(seed=0)

    def close(self) -> None:
        """Close the batched environment."""
        close(self._env, *([] if self._lockstep else [self._scout]))

    def restore(self, members: Members, snapshots: Sequence[Snapshot]) -> Begun:
        """Write the state back where it is kept; else play each seed's actions again."""
        states = [s.state for s in snapshots if s.state is not None and set(s.state) == set(_CARTPOLE_STATE)]
        if self._lockstep or not states or len(states) < len(snapshots):
            return super().restore(members, snapshots)
        members = self._numbers(members)
        for name in _CARTPOLE_STATE:
            getattr(self._env, name)[..., members] = np.stack([state[name] for state in states], -1)
        for member, snapshot in zip(members.tolist(), snapshots, strict=True):
            length = len(snapshot.actions)
            self._make_room(length)
            self._seed_M[member], self._length_M[member] = snapshot.seed, length
            self._action_MT[member, :length] = snapshot.actions
        self._over_M[members] = self._env.prev_done[members]
        return Begun(self._env.state.T[members].astype(np.float32))

    def _state_of(self, member: int) -> Mapping[str, np.ndarray] | None:
        if self._lockstep:
            return None
        return {name: np.array(getattr(self._env, name)[..., member]) for name in _CARTPOLE_STATE}

    def _start(self, members: np.ndarray, seeds: list[int]) -> Tree:
        if self._lockstep:
            return self._start_together(members, seeds)
        # The batch knows one seed for all; alone, a member draws what the single environment draws.
        for seed in dict.fromkeys(seeds):
            self._scout.reset(seed=seed)
            same = members[[other == seed for other in seeds]]
            for name in _CARTPOLE_STATE:
                getattr(self._env, name)[..., same] = getattr(self._scout, name)
        return self._env.state.T[members].astype(np.float32)

    def _start_together(self, members: np.ndarray, seeds: list[int]) -> Tree:
        plays_on_M = ~self._over_M
        plays_on_M[members] = False
        if plays_on_M.any() and not self._masked:
            raise EnvError(
                f"{self.name}: its batched form cannot reset members {members.tolist()} while others play "
                "(no options['reset_mask']); reset all together, or use vector='serial'"
            )
        seed_M = list(self._seed_M)
        for member, seed in zip(members.tolist(), seeds, strict=True):
            seed_M[member] = seed
        chosen_M = np.ones(self.size, bool)
        if self._masked:
            chosen_M[:] = False
            chosen_M[members] = True
        observation = self._reset(seed_M, chosen_M)
        return take(observation, members)

    def _reset(self, seed_M: list[int], chosen_M: np.ndarray) -> Tree:
        options = None if chosen_M.all() else {"reset_mask": chosen_M.copy()}
        observation, _ = self._env.reset(seed=list(seed_M), options=options)
        self._done_M[chosen_M] = False
        return observation

    def _advance(self, members: np.ndarray, action_M: np.ndarray) -> tuple[Tree, Any, Any, Any, np.ndarray | None]:
        full_M = self._rest_M.copy()
        full_M[members] = action_M
        with self._standing_still(members):
            observation, reward, terminated, truncated, info = self._env.step(full_M)
        self._done_M = terminated | truncated
        observation, told_M = take(observation, members), success_of(info)
        if self._autoreset == "SAME_STEP":
            # What came back for those who ended is their next episode.
            for p in np.flatnonzero(self._done_M[members]):
                put(observation, p, info["final_obs"][members[p]])
            told_M = _either(success_of(info.get("final_info", {})), told_M)
        success_M = None if told_M is None else told_M[members]
        return observation, reward[members], terminated[members], truncated[members], success_M

    @contextlib.contextmanager
    def _standing_still(self, members: np.ndarray) -> Iterator[None]:
        """Whoever is not named is afterwards where it was, or waits and does not mind."""
        if len(members) == self.size:
            yield
            return
        if not self._lockstep:
            still_M = np.ones(self.size, bool)
            still_M[members] = False
            kept = {name: getattr(self._env, name)[..., still_M] for name in _CARTPOLE_STATE}
            try:
                yield
            finally:
                for name, columns in kept.items():
                    getattr(self._env, name)[..., still_M] = columns
            return
        plays_on_M = ~self._over_M
        plays_on_M[members] = False
        if plays_on_M.any():
            raise EnvError(
                f"{self.name}: its batched form steps everybody, so members {np.flatnonzero(plays_on_M).tolist()} "
                "cannot stand still; name all that still play, or use vector='serial'"
            )
        if self._autoreset == "DISABLED" and self._done_M.any():
            self._reset(self._seed_M, self._done_M)  # nobody else sees to it, and stepping on after the end is an error
        yield

    def _try_out(self) -> bool:
        """Refuse an environment without seeds for each member; say whether it resets some and leaves the others."""
        seeds, first_M = [7] * self.size, np.arange(self.size) == 0
        try:
            start = self._reset(seeds, np.ones(self.size, bool))
            again = self._reset([7, *range(8, 7 + self.size)], np.ones(self.size, bool))
            own = same(take(start, first_M), take(again, first_M)) and same(
                start, take(start, np.zeros(self.size, np.intp))
            )
        except Exception as error:  # anything an environment may raise
            raise EnvError(
                f"{self.name}: its batched form takes no seeds for each member ({line(error)}); use vector='serial'"
            ) from error
        if not own:
            raise EnvError(f"{self.name}: members with equal seeds start differently; use vector='serial'")
        masked = self.size == 1 or self._leaves_others(seeds, first_M)
        self._reset(seeds, np.ones(self.size, bool))  # that step may have ended somebody's episode
        if not masked and self._autoreset == "DISABLED":
            raise EnvError(f"{self.name}: neither resets itself nor takes options['reset_mask']; use vector='serial'")
        return masked

    def _leaves_others(self, seeds: list[int], first_M: np.ndarray) -> bool:
        start = self._reset(seeds, np.ones(self.size, bool))
        before = self._env.step(self._rest_M.copy())[0]
        try:
            after = self._reset(seeds, first_M)
        except Exception:  # anything an environment may raise
            return False
        stayed = same(take(before, ~first_M), take(after, ~first_M))
        moved = not same(take(before, ~first_M), take(start, ~first_M))  # else nothing is shown
        return stayed and moved and same(take(start, first_M), take(after, first_M))


def _made(id: str, size: int, options: Mapping[str, Any]) -> Any:
    if not has_vector_entry_point(id):
        raise EnvError(f"{id} is not registered with a batched form (vector_entry_point); use vector='serial'")
    try:
        return gym.make_vec(id, num_envs=size, vectorization_mode="vector_entry_point", **options)
    except Exception as error:  # anything an environment may raise
        raise EnvError(f"{id}: its batched form cannot be made with {dict(options)}: {line(error)}") from error


def _either(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
    if first is None or second is None:
        return second if first is None else first
    return np.where(np.isnan(first), second, first)
