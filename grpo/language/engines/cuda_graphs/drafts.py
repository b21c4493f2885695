"""What a sequence is expected to say, checked in one pass: each of its tokens is drawn as it would be step by step.

A draft is a guess. At each of its tokens the policy draws its own, with the very number that the step would use; as
long as both are the same the draft is right, and the first that is not is the policy's own token. So what comes out is
what decoding would have made, and a draft only decides how many steps that takes.

Letters: P rows of a pass, T their tokens, D tokens of a draft, M tokens of all drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from grpo.language.engines import Sampling
from grpo.language.engines.cuda_graphs.kernels import FIELDS, LIMIT, LIVE, ROW, STEP
from grpo.language.engines.cuda_graphs.model_runner import ModelRunner
from grpo.language.engines.cuda_graphs.reading import Reading, laid, together
from grpo.language.engines.cuda_graphs.sampler import Outputs, sample
from grpo.language.engines.sampling import Numbers

LOGITS = 2**28
"""That are there at a time."""


@dataclass(frozen=True)
class Draft(Reading):
    """Prompt and draft, but for the draft's last token, which nothing follows."""

    row: int = 0
    """Of the outputs."""
    guess: Sequence[int] = ()
    seed: int = 0


def verify(runner: ModelRunner, drafts: Sequence[Draft], sampling: Sampling) -> dict[int, int]:
    """Rows, and how many tokens of each are made: the right ones of its draft, and the policy's own behind them.

    Keys and values of the draft are in its blocks, tokens and log-probs among the outputs; what stands behind the last
    of them will be written over.
    """
    made: dict[int, int] = {}
    for some in together(drafts):
        hidden = runner.prefill(*laid(some), capture=False)
        assert hidden is not None and runner.buffers is not None
        kept = runner.buffers.outputs
        mine, steps = _drawn(runner, some, hidden, sampling), max(len(one.guess) for one in some)
        row_P = runner.sent(torch.tensor([one.row for one in some]))
        kept.made_RT[row_P, :steps], kept.logp_RT[row_P, :steps] = mine.made_RT, mine.logp_RT
        if sampling.truncates:
            kept.kept_RT[row_P, :steps] = mine.kept_RT
        guess_PD = torch.full((len(some), steps), -1, dtype=torch.int32)
        for p, one in enumerate(some):
            guess_PD[p, : len(one.guess)] = torch.tensor(one.guess)
        right_P = (mine.made_RT == runner.sent(guess_PD)).int().cumprod(1).sum(1).tolist()
        for one, right in zip(some, right_P, strict=True):
            made[one.row] = min(right + 1, len(one.guess))
            runner.counts.drafted += len(one.guess)
            runner.counts.accepted += right
    return made


def _drawn(runner: ModelRunner, some: Sequence[Draft], hidden_MD: Tensor, sampling: Sampling) -> Outputs:
    """The policy's own token at each place of the drafts."""
    decoder, device = runner.decoder, runner.device
    assert decoder is not None and runner.buffers is not None
    length, steps = max(len(one.ids) for one in some), max(len(one.guess) for one in some)
    numbers_PD = np.zeros((len(some), steps))
    at = []
    for p, one in enumerate(some):
        numbers_PD[p, : len(one.guess)] = Numbers(one.seed).next(len(one.guess))
        step = np.arange(len(one.guess))
        at.append(np.stack([p * length + one.first + step, np.full_like(step, p), step]))
    shape = len(some), steps
    out = replace(
        runner.buffers.outputs,
        made_RT=torch.full(shape, -2, dtype=torch.int32, device=device),
        logp_RT=torch.zeros(shape, device=device),
        kept_RT=torch.ones(shape, device=device),
        uniform_RW=runner.sent(torch.from_numpy(numbers_PD)),
        ended_R=torch.zeros(len(some), dtype=torch.int32, device=device),
        seen_SV=None,
    )
    at_3M = runner.sent(torch.from_numpy(np.concatenate(at, 1)))
    for part_3M in torch.split(at_3M, max(LOGITS // decoder.vocabulary, 1), 1):
        state_FM = torch.zeros(FIELDS, part_3M.shape[1], dtype=torch.int32, device=device)
        state_FM[LIVE], state_FM[LIMIT] = 1, 2**30
        state_FM[ROW], state_FM[STEP] = part_3M[1].int(), part_3M[2].int()
        sample(decoder.logits(hidden_MD[part_3M[0]]), sampling, state_FM, out)
    return out
