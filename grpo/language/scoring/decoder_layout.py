"""The layout that most decoders share, as parts with names: norm, attention, norm, gated MLP, and a head.

Llama, Mistral, Qwen2 and Qwen3 have it. What is found here is only what a model looks like: whoever computes with the
parts compares the result with the module's own before trusting it.

Letters: M tokens, D width, R ranks of adapters, O rows of a projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ACTIVATIONS = {"silu": False, "swish": False, "gelu_pytorch_tanh": True}
"""Of the gate; whether it is the GELU."""
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend on the position alone."""
KEEP = ("everything", "attention", "input")
"""What a layer may keep for the backward pass: all that products give; that without gate and up; what it read."""
HOSTED = ("host", "host input")
"""What it may keep in the host's memory instead: what it read and what attention found; what it read."""
ODD = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""How a model says that it is not what it looks like."""


class Unsupported(Exception):
    """Why a model cannot be computed so, in a few words."""


@dataclass(frozen=True)
class Norm:
    """RMSNorm."""

    weight: nn.Parameter
    eps: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        """As transformers writes it."""
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        if not type(module).__name__.endswith("RMSNorm") or eps is None or weight is None or weight.ndim != 1:
            raise Unsupported(f"it has a {type(module).__name__}")
        return cls(weight, float(eps))


@dataclass(frozen=True)
class Adapter:
    """LoRA beside a linear layer: scale · B · A; rsLoRA is only another scale."""

    a_RD: Tensor
    b_OR: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """Rows of A."""
        return len(self.a_RD)


def unwrapped(module: Any) -> tuple[Any, Adapter | None]:
    """A linear layer, perhaps a quantised one, and the adapter that is active on it at this moment."""
    if hooked(module):
        raise Unsupported("a hook watches it")
    if not hasattr(module, "base_layer"):
        return module, None
    if not hasattr(module, "lora_A") or hooked(module.base_layer):
        raise Unsupported(f"it has a {type(module).__name__}, which is no LoRA of a linear layer")
    off = module.merged or module.disable_adapters
    active = [] if off else [name for name in module.active_adapters if name in module.lora_A]
    if not active:
        return module.base_layer, None
    if len(active) > 1:
        raise Unsupported(f"{len(active)} adapters are active at once ({', '.join(active)})")
    name = active[0]
    variant = module.lora_variant.get(name)
    if variant is not None:
        raise Unsupported(
            f"its adapter is more than plain LoRA ({type(variant).__name__.removesuffix('LinearVariant')})"
        )
    if module.lora_bias.get(name):
        raise Unsupported("its adapter has a bias (lora_bias)")
    a, b = module.lora_A[name].weight, module.lora_B[name].weight
    return module.base_layer, Adapter(a, b, float(module.scaling[name]))


@dataclass(frozen=True)
class LayerParts:
    """Of one layer; projections as they are found, perhaps wrapped by an adapter."""

    before: Norm
    q: nn.Module
    k: nn.Module
    v: nn.Module
    q_norm: Norm | None
    k_norm: Norm | None
    out: nn.Module
    between: Norm
    gate: nn.Module
    up: nn.Module
    down: nn.Module
    head_dim: int
    scale: float


@dataclass(frozen=True)
class DecoderLayout:
    """A causal model of the common layout."""

    embedding: nn.Embedding
    layers: tuple[LayerParts, ...]
    norm: Norm
    head: nn.Module
    rotary: Any
    gelu: bool

    @classmethod
    def of(cls, causal: Any) -> DecoderLayout:
        """Raises Unsupported where it is another one."""
        body = getattr(causal, "model", None)
        if body is None or not has(body, {"embed_tokens", "layers", "norm", "rotary_emb"}):
            raise Unsupported(f"{type(causal).__name__} is laid out in its own way")
        act = getattr(causal.config, "hidden_act", None)
        if act not in ACTIVATIONS:
            raise Unsupported(f"its activation is {act}")
        if type(body.embed_tokens) is not nn.Embedding:
            raise Unsupported(f"it has a {type(body.embed_tokens).__name__}")
        if getattr(body.rotary_emb, "rope_type", "default") not in ROTATIONS:
            raise Unsupported(f"its rotary embedding is of the type {body.rotary_emb.rope_type}")
        layers = tuple(_parts(layer) for layer in body.layers)
        return cls(
            body.embed_tokens, layers, Norm.of(body.norm), causal.lm_head, body.rotary_emb, ACTIVATIONS[act]
        )  # fmt: skip

    def rotations(self, position_M: Tensor) -> tuple[Tensor, Tensor]:
        """(M, head_dim / 2) cosines and sines, float32."""
        cos, sin = self.rotary(torch.zeros(1, 1, 1, device=position_M.device), position_M[None])
        if cos.shape[-1] != self.layers[0].head_dim:
            raise Unsupported("only part of its heads is rotated")
        half = cos.shape[-1] // 2
        return cos[0, :, :half].float().contiguous(), sin[0, :, :half].float().contiguous()


def _parts(layer: Any) -> LayerParts:
    attention, mlp = layer.self_attn, layer.mlp
    if not has(layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}):
        raise Unsupported("its layers are laid out in their own way")
    names, normed = {"q_proj", "k_proj", "v_proj", "o_proj"}, hasattr(attention, "q_norm")
    if not has(attention, names | ({"q_norm", "k_norm"} if normed else set())):
        raise Unsupported("its attention is laid out in its own way")
    if not has(mlp, {"gate_proj", "up_proj", "down_proj"}, {"act_fn"}):
        raise Unsupported("its MLP is laid out in its own way")
    if attention.head_dim % 2:
        raise Unsupported("its heads have an odd width")
    if not getattr(attention, "use_rope", True):
        raise Unsupported("some of its layers do not rotate")
    return LayerParts(
        Norm.of(layer.input_layernorm),
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        Norm.of(attention.q_norm) if normed else None,
        Norm.of(attention.k_norm) if normed else None,
        attention.o_proj,
        Norm.of(layer.post_attention_layernorm),
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
        int(attention.head_dim),
        float(getattr(attention, "scaling", attention.head_dim**-0.5)),
    )


def has(module: nn.Module, names: set[str], perhaps: frozenset[str] | set[str] = frozenset()) -> bool:
    """Whether it consists of these parts, and nobody watches it."""
    found = {name for name, _ in module.named_children()}
    return names <= found <= names | perhaps and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Whether something is called before or after it."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
