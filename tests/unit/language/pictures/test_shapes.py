"""The built-in task with pictures: rows that have none in common, and a model from scratch that reads them."""

from collections import Counter

import torch

from grpo.language.data.chat import Chat
from grpo.language.data.prompts import Prompts
from grpo.language.pictures.features import arguments
from grpo.language.pictures.processor import Pictures
from grpo.language.tasks import built_in


def test_pictures_of_the_two_splits_differ_and_the_model_sees_them() -> None:
    task = built_in("shapes")
    train, test = task.rows("train"), task.rows("test")
    assert len(test) == 300 and len(train) == 2700
    assert {row["prompt"] for row in train} == {"where?"}, "the picture alone tells"
    assert max(Counter(row["answer"] for row in test).values()) < 60
    model, processor = task.tiny(0)
    chat = Chat(processor.tokenizer, pictures=Pictures(processor))
    prompts = Prompts(test[:4], chat)
    ids = torch.tensor([list(prompt.ids) for prompt in prompts.first()])
    assert ids.shape == (4, 9 + len("where?"))
    rows = [prompt.ids for prompt in prompts.first()]
    with torch.no_grad():
        logits = model(input_ids=ids, **arguments(model, rows, ids)).logits[:, -1]
    assert (logits[0] - logits[1]).abs().max() > 1e-4
