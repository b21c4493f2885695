"""From what a user names to a fleet: ids, classes, files, factories and instances, and who is to step them.

    make_fleet("CartPole-v1", 64)                      arrays of our own
    make_fleet("MiniGrid-Empty-5x5-v0", 8)             one after the other, in this process
    make_fleet("my_package.envs:Maze", 8, workers=4)   your own code: in processes that may hang or die
    make_fleet("maze.py:Maze", 8)
    make_fleet("maze.py:Maze", 512, workers="ray")     the same on every machine of a Ray cluster
    make_fleet(lambda: Maze(size=5), 8)

Every episode must end, so an environment without a time limit of its own gets one.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import TimeLimit

from grpo.envs.fleet import EnvError, Fleet
from grpo.envs.functions.task import FOREIGN, takes_state
from grpo.envs.serial import AssumedLimit, Env, SerialFleet, name_of, time_limit
from grpo.errors import defined_at, install, line, located, warn
from grpo.run.guard import TrainsWhenLoaded, loading
from grpo.workers import CannotStart

if TYPE_CHECKING:
    from grpo.envs.spread import SpreadFleet

Kind: TypeAlias = Literal["auto", "classic", "vector", "mujoco", "envpool", "serial", "processes", "ray"]
KINDS: tuple[Kind, ...] = ("auto", "classic", "vector", "mujoco", "envpool", "serial", "processes", "ray")

DEFAULT_HORIZON = 1000
"""Steps after which an episode is cut where nothing else limits it."""

TRUSTED = ("gymnasium", "minigrid", "ale_py", "gymnasium_robotics")
"""Packages whose environments neither hang nor die, so that they need no process of their own."""

PACKAGES: Mapping[tuple[str, ...], tuple[str, str]] = {
    ("MiniGrid-", "BabyAI-"): ("minigrid", "minigrid"),
    ("ALE/",): ("ale_py", "[atari]"),
    ("dm_control/",): ("shimmy", "[dm-control]"),
    ("AdroitHand", "AntMaze", "PointMaze"): ("gymnasium_robotics", "gymnasium-robotics"),
    # From MuJoCo 3.12 on an assertion of theirs fails, and says nothing: its joint types are no longer numbers.
    ("Fetch", "FrankaKitchen", "Hand"): ("gymnasium_robotics", "gymnasium-robotics 'mujoco<3.12'"),
}
"""How ids begin → the module that registers them, and what to install for it; in brackets an extra of ours."""


@dataclass(frozen=True)
class EnvFactory:
    """How to make one environment; it can be sent to other processes if its parts can.

    `env` is a registered id ("CartPole-v1", "MyPackage/MyEnv-v0", "my_module:MyEnv-v0"), a class or factory function
    ("my_package.module:MyEnv", "path/to/file.py:MyEnv"), or such a thing itself.
    """

    env: str | EnvSpec | Callable[..., Env]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """For the environment's constructor."""
    horizon: int | None = None
    """Steps after which episodes are cut; None: the environment's own limit, or DEFAULT_HORIZON. A class or function
    that takes `max_episode_steps` is told."""

    @property
    def name(self) -> str:
        """For messages."""
        if isinstance(self.env, str):
            return self.env.rpartition(":")[2]
        if isinstance(self.env, EnvSpec):
            return self.env.id
        if isinstance(own := getattr(self.env, "name", None), str):  # whoever wraps another says what is inside
            return own
        return str(getattr(self.env, "__qualname__", type(self.env).__qualname__))

    def __call__(self) -> Env:
        """One more."""
        return self.make()

    def make(self, render_mode: str | None = None) -> Env:
        """A new environment, with a time limit. EnvError says what to do about one that cannot be made."""
        source = self.resolve()
        options = dict(self.kwargs)
        if render_mode is not None and (isinstance(source, EnvSpec) or _accepts(source, "render_mode")):
            options["render_mode"] = render_mode
        if self.horizon is not None and "max_episode_steps" in _parameters(source):
            options.setdefault("max_episode_steps", self.horizon)  # what it wraps may have a shorter limit of its own
        try:
            if isinstance(source, EnvSpec):  # the fleet checks what the passive checker would
                env: Env = gym.make(source, max_episode_steps=self.horizon, disable_env_checker=True, **options)
            elif takes_state(source):
                from grpo.envs.functions.adapter import written_env

                env = written_env(source)
            else:
                env = source(**options)
        except EnvError:
            raise
        except gym.error.DependencyNotInstalled as error:
            raise EnvError(f"{self.name}: {line(error)}; {install('control')}") from error
        except Exception as error:  # anything an environment may raise
            given = f" with {options}" if options else ""
            package = next((name for start, (_, name) in PACKAGES.items() if self.name.startswith(start)), None)
            remedy = f"; if that is no fault of its own: {_brought(package)}" if package else ""
            where = ""
            if isinstance(error, TypeError) and (missing := _required(source) - {*options}):
                wanted = ", ".join(f"{name!r}: …" for name in sorted(missing))
                where = defined_at(vars(source).get("__init__", source) if isinstance(source, type) else source)
                remedy = f"; give env_kwargs={{{wanted}}}"
            raise EnvError(f"{self.name} cannot be made{given}: {located(error)}{where}{remedy}") from error
        if not isinstance(env, gym.Env):
            made = type(env).__qualname__
            raise EnvError(
                f"{self.name} makes a {made}, not a gymnasium.Env; old Gym environments need shimmy's wrappers"
            )
        if render_mode is not None and env.render_mode != render_mode:
            raise EnvError(f"{self.name} cannot be seen: it takes no render_mode={render_mode!r}")
        return limited(env, None if isinstance(source, EnvSpec) else self.horizon)

    def resolve(self) -> EnvSpec | Callable[..., Env]:
        """What `env` stands for, imported where it must be."""
        if not isinstance(self.env, str):
            return self.env
        home, colon, name = self.env.rpartition(":")
        if not colon:
            return _registered(self.env)
        if home in FOREIGN:
            return partial(_foreign, home, name)
        module = _load_file(home) if home.endswith(".py") else _load_module(home, self.env)
        if name in gym.registry:
            return gym.registry[name]
        source = getattr(module, name, None)
        if not callable(source):
            near = _nearest(name, [key for key, value in vars(module).items() if inspect.isclass(value)])
            raise EnvError(f"{home} has no {name}, neither as a class or function nor as an id that it registers{near}")
        return cast("Callable[..., Env]", source)


def make_fleet(
    env: str | EnvSpec | Callable[..., Env] | Env | EnvFactory,
    size: int,
    *,
    kind: Kind = "auto",
    kwargs: Mapping[str, Any] | None = None,
    horizon: int | None = None,
    workers: int | str | None = None,
    timeout: float = 30.0,
    alike: bool = False,
) -> Fleet:
    """A fleet of `size` members; see `EnvFactory` for what `env` may be, or give an environment itself.

    `auto` takes the fastest that serves: our own arrays, then a registered batched form, then this process for
    packages that are known to behave, then processes. `workers` and `timeout` are for processes; `workers="ray"`, or
    `"ray:8"`, are actors of a Ray cluster (`grpo.cluster`). `alike`: episodes of one seed will be compared, so dice
    that they would share are told of.
    """
    if kind not in KINDS:
        raise EnvError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
    if size < 1 or (horizon is not None and horizon < 1):
        raise EnvError(f"a fleet needs at least one member, and a horizon at least one step; got {size} and {horizon}")
    if workers is not None:
        kind = _with_workers(kind, workers)
    if isinstance(env, gym.Env):
        return _around(env, size, kind, kwargs, horizon, alike)
    factory = env if isinstance(env, EnvFactory) else EnvFactory(env)
    factory = replace(factory, kwargs={**factory.kwargs, **(kwargs or {})}, horizon=horizon or factory.horizon)
    chosen = _choose(factory) if kind == "auto" else kind
    if chosen in ("classic", "vector", "mujoco", "envpool"):
        try:
            return _batched(factory, size, chosen)
        except EnvError:
            if kind != "auto" or chosen == "classic":
                raise
            chosen = _place(factory)  # a batched form that does not do all that a fleet must
    if chosen == "ray":
        from grpo.envs.ray_fleet import RayFleet

        far = RayFleet(factory, size, str(workers or "ray"), timeout)
        _remark(far, far.remarks, alike)
        return far
    if chosen == "processes":
        assert not isinstance(workers, str)
        from grpo.envs.processes import ProcessFleet

        try:
            spread = ProcessFleet(factory, size, workers, timeout)
        except CannotStart as error:
            if kind != "auto":
                raise EnvError(f"{factory.name} cannot run in other processes: {error}; use vector='serial'") from None
            _tell(f"{factory.name} cannot run in other processes and runs in this one, without a time limit: {error}")
        else:
            _remark(spread, spread.remarks, alike)
            return spread
    fleet = SerialFleet(factory, size)
    _remark(fleet, fleet.check(), alike)
    return fleet


def _with_workers(kind: Kind, workers: int | str) -> Kind:
    """Processes, or actors; EnvError where another kind was asked for."""
    meant: Kind = "ray" if isinstance(workers, str) else "processes"
    if kind not in ("auto", meant):
        raise EnvError(f"workers={workers} means {meant}; leave it out for vector={kind!r}")
    return meant


def limited(env: Env, horizon: int | None = None) -> Env:
    """With a time limit: this one, or that of a wrapper, or the environment's own, or DEFAULT_HORIZON."""
    if horizon is None and time_limit(env) is not None:
        return env
    limit = horizon or _own_limit(env)
    return AssumedLimit(env, DEFAULT_HORIZON) if limit is None else TimeLimit(env, limit)


def _own_limit(env: Env) -> int | None:
    """Steps that an environment says it allows, as MiniGrid's and ALE's do."""
    inner = env.unwrapped
    for name in ("max_steps", "max_episode_steps"):
        limit = getattr(inner, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    options = inner.spec.kwargs if inner.spec is not None else {}
    frames, skip = options.get("max_num_frames_per_episode"), options.get("frameskip", 1)
    return frames // (skip if isinstance(skip, int) else min(skip)) if frames else None


def _choose(factory: EnvFactory) -> Kind:
    from grpo.envs.classic import CLASSIC
    from grpo.envs.vectors import has_vector_entry_point

    if isinstance(factory.env, str) and isinstance(factory.resolve(), EnvSpec):
        if factory.env in CLASSIC and not factory.kwargs:
            return "classic"
        if has_vector_entry_point(factory.env):
            return "vector"
    return _place(factory)


def _place(factory: EnvFactory) -> Kind:
    """This process or others, going by who wrote the environment."""
    source = factory.resolve()
    if takes_state(source) or (isinstance(factory.env, str) and factory.env.rpartition(":")[0] in FOREIGN):
        return "serial"  # a pure function neither hangs nor dies, and compiles once
    entry = source.entry_point if isinstance(source, EnvSpec) else source
    home = entry if isinstance(entry, str) else getattr(entry, "__module__", None) or ""
    return "serial" if re.split("[.:]", home)[0] in TRUSTED else "processes"


def _batched(factory: EnvFactory, size: int, kind: Kind) -> Fleet:
    """Fleets that know an environment by its id."""
    if not isinstance(factory.env, str):
        raise EnvError(f"vector={kind!r} needs a registered id, not {factory.name}; use vector='serial' or 'processes'")
    if kind == "classic":
        from grpo.envs.classic import CLASSIC, make_classic

        if factory.env not in CLASSIC or factory.kwargs:
            why = "takes no kwargs" if factory.kwargs else f"is for {', '.join(CLASSIC)}"
            raise EnvError(f"{factory.name}: vector='classic' {why}; use vector='serial'")
        return make_classic(factory.env, size, factory.horizon)
    if kind == "mujoco":
        from grpo.envs.mujoco_threads import MuJoCoFleet

        return MuJoCoFleet(factory.env, size, factory.kwargs, factory.horizon)
    if kind == "envpool":
        from grpo.envs.envpool import EnvPoolFleet

        return EnvPoolFleet(factory.env, size, factory.kwargs, factory.horizon)
    from grpo.envs.vectors import GymVectorFleet

    return GymVectorFleet(factory.env, size, factory.kwargs, factory.horizon)


def _around(
    env: Env, size: int, kind: Kind, kwargs: Mapping[str, Any] | None, horizon: int | None, alike: bool
) -> Fleet:
    """A fleet whose first member is this very environment; the others are made as it was."""
    name = name_of(env)
    if kind not in ("auto", "serial"):
        raise EnvError(f"{name}: an environment cannot move to vector={kind!r}; pass its id or a factory")
    if kwargs:
        raise EnvError(f"{name} is made already, so kwargs come too late; pass its id or a factory")
    if env.spec is None:
        if size > 1:
            raise EnvError(f"{name} has no spec to make {size - 1} more from; pass an id or a factory")
        fleet = SerialFleet([limited(env, horizon)])
    else:
        first, more = [limited(env, horizon)], EnvFactory(env.spec, horizon=horizon)
        fleet = SerialFleet(lambda: first.pop() if first else more.make(), size)
    _remark(fleet, fleet.check(), alike)
    return fleet


def _tell(what: str) -> None:
    """Once, although a run makes a fleet to train with, another to evaluate, and again after it was resumed."""
    if what not in _TOLD:
        _TOLD.add(what)
        warn(what)


_TOLD: set[str] = set()


def _remark(fleet: SerialFleet | SpreadFleet, remarks: list[str], alike: bool) -> None:
    for remark in remarks:
        warn(remark)
    if alike and fleet.dice:
        _tell(
            f"{fleet.name} draws random numbers during an episode, and tries from one start meet the same ones: "
            "group_by=batch gives each try a start and luck of its own, group_by=start says that this is meant"
        )


def _accepts(source: Callable[..., Env], name: str) -> bool:
    parameters = _parameters(source)
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _required(source: EnvSpec | Callable[..., Env]) -> set[str]:
    """What must be given."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, one in _parameters(source).items() if one.kind in kinds and one.default is one.empty}


def _parameters(source: EnvSpec | Callable[..., Env]) -> Mapping[str, inspect.Parameter]:
    """What a class or function takes, by name; an id takes nothing here."""
    try:
        return {} if isinstance(source, EnvSpec) else inspect.signature(source).parameters
    except (TypeError, ValueError):
        return {}


def _foreign(library: str, name: str) -> Env:
    """An environment of a library whose environments are functions."""
    from grpo.envs.functions.adapter import FunctionEnv
    from grpo.envs.functions.foreign import foreign_task

    return FunctionEnv(foreign_task(library, name))


def _registered(id: str) -> EnvSpec:
    """The registration of an id, after importing the package that makes it."""
    if id not in gym.registry:
        _import_for(id)
    if id in gym.registry:
        return gym.registry[id]
    if id.endswith(".py") and Path(id).is_file():
        held = re.findall(r"^class (\w+)", Path(id).read_text("utf-8", "replace"), re.MULTILINE) or ["YourEnv"]
        raise EnvError(f"{id} is a file; name what it holds, too: --env {id}:{held[-1]}")
    own = "to use your own, name its module first: --env your_module:YourEnv-v0"
    raise EnvError(f"no environment {id!r} is registered{_nearest(id, list(gym.registry))}; {own}")


def _brought(package: str) -> str:
    return install(package.strip("[]")) if package.startswith("[") else f"pip install {package}"


def _import_for(id: str) -> None:
    for beginnings, (module, package) in PACKAGES.items():
        if id.startswith(beginnings):
            for needed in (module, *(("dm_control",) if module == "shimmy" else ())):
                if importlib.util.find_spec(needed) is None:
                    raise EnvError(f"{id} needs {needed.replace('_', '-')}; {_brought(package)}")
            if module == "shimmy":
                from grpo.envs.dm_control import fit_to_mujoco

                fit_to_mujoco()
            _load_module(module, id)
            return
    namespace, slash, _ = id.partition("/")
    for module in dict.fromkeys((namespace, namespace.lower(), namespace.replace("-", "_").lower())) if slash else ():
        if module.isidentifier() and importlib.util.find_spec(module) is not None:
            _load_module(module, id)


def _nearest(name: str, known: list[str]) -> str:
    lower = {one.lower(): one for one in known}
    near = [lower[found] for found in difflib.get_close_matches(name.lower(), lower, 3)]
    return f"; nearest: {', '.join(near)}" if near else ""


def _load_module(name: str, env: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # an installed command has its own folder there instead
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = next((found for module, found in PACKAGES.values() if module == error.name), None)
        if package is not None:
            raise EnvError(f"{env} needs {str(error.name).replace('_', '-')}; {_brought(package)}") from error
        raise EnvError(f"{env}: {name} cannot be imported ({line(error)}); install it, or run where it lies") from error
    except Exception as error:  # anything a module may do
        raise EnvError(f"{env}: importing {name} fails: {located(error)}") from error


def _load_file(path: str) -> ModuleType:
    """A file as a module, once; what lies beside it can be imported by it."""
    file = Path(path).expanduser().resolve()
    name = re.sub(r"\W", "_", str(file.with_suffix("")))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise EnvError(f"there is no file {path}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        with loading(file):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, TrainsWhenLoaded):
            raise EnvError(str(error)) from None
        if isinstance(error, Exception):
            raise EnvError(f"loading {path} fails: {located(error)}") from error
        raise
    return module
