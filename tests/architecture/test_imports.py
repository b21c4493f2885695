"""Imports point one way, and `import grpo` is light."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import grpo

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "jax")


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(cwd)},
        capture_output=True,
        text=True,
    )


def lint_imports(cwd: Path) -> subprocess.CompletedProcess[str]:
    command = "from importlinter.cli import lint_imports_command as main; main(['--no-logo', '--no-cache'])"
    return python("-c", command, cwd=cwd)


@pytest.mark.parametrize(
    "statement",
    [
        "import grpo",
        "import grpo.app.words, grpo.control.config",
        "import runpy; sys.argv = ['grpo', '--help']; runpy.run_module('grpo.cli', run_name='__main__')",
    ],
    ids=["import grpo", "the rooms' words", "grpo --help"],
)
def test_loads_no_array_library(statement):
    report = f"import atexit, sys; atexit.register(lambda: print('loaded', {{*sys.modules}} & {{*{HEAVY}}}))"
    result = python("-c", f"{report}\n{statement}", cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "loaded set()"


def test_processes_that_judge_call_tools_and_step_environments_start_light():
    """One that was killed is started again, in the middle of a step."""
    home = "grpo.language"
    modules = (
        f"{home}.turns.tools, {home}.rewards.calling, {home}.rewards.maths, {home}.rewards.code, "
        f"{home}.data.columns, grpo.envs.processes"
    )
    report = f"import sys, {modules}\nprint({{'torch', 'transformers', 'jax', 'pydantic'}} & {{*sys.modules}})"
    result = python("-c", report, cwd=ROOT)
    assert result.stdout.strip() == "set()", result.stdout + result.stderr


@pytest.mark.parametrize("name", grpo.__all__)
def test_public_name_resolves(name):
    assert getattr(grpo, name) is not None
    assert name in dir(grpo)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = grpo.no_such_name


def test_contracts_are_kept():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_contracts_allow_the_planned_rooms(tmp_path):
    result = lint_imports(copy_with_rooms(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("core/kl.py", "import torch"),
        ("core/kl.py", "import grpo.rollouts"),
        ("core/kl.py", "from grpo import Rollouts"),
        ("objective.py", "import torch"),
        ("recipes.py", "import grpo.cli"),
        ("run/__init__.py", "import grpo.envs"),
        ("language/__init__.py", "import grpo.control"),
        ("language/__init__.py", "import grpo.envs"),
        ("view/page.py", "import grpo.rollouts"),
        ("view/page.py", "import grpo.run.loop"),
        ("view/page.py", "import torch"),
        ("distributed/__init__.py", "import grpo.core.kl"),
        ("distributed/__init__.py", "import grpo.language"),
        ("unplaced.py", ""),
    ],
)
def test_contracts_bite(module, line, tmp_path):
    """A wrong import fails, also in a room that is only planned: tried on a copy where it exists."""
    copy_with_rooms(tmp_path)
    with (tmp_path / "grpo" / module).open("a") as file:
        file.write(f"\n{line}\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    assert "BROKEN" in result.stdout, result.stdout + result.stderr


def copy_with_rooms(root: Path) -> Path:
    """A copy of the package with an empty module for every planned room; the viewer reads a run folder."""
    shutil.copytree(ROOT / "grpo", root / "grpo", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for name in ("run", "envs", "language", "control", "distributed", "view"):
        (root / "grpo" / name).mkdir(exist_ok=True)
        (root / "grpo" / name / "__init__.py").touch()
    for name in ("loop", "folder"):
        (root / "grpo" / "run" / f"{name}.py").touch()
    (root / "grpo" / "view" / "page.py").write_text("import grpo.run.folder\n")
    return root
