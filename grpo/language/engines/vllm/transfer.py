"""How the policy's weights reach vLLM servers: an adapter alone, through GPU memory, by vLLM's NCCL transfer, a file.

A transfer makes what it needs once (`loaded`) and hands it to each server (`send`), which answers with a version.
"""

from __future__ import annotations

import importlib
import importlib.util
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from grpo.config import ConfigError
from grpo.language.engines.vllm.server import VLLMServer
from grpo.language.engines.vllm.weights import bits, checkpoint, shared, shipped
from grpo.language.port import ServerFailed

ADAPTERS = (
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-lora-rank RANK --max-loras 3 "
    """--generation-config vllm --hf-overrides '{"head_dtype": "float32"}'"""
)
"""How a server is started that takes adapters alone; the last setting leaves logits unrounded, as ours are."""


class Transfer(Protocol):
    """One way for weights to travel."""

    name: str
    scales: bool
    """Whether workers are ours, and divide logits by the temperature."""
    stops: bool
    """Whether what is under way must stop for it."""

    def loaded(self, model: nn.Module) -> Any:
        """A context in which servers can be sent what it gives."""
        ...

    def send(self, server: VLLMServer, load: Any) -> str:
        """Push to one server and make sure that it arrived; the version that it holds now."""
        ...


def expect_taken(sent: str, reports: list[Any]) -> None:
    """What workers say of a push is what it should be."""
    for report in reports:
        if report["version"] != sent:
            raise ServerFailed(
                f"weights changed on their way to vLLM: sent {sent[:12]}, received {report['version'][:12]}; "
                "give both sides a folder of their own (engine_kwargs: folder) and push again"
            )
        if report["stale"]:
            raise ServerFailed(
                f"vLLM did not take over the weights of {', '.join(report['stale'][:3])}"
                f" ({len(report['stale'])} of {report['compared']} compared); use engine=inline for this model"
            )


def _forget_prefixes(server: VLLMServer) -> None:
    if not server.call("/reset_prefix_cache", {}).get("success", True):
        raise ServerFailed(f"{server} is busy and kept the old weights' cache; give every run a server of its own")


class ByFile:
    """A safetensors file in a folder that both sides read; its SHA-256 is the version."""

    name, scales, stops = "file", True, True

    def __init__(self, folder: str | None) -> None:
        self._folder = folder

    @contextmanager
    def loaded(self, model: nn.Module) -> Iterator[tuple[str, str]]:
        """The file's path, and its version."""
        with shipped(checkpoint(model), self._folder) as made:
            yield made

    def send(self, server: VLLMServer, load: tuple[str, str]) -> str:
        """Have it read by the workers."""
        path, version = load
        expect_taken(version, server.rpc("grpo_load", source=path))
        _forget_prefixes(server)
        return version


class ByMemory:
    """CUDA IPC: workers on the same GPU read our memory. No pickle: a handle is a list of plain values."""

    name, scales, stops = "ipc", True, True

    @contextmanager
    def loaded(self, model: nn.Module) -> Iterator[tuple[dict[str, list[Any]], str]]:
        """A handle for each tensor, valid in here."""
        weights = {name: tensor.contiguous() for name, tensor in checkpoint(model).items()}
        torch.cuda.synchronize()
        yield {name: shared(tensor) for name, tensor in weights.items()}, secrets.token_hex(8)
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def send(self, server: VLLMServer, load: tuple[dict[str, list[Any]], str]) -> str:
        """Have it copied by the workers."""
        handles, version = load
        expect_taken(version, server.rpc("grpo_load_shared", handles=handles, version=version))
        _forget_prefixes(server)
        return version


class ByNCCL:
    """vLLM's own transfer: the learner and a server's workers are one group, in which weights are broadcast, packed."""

    name, scales, stops = "nccl", True, True

    def __init__(self, deadline: float) -> None:
        self._deadline, self._groups = deadline, dict[VLLMServer, Any]()
        self._engine: Any = importlib.import_module("vllm.distributed.weight_transfer.nccl_engine")

    @contextmanager
    def loaded(self, model: nn.Module) -> Iterator[tuple[dict[str, Tensor], str]]:
        """The tensors, where they are."""
        yield {name: tensor.contiguous() for name, tensor in checkpoint(model).items()}, secrets.token_hex(8)

    def send(self, server: VLLMServer, load: tuple[dict[str, Tensor], str]) -> str:
        """Broadcast, while the server receives; a group that failed is made anew."""
        weights, version = load
        try:
            group = self._groups.get(server) or self._joined(server)
            self._groups[server] = group
            server.call("/start_weight_update", {})
            told = {
                "names": list(weights),
                "dtype_names": [str(x.dtype).removeprefix("torch.") for x in weights.values()],
                "shapes": [list(x.shape) for x in weights.values()],
                "packed": True,
            }
            how = self._engine.NCCLTrainerSendWeightsArgs(group=group, packed=True)
            sending = _Beside(self._engine.NCCLWeightTransferEngine.trainer_send_weights, iter(weights.items()), how)
            server.call("/update_weights", {"update_info": told})
            sending.result(self._deadline)
            server.call("/finish_weight_update", {})
        except Exception:
            self._groups.pop(server, None)
            raise
        sums = {name: (len(x) if x.ndim else 1, bits(x)) for name, x in weights.items()}
        expect_taken(version, server.rpc("grpo_compare", sums=sums, version=version))
        _forget_prefixes(server)
        return version

    def _joined(self, server: VLLMServer) -> Any:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        size = 1 + int(server.call("/get_world_size")["world_size"])
        told = {"master_address": server.our_address(), "master_port": port, "rank_offset": 1, "world_size": size}
        joining = _Beside(self._engine.NCCLWeightTransferEngine.trainer_init, told)
        server.call("/init_weight_transfer_engine", {"init_info": told})
        return joining.result(self._deadline)


class _Beside:
    """A call in a thread: both sides of a collective must be there at a time."""

    def __init__(self, function: Any, *given: Any) -> None:
        self._found: list[Any] = []
        self._wrong: list[Exception] = []
        device = torch.cuda.current_device()

        def work() -> None:
            try:
                torch.cuda.set_device(device)
                self._found.append(function(*given))
                torch.cuda.synchronize()
            except Exception as error:
                self._wrong.append(error)

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def result(self, seconds: float) -> Any:
        self._thread.join(seconds)
        if self._wrong:
            raise ServerFailed(f"NCCL: {self._wrong[0]}") from self._wrong[0]
        if not self._found:
            raise ServerFailed(f"NCCL did not end within {seconds:g} s")
        return self._found[0]


class ByAdapter:
    """The adapter alone, loaded by vLLM under a name of its own; rows under way end with the one they began with."""

    name, scales, stops = "adapter", False, False

    def __init__(self, folder: str | None, kept: int) -> None:
        """kept: adapters that may still be asked for by rows under way."""
        self._folder, self._kept, self._run, self._pushes = folder, kept, secrets.token_hex(4), 0
        self._held: dict[VLLMServer, list[str]] = {}
        self._folders: list[tempfile.TemporaryDirectory[str]] = []
        """Of the adapters that may be asked for: a server may have to read one again."""

    @contextmanager
    def loaded(self, model: nn.Module) -> Iterator[tuple[str, str]]:
        """The adapter's folder, and its name."""
        self._pushes += 1
        name = f"grpo-{self._run}-{self._pushes}"
        self._folders.append(made := tempfile.TemporaryDirectory(prefix="grpo-adapter-", dir=self._folder))
        if self._folder is not None:
            Path(made.name).chmod(0o755)  # the server may be another user's
        model.save_pretrained(made.name)  # type: ignore[operator]
        yield made.name, name
        while len(self._folders) > self._kept:
            self._folders.pop(0).cleanup()

    def send(self, server: VLLMServer, load: tuple[str, str]) -> str:
        """Have it loaded, and the oldest let go of."""
        path, name = load
        if server.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}) is None:
            raise ServerFailed(f"{server} takes no adapters; start it with: {ADAPTERS}")
        served = {card.get("id") for card in server.call("/v1/models").get("data", [])}
        if name not in served:
            raise ServerFailed(f"{server} does not serve {name} after it was loaded; see its own log")
        held = self._held.setdefault(server, [])
        held.append(name)
        server.model = name
        while len(held) > self._kept:
            server.ask("/v1/unload_lora_adapter", {"lora_name": held.pop(0)})
        return name


def transfer_of(
    word: str, model: nn.Module, servers: list[VLLMServer], deadline: float, folder: str | None, kept: int
) -> Transfer:
    """The way that a word stands for; auto: the first that can be."""
    adapter = getattr(model, "active_peft_config", None)
    lora = adapter is not None and str(adapter.peft_type.value) == "LORA"
    on_gpu = next(model.parameters()).device.type == "cuda"
    if word == "adapter" and not lora:
        raise ConfigError("engine_kwargs: transfer=adapter pushes a LoRA adapter, and none is trained; set lora_rank")
    if word in ("ipc", "nccl") and not on_gpu:
        raise ConfigError(f"engine_kwargs: transfer={word} is for models on a GPU; use file")
    if word == "auto" and lora and all(_takes_adapters(server) for server in servers):
        word = "adapter"
    elif word == "auto":
        word = "file" if not on_gpu else "ipc" if all(s.here for s in servers) else "nccl" if _has_vllm() else "file"
    if word == "nccl" and not _has_vllm():
        raise ConfigError("engine_kwargs: transfer=nccl needs vLLM here, too: pip install vllm, or use transfer=file")
    made: dict[str, Any] = {
        "adapter": lambda: ByAdapter(folder, kept),
        "ipc": ByMemory,
        "nccl": lambda: ByNCCL(deadline),
        "file": lambda: ByFile(folder),
    }
    if word not in made:
        raise ConfigError(f"engine_kwargs: transfer={word} is unknown; use auto, {', '.join(made)}")
    found: Transfer = made[word]()
    return found


def _takes_adapters(server: VLLMServer) -> bool:
    """Whether adapters may be loaded: it finds fault with an empty request rather than having no such endpoint."""
    try:
        return server.ask("/v1/load_lora_adapter", {}, missing="none") != "none"
    except ServerFailed:
        return True


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None
