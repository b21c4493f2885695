"""What teaches SmolLM2: the page can be made from what is measured, by the command that it names."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "bench"))  # its scripts import each other as scripts do

import smollm  # noqa: E402


def test_the_page_tells_of_a_run_what_it_was_told(monkeypatch, tmp_path):
    """Everything but the training itself, which takes a GPU."""
    run = {"seconds": 1.0, "curve": [(0, 0, 0.3), (5, 100, 0.5)]}
    gain = smollm.gsm8k.paired(np.array([0.0, 1.0]), np.array([1.0, 1.0]))
    monkeypatch.setattr(smollm, "learn", lambda *_, **__: run | gain)
    monkeypatch.setattr(smollm.gsm8k, "as_folder", lambda *_: "model")
    words = ["smollm.py", "--model", "model", "--results", str(tmp_path / "teacher_smollm.json")]
    monkeypatch.setattr(sys, "argv", words)
    smollm.main()
    page = runpy.run_path(str(ROOT / "docs" / "recipes_page.py"))
    page["smollm"].__globals__["RESULTS"] = tmp_path
    assert f"shown the answer (`{smollm.SHOWN}`)" in page["smollm"]()
    kept = json.loads((ROOT / "bench" / "results" / "teacher_smollm.json").read_text(encoding="utf-8"))
    assert kept["template"] == smollm.SHOWN
