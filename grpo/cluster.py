"""Ray: how a run joins a cluster, and workers there, for environments, tools and rewards on machines without a learner.

    ray start --head …;  grpo train walker2d --workers ray --envs 512

`RAY_ADDRESS` names the cluster; without it the one that this user has started on this machine is joined, and where
there is none, one is made of this machine alone: on loopback, without a dashboard, closed to whoever has not its token.
It is let go of with the last who uses it.

Messages between Ray's processes are pickles: a cluster must only be reachable for those who may run code on it. So one
that listens to other machines without tokens is said to be open.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from grpo.errors import ConfigError, install, line, warn
from grpo.processors import processors
from grpo.workers import ORPHAN_GRACE, START_TIMEOUT, CannotStart, Outcome, Pool, Serving, Worker, name_of

OLDEST = (2, 52)
"""The first version of Ray whose clusters can be closed by a token."""
STORE = 100_000_000
"""Bytes of shared memory for a cluster of our own: little is ever in it at a time."""

REACHED = 5.0
"""Seconds in which the address of a cluster must take a connection."""

SHARE = 0.25
"""Of a processor that an actor reserves: those of a run (to train, to evaluate, tools, rewards) work in turn."""

Handle: TypeAlias = Any
"""Of an actor, which is Ray's affair."""


class RayMissing(ConfigError):
    """Ray is not there, too old, or not to be reached; in one line with the remedy."""


class Died(Exception):
    """The process of an actor has ended, or its machine has gone."""


@dataclass
class _Joined:
    """Whether this process is part of a cluster."""

    users: int = 0
    own: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


_joined = _Joined()


def required() -> Any:
    """The library, of a version that will do."""
    if importlib.util.find_spec("ray") is None:
        raise RayMissing(f"workers=ray needs Ray, which is not installed; {install('ray')}")
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise RayMissing(f"workers=ray: what is called ray here is not the library; {install('ray')}") from None
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise RayMissing(
            f"workers=ray: Ray {version} cannot close a cluster by a token, {wanted} can; {install('ray')}"
        )
    if "ray" not in sys.modules:  # which reads the environment when it is loaded
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to others unless the user says so
        if not address():
            _close_to_others()
    import ray

    return ray


def join() -> Any:
    """The library, connected; every `join` is followed by a `leave`."""
    with _joined.lock:
        ray = required()
        if not ray.is_initialized():
            _connect(ray)
        _joined.users += 1
        return ray


def leave() -> None:
    """The last one to leave ends a cluster that is our own."""
    with _joined.lock:
        _joined.users -= 1
        if not _joined.users and _joined.own:
            _joined.own = False
            sys.modules["ray"].shutdown()


def _connect(ray: Any) -> None:
    place = address()
    quiet = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    if place:
        warn_if_open(place)
        expect_reachable(place)
        try:
            ray.init(address=place, **quiet)
        except Exception as error:  # Ray has an exception for every way in which it cannot be reached
            raise RayMissing(
                f"the Ray cluster at {place} cannot be joined: {line(error)}; see `ray status`, or unset RAY_ADDRESS "
                "and run `ray stop` to use this machine alone"
            ) from error
        return
    own = {"num_cpus": processors(), "include_dashboard": False, "object_store_memory": STORE}
    try:
        ray.init(address="local", **own, **quiet)
    except Exception as error:
        raise RayMissing(f"Ray cannot be started on this machine: {line(error)}") from error
    _joined.own = True
    if os.environ.get("RAY_AUTH_MODE") != "token":
        warn("Ray was loaded before: its cluster has no token; set RAY_AUTH_MODE=token")


def address() -> str | None:
    """Of the cluster to join; None: there is none."""
    return os.environ.get("RAY_ADDRESS") or _started_here()


def _close_to_others() -> None:
    """A cluster of this machine alone: with a token of its own, on loopback."""
    # Without this Ray takes 127.0.0.1 for a mistake, and listens to the whole network.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _started_here() -> str | None:
    """The address of a cluster that this user has started on this machine; what others left there is not believed."""
    file = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray", "ray_current_cluster")
    with contextlib.suppress(OSError):
        if file.stat().st_uid == os.getuid():
            return file.read_text().strip() or None
    return None


def expect_reachable(address: str) -> None:
    """Refuse an address at which nobody listens: Ray would ask there for minutes, and print what it thinks of it."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():  # auto, local, or a word of Ray's that names no machine
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACHED).close()
    except OSError as error:
        raise RayMissing(
            f"no Ray cluster answers at {address} ({error.strerror or line(error)}); start it (`ray start --head`), or "
            "unset RAY_ADDRESS and run `ray stop` to use this machine alone"
        ) from None


def warn_if_open(address: str) -> None:
    """A cluster that other machines reach and that asks nobody who they are."""
    host = address.removeprefix("ray://").rpartition(":")[0].strip("[]")
    near = host in ("", "localhost", "::1") or host.startswith("127.")
    if not near and os.environ.get("RAY_AUTH_MODE") != "token":
        warn(
            f"the Ray cluster at {address} takes work from whoever reaches it; start it, and this run, with "
            "RAY_AUTH_MODE=token (`ray get-auth-token --generate`)",
        )


# --- actors ---------------------------------------------------------------------------------------------------------


def counted(where: str, most: int | None = None) -> int:
    """How many actors `ray` or `ray:N` stands for: one a processor of the cluster, at most `most`."""
    told = where.partition(":")[2]
    count = int(told) if told else max(1, int(cluster_processors()))
    return count if most is None else min(count, most)


def cluster_processors() -> float:
    """Processors of the cluster, as Ray counts them."""
    return float(sys.modules["ray"].cluster_resources().get("CPU", 1))


@dataclass(frozen=True)
class Home:
    """Where code is found: a run's own working directory and search path, as far as they are there on a machine."""

    folder: str
    path: tuple[str, ...]

    @classmethod
    def here(cls) -> Home:
        """Of this process."""
        return cls(os.getcwd(), tuple(sys.path))

    def enter(self) -> None:
        """The same over there."""
        with contextlib.suppress(OSError):
            os.chdir(self.folder)
        sys.path += [place for place in self.path if place not in sys.path and os.path.exists(place or ".")]


def hire(ray: Any, kind: type, count: int, *arguments: Any, at_once: int | None = None) -> Handle:
    """An actor of this class, one of `count`: each on a processor, or several where there are not so many.

    It is never started again by Ray, which would ask it once more for what has killed it. at_once: calls that an
    asynchronous one takes together.
    """
    share = SHARE * min(1.0, int(1000 * cluster_processors() / count) / 1000)
    options: dict[str, Any] = {"num_cpus": share, "max_restarts": 0, "max_task_retries": 0}
    if at_once is not None:
        options["max_concurrency"] = at_once
    return ray.remote(**options)(kind).remote(Home.here(), *arguments)


def awaited(ray: Any, reference: Any, seconds: float | None = None) -> Any:
    """What an actor answers. Died: it is no more. TimeoutError: it says nothing for so long."""
    try:
        return ray.get(reference, timeout=seconds)
    except ray.exceptions.RayActorError as error:
        raise Died(_reason(error)) from None
    except ray.exceptions.GetTimeoutError:
        raise TimeoutError(f"no answer in {seconds:g} s") from None


def _reason(error: Exception) -> str:
    """Why an actor is no more, without Ray's page of advice."""
    found = re.search(r"(?:Worker exit detail|exit_detail|error_message)\W*([^\n.]+)", str(error))
    return (found[1] if found else line(error))[:160].strip()


def sendable(ray: Any, given: Any, name: str) -> None:
    """CannotStart where something cannot be sent to another process."""
    try:
        ray.cloudpickle.dumps(given)
    except Exception as error:  # each kind of object fails to be sent in its own way
        raise CannotStart(f"{name} cannot be sent to another process ({line(error)})") from error


# --- workers of a pool ----------------------------------------------------------------------------------------------


class _Servant:
    """The actor behind a worker."""

    def __init__(self, home: Home, function: Callable[[Any], Any], limit: float) -> None:
        home.enter()
        self._serving = Serving(function, limit)

    def ready(self) -> None:
        """It is there, and has loaded the function."""

    def call(self, item: Any, seed: str) -> tuple[Any, ...]:
        """Make one call."""
        try:
            return self._serving(item, seed)
        finally:
            self._serving.tidy()


class _Bell:
    """A file that becomes readable once an answer is there: a pool waits for it as for a process's pipe."""

    def __init__(self) -> None:
        self.end, self._rope = os.pipe()
        self._lock, self._open = threading.Lock(), True

    def ring(self, _: object = None) -> None:
        with self._lock:
            if self._open:
                os.write(self._rope, b"!")

    def silence(self) -> None:
        os.read(self.end, 1)

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.end)
                os.close(self._rope)


class RayWorker(Worker):
    """A worker of a `Pool` that is an actor, on whatever machine; replaced when it dies, hangs or is patched.

    A call whose actor dies is made once more, for its machine may have gone: one that dies twice is to blame itself.
    """

    pipe: Any

    def __init__(self, ray: Any, count: int, function: Callable[[Any], Any], timeout: float) -> None:
        self._ray, self._count = ray, count
        super().__init__(function, timeout, None)

    def _start(self) -> None:
        self._bell = _Bell()
        self.pipe = self._bell.end
        self._actor = hire(self._ray, _Servant, self._count, self._function, self._timeout + ORPHAN_GRACE)
        self._ready = False

    def wait_ready(self) -> None:
        """Return once the function is loaded over there."""
        if not self._ready:
            begun(self._ray, self._actor)
            self._ready = True

    def ask(self, item: Any, seed: str) -> Outcome | None:
        """Begin a call. An outcome at once means that it could not begin."""
        self._asked, self._tries = (item, seed), 0
        return self._begin()

    def _begin(self) -> Outcome | None:
        try:
            self.wait_ready()
            self._reference = self._actor.call.remote(*self._asked)
        except CannotStart as error:
            self.restart()
            return Outcome(reason=str(error), of=name_of(self._function))
        except Exception as error:  # anything a user's class may raise
            return Outcome(reason=f"its argument cannot be sent ({line(error)})", of=name_of(self._function))
        self._tries += 1
        self._deadline = time.monotonic() + self._timeout
        self._reference.future().add_done_callback(self._bell.ring)
        return None

    def answer(self) -> Outcome | None:
        """The outcome, once the bell has rung; None: the actor had died, and another one is asked."""
        self._bell.silence()
        try:
            outcome = Outcome(*awaited(self._ray, self._reference))
        except Died as error:
            self.restart()
            died = Outcome(reason=f"its process died twice ({error})", of=name_of(self._function))
            return self._begin() if self._tries == 1 else died
        except Exception as error:  # what Ray makes of a value that cannot be sent, or made again on this side
            return Outcome(reason=f"its value cannot be sent ({line(error)})", of=name_of(self._function))
        if outcome.changed:
            self.restart()
        return outcome

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._bell.close()
        if self._ray.is_initialized():
            self._ray.kill(self._actor)


def begun(ray: Any, actor: Handle) -> None:
    """Return once an actor is there; CannotStart says what is in its way."""
    try:
        awaited(ray, actor.ready.remote(), START_TIMEOUT)
    except TimeoutError as error:
        raise CannotStart(f"{error}; has the cluster room for it? see `ray status`") from None
    except Exception as error:  # what the making of it raised, wrapped by Ray
        raise CannotStart(_reason(error)) from None


class RayPool(Pool):
    """A `Pool` whose workers are actors."""

    def __init__(self, function: Callable[[Any], Any], where: str, timeout: float, most: int | None = None) -> None:
        self._left = False
        ray = join()
        try:
            count = counted(where, most)
            super().__init__(function, count, timeout, or_inline=False, hire=partial(RayWorker, ray, count))
        except BaseException:
            leave()
            raise

    def close(self) -> None:
        """Leave no actor behind."""
        super().close()
        if not self._left:
            self._left = True
            leave()
