"""A model folder that brings code along: it runs only where `trust_remote_code` says so."""

import json
from contextlib import nullcontext

import pytest

from grpo.config import ConfigError
from grpo.language.config import LanguageConfig
from grpo.language.model import loading
from grpo.language.rewards.models import RewardModel

AUTO = {name: f"evil.{name}" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification")}
EVIL = """
from pathlib import Path
Path({ran!r}).write_text("ran")
raise RuntimeError("and breaks off")
"""


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """Its folder, and what appears once its code has run."""
    folder, ran = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    (folder / "evil.py").write_text(EVIL.format(ran=str(ran)))
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": AUTO}))
    told = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder, ran


@pytest.mark.parametrize("what", ["model", "tokenizer", "reward model"])
def test_code_beside_a_model_runs_only_where_it_is_trusted(what, hostile):
    folder, ran = hostile

    def load(trust):
        config = LanguageConfig(model=str(folder), trust_remote_code=trust)
        if what == "reward model":
            return RewardModel.load(str(folder), None, "cpu", trust)
        return loading.load_model(config, True) if what == "model" else loading.load_tokenizer(config)

    with pytest.raises(ConfigError):
        load(False)
    assert not ran.exists()
    with pytest.raises((ConfigError, RuntimeError)), pytest.warns(UserWarning) if what == "model" else nullcontext():
        load(True)
    assert ran.exists(), "else this test could not fail"
