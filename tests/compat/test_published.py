"""Scripts as TRL's documentation writes them, changed in the import alone: each runs, and logs what TRL would."""

import json
import runpy
import warnings
from pathlib import Path

import pytest

from grpo.language import build
from tests.compat import hub
from tests.compat.forced import Forced
from tests.compat.test_object import LAST, TRLS

SCRIPTS = Path(__file__).parent / "published"
STEP = {name for name in TRLS if not name.startswith("rewards/") and name != "entropy"}
"""What each of them logs of a step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hub.fill(tmp_path_factory.mktemp("hub"))


@pytest.fixture
def run(folder, tmp_path, monkeypatch):
    """A script's names once it has run, where the names of models and data are folders."""
    hub.offer(folder, tmp_path, monkeypatch)

    def ran(name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")

    return ran


def steps(found):
    return [row for row in found["trainer"].state.log_history if "loss" in row and "train_loss" not in row]


def _quick_start(found, here):
    assert found["trainer"].state.global_step == 3 and "rewards/accuracy_reward/mean" in steps(found)[0]


def _custom_rewards(found, here):
    first = steps(found)[0]
    parts = [first[f"rewards/{name}/mean"] for name in ("reward_len", "reward_tokens", "reward_func")]
    weights = (0.5, 0.1, 1.0)
    assert first["reward"] == pytest.approx(sum(w * p for w, p in zip(weights, parts, strict=True)), abs=1e-5)
    assert "share_found" in first and "kl" in first and len(steps(found)) == 2


def _async_rewards(found, here):
    assert {"rewards/async_reward_func/mean", "rewards/sync_reward_func/mean"} <= steps(found)[0].keys()


def _multi_task(found, here):
    first = steps(found)[0]
    parts = [first[f"rewards/{name}_reward_func/mean"] for name in ("math", "coding")]
    assert first["reward"] == pytest.approx(sum(parts) / 2), "half of the rows are of each task"


def _tools(found, here):
    first = steps(found)[0]
    assert first["tools/call_frequency"] == 0.25 and first["tools/failure_frequency"] == 0.0
    assert first["rewards/accuracy/mean"] == 0.5


def _environments(found, here):
    assert steps(found)[0]["reward"] == 0.5
    assert sorted(environment.counter for environment in found["trainer"].environments) == [0, 0, 0, 2]


def _peft_lora(found, here):
    assert (here / "peft-lora" / "adapter" / "adapter_model.safetensors").exists()
    assert {name.split(".")[-3] for name, p in found["trainer"].model.named_parameters() if p.requires_grad} == {
        "lora_A", "lora_B"
    }  # fmt: skip


def _vlm(found, here):
    assert {"rewards/think_format_reward/mean", "rewards/reward_letters/mean"} <= steps(found)[0].keys()
    assert not any("visual" in name for name, p in found["trainer"].model.named_parameters() if p.requires_grad)
    assert (here / "grpo-vlm" / "completions" / "completions_00001.parquet").exists()


def _evaluation(found, here):
    rows = found["trainer"].state.log_history
    assert any("eval_data1_reward" in row for row in rows) and any("eval_data2_reward" in row for row in rows)
    assert {step for step, _ in found["watch"].heard} == {1}
    assert "eval_reward" in found["metrics"]


def _resume(found, here):
    assert [row["step"] for row in json.loads((here / "resume" / "trainer_state.json").read_text())["log_history"]
            if "loss" in row and "train_loss" not in row] == [1, 2, 3]  # fmt: skip


CHECKS = {name.removeprefix("_"): check for name, check in list(globals().items()) if name.startswith("_") and
          (SCRIPTS / f"{name.removeprefix('_')}.py").exists()}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_a_script_runs_unchanged_but_for_the_import(run, tmp_path, monkeypatch, name):
    if name in ("tools", "environments"):  # what a random model never calls
        monkeypatch.setattr(build, "make_engine", lambda kind, model, tokens, ahead=False, **kwargs: Forced(tokens))
    found = run(name)
    rows = found["trainer"].state.log_history
    assert steps(found)[-1].keys() >= STEP and rows[-1].keys() >= (LAST if name != "evaluation" else {"eval_reward"})
    CHECKS[name](found, tmp_path)


def test_all_ten_are_tried():
    assert len(CHECKS) == 10 == len(list(SCRIPTS.glob("*.py")))
