"""Image-text models in TRL's scripts: every layout learns, alone and with what its scripts add; images are logged."""

import copy
import sys
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from grpo.config import ConfigError
from tests.compat.scripts import Said, learns, spread, train, trainer
from tests.unit.language.pictures import drawn, layouts

ASKED = [{"role": "user", "content": "what is it?"}]
ONE = Dataset.from_list([{"prompt": ASKED, "image": drawn.noise(i)} for i in range(3)])
SEVERAL = Dataset.from_list([{"prompt": ASKED, "images": [drawn.noise(i), drawn.noise(i + 9)]} for i in range(3)])
UNUSED = {
    "gemma3": ("vision_tower.head.",),
    "llava_next": ("layers.2.", "post_layernorm"),
    "qwen3_vl": ("deepstack_merger_list.1.",),
}
"""Parts that a layout has and does not use: what the last decoder layer adds to an image's places, nobody reads."""


@cache
def made(layout):
    return layouts.make(layout)


def seeing(tmp_path, layout="qwen2_5_vl", data=ONE, given=None, **more):
    model, processor = made(layout)
    beside = {"model": copy.deepcopy(model), "processing_class": processor} | (given or {})
    return trainer(tmp_path, rewards=spread, data=data, given=beside, **more)


@pytest.mark.parametrize("layout", ["gemma3", "gemma4", "llava_next", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
def test_every_layout_learns(tmp_path, layout):
    """All of it where that is asked for, the tower too."""
    trained = seeing(tmp_path, layout, train_vision=True)
    before = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
    train(trained)
    assert trained.state.log_history[-1]["train_loss"] is not None
    stayed = {name for name, p in trained.model.named_parameters() if torch.equal(p, before[name])}
    assert stayed == {name for name in before if any(part in name for part in UNUSED.get(layout, ()))}


@pytest.mark.parametrize(
    "more",
    [
        {"pad_to_multiple_of": 7},
        {"beta": 0.1},
        {"steps_per_generation": 2, "num_generations": 6},
        {"use_liger_kernel": True},
    ],
    ids=lambda more: next(iter(more)),
)
def test_settings_beside_images_learn(tmp_path, more):
    learns(seeing(tmp_path, "gemma3", **more))


def test_several_images_in_a_prompt_are_learned_from(tmp_path):
    learns(seeing(tmp_path, data=SEVERAL))


@pytest.mark.parametrize("asked", ["peft_config", "lora_rank"])
def test_an_adapter_learns_and_its_base_stays(tmp_path, asked):
    """By our own setting on the decoder alone; a configuration of PEFT's says by itself where."""
    given = {"peft_config": LoraConfig(target_modules=["q_proj", "v_proj"])} if asked == "peft_config" else None
    trained = seeing(tmp_path, "gemma3", given=given, **({} if given else {"lora_rank": 4}))
    before = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
    train(trained)
    moved = {name for name, p in trained.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_B" in name}  # the other factor has no gradient at first
    assert any("vision_tower" in name for name in moved) == (asked == "peft_config")


def test_the_tower_stays_as_it_is_unless_the_settings_say_otherwise(tmp_path):
    trained = seeing(tmp_path)
    tower = {name for name, p in trained.model.named_parameters() if not p.requires_grad}
    assert tower and all("visual" in name for name in tower)
    learns(trained)


class Table:
    def __init__(self, dataframe):
        self.dataframe = dataframe


@pytest.mark.parametrize("log_multimodal", [True, False])
def test_images_are_logged_unless_they_are_not_wanted(tmp_path, monkeypatch, log_multimodal):
    sent = []
    tracker = SimpleNamespace(run=object(), Table=Table, Image=lambda image: image.size, log=sent.append)
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    train(seeing(tmp_path, log_completions=True, log_multimodal=log_multimodal, sample_every=1))
    (logged,) = (one["completions"].dataframe for one in sent if "completions" in one)
    assert ("image" in logged) == log_multimodal
    assert not log_multimodal or logged["image"].tolist() == [[(24, 16)]] * 3
    assert bool(list((tmp_path / "run" / "samples").glob("image-*.png"))) == log_multimodal


def test_images_that_tools_answer_with_are_refused_by_name(tmp_path):
    def screenshot() -> list:
        """Takes a screenshot.

        Returns:
            Parts of a message.
        """
        return [{"type": "image", "image": drawn.noise(1)}, {"type": "text", "text": "Here it is."}]

    asking = trainer(tmp_path, data=Dataset.from_list([{"prompt": ASKED}]), given={"tools": [screenshot]},
                     max_completion_length=512, overlap_rewards=False)  # fmt: skip
    asking.source.engine = Said(['<tool_call>{"name": "screenshot", "arguments": {}}</tool_call>'])
    with pytest.raises(ConfigError, match=r"tool screenshot: it answered with an image; .* show images in the row's"):
        train(asking)
