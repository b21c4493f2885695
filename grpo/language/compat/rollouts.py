"""TRL's `rollout_func(prompts, trainer)`: a function of the user's that makes the completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from grpo.errors import ConfigError
from grpo.language.engines import Engine, Sampling, Tokens, in_groups
from grpo.language.players import Groups, Player
from grpo.language.samples import Prompt, Sample

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
MADE = "env_mask"
"""1 for tokens that the model chose, 0 for those of others; not required."""


class RolloutFunction(Player):
    """Asks the function for all completions of a step at once, each prompt as often as it is to be answered.

    It returns lists with an entry for each prompt it got: prompt_ids, completion_ids, logprobs, if it likes env_mask;
    whatever else it returns reaches the reward functions as columns.
    """

    trainer: Any = None
    """Handed to the function; the trainer that this player belongs to."""

    def __init__(self, function: Callable[[list[Any], Any], Mapping[str, Any]], tokens: Tokens) -> None:
        self._function, self._tokens = function, tokens

    def __call__(
        self, engine: Engine, prompts: Sequence[Prompt], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> Groups:
        """`count` samples of each prompt."""
        each = [prompt for prompt in prompts for _ in range(count)]
        found = self._function([prompt.shown for prompt in each], self.trainer)
        self._check(found, len(each))
        texts = self._tokens.tokenizer.batch_decode(found["completion_ids"], skip_special_tokens=True)
        made = [self._sample(prompt, found, i, texts[i], engine.exact) for i, prompt in enumerate(each)]
        yield from in_groups(made, count)

    def _check(self, found: Any, count: int) -> None:
        if not isinstance(found, Mapping):
            raise ConfigError(f"rollout_func returns a dict of {', '.join(REQUIRED)}, got {type(found).__name__}")
        if missing := [name for name in REQUIRED if name not in found]:
            raise ConfigError(f"rollout_func must return keys {', '.join(missing)}; it returned {', '.join(found)}")
        for name in REQUIRED:
            if len(found[name]) != count:
                raise ConfigError(
                    f"rollout_func got {count} prompts, each as often as it is to be answered, and returned "
                    f"{len(found[name])} {name}; return one for each"
                )

    def _sample(self, prompt: Prompt, found: Mapping[str, Any], i: int, text: str, exact: bool) -> Sample:
        ids, mask = [int(token) for token in found["completion_ids"][i]], found.get(MADE)
        made = torch.ones(len(ids), dtype=torch.bool) if mask is None else torch.tensor(mask[i]).bool()
        if not ids or len(made) != len(ids) or len(found["logprobs"][i]) != len(ids):
            raise ConfigError(
                f"rollout_func: completion {i} has {len(ids)} tokens, {len(made)} marks in {MADE} and "
                f"{len(found['logprobs'][i])} logprobs; give one for each token, and at least one token"
            )
        more = {name: value[i] if isinstance(value, list) else value for name, value in found.items()
                if name not in (*REQUIRED, MADE)}  # fmt: skip
        ended = ids[-1] in self._tokens.eos | {self._tokens.pad}
        return Sample(
            prompt=replace(prompt, ids=[int(t) for t in found["prompt_ids"][i]], columns={**prompt.columns, **more}),
            ids=torch.tensor(ids),
            made=made,
            # Those of a function of its own need not be the trained module's: they are computed again.
            logp=None if exact else torch.tensor([float(value) for value in found["logprobs"][i]]),
            stop="eos" if ended else "length",
            text=text,
            messages=({"role": "assistant", "content": text},),
        )
