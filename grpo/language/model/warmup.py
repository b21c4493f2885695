"""Supervised steps on the rows' own answers before the first GRPO step: a model made from scratch knows no words."""

from __future__ import annotations

import torch
from rich.progress import track

from grpo.config import ConfigError
from grpo.language.config import LanguageConfig
from grpo.language.data.prompts import Prompts
from grpo.language.engines import Tokens
from grpo.language.samples import Prompt, Sample
from grpo.language.scoring.policy import LanguagePolicy
from grpo.optimizers import AdamW


def warm_start(policy: LanguagePolicy, prompts: Prompts, tokens: Tokens, config: LanguageConfig) -> None:
    """Fit the answers (column `demonstration` where there is one, else `answer`) with AdamW of its own."""
    optimizer = AdamW(policy.parameters().values(), lr=config.warm_start_learning_rate, weight_decay=0.0)
    policy.train()
    total = config.warm_start_steps
    for step in track(range(total), "warm start", transient=True):
        rows = prompts.batch(step, config.warm_start_batch)
        samples = [demonstration(row, tokens) for row in rows]
        steps = max(sample.length for sample in samples)
        for group in optimizer.param_groups:  # to zero at the end, so that the last batches do not decide
            group["lr"] = config.warm_start_learning_rate * (1 - step / total)
        with policy.precision():
            logp_NT = policy.scorer(samples, steps).logp_NT
        loss = -logp_NT.sum() / sum(int(sample.made.sum()) for sample in samples)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(policy.parameters().values()), 1.0)
        optimizer.step()
    optimizer.zero_grad()
    policy.version += 1


def demonstration(prompt: Prompt, tokens: Tokens) -> Sample:
    """The row's answer as if it had been sampled, ended as answers end."""
    text = prompt.columns.get("demonstration", prompt.columns.get("answer"))
    if text is None:
        raise ConfigError(f"warm_start_steps: row {prompt.row} has neither an answer nor a demonstration to learn from")
    ids = tokens.tokenizer(str(text), add_special_tokens=False)["input_ids"]
    ids_T = torch.tensor([*ids, tokens.end], dtype=torch.int64)
    made_T = torch.ones(len(ids_T), dtype=torch.bool)
    return Sample(prompt=prompt, ids=ids_T, made=made_T, logp=None, stop="eos", text=str(text))
