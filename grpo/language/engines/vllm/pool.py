"""Several vLLM servers as one: who is asked, who is taken out, and how what is under way meets new weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from grpo.errors import warn
from grpo.language.engines.vllm.requests import Answer, Request
from grpo.language.engines.vllm.server import VLLMServer
from grpo.language.port import LOST, HungUp, ServerFailed

REQUESTS = 256
"""Completions that are asked of a server at a time; it batches them itself."""
PATIENCE = 2.0
"""Seconds for which one of several servers is asked again before its prompts go to another."""
HEALTH_EVERY, HEALTH_LIMIT, HEALTH_MISSES = 5.0, 10.0, 3
"""Seconds between two looks at a server's health and for its answer; so many without one, and it is taken out."""
STOPPED = 2.0
"""Seconds without an answer after which what is still under way came too late to be stopped, and is asked again."""
SALT = 0x9E3779B97F4A7C15
"""Sets the draws of a completion's later parts apart."""


class Servers:
    """vLLM servers that hold the same weights."""

    def __init__(self, servers: Sequence[VLLMServer], deadline: float, watch: bool) -> None:
        """watch: look after their health in a thread; not where there is one, which is asked until it answers."""
        self.all, self.deadline = list(servers), deadline
        self.out: dict[VLLMServer, str] = {}
        """Those that are taken out, and why."""
        self.rescue: Callable[[], None] | None = None
        """Called where none is left, if weights can be pushed at any time."""
        self.version = 0
        """What the weights that they hold are called."""
        self._changed, self._rescuing = threading.Condition(), threading.Lock()
        self._pausing, self._busy, self._closed = False, 0, threading.Event()
        self.alone = not watch
        if watch:
            threading.Thread(target=self._watch, daemon=True, name="server-health").start()

    @property
    def live(self) -> list[VLLMServer]:
        """Those that are asked."""
        return [server for server in self.all if server not in self.out]

    @property
    def max_model_len(self) -> int:
        """Of the shortest."""
        return min(server.max_model_len for server in self.all if server.max_model_len)

    def take_out(self, server: VLLMServer, why: str) -> None:
        """Ask it no more; whoever waits for it asks another one."""
        with self._changed:
            known = server in self.out
            self.out[server] = why
            self._changed.notify_all()
        if not known and not self.alone:  # the only one's failure is raised
            left = f"{len(self.live)} of {len(self.all)} are left"
            warn(f"server {server} is taken out: {why}; {left}")
        if not known:
            server.hang_up()

    def take_in(self, server: VLLMServer) -> None:
        """It has the present weights."""
        with self._changed:
            back = self.out.pop(server, None)
            self._changed.notify_all()
        if back is not None:
            warn(f"server {server} is back")

    # --- completions ------------------------------------------------------------------------------------------------

    def complete(self, rows: Sequence[Request]) -> Iterator[Answer]:
        """All rows at once, as far as the servers take them, and in order; the first failure ends it."""
        pool = ThreadPoolExecutor(min(len(rows), REQUESTS * len(self.all)) or 1, thread_name_prefix="vllm")
        chosen: dict[int, VLLMServer] = {}
        try:
            yield from pool.map(lambda row: self._one(row, chosen), rows)
        finally:
            pool.shutdown(cancel_futures=True)

    def _one(self, row: Request, chosen: dict[int, VLLMServer]) -> Answer:
        """A completion, by as many servers and weights as it takes; its parts keep their versions."""
        (prompt, settings), made = row, Answer([], [], "length", [])
        while True:
            server, version = self._pick(hash(tuple(prompt)), chosen)
            room = settings["max_tokens"] - len(made.ids)
            seed = (settings["seed"] + SALT * len(made.ids)) % 2**63
            try:
                asked = [*prompt, *made.ids], {**settings, "max_tokens": room, "seed": seed}
                part = server.complete(asked)
            except HungUp:  # it was taken out, or is given new weights
                if self._closed.is_set():
                    raise
                continue
            except (ServerFailed, *LOST) as error:
                if self.alone or self._closed.is_set():
                    raise
                self.take_out(server, str(error))
                continue
            finally:  # whatever went wrong: a push would wait for it
                paused = self._done(server)
            made = made.then(part, version)
            if part.finish != "abort" or not (paused or version != self.version):
                return made
            if len(made.ids) >= settings["max_tokens"]:
                return made.ended("length")

    def _pick(self, prompt: int, chosen: dict[int, VLLMServer]) -> tuple[VLLMServer, int]:
        """The server that has this prompt already, else the one with the fewest requests; waits for one."""
        end = time.monotonic() + self.deadline
        while True:
            if self._closed.is_set():
                raise ServerFailed("the servers are no longer asked: the run has ended")
            with self._changed:
                end = time.monotonic() + self.deadline if self._pausing else end  # a push has limits of its own
                live = [] if self._pausing else self.live
                if live:
                    server = chosen.get(prompt)
                    if server is None or server not in live:
                        server = chosen[prompt] = min(live, key=lambda one: one.in_flight)
                    server.in_flight += 1
                    self._busy += 1
                    return server, self.version
                if time.monotonic() >= end:
                    raise RuntimeError(f"no server is left after {self.deadline:g} s: {self.told()}")
                rescue = None if self._pausing else self.rescue
                if rescue is None:
                    self._changed.wait(min(1.0, self.deadline / 10))
            if rescue is not None:
                self._rescued(rescue)

    def _rescued(self, rescue: Callable[[], None]) -> None:
        """One thread at a time looks for servers that are back."""
        with self._rescuing:
            if not self.live:
                rescue()
        if not self.live:
            time.sleep(min(1.0, self.deadline / 10))

    def _done(self, server: VLLMServer) -> bool:
        with self._changed:
            server.in_flight -= 1
            self._busy -= 1
            self._changed.notify_all()
            return self._pausing

    def told(self) -> str:
        """Why each is out."""
        return "; ".join(f"{server}: {why}" for server, why in self.out.items())

    # --- new weights ------------------------------------------------------------------------------------------------

    @contextmanager
    def standing(self) -> Iterator[Callable[[], None]]:
        """Inside, nothing is asked: what is under way stops at a token, and goes on afterwards with other weights.

        Gives what has servers compute again, for a proof before anybody asks.
        """
        with self._changed:
            self._pausing = True
            busy = self._busy > 0
        paused: list[VLLMServer] = []

        def resume() -> None:
            while paused:
                self._tell(paused.pop(), "/resume")

        try:
            if busy:
                paused += [server for server in self.live if self._tell(server, "/pause?mode=abort&clear_cache=true")]
                self._drain()
            yield resume
        finally:
            resume()
            with self._changed:
                self._pausing = False
                self._changed.notify_all()

    def _tell(self, server: VLLMServer, path: str) -> bool:
        """Whether it does as it is told; else it is taken out."""
        try:
            if server.ask(path, {}) is None:
                raise ServerFailed(f"{server} has no {path}; start it with VLLM_SERVER_DEV_MODE=1, vLLM 0.26 or newer")
        except (ServerFailed, *LOST) as error:
            self.take_out(server, str(error))
            return False
        return True

    def idle(self) -> None:
        """Wait until nothing is under way."""
        end = time.monotonic() + self.deadline
        with self._changed:
            while self._busy:
                if time.monotonic() >= end:
                    raise RuntimeError(f"requests were still under way after {self.deadline:g} s")
                self._changed.wait(0.5)

    def _drain(self) -> None:
        """Wait for what was stopped; a request that arrived after the pause would wait there for the end of it."""
        with self._changed:
            while (left := self._busy) and self._changed.wait_for(partial(self._fewer, left), STOPPED):
                pass
            late = [server for server in self.live if server.in_flight]
        for server in late:
            server.hang_up()
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, self.deadline)
            stuck = [server for server in self.live if server.in_flight]
        for server in stuck:
            self.take_out(server, f"it did not stop within {self.deadline:g} s")

    def _fewer(self, requests: int) -> bool:
        return self._busy < requests

    # --- health -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        misses = dict.fromkeys(self.all, 0)
        while not self._closed.wait(HEALTH_EVERY):
            for server in self.live:
                misses[server] = 0 if server.healthy(HEALTH_LIMIT) else misses[server] + 1
                if misses[server] >= HEALTH_MISSES and not self._closed.is_set():
                    misses[server] = 0
                    self.take_out(server, "it did not answer /health")

    def close(self) -> None:
        """Servers are left running; what was asked ahead of them is not waited for."""
        self._closed.set()
        for server in self.all:
            server.close()
        with self._changed:
            self._changed.notify_all()
