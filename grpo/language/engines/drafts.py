"""What a completion is expected to be, checked in one pass of the model: each token is drawn as a step would draw it.

A draft is a guess. At each of its tokens the policy draws its own, with the very number that the step would use; as
long as both are the same the draft is right, and the first that is not is the policy's own token. So what comes out is
what sampling step by step would have made, whatever the draft.

Letters: D tokens of a draft, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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


def begun(
    forward: Callable[[Sequence[int], int], Tensor],
    prompt: Sequence[int],
    draft: Sequence[int],
    sampling: Sampling,
    seed: int,
    eos: Collection[int],
    stops: StopTexts | None,
) -> Begun:
    """What is known of a completion with this seed. forward: (D, V) logits behind each of the last D tokens.

    The draft is no longer than the completion may be; where it is as long, that is the end.
    """
    draft = up_to_end(draft, eos)
    logits_DV = forward([*prompt, *draft[:-1]], len(draft))
    drawn = draw(logits_DV, sampling, uniforms([seed], len(draft))[0].to(logits_DV.device))
    ids_D = drawn.token_N.cpu()
    right = int((ids_D == torch.tensor(draft)).int().cumprod(0).sum())
    made = min(right + 1, len(draft))
    stop: Stop = "eos" if int(ids_D[made - 1]) in eos else "length"
    if stops is not None:
        ends = [ids_D[max(0, t - stops.tail) : t].tolist() for t in range(1, made + 1)]
        at = next((t for t, reached in enumerate(stops.reached(ends), 1) if reached), None)
        if at is not None and (at < made or stop != "eos"):
            made, stop, right = at, "stop", min(right, at)
    kept = None if sampling.temperature == 0.0 else 1.0 if drawn.kept_N is None else float(drawn.kept_N[:made].mean())
    whole = Completion(ids_D[:made], drawn.logp_N[:made].float().cpu(), stop, kept)
    return Begun(whole, right, over=stop != "length")
