"""TRL itself beside us, on the same scripts and the same completions: the same log of the first step.

TRL is no requirement of the project: `make cross-check` installs it in a place of its own and runs this file.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import transformers

from grpo.language import build
from grpo.language.model import vision
from grpo.language.trl import GRPOConfig, GRPOTrainer
from tests.compat import forced, hub

SCRIPTS = Path(__file__).parent / "published"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed: make cross-check"),
]

BOTH = {"bf16": False, "use_cpu": True, "shuffle_dataset": False}
"""float32, and rows in their order: each shuffles in its own way."""
OTHERWISE = {("multi_task", "frac_reward_zero_std"), ("tools", "num_tokens"), ("environments", "num_tokens")}
"""With scale_rewards=batch TRL asks whether the whole batch has one reward, we ask each group. What tools answer is
read by the model, and counts as tokens here."""
SECONDS = {"step_time"}


def ours() -> tuple[Any, Any]:
    """Our two names, with TRL's defaults."""

    def config(**said: Any) -> GRPOConfig:
        return GRPOConfig(**BOTH | {"preflight": False} | said)

    def trainer(**given: Any) -> GRPOTrainer:
        return GRPOTrainer(**{"args": config(output_dir="out", report_to="none"), **given})

    return config, trainer


def theirs(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """TRL's, which says what it is told to."""
    import trl

    def said(self: Any, prompt_ids: Any, *given: Any, **more: Any) -> Any:
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        return forced.said(prompt_ids, tokenizer, self.max_completion_length), None

    def processor(place: str, *given: Any, **how: Any) -> Any:
        shape = transformers.AutoConfig.from_pretrained(place)
        if not vision.reads_images(shape):
            return plain(place, *given, **how)
        made = vision.load_processor(place, shape)  # theirs would need torchvision, for videos
        made.chat_template = made.chat_template or made.tokenizer.chat_template
        return made

    plain = transformers.AutoProcessor.from_pretrained
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", processor)
    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", said)

    def config(**said: Any) -> Any:
        return trl.GRPOConfig(**BOTH | said)

    def trainer(**given: Any) -> Any:
        return trl.GRPOTrainer(**{"args": config(output_dir="out", report_to="none"), **given})

    return config, trainer


def first_row(name: str, here: Path, folder: Path, door: tuple[Any, Any], rewards: str) -> dict[str, float]:
    """A script's first row of log_history, with these two names behind its import."""
    with pytest.MonkeyPatch.context() as patch:
        here.mkdir()
        hub.offer(folder, here, patch)
        stand_in = types.ModuleType("stand_in")
        stand_in.GRPOConfig, stand_in.GRPOTrainer = door  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "stand_in", stand_in)
        text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
        text = text.replace("from grpo.language.rewards", f"from {rewards}")
        (here / f"{name}.py").write_text(text.replace("from grpo.language import", "from stand_in import"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = runpy.run_path(str(here / f"{name}.py"), run_name="__main__")
        return dict(found["trainer"].state.log_history[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With Qwen3's own template, as TRL keeps it: it knows calls of tools by their template."""
    import trl

    template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
    return hub.fill(tmp_path_factory.mktemp("hub"), template)


@pytest.mark.parametrize("name", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_the_first_row_of_the_log_is_trls(name: str, folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    wanted = first_row(name, tmp_path / "theirs", folder, theirs(monkeypatch), "trl.rewards")
    monkeypatch.undo()
    monkeypatch.setattr(build, "make_engine", lambda kind, model, tokens, ahead=False, **more: forced.Forced(tokens))
    found = first_row(name, tmp_path / "ours", folder, ours(), "grpo.language.rewards")
    assert wanted.keys() <= found.keys()
    compared = {key for key in wanted if key not in SECONDS and (name, key) not in OTHERWISE}
    assert {key: found[key] for key in compared} == {
        key: pytest.approx(wanted[key], rel=1e-4, abs=1e-5) for key in compared
    }
    assert len(compared) >= 22
