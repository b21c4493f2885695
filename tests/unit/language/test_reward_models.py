"""Reward models: classifiers of a few thousand numbers, made here."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from grpo.config import ConfigError
from grpo.language.rewards import Rewards
from grpo.language.samples import Prompt, Sample
from tests.faults import reward_functions as functions
from tests.unit.language.tiny import tiny_model, tiny_tokenizer

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def classifier(kind="llama", labels=1, **settings):
    torch.manual_seed(0)
    shape = {**SMALL, "vocab_size": len(tiny_tokenizer()), "num_labels": labels, "pad_token_id": None, **settings}
    if kind == "bert":
        model = BertForSequenceClassification(BertConfig(**shape))
    else:
        model = LlamaForSequenceClassification(LlamaConfig(**shape, num_key_value_heads=1))
    with torch.no_grad():  # louder, so that texts differ by more than rounding
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10.0)
    return model.eval()


def sample(prompt, text, row=0):
    messages = None if isinstance(prompt, str) else prompt
    ids = torch.tensor([1])
    return Sample(
        Prompt(row, [1], str(prompt), messages),
        ids,
        torch.ones_like(ids, dtype=torch.bool),
        None,
        "eos",
        text,
        [{"role": "assistant", "content": text}],
    )


def alone(model, tokenizer, text):
    """The reward of one text by itself: no padding, nothing to get wrong."""
    with torch.no_grad():
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, 0].item()


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("pad", ["<pad>", None])
def test_a_batch_scores_each_text_as_it_would_alone(kind, pad):
    """Also where the tokenizer has no padding and chats end in the end-of-sequence token."""
    model, tokenizer = classifier(kind), tiny_tokenizer(pad=pad)
    texts = ["4", "a much longer answer", "no", "x" * 40]
    chat = [{"role": "user", "content": "2+2?"}]
    expected = [alone(model, tokenizer, "2+2?" + text) for text in texts]
    expected_chats = [alone(model, tokenizer, f"<|user|>2+2?<eos><|assistant|>{text}<eos>") for text in texts]
    with Rewards([model], processing_classes=tokenizer) as rewards:
        bare = rewards.judge([sample("2+2?", text) for text in texts], 0).parts_NK[:, 0]
        chats = rewards.judge([sample(chat, text) for text in texts], 0).parts_NK[:, 0]
    assert bare == pytest.approx(expected, abs=1e-4)
    assert chats == pytest.approx(expected_chats, abs=1e-4)
    assert len(set(bare.round(3)) | set(chats.round(3))) == 8


def test_a_folder_is_a_reward_beside_plain_functions(tmp_path):
    model, tokenizer = classifier(), tiny_tokenizer()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "judge-tiny")
    folder = str(tmp_path / "judge-tiny")
    with Rewards([functions.length, folder], processing_classes=[object(), None], workers=1, timeout=60) as rewards:
        judgement = rewards.judge([sample("2+2?", "four")], 0)
    assert rewards.names == ("length", "judge-tiny")
    assert judgement.parts_NK[0].tolist() == pytest.approx([4.0, alone(model, tokenizer, "2+2?four")], abs=1e-4)
    assert judgement.metrics["rewards/judge-tiny/mean"] == judgement.parts_NK[0, 1]


def test_a_text_that_does_not_fit_fails_alone():
    model = classifier("bert", max_position_embeddings=16)
    with Rewards([model], processing_classes=tiny_tokenizer()) as rewards:
        judgement = rewards.judge([sample("2+2?", "x" * 20), sample("2+2?", "4")], 0)
    assert judgement.errors.keys() == {0}
    assert "24 tokens, and the model reads 16" in judgement.errors[0]


def test_a_model_without_a_classifiers_head_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path / "causal")
    classifier(labels=3).save_pretrained(tmp_path / "three")
    for given, error in (
        (str(tmp_path / "causal"), r"causal is not a sequence classifier \(it is LlamaForCausalLM\)"),
        (str(tmp_path / "three"), "has 3 labels; a reward model has one"),
        (tiny_model(), "LlamaForCausalLM is not a sequence classifier with one label"),
    ):
        with pytest.raises(ConfigError, match=error):
            Rewards([given], processing_classes=tiny_tokenizer())


def test_a_tokenizer_is_asked_for_where_there_is_none():
    with pytest.raises(ConfigError, match="give its tokenizer in reward_processing_classes"):
        Rewards([classifier()])
    with (
        Rewards([classifier()], processing_classes=tiny_tokenizer(template=None)) as rewards,
        pytest.raises(ConfigError, match="has no chat template; pass a tokenizer"),
    ):
        rewards.judge([sample([{"role": "user", "content": "2+2?"}], "4")], 0)


def test_a_word_that_names_nothing_says_all_it_could_have_been(tmp_path):
    with pytest.raises(ConfigError, match=r"no built-in reward, no file\.py:name or module:name, and no model"):
        Rewards([str(tmp_path / "nothing" / "here")])
