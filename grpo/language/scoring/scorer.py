"""Log-probs of sampled tokens under a causal language model, at the sampling temperature, in float32.

`[tokens, vocabulary]` is never built for more than a tile of tokens: the module's body gives hidden states, and its
head is applied tile by tile, computed again in the backward pass. There are several ways to the same numbers; which one
is taken is a `ScoringPlan`, which `probe` finds for a model and a test may write down.

Letters: M sampled tokens of a batch, L all tokens of its rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo.core.advantages import decision_energy
from grpo.language.pictures import features
from grpo.language.planning.cost import MODULE_TOKENS, Setup
from grpo.language.planning.shape import ModelShape, Unknown
from grpo.language.samples import Sample
from grpo.language.scoring import memory, segments
from grpo.language.scoring.decoder_layout import HOSTED, KEEP, unwrapped
from grpo.language.scoring.head import log_probs
from grpo.language.scoring.packing import PackedBatch, by_prompt, fill, pack, pictured
from grpo.rollouts import Scores, Taught

if TYPE_CHECKING:
    from grpo.language.scoring.layers import Layers

Found = TypeVar("Found")
BUDGET = {"cpu": 4096}
"""Tokens of a pass unless the settings say otherwise; elsewhere memory decides."""


@dataclass(frozen=True)
class ScoringPlan:
    """Which of the ways to the same numbers is taken."""

    packing: str = "padded"
    """How samples are laid out for the module; see `packing`."""
    whole_logits: bool = False
    """The module's own logits, all at once: its head does more than is known here."""
    fused_head: bool = False
    """The head's kernels in place of tiles."""
    layers: Layers | None = None
    """The body with a backward pass by hand, in place of the module's; for `segments`."""
    divided: bool = False
    """Other ranks compute every pass along, so that none can be begun anew."""


class Scorer:
    """Log-probs of samples under one module."""

    def __init__(
        self,
        model: Any,
        temperature: float,
        plan: ScoringPlan,
        budget: int | None = None,
        pad: int = 0,
        autocast: torch.dtype | None = None,
    ) -> None:
        """autocast: the type that is computed in, where the weights are kept in a wider one."""
        self.model, self.temperature, self.plan, self.pad, self.autocast = model, temperature, plan, pad, autocast
        self.causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.body, self.head = self.causal.base_model, self.causal.get_output_embeddings()
        self.after_head = _after_head(self.causal.config.get_text_config())
        self.device = next(model.parameters()).device
        self.vocabulary: int | None = None
        """Tokens, of the head's first, among which each is drawn; None: all. A head may be padded with more."""
        self.keep: str | None = None
        """What a layer keeps of a pass; None: as much as there is memory for. See `decoder_layout.KEEP`."""
        self.set_budget = budget
        """Tokens of a pass as the settings have it; None: the least memory that costs no time."""
        self._most_kept = KEEP[0]
        """What a layer keeps where memory would allow it; less where that hardly costs time."""
        self._halved = 0
        """Times that a pass without gradient ran out of memory."""

    def __call__(
        self, samples: Sequence[Sample], steps: int, entropy: bool = False, choice_NTK: Tensor | None = None
    ) -> Scores:
        """(N, T) of the tokens that were sampled, 0 elsewhere; where K others of each are named, of these, too."""
        batch = self._packed(samples, steps)
        if choice_NTK is not None:
            return self._with_choices(batch, choice_NTK, entropy)
        if self.plan.whole_logits:
            out_LV = self.causal(**self._arguments(batch)).logits.flatten(0, 1)[batch.at_M]
            logp_M, entropy_M = self._of_logits(out_LV, batch.target_M, entropy)
        else:
            logp_M, entropy_M = self.of_hidden(self._hidden(batch), batch.target_M, entropy)
        shape = (len(samples), steps)
        return Scores(
            _scattered(logp_M, batch.cell_M, shape), _scattered(entropy_M, batch.cell_M, shape) if entropy else None
        )

    def in_parts(self, samples: Sequence[Sample], steps: int, entropy: bool = False) -> Scores:
        """The same without gradient, in passes that fit; out of memory: in smaller ones."""
        found, order = self._parts(samples, lambda some: self(some, steps, entropy))
        entropy_NT = torch.cat([s.entropy_NT for s in found if s.entropy_NT is not None])[order] if entropy else None
        return Scores(torch.cat([s.logp_NT for s in found])[order], entropy_NT)

    def likeliest(self, samples: Sequence[Sample], steps: int, count: int) -> Taught:
        """Log-probs of the tokens that were sampled and of the `count` likeliest at each place; without gradient."""
        found, order = self._parts(samples, lambda some: self._with_likeliest(some, steps, count))
        made = (torch.cat(arrays)[order] for arrays in zip(*found, strict=True))
        return Taught(*made)

    def energies(self, samples: Sequence[Sample], steps: int) -> Tensor:
        """(N, T) how strongly each sampled token pulls at its logits, 0 elsewhere; without gradient."""

        def compute(out: Tensor, target_M: Tensor) -> tuple[Tensor, ...]:
            logp_MV = self._scaled(self._logits(out)).log_softmax(-1)
            return (decision_energy(logp_MV.gather(-1, target_M[:, None])[:, 0], (2 * logp_MV).exp().sum(-1)),)

        def score(some: list[Sample]) -> Tensor:
            batch = self._packed(some, steps)
            (energy_M,) = self._tiled(compute, self._outputs(batch), batch.target_M)
            return _scattered(energy_M, batch.cell_M, (len(some), steps))

        found, order = self._parts(samples, score)
        return torch.cat(found)[order]

    def _parts(self, samples: Sequence[Sample], score: Callable[[list[Sample]], Found]) -> tuple[list[Found], Tensor]:
        """What `score` says of passes that fit, and the order that puts their rows back in place."""
        while True:
            parts = self.split(samples, self._without_gradient, self._halved)
            try:
                with torch.no_grad():
                    found = [score([samples[row] for row in rows]) for rows in parts]
                break
            except torch.OutOfMemoryError:
                if self.plan.divided or all(len(rows) == 1 for rows in parts):
                    raise
            self._halved += 1
        return found, torch.as_tensor([row for rows in parts for row in rows]).argsort().to(self.device)

    def split(self, samples: Sequence[Sample], limit: int | None, halvings: int = 0) -> list[Sequence[int]]:
        """Rows of passes of at most `limit` tokens; None: as many as are worth their memory."""
        if limit is None:
            limit, self._most_kept = self.chosen(samples)
        return fill(samples, max(limit >> halvings, 1), self._layout(samples))

    @property
    def packing(self) -> str:
        """How samples are laid out for the module."""
        return self.plan.packing

    def _layout(self, samples: Sequence[Sample]) -> str:
        """The same for these: rows with images are padded, for architectures place and mask such tokens by row."""
        return "padded" if pictured(samples) else self.packing

    def _packed(self, samples: Sequence[Sample], steps: int) -> PackedBatch:
        return pack(samples, steps, self._layout(samples), self.pad, self.device)

    @property
    def by_hand(self) -> bool:
        """Whether layers have a backward pass of their own."""
        return self.plan.layers is not None

    def chosen(self, samples: Sequence[Sample]) -> tuple[int, str]:
        """Tokens of a pass with gradient, and what is kept of it at most: as set, else the least that costs no time."""
        layers = self.plan.layers
        if self.set_budget is not None or self.device.type != "cuda":
            return self.set_budget or BUDGET.get(self.device.type, MODULE_TOKENS), KEEP[0]
        trained = [p for p in self.model.parameters() if p.requires_grad]
        coming = sum(p.numel() * p.element_size() for p in trained if p.grad is None)
        head = self.head.weight.numel() * 8 + 2 * memory.TILE_BYTES["cuda"]
        free = memory.IN_PIECES * memory.free_memory(self.device) - coming - head
        if layers is None:
            return self._through_the_module(free), KEEP[0]
        count, width = sum(p.numel() for p in self.model.parameters()), self.head.weight.shape[1]
        learned = sum(p.numel() for p in trained)
        gpu = memory.gpu_here(self.device)
        pace = memory.Pace.of(count, learned, len(layers.blocks), width, layers.blocks[0].out.width, gpu)
        way = memory.choose(memory.ways(layers, rows_of(samples), pace), free, ample=memory.AMPLE * gpu.memory)
        return way.tokens, way.keep

    def _through_the_module(self, free: float) -> int:
        """Tokens of a pass through the module itself: what its sizes say that fits, as far as they are known."""
        try:
            shape = replace(ModelShape.of(self.causal.config), kind="its own")
        except Unknown:
            return MODULE_TOKENS
        wide = next(self.body.parameters()).element_size()
        low = wide if self.autocast is None else self.autocast.itemsize
        whole = 3 * 4 * shape.vocabulary if self.plan.whole_logits else 0
        each = Setup(shape, memory.Rows(1, 1, 1, 1), wide=wide, low=low).kept_bytes(self.keep or KEEP[0]) + whole
        return int(min(max(free / each, 1), MODULE_TOKENS))

    @property
    def _without_gradient(self) -> int | None:
        """Tokens of a pass that keeps nothing, where memory decides."""
        if self.set_budget is not None or self.plan.layers is None:
            return None
        return memory.tokens_without_gradient(self.plan.layers, self.device)

    def precision(self) -> AbstractContextManager[Any]:
        """The arithmetic that sampling and scoring share: float32 weights in lower precision where that was asked."""
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)

    # --- the body ---------------------------------------------------------------------------------------------------

    def _hidden(self, batch: PackedBatch) -> Tensor:
        """(M, D) what the head reads."""
        if self.plan.layers is None or batch.segments is None:
            hidden_MD: Tensor = self.body(**self._arguments(batch)).last_hidden_state.flatten(0, 1)[batch.at_M]
            return hidden_MD
        tokens = batch.input_ids.shape[1]
        keep = self.keep or "input"
        if self.keep is None and torch.is_grad_enabled():
            keep = memory.most_to_keep(self.plan.layers, tokens, self.device, self._most_kept)
        if keep == HOSTED[0]:
            keep = self.plan.layers.host_level(tokens)
        return self.plan.layers(batch.input_ids[0], batch.position_ids[0], batch.segments, batch.at_M, keep)

    def _arguments(self, batch: PackedBatch) -> dict[str, Any]:
        """What the module is called with."""
        if batch.asked:
            beside = features.arguments(self.causal, batch.asked, batch.input_ids)
            return {"input_ids": batch.input_ids, "attention_mask": batch.real_NL, "use_cache": False} | beside
        given: dict[str, Any] = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
        if batch.sees is not None:
            given["attention_mask"] = self._mask(batch.sees)
        if batch.segments is not None:
            given |= segments.arguments(batch.segments)
        return given

    def _mask(self, sees: Tensor) -> Tensor:
        """What is added to attention scores."""
        dtype = next(self.body.parameters()).dtype
        if torch.is_autocast_enabled(self.device.type):
            dtype = torch.get_autocast_dtype(self.device.type)
        return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, torch.finfo(dtype).min)[
            :, None
        ]

    # --- the head ---------------------------------------------------------------------------------------------------

    def of_hidden(self, hidden_MD: Tensor, target_M: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        """(M,) log-probs and entropies behind hidden states; the log-probs twice where no entropy is asked for."""
        fused = self.plan.fused_head and self.vocabulary is None
        return (self._by_kernels if fused else self._by_tiles)(hidden_MD, target_M, entropy)

    def _by_kernels(self, hidden_MD: Tensor, target_M: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        head, adapter = unwrapped(self.head)
        logp_M, entropy_M = log_probs(
            hidden_MD, head.weight, target_M, self.temperature, bias_V=head.bias, adapter=adapter, entropy=entropy
        )
        return logp_M, logp_M if entropy_M is None else entropy_M

    def _by_tiles(self, hidden_MD: Tensor, target_M: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        made = self._tiled(lambda hidden, target: self._tile(hidden, target, entropy), hidden_MD, target_M)
        return made[0], made[1]

    def _tiled(self, compute: Callable[..., tuple[Tensor, ...]], *columns: Tensor) -> tuple[Tensor, ...]:
        """What `compute` says of all tokens, a tile of them at a time."""
        rows, sizes = self.head.weight.shape[0], memory.TILE_BYTES
        tile = max(sizes.get(self.device.type, sizes["cuda"]) // (4 * rows), 16)
        found = []
        for some in zip(*(torch.split(column, tile) for column in columns), strict=True):
            again = torch.is_grad_enabled()  # a tile's logits are not kept for the backward pass but computed again
            found.append(checkpoint(compute, *some, use_reentrant=False) if again else compute(*some))
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    def _tile(self, hidden_MD: Tensor, target_M: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        return self._of_logits(self.after_head(self.head(hidden_MD)), target_M, entropy)

    def _with_choices(self, batch: PackedBatch, choice_NTK: Tensor, entropy: bool) -> Scores:
        def compute(out: Tensor, target_M: Tensor, choice_MK: Tensor) -> tuple[Tensor, ...]:
            logits_MV = self._logits(out)
            logp_M, entropy_M = self._of_logits(logits_MV, target_M, entropy)
            scaled_MV = self._scaled(logits_MV)
            return logp_M, entropy_M, scaled_MV.gather(-1, choice_MK) - scaled_MV.logsumexp(-1, keepdim=True)

        shape, count = choice_NTK.shape[:2], choice_NTK.shape[2]
        chosen_MK = choice_NTK.to(self.device).flatten(0, 1)[batch.cell_M]
        logp_M, entropy_M, choice_MK = self._tiled(compute, self._outputs(batch), batch.target_M, chosen_MK)
        flat_NTK = torch.zeros(shape[0] * shape[1], count, dtype=choice_MK.dtype, device=self.device)
        return Scores(
            _scattered(logp_M, batch.cell_M, (shape[0], shape[1])),
            _scattered(entropy_M, batch.cell_M, (shape[0], shape[1])) if entropy else None,
            choice_logp_NTK=flat_NTK.index_copy(0, batch.cell_M, choice_MK).reshape(*shape, count),
        )

    def _with_likeliest(self, samples: list[Sample], steps: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        def compute(out: Tensor, target_M: Tensor) -> tuple[Tensor, ...]:
            logp_MV = self._scaled(self._logits(out)).log_softmax(-1)
            best_MK, choice_MK = logp_MV.topk(min(count, logp_MV.shape[-1]), -1)
            return logp_MV.gather(-1, target_M[:, None])[:, 0], choice_MK, best_MK

        batch = self._packed(samples, steps)
        logp_M, choice_MK, best_MK = self._tiled(compute, self._outputs(batch), batch.target_M)
        flat = [
            torch.zeros(len(samples) * steps, x.shape[1], dtype=x.dtype, device=x.device) for x in (choice_MK, best_MK)
        ]
        choice_LK, best_LK = (x.index_copy(0, batch.cell_M, y) for x, y in zip(flat, (choice_MK, best_MK), strict=True))
        shape = (len(samples), steps)
        logp_NT = _scattered(logp_M, batch.cell_M, shape)
        return logp_NT, choice_LK.reshape(*shape, -1), best_LK.reshape(*shape, -1)

    def _outputs(self, batch: PackedBatch) -> Tensor:
        """What `_logits` makes logits of: hidden states, or the module's own logits where its head is not known."""
        if not self.plan.whole_logits:
            return self._hidden(batch)
        logits_LV: Tensor = self.causal(**self._arguments(batch)).logits.flatten(0, 1)
        return logits_LV[batch.at_M]

    def _logits(self, out: Tensor) -> Tensor:
        return out if self.plan.whole_logits else self.after_head(self.head(out))

    def _scaled(self, logits_MV: Tensor) -> Tensor:
        logits_MV = logits_MV[:, : self.vocabulary]
        logits_MV = logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()
        return logits_MV if self.temperature == 1.0 else logits_MV / self.temperature

    def _of_logits(self, logits_MV: Tensor, target_M: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        logits_MV = self._scaled(logits_MV)
        total_M = logits_MV.logsumexp(-1)
        logp_M = logits_MV.gather(-1, target_M[:, None])[:, 0] - total_M
        if not entropy:
            return logp_M, logp_M
        p_MV = (logits_MV - total_M[:, None]).exp()
        return logp_M, total_M - (p_MV * logits_MV).sum(-1)


def _after_head(config: Any) -> Callable[[Tensor], Tensor]:
    """What known architectures do with their logits."""
    cap, scale = getattr(config, "final_logit_softcapping", None), getattr(config, "logit_scale", None)
    divide = getattr(config, "logits_scaling", None)

    def after(logits: Tensor) -> Tensor:
        if scale is not None:
            logits = logits * scale
        if divide is not None:
            logits = logits / divide
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return after


def rows_of(samples: Sequence[Sample]) -> memory.Rows:
    """What there is to learn from, on average."""
    groups = by_prompt(samples).values()
    prompts = sum(len(samples[block[0]].prompt.ids) for block in groups)
    made = sum(sample.length for sample in samples)
    return memory.Rows(len(groups), len(samples) / len(groups), prompts / len(groups), made / len(samples))


def _scattered(value_M: Tensor, cell_M: Tensor, shape: tuple[int, int]) -> Tensor:
    flat = torch.zeros(shape[0] * shape[1], dtype=value_M.dtype, device=value_M.device)
    return flat.scatter(0, cell_M, value_M).reshape(shape)
