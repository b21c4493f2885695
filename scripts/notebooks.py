"""Execute notebooks from top to bottom and store what they printed and drew: `python scripts/notebooks.py FILE …`."""

import os
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).parents[1]


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook as it runs now, in an empty folder."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as place:
        quiet = {
            "PYTHONPATH": str(ROOT),
            "SDL_VIDEODRIVER": "dummy",
            "XDG_RUNTIME_DIR": place,
            "PYTHONWARNINGS": "ignore",
        }
        os.environ.update(quiet)  # the kernel has these of us
        resources = {"metadata": {"path": place}}
        nbclient.NotebookClient(notebook, kernel_name="python3", timeout=900, resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran: another diff each time
        if cell.cell_type == "code":  # bars and notices of this machine are nothing to read
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:]:
        nbformat.write(executed(Path(name)), name)
        print(name)
