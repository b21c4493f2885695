"""A few tokens that vLLM and the module both score: weights that did not arrive show in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from grpo.language.engines.inline import evaluating, head_of
from grpo.language.engines.vllm.requests import Answer, Request
from grpo.language.scoring.head import unrounded

ECHO = 0.2
"""Nats by which vLLM may be off the median token. Seen: 0.04 in bfloat16, 3 with a head that no push reached."""
PROBE = [1, 2, 3]
"""Not 0: often the padding, whose embedding is zero."""


def probes(temperature: float = 1.0) -> list[Request]:
    """What is asked."""
    settings = {"temperature": temperature, "max_tokens": 8, "logprobs": 0, "ignore_eos": True}
    return [(PROBE, {**settings, "seed": seed}) for seed in range(4)]


def gap_of(model: nn.Module, answers: Sequence[Answer], scale: float = 1.0) -> float:
    """Nats between recorded log-probs and the module's, by the median token; `scale`: divides its logits."""
    gaps = []
    with torch.no_grad(), evaluating(model), unrounded(head_of(model)):
        for answer in answers:
            ids = torch.tensor([*PROBE, *answer.ids]).to(next(model.parameters()).device)
            logits_TV = model(input_ids=ids[None]).logits[0, len(PROBE) - 1 : -1].float() / scale
            logp = logits_TV.log_softmax(-1).gather(-1, ids[len(PROBE) :, None])[:, 0].cpu()
            gaps.append(logp - torch.tensor(answer.logp))
    return float(torch.cat(gaps).abs().median())  # in bfloat16 a single token can be off by ten


def told(gap: float) -> str:
    """What is said of a gap that is too large."""
    return f"vLLM's log-probs are {gap:.2f} away from the model's: it does not run this model as it is trained"
