"""Copies of one environment in this process: stepped one after the other, every answer checked before it is believed.

An environment is somebody's program. What it raises, and what does not fit its own spaces, becomes an error of that
member in that call; the member is made anew at its next reset, and the others never hear of it.

Letters: M members of a call, T steps.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

from grpo.envs import snapshot
from grpo.envs.answers import Wrong, flag_of, kind_of, reader, reward_of, success_of
from grpo.envs.fleet import Begun, EnvError, Snapshot, Stepped, Tree
from grpo.envs.spaces import bounds, numeric, put, zeros
from grpo.errors import defined_at, located, warn
from grpo.run.limits import at_most
from grpo.run.signals import from_a_person

Env: TypeAlias = gym.Env[Any, Any]
Make: TypeAlias = Callable[[], Env]
Watch: TypeAlias = Callable[[int, int], None]
"""Told (member, step) before each call into an environment: −1 making it, 0 its reset, 1 … its steps."""

CLOSE_TIMEOUT, LEAST = 10.0, 0.1
"""Seconds that environments may take to close, all of them together; and each, where the others have used it up."""
MAKING = -1
ENDED = "its episode has ended"
NOBODY = -1
"""Instead of a member: a copy that is not one."""
_ANSWER = "(observation, reward, terminated, truncated, info)"
_RESET = "Gymnasium's reset(self, *, seed=None, options=None) returns (observation, info)"


@dataclass
class _Member:
    """One environment and how it came to where it is."""

    env: Env | None = None
    """None: to be made at the next reset."""
    rest: str | None = "it has no episode yet"
    """Why it cannot be stepped; None: it can."""
    seed: int = 0
    actions: list[Any] = field(default_factory=list)
    step: int = 0
    """Of the last call into it."""
    seen: Tree = None
    """Its last observation."""
    spaces: tuple[Any, Any] | None = None
    """Those of `env` that were last compared with the fleet's."""


class SerialFleet:
    """`size` members from one factory, made when they are first reset; or the environments of a list."""

    def __init__(self, make: Make | Sequence[Env], size: int | None = None, watch: Watch | None = None) -> None:
        given: list[Env] = [] if callable(make) else list(make)
        self.size = len(given) if size is None else size
        if self.size < 1 or (not callable(make) and self.size != len(given)):
            raise EnvError(f"a fleet of {self.size} members cannot be made from {len(given)} environments")
        self._make = make if callable(make) else None
        self._watch: Watch = watch or (lambda member, step: None)
        self._members = [_Member(env) for env in given] or [_Member() for _ in range(self.size)]
        self._watch(NOBODY, MAKING)
        first = given[0] if given else self._made()
        self._spare = None if given else first  # made for its spaces; the first member to be reset takes it
        self.name: str = getattr(make, "name", None) or name_of(first)
        self.observation_space, self.action_space = _spaces_of(first, self.name)
        self._read, self._actions = reader(first.observation_space), _Actions(self.action_space)
        self.horizon = time_limit(first)
        self._branching: str | EnvError | None = None
        self._cut = False
        self.dice = False
        """Whether `check` saw a step draw from the environment's generator."""
        if len({id(env.unwrapped) for env in given}) < len(given):
            raise EnvError(f"{self.name}: one environment was given twice; every member needs its own")

    def reset(self, members: Sequence[int] | np.ndarray, seeds: Sequence[int]) -> Begun:
        """Begin episodes; equal seeds, equal starts. A member that had failed is made anew."""
        return self._begin(members, seeds, self._reset)

    def restore(self, members: Sequence[int] | np.ndarray, snapshots: Sequence[Snapshot]) -> Begun:
        """Put members into moments of episodes, their own or those of others."""
        return self._begin(members, snapshots, self._restore)

    def step(self, members: Sequence[int] | np.ndarray, actions: Any) -> Stepped:
        """One action for each of these members; the others stand still."""
        members, errors = numbered(members, self.size, self.name), dict[int, str]()
        action_M, fits_M = self._actions.read(actions, len(members), self.name)
        seen = zeros(self.observation_space, len(members))
        reward_M, success_M = np.zeros(len(members)), np.full(len(members), np.nan)
        terminated_M, truncated_M = np.zeros(len(members), bool), np.zeros(len(members), bool)
        for at, number in enumerate(members):
            member = self._members[number]
            if member.rest:
                errors[at] = f"{self.name} member {number}: {member.rest}; reset it first"
                continue
            try:
                if not fits_M[at]:
                    member.step = len(member.actions) + 1
                    raise Wrong(f"action {action_M[at]} is not in {self.action_space}")
                reward_M[at], terminated_M[at], truncated_M[at], success_M[at] = self._advance(number, action_M[at])
                put(seen, slice(at, at + 1), member.seen)
            except BaseException as error:  # anything an environment may raise
                if from_a_person(error):
                    raise
                errors[at] = self._failed(number, error)
        return Stepped(seen, reward_M, terminated_M, truncated_M, told(success_M), errors)

    def snapshot(self, members: Sequence[int] | np.ndarray) -> list[Snapshot]:
        """Moments to come back to: with the environment's own state where that is proven exact, else without."""
        state = self.branching() == "state"
        return [self.take(number, state) for number in numbered(members, self.size, self.name)]

    def take(self, number: int, state: bool) -> Snapshot:
        """One member's moment, with or without the environment's own state."""
        member = self._members[number]
        if member.env is None or member.seen is None:
            raise EnvError(f"{self.name} member {number}: {member.rest}, so there is no moment to keep; reset it first")
        read = snapshot.read_state(member.env, member.seen) if state else None
        if read is not None:
            read["ended"] = np.array(member.rest is not None)
        return Snapshot(member.seed, self._actions.stack(member.actions), read)

    def branching(self) -> str:
        """How snapshots are restored, by "state" or by "replay"; EnvError where neither leads to the same future."""
        if self._branching is None:
            try:
                if self._make is None:
                    raise EnvError(f"{self.name}: only this one copy is known, so none can be branched; pass a factory")
                # Copies of its own, so that no episode that is under way is disturbed.
                copies = SerialFleet(self._make, 2, lambda _, step: self._watch(NOBODY, step))
                with contextlib.closing(copies):
                    self._branching = snapshot.proven(copies)
            except EnvError as error:
                self._branching = error
        if isinstance(self._branching, EnvError):
            raise self._branching
        return self._branching

    def check(self) -> list[str]:
        """Try member 0: EnvError for what cannot work, a remark for what works less well. It needs a reset then."""
        seen = []
        for _ in range(2):
            begun = self.reset([0], [0])
            if begun.errors:
                raise EnvError(begun.errors[0])
            seen.append(begun.observation)
        before = self._chance()
        stepped = self.step([0], np.array([self.action_space.sample()]))
        after = self._chance()
        self.dice = (before is None) != (after is None) or not snapshot.same(before, after)
        if stepped.errors:  # a wrapper that unpacks in vain does not say what
            env = (self._members[0].env or self._made()).unwrapped
            hint = f"; step() must give {_ANSWER}{defined_at(type(env).step)}"
            hint = hint if "expected 5, got" in stepped.errors[0] else ""
            raise EnvError(stepped.errors[0] + hint)
        self._members[0].rest, self._members[0].seen = "it has no episode yet", None
        if snapshot.same(*seen):
            return []
        return [
            f"{self.name}: two resets with one seed began differently, so episodes of a group do not share a start; "
            "call super().reset(seed=seed) in the environment's reset and draw from self.np_random only"
        ]

    def _chance(self) -> Any:
        """Where member 0's generator stands, of any kind; None where it has none."""
        env = self._members[0].env
        random = None if env is None else getattr(env.unwrapped, "_np_random", None)
        return random.bit_generator.state if isinstance(random, np.random.Generator) else None

    def close(self) -> None:
        """Close every environment."""
        close(*(env for env in [self._spare, *(member.env for member in self._members)] if env is not None))
        self._spare, self._members = None, [_Member() for _ in range(self.size)]

    def _begin(
        self, members: Sequence[int] | np.ndarray, starts: Sequence[Any], begin: Callable[[int, Any], None]
    ) -> Begun:
        members, errors = numbered(members, self.size, self.name), dict[int, str]()
        if len(starts) != len(members):
            raise EnvError(f"{self.name}: {len(starts)} starts for {len(members)} members; give one for each")
        seen = zeros(self.observation_space, len(members))
        for at, number in enumerate(members):
            member = self._members[number]
            member.actions, member.seen, member.rest = [], None, None
            try:
                begin(number, starts[at])
                put(seen, slice(at, at + 1), member.seen)
            except BaseException as error:  # anything an environment may raise
                if from_a_person(error):
                    raise
                errors[at] = self._failed(number, error)
        return Begun(seen, errors)

    def _reset(self, number: int, seed: int) -> None:
        member = self._members[number]
        if member.env is None:
            member.env, self._spare = self._spare, None
        if member.env is None:
            self._enter(number, MAKING)
            member.env = self._made()
        member.seed = int(seed)
        self._enter(number, 0)
        own = type(member.env.unwrapped).reset
        try:
            answer: Any = member.env.reset(seed=member.seed)
        except TypeError as error:
            if "reset() got an unexpected keyword argument" not in str(error):
                raise
            raise Wrong(f"{error}{defined_at(own)}; {_RESET}") from error
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
            raise Wrong(f"reset() gave {kind_of(answer)}, not (observation, info){defined_at(own)}; {_RESET}")
        self._same_spaces(member)
        member.seen = self._read(answer[0])

    def _restore(self, number: int, moment: Snapshot) -> None:
        self._reset(number, moment.seed)
        member = self._members[number]
        assert member.env is not None
        actions, fits_T = self._actions.read(moment.actions, len(moment.actions), self.name)
        if not fits_T.all():
            raise Wrong(f"the snapshot has actions that are not in {self.action_space}")
        if moment.state is not None:
            member.seen = snapshot.write_state(member.env, moment.state, member.seen)
            member.actions, member.rest = list(actions), ENDED if moment.state["ended"] else None
            return
        for action in actions:
            if member.rest:
                raise Wrong(f"played again, {member.rest} before the {len(actions)} actions of the snapshot were used")
            self._advance(number, action)

    def _advance(self, number: int, action: Any) -> tuple[float, bool, bool, float]:
        """One step of a member that is in an episode: reward, terminated, truncated, success."""
        member = self._members[number]
        assert member.env is not None
        self._enter(number, len(member.actions) + 1)
        answer: Any = member.env.step(self._actions.given(action))
        if not (isinstance(answer, tuple) and len(answer) == 5):
            raise Wrong(f"step() gave {kind_of(answer)}, not {_ANSWER}")
        seen, reward = self._read(answer[0]), reward_of(answer[1])
        terminated, truncated = flag_of(answer[2], "terminated"), flag_of(answer[3], "truncated")
        member.actions.append(action)
        member.seen = seen
        if terminated or truncated:
            member.rest = ENDED
            if not (number or terminated or self._cut) and isinstance(member.env, AssumedLimit):
                self._say_cut(member)  # of the first member alone: of all processes, one speaks
        return reward, terminated, truncated and not terminated, success_of(answer[4])

    def _say_cut(self, member: _Member) -> None:
        """Once, that a limit nobody has asked for ended an episode."""
        assert self.horizon is not None
        self._cut = len(member.actions) >= self.horizon
        if self._cut:
            what = f"an episode did not end by itself and was cut after {self.horizon:,} steps, as all such will be"
            warn(f"{self.name}: {what}; max_episode_steps chooses another limit")

    def _enter(self, number: int, step: int) -> None:
        self._members[number].step = step
        self._watch(number, step)

    def _made(self) -> Env:
        assert self._make is not None
        env = self._make()
        for member in self._members:
            if member.env is not None and member.env.unwrapped is env.unwrapped:
                raise Wrong("the factory gave one environment twice; it must make a new one whenever it is called")
        return env

    def _same_spaces(self, member: _Member) -> None:
        """Members from one factory must be alike, and stay so."""
        assert member.env is not None
        now = member.env.observation_space, member.env.action_space
        if member.spaces is not None and all(one is other for one, other in zip(now, member.spaces, strict=True)):
            return
        pairs = (self.observation_space, numeric(now[0])), (self.action_space, now[1])
        for name, (before, after) in zip(("observation", "action"), pairs, strict=True):
            if before != after:
                raise Wrong(f"its {name} space is {after}, the fleet's {before}")
        member.spaces = now

    def _failed(self, number: int, error: BaseException) -> str:
        """Leave a member until its next reset, which makes it anew; what went wrong, in a line."""
        member = self._members[number]
        member.rest, member.seen = "it failed", None
        if self._make is not None:
            if member.env is not None:
                close(member.env)
            member.env = None
        said = str(error) if isinstance(error, Wrong | EnvError) else located(error)
        return f"{self.name} member {number}, {when(member.step)}: {said}"


def self_test(make: Make) -> str:
    """Prove how what a factory makes can be branched: "state" or "replay"; EnvError: not at all."""
    with contextlib.closing(SerialFleet(make, 1)) as made:
        return made.branching()


def numbered(members: Sequence[int] | np.ndarray, size: int, name: str) -> list[int]:
    """The members of a call, distinct and known."""
    numbers = [int(member) for member in members]
    if len({*numbers}) != len(numbers) or not all(0 <= number < size for number in numbers):
        raise EnvError(f"{name}: members must be distinct numbers from 0 to {size - 1}; got {numbers!r:.80}")
    return numbers


def when(step: int) -> str:
    """For messages: a moment of an episode."""
    return {MAKING: "its making", 0: "reset"}.get(step, f"step {step}")


def told(success_M: np.ndarray) -> np.ndarray | None:
    """None where nobody told."""
    return None if np.isnan(success_M).all() else success_M


def name_of(env: Env) -> str:
    """Its id, else its class."""
    spec = getattr(env, "spec", None)
    return spec.id if spec is not None else type(getattr(env, "unwrapped", env)).__qualname__


class AssumedLimit(TimeLimit):
    """The time limit of an environment that has none of its own, as far as can be seen."""


def time_limit(env: Env) -> int | None:
    """Steps after which a wrapper truncates; None: none does."""
    limits = []
    while isinstance(env, gym.Wrapper):
        if isinstance(env, TimeLimit):
            limits.append(env._max_episode_steps)
        env = env.env
    return min(limits, default=None)


def _spaces_of(env: Env, name: str) -> tuple[gym.Space[Any], gym.Space[Any]]:
    """What is observed that is numbers, and what can be done."""
    if not isinstance(env, gym.Env):
        raise EnvError(
            f"{name} is a {type(env).__qualname__}, not a gymnasium.Env; old Gym ones need shimmy's wrappers"
        )
    for kind in ("observation_space", "action_space"):
        if not isinstance(getattr(env, kind, None), gym.Space):
            raise EnvError(f"{name} has no {kind}; set self.{kind} in its __init__")
    observed = numeric(env.observation_space)
    if observed is None:
        raise EnvError(
            f"{name}: no part of its observation space {env.observation_space} is numbers; wrap it into a Box"
        )
    if not isinstance(env.action_space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box):
        raise EnvError(
            f"{name}: its action space {env.action_space} is not supported; wrap it into Discrete, MultiDiscrete, "
            "MultiBinary or Box"
        )
    return observed, env.action_space


class _Actions:
    """Actions as arrays in the fleet, and as the environment's own space would sample them."""

    def __init__(self, space: gym.Space[Any]) -> None:
        self._shape, self._dtype = tuple(space.shape or ()), np.dtype(space.dtype)
        self._low, self._high = bounds(space)

    def read(self, actions: Any, count: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        """As one array, and which of them the space has. Floats may leave their box: many environments clip them."""
        array = self._array(actions, count)
        if array is None:
            text = f"{count} actions of shape {self._shape} and type {self._dtype}"
            raise EnvError(f"{name}: {text} are needed; got {' '.join(repr(actions).split())!s:.80}")
        within = (array >= self._low) & (array <= self._high)
        return array.astype(self._dtype), within.reshape(count, math.prod(self._shape)).all(1)

    def _array(self, actions: Any, count: int) -> np.ndarray | None:
        """One row an action; None where they cannot be read so."""
        try:
            array = np.asarray(actions)
        except (TypeError, ValueError):  # rows of several shapes
            return None
        whole = {array.dtype.kind, self._dtype.kind} <= {*"iu"}
        typed = not array.size or whole or np.can_cast(array.dtype, self._dtype, "same_kind")
        if not typed or not array.ndim or len(array) != count or array.size != count * math.prod(self._shape):
            return None
        return array.reshape(count, *self._shape)

    def given(self, action: Any) -> Any:
        """A copy of one action, for an environment that may write into it."""
        return action.copy()

    def stack(self, actions: list[Any]) -> np.ndarray:
        """(T, …), also of none."""
        return np.array(actions, self._dtype).reshape(len(actions), *self._shape)


def close(*envs: Any) -> None:
    """Close environments, whatever they make of that: they may raise, and all together take some time."""
    until = time.monotonic() + CLOSE_TIMEOUT
    left = 0
    for env in envs:
        try:
            at_most(max(until - time.monotonic(), LEAST), "close()", env.close)
        except TimeoutError:
            left += 1
        except BaseException as error:
            if from_a_person(error):
                raise
    if left:
        what = f"{left} of {len(envs)} environments did not close in {CLOSE_TIMEOUT:g} s and are left as they are"
        warn(f"{name_of(envs[0])}: {what}")
