"""What the scripts of this folder share: one tiny model, a few rows, and a way to run a step or two in a blink."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from grpo.language import GRPOConfig, GRPOTrainer
from grpo.language.engines import Completion, Engine, in_groups
from tests.unit.language.tiny import CHARACTERS, SPECIAL, tiny_tokenizer

TEXTS = ["Better than", "Explicit is", "Simple is", "Complex", "Flat is", "Sparse is"]
STANDARD = Dataset.from_dict({"prompt": TEXTS})
CHATS = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in TEXTS]})


@cache
def _base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_shape()))


def _shape(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(SPECIAL) + len(CHARACTERS), "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def model() -> LlamaForCausalLM:
    """A fresh copy of the one that all start from."""
    return copy.deepcopy(_base())


@cache
def tokenizer() -> Any:
    """One token a character."""
    return tiny_tokenizer()


@cache
def judge() -> LlamaForSequenceClassification:
    """A reward model."""
    torch.manual_seed(1)
    return LlamaForSequenceClassification(LlamaConfig(**_shape(num_labels=1)))


def _here() -> Any:
    """A reward that differs between most completions; made in a function, so that it runs in this process."""

    def spread(completions: list[Any], **columns: Any) -> list[float]:
        return [float(sum(map(ord, str(completion))) % 97) for completion in completions]

    return spread


spread = _here()


def settings(tmp_path: Any, **more: Any) -> GRPOConfig:
    """TRL's words for a step of three completions."""
    plain = {"output_dir": str(tmp_path / "run"), "learning_rate": 0.1, "per_device_train_batch_size": 3,
             "num_generations": 3, "max_completion_length": 8, "max_steps": 1, "report_to": "none",
             "save_strategy": "no", "use_cpu": True, "preflight": False}  # fmt: skip
    return GRPOConfig(**plain | more)


def trainer(
    tmp_path: Any, *, rewards: Any = spread, data: Any = STANDARD, given: Any = None, **more: Any
) -> GRPOTrainer:
    """A script's trainer; `more`: settings in TRL's words; `given`: further arguments of the constructor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        beside = {"model": model(), "processing_class": tokenizer()} | (given or {})
        return GRPOTrainer(reward_funcs=rewards, args=settings(tmp_path, **more), train_dataset=data, **beside)


def train(made: GRPOTrainer, **how: Any) -> GRPOTrainer:
    """Run it, in silence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.train(progress=None, **how)
    return made


def moved(made: GRPOTrainer, before: dict[str, torch.Tensor]) -> set[str]:
    """The weights that are others now."""
    return {name for name, p in made.model.named_parameters() if name in before and not torch.equal(p, before[name])}


def weights(made: GRPOTrainer) -> dict[str, torch.Tensor]:
    """As they are."""
    return {name: p.detach().clone() for name, p in made.model.named_parameters()}


def learns(made: GRPOTrainer) -> GRPOTrainer:
    """Train it, and see that all trainable weights have moved and that the log ends with the run's loss."""
    before = {name: p.detach().clone() for name, p in made.model.named_parameters() if p.requires_grad}
    train(made)
    assert made.state.log_history[-1]["train_loss"] is not None
    assert moved(made, before) == set(before)
    return made


class Said(Engine):
    """An engine that says what a test wants: `turns[n]` are the texts of turn n, one a conversation, in turn."""

    name, exact, repeatable, context = "said", False, True, 2048

    def __init__(self, *turns: list[str]) -> None:
        self.turns, self.asked = turns, []

    def generate(self, prompts: Any, count: int, sampling: Any, seeds: Any) -> list[Completion]:
        rows = len(prompts) * count
        self.asked.append([tokenizer().decode(list(ids)) for ids in prompts])
        texts = next((turn for turn in self.turns if len(turn) == rows), self.turns[-1])
        made = []
        for number in range(rows):
            ids = tokenizer()(texts[number % len(texts)], add_special_tokens=False)["input_ids"]
            made.append(Completion(torch.tensor([*ids, 2][: sampling.max_new_tokens]), None, "eos"))
        return made

    def stream(self, prompts: Any, count: int, sampling: Any, seeds: Any) -> Any:
        return in_groups(self.generate(prompts, count, sampling, seeds), count)

    def refresh(self, version: int = 0) -> None: ...
