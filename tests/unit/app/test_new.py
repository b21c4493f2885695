"""`grpo new`: what it writes trains, and its own test passes."""

import importlib
import inspect
import shlex
import sys
from importlib import resources
from pathlib import Path

import pytest

from grpo.cli import main

OWN = ("environment", "reward", "policy", "train", "test_project")
ALONE = {"view": ("--export", "page.html"), "chat": ("--message", "3>")}
"""What a command is given where there is no browser and no keyboard."""


@pytest.fixture
def alone():
    """Modules of a project are its own, whatever else has such a name."""
    before = {name: sys.modules.pop(name) for name in OWN if name in sys.modules}
    yield
    for name in OWN:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.mark.filterwarnings("error:! source")  # `check` finds nothing to say about the policy
@pytest.mark.parametrize("kind", ["control", "language", "policy"])
def test_a_new_project_passes_its_own_test(kind, tmp_path, monkeypatch, capsys, alone):
    monkeypatch.chdir(tmp_path)
    assert main(["new", kind, "mine"]) == 0
    assert "python train.py" in capsys.readouterr().out
    text = (Path("mine") / "README.md").read_text()
    assert text.startswith("# mine\n") and "python train.py" in text and "grpo view runs" in text
    assert not any("{{" in file.read_text() for file in Path("mine").iterdir())
    monkeypatch.syspath_prepend(tmp_path / "mine")
    for name, test in list(vars(importlib.import_module("test_project")).items()):
        if name.startswith("test_"):
            test(tmp_path / name) if inspect.signature(test).parameters else test()
    said = [line.partition("   ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("next=")]
    assert said[0].startswith("next=grpo view ") and len(said) == {"control": 3, "language": 3, "policy": 1}[kind]
    for line in said:  # as it is printed, but that nobody sits there
        words = shlex.split(line.removeprefix("next=grpo "))
        assert main([*words, *ALONE.get(words[0], ())]) == 0, line
    kept = {file.name for file in (tmp_path / "mine").iterdir()}
    templates = resources.files("grpo.app") / "templates" / "new" / kind
    assert kept - {"__pycache__"} == {file.name.removesuffix(".txt") for file in templates.iterdir()}


def test_what_is_there_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    assert main(["new", "policy", str(tmp_path / "mine")]) == 2
    assert "give another name" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    assert main(["new", "policy", str(tmp_path / "a b")]) == 2
    assert not (tmp_path / "a b").exists()
