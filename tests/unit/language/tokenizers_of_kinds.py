"""Small tokenizers of the kinds that models have: bytes in GPT-2's letters, SentencePiece with single bytes."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grpo.language.data.pieces import BYTE, SPACE
from tests.unit.language.tiny import CHARACTERS

TEXTS = [
    "12+34=46",
    "the answer is 46",
    "die Antwort ist größer",
    "日本語 🙂 ok",
    "  two  spaces\n\nlines",
    "äöü ß é 🙂🙂",
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _wrapped(made: Tokenizer, template: str | None = None) -> PreTrainedTokenizerFast:
    special = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "additional_special_tokens": ["<|im_start|>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    tokenizer.chat_template = template
    return tokenizer


def of_bytes(merges: int = 40, template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as Qwen's and SmolLM2's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=256 + merges, initial_alphabet=letters))
    made.add_special_tokens(["<pad>", "<|im_start|>", "<|im_end|>"])
    made.add_tokens([AddedToken("<tool>", special=False)])
    return _wrapped(made, template)


def of_sentencepiece(template: str | None = None) -> PreTrainedTokenizerFast:
    """BPE over characters with a space's own sign and bytes to fall back on, as Llama 2's and Gemma's."""
    letters = sorted({*"".join(TEXTS[:2]).replace(" ", SPACE)})
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, SPACE + "t", "he", SPACE + "the", "46"]
    assert BYTE.fullmatch(words[1])
    merges = [(SPACE, "t"), ("h", "e"), (SPACE + "t", "he"), ("4", "6")]
    model = models.BPE({word: i for i, word in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<pad>", "<|im_start|>", "<|im_end|>"])
    return _wrapped(made, template)


def of_pairs() -> PreTrainedTokenizerFast:
    """The characters of `tiny_tokenizer`, and a token for each pair of digits."""
    digits = "0123456789"
    words = ["<unk>", *CHARACTERS, *(a + b for a in digits for b in digits)]
    merges = [(a, b) for a in digits for b in digits]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges, unk_token="<unk>"))
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<pad>", "<|im_start|>", "<|im_end|>"])
    return _wrapped(made)
