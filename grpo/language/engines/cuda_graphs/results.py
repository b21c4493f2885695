"""What the sequences of a rollout have said, brought to the host beside the steps that are being computed.

Letters: N sequences, T their tokens, W some of them.
"""

from __future__ import annotations

import math
from collections import abc
from typing import Any

import torch
from torch import Tensor

from grpo.language.engines import Completion, Sampling, Stop
from grpo.language.engines.cuda_graphs.model_runner import ModelRunner
from grpo.language.engines.cuda_graphs.sampler import ENDED_BY_EOS, Outputs
from grpo.language.engines.cuda_graphs.sequence import Sequence
from grpo.language.engines.sampling import StopTexts


class Results:
    """Of one rollout."""

    def __init__(self, runner: ModelRunner, outputs: Outputs, sampling: Sampling, rows: int) -> None:
        self._runner, self._outputs, self._sampling = runner, outputs, sampling
        cuda = runner.device.type == "cuda"
        self._copies = torch.cuda.Stream(runner.device) if cuda else None  # type: ignore[no-untyped-call]
        self.stops = StopTexts(runner.tokens.tokenizer, sampling.stop) if sampling.stop else None
        self._looked = [0] * rows
        """Tokens of each sequence in which stop texts have been looked for."""
        self.stopped: dict[int, int] = {}
        """Sequences that a stop text has ended, and their lengths."""
        self.ended: dict[int, int] = {}
        """Sequences whose end the device does not know, as it would write it down."""
        outputs.ended_R.zero_()
        outputs.kept_RT.fill_(1.0)

    def find_stops(self, seated: abc.Sequence[tuple[Sequence, int]]) -> None:
        """Note the sequences that have come to a stop text, and where; each with the tokens it has."""
        seated = [(sequence, steps) for sequence, steps in seated if steps > self._looked[sequence.number]]
        if self.stops is None or not seated:
            return
        tail = self.stops.tail
        first = [max(self._looked[one.number] - tail, 0) for one, _ in seated]
        width = max(steps - start for (_, steps), start in zip(seated, first, strict=True))
        made = self.windows([one.number for one, _ in seated], first, width)
        ends = [(k, t) for k, (one, steps) in enumerate(seated) for t in range(self._looked[one.number] + 1, steps + 1)]
        texts = [made[k, max(0, t - tail - first[k]) : t - first[k]].tolist() for k, t in ends]
        for (k, t), reached in zip(ends, self.stops.reached(texts), strict=True):
            if reached:
                self.stopped.setdefault(seated[k][0].number, t)
        for sequence, steps in seated:
            self._looked[sequence.number] = steps

    def completions(self, sequences: abc.Sequence[Sequence]) -> list[Completion]:
        """Of those that have ended."""
        at, out = [one.number for one in sequences], self._outputs
        # Nothing of what lies behind their ends: rows may be allowed to be far longer than they are.
        longest = max(one.steps for one in sequences)
        made, logp, kept = (x[:, :longest] for x in (out.made_RT, out.logp_RT, out.kept_RT))
        made, logp, kept, ended = self._fetched(at, made, logp, kept, out.ended_R)
        found = zip(at, made.long(), logp, kept, ended.tolist(), strict=True)
        return [self._completion(n, ids, logps, share, self.ended.get(n, code)) for n, ids, logps, share, code in found]

    def ids(self, sequences: abc.Sequence[Sequence]) -> list[list[int]]:
        """What those have said that have ended."""
        at, longest = [one.number for one in sequences], max(one.steps for one in sequences)
        made, ended = self._fetched(at, self._outputs.made_RT[:, :longest], self._outputs.ended_R)
        found = zip(at, made, ended.tolist(), strict=True)
        return [ids[: self._end(number, self.ended.get(number, code))[0]].tolist() for number, ids, code in found]

    def _end(self, number: int, code: int) -> tuple[int, Stop]:
        """A sequence's length, and why it ended."""
        length = code >> 2
        reason: Stop = "eos" if code & 3 == ENDED_BY_EOS else "length"
        stopped = self.stopped.get(number)
        if stopped is not None and (not length or stopped < length or reason == "length"):
            return stopped, "stop"
        return length, reason

    def _completion(self, number: int, made_T: Tensor, logp_T: Tensor, kept_T: Tensor, code: int) -> Completion:
        length, reason = self._end(number, code)
        logp_T = logp_T[:length]
        if not math.isfinite(float(logp_T.sum())):
            raise FloatingPointError("the model's logits are not finite: its weights hold NaN or infinity, or overflow")
        share: float | None = 1.0
        if self._sampling.temperature == 0.0:
            share = None
        elif self._sampling.truncates:
            share = float(kept_T[:length].mean())
        self._runner.counts.tokens += length
        return Completion(made_T[:length], logp_T, reason, share)

    def said(self, sequence: Sequence) -> list[int]:
        """Its tokens so far, where no step is being computed."""
        (made,) = self._fetched([sequence.number], self._outputs.made_RT[:, : sequence.steps])
        ids: list[int] = made[0].tolist()
        return ids

    def windows(self, at: abc.Sequence[int], first: abc.Sequence[int], width: int) -> Tensor:
        """(N, W) so many tokens of each of these sequences, from a place of its own on."""
        made_RT = self._outputs.made_RT
        with torch.cuda.stream(self._copies):  # none where there is no GPU
            at_N, first_N = self._sent(at), self._sent(first)
            where_NW = first_N[:, None] + torch.arange(width, device=made_RT.device)
            return made_RT[at_N[:, None], where_NW.clamp(max=made_RT.shape[1] - 1)].cpu()

    def _fetched(self, at: abc.Sequence[int], *wanted: Tensor) -> tuple[Tensor, ...]:
        """These sequences' rows of the outputs; beside the steps that are being computed, not behind them."""
        with torch.cuda.stream(self._copies):
            at_N = self._sent(at)
            return tuple(tensor[at_N].cpu() for tensor in wanted)

    def _sent(self, values: Any) -> Tensor:
        return self._runner.sent(torch.as_tensor(values, dtype=torch.long))
