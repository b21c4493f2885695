"""Shapes of published models, for random weights: the arguments of their configurations."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "max_position_embeddings": 1_048_576, "rope_theta": 1e6}
"""With room for rows that are longer than the 40,960 tokens which the published ones are for."""
SHAPES: dict[str, dict[str, Any]] = {
    "qwen17": {
        **QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen06": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen4": {
        **QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen8": {
        **QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "qwen32": {
        **QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "llama3b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_theta": 5e5,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}
SMOLLM: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
"""Of SmolLM2-135M, which is measured with its real weights."""


def vocabulary(model: str, tiny: bool = False) -> int:
    """How many tokens a model knows."""
    if tiny:
        return TINY["vocab_size"]
    return SHAPES[model]["vocab_size"] if model in SHAPES else SMOLLM["vocab_size"]
