"""A causal language model as the policy: what can be learned of it, and the log-probs of what it sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from grpo.config import ConfigError
from grpo.language.scoring.decoder_layout import HOSTED, KEEP
from grpo.language.scoring.modes import without_dropout
from grpo.language.scoring.scorer import Scorer
from grpo.rollouts import Rollouts, Scores

BACKEND = "inductor"
"""Of torch.compile."""


class LanguagePolicy:
    """The trained module: what can be learned of it, and its log-probs."""

    def __init__(
        self,
        model: Any,
        scorer: Scorer,
        checkpointing: bool = False,
        compiling: bool = False,
        offloading: bool = False,
    ) -> None:
        self.model, self.scorer = model, scorer
        self._compiled = self._compile() if compiling else {}
        self.version = 0
        without_dropout(model)
        if checkpointing:
            scorer.keep = KEEP[-1]
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if offloading:
            if not scorer.by_hand:
                raise ConfigError(
                    "activation_offloading needs a GPU and a model whose layers are written by hand for the update "
                    "(the layout of Llama, Mistral and Qwen); gradient_checkpointing saves memory of any other"
                )
            scorer.keep = HOSTED[0]
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def score(self, rows: Rollouts, entropy: bool = False) -> Scores:
        """Log-probs of the sampled tokens; with gradient in one pass, without in as many as they need."""
        steps = int(rows.mask_NT.shape[1])
        with self.precision():
            if torch.is_grad_enabled():
                return self.scorer(rows.inputs, steps, entropy, rows.choice_NTK)
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
