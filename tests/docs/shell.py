"""Commands of the documentation, run in processes that start with the libraries already loaded."""

import multiprocessing
import os
import runpy
import sys
import warnings
from pathlib import Path

LOADED = [
    "grpo.cli",
    "grpo.app.builders",
    "torch",
    "torch._dynamo",  # by the first optimizer
    "numpy",
    "matplotlib.pyplot",
    "grpo.control",
    "grpo.language.trainer",
]
"""What most commands import; the others find it in memory."""


def run(words: list[str], folder: Path, place: Path) -> tuple[int, str]:
    """Exit code and output of `grpo …` or `python file.py …` in this folder; `place` is where Python starts looking."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    said = folder / ".said"
    process = context.Process(target=_run, args=(words, folder, place, said))
    process.start()
    process.join()
    text = said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""
    said.unlink(missing_ok=True)
    assert process.exitcode is not None
    return process.exitcode, text


def _run(words: list[str], folder: Path, place: Path, said: Path) -> None:
    os.chdir(folder)
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ["PYTHONPATH"] = str(place)  # of the processes that it starts
    sys.path.insert(0, str(place))
    warnings.resetwarnings()
    program, *sys.argv[1:] = words
    if program == "grpo":
        from grpo.cli import main

        sys.exit(main(sys.argv[1:]))
    sys.argv = words[1:]
    runpy.run_path(words[1], run_name="__main__")
