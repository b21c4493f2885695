"""A tiny model with random weights and its processor, made from local pieces, for each layout of image-text models."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers.models.smolvlm import processing_smolvlm

from grpo.language.pictures.processor import without_videos

CONTROL = (
    "<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>", "<image>", "<video>", "<boi>", "<eoi>", "<|vision_start|>",
    "<|vision_end|>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4)),
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789.,:?!\n<>|_"
WIDTH, LAYERS = 32, 2

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS_ONLY = TEMPLATE.replace("{% if m['content'] is string %}{{ m['content'] }}{% else %}", "").replace(
    "{% endfor %}{% endif %}<|im_end|>", "{% endfor %}<|im_end|>"
)
"""As SmolVLM's: a message is a list of parts, and what is given as text alone is left out."""

LAYOUTS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "idefics3", "smolvlm", "llava_next")


def tokenizer_of(**tokens: str) -> Any:
    """A token a letter, and the control tokens of all layouts."""
    words = {word: i for i, word in enumerate([*CONTROL, *LETTERS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    make: Any = transformers.PreTrainedTokenizerFast
    tokenizer = make(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", extra_special_tokens=tokens
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(CONTROL[3:])})
    return tokenizer


def text_sizes(**more: Any) -> dict[str, Any]:
    """Of a tiny decoder."""
    return {
        "vocab_size": len(CONTROL) + len(LETTERS),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    } | more


def make(layout: str, seed: int = 0) -> tuple[Any, Any]:
    """The model and its processor."""
    if layout == "smolvlm" and processing_smolvlm.num2words is None:
        processing_smolvlm.num2words = str  # for videos alone
    torch.manual_seed(seed)
    model, processor = globals()[f"_{layout}"]()
    return model.eval(), processor


def _written(mark: str, template: str = TEMPLATE) -> str:
    return template.replace("IMAGE", mark)


def _qwen(kind: str) -> tuple[Any, Any]:
    t: Any = transformers
    tokenizer = tokenizer_of(image_token="<image>", video_token="<video>")
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[kind]
    vision = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": WIDTH,
        "intermediate_size": 64, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": WIDTH}
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    if kind != "qwen3_vl":
        text = text_sizes(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]})
    else:
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
        text = text_sizes(
            head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        )
    config = getattr(t, f"{name}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=CONTROL.index("<image>"),
        video_token_id=CONTROL.index("<video>"),
        vision_start_token_id=CONTROL.index("<|vision_start|>"),
        vision_end_token_id=CONTROL.index("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    model = getattr(t, f"{name}ForConditionalGeneration")(config)
    images = t.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 4096}
    )
    mark = "<|vision_start|><image><|vision_end|>"
    return model, without_videos(getattr(t, f"{name}Processor"))(images, tokenizer, chat_template=_written(mark))


def _qwen2_vl() -> tuple[Any, Any]:
    return _qwen("qwen2_vl")


def _qwen2_5_vl() -> tuple[Any, Any]:
    return _qwen("qwen2_5_vl")


def _qwen3_vl() -> tuple[Any, Any]:
    return _qwen("qwen3_vl")


def _gemma3() -> tuple[Any, Any]:
    t: Any = transformers
    tokenizer = tokenizer_of(image_token="<image>", boi_token="<boi>", eoi_token="<eoi>")
    config = t.Gemma3Config(
        text_config=text_sizes(head_dim=8, sliding_window=64, layer_types=["sliding_attention", "full_attention"]),
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 4,
        },
        mm_tokens_per_image=4,
        image_token_index=CONTROL.index("<image>"),
        boi_token_index=CONTROL.index("<boi>"),
        eoi_token_index=CONTROL.index("<eoi>"),
    )  # fmt: skip
    images = t.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    processor = t.Gemma3Processor(images, tokenizer, chat_template=_written("<boi>"), image_seq_length=4)
    model = t.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)  # else it is 0
    return model, processor


def _gemma4() -> tuple[Any, Any]:
    t: Any = transformers
    audio = {"audio_token": "<video>", "boa_token": "<|vision_start|>", "eoa_token": "<|vision_end|>"}
    tokenizer = tokenizer_of(image_token="<image>", boi_token="<boi>", eoi_token="<eoi>", **audio)
    size = len(CONTROL) + len(LETTERS)
    config = t.Gemma4Config(
        text_config=text_sizes(
            vocab_size=size + 1, head_dim=8, global_head_dim=8, sliding_window=64, hidden_size_per_layer_input=0,
            num_kv_shared_layers=0, layer_types=["sliding_attention", "full_attention"],
        ),
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        audio_config=None,
        image_token_id=CONTROL.index("<image>"),
        boi_token_id=CONTROL.index("<boi>"),
        eoi_token_id=CONTROL.index("<eoi>"),
        audio_token_id=CONTROL.index("<video>"),
        boa_token_id=CONTROL.index("<|vision_start|>"),
        eoa_token_index=CONTROL.index("<|vision_end|>"),
        video_token_id=size,  # the processor adds it
    )  # fmt: skip
    images = t.Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    kind = without_videos(t.Gemma4Processor)
    return t.Gemma4ForConditionalGeneration(config), kind(None, images, tokenizer, chat_template=_written("<image>"))


def _idefics(name: str) -> tuple[Any, Any]:
    t: Any = transformers
    config = getattr(t, f"{name}Config")(
        text_config=text_sizes(model_type="llama"),
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 4,
        },
        scale_factor=2,
        image_token_id=CONTROL.index("<image>"),
        pad_token_id=0,
    )  # fmt: skip
    images = getattr(t, f"{name}ImageProcessorPil")(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    template = _written("<image>", PARTS_ONLY)
    kind = getattr(t, f"{name}Processor")
    processor = without_videos(kind)(images, tokenizer_of(), chat_template=template, image_seq_len=4)
    return getattr(t, f"{name}ForConditionalGeneration")(config), processor


def _idefics3() -> tuple[Any, Any]:
    return _idefics("Idefics3")


def _smolvlm() -> tuple[Any, Any]:
    return _idefics("SmolVLM")


def _llava_next() -> tuple[Any, Any]:
    t: Any = transformers
    config = t.LlavaNextConfig(
        text_config=text_sizes(model_type="llama"),
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
            "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "projection_dim": 32,
        },
        image_token_index=CONTROL.index("<image>"),
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
        image_seq_length=16,
    )  # fmt: skip
    images = t.LlavaNextImageProcessorPil(
        size={"shortest_edge": 16},
        crop_size={"height": 16, "width": 16},
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
    )
    processor = t.LlavaNextProcessor(
        images,
        tokenizer_of(image_token="<image>"),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_written("<image>"),
    )
    return t.LlavaNextForConditionalGeneration(config), processor
