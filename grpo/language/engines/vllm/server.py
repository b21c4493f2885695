"""One vLLM server, behind its OpenAI-style port."""

from __future__ import annotations

from typing import Any

from grpo.errors import warn
from grpo.language.engines.vllm.requests import Answer, Request
from grpo.language.engines.vllm.weights import RECEIVER
from grpo.language.port import Port, ServerFailed

SERVE = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --load-format dummy --generation-config vllm "
    f"--worker-extension-cls {RECEIVER}"
)
"""How a server is started: the weights come from us, and grpo must be installed there too. Its port is for trusted
machines only: the development mode lets whoever reaches it change the model."""
REMEDY = f"give a folder that both sides can read (engine_kwargs: folder) and start the server with: {SERVE}"
SOON = 3.0
"""Seconds in which a server that runs says so."""


class VLLMServer(Port):
    """vLLM behind its OpenAI-style port."""

    late = "see whether the server runs, or raise engine_kwargs.deadline"

    def __init__(self, base_url: str, deadline: float) -> None:
        super().__init__(base_url, deadline)
        self.name, self.max_model_len, self.vllm = "", 0, ""
        self.model = ""
        """What requests ask for: the model, or an adapter of it."""
        self.in_flight = 0

    def remedy(self, path: str, problem: str) -> str:
        """How a server is started that knows what was asked."""
        return "" if path.startswith("/v1/") else f"; {REMEDY}"

    def meet(self) -> None:
        """Wait until it is there; what it serves."""
        if not self.healthy(min(SOON, self.deadline)):
            warn(f"{self} does not answer yet; it is waited for, {self.deadline:g} s at most (engine_kwargs: deadline)")
        self.call("/health")
        self.name, self.max_model_len = self.served()
        self.model = self.name
        self.vllm = str((self.ask("/version", missing={}) or {}).get("version", ""))

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
