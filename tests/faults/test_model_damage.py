"""Models that are not whole: the tensor or file is named, nothing is trained from random numbers by accident."""

import json
import shutil
import struct
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo import cli
from grpo.config import ConfigError
from grpo.language import LanguageConfig
from grpo.language.model import adapters, loading
from grpo.language.rewards.models import RewardModel
from tests.unit.language.tiny import tiny_model, tiny_tokenizer

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    place = tmp_path_factory.mktemp("models") / "whole"
    tiny_model().save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def config(path, **settings) -> LanguageConfig:
    return LanguageConfig(model=str(path), device="cpu", **settings)


def changed(path, change) -> None:
    save_file(change(load_file(path / WEIGHTS)), path / WEIGHTS, metadata={"format": "pt"})


def without(word):
    return lambda tensors: {name: value for name, value in tensors.items() if word not in name}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without("layers.1.mlp.up"), "1 of its tensors missing (model.layers.1.mlp.up_proj.weight)"),
        (without("lm_head"), "1 of its tensors missing (lm_head.weight)"),
        (without("model"), "20 of its tensors missing (model.embed_tokens.weight, "),
        (
            lambda tensors: tensors | {"model.norm.weight": torch.ones(7)},
            "1 of its tensors of another shape (model.norm.weight: (7,) in the file, (32,) by its config)",
        ),
    ],
)
def test_missing_and_misshapen_tensors_are_named(change, told, copy):
    changed(copy, change)
    with pytest.raises(ConfigError) as caught:
        loading.load_model(config(copy), True)
    assert told in str(caught.value) and "ignore_mismatched_sizes: true" in str(caught.value)
    fresh = loading.load_model(config(copy, model_kwargs={"ignore_mismatched_sizes": True}), True)
    assert torch.isfinite(fresh.model.norm.weight).all()


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_and_more_than_is_needed_are_no_alarm(tied, tmp_path):
    tiny_model(tie_word_embeddings=tied).save_pretrained(tmp_path)
    changed(tmp_path, lambda tensors: tensors | {"something.else": torch.ones(2)})
    assert ("lm_head.weight" in load_file(tmp_path / WEIGHTS)) is not tied
    loading.load_model(config(tmp_path), True)


def test_a_language_model_is_no_reward_model(copy):
    told = json.loads((copy / "config.json").read_text())
    told |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "good"}, "label2id": {"good": 0}}
    (copy / "config.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=r"1 of its tensors missing \(score.weight\); they would be random"):
        RewardModel.load(str(copy), None, "cpu", False)
    (copy / WEIGHTS).write_bytes(b"\xff" * 99)
    with pytest.raises(ConfigError, match=r"copy/model.safetensors: it is damaged"):
        RewardModel.load(str(copy), None, "cpu", False)


def test_an_adapter_that_is_not_whole_is_refused(whole, tmp_path):
    pytest.importorskip("peft")
    made, _ = adapters.with_adapter(tiny_model(), config(whole, lora_rank=2))
    made.save_pretrained(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    asked = config(whole, adapter=str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapters.with_adapter(tiny_model(), asked)
    save_file(without("layers.1")(load_file(weights)), weights)
    with pytest.raises(ConfigError, match="missing adapter keys"):
        adapters.with_adapter(tiny_model(), asked)
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"adapter_model.safetensors: it is damaged"):
        adapters.with_adapter(tiny_model(), asked)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"base_model_name_or_path": 3}'])
def test_talking_to_an_adapter_that_names_no_model(content, tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text(content)
    assert cli.main(["chat", str(tmp_path), "--message", "?"]) == 2
    assert "adapter_config.json" in capsys.readouterr().err


DEEP = b'{"a":' * 20_000 + b"1" + b"}" * 20_000


def halved(path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def pickled(path, content) -> None:
    path.with_name(WEIGHTS).unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)


class Runs:
    """Pickled, it would run something."""

    def __reduce__(self):
        return print, ("it ran",)


def said(**settings):
    def change(path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return change


DAMAGE = [
    ("model.safetensors", halved),
    ("model.safetensors", lambda path: path.write_bytes(b"")),
    ("model.safetensors", lambda path: path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")),
    ("model.safetensors", lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid x")),
    ("model.safetensors.index.json", lambda path: pickled(path, b'{"weight_map": 3}')),
    ("model.safetensors.index.json", lambda path: pickled(path, DEEP)),
    ("pytorch_model.bin", lambda path: pickled(path, b"no pickle at all")),
    ("pytorch_model.bin", lambda path: pickled(path, b"")),
    ("pytorch_model.bin", lambda path: pickled(path, {"a": Runs()})),
    ("config.json", lambda path: path.write_bytes(DEEP)),
    ("config.json", halved),
    ("config.json", lambda path: path.write_text("[]")),
    ("config.json", lambda path: path.write_bytes(b'{"model_type": "\xff"}')),
    ("config.json", said(hidden_size="wide")),
    ("config.json", said(hidden_size=-4)),
    ("config.json", said(num_attention_heads=0)),
    ("config.json", said(model_type=["llama"])),
    ("generation_config.json", lambda path: path.write_bytes(DEEP)),
    ("tokenizer.json", halved),
    ("tokenizer_config.json", lambda path: path.write_bytes(DEEP)),
    ("tokenizer_config.json", lambda path: path.write_text("[]")),
]


@pytest.mark.parametrize(("file", "harm"), DAMAGE, ids=lambda case: case if isinstance(case, str) else "")
def test_a_damaged_file_is_named_and_the_command_ends_with_2(file, harm, copy, tmp_path, capsys):
    harm(copy / file)
    words = ["train", "language", "--model", str(copy), "--dataset", "sort-digits", "--rewards", "length"]
    code = cli.main([*words, "--run.logdir", str(tmp_path / "run"), "--run.steps", "1"])
    told = capsys.readouterr()
    assert code == 2 and str(copy / file) in told.err and "Traceback" not in told.err and "it ran" not in told.out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", [b"", b"GGUF\x03\0\0\0" + b"\xff" * 40, b"no GGUF at all" * 9])
def test_a_damaged_gguf_file_is_named(content, tmp_path):
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    for load in (lambda asked: loading.load_model(asked, True), loading.load_tokenizer):
        with pytest.raises(ConfigError, match=r"model\.gguf: it is damaged, or was not written whole"):
            load(config(path))
