"""A causal language model as the policy: log-probs of sampled tokens, at the sampling temperature, in float32.

`[tokens, vocabulary]` is never built for more than a tile of tokens: the module's body gives hidden states, and its
head is applied tile by tile, computed again in the backward pass.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo.config import ConfigError
from grpo.errors import line
from grpo.language.samples import Prompt, Sample
from grpo.language.scoring import segments
from grpo.language.scoring.decoder_layout import KEEP, Unsupported
from grpo.language.scoring.head import fuses, log_probs
from grpo.language.scoring.packing import fill, pack
from grpo.rollouts import Rollouts, Scores

TILE_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Size of the float32 logits of one tile. On a CPU above the size from which memory goes back to the system at once."""
PROBES, PROBED = 12, 1 << 26
"""Weights whose gradients are compared when a way of packing is tried, and how large they may be."""
BUDGET = {"cpu": 4096}
"""Tokens of a pass unless the settings say otherwise; 32,768 elsewhere."""
TRUSTED, COARSE = 1e-2, 5e-2
"""Relative difference of log-probs and gradients that nobody asks about when a way to compute them is tried; and where
the weights themselves are so coarse that nothing exact is at hand to compare with."""
BACKEND = "inductor"
"""Of torch.compile."""
LEAST, MOST = 8192, 131_072
"""Tokens of a pass where memory decides: products are no faster with more, and not much slower with the least."""


class Scorer:
    """Log-probs of samples under one module."""

    def __init__(
        self,
        model: Any,
        temperature: float,
        packing: str = "auto",
        budget: int | None = None,
        pad: int = 0,
        autocast: torch.dtype | None = None,
    ) -> None:
        """autocast: the type that is computed in, where the weights are kept in a wider one."""
        self.model, self.temperature, self.pad, self.autocast = model, temperature, pad, autocast
        causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.body, self.head = causal.base_model, causal.get_output_embeddings()
        self._causal, self._after = causal, _after_head(causal.config.get_text_config())
        self.device = next(model.parameters()).device
        self.keep: str | None = None
        """What a layer keeps of a pass; None: as much as there is memory for. See `layers.KEEP`."""
        self.set_budget = budget
        """Tokens of a pass as the settings have it; None: the device and its memory decide."""
        self._halved = 0
        """Times that a pass without gradient ran out of memory."""
        self._layers: Any = None
        self._whole = not self._agrees()
        self._fused = not self._whole and self._fuses()
        self.packing = self._choose() if packing == "auto" else packing
        if self.packing == "segments":
            self._check_segments()
            self._layers = self._by_hand()
        if self._whole:
            warnings.warn(
                f"{type(causal).__name__} does more with its head than this room knows: its logits are made whole, "
                "which takes more memory",
                stacklevel=3,
            )

    def __call__(self, samples: Sequence[Sample], steps: int, entropy: bool = False) -> Scores:
        """(N, T) of the tokens that were sampled, 0 elsewhere."""
        batch = pack(samples, steps, self.packing, self.pad, self.device)
        arguments: dict[str, Any] = {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            "use_cache": False,
        }
        if batch.sees is not None:
            arguments["attention_mask"] = self._mask(batch.sees)
        if batch.segments is not None:
            arguments |= segments.arguments(batch.segments)
        if self._whole:
            out_LV = self._causal(**arguments).logits.flatten(0, 1)[batch.at_M]
            logp_M, entropy_M = self._of_logits(out_LV, batch.target_M, entropy)
        else:
            if self._layers is not None and batch.segments is not None:
                keep = self._keeps(batch.input_ids.shape[1])
                hidden_MD = self._layers(batch.input_ids[0], batch.position_ids[0], batch.segments, batch.at_M, keep)
            else:
                hidden_MD = self.body(**arguments).last_hidden_state.flatten(0, 1)[batch.at_M]
            logp_M, entropy_M = self._tiled(hidden_MD, batch.target_M, entropy)
        shape = (len(samples), steps)
        return Scores(
            _scattered(logp_M, batch.cell_M, shape), _scattered(entropy_M, batch.cell_M, shape) if entropy else None
        )

    def in_parts(self, samples: Sequence[Sample], steps: int, entropy: bool = False) -> Scores:
        """The same without gradient, in passes of at most `budget` tokens; out of memory: in smaller ones."""
        while True:
            parts = self.split(samples, None, self._halved)
            try:
                with torch.no_grad():
                    found = [self([samples[row] for row in rows], steps, entropy) for rows in parts]
                break
            except torch.OutOfMemoryError:
                if all(len(rows) == 1 for rows in parts):
                    raise
            self._halved += 1
        order = torch.as_tensor([row for rows in parts for row in rows]).argsort().to(self.device)
        entropy_NT = torch.cat([s.entropy_NT for s in found if s.entropy_NT is not None])[order] if entropy else None
        return Scores(torch.cat([s.logp_NT for s in found])[order], entropy_NT)

    def split(self, samples: Sequence[Sample], limit: int | None, halvings: int = 0) -> list[Sequence[int]]:
        """Rows of passes of at most `limit` tokens."""
        budget = max((limit or self.budget) >> halvings, 1)
        return fill(samples, budget, self.packing)

    @property
    def by_hand(self) -> bool:
        """Whether layers have a backward pass of their own."""
        return self._layers is not None

    @property
    def budget(self) -> int:
        """Tokens of a pass: as set, else what the memory that is free now allows without computing anything twice."""
        if self.set_budget is not None or self._layers is None:
            return self.set_budget or BUDGET.get(self.device.type, 32_768)
        each = self._layers.kept_bytes("everything") + self._layers.passing_bytes()
        return int(min(max(0.6 * free_memory(self.device) / each, LEAST), MOST))

    def _keeps(self, tokens: int) -> str:
        """As much of a pass as there is memory for."""
        if self.keep is not None or not torch.is_grad_enabled():
            return self.keep or "input"
        free = 0.9 * free_memory(self.device) - tokens * self._layers.passing_bytes() - 2 * TILE_BYTES["cuda"]
        return next((keep for keep in KEEP[:-1] if tokens * self._layers.kept_bytes(keep) < free), KEEP[-1])

    def _tiled(self, hidden_MD: Tensor, target_M: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        return (self._by_kernels if self._fused else self._by_tiles)(hidden_MD, target_M, entropy)

    def _by_kernels(self, hidden_MD: Tensor, target_M: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        weight, bias = self.head.weight, self.head.bias
        logp_M, entropy_M = log_probs(hidden_MD, weight, target_M, self.temperature, bias_V=bias, entropy=entropy)
        return logp_M, logp_M if entropy_M is None else entropy_M

    def _by_tiles(self, hidden_MD: Tensor, target_M: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        columns = self.head.weight.shape[0]
        tile = max(TILE_BYTES.get(self.device.type, TILE_BYTES["cuda"]) // (4 * columns), 16)
        found = []
        for hidden, target in zip(torch.split(hidden_MD, tile), torch.split(target_M, tile), strict=True):
            again = torch.is_grad_enabled()  # a tile's logits are not kept for the backward pass but computed again
            made = (
                checkpoint(self._of_hidden, hidden, target, entropy, use_reentrant=False)
                if again
                else self._of_hidden(hidden, target, entropy)
            )
            found.append(made)
        logp, entropies = zip(*found, strict=True)
        return torch.cat(logp), torch.cat(entropies)

    def _of_hidden(self, hidden_MD: Tensor, target_M: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        return self._of_logits(self._after(self.head(hidden_MD)), target_M, entropy)

    def _of_logits(self, logits_MV: Tensor, target_M: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        if logits_MV.dtype != torch.float64:
            logits_MV = logits_MV.float()
        if self.temperature != 1.0:
            logits_MV = logits_MV / self.temperature
        total_M = logits_MV.logsumexp(-1)
        logp_M = logits_MV.gather(-1, target_M[:, None])[:, 0] - total_M
        if not entropy:
            return logp_M, logp_M
        p_MV = (logits_MV - total_M[:, None]).exp()
        return logp_M, total_M - (p_MV * logits_MV).sum(-1)

    def _mask(self, sees: Tensor) -> Tensor:
        """What is added to attention scores."""
        dtype = next(self.body.parameters()).dtype
        if torch.is_autocast_enabled(self.device.type):
            dtype = torch.get_autocast_dtype(self.device.type)
        return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, torch.finfo(dtype).min)[
            :, None
        ]

    def _choose(self) -> str:
        """Packed where the attention implementation knows it, shared prompts where the model can, else padded."""
        config = self._causal.config
        if str(getattr(config, "_attn_implementation", "")).startswith("flash"):
            return "packed"
        text = config.get_text_config()
        if getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
            return "padded"
        if self.device.type == "cuda" and self._can("segments"):
            return "segments"
        return "shared" if self._can("shared") else "padded"

    def _can(self, packing: str) -> bool:
        """Whether completions that share a prompt get the numbers they get alone, on the way back, too.

        Not every architecture can, nor every build of torch.
        """
        learned = [p for p in self.model.parameters() if p.requires_grad and p.numel() < PROBED][:PROBES]
        prompts = [Prompt(0, [3, 4, 5], "", None), Prompt(1, [5, 3], "", None)]
        rows = [
            Sample(prompt, torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool), None, "eos", "")
            for prompt, ids in ((prompts[0], [4, 3]), (prompts[1], [3]), (prompts[0], [5, 4, 3]))
        ]
        found, former = [], self._attention
        exact = nullcontext() if self.autocast is None else torch.autocast(self.device.type, enabled=False)
        ways = (("padded", exact), ("padded", self.precision()), (packing, self.precision()))
        with mode_of(self.model, False):
            for name, precision in ways:
                self.packing = name
                self._attention = segments.INTERFACE if self.packing == "segments" else former
                try:
                    with torch.set_grad_enabled(bool(learned)), precision:
                        logp_NT = self(rows, 3).logp_NT
                        grads = torch.autograd.grad(logp_NT.sum(), learned, materialize_grads=True) if learned else ()
                except torch.OutOfMemoryError:
                    raise
                except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
                    return False
                finally:
                    self._attention = former
                found.append([logp_NT.detach(), *grads])
        # No further from float32 than a few times what rounding does to the module itself.
        gaps = [
            [float((a - b).norm() / (b.norm() + 1e-4)) for a, b in zip(way, found[0], strict=True)] for way in found
        ]
        coarse = self.autocast is None and next(self.body.parameters()).dtype.itemsize < 4
        return all(mine <= (COARSE if coarse else TRUSTED) + 3 * own for own, mine in zip(*gaps[1:], strict=True))

    @torch.enable_grad()
    def _fuses(self) -> bool:
        """Whether the fused head can be used: it is tried once, forward and back, beside the plain one."""
        width = self.head.weight.shape[1]
        random = torch.Generator().manual_seed(0)
        dtype = torch.float32 if self.autocast is not None else self.head.weight.dtype
        hidden = torch.randn(8, width, generator=random).to(self.device, dtype).requires_grad_()
        nothing = hidden[:0]
        if not fuses(self.head, hidden) or self._after(nothing) is not nothing:  # logits are the head's, unchanged
            return False
        target, found = torch.arange(8, device=self.device), []
        with self.precision():
            for way in (self._by_tiles, self._by_kernels):
                try:
                    logp, entropy = way(hidden, target, True)
                    grad = torch.autograd.grad((logp + entropy).sum(), hidden)[0]
                except Exception as error:  # a compiler may fail in any way
                    warnings.warn(f"log-probs without the fused head, which is slower: {line(error)}", stacklevel=4)
                    return False
                found.append((logp.detach(), entropy.detach(), grad.float()))
        same = all(bool((a - b).norm() <= 3e-2 * a.norm() + 1e-4) for a, b in zip(*found, strict=True))
        if not same:
            warnings.warn("log-probs without the fused head, which is slower: it gives other numbers", stacklevel=4)
        return same

    def _by_hand(self) -> Any:
        """The body with a backward pass of its own, where the layout is the common one; tried before it is used."""
        if self.device.type != "cuda" or self._whole or importlib.util.find_spec("triton") is None:
            return None
        from grpo.language.scoring.layers import Layers

        try:
            self._layers = Layers(self._causal, self.autocast or next(self.body.parameters()).dtype)
            if self._can("segments"):
                return self._layers
            warnings.warn("the update goes through the module, which is slower: by hand it gives other numbers",
                          stacklevel=4)  # fmt: skip
        except Unsupported:
            pass
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler may fail in any way
            warnings.warn(f"the update goes through the module, which is slower: {line(error)}", stacklevel=4)
        return None

    def _check_segments(self) -> None:
        """The module attends in segments from now on, wherever it is told of any."""
        if not self._can("segments"):
            raise ConfigError(
                "packing=segments needs a GPU, bfloat16 or float16, and a model whose attention goes through "
                "transformers' attention interface, without a window; use packing=auto"
            )
        self.packing, self._attention = "segments", segments.INTERFACE

    @property
    def _attention(self) -> Any:
        """What the module attends with."""
        return self._causal.config._attn_implementation_internal

    @_attention.setter
    def _attention(self, name: Any) -> None:
        for config in {id(c): c for c in (self._causal.config, self._causal.config.get_text_config())}.values():
            config._attn_implementation_internal = name

    def precision(self) -> AbstractContextManager[Any]:
        """The arithmetic that sampling and scoring share: float32 weights in lower precision where that was asked."""
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)

    @torch.no_grad()
    def _agrees(self) -> bool:
        """Whether head(body(x)) are the module's own logits; a module that looks ahead is refused here."""
        ids = torch.arange(4, device=self.device)[None] % self._causal.config.get_text_config().vocab_size
        with mode_of(self.model, False):
            own = self._causal(input_ids=ids, use_cache=False).logits
            other = self._causal(input_ids=ids * torch.tensor([1, 1, 1, 0], device=ids.device), use_cache=False).logits
            gap = (own - other)[:, :3].abs().max() / own.float().std().clamp(min=1e-6)
            if gap > (1e-4 if own.dtype in (torch.float32, torch.float64) else 2e-2):
                raise ConfigError(
                    f"{type(self._causal).__name__} is not a causal language model: what it predicts depends on later "
                    "tokens; name one that is trained to continue text"
                )
            try:
                hidden = self.body(input_ids=ids, use_cache=False).last_hidden_state
                mine = self._after(self.head(hidden))
            except (AttributeError, TypeError, RuntimeError):
                return False
        return mine.shape == own.shape and bool(torch.allclose(mine.float(), own.float(), rtol=1e-2, atol=1e-2))


class LanguagePolicy:
    """The trained module: what can be learned of it, and its log-probs."""

    def __init__(self, model: Any, scorer: Scorer, checkpointing: bool = False, compiling: bool = False):
        self.model, self.scorer = model, scorer
        self._compiled = self._compile() if compiling else {}
        self.version = 0
        without_dropout(model)
        if checkpointing:
            scorer.keep = KEEP[-1]
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def score(self, rows: Rollouts, entropy: bool = False) -> Scores:
        """Log-probs of the sampled tokens; with gradient in one pass, without in as many as they need."""
        steps = int(rows.mask_NT.shape[1])
        with self.precision():
            if torch.is_grad_enabled():
                return self.scorer(rows.inputs, steps, entropy)
            return self.scorer.in_parts(rows.inputs, steps, entropy)

    def parameters(self) -> Mapping[str, Tensor]:
        """What is trained: all weights, or an adapter's."""
        return self._parameters

    def split(self, rows: Rollouts, limit: int | None, halvings: int = 0) -> list[Sequence[int]]:
        """Parts of at most `limit` tokens, padding included."""
        return self.scorer.split(rows.inputs, limit, halvings)

    def precision(self) -> AbstractContextManager[Any]:
        """The arithmetic that sampling and scoring share: float32 weights in lower precision where that was asked."""
        return self.scorer.precision()

    def train(self) -> None:
        """Training mode, which gradient checkpointing needs; there is no dropout that it could switch on."""
        self.model.train()
        for module, call in self._compiled.items():
            module._compiled_call_impl = call

    def eval(self) -> None:
        """Before sampling."""
        self.model.eval()
        for module in self._compiled:  # sampling has ways of its own
            module._compiled_call_impl = None

    def _compile(self) -> dict[nn.Module, Any]:
        """Norms and MLPs, which are many small operations each; what a compiled one is called by."""
        if self.scorer.by_hand:
            raise ConfigError("torch_compile: this model's layers are written by hand for the update; leave it out")
        names = ("norm", "mlp")
        found = [m for name, m in self.model.named_modules() if name.rpartition(".")[2].lower().endswith(names)]
        if not found:
            raise ConfigError("torch_compile: the model has no part that is called mlp or norm; leave it out")
        return {m: torch.compile(m._call_impl, dynamic=True, backend=BACKEND) for m in found}


def free_memory(device: torch.device) -> int:
    """Bytes that could be taken, those included that torch holds and nobody uses."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def without_dropout(model: nn.Module) -> None:
    """Dropout 0 everywhere: a policy that is scored with other units than it sampled with is another policy."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "attn_dropout", "activation_dropout", "resid_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@contextmanager
def mode_of(model: nn.Module, training: bool) -> Iterator[None]:
    """The module in one mode, then in the one it was in."""
    before = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(before)


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


def _scattered(value_M: Tensor, cell_M: Tensor, shape: tuple[int, int]) -> Tensor:
    flat = torch.zeros(shape[0] * shape[1], dtype=value_M.dtype, device=value_M.device)
    return flat.scatter(0, cell_M, value_M).reshape(shape)
