"""Every notebook is stored as it ran: executed from top to bottom, without errors, small; and it still runs."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.ipynb"))
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
NOTEBOOKS = EXAMPLES + TUTORIALS
LIGHT = [path for path in TUTORIALS if path.stem in ("control", "policy")]
"""Those that take seconds."""
SIZE = 400_000


def outputs(notebook: dict) -> list[dict]:
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_as_it_ran(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1)), "execute it from top to bottom in a fresh kernel"
    assert [output for output in outputs(notebook) if output["output_type"] == "error"] == []
    assert any("image/png" in output.get("data", {}) for output in outputs(notebook))
    assert path.stat().st_size < SIZE


@pytest.mark.parametrize("path", LIGHT, ids=lambda path: path.name)
def test_light_ones_run(path, tmp_path, monkeypatch):
    """In this process: a kernel would take longer to start than they take."""
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("gymnasium")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    matplotlib.use("Agg")
    names = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)
    matplotlib.pyplot.close("all")


@pytest.fixture(scope="module")
def executed():
    for name in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(name)
    return runpy.run_path(str(ROOT / "scripts" / "notebooks.py"))["executed"]


def printed(notebook: dict) -> str:
    return "".join("".join(output["text"]) for output in outputs(notebook) if output["output_type"] == "stream")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_runs_and_prints_what_is_stored(path, executed):
    fresh = executed(path)
    assert [output for output in outputs(fresh) if output["output_type"] == "error"] == []
    if path in EXAMPLES:  # tutorials print figures of longer runs, whose last digits are another machine's
        assert printed(fresh) == printed(json.loads(path.read_text(encoding="utf-8")))
