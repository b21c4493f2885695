"""A model server behind its OpenAI-style port: asked until a deadline, and what went wrong in one line."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.parse
from contextlib import suppress
from typing import Any

from grpo.config import ConfigError
from grpo.errors import Unanswered

TRANSIENT = {408, 429, 502, 503, 504}
"""Answers of a server that is overloaded or on its way; others do not get better by asking again."""
MISSING = {404, 405}
CONNECTING = 10.0
"""Seconds to be connected, at most: what is being connected cannot be hung up."""
MOVED = range(300, 400)
LOST = (OSError, http.client.HTTPException)


class ServerFailed(Unanswered):
    """A server did not do what was asked of it; another one, or this one later, may."""


class HungUp(ConnectionAbortedError):
    """Nobody here waits for the answer any more: `Port.hang_up`."""

    def __init__(self) -> None:
        super().__init__("it is no longer asked")


class Port:
    """JSON over HTTP. All that is asked may be asked twice."""

    setting = "servers"
    """Which names its address."""
    late = "see whether the server runs"
    """What to do about one that does not answer in time."""

    def __init__(self, base_url: str, deadline: float) -> None:
        try:
            parts = urllib.parse.urlsplit(base_url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if host is None or parts.scheme not in ("http", "https"):
            raise ConfigError(f"{self.setting}: {base_url} is no address; write http://host:port")
        if parts.username is not None:  # it would not be sent, and stand in every log
            raise ConfigError(
                f"{self.setting}: the address of {host} holds a user's name; write http://host:port alone"
            )
        self.url, self.deadline = base_url.rstrip("/").removesuffix("/v1"), deadline
        self._address, self._secure = (host, port), parts.scheme == "https"
        self._path = urllib.parse.urlsplit(self.url).path
        self.patience: float | None = None
        """Seconds for which a lost connection is tried again, where there are other servers; None: to the deadline."""
        self._open: set[http.client.HTTPConnection] = set()
        self._lock, self._hung_up, self._closed = threading.Lock(), 0, False

    def __str__(self) -> str:
        return self.url

    def remedy(self, path: str, problem: str) -> str:
        """What is said behind a refusal."""
        return ""

    @property
    def here(self) -> bool:
        """Whether it is on this machine."""
        return self._address[0] in ("localhost", "127.0.0.1", "::1", socket.gethostname())

    def our_address(self) -> str:
        """This machine's own on the way there, where it can be called back; nothing is sent."""
        if self.here:
            return "127.0.0.1"
        host, port = self._address
        family, _, _, _, place = socket.getaddrinfo(host, port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(place)
            return str(way.getsockname()[0])

    def served(self) -> tuple[str, int]:
        """The model that it serves, and how many tokens that reads."""
        try:
            found = self.call("/v1/models")["data"][0]
            return str(found["id"]), int(found["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerFailed(f"{self}/v1/models answered without a model ({error!r}); is it vLLM?") from None

    def healthy(self, seconds: float) -> bool:
        """Whether it answers within so many seconds."""
        try:
            return self._once("GET", "/health", None, seconds)[0] == 200
        except LOST:
            return False

    def ask(self, path: str, body: dict[str, Any] | None = None, missing: Any = None) -> Any:
        """The same as `call`, once; `missing` where there is no such endpoint."""
        status, text = self._once("GET" if body is None else "POST", path, body, self.deadline)
        if status in MISSING:
            return missing
        self._expect_here(status, text, path)
        if status >= 400:
            raise ServerFailed(f"{self}{path} refused: {status} {message(text)}")
        return self._parsed(text, path)

    def call(self, path: str, body: dict[str, Any] | None = None, optional: bool = False) -> Any:
        """Ask until the deadline; None where there is no such endpoint and it is optional. An attempt may take half of
        the time left, so that a lost answer can be asked again."""
        began, wait, hung_up = time.monotonic(), 0.1, self._hung_up
        end = began + self.deadline
        while True:
            left = end - time.monotonic()
            try:
                whole = left if self.patience is not None else left / 2
                method = "GET" if body is None else "POST"
                status, text = self._once(method, path, body, max(whole, 0.01), since=hung_up)
                self._expect_here(status, text, path)
                if status < 400:
                    return self._parsed(text, path)
                if optional and status in MISSING:
                    return None
                problem = f"{status} {message(text)}"
                if status not in TRANSIENT:
                    kind = ServerFailed if status >= 500 else Unanswered
                    raise kind(f"{self}{path} refused: {problem}{self.remedy(path, problem)}")
            except HungUp:
                raise
            except LOST as error:
                problem = str(error) or type(error).__name__
            now = time.monotonic()
            limit = end - 0.02 * self.deadline if self.patience is None else began + self.patience
            if now + wait >= limit:
                waited = self.deadline if self.patience is None else now - began
                raise ServerFailed(f"{self}{path} did not answer within {waited:.3g} s ({problem}); {self.late}")
            time.sleep(wait)
            wait = min(2 * wait, 5.0)

    def hang_up(self) -> None:
        """Whoever waits for an answer waits no longer."""
        with self._lock:
            self._hung_up += 1  # for those who are about to be connected
            waiting = list(self._open)
        for connection in waiting:
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Nothing is asked any more."""
        self.patience, self._closed = 0.0, True
        self.hang_up()

    def _once(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float, since: int | None = None
    ) -> tuple[int, bytes]:
        """A machine of our own is asked directly, whatever proxy the environment names for the world outside.

        Its status and words; where it sends elsewhere, the address.
        since: how often had been hung up when it was decided to ask.
        """
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(*self._address, timeout=min(seconds, CONNECTING))
        hung_up, data = self._hung_up if since is None else since, None if body is None else json.dumps(body).encode()
        try:
            self._expect_asked(hung_up)
            connection.connect()
            with self._lock:
                self._expect_asked(hung_up)
                self._open.add(connection)
            connection.sock.settimeout(seconds)
            connection.request(method, self._path + path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            place = (response.getheader("Location") or "").encode()
            return response.status, place if response.status in MOVED else text
        except LOST:
            if self._hung_up != hung_up:
                raise HungUp from None
            raise
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _expect_asked(self, hung_up: int) -> None:
        """Nobody has hung up since it had been done so often."""
        if self._closed or self._hung_up != hung_up:
            raise HungUp

    def _expect_here(self, status: int, place: bytes, path: str) -> None:
        """Refuse to go elsewhere: what is sent is meant for this server, and may be a secret of its users."""
        if status in MOVED:
            there = place.decode(errors="replace").split("?")[0].removesuffix(path)
            remedy = f"write {there}" if there.startswith("http") else "is it vLLM, and not a page to log in?"
            raise ServerFailed(
                f"{self}{path} sends to {there or 'nowhere'} instead ({status}); {self.setting}: {remedy}"
            )

    def _parsed(self, text: bytes, path: str) -> Any:
        if not text or text.startswith(b"Success"):  # what is said of adapters is no JSON
            return {}
        try:
            return json.loads(text)
        except ValueError as error:
            raise ServerFailed(f"{self}{path} did not answer with JSON ({error}); is it vLLM?") from None


def message(text: bytes) -> str:
    """What a server says in its own words, in one line."""
    words = text[:2000].decode(errors="replace")
    try:
        answer = json.loads(words)
        said = answer.get("error") or answer.get("detail") or answer.get("message") or words
        words = str(said.get("message", said) if isinstance(said, dict) else said)
    except (ValueError, AttributeError):
        pass
    return " ".join(words.split())[:300]
