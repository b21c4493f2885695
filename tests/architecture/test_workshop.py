"""What is said about Python versions, extras and commands is said once, or the same everywhere."""

import re
import runpy
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import grpo

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CI = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
EXTRAS = runpy.run_path(str(ROOT / "scripts" / "import_extra.py"))["EXTRAS"]
TOOLS = {"dev", "docs"}


def test_the_oldest_python_is_the_same_everywhere():
    versions = CI["jobs"]["quick"]["strategy"]["matrix"]["python"]
    oldest = versions[0]
    assert PROJECT["project"]["requires-python"] == f">={oldest}"
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")
    assert f"Python {oldest} or newer" in (ROOT / "README.md").read_text(encoding="utf-8")
    said = [c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert said == versions


def test_every_extra_is_installed_alone_and_imported():
    offered = {*PROJECT["project"]["optional-dependencies"]} - TOOLS
    assert {*EXTRAS} == {"none", *offered}
    assert {*CI["jobs"]["extra"]["strategy"]["matrix"]["extra"]} == {*EXTRAS}


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_an_extra_is_for_exists(extra):
    assert all(find_spec(name) for name in EXTRAS[extra] if name.startswith("grpo."))


def test_ci_calls_targets_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    steps = [step.get("run", "") for job in CI["jobs"].values() for step in job["steps"]]
    called = {target for run in steps for target in re.findall(r"\bmake ([a-z-]+)", run)}
    assert {"lint", "quick", "docs", "slow"} <= called <= targets


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == grpo.__version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["keywords"] == PROJECT["project"]["keywords"]
    assert citation["repository-artifact"] == PROJECT["project"]["urls"]["Package"]
