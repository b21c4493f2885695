"""Fleets over environments that others have batched: Gymnasium's vector entry points, and EnvPool.

    GymVectorFleet("CartPole-v1", size=64)   # one NumPy program steps all members
    EnvPoolFleet("Ant-v4", size=64)          # C++ threads step them; seeds and physics are EnvPool's own

A batched environment steps everybody and starts the next episode by itself, wherever it likes. A fleet promises the
opposite: members move only when named, an episode that has ended shows its last observation and waits, and a reset
starts from the seed that was asked for. Both fleets here keep that promise or say in one line why they cannot.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from grpo.envs.fleet import Begun, EnvError, Snapshot, Stepped, Tree
from grpo.envs.serial import numbered, told
from grpo.envs.snapshot import same
from grpo.envs.spaces import bounds, each, leaves, numeric, put, take, zeros
from grpo.errors import line

Members = Sequence[int] | np.ndarray

_CARTPOLE_STATE = ("state", "steps", "prev_done")
"""Where `CartPoleVectorEnv` keeps its members, one on each last index. No other attribute changes as they play."""
_UNLIMITED = 2**31 - 1
"""EnvPool's word for no horizon, and the first seed that it cannot take."""
_SUCCESS = ("is_success", "success")


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


class _Batched:
    """What both fleets share: who waits, which actions led here, and what is fit to be seen."""

    _lockstep = False
    """Whether members cannot stand still while others play."""

    def __init__(
        self, name: str, size: int, observes: gym.Space[Any], acts: gym.Space[Any], horizon: int | None
    ) -> None:
        if not isinstance(acts, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box):
            raise EnvError(f"{name}: its batched form takes actions from {acts}, not arrays; use kind='serial'")
        if numeric(observes) != observes:
            raise EnvError(f"{name}: its batched form shows {observes}, not all of it arrays; use kind='serial'")
        self.name, self.size, self.horizon = name, size, horizon
        self.observation_space, self.action_space = observes, acts
        self._low, self._high = bounds(acts)
        self._over_M = np.ones(size, bool)  # nobody has begun, so everybody waits
        self._length_M = np.zeros(size, np.intp)
        self._seed_M = [0] * size
        self._action_MT = np.zeros((size, 64, *(acts.shape or ())), acts.dtype)

    def reset(self, members: Members, seeds: Sequence[int]) -> Begun:
        """Begin an episode for each named member; equal seeds, equal starts."""
        members = self._numbers(members)
        if not members.size:
            return Begun(zeros(self.observation_space, 0))
        own, problem = [int(seed) for seed in seeds], ""
        try:
            observation = self._start(members, own)
        except EnvError:
            raise
        except Exception as error:  # anything an environment may raise
            observation, problem = zeros(self.observation_space, len(members)), f"reset raised {line(error)}"
        self._over_M[members], self._length_M[members] = bool(problem), 0
        for member, seed in zip(members.tolist(), own, strict=True):
            self._seed_M[member] = seed
        if problem:
            return Begun(observation, {p: self._say(m, problem) for p, m in enumerate(members)})
        return Begun(observation, self._withdraw(members, observation))

    def step(self, members: Members, actions: Any) -> Stepped:
        """One action for each named member; the others stand still."""
        members, action_M = self._numbers(members), np.asarray(actions)
        if not members.size:
            return self._nothing(0, {})
        if not np.can_cast(action_M.dtype, self._action_MT.dtype, "same_kind"):
            raise EnvError(f"{self.name}: actions of type {action_M.dtype} do not fit {self.action_space}")
        action_M = action_M.astype(self._action_MT.dtype).reshape(len(members), *self._action_MT.shape[2:])
        over_M = self._over_M[members]
        fit_M = ((action_M >= self._low) & (action_M <= self._high)).reshape(len(members), -1).all(1) & ~over_M
        if fit_M.all():
            return self._play(members, action_M)
        errors = {
            int(p): self._say(
                members[p],
                "its episode has ended; reset it first"
                if over_M[p]
                else f"action {action_M[p]} is not in {self.action_space}",
            )
            for p in np.flatnonzero(~fit_M)
        }
        self._over_M[members[~fit_M]] = True
        whole, played = self._nothing(len(members), errors), np.flatnonzero(fit_M)
        if not played.size:
            return whole
        part = self._play(members[played], action_M[played])
        for name in ("observation", "reward_M", "terminated_M", "truncated_M"):
            put(getattr(whole, name), played, getattr(part, name))
        if part.success_M is not None:
            whole = replace(whole, success_M=np.full(len(members), np.nan))
            put(whole.success_M, played, part.success_M)
        return replace(whole, errors=errors | {int(played[p]): problem for p, problem in part.errors.items()})

    def snapshot(self, members: Members) -> list[Snapshot]:
        """Seed and actions of each named member: playing them again leads here."""
        return [
            Snapshot(self._seed_M[m], self._action_MT[m, : self._length_M[m]].copy(), self._state_of(m))
            for m in self._numbers(members).tolist()
        ]

    def restore(self, members: Members, snapshots: Sequence[Snapshot]) -> Begun:
        """Put members back by playing each seed's actions again; an episode that ends early on the way is an error."""
        members, longest = self._numbers(members), max((len(s.actions) for s in snapshots), default=0)
        # Who cannot stand still must arrive together with the others, so the shorter ones set off later.
        delays = [longest - len(s.actions) if self._lockstep else 0 for s in snapshots]
        self._over_M[members] = True
        observation, errors = zeros(self.observation_space, len(members)), dict[int, str]()
        for t in range(longest + 1):
            turn = [p for p, delay in enumerate(delays) if delay == t]
            if turn:
                begun = self.reset(members[turn], [snapshots[p].seed for p in turn])
                put(observation, turn, begun.observation)
                errors |= {turn[p]: problem for p, problem in begun.errors.items()}
            plays = [
                p
                for p, delay in enumerate(delays)
                if delay <= t < delay + len(snapshots[p].actions) and p not in errors
            ]
            if plays:
                actions = np.stack([snapshots[p].actions[t - delays[p]] for p in plays])
                stepped = self.step(members[plays], actions)
                put(observation, plays, stepped.observation)
                errors |= {plays[p]: problem for p, problem in stepped.errors.items()}
        return Begun(observation, errors)

    def _play(self, members: np.ndarray, action_M: np.ndarray) -> Stepped:
        """`step` for members and actions that are known to be fit."""
        try:
            observation, reward, terminated_M, truncated_M, success_M = self._advance(members, action_M)
        except EnvError:
            raise
        except Exception as error:  # anything an environment may raise
            problem = line(error)
            self._over_M[members] = True
            return self._nothing(len(members), {p: self._say(m, problem) for p, m in enumerate(members)})
        at_M = self._length_M[members]
        self._make_room(int(at_M.max()) + 1)
        self._action_MT[members, at_M] = action_M
        self._length_M[members] = at_M + 1
        reward_M = np.array(reward, float)
        terminated_M, truncated_M = np.array(terminated_M, bool), np.array(truncated_M, bool)
        self._over_M[members] = terminated_M | truncated_M
        errors = self._withdraw(members, observation, reward_M)
        if errors:
            terminated_M[list(errors)] = truncated_M[list(errors)] = False
        return Stepped(observation, reward_M, terminated_M, truncated_M, success_M, errors)

    def _withdraw(self, members: np.ndarray, *trees: Tree) -> dict[int, str]:
        """Who answered with NaN or infinity: its rows become zeros, and it waits for a reset."""
        floats = [leaf for tree in trees for leaf in leaves(tree) if leaf.dtype.kind == "f"]
        if all(np.isfinite(leaf).all() for leaf in floats):
            return {}
        bad_M = ~np.all([np.isfinite(leaf).reshape(len(members), -1).all(1) for leaf in floats], 0)
        for tree in trees:
            for leaf in leaves(tree):
                leaf[bad_M] = 0
        self._over_M[members[bad_M]] = True
        problem = "its observation or reward is NaN or infinite"
        return {int(p): self._say(members[p], problem) for p in np.flatnonzero(bad_M)}

    def _numbers(self, members: Members) -> np.ndarray:
        return np.array(numbered(members, self.size, self.name), np.intp)

    def _make_room(self, length: int) -> None:
        while length > self._action_MT.shape[1]:
            self._action_MT = np.concatenate([self._action_MT, np.zeros_like(self._action_MT)], 1)

    def _say(self, member: int, problem: str) -> str:
        return f"{self.name} member {member}, step {self._length_M[member]}: {problem}"

    def _nothing(self, count: int, errors: Mapping[int, str]) -> Stepped:
        return Stepped(
            zeros(self.observation_space, count),
            np.zeros(count),
            np.zeros(count, bool),
            np.zeros(count, bool),
            errors=errors,
        )

    def _state_of(self, member: int) -> Mapping[str, np.ndarray] | None:
        return None

    def _start(self, members: np.ndarray, seeds: list[int]) -> Tree:
        """First observations, in arrays that are the caller's to change."""
        raise NotImplementedError

    def _advance(self, members: np.ndarray, action_M: np.ndarray) -> tuple[Tree, Any, Any, Any, np.ndarray | None]:
        """Observation, reward, terminated, truncated and success of a step."""
        raise NotImplementedError


class GymVectorFleet(_Batched):
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
        self._env.close()
        if not self._lockstep:
            self._scout.close()

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
                "(no options['reset_mask']); reset all together, or use kind='serial'"
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
        observation, told_M = take(observation, members), _success(info)
        if self._autoreset == "SAME_STEP":
            # What came back for those who ended is their next episode.
            for p in np.flatnonzero(self._done_M[members]):
                put(observation, p, info["final_obs"][members[p]])
            told_M = _either(_success(info.get("final_info", {})), told_M)
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
                "cannot stand still; name all that still play, or use kind='serial'"
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
                f"{self.name}: its batched form takes no seeds for each member ({line(error)}); use kind='serial'"
            ) from error
        if not own:
            raise EnvError(f"{self.name}: members with equal seeds start differently; use kind='serial'")
        masked = self.size == 1 or self._leaves_others(seeds, first_M)
        self._reset(seeds, np.ones(self.size, bool))  # that step may have ended somebody's episode
        if not masked and self._autoreset == "DISABLED":
            raise EnvError(f"{self.name}: it neither resets itself nor takes options['reset_mask']; use kind='serial'")
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


class EnvPoolFleet(_Batched):
    """Members of EnvPool, stepped by its threads (`kwargs={"num_threads": …}`; else as many as fit the machine).

    EnvPool takes seeds only when a pool is made and ignores them in `reset`, so each call of `reset` makes a pool for
    its members: under a millisecond for small tasks, about one for each MuJoCo member. Members that are reset in one
    call are stepped by one pool, so reset as many together as you can.

    EnvPool tells an episode that ends in its last allowed step from one that was cut there no better than as cut.
    """

    def __init__(self, id: str, size: int, kwargs: Mapping[str, Any] | None = None, horizon: int | None = None) -> None:
        try:
            self._envpool: Any = importlib.import_module("envpool")
        except ImportError as error:
            raise EnvError(f"{id}: EnvPool is not installed ({error}); pip install envpool") from error
        known = self._envpool.list_all_envs()
        if id not in known:
            near = ", ".join(difflib.get_close_matches(id, known)) or "see envpool.list_all_envs()"
            raise EnvError(f"EnvPool has no {id} ({near}); use one of its own, or kind='serial'")
        self._id = id
        self._options = dict(kwargs or {}) | ({} if horizon is None else {"max_episode_steps": horizon})
        first = self._pool([0])
        if first.config.get("max_num_players", 1) != 1:
            raise EnvError(f"{id}: EnvPool plays it with several players; a fleet has one in each environment")
        limit = first.config.get("max_episode_steps", _UNLIMITED)
        horizon = None if limit >= _UNLIMITED else limit
        super().__init__(id, size, first.observation_space, first.action_space, horizon)
        self._home_M: list[Any] = [None] * size
        self._slot_M = np.zeros(size, np.int32)

    def close(self) -> None:
        """Let go of the pools; their threads end with them."""
        self._home_M = [None] * self.size
        self._over_M[:] = True

    def _pool(self, seeds: list[int]) -> Any:
        try:
            pool = self._envpool.make(
                self._id,
                env_type="gymnasium",
                num_envs=len(seeds),
                seed=[seed % _UNLIMITED for seed in seeds],
                **self._options,
            )
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            raise EnvError(f"{self._id}: EnvPool cannot make it with {self._options}: {line(error)}") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that bounds lose digits in float32, once for each pool
            _ = pool.observation_space, pool.action_space
        return pool

    def _start(self, members: np.ndarray, seeds: list[int]) -> Tree:
        pool = self._pool(seeds)
        observation, _ = pool.reset()
        for slot, member in enumerate(members.tolist()):
            self._home_M[member], self._slot_M[member] = pool, slot
        return each(observation, np.copy)

    def _advance(self, members: np.ndarray, action_M: np.ndarray) -> tuple[Tree, Any, Any, Any, np.ndarray | None]:
        together: dict[int, list[int]] = {}
        for p, member in enumerate(members.tolist()):
            together.setdefault(id(self._home_M[member]), []).append(p)
        at = list(together.values())
        pools = [self._home_M[members[positions[0]]] for positions in at]
        for pool, positions in zip(pools, at, strict=True):
            pool.send(action_M[positions], self._slot_M[members[positions]])
        # Only now: the pools work at the same time.
        heard = [pool.recv() for pool in pools]
        if len(pools) == 1:
            observation, reward, terminated, truncated, info = heard[0]
            return each(observation, np.copy), reward, terminated, truncated, _success(info)
        count = len(members)
        observation, reward_M = zeros(self.observation_space, count), np.zeros(count)
        terminated_M, truncated_M, success_M = np.zeros(count, bool), np.zeros(count, bool), np.full(count, np.nan)
        for positions, (part, reward, terminated, truncated, info) in zip(at, heard, strict=True):
            put(observation, positions, part)
            reward_M[positions], terminated_M[positions], truncated_M[positions] = reward, terminated, truncated
            known = _success(info)
            success_M[positions] = np.nan if known is None else known
        return observation, reward_M, terminated_M, truncated_M, told(success_M)


def _made(id: str, size: int, options: Mapping[str, Any]) -> Any:
    if not has_vector_entry_point(id):
        raise EnvError(f"{id} is not registered with a batched form (vector_entry_point); use kind='serial'")
    try:
        return gym.make_vec(id, num_envs=size, vectorization_mode="vector_entry_point", **options)
    except Exception as error:  # anything an environment may raise
        raise EnvError(f"{id}: its batched form cannot be made with {dict(options)}: {line(error)}") from error


def _success(info: Mapping[str, Any]) -> np.ndarray | None:
    """What `info` says of success; NaN for members of whom it says nothing."""
    for key in _SUCCESS:
        if key in info:
            return np.where(info.get(f"_{key}", True), np.asarray(info[key], float), np.nan)
    return None


def _either(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
    if first is None or second is None:
        return second if first is None else first
    return np.where(np.isnan(first), second, first)
