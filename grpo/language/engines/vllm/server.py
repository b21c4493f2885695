"""One vLLM server, behind its OpenAI-style port."""

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
from grpo.language.engines.vllm.requests import Answer, Request
from grpo.language.engines.vllm.weights import RECEIVER

SERVE = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --load-format dummy --generation-config vllm "
    f"--worker-extension-cls {RECEIVER}"
)
"""How a server is started: the weights come from us, and grpo must be installed there too. Its port is for trusted
machines only: the development mode lets whoever reaches it change the model."""
REMEDY = f"give a folder that both sides can read (engine_kwargs: folder) and start the server with: {SERVE}"
TRANSIENT = {408, 429, 502, 503, 504}
"""Answers of a server that is overloaded or on its way; others do not get better by asking again."""
LOST = (OSError, http.client.HTTPException)


class ServerFailed(RuntimeError):
    """A server did not do what was asked of it; another one, or this one later, may."""


class VLLMServer:
    """vLLM behind its OpenAI-style port."""

    def __init__(self, base_url: str, deadline: float) -> None:
        try:
            parts = urllib.parse.urlsplit(base_url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if host is None or parts.scheme not in ("http", "https"):
            raise ConfigError(f"servers: {base_url} is no address; write http://host:port")
        if parts.username is not None:  # it would not be sent, and stand in every log
            raise ConfigError(f"servers: the address of {host} holds a user's name; write http://host:port alone")
        self.url, self.deadline = base_url.rstrip("/").removesuffix("/v1"), deadline
        self._address, self._secure = (host, port), parts.scheme == "https"
        self._path = urllib.parse.urlsplit(self.url).path
        self.name, self.max_model_len, self.vllm = "", 0, ""
        self.model = ""
        """What requests ask for: the model, or an adapter of it."""
        self.patience: float | None = None
        """Seconds for which a lost connection is tried again, where there are other servers; None: to the deadline."""
        self.in_flight = 0
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return self.url

    @property
    def here(self) -> bool:
        """Whether it is on this machine."""
        return self._address[0] in ("localhost", "127.0.0.1", "::1", socket.gethostname())

    def meet(self) -> None:
        """Wait until it is there; what it serves."""
        self.call("/health")
        try:
            served = self.call("/v1/models")["data"][0]
            self.name, self.max_model_len = str(served["id"]), int(served["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerFailed(f"{self.url}/v1/models answered without a model ({error!r}); is it vLLM?") from None
        self.model = self.name
        self.vllm = str((self.ask("/version", missing={}) or {}).get("version", ""))

    def healthy(self, seconds: float) -> bool:
        """Whether it answers within so many seconds."""
        try:
            return self._once("GET", "/health", None, seconds)[0] == 200
        except LOST:
            return False

    def rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Call all workers; their answers."""
        answer = self.call("/collective_rpc", {"method": method, "kwargs": kwargs, "timeout": self.deadline})
        results: list[Any] = answer.get("results") or []
        if not results:
            raise ServerFailed(f"{self.url} did not answer {method}; {REMEDY}")
        return results

    def complete(self, row: Request) -> Answer:
        """One completion."""
        prompt, settings = row
        asked = {"model": self.model, "prompt": prompt, "return_token_ids": True, **settings}
        answer = self.call("/v1/completions", asked)
        try:
            choice = answer["choices"][0]
            made = Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"])
        except (KeyError, IndexError, TypeError) as error:
            raise ServerFailed(
                f"{self.url}/v1/completions answered without token ids or log-probs ({error!r}); it must be vLLM"
            ) from None
        if made.finish != "abort" and (flaw := made.flaw()):
            raise ServerFailed(f"{self.url} {flaw}; see its own log")
        if answer.get("model", self.model) != asked["model"]:
            raise ServerFailed(f"{self.url} answered with {answer['model']}, not with {asked['model']}")
        return made

    def ask(self, path: str, body: dict[str, Any] | None = None, missing: Any = None) -> Any:
        """The same as `call`, once; `missing` where there is no such endpoint."""
        status, text = self._once("GET" if body is None else "POST", path, body, self.deadline)
        if status in (404, 405):
            return missing
        if status >= 400:
            raise ServerFailed(f"{self.url}{path} refused: {status} {_message(text)}")
        return _parsed(text, self.url + path)

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask until the deadline. An attempt may take half of the time left, so that a lost answer can be asked again;
        all that is asked may be asked twice."""
        began, wait, url = time.monotonic(), 0.1, self.url + path
        end = began + self.deadline
        while True:
            left = end - time.monotonic()
            try:
                whole = left if self.patience is not None else left / 2
                status, text = self._once("GET" if body is None else "POST", path, body, max(whole, 0.01))
                if status < 400:
                    return _parsed(text, url)
                problem = f"{status} {_message(text)}"
                if status not in TRANSIENT:
                    remedy = "" if path.startswith("/v1/") else f"; {REMEDY}"
                    kind = ServerFailed if status >= 500 else RuntimeError
                    raise kind(f"{url} refused: {problem}{remedy}")
            except LOST as error:
                problem = str(error) or type(error).__name__
            now = time.monotonic()
            limit = end - 0.02 * self.deadline if self.patience is None else began + self.patience
            if now + wait >= limit:
                waited = self.deadline if self.patience is None else now - began
                raise ServerFailed(
                    f"{url} did not answer within {waited:.3g} s ({problem}); "
                    "see whether the server runs, or raise engine_kwargs.deadline"
                )
            time.sleep(wait)
            wait = min(2 * wait, 5.0)

    def hang_up(self) -> None:
        """Whoever waits for an answer waits no longer."""
        with self._lock:
            waiting = list(self._open)
        for connection in waiting:
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _once(self, method: str, path: str, body: dict[str, Any] | None, seconds: float) -> tuple[int, bytes]:
        """A machine of our own is asked directly, whatever proxy the environment names for the world outside."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(*self._address, timeout=seconds)
        with self._lock:
            self._open.add(connection)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()


def _parsed(text: bytes, url: str) -> Any:
    if not text or text.startswith(b"Success"):  # what is said of adapters is no JSON
        return {}
    try:
        return json.loads(text)
    except ValueError as error:
        raise ServerFailed(f"{url} did not answer with JSON ({error}); is it vLLM?") from None


def _message(text: bytes) -> str:
    """What a server says in its own words, in one line."""
    words = text[:2000].decode(errors="replace")
    try:
        answer = json.loads(words)
        said = answer.get("error") or {}
        words = str((said.get("message") if isinstance(said, dict) else said) or answer.get("detail") or words)
    except (ValueError, AttributeError):
        pass
    return " ".join(words.split())[:300]
