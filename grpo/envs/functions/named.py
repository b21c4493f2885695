"""Which environment a name means, where it is a function."""

from __future__ import annotations

from typing import Any

from grpo.envs.functions.task import FOREIGN, FunctionTask, NotAFunction, takes_state
from grpo.envs.make import EnvFactory


def is_function(env: Any) -> bool:
    """Whether this is a function, the name of one, or of a library whose environments are functions."""
    if not isinstance(env, str):
        return takes_state(env)
    home, colon, _ = env.rpartition(":")
    return bool(colon) and (home in FOREIGN or takes_state(EnvFactory(env).resolve()))


def find_task(env: Any) -> FunctionTask:
    """The environment for JAX; NotAFunction says why there is none."""
    from grpo.envs.functions.classic import TASKS, classic_task
    from grpo.envs.functions.foreign import foreign_task
    from grpo.envs.functions.written import written_task

    if not isinstance(env, str):
        if takes_state(env):
            return written_task(env)
        raise NotAFunction(f"{type(env).__name__} was passed ready-made, and is no function")
    if env in TASKS:
        return classic_task(env)
    home, colon, name = env.rpartition(":")
    if home in FOREIGN:
        return foreign_task(home, name)
    source = EnvFactory(env).resolve() if colon else None
    if source is not None and takes_state(source):
        return written_task(source)
    raise NotAFunction(f"{env} is no function; Gymnasium's classic tasks are ({', '.join(TASKS)}), and yours can be")
