"""What a step computes: a model as `prefill` (prompts into blocks) and `decode` (one token a slot to logits).

    ModuleDecoder   the module's own forward, with our attention behind transformers' attention interface: any decoder
    FusedDecoder    the same arithmetic in fewer kernels, for the common layout: norm, attention, norm, gated MLP

Neither holds weights of its own where the module's can be used: what is kept in the type that is computed in is read
in place (projections that read the same input are laid side by side, and the module's parameters become views of
that), what is kept in a wider type is rounded once before every rollout. Every decoder is compared with the module
before it is trusted.

Letters: P prompts, T their tokens, S slots, F fields of a slot's state, B blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo.errors import line
from grpo.language.engines.cuda_graphs.blocks import BLOCK_SIZE, BlockManager
from grpo.language.engines.cuda_graphs.fused_decoder import FusedDecoder
from grpo.language.engines.cuda_graphs.kernels import Attention
from grpo.language.engines.cuda_graphs.module_decoder import ModuleDecoder
from grpo.language.scoring.decoder_layout import ODD, Unsupported

EXACT, COARSE = 1e-3, (5e-2, 0.3)
"""Relative difference of logits that nobody asks about: in float32; in a narrower type, at least and at most."""


class Decoder(Protocol):
    """A model as the engine needs it."""

    layers: Sequence[Attention]
    dtype: torch.dtype
    """Of keys and values."""
    vocabulary: int

    def refresh(self) -> None:
        """Round what is kept in a wider type again."""
        ...

    def prefill(
        self, ids_PT: Tensor, table_PB: Tensor, length_P: Tensor, blocks: BlockManager, first_P: Tensor | None = None
    ) -> Tensor | None:
        """Keys and values of prompts, padded on the right, into their blocks; of those from `first_P` on.

        (P · T, D) what the head reads; None: it is not known.
        """
        ...

    def prefill_behind(
        self, ids_PT: Tensor, table_PB: Tensor, length_P: Tensor, past_P: Tensor, width: int, blocks: BlockManager
    ) -> None:
        """Keys and values of tokens behind `past_P` others, `width` at most, that lie in the same blocks already."""
        ...

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """(M, V) of what the head reads."""
        ...

    def decode(
        self, state_FS: Tensor, table_SB: Tensor, blocks: BlockManager, share_prompts: bool = False, long_rows: int = 0
    ) -> Tensor:
        """(S, V) logits behind each slot's token; how long it takes depends on the rest, see `attend`."""
        ...


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
        most = allowed_gap(model, ids, expected, module.dtype)
        try:
            fused = FusedDecoder(module, max(positions, ids.shape[1]))
            if _agrees(fused, ids, expected, most):
                return fused
        except torch.OutOfMemoryError:
            raise
        except (*ODD, Unsupported):
            pass
        if _agrees(module, ids, expected, most):
            return module
    except torch.OutOfMemoryError:
        raise
    except ODD as error:
        raise Unsupported(line(error)) from error
    raise Unsupported("its logits come out differently")


def _by_the_module(model: Any) -> tuple[Tensor, Tensor]:
    """A few tokens, and the module's own logits behind the last."""
    device = next(model.parameters()).device
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    length = 7 if device.type == "cpu" else 3 * BLOCK_SIZE // 2  # beyond a block, where that takes no time
    ids = torch.randint(0, vocabulary, (2, length), generator=torch.Generator().manual_seed(0)).to(device)
    return ids, model(input_ids=ids, use_cache=False).logits[:, -1].float()


def allowed_gap(model: Any, ids: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """How far apart logits may be that differ by rounding alone: what one more rounding of the embeddings does to them.

    Twice that: it is a little more than what lies between these logits and those of exact arithmetic, and another way
    to compute them has as much of its own. Wide models whose weights are still random multiply it.
    """
    if dtype == torch.float32:
        return EXACT
    embedded = model.get_input_embeddings()(ids)
    noise = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(1)).to(ids.device) * 2**-9
    try:
        moved = model(inputs_embeds=(embedded.float() * (1 + noise)).to(embedded.dtype), use_cache=False).logits[:, -1]
    except ODD:
        return COARSE[0]
    gap = float((moved.float() - expected).norm() / expected.norm())
    return min(max(2 * gap, COARSE[0]), COARSE[1])


def _agrees(decoder: Decoder, ids: Tensor, expected: Tensor, most: float) -> bool:
    """Whether reading all tokens but the last, then a step, gives the same, but for what rounding may do."""
    rows, steps = ids.shape
    blocks = BlockManager(decoder.layers, 4 * rows, decoder.dtype, ids.device)
    table = torch.arange(1, 1 + 4 * rows, dtype=torch.int32, device=ids.device).view(rows, 4)
    read = torch.full((rows,), steps - 1, device=ids.device)
    decoder.prefill(ids[:, :-1], table, read, blocks)
    state = torch.zeros(7, rows, dtype=torch.int32, device=ids.device)
    state[0], state[1], state[2], state[6] = 1, ids[:, -1].int(), steps - 1, steps - 1
    logits = [decoder.decode(state, table, blocks, share_prompts).float() for share_prompts in (False, True)]
    return all(bool((found - expected).norm() < most * expected.norm()) for found in logits)
