"""Any decoder: the module's own forward, with our attention behind transformers' attention interface.

Letters: P prompts, T their tokens, S slots, F fields of a slot's state, B blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from grpo.language.engines.cuda_graphs.attention import Handler, Past, Places, attending, causal
from grpo.language.engines.cuda_graphs.blocks import BlockManager
from grpo.language.engines.cuda_graphs.kernels import Attention, attend
from grpo.language.scoring.decoder_layout import Unsupported


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

    def prefill(
        self, ids_PT: Tensor, table_PB: Tensor, length_P: Tensor, blocks: BlockManager, first_P: Tensor | None = None
    ) -> None:
        """Keys and values of prompts, padded on the right, into their blocks; of those from `first_P` on."""
        places = Places.of(table_PB, length_P, ids_PT.shape[1], blocks.block_size, first_P)

        def handler(module: Any, query: Tensor, key: Tensor, value: Tensor, how: Attention) -> Tensor:
            places.write(blocks.kv_cache[module.layer_idx], key, value)
            return causal(*self._same(query, key, value), how)

        # Padding stays within the prompt: positions may be rows of a table.
        at_T, last_P = torch.arange(ids_PT.shape[1], device=ids_PT.device), (length_P.long() - 1).clamp(min=0)
        self._forward(ids_PT, torch.minimum(at_T[None], last_P[:, None]), handler)

    def prefill_behind(
        self, ids_PT: Tensor, table_PB: Tensor, length_P: Tensor, past_P: Tensor, width: int, blocks: BlockManager
    ) -> None:
        """Keys and values of tokens behind `past_P` others, `width` at most, that lie in the same blocks already."""
        places = Places.behind(table_PB, length_P, past_P, ids_PT.shape[1], blocks.block_size)
        past = Past.of(table_PB, past_P, ids_PT.shape[1], width)

        def handler(module: Any, query: Tensor, key: Tensor, value: Tensor, how: Attention) -> Tensor:
            pools = blocks.kv_cache[module.layer_idx]
            places.write(pools, key, value)
            return past.attended(*self._same(query, key, value), pools, how)

        at_T, last_P = torch.arange(ids_PT.shape[1], device=ids_PT.device), (length_P.long() - 1).clamp(min=0)
        self._forward(ids_PT, past_P[:, None].long() + torch.minimum(at_T[None], last_P[:, None]), handler)

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """The module keeps to itself what its head reads."""
        raise NotImplementedError

    def decode(
        self, state_FS: Tensor, table_SB: Tensor, blocks: BlockManager, share_prompts: bool = False, long_rows: int = 0
    ) -> Tensor:
        """(S, V) logits behind each slot's token."""
        slots = table_SB.shape[0]

        def handler(module: Any, query: Tensor, key: Tensor, value: Tensor, how: Attention) -> Tensor:
            q, k, v = (states[:, :, 0].reshape(slots, -1) for states in self._same(query, key, value))
            keys, values = blocks.kv_cache[module.layer_idx]
            out = attend(
                how, q, k, v, keys, values, table_SB, state_FS, share_prompts=share_prompts, long_rows=long_rows
            )
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


def autocast_dtype(model: nn.Module) -> torch.dtype | None:
    """The type that weights are rounded to where autocast is on and they are kept in a wider one."""
    device = next(model.parameters()).device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
