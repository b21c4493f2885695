"""What a step computes: a model as `prefill` (prompts into blocks) and `decode` (one token a slot to logits).

    ModuleDecoder   the module's own forward, with our attention behind transformers' attention interface: any decoder
    FusedDecoder    the same arithmetic in fewer kernels, for the common layout: norm, attention, norm, gated MLP

Neither holds weights of its own where the module's can be used: what is kept in the type that is computed in is read
in place (projections that read the same input are laid side by side, and the module's parameters become views of
that), what is kept in a wider type is rounded once before every rollout. Every decoder is compared with the module
before it is trusted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo.errors import line
from grpo.language.engines.cuda_graphs.blocks import BLOCK_SIZE, BlockManager
from grpo.language.engines.cuda_graphs.kernels import Attention, add_norm, attend, rope_and_store
from grpo.language.scoring.decoder_layout import ODD, DecoderLayout, LayerParts, Norm, Unsupported, hooked
from grpo.language.scoring.head import product, wide
from grpo.language.scoring.kernels.layers import gate

INTERFACE = "grpo_graphed"
SCORES = 1 << 27
"""Attention scores at a time, where they are written down at all."""


class Decoder(Protocol):
    """A model as the engine needs it."""

    layers: Sequence[Attention]
    dtype: torch.dtype
    """Of keys and values."""
    vocabulary: int

    def refresh(self) -> None:
        """Round what is kept in a wider type again."""
        ...

    def prefill(self, ids_PT: Tensor, table_PB: Tensor, length_P: Tensor, blocks: BlockManager) -> None:
        """Keys and values of prompts, padded on the right, into their blocks."""
        ...

    def decode(self, state_FS: Tensor, table_SB: Tensor, blocks: BlockManager, share_prompts: bool = False) -> Tensor:
        """(S, V) logits behind each slot's token; share_prompts: neighbours read theirs at once."""
        ...


# --- attention behind the interface ---------------------------------------------------------------------------------

Handler = Callable[[Any, Tensor, Tensor, Tensor, Attention], Tensor]
_handler: list[Handler] = []


def _interface(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Called by the model's layers; (B, heads, T, width) each."""
    for name in ("s_aux", "position_bias"):
        if more.get(name) is not None:
            raise Unsupported(f"its attention takes {name}")
    if key.shape[-1] != value.shape[-1] or query.shape[-1] != key.shape[-1]:
        raise Unsupported("its keys and values differ in width")
    if not getattr(module, "is_causal", True):
        raise Unsupported("its attention looks ahead")
    how = Attention(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=key.shape[-1],
        scale=float(key.shape[-1] ** -0.5 if scaling is None else scaling),
        window=more.get("sliding_window"),
        softcap=more.get("softcap"),
    )
    return _handler[-1](module, query, key, value, how), None


ALL_ATTENTION_FUNCTIONS.register(INTERFACE, _interface)


@contextmanager
def attending(model: Any, handler: Handler) -> Iterator[None]:
    """Inside, the model's attention is ours."""
    config = model.config
    owners = [config] if config.get_text_config() is config else [config, config.get_text_config()]
    former = [owner._attn_implementation_internal for owner in owners]
    _handler.append(handler)
    try:
        for owner in owners:
            owner._attn_implementation_internal = INTERFACE
        yield
    finally:
        _handler.pop()
        for owner, name in zip(owners, former, strict=True):
            owner._attn_implementation_internal = name


def causal(query: Tensor, key: Tensor, value: Tensor, how: Attention) -> Tensor:
    """Whole sequences, padded on the right at most: every token sees what comes before it; (B, T, heads, width)."""
    steps = query.shape[2]
    if how.softcap is None and (how.window is None or steps <= how.window):
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=how.scale, enable_gqa=how.heads != how.kv_heads
        )
        return out.transpose(1, 2)
    key, value = (states.repeat_interleave(how.heads // how.kv_heads, 1) for states in (key, value))
    at, found = torch.arange(steps, device=query.device), []
    for some in torch.split(at, max(SCORES // (query.shape[0] * how.heads * steps), 1)):
        score = torch.matmul(query[:, :, some], key.transpose(2, 3)).float() * how.scale
        if how.softcap is not None:
            score = how.softcap * torch.tanh(score / how.softcap)
        behind = some[:, None] - at[None, :]
        sees = (behind >= 0) & (behind < (how.window or steps))
        weight = score.masked_fill(~sees, -torch.inf).softmax(-1).to(value.dtype)
        found.append(torch.matmul(weight, value))
    return torch.cat(found, 2).transpose(1, 2)


@dataclass(frozen=True)
class Places:
    """Where tokens of prompts, padded on the right, are kept; padding goes to block 0, which nobody reads."""

    block_M: Tensor
    offset_M: Tensor

    @classmethod
    def of(cls, table_PB: Tensor, length_P: Tensor, steps: int, block_size: int) -> Places:
        """Of (P, steps) tokens."""
        at_T = torch.arange(steps, device=table_PB.device)
        block_PT = table_PB[:, : -(-steps // block_size)].repeat_interleave(block_size, 1)[:, :steps].long()
        block_PT = torch.where(at_T[None] < length_P[:, None], block_PT, 0)
        return cls(block_PT.flatten(), (at_T % block_size).repeat(len(table_PB)))

    def write(self, kept: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
        """(P, heads, T, width) each."""
        for pool, states in zip(kept, (key, value), strict=True):
            pool[self.block_M, :, self.offset_M] = states.transpose(1, 2).flatten(0, 1).to(pool.dtype)


# --- any decoder ----------------------------------------------------------------------------------------------------


class ModuleDecoder:
    """The module itself."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.autocast = autocast_dtype(model)
        self.dtype = self.autocast or model.dtype
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise Unsupported(f"it computes in {self.dtype}")
        bare = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._takes = inspect.signature(bare.forward).parameters.keys()
        if "position_ids" not in self._takes:
            raise Unsupported("its forward takes no positions")
        self.device = next(model.parameters()).device
        self._rounded = {}
        if self.autocast is not None:
            self._rounded = {
                f"{name}.weight": torch.empty_like(module.weight, dtype=self.autocast)
                for name, module in model.named_modules()
                if isinstance(module, nn.Linear) and module.weight.dtype == torch.float32
            }
        self._named = dict(model.named_parameters(remove_duplicate=False))
        self.refresh()
        self.layers: Sequence[Attention]
        self.vocabulary, self.layers = self._probe()

    def refresh(self) -> None:
        """Round the linear layers' weights to the type they are computed in: autocast would do so at every step."""
        if self._rounded:
            torch._foreach_copy_(list(self._rounded.values()), [self._named[name] for name in self._rounded])

    def prefill(self, ids_PT: Tensor, table_PB: Tensor, length_P: Tensor, blocks: BlockManager) -> None:
        """Keys and values of prompts, padded on the right, into their blocks."""
        places = Places.of(table_PB, length_P, ids_PT.shape[1], blocks.block_size)

        def handler(module: Any, query: Tensor, key: Tensor, value: Tensor, how: Attention) -> Tensor:
            places.write(blocks.kv_cache[module.layer_idx], key, value)
            return causal(*self._same(query, key, value), how)

        # Padding stays within the prompt: positions may be rows of a table.
        at_T, last_P = torch.arange(ids_PT.shape[1], device=ids_PT.device), (length_P.long() - 1).clamp(min=0)
        self._forward(ids_PT, torch.minimum(at_T[None], last_P[:, None]), handler)

    def decode(self, state_FS: Tensor, table_SB: Tensor, blocks: BlockManager, share_prompts: bool = False) -> Tensor:
        """(S, V) logits behind each slot's token."""
        slots = table_SB.shape[0]

        def handler(module: Any, query: Tensor, key: Tensor, value: Tensor, how: Attention) -> Tensor:
            q, k, v = (states[:, :, 0].reshape(slots, -1) for states in self._same(query, key, value))
            keys, values = blocks.kv_cache[module.layer_idx]
            out = attend(how, q, k, v, keys, values, table_SB, state_FS, share_prompts=share_prompts)
            return out.view(slots, 1, how.heads, how.head_dim)

        return self._forward(state_FS[1, :slots, None], state_FS[2, :slots, None].long(), handler)[:, -1]

    def _same(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """In the type that is computed in; rotation may have widened them."""
        return query.to(self.dtype), key.to(self.dtype), value.to(self.dtype)

    def _forward(self, ids: Tensor, position_ids: Tensor, handler: Handler) -> Tensor:
        arguments = {"input_ids": ids, "position_ids": position_ids, "use_cache": False}
        if "logits_to_keep" in self._takes:
            arguments["logits_to_keep"] = 1
        with attending(self.model, handler), self._precision():
            logits: Tensor = torch.func.functional_call(
                self.model, self._rounded, (), arguments, tie_weights=False
            ).logits
        return logits

    def _precision(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast, cache_enabled=False)

    def _probe(self) -> tuple[int, list[Attention]]:
        """How many logits there are, and how each layer attends, as it tells our attention when it is called."""
        found: dict[int, Attention] = {}

        def handler(module: Any, query: Tensor, key: Tensor, value: Tensor, how: Attention) -> Tensor:
            number = getattr(module, "layer_idx", None)
            if number is None or number in found:
                raise Unsupported("its attention layers are not numbered one by one")
            found[number] = how
            return causal(*self._same(query, key, value), how)

        ids = torch.zeros(1, 3, dtype=torch.long, device=self.device)
        logits = self._forward(ids, torch.arange(3, device=ids.device)[None], handler)
        expected = self.model.config.get_text_config(decoder=True).num_hidden_layers
        if sorted(found) != list(range(expected)):
            raise Unsupported(f"{len(found)} of its {expected} layers attend through transformers' attention interface")
        return logits.shape[-1], [found[number] for number in range(expected)]


# --- the common layout ----------------------------------------------------------------------------------------------


class Linears:
    """Projections that read the same input, as one product; adapters (LoRA) beside it."""

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
        bases, self._adapters = [], []
        for module in modules:
            base, adapter = _unwrapped(module)
            bases.append(base)
            self._adapters.append(adapter)
        self._sources = [base.weight for base in bases]
        self.sizes = [base.out_features for base in bases]
        self._rounded = any(weight.dtype != dtype for weight in self._sources)
        if len(bases) == 1 and not self._rounded:
            self.weight = bases[0].weight.data
        else:
            with torch.no_grad():
                self.weight = torch.cat([weight.data.to(dtype) for weight in self._sources])
            if not self._rounded:  # one memory for both: what training changes here is changed there
                for weight, part in zip(self._sources, torch.split(self.weight, self.sizes), strict=True):
                    weight.data = part
        self._biases = [base.bias for base in bases]
        self.bias = None
        if any(bias is not None for bias in self._biases):
            self.bias = torch.zeros(sum(self.sizes), dtype=dtype, device=self.weight.device)
        ranks = [0 if adapter is None else adapter[0].shape[0] for adapter in self._adapters]
        self.a_RD = self.b_OR = None
        if any(ranks):
            self.a_RD = torch.zeros(sum(ranks), self.weight.shape[1], dtype=dtype, device=self.weight.device)
            self.b_OR = torch.zeros(sum(self.sizes), sum(ranks), dtype=dtype, device=self.weight.device)
        self._ranks = ranks

    def copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What is rounded before a rollout: to, from."""
        if self._rounded:
            yield from zip(torch.split(self.weight, self.sizes), self._sources, strict=True)
        if self.bias is not None:
            for part, bias in zip(torch.split(self.bias, self.sizes), self._biases, strict=True):
                if bias is not None:
                    yield part, bias
        if self.a_RD is not None and self.b_OR is not None:
            out = rank = 0
            for size, width, adapter in zip(self.sizes, self._ranks, self._adapters, strict=True):
                if adapter is not None:
                    a, b, scale = adapter
                    yield self.a_RD[rank : rank + width], a
                    yield self.b_OR[out : out + size, rank : rank + width], b if scale == 1 else b * scale
                out, rank = out + size, rank + width

    def __call__(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        if self.a_RD is None or self.b_OR is None:
            return out
        return out.addmm_(F.linear(x, self.a_RD), self.b_OR.t())

    def wide(self, x: Tensor) -> Tensor:
        """The same, where it can be not rounded to a narrower type: logits around 20 would lose their second digit."""
        if self.a_RD is not None or self.bias is not None or not wide("mm", x.dtype, x.device):
            return self(x)
        out = torch.empty(len(x), len(self.weight), dtype=torch.float32, device=x.device)
        product(x, self.weight.t(), out)
        return out


def _unwrapped(module: Any) -> tuple[nn.Linear, tuple[Tensor, Tensor, float] | None]:
    """A linear layer and the adapter that is active on it."""
    if hooked(module):
        raise Unsupported("a hook watches it")
    if type(module) is nn.Linear:
        return module, None
    base = getattr(module, "base_layer", None)
    active = getattr(module, "active_adapters", None)
    if type(base) is not nn.Linear or active is None or not hasattr(module, "lora_A"):
        raise Unsupported(f"it has a {type(module).__name__}")
    if module.merged or module.disable_adapters:
        active = []
    active = [name for name in active if name in module.lora_A]
    variants = getattr(module, "lora_variant", {})
    if len(active) > 1 or any(name in variants for name in active) or any(module.lora_bias.get(n) for n in active):
        raise Unsupported("its adapter is more than one plain LoRA")
    if not active:
        return base, None
    name = active[0]
    return base, (module.lora_A[name].weight, module.lora_B[name].weight, float(module.scaling[name]))


@dataclass(frozen=True)
class Layer:
    """One layer of the common layout."""

    how: Attention
    before: Norm
    qkv: Linears
    qk_norms: tuple[Tensor, Tensor, float] | None
    """Weights for queries and for keys."""
    out: Linears
    between: Norm
    gate_up: Linears
    down: Linears


class FusedDecoder:
    """norm → q, k, v → attention → out → norm → gate, up → down, in eight kernels a layer."""

    def __init__(self, module: ModuleDecoder, positions: int) -> None:
        model: Any = module.model.get_base_model() if hasattr(module.model, "get_base_model") else module.model
        layout = DecoderLayout.of(model)
        self.gelu, self.dtype, self.vocabulary = layout.gelu, module.dtype, module.vocabulary
        self.layers: Sequence[Attention] = module.layers
        self.embedding = layout.embedding.weight.data
        self.blocks = [self._layer(parts, how) for parts, how in zip(layout.layers, self.layers, strict=True)]
        self.norm = layout.norm
        self.head = Linears([layout.head], self.dtype)
        self.cos, self.sin = layout.rotations(torch.arange(positions, device=self.embedding.device))
        self.refresh()

    def _layer(self, parts: LayerParts, how: Attention) -> Layer:
        norms = None
        if parts.q_norm is not None and parts.k_norm is not None:
            norms = parts.q_norm.weight.data, parts.k_norm.weight.data, parts.q_norm.eps
        return Layer(
            how,
            parts.before,
            Linears([parts.q, parts.k, parts.v], self.dtype),
            norms,
            Linears([parts.out], self.dtype),
            parts.between,
            Linears([parts.gate, parts.up], self.dtype),
            Linears([parts.down], self.dtype),
        )

    def _linears(self) -> Iterator[Linears]:
        for block in self.blocks:
            yield from (block.qkv, block.out, block.gate_up, block.down)
        yield self.head

    def refresh(self) -> None:
        """Round what is kept in a wider type again."""
        copies = [pair for part in self._linears() for pair in part.copies()]
        if copies:
            to, of = zip(*copies, strict=True)
            torch._foreach_copy_(list(to), list(of))

    def body(self, ids_M: Tensor, attention: Callable[[int, Layer, Tensor], Tensor]) -> Tensor:
        """(M, D) what the head reads; `attention` gets q, k and v side by side."""
        hidden_MD, delta_MD = F.embedding(ids_M, self.embedding), None
        for number, layer in enumerate(self.blocks):
            x_MD = add_norm(hidden_MD, delta_MD, layer.before.weight.data, layer.before.eps, self.dtype)
            x_MD = layer.out(attention(number, layer, layer.qkv(x_MD)))
            x_MD = add_norm(hidden_MD, x_MD, layer.between.weight.data, layer.between.eps, self.dtype)
            delta_MD = layer.down(gate(layer.gate_up(x_MD), self.gelu))
        return add_norm(hidden_MD, delta_MD, self.norm.weight.data, self.norm.eps, self.dtype)

    def decode(self, state_FS: Tensor, table_SB: Tensor, blocks: BlockManager, share_prompts: bool = False) -> Tensor:
        """(S, V) logits behind each slot's token."""

        def attention(number: int, layer: Layer, qkv: Tensor) -> Tensor:
            q, k, v = torch.split(qkv, layer.qkv.sizes, 1)
            rope, norm = (self.cos, self.sin), layer.qk_norms
            kept = blocks.kv_cache[number]
            return attend(
                layer.how, q, k, v, *kept, table_SB, state_FS, rope=rope, norm=norm, share_prompts=share_prompts
            )

        return self.head.wide(self.body(state_FS[1, : len(table_SB)], attention))

    def prefill(self, ids_PT: Tensor, table_PB: Tensor, length_P: Tensor, blocks: BlockManager) -> None:
        """Keys and values of prompts, padded on the right, into their blocks."""
        rows, steps = ids_PT.shape
        places = Places.of(table_PB, length_P, steps, blocks.block_size)

        def attention(number: int, layer: Layer, qkv: Tensor) -> Tensor:
            where = *blocks.kv_cache[number], places.block_M, places.offset_M
            q, k = rope_and_store(layer.how, qkv, *where, steps, (self.cos, self.sin), layer.qk_norms)
            v = qkv[:, -layer.qkv.sizes[-1] :]
            q, k, v = (states.view(rows, steps, -1, layer.how.head_dim).transpose(1, 2) for states in (q, k, v))
            return causal(q, k, v, layer.how).reshape(rows * steps, -1)

        self.body(ids_PT.flatten(), attention)


# --- which one ------------------------------------------------------------------------------------------------------


def make_decoder(model: Any, positions: int) -> Decoder:
    """The fastest that gives the module's own logits; raises Unsupported where none does."""
    devices = {str(p.device) for p in model.parameters()}
    if len(devices) > 1:
        raise Unsupported("its weights lie on several devices")
    device = next(model.parameters()).device
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        raise Unsupported(
            f"it lies on {device}, which is not the current device: torch.cuda.set_device({device.index})"
        )
    try:
        module = ModuleDecoder(model)
        ids, expected = _by_the_module(model)
        try:
            fused = FusedDecoder(module, max(positions, ids.shape[1]))
            if _agrees(fused, ids, expected):
                return fused
        except torch.OutOfMemoryError:
            raise
        except (*ODD, Unsupported):
            pass
        if _agrees(module, ids, expected):
            return module
    except torch.OutOfMemoryError:
        raise
    except ODD as error:
        raise Unsupported(line(error)) from error
    raise Unsupported("its logits come out differently")


def autocast_dtype(model: nn.Module) -> torch.dtype | None:
    """The type that weights are rounded to where autocast is on and they are kept in a wider one."""
    device = next(model.parameters()).device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _by_the_module(model: Any) -> tuple[Tensor, Tensor]:
    """A few tokens, and the module's own logits behind the last."""
    device = next(model.parameters()).device
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    length = 7 if device.type == "cpu" else 3 * BLOCK_SIZE // 2  # beyond a block, where that takes no time
    ids = torch.randint(0, vocabulary, (2, length), generator=torch.Generator().manual_seed(0)).to(device)
    return ids, model(input_ids=ids, use_cache=False).logits[:, -1].float()


def _agrees(decoder: Decoder, ids: Tensor, expected: Tensor) -> bool:
    """Whether reading all tokens but the last, then a step, gives the same; rounding is allowed for."""
    rows, steps = ids.shape
    blocks = BlockManager(decoder.layers, 4 * rows, decoder.dtype, ids.device)
    table = torch.arange(1, 1 + 4 * rows, dtype=torch.int32, device=ids.device).view(rows, 4)
    read = torch.full((rows,), steps - 1, device=ids.device)
    decoder.prefill(ids[:, :-1], table, read, blocks)
    state = torch.zeros(7, rows, dtype=torch.int32, device=ids.device)
    state[0], state[1], state[2], state[6] = 1, ids[:, -1].int(), steps - 1, steps - 1
    most = 1e-3 if decoder.dtype == torch.float32 else 5e-2
    logits = [decoder.decode(state, table, blocks, share_prompts).float() for share_prompts in (False, True)]
    return all(bool((found - expected).norm() < most * expected.norm()) for found in logits)
