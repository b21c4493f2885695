"""The bench of world models: its table says what the file says, and turns are taken in turns."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "bench"))  # its scripts import each other as scripts do

import worldmodel_speed as speed  # noqa: E402

ECHO = """
import sys
sys.path.insert(0, sys.argv[1])
from dreamer_turns import Built, serve

calls = []

def build(cell):
    if cell["size"] == "none":
        raise ValueError("no such size")
    print("a library that talks")
    return Built(7, {"update": lambda: calls.append(1)})

serve(build, ["numpy"])
"""


@pytest.fixture
def r2(monkeypatch, tmp_path):
    """The adapter of r2dreamer, beside a checkout in which nothing stands."""
    for module in ("dreamer_r2", "dreamer", "tensordict", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))  # put back afterwards
    sys.modules["dreamer"].Dreamer = None
    del sys.modules["dreamer_r2"]
    monkeypatch.setattr(sys, "argv", ["dreamer_r2.py", str(tmp_path)])
    monkeypatch.syspath_prepend(speed.PEERS)
    return importlib.import_module("dreamer_r2")


def turns(*seconds: float) -> list[dict[str, float]]:
    return [{"calls": 2, "wall_s": wall, "cpu_s": 2 * wall} for wall in seconds]


def cell(operation: str, **took: list[dict[str, float]]) -> dict[str, Any]:
    return {"size": "1m", "observation": "vector", "operation": operation, "turns": took, "errors": {}}


def test_ratios_are_taken_within_a_round():
    slow_machine = cell("update", ours=turns(1, 10, 100), torch=turns(3, 30, 300))
    assert speed.ratios(slow_machine, "torch", "wall_s") == pytest.approx([3, 3, 3])


def test_the_table_has_a_row_for_each_peer_with_its_rates_and_ratio():
    found = {"cells": [cell("update", ours=turns(1, 1), jax=turns(2, 2), torch=turns(4, 4))]}
    *_, jax, torch = speed.table(found).splitlines()
    assert jax.startswith("| 1m, vector: updates | 2.00 (2.00 – 2.00) | DreamerV3 (JAX) | 1.00 (1.00 – 1.00) | 2.00 ")
    assert "| dreamerv3-torch | 0.50 (0.50 – 0.50) | 4.00 (4.00 – 4.00) |" in torch


def test_ours_in_bfloat16_stands_beside_the_peer_that_computes_in_it():
    rows = speed.table({"cells": [cell("update", ours=turns(2, 2), ours_bfloat16=turns(1, 1), jax=turns(4, 4))]})
    last = rows.splitlines()[-1]
    assert last.startswith("| 1m, vector: updates, precision=bfloat16 | 2.00 (2.00 – 2.00) | DreamerV3 (JAX) | 0.50 ")
    assert "| 4.00 (4.00 – 4.00) |" in last
    assert "bfloat16" not in speed.table({"cells": [cell("update", ours=turns(1, 1), jax=turns(2, 2))]})


def test_r2dreamer_computes_in_16_bits_with_its_decoder_and_without():
    found = cell("update", ours=turns(2, 2), ours_bfloat16=turns(1, 1), r2=turns(4, 4), r2_free=turns(3, 3))
    rows = speed.table({"cells": [found]}).splitlines()[2:]
    assert [row.split(" | ")[2] for row in rows[1:]] == ["r2dreamer, with a decoder", "r2dreamer, decoder-free"] * 2
    assert [row.count("precision=bfloat16") for row in rows[3:]] == [1, 1]


def test_only_those_that_are_asked_for_run_and_ours_is_among_them():
    commands = {name: [name] for name in ("ours", "ours_bfloat16", "r2", "r2_free")}
    assert list(speed.chosen(commands, ["r2_free", "ours"])) == ["ours", "r2_free"]
    with pytest.raises(ValueError, match="'r3' is none of ours, "):
        speed.chosen(commands, ["ours", "r3"])
    with pytest.raises(ValueError, match="jax cannot run on this --device or without the interpreter"):
        speed.chosen(commands, ["ours", "jax"])
    with pytest.raises(ValueError, match="ours has to be among them"):
        speed.chosen(commands, ["r2"])


def test_every_variant_of_a_peer_has_a_name_and_a_peer():
    variants = {name for names in speed.PEER_VARIANTS.values() for name in names}
    assert variants | speed.PEER_VARIANTS.keys() <= speed.CALLED.keys()


def test_imagination_is_counted_in_steps_of_all_futures():
    assert speed.rates(turns(2), "imagine", "wall_s") == [1024 * 15]
    assert "1m: imagined steps" in speed.table({"cells": [cell("imagine", ours=turns(1, 1), jax=turns(1, 1))]})


def test_a_peer_that_failed_says_so_in_the_table():
    found = cell("update", ours=turns(1, 1)) | {"errors": {"jax": "jax has ended: no module named jax"}}
    assert "no module named jax" in speed.table({"cells": [found]})


def test_a_worker_answers_whatever_its_library_prints_and_names_its_errors(tmp_path):
    script = tmp_path / "echo.py"
    script.write_text(ECHO, encoding="utf-8")
    worker = speed.Worker("echo", [sys.executable, str(script), str(speed.PEERS)], threads=1)
    try:
        assert worker.ask(cell={"size": "1m"})["weights"] == 7
        assert speed.in_turns([worker], "update", rounds=3, turn=0.0, errors={})["echo"][2]["calls"] == 1
        with pytest.raises(speed.Failed, match="echo: ValueError: no such size"):
            worker.ask(cell={"size": "none"})
    finally:
        worker.close()


def test_a_worker_that_cannot_start_is_quoted(tmp_path):
    worker = speed.Worker("gone", [sys.executable, "-c", "raise SystemExit('nothing to import')"], threads=1)
    with pytest.raises(speed.Failed, match="gone has ended: nothing to import"):
        worker.ask(cell={})
        worker.ask(cell={})
    worker.close()


def test_settings_of_r2dreamer_have_the_widths_of_a_cell(r2, tmp_path):
    files = {
        "model/_base_": "lr: 4e-5\nagc: 0.3\ndevice: ${device}\nrssm: {deter: '${model.deter}', act: '${model.act}'}\n"
        "encoder: {keys: '${env.keys}', units: '${model.units}'}",
        "model/size12M": "defaults: [_base_]\ndeter: 2048\nunits: 256\nact: 'SiLU'",
        "env/dmc_proprio": "keys: '.*'",
        "env/dmc_vision": "keys: '$^'",
    }
    for name, text in files.items():
        (tmp_path / "configs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "configs" / f"{name}.yaml").write_text(text, encoding="utf-8")
    widths = {"deter": 16, "hidden": 8, "classes": 4, "depth": 2, "units": 6, "stoch": 3}
    found = r2.settings({"device": "cpu", "observation": "vector", "widths": widths})
    assert (found.lr, found.agc, found.device, found.discrete, found.rep_loss) == (4e-5, 0.3, "cpu", 4, "dreamer")
    assert found.rssm == {"deter": 16, "act": "SiLU", "stoch": 3} and found.rssm.act == "SiLU"
    assert found.encoder == {"keys": ".*", "units": 6}
    assert not hasattr(found, "actor")


def test_numbers_are_correlated_whatever_their_scale_and_offset(r2):
    target = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])  # its columns are not correlated
    spread = 1 - 1 / len(target)  # the deviation is of n - 1, the mean product of n
    assert r2.correlation(3 * target + 1, target).tolist() == [pytest.approx([spread, 0]), pytest.approx([0, spread])]
    assert r2.correlation(-target.flip(1), target).tolist() == [
        pytest.approx([0, -spread]),
        pytest.approx([-spread, 0]),
    ]


def test_imagination_of_r2dreamer_reads_what_each_decision_led_to(r2):
    head = lambda feat: SimpleNamespace(mode=lambda: feat.sum(-1), mean=feat.mean(-1))  # noqa: E731
    actor = lambda feat: SimpleNamespace(rsample=lambda: feat[..., :1] + 1, log_prob=lambda a: a[..., 0] - feat[..., 0])  # noqa: E731
    rssm = SimpleNamespace(
        get_feat=lambda stoch, deter: torch.cat([stoch, deter], -1),
        img_step=lambda stoch, deter, action: (stoch + action, deter),
    )
    model = SimpleNamespace(_frozen_rssm=rssm, _frozen_actor=actor, actor=actor, _frozen_reward=head, _frozen_cont=head)
    feat, action, logp, reward, again = r2.imagined(model, (torch.zeros(2, 1), torch.ones(2, 1)), 3)
    assert feat[0].tolist() == [[0, 1], [1, 1], [3, 1], [7, 1]] and action[0].flatten().tolist() == [1, 2, 4]
    assert logp.tolist() == [[1, 1, 1]] * 2 and reward[1].tolist() == [2, 4, 8] and again[1].tolist() == [1, 2, 4]
