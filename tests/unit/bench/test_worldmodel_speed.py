"""The bench of world models: its table says what the file says, and turns are taken in turns."""

import sys
from pathlib import Path
from typing import Any

import pytest

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
