"""Tiny random models of several families, for what must work for any of them."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "llama-mha": lambda: LlamaConfig(**SHAPE | {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"}),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=12),
    "gemma2": lambda: Gemma2Config(**SHAPE, sliding_window=12, query_pre_attn_scalar=16),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, sliding_window=12, query_pre_attn_scalar=16),
    "phi3": lambda: Phi3Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"}),
    "gpt2": lambda: GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256, eos_token_id=2),
}
FAMILIES = [name for name in CONFIGS if name != "gpt2"]
"""Those whose attention goes through transformers' attention interface."""
FUSED = ("llama", "llama-mha", "qwen2", "qwen3", "mistral")
"""Those of the common layout."""


def family(name: str, seed: int = 0):
    """A model whose logits are far apart, so that rounding does not choose the token."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        CONFIGS[name](), attn_implementation="eager" if name == "gemma2" else "sdpa"
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(std=0.3)
    return model.eval()
