"""Every notebook is stored as it ran: executed from top to bottom, without errors, small; and it still runs."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
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


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_runs_and_prints_what_is_stored(path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    stored = nbformat.read(path, as_version=4)
    fresh = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(fresh, kernel_name="python3", timeout=600, resources=resources).execute()

    def printed(notebook):
        return "".join(output["text"] for output in outputs(notebook) if output["output_type"] == "stream")

    assert printed(fresh) == printed(stored)
