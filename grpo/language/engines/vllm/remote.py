"""vLLM on servers: their weights, and the proof that they hold them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

from torch import nn

from grpo.config import ConfigError
from grpo.errors import warn
from grpo.language.engines import Tokens
from grpo.language.engines.vllm.echo import ECHO, gap_of, probes, told
from grpo.language.engines.vllm.pool import PATIENCE, Servers
from grpo.language.engines.vllm.requests import Answer, Request
from grpo.language.engines.vllm.server import VLLMServer
from grpo.language.engines.vllm.transfer import ByFile, Transfer, transfer_of
from grpo.language.port import LOST, ServerFailed

TEXT = "Wörter, numbers 0123456789 and\n\tspaces"
OLDEST = (0, 11)
"""Of vLLM: the first minor version whose completions come with token ids and are tried."""
AT_ONCE = 8


class RemoteVLLM:
    """Servers with the policy's weights."""

    def __init__(
        self,
        model: nn.Module,
        tokens: Tokens,
        urls: Sequence[str],
        *,
        deadline: float,
        folder: str | None,
        transfer: str,
        ahead: bool,
    ) -> None:
        """ahead: requests go on while the model learns, so that weights are pushed when told to and never besides."""
        if not urls:
            raise ConfigError("servers: there are fewer than ranks; give every rank one of its own")
        self._model, self._tokens, self._folder = model, tokens, folder
        servers = [VLLMServer(url, deadline) for url in dict.fromkeys(urls)]
        self.pool = Servers(servers, deadline, watch=len(servers) > 1 or ahead)
        self._ahead = ahead
        self._sending = threading.RLock()
        """Held while weights travel: until then nobody can say which ones a server should hold."""
        self._met: set[VLLMServer] = set()
        self._versions: dict[VLLMServer, str] = {}
        self._each(servers, self._meet)
        self._expect_one()
        for server in servers:
            server.patience = None if self.pool.alone else PATIENCE
        self._transfer: Transfer = transfer_of(transfer, model, self.pool.live, deadline, folder, kept=4)
        self._may_fall_back = transfer == "auto"
        self._scale = 1.0
        """What workers divide their logits by."""
        self._processed = False
        """Log-probs are those after the temperature, by the server's own setting."""
        self.max_model_len = self.pool.max_model_len
        if not ahead:  # the model stands still while there are requests
            self.pool.rescue = lambda: self.tend(self.pool.version)

    # --- weights ----------------------------------------------------------------------------------------------------

    def push(self, version: int) -> None:
        """The model's weights to every server that answers; where none does, they are waited for."""
        end = time.monotonic() + self.pool.deadline
        self._pushed(version)
        while not self.pool.live and self._met and not self.pool.alone and time.monotonic() < end:
            time.sleep(min(1.0, self.pool.deadline / 10))
            self._pushed(version)
        self._expect_one()

    def _pushed(self, version: int) -> None:
        """Once; those that do not take them are taken out."""
        with self._sending, self.pool.standing() if self._transfer.stops else nullcontext(lambda: None) as resume:
            there = self._sent([server for server in self.pool.all if server in self.pool.live or self._back(server)])
            resume()
            self._proven(there)
            self.pool.version = version

    def tend(self, version: int) -> None:
        """The same weights by another number; servers that are back get them, too."""
        self.pool.version = version
        with self._sending:
            back = [server for server in list(self.pool.out) if self._back(server)]
            if back:
                self._proven(self._sent(back))

    def _sent(self, servers: list[VLLMServer]) -> list[VLLMServer]:
        """Those that took the weights."""
        ready: list[VLLMServer] = []

        def send(server: VLLMServer) -> None:
            self._versions[server] = self._transfer.send(server, load)
            if self._transfer.scales:
                self._scaled(server)
            ready.append(server)

        with self._transfer.loaded(self._model) as load:
            self._each(servers, send)
        if not ready and self._may_fall_back and self._transfer.name in ("ipc", "nccl"):
            said = self.pool.told()
            warn(f"weights go by file, since transfer={self._transfer.name} failed: {said}")
            self._transfer, self._may_fall_back = ByFile(self._folder), False
            return self._sent(servers)
        self._may_fall_back = False
        return ready

    def _proven(self, servers: Sequence[VLLMServer]) -> None:
        """Those that compute as the model does are asked from now on."""
        for server in servers:
            try:
                self._prove(server)
            except (ServerFailed, *LOST) as error:
                self.pool.take_out(server, str(error))
            else:
                self.pool.take_in(server)

    def _back(self, server: VLLMServer) -> bool:
        """Whether one that was taken out answers again, and is still what it was."""
        if not server.healthy(2.0):
            return False
        try:
            self._meet(server)
        except (RuntimeError, *LOST) as error:
            self.pool.out[server] = str(error)
            return False
        return True

    def _each(self, servers: Sequence[VLLMServer], do: Callable[[VLLMServer], None]) -> None:
        """At a time; a server for which it fails is taken out, and what can only be the user's mistake is raised."""
        with ThreadPoolExecutor(len(servers) or 1) as threads:
            running = [(server, threads.submit(do, server)) for server in servers]
        for server, done in running:
            error = done.exception()
            if isinstance(error, (ServerFailed, *LOST)):
                self.pool.take_out(server, str(error) or type(error).__name__)
            elif error is not None:
                raise error

    def _expect_one(self) -> None:
        """A server is left."""
        if self.pool.live:
            return
        if len(self.pool.all) == 1:
            raise RuntimeError(next(iter(self.pool.out.values())))
        raise RuntimeError(f"no server is left: {self.pool.told()}")

    # --- what they are ----------------------------------------------------------------------------------------------

    def _meet(self, server: VLLMServer) -> None:
        """Is it vLLM, new enough, and does it read as we do?"""
        server.meet()
        numbers = [int(word) for word in server.vllm.split(".")[:2] if word.isdigit()]
        if len(numbers) == 2 and tuple(numbers) < OLDEST:
            raise ConfigError(
                f"{server} runs vLLM {server.vllm}, which gives no token ids; it needs 0.{OLDEST[1]} or newer: "
                "pip install -U vllm there"
            )
        said = server.ask("/tokenize", {"prompt": TEXT, "add_special_tokens": False}, missing={}) or {}
        theirs, ours = said.get("tokens"), self._tokens.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        if theirs is not None and list(theirs) != list(ours):
            raise ConfigError(
                f"{server} serves {server.name}, whose tokenizer reads text in another way than this model's; start it "
                "with the model that is trained (vllm serve MODEL --tokenizer TOKENIZER)"
            )
        server.ask("/resume", {})  # it, or a learner before this one, may have been lost while it stood

    def _prove(self, server: VLLMServer) -> None:
        """A few tokens that the module scores as well: a part of the model that no push reached shows."""
        gap = self._gap(server, 1.0, self._scale if self._transfer.scales else 1.0)
        if not gap < ECHO:
            raise ServerFailed(f"{told(gap)}; start {server} with the model that is trained, or use engine=inline")
        if not self._transfer.scales and server not in self._met:
            self._processed = self._gap(server, 0.5, 0.5) < ECHO
        self._met.add(server)

    def _gap(self, server: VLLMServer, temperature: float, scale: float) -> float:
        rows = probes(temperature)
        with ThreadPoolExecutor(len(rows)) as threads:
            return gap_of(self._model, list(threads.map(lambda row: server.complete(row), rows)), scale)

    # --- requests ---------------------------------------------------------------------------------------------------

    def ready(self, temperature: float) -> tuple[bool, bool]:
        """Whether logits are divided in the workers; whether log-probs at a temperature are known without that."""
        if not self._transfer.scales:
            return False, self._processed
        if temperature not in (0.0, self._scale):  # what is under way was asked for at another one
            self.pool.idle()
            self._scale = temperature
        with self._sending:
            stale = [server for server in self.pool.live if not self._scaled(server)]
            if stale and self._ahead:
                for server in stale:
                    self.pool.take_out(server, "it was started again and holds other weights")
        if stale and not self._ahead:
            self._proven(self._sent(stale))
            for server in [server for server in stale if server in self.pool.live and not self._scaled(server)]:
                raise RuntimeError(f"{server} holds weights that are not ours; give every run a server of its own")
            self._expect_one()
        return self._heads, False

    _heads = True

    def _scaled(self, server: VLLMServer) -> bool:
        """Workers divide by the temperature from now on; whether they hold what was pushed."""
        try:
            reports = server.rpc("grpo_ready", temperature=self._scale)
        except (ServerFailed, *LOST) as error:
            if self.pool.alone:
                raise
            self.pool.take_out(server, str(error))
            return True
        self._heads = all(report["heads"] for report in reports)
        return all(report["version"] == self._versions.get(server) for report in reports)

    def complete(self, rows: Sequence[Request]) -> Iterator[Answer]:
        """In order, by whichever server."""
        return self.pool.complete(rows)

    def close(self) -> None:
        """Servers are left running."""
        self.pool.close()
