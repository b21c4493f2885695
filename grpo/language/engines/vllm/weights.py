"""The policy's weights on their way to vLLM: collected here, received and checked in its workers."""

from __future__ import annotations

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
        self._grpo_version = version
        compared = {name: equal for name, equal in same.items() if equal is not None}
        stale = [name for name, equal in compared.items() if not equal]
        return {"version": version, "stale": stale, "compared": len(compared)}

    def grpo_ready(self, temperature: float) -> dict[str, Any]:
        """Divide the logits from now on; the version of the weights, and how many heads are there to divide."""
        worker: Any = self
        heads = [
            module for module in worker.model_runner.get_model().modules() if type(module).__name__ == "LogitsProcessor"
        ]
        for head in heads:
            if hasattr(head, "grpo_hook"):
                head.grpo_hook.remove()
            head.grpo_hook = head.register_forward_hook(
                lambda module, given, logits: None if logits is None else logits.float() / temperature
            )
        return {"version": self._grpo_version, "heads": len(heads)}


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
