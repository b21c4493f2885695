"""Drawn pictures in which a shape is to be found, and a small image-text model of our own, from scratch, to learn it.

A picture has 3 × 3 fields and a shape in one of them; the answer is the number of the field. The question is always the
same: without the picture nobody can do better than one in nine.
"""

from __future__ import annotations

import random
from typing import Any

from grpo.language.pictures.reading import pillow

FIELD, SIDE = 8, 3
"""Pixels of a field, and fields of a side: the model sees a field as one token."""
ROWS = 3000
GREY = (128, 128, 128)
"""The background, which the processor makes 0 of: a model with random weights then sees where something is."""
CHARACTERS = "wher?0123456789"
MARK = "<image>"
LOUD = 25.0
"""Times that the places of fields are louder than transformers begins them; else the pictures drown them."""


def rows() -> list[dict[str, Any]]:
    """Every field as often as the others; shape, colour and exact place as drawn."""
    return [_row(number) for number in range(ROWS)]


def _row(number: int) -> dict[str, Any]:
    drawn, field = random.Random(number), number % (SIDE * SIDE)
    image = pillow().new("RGB", (SIDE * FIELD, SIDE * FIELD), GREY)
    pen = pillow("ImageDraw").Draw(image)
    x, y = field % SIDE * FIELD + drawn.randint(0, 2), field // SIDE * FIELD + drawn.randint(0, 2)
    box = (x, y, x + drawn.randint(4, 5), y + drawn.randint(4, 5))
    colour = tuple(drawn.choice((drawn.randint(0, 60), drawn.randint(196, 255))) for _ in range(3))
    shape = drawn.choice((pen.ellipse, pen.rectangle))
    shape(box, fill=colour)
    return {"prompt": "where?", "image": image, "answer": str(field + 1)}


def tiny(tokenizer: Any, vocabulary: int, seed: int) -> tuple[Any, Any]:
    """A LLaVA of about 220,000 numbers with random weights, and its processor."""
    import torch
    import transformers

    made: Any = transformers
    tokenizer.add_special_tokens({"additional_special_tokens": [MARK]})
    width, whole, half = 64, {"height": SIDE * FIELD, "width": SIDE * FIELD}, [0.5, 0.5, 0.5]
    config = made.LlavaConfig(
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": width, "intermediate_size": 2 * width,
            "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": SIDE * FIELD, "patch_size": FIELD,
            "projection_dim": width,
        },
        text_config={
            "model_type": "llama", "vocab_size": vocabulary + 1, "hidden_size": width, "intermediate_size": 4 * width,
            "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64,
            "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
        },
        image_token_index=tokenizer.convert_tokens_to_ids(MARK),
        image_seq_length=SIDE * SIDE,
        vision_feature_layer=-1,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = made.LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, torch.nn.Linear):  # 0.02, made for wide models, lets too little of a picture through
                torch.nn.init.normal_(part.weight, std=part.in_features**-0.5)
        model.model.vision_tower.embeddings.position_embedding.weight.mul_(LOUD)
        model.model.vision_tower.embeddings.patch_embedding.weight.mul_(3.0)
    images = made.CLIPImageProcessorPil(size=whole, crop_size=whole, image_mean=half, image_std=half)
    processor = made.LlavaProcessor(
        images, tokenizer, patch_size=FIELD, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return model, processor
