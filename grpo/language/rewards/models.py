"""Reward models: sequence classifiers with one label, scored in this process, a batch at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo.errors import ConfigError, line
from grpo.language.model.damage import expect_whole, flaw_in

if TYPE_CHECKING:
    from grpo.language.samples import Sample

BATCH = 16
"""Texts in one forward pass."""


class RewardModel:
    """A sequence classifier with its own tokenizer, called like a batched reward function.

    Chats go through its tokenizer's chat template, bare text is prompt + completion. A text that the model cannot read
    whole fails: cutting it would judge something else.
    """

    runs_here = True
    """Not in a worker: its weights are not sent around."""

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self.__name__ = name
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        if tokenizer.pad_token_id is None:
            # Not the end of sequence where it can be avoided: causal classifiers look for the last token that is no
            # padding, and a chat ends in that very token.
            tokenizer.pad_token = tokenizer.unk_token or tokenizer.bos_token or tokenizer.eos_token
        if tokenizer.pad_token_id is None:
            raise ConfigError(f"reward model {name}: its tokenizer has no token to pad with; set tokenizer.pad_token")
        getattr(model.config, "get_text_config", lambda: model.config)().pad_token_id = tokenizer.pad_token_id
        self._longest = getattr(model.config, "max_position_embeddings", None)

    @classmethod
    def load(cls, given: Any, tokenizer: Any, device: str, trust_remote_code: bool) -> RewardModel:
        """From an id, a folder or a loaded model."""
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        path = given if isinstance(given, str) else str(getattr(given.config, "_name_or_path", "") or "")
        name = os.path.basename(path.rstrip("/")) or type(given).__name__
        try:
            if isinstance(given, str):
                _expect_classifier(AutoConfig.from_pretrained(given, trust_remote_code=trust_remote_code), given)
                given, info = AutoModelForSequenceClassification.from_pretrained(
                    given,
                    trust_remote_code=trust_remote_code,
                    dtype=torch.float32 if device == "cpu" else "auto",
                    output_loading_info=True,
                )
                expect_whole("reward", path, info, "Name a model that was trained to judge")
                given = given.to(device)
            elif getattr(given.config, "num_labels", None) != 1:
                raise ConfigError(
                    f"reward model {name}: {type(given).__name__} is not a sequence classifier with one label"
                )
            if tokenizer is None and not path:
                raise ConfigError(f"reward model {name}: give its tokenizer in reward_processing_classes")
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (ConfigError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # damaged bytes make of a decoder whatever they like
            raise ConfigError(
                f"reward {path!r} is no built-in reward, no file.py:name or module:name, and no model that can be "
                f"loaded ({flaw_in(Path(path)) or line(error)})"
            ) from error
        return cls(given, tokenizer, name)

    def check(self, samples: Sequence[Sample]) -> None:
        """Refuse chats that its tokenizer has no template for."""
        if not self.tokenizer.chat_template and any(sample.prompt.messages is not None for sample in samples):
            raise ConfigError(
                f"reward model {self.__name__}: the data are chats, but its tokenizer has no chat template; pass a "
                "tokenizer that has one in reward_processing_classes, or set skip_apply_chat_template"
            )

    @torch.no_grad()
    def __call__(self, prompts: list[Any], completions: list[str], completion_messages: list[Any]) -> list[Any]:
        """A reward a sample, or what is wrong with it."""
        ids_N = [
            self._ids(prompt, text, said)
            for prompt, text, said in zip(prompts, completions, completion_messages, strict=True)
        ]
        found: list[Any] = [None] * len(ids_N)
        fits = []
        for row, ids in enumerate(ids_N):
            if self._longest is not None and len(ids) > self._longest:
                found[row] = ValueError(f"{len(ids)} tokens, and the model reads {self._longest}")
            else:
                fits.append(row)
        fits.sort(key=lambda row: len(ids_N[row]))  # less padding
        for first in range(0, len(fits), BATCH):
            rows = fits[first : first + BATCH]
            padded = self.tokenizer.pad(
                {"input_ids": [ids_N[row] for row in rows]}, padding_side="right", return_tensors="pt"
            ).to(self.model.device)
            logits = self.model(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"]).logits
            for row, value in zip(rows, logits[:, 0].float().tolist(), strict=True):
                found[row] = value
        return found

    def _ids(self, prompt: Any, text: str, said: list[Any]) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt + text)["input_ids"])
        whole = self.tokenizer.apply_chat_template([*prompt, *said], tokenize=False)
        return list(self.tokenizer(whole, add_special_tokens=False)["input_ids"])


def _expect_classifier(config: Any, given: str) -> None:
    kinds = [*(getattr(config, "architectures", None) or []), *(getattr(config, "auto_map", None) or {})]
    if not any("ForSequenceClassification" in kind for kind in kinds):
        raise ConfigError(
            f"reward model {given} is not a sequence classifier (it is {', '.join(kinds) or 'of no known kind'}); a "
            "reward model has AutoModelForSequenceClassification's head with one label"
        )
    if config.num_labels != 1:
        raise ConfigError(f"reward model {given} has {config.num_labels} labels; a reward model has one")
