"""The bench of rollouts and steps: what is measured stays, what fails costs one cell, tables say what the files say."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "bench"))  # its scripts import each other as scripts do

import cells  # noqa: E402
import gpu  # noqa: E402
import gpu_report  # noqa: E402
import plan  # noqa: E402
from floor import Shape, decode_floor  # noqa: E402

PEER = """
import os, sys, time
import cells

cells.machine = lambda device: {}
asked = cells.job()
if asked.get("start") == "fails":
    sys.exit("nothing to measure with")

def figures(cell):
    do = cell["settings"]["do"]
    if do == "raise":
        raise ValueError("two\\nlines")
    if do == "die":
        print("out of luck", flush=True)
        os._exit(9)
    if do == "hang":
        time.sleep(600)
    return {"seconds": [1.0], "tokens": [7]}

cells.measure(asked, figures)
"""


def asked(folder: Path, run: str = "now", until: float | None = None, **do: str) -> dict:
    each = [{"name": name, "settings": {"do": what}} for name, what in do.items()]
    return {"results": str(folder), "run": run, "until": until, "device": "cpu", "cells": each}


def measured(tmp_path: Path, limit: float = 60.0, **order) -> dict[str, dict]:
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    cells.run_job(script, order, limit=limit)
    return {cell["name"]: cells.read(Path(order["results"]) / f"{cell['name']}.json") for cell in order["cells"]}


# --- the floor -------------------------------------------------------------------------------------------------------

SHAPE = Shape(weights=1000, layers=2, heads=4, kv_heads=2, head_dim=8, bytes_each=2)


def test_a_position_costs_its_keys_and_values_and_two_products():
    assert SHAPE.bytes_a_position == 2 * 2 * 2 * 8 * 2 == 128
    assert SHAPE.flops_a_position == 4 * 2 * 4 * 8 == 256


def test_where_memory_is_slow_the_floor_is_what_must_be_read():
    # Two steps of 2 × 2 rows: the weights, both prompts once, and 1 then 2 positions of each row.
    moved = 2 * 2000 + (2 * (3 + 5) + 4 * 1 + 4 * 2) * 128
    assert decode_floor(SHAPE, [3, 5], [[2, 2], [2, 2]], 1e3, 1e12) == pytest.approx(moved / 1e3)


def test_where_products_are_slow_the_floor_is_what_must_be_computed():
    # Every row multiplies with every weight and attends to its own prompt, not once for the group.
    computed = 2 * (2 * 1000 * 4) + (2 * (2 * 3 + 2 * 5) + 4 * 1 + 4 * 2) * 256
    assert decode_floor(SHAPE, [3, 5], [[2, 2], [2, 2]], 1e12, 1e3) == pytest.approx(computed / 1e3)


def test_each_step_takes_the_longer_of_both():
    # One row of two tokens behind an empty prompt: 2128 then 2256 bytes, 2256 then 2512 operations.
    assert decode_floor(SHAPE, [0], [[2]], 1.0, 1.0) == pytest.approx(2256 + 2512)
    assert decode_floor(SHAPE, [0], [[2]], 1.0, 2256 / 2200) == pytest.approx(2200 + 2512 * 2200 / 2256)
    assert decode_floor(SHAPE, [0], [[2]], 1.0, 1.1) == pytest.approx(2128 + 2512 / 1.1)


def test_rows_and_prompts_that_have_ended_are_not_read():
    # The first group ends after one token, a row of the second goes on alone.
    moved = (2000 + (3 + 5 + 4) * 128) + (2000 + (5 + 2) * 128)
    assert decode_floor(SHAPE, [3, 5], [[1, 1], [1, 2]], 1e3, 1e12) == pytest.approx(moved / 1e3)


# --- cells -----------------------------------------------------------------------------------------------------------


def test_prompt_lengths_are_fixed_and_have_their_mean():
    for count in (32, 128):
        sizes = gpu.lengths(count)
        assert len(sizes) == count and sum(sizes) == 128 * count and min(sizes) >= 64 and max(sizes) <= 192
        assert len(set(sizes)) > 10 and sizes == gpu.lengths(count)


def test_everyone_gets_the_same_prompts():
    args = gpu.parsed([])
    every = {cell.name: cell for cell in gpu.every_cell()}
    mine, theirs = (gpu.with_prompts(every[n], args) for n in ("qwen17_256_ending", "vllm_qwen17_256_ending_ids"))
    assert mine["prompts"] == theirs["prompts"] and mine["ends"] == theirs["ends"] and len(mine["ends"]) == 949
    assert [len(prompt) for prompt in mine["prompts"]] == mine["settings"]["prompt_lengths"]
    assert [len(text.split()) for text in mine["texts"]] == mine["settings"]["prompt_lengths"]


def test_one_process_measures_what_differs_only_in_sampling():
    job = {cell.name: cell.job for cell in gpu.every_cell()}
    assert job["vllm_smollm_256_default"] == job["vllm_smollm_1024_ids"]
    assert job["vllm_smollm_256_ids"] != job["vllm_smollm_256_ids_mp"] != job["vllm_qwen17_256_ids_mp"]
    assert len(job) == len(gpu.every_cell())


def test_a_cell_that_raises_or_kills_its_process_costs_itself_alone(tmp_path):
    order = asked(tmp_path / "gpu", a="fine", b="raise", c="die", d="fine")
    found = measured(tmp_path, **order)
    assert found["a"]["tokens"] == found["d"]["tokens"] == [7]
    assert found["b"]["error"] == "ValueError: two lines"
    assert found["c"]["error"] == "exit status 9: out of luck"


@pytest.mark.slow
def test_a_cell_that_hangs_is_ended(tmp_path):
    found = measured(tmp_path, limit=6.0, **asked(tmp_path / "gpu", a="fine", b="hang"))
    assert found["a"]["tokens"] == [7] and found["b"]["error"].startswith("no result within 6 s")


def test_what_cannot_start_says_so_in_every_cell(tmp_path):
    found = measured(tmp_path, **asked(tmp_path / "gpu", a="fine", b="fine"), start="fails")
    assert {cell["error"] for cell in found.values()} == {"nothing to measure with"}


def test_no_cell_is_begun_after_the_time(tmp_path):
    assert measured(tmp_path, **asked(tmp_path / "gpu", until=0.0, a="fine")) == {"a": None}


def test_what_is_measured_counts_for_its_own_settings(tmp_path):
    path = tmp_path / "gpu" / "a.json"
    assert not cells.measured(cells.read(path), {"tokens": 8})
    cells.write(path, {"settings": {"tokens": 8}, "seconds": [1.0]})
    assert cells.measured(cells.read(path), {"tokens": 8}) and not cells.measured(cells.read(path), {"tokens": 9})
    cells.fail(path, {"tokens": 9}, "now", "it broke")
    assert not cells.measured(cells.read(path), {"tokens": 9})
    path.write_text('{"settings"')  # half a file is no result
    assert cells.read(path) is None


def test_a_failure_does_not_undo_figures_of_the_same_settings(tmp_path):
    path = tmp_path / "gpu" / "a.json"
    cells.write(path, {"settings": {"tokens": 8}, "seconds": [1.0]})
    cells.fail(path, {"tokens": 8}, "later", "it broke")
    assert cells.measured(cells.read(path), {"tokens": 8}) and cells.read(path)["failed_since"] == "it broke"


def test_the_merged_file_holds_every_cell(tmp_path):
    for name in ("b", "a"):
        cells.write(tmp_path / "gpu" / f"{name}.json", {"cell": name})
    cells.merge(tmp_path / "gpu")
    assert json.loads((tmp_path / "gpu.json").read_text()) == {"cells": {"a": {"cell": "a"}, "b": {"cell": "b"}}}


def test_names_and_patterns_choose_cells():
    assert [cell.name for cell in gpu.chosen(["smollm_256"])] == ["smollm_256"]
    assert len(gpu.chosen(["vllm_smollm_256_*"])) == len(gpu.CONFIGURATIONS)
    assert gpu.chosen([]) == gpu.every_cell()
    named = ["vllm_smollm_1024_ids", "smollm_*"]  # what matters most may stand first where time is short
    assert [cell.name for cell in gpu.chosen(named)] == ["vllm_smollm_1024_ids", "smollm_256", "smollm_1024"]
    with pytest.raises(SystemExit, match="there is no cell smolm"):
        gpu.chosen(["smolm"])


# --- the whole script, on a model of a few thousand numbers ----------------------------------------------------------


@pytest.mark.slow
def test_our_cells_run_once_are_kept_and_become_tables_and_a_chart(tmp_path, capsys):
    pytest.importorskip("transformers")
    folder = tmp_path / "gpu"
    words = ["--device", "cpu", "--tiny", "--repeats", "2", "--results", str(folder), "--models", str(tmp_path / "m")]
    only = ["--only", "qwen17_256", "qwen17_256_ending"]
    gpu.main([*words, *only])
    found = json.loads((tmp_path / "gpu.json").read_text())["cells"]
    assert sorted(found) == ["qwen17_256", "qwen17_256_ending"]
    cell = found["qwen17_256"]
    assert cell["tokens"] == [32, 32] and len(cell["seconds"]) == 2 and cell["longest"] == 8
    assert cell["captures_while_timed"] == 0 and cell["floor_seconds"] > 0 and cell["ceilings"]["copy_bytes_per_s"] > 0
    assert cell["machine"]["cpu"] and cell["versions"]["torch"]
    assert "| tiny | 2 × 2 × 8, rows end |" in capsys.readouterr().out
    stamps = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    gpu.main([*words, *only])
    assert stamps == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    gpu.main([*words, "--table"])
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


# --- tables ----------------------------------------------------------------------------------------------------------


def made(peer: str, seconds: float, run: str = "now", how: str = "", **more) -> dict:
    settings = {"peer": peer, "model": "smollm", "prompts": 32, "group": 8, "tokens": 256, "ends": 0, "repeats": 3}
    configuration = {"name": how, **gpu.CONFIGURATIONS[how]} if how else None
    settings |= {"prompt_lengths": [64, 192], "configuration": configuration}
    rest = {"peak": {"allocated_gib": 1.5}, "captures_while_timed": 0, "floor_seconds": 0.1}
    tokens = {"mean_length": [256.0]} if peer in gpu_report.STEPS else {"tokens": [65536] * 3}
    about = {"run": run, "machine": {"gpu": "a GPU"}, "versions": {"torch": "2"}, "settings": settings}
    version = {"vllm": "1.0"} if peer == "vllm" else {}
    return {**about, **rest, **tokens, **version, "seconds": [seconds] * 3, **more}


def test_ours_is_compared_with_the_best_of_vllms_configurations():
    found = {
        "smollm_256": made("ours", 0.4),
        "vllm_smollm_256_default": made("vllm", 4.0, how="default"),
        "vllm_smollm_256_ids": made("vllm", 2.0, how="ids"),
        "vllm_smollm_256_ids_wide_nologp": made("vllm", 1.0, how="ids_wide_nologp"),
        "vllm_smollm_256_ids_mp": {"error": "no result within 240 s", "settings": {"peer": "vllm"}},
    }
    text = gpu_report.tables(found)
    row = next(line for line in text.splitlines() if "| 5.00 |" in line)
    assert "163,840 (163,840 – 163,840)" in row and "32,768 (32,768 – 32,768): 1.0, detokenize off" in row
    assert "65,536 (65,536 – 65,536): 1.0, detokenize off, graphs to 1,024, log-probs off | 2.50 |" in row
    assert "| 0.25 | 1.5 | 0 |" in row  # the floor's share, memory, captures
    assert "`vllm_smollm_256_ids_mp` failed: no result within 240 s" in text and gpu_report.ELSEWHERE not in text


def test_figures_of_other_settings_are_not_compared_and_those_of_another_run_are_marked():
    found = {"smollm_256": made("ours", 0.4), "vllm_smollm_256_ids": made("vllm", 2.0, how="ids", run="then")}
    assert "| 5.00† |" in gpu_report.tables(found)
    found["vllm_smollm_256_ids"]["settings"]["tokens"] = 128
    assert "5.00" not in gpu_report.tables(found)


def test_steps_are_told_as_multiples_of_ours():
    found = {"step_smollm": made("step", 0.5), "trl_smollm": made("trl", 4.0), "trl_vllm_smollm": made("trl_vllm", 3.0)}
    text = gpu_report.tables(found)
    assert "TRL, `generate` | 4 (4 – 4) | 8.00 |" in text and "TRL, vLLM in its process | 3 (3 – 3) | 6.00 |" in text


def test_nothing_measured_is_said():
    assert gpu_report.tables({}) == "Not measured.\n"


def test_what_is_planned_stands_beside_what_is_measured():
    args = gpu.parsed([])
    every = {
        cell.name: gpu.settings(cell, args) for cell in gpu.every_cell() if cell.peer in ("ours", "step", "update")
    }
    made = {name: plan.predicted(settings) for name, settings in every.items() if not settings["ends"]}
    assert len(made) > 15 and all(0 < planned["gib"] < 139 and planned["seconds"] > 0 for planned in made.values())
    assert made["step_qwen17"]["gib"] <= 45 and made["step_qwen8_lora"]["gib"] <= 60
    peak = {"allocated_gib": 10.0}
    cells = {
        "qwen17_256": {"settings": every["qwen17_256"], "seconds": [1.0, 1.1, 3.0], "peak": peak},
        "step_qwen17": {"settings": every["step_qwen17"], "seconds": [2.5], "peak": peak},  # of before: nothing planned
        "step_qwen8_lora": {
            "settings": every["step_qwen8_lora"],
            "seconds": [8.0],
            "peak": peak,
            "planned": {"gib": 9.0, "seconds": 4.0},
        },
        "update_qwen17": {"settings": every["update_qwen17"], "error": "out of luck"},
    }  # fmt: skip
    rows = plan.compared(cells)
    assert [(row["cell"], row["fitted"]) for row in rows] == [("step_qwen8_lora", False), ("qwen17_256", True)]
    said = plan.table({"rows": rows})
    assert "| 9.0, 10.0 | 0.90 | 4.00, 8.00 | 0.50 | seen |" in said and said.count("fitted") == 1
    assert plan.table({}) == "Not measured."
