"""The policy's weights on their way to vLLM: collected here, received and checked in its workers."""

from __future__ import annotations

import base64
import copy
import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

RECEIVER = "grpo.language.engines.vllm.Receiver"
"""Where vLLM's workers find `Receiver`; servers are started with this name."""


def checkpoint(model: nn.Module) -> dict[str, Tensor]:
    """The weights by the names that a saved model has, adapters merged; tied ones once.

    Merging takes a copy of the model for as long as the push lasts: undoing it in place would leave rounding behind.
    """
    from transformers.core_model_loading import revert_weight_conversion

    plain: Any = copy.deepcopy(model).merge_and_unload() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    weights: dict[tuple[int, torch.Size], tuple[str, Tensor]] = {}
    for name, tensor in plain.state_dict().items():
        weights.setdefault((tensor.data_ptr(), tensor.shape), (name, tensor.detach()))
    saved: dict[str, Tensor] = revert_weight_conversion(plain, dict(weights.values()))
    return saved


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types and bytes."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def shipped(weights: Mapping[str, Tensor], folder: str | None) -> Iterator[tuple[str, str]]:
    """A file with the weights for as long as it is needed: its path and their fingerprint."""
    here = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    with tempfile.TemporaryDirectory(prefix="grpo-weights-", dir=folder) as made:
        if folder is not None:
            Path(made).chmod(0o755)  # the server may be another user's
        path = Path(made) / "weights.safetensors"
        save_file(here, path)
        yield str(path.resolve()), fingerprint(here)


def shared(tensor: Tensor) -> list[Any]:
    """A CUDA tensor as plain values from which another process on the GPU opens it."""
    from torch.multiprocessing.reductions import reduce_tensor

    plain: list[Any] = []
    for value in reduce_tensor(tensor)[1][1:]:  # type: ignore[no-untyped-call]  # the first is the tensor's class
        if isinstance(value, bytes):
            plain.append({"bytes": base64.b64encode(value).decode()})
        elif isinstance(value, torch.dtype | type):
            plain.append({"torch": str(value).removeprefix("torch.")} if isinstance(value, torch.dtype) else None)
        else:
            plain.append(list(value) if isinstance(value, torch.Size | tuple) else value)
    return plain


def opened(handle: list[Any], device: torch.device) -> Tensor:
    """The way back."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    given: list[Any] = []
    for value in handle:
        if isinstance(value, Mapping):
            given.append(base64.b64decode(value["bytes"]) if "bytes" in value else getattr(torch, str(value["torch"])))
        else:
            given.append(tuple(value) if isinstance(value, list) else value)
    given[3], given[5] = torch.storage.UntypedStorage, device.index or 0
    found: Tensor = rebuild_cuda_tensor(torch.Tensor, *given)  # type: ignore[no-untyped-call]
    return found


class Receiver:
    """What vLLM's workers are extended with (`worker_extension_cls`): it runs in each of them, as part of `self`."""

    _grpo_version = ""

    def grpo_load(self, source: str | Mapping[str, Tensor], version: str = "") -> dict[str, Any]:
        """Take over weights, handed over under a version or from a file, whose fingerprint is their version."""
        worker: Any = self
        if isinstance(source, str):
            weights: Mapping[str, Tensor] = load_file(source)
            version = fingerprint(weights)
        else:
            weights = source
        self._grpo_version = ""  # whatever goes wrong from here on, the old weights are no longer complete
        with torch.no_grad():
            worker.reload_weights(weights_iterator=iter(weights.items()))
            model = worker.model_runner.get_model()
            _repack_tied(model)
            held = dict(model.named_parameters())
            same = {name: _holds(held[name], tensor) for name, tensor in weights.items() if name in held}
        return self._grpo_report(same, version)

    def grpo_load_shared(self, handles: Mapping[str, list[Any]], version: str) -> dict[str, Any]:
        """Take over weights that lie in another process's GPU memory; see `shared`."""
        worker: Any = self
        device = next(worker.model_runner.get_model().parameters()).device
        report = self.grpo_load({name: opened(handle, device) for name, handle in handles.items()}, version)
        torch.cuda.synchronize(device)  # read before the other side writes there again
        return report

    def grpo_compare(self, sums: Mapping[str, tuple[int, int]], version: str) -> dict[str, Any]:
        """Weights came by vLLM's own transfer: whether sums of their bits are those that were sent."""
        worker: Any = self
        model = worker.model_runner.get_model()
        _repack_tied(model)
        held = dict(model.named_parameters())
        same: dict[str, bool | None] = {
            name: bits(held[name][:rows]) == sent for name, (rows, sent) in sums.items() if name in held
        }
        return self._grpo_report(same, version)

    def _grpo_report(self, same: Mapping[str, bool | None], version: str) -> dict[str, Any]:
        self._grpo_version = version
        compared = {name: equal for name, equal in same.items() if equal is not None}
        stale = [name for name, equal in compared.items() if not equal]
        return {"version": version, "stale": stale, "compared": len(compared)}

    def grpo_ready(self, temperature: float) -> dict[str, Any]:
        """Divide the logits from now on; the version of the weights, and how many heads are there to divide.

        On a GPU logits are not rounded to bfloat16, as ours are not: around 20 they would lose their second digit.
        """
        worker: Any = self
        heads = [
            module for module in worker.model_runner.get_model().modules() if type(module).__name__ == "LogitsProcessor"
        ]
        plain = torch.cuda.is_available() and worker.vllm_config.quant_config is None
        for head in heads:
            if plain and hasattr(head, "head_dtype"):
                head.head_dtype = torch.float32
            if hasattr(head, "grpo_hook"):
                head.grpo_hook.remove()
            head.grpo_hook = head.register_forward_hook(
                lambda module, given, logits: None if logits is None else logits.float() / temperature
            )
        return {"version": self._grpo_version, "heads": len(heads)}


def bits(x: Tensor) -> int:
    """The sum of a tensor's bits, read as integers, in whatever order they are added."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    return int(x.detach().contiguous().view(kind).sum(dtype=torch.int64))


def _repack_tied(model: nn.Module) -> None:
    """A head that shares the embedding's weight is not told of new ones; on a CPU it multiplies by a packed copy."""
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and owners.setdefault(id(weight), module) is not module:
            method: Any = getattr(module, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(module)


def _holds(held: Tensor, sent: Tensor) -> bool | None:
    """Whether a parameter has a tensor's values; None: it is fused, split or packed. Vocabularies may be padded."""
    if held.shape[1:] != sent.shape[1:] or len(held) < len(sent):
        return None
    return torch.equal(held[: len(sent)], sent.to(held))
