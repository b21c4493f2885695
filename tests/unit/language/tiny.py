"""A model and a tokenizer of a few thousand numbers, made in milliseconds: everything real except the size."""

import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
SPECIAL = ["<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<unk>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_tokenizer(template: str | None = TEMPLATE, pad: str | None = "<pad>") -> PreTrainedTokenizerFast:
    """One token a character, and a chat template that preserves prefixes."""
    words = {word: i for i, word in enumerate([*SPECIAL, *CHARACTERS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[3:7]})
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(seed: int = 0, **settings: object) -> LlamaForCausalLM:
    """Two layers of width 32; grouped-query attention, so that a mistake there shows."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": len(SPECIAL) + len(CHARACTERS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**(shape | settings)))
    with torch.no_grad():  # louder than the initial weights, so that distributions differ from uniform
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model.eval()
