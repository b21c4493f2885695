"""What published scripts load by name, as folders of those names: tiny models, and a few rows of each data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, Image, Value
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.unit.language.pictures import drawn, layouts
from tests.unit.language.tiny import CHARACTERS, SPECIAL, tiny_tokenizer

MARKS = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n# Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "What is 2+2?",
    "Name a colour.",
    "Who was Ada?",
    "Is it dark?",
    "Say a word.",
    "Count to 3.",
    "Where?",
    "When?",
]
TEXT_MODELS = {"Qwen/Qwen2.5-0.5B-Instruct": 96, "Qwen/Qwen3-0.6B": 4096}
"""With the tokens that each can read: the first answers shortly."""
VISION_MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"


def fill(folder: Path, template: str = TEMPLATE) -> Path:
    """Everything that the scripts name, below the folder."""
    for name, context in TEXT_MODELS.items():
        _text_model(folder / name, template, context)
    model, processor = layouts.make("qwen2_5_vl")
    model.save_pretrained(folder / VISION_MODEL)
    processor.save_pretrained(folder / VISION_MODEL)
    asked = [[{"role": "user", "content": text}] for text in TEXTS]
    _rows(folder / "trl-lib/ultrafeedback-prompt", [{"prompt": prompt} for prompt in asked])
    solved = [{"prompt": prompt, "solution": f"${i}$"} for i, prompt in enumerate(asked)]
    _rows(folder / "trl-lib/DeepMath-103K", solved)
    features = Features({"image": Image(), "problem": Value("string"), "solution": Value("string")})
    seen = [{"image": drawn.noise(i), "problem": f"what is {i}?", "solution": "abc"} for i in range(8)]
    place = folder / "lmms-lab/multimodal-open-r1-8k-verified"
    place.mkdir(parents=True)
    Dataset.from_list(seen, features=features).to_parquet(place / "train.parquet")
    return folder


def _text_model(place: Path, template: str, context: int) -> None:
    tokenizer = tiny_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.eos_token = MARKS[1]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(SPECIAL) + len(CHARACTERS) + len(MARKS), hidden_size=16, intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=context,
        pad_token_id=0, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = Qwen3ForCausalLM(config)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)


def _rows(place: Path, rows: list[dict[str, Any]]) -> None:
    place.mkdir(parents=True)
    (place / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def offer(folder: Path, here: Path, monkeypatch: Any) -> None:
    """Work in `here`, where the names that scripts load are found."""
    for name in ("Qwen", "trl-lib", "lmms-lab"):
        (here / name).symlink_to(folder / name)
    monkeypatch.chdir(here)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(here / "cache"))
