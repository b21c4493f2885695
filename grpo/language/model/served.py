"""A teacher behind vLLM's port: it is sent the tokens that were sampled and says how likely each was to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from grpo.config import ConfigError
from grpo.errors import Unanswered, warn
from grpo.language.config import LanguageConfig
from grpo.language.port import Port
from grpo.language.samples import Sample
from grpo.rollouts import Taught

AT_ONCE = 64
"""Rows that are asked for at a time; a server batches them itself."""
TEXT = "Wörter, numbers 0123456789 and\n\tspaces"
PROBES = 256
"""Tokens, spread over the vocabulary, whose text is compared."""


class TeacherPort(Port):
    """The server that `teacher` names."""

    setting = "teacher"
    late = "start it (vllm serve TEACHER --port 8000), or raise teacher_timeout"

    def __str__(self) -> str:
        return f"teacher={self.url}"

    def remedy(self, path: str, problem: str) -> str:
        """How it is served with as many choices of a token as are wanted."""
        told = "logprob" in problem.lower()
        return (
            "; serve it with --max-logprobs of teacher_top_k at least, or lower that" if told else "; see its own log"
        )


class ServedReader:
    """Log-probs of samples by the model of a server, `vllm serve TEACHER`."""

    def __init__(self, config: LanguageConfig, tokenizer: Any, vocabulary: int) -> None:
        """vocabulary: tokens in the student's head."""
        self.vocabulary = vocabulary
        if config.temperature != 1:
            raise ConfigError(
                f"a teacher on a server gives log-probs at temperature 1, and the student samples at "
                f"{config.temperature:g}; set temperature=1, or give the teacher as a folder"
            )
        self._port = TeacherPort(str(config.teacher), config.teacher_timeout)
        self._name, context = self._port.served()
        self.context = float(context)
        self._expect_same_tokens(tokenizer)

    def read(self, samples: Sequence[Sample], steps: int, count: int) -> Taught:
        """Of the sampled tokens and of the `count` likeliest at each place; NaN for rows that are too long for it."""
        width = min(count, self.vocabulary)
        logp_NT = torch.full((len(samples), steps), float("nan"))
        choice_NTK = torch.zeros(len(samples), steps, width, dtype=torch.int64)
        choice_logp_NTK = torch.zeros(len(samples), steps, width)
        fit = [row for row, sample in enumerate(samples) if len(sample.prompt.ids) + sample.length < self.context]
        if len(fit) < len(samples):
            warn(
                f"{len(samples) - len(fit)} rows are longer than the teacher's context ({self.context:g} tokens) and "
                "have none; serve it with a larger --max-model-len",
            )
        pool = ThreadPoolExecutor(min(len(fit), AT_ONCE) or 1)
        try:
            answers = pool.map(lambda row: self._said(samples[row], width), fit)
            for row, found in zip(fit, answers, strict=True):
                made = samples[row].made.tolist()
                for step, (logp, best) in enumerate(found):
                    logp_NT[row, step] = logp if made[step] else 0.0
                    for k, (token, value) in enumerate(best):
                        choice_NTK[row, step, k], choice_logp_NTK[row, step, k] = token, value
        finally:
            pool.shutdown(cancel_futures=True)
        return Taught(logp_NT, choice_NTK, choice_logp_NTK) if count else Taught(logp_NT)

    def _said(self, sample: Sample, width: int) -> list[tuple[float, list[tuple[int, float]]]]:
        """Of each token of the completion its log-prob and the likeliest ones."""
        ids = [*map(int, sample.prompt.ids), *sample.ids.tolist()]
        asked = {"model": self._name, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": width}
        answer = self._port.call("/v1/completions", asked)
        try:
            told = answer["choices"][0]["prompt_logprobs"]
            if len(told) != len(ids):
                raise ValueError(f"{len(told)} numbers for {len(ids)} tokens")
            first = len(sample.prompt.ids)
            found = [_of(told[at], ids[at], width) for at in range(first, len(ids))]
            if beyond := [token for _, best in found for token, _ in best if token >= self.vocabulary]:
                raise ValueError(f"token {beyond[0]} among the likeliest, which the student does not have")
            return found
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise Unanswered(
                f"{self._port} answered without the log-probs of its prompt ({error}); it must be vLLM, with "
                "prompt log-probs (`vllm serve TEACHER`), and nothing between that cuts answers short"
            ) from None

    def _expect_same_tokens(self, tokenizer: Any) -> None:
        """The student's text and tokens must be the teacher's."""
        spread = sorted({*range(0, len(tokenizer), max(len(tokenizer) // PROBES, 1)), len(tokenizer) - 1})
        own = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        asked = {"model": self._name, "prompt": TEXT, "add_special_tokens": False}
        text = (self._port.call("/tokenize", asked, optional=True) or {}).get("tokens")
        asked = {"model": self._name, "tokens": spread}
        said = (self._port.call("/detokenize", asked, optional=True) or {}).get("prompt")
        if text is None or said is None:
            warn(
                f"{self._port} does not say how it reads text (/tokenize, /detokenize): whether its tokens are "
                "the student's could not be compared",
            )
            return
        if text != own or said != tokenizer.decode(spread):
            raise ConfigError(
                f"{self._port} ({self._name}) has another vocabulary: it reads {TEXT!r} as {str(text)[:60]}, "
                f"the student as {str(own)[:60]}; serve a teacher of the same family, with the same tokenizer, or give "
                "this one as a folder: a model that is loaded here is aligned by text"
            )


def _of(told: dict[str, Any], token: int, width: int) -> tuple[float, list[tuple[int, float]]]:
    """What is said of one place: the token that stands there, and the likeliest."""
    own = float(told[str(token)]["logprob"])
    ranked = sorted((int(found["rank"]), int(key), float(found["logprob"])) for key, found in told.items())
    best = [(key, logp) for _, key, logp in ranked[:width]]
    if len(best) < width:
        raise ValueError(f"{len(best)} of the {width} likeliest tokens")
    if not all(map(math.isfinite, (own, *(logp for _, logp in best)))):
        raise ValueError("a log-prob that is no finite number")
    return own, best
