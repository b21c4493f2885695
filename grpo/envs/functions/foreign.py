"""Other libraries' environments that are functions already: gymnax's, Brax's (MJX's), Pgx's, where they are installed.

grpo train --env gymnax:Breakout-MinAtar
grpo train --env brax:inverted_pendulum
grpo train --env pgx:tic_tac_toe          # games of several: the others draw their moves
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np

from grpo.envs.fleet import EnvError
from grpo.envs.functions.task import FunctionTask, no_jax
from grpo.errors import line

BRAX_LIMIT = 1000
"""Steps of an episode where they do not say: what Brax trains with."""


def foreign_task(library: str, name: str) -> FunctionTask:
    """An environment of theirs by its name."""
    if (why := no_jax()) is not None:
        raise EnvError(f"{library}:{name}: {why}")
    try:
        module = import_module("brax.envs" if library == "brax" else library)
    except ImportError as error:
        raise EnvError(f"{library}:{name} needs {error.name}; pip install jax {library}") from error
    try:
        return {"gymnax": _gymnax, "brax": _brax, "pgx": _pgx}[library](module, name)
    except EnvError:
        raise
    except Exception as error:  # whatever they raise about a name they do not know
        raise EnvError(f"{library} cannot make {name!r}: {line(error)}") from error


def _gymnax(module: Any, name: str) -> FunctionTask:
    """Its `step_env` ends by itself with its own limit, which the player counts here."""
    import jax
    import jax.numpy as jnp

    from grpo.envs.functions.numbers import numbers

    env, settings = module.make(name)
    limit, endless = BRAX_LIMIT, settings
    if hasattr(settings, "max_steps_in_episode"):
        limit = int(settings.max_steps_in_episode)
        endless = settings.replace(max_steps_in_episode=limit + 1)
    shape = env.observation_space(settings).shape

    def start(key: Any) -> Any:
        return env.reset_env(key, endless)[1]

    def step(state: Any, action: Any, key: Any) -> tuple[Any, Any, Any]:
        _, new, reward, over, _ = env.step_env(key, state, action, endless)
        return new, jnp.asarray(reward, jnp.float64).reshape(()), jnp.asarray(over, bool).reshape(())

    def see(state: Any) -> Any:
        return jnp.asarray(_observed(env, state, endless), jnp.float32).reshape(-1)

    def seeded(seed: int) -> Any:
        with numbers():
            return start(jax.random.key(seed))

    size = math.prod(shape) if shape else 1
    space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)
    return FunctionTask(name, space, _space(env.action_space(settings), name), limit, start, step, see, seeded)


def _observed(env: Any, state: Any, settings: Any) -> Any:
    """`get_obs` takes the settings in some of its environments."""
    try:
        return env.get_obs(state, settings)
    except TypeError:
        return env.get_obs(state)


def _space(theirs: Any, name: str) -> gym.Space[Any]:
    """An action space of theirs as Gymnasium's."""
    if hasattr(theirs, "n"):
        return gym.spaces.Discrete(int(theirs.n))
    if hasattr(theirs, "low"):
        shape = tuple(theirs.shape) or (1,)
        low, high = (np.broadcast_to(np.asarray(x, np.float32), shape) for x in (theirs.low, theirs.high))
        return gym.spaces.Box(low, high, dtype=np.float32)
    raise EnvError(f"{name}: no policy for its actions, {theirs}; they must be choices or bounded numbers")


def _brax(module: Any, name: str) -> FunctionTask:
    """Its state carries observation, reward and end."""
    import jax
    import jax.numpy as jnp

    from grpo.envs.functions.numbers import numbers

    env = module.get_environment(name)

    def start(key: Any) -> Any:
        return jax.tree.map(jnp.asarray, env.reset(key))

    def step(state: Any, action: Any, key: Any) -> tuple[Any, Any, Any]:
        new = jax.tree.map(lambda x, old: jnp.asarray(x).astype(old.dtype), env.step(state, action), state)
        return new, new.reward.astype(jnp.float64), new.done > 0  # some pay a plain 1.0

    def see(state: Any) -> Any:
        return state.obs.astype(jnp.float32)

    def seeded(seed: int) -> Any:
        with numbers():
            return start(jax.random.key(seed))

    acts = gym.spaces.Box(-1.0, 1.0, (env.action_size,), np.float32)
    sees = gym.spaces.Box(-np.inf, np.inf, (env.observation_size,), np.float32)
    return FunctionTask(name, sees, acts, BRAX_LIMIT, start, step, see, seeded)


def _pgx(module: Any, name: str) -> FunctionTask:
    """The policy is player 0; others, where there are any, draw one of their legal moves until it is its turn again.

    A move that is not legal ends the game and costs what Pgx says.
    """
    import jax
    import jax.numpy as jnp

    from grpo.envs.functions.numbers import numbers

    env = module.make(name)

    def moved(state: Any, action: Any, key: Any) -> Any:
        with jax.enable_x64(False):  # its games mix kinds of integers where there are wide ones
            new = env.step(state, jnp.asarray(action, jnp.int32), jax.random.key_data(key))
        return jax.tree.map(lambda x, old: jnp.asarray(x).astype(old.dtype), new, state)

    def others(state: Any, paid: Any, key: Any) -> tuple[Any, Any]:
        def waiting(carry: Any) -> Any:
            return (carry[0].current_player != 0) & ~carry[0].terminated

        def move(carry: Any) -> Any:
            state, paid, key = carry
            key, drawn, luck = jax.random.split(key, 3)
            action = jax.random.categorical(drawn, jnp.where(state.legal_action_mask, 0.0, -jnp.inf))
            state = moved(state, action, luck)
            return state, paid + state.rewards[0].astype(jnp.float64), key

        if env.num_players == 1:
            return state, paid
        state, paid, _ = jax.lax.while_loop(waiting, move, (state, paid, key))
        return state, paid

    def start(key: Any) -> Any:
        own, theirs = jax.random.split(key)
        with jax.enable_x64(False):
            state = jax.tree.map(jnp.asarray, env.init(jax.random.key_data(own)))
        return others(state, jnp.float64(0), theirs)[0]

    def step(state: Any, action: Any, key: Any) -> tuple[Any, Any, Any]:
        own, theirs = jax.random.split(key)
        new = moved(state, action, own)
        new, paid = others(new, new.rewards[0].astype(jnp.float64), theirs)
        return new, paid, new.terminated

    def see(state: Any) -> Any:
        return state.observation.astype(jnp.float32).reshape(-1)

    def seeded(seed: int) -> Any:
        with numbers():
            return start(jax.random.key(seed))

    sees = gym.spaces.Box(-np.inf, np.inf, (math.prod(env.observation_shape),), np.float32)
    return FunctionTask(name, sees, gym.spaces.Discrete(env.num_actions), BRAX_LIMIT, start, step, see, seeded)
