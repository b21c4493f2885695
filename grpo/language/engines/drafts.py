"""What a completion is expected to be, checked in one pass of the model: each token is drawn as a step would draw it.

A draft is a guess. At each of its tokens the policy draws its own, with the very number that the step would use; as
long as both are the same the draft is right, and the first that is not is the policy's own token. So what comes out is
what sampling step by step would have made, whatever the draft.

Letters: N rows, T their tokens, D tokens of a draft, M of all drafts, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo.language.engines import Completion, Sampling, Stop
from grpo.language.engines.sampling import StopTexts, draw, uniforms


@dataclass(frozen=True)
class Begun:
    """A completion as far as a draft has brought it."""

    made: Completion
    right: int
    """Tokens of the draft in it."""
    over: bool
    """Whether it has ended with them; if not, the reason it gives means nothing."""

    def with_rest(self, rest: Completion) -> Completion:
        """With what was sampled behind it."""
        mine, kept = self.made, rest.kept
        assert mine.logp is not None and rest.logp is not None
        ids, logp = torch.cat([mine.ids, rest.ids]), torch.cat([mine.logp, rest.logp])
        if mine.kept is not None and rest.kept is not None:
            kept = (mine.kept * len(mine.ids) + rest.kept * len(rest.ids)) / len(ids)
        return Completion(ids, logp, rest.stop, kept)


def up_to_end(ids: Sequence[int], eos: Collection[int]) -> Sequence[int]:
    """Nothing of a draft behind the first token that would end it."""
    return ids[: next((at + 1 for at, token in enumerate(ids) if token in eos), len(ids))]


@dataclass(frozen=True)
class Draft:
    """What a completion of a prompt with this seed may turn out to be; no longer than it may be."""

    row: int
    prompt: Sequence[int]
    ids: Sequence[int]
    seed: int


def begun(
    forward: Callable[[Tensor], Tensor],
    drafts: Sequence[Draft],
    sampling: Sampling,
    eos: Collection[int],
    stops: StopTexts | None,
) -> dict[int, Begun]:
    """What is known of each row. forward: (N, T, V) logits behind tokens, which are padded on the right."""
    read = [torch.tensor([*draft.prompt, *draft.ids[:-1]]) for draft in drafts]
    logits_NTV = forward(pad_sequence(read, batch_first=True))
    parts = [logits_TV[len(x) - len(d.ids) : len(x)] for logits_TV, x, d in zip(logits_NTV, read, drafts, strict=True)]
    numbers_M = torch.cat([uniforms([draft.seed], len(draft.ids))[0] for draft in drafts])
    drawn = draw(torch.cat(parts), sampling, numbers_M.to(logits_NTV.device))
    sizes = [len(draft.ids) for draft in drafts]
    kept_M = torch.ones(len(numbers_M)) if drawn.kept_N is None else drawn.kept_N.cpu()
    found = (torch.split(x, sizes) for x in (drawn.token_N.cpu(), drawn.logp_N.float().cpu(), kept_M))
    greedy = sampling.temperature == 0.0
    return {
        draft.row: _up_to_the_first_wrong(draft, ids_D, logp_D, None if greedy else kept_D, eos, stops)
        for draft, ids_D, logp_D, kept_D in zip(drafts, *found, strict=True)
    }


def _up_to_the_first_wrong(
    draft: Draft,
    ids_D: Tensor,
    logp_D: Tensor,
    kept_D: Tensor | None,
    eos: Collection[int],
    stops: StopTexts | None,
) -> Begun:
    """What the policy drew at the places of a draft, as far as it would have come there."""
    right = int((ids_D == torch.tensor(draft.ids)).int().cumprod(0).sum())
    made = min(right + 1, len(ids_D))
    stop: Stop = "eos" if int(ids_D[made - 1]) in eos else "length"
    if stops is not None:
        ends = [ids_D[max(0, t - stops.tail) : t].tolist() for t in range(1, made + 1)]
        at = next((t for t, reached in enumerate(stops.reached(ends), 1) if reached), None)
        if at is not None and (at < made or stop != "eos"):
            made, stop, right = at, "stop", min(right, at)
    kept = None if kept_D is None else float(kept_D[:made].mean())
    return Begun(Completion(ids_D[:made], logp_D[:made], stop, kept), right, over=stop != "length")
