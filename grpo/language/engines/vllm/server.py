"""vLLM on a server, behind its OpenAI-style port."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from grpo.config import ConfigError
from grpo.language.engines.vllm.requests import Answer, Request
from grpo.language.engines.vllm.weights import RECEIVER, shipped

SERVE = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --load-format dummy --generation-config vllm "
    f"--worker-extension-cls {RECEIVER}"
)
"""How a server is started: the weights come from us, and grpo must be installed there too. Its port is for trusted
machines only: the development mode lets whoever reaches it change the model."""
REMEDY = f"give a folder that both sides can read (engine_kwargs: folder) and start the server with: {SERVE}"
TRANSIENT = {408, 429, 502, 503, 504}
"""Answers of a server that is overloaded or on its way; others do not get better by asking again."""
REQUESTS = 256
"""Completions that are asked of a server at a time; it batches them itself."""


class VLLMServer:
    """vLLM behind its OpenAI-style port."""

    def __init__(self, base_url: str, deadline: float, folder: str | None) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"engine_kwargs: base_url={base_url} is no address; write http://host:port")
        self._url, self._deadline, self._folder = base_url.rstrip("/").removesuffix("/v1"), deadline, folder
        # A machine of our own is asked directly, whatever proxy the environment names for the world outside.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._call("/health")
        served = self._call("/v1/models")["data"][0]
        self._name, self.max_model_len = served["id"], int(served["max_model_len"])

    def rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Call all workers; their answers."""
        answer = self._call("/collective_rpc", {"method": method, "kwargs": kwargs, "timeout": self._deadline})
        results: list[Any] = answer.get("results") or []
        if not results:
            raise RuntimeError(f"{self._url} did not answer {method}; {REMEDY}")
        return results

    def push(self, weights: dict[str, Tensor]) -> tuple[str, list[Any]]:
        """The version that was sent, and what each worker says."""
        with shipped(weights, self._folder) as (path, version):
            reports = self.rpc("grpo_load", source=path)
        if not self._call("/reset_prefix_cache", {}).get("success", True):
            raise RuntimeError(
                f"{self._url} is busy and kept the old weights' cache; give every run a server of its own"
            )
        return version, reports

    def complete(self, rows: Sequence[Request]) -> Iterator[Answer]:
        """All rows at once, as far as the server takes them, and in order; the first failure ends it."""
        pool = ThreadPoolExecutor(min(len(rows), REQUESTS) or 1)
        try:
            yield from pool.map(self._complete, rows)
        finally:
            pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Nothing is held between calls."""

    def _complete(self, row: Request) -> Answer:
        prompt, settings = row
        asked = {"model": self._name, "prompt": prompt, "return_token_ids": True, **settings}
        answer = self._call("/v1/completions", asked)
        try:
            choice = answer["choices"][0]
            return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"])
        except (KeyError, IndexError, TypeError) as error:
            raise RuntimeError(
                f"{self._url}/v1/completions answered without token ids or log-probs ({error!r}); it must be vLLM"
            ) from None

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask until the deadline. An attempt may take half of the time left, so that a lost answer can be asked again;
        all that is asked may be asked twice."""
        end, wait, url = time.monotonic() + self._deadline, 0.1, self._url + path
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        while True:
            left = end - time.monotonic()
            try:
                with self._opener.open(request, timeout=max(left / 2, 0.01)) as response:
                    text = response.read()
                return json.loads(text) if text else {}
            except urllib.error.HTTPError as error:
                problem = f"{error.code} {_message(error)}"
                if error.code not in TRANSIENT:
                    remedy = "" if path.startswith("/v1/") else f"; {REMEDY}"
                    raise RuntimeError(f"{url} refused: {problem}{remedy}") from None
            except ValueError as error:
                raise RuntimeError(f"{url} did not answer with JSON ({error}); is it vLLM?") from None
            except (OSError, http.client.HTTPException) as error:
                problem = str(getattr(error, "reason", error)) or type(error).__name__
            if time.monotonic() + wait >= end - 0.02 * self._deadline:
                raise RuntimeError(
                    f"{url} did not answer within {self._deadline:g} s ({problem}); "
                    "see whether the server runs, or raise engine_kwargs.deadline"
                )
            time.sleep(wait)
            wait = min(2 * wait, 5.0)


def _message(error: urllib.error.HTTPError) -> str:
    """What a server says in its own words, in one line."""
    text = error.read(2000).decode(errors="replace")
    try:
        answer = json.loads(text)
        text = str(answer.get("error", {}).get("message") or answer.get("detail") or text)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:300]
