"""What is said about Python versions, extras and commands is said once, or the same everywhere."""

import re
import runpy
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import grpo
from tests import conftest

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
def test_an_extra_is_written_as_a_wheel_names_it(extra):
    """dm-control, not dm_control: for the other, pip before 23.3 (Python 3.11 brings it) installs nothing."""
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", extra)


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


DOCKER = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


def test_what_the_image_is_made_of_is_there_and_let_through():
    """It is not built here; what it copies, installs and is asked for has to exist."""
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [line.split()[1:-1] for line in DOCKER.splitlines() if line.startswith("COPY ") and "--from" not in line]
    for path in (path for paths in copied for path in paths):
        assert (ROOT / path).exists() and f"!{path}" in ignored, path
    stages = re.findall(r"^FROM \S+ AS (\S+)$", DOCKER, re.M)
    assert {"cpu", "cuda"} <= {*stages} and {*re.findall(r"--from=(\S+)", DOCKER)} <= {*stages}
    assert all({*extras.split(",")} < {*EXTRAS} for extras in re.findall(r"^ARG EXTRAS=(\S+)", DOCKER, re.M))
    needed = {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "pyproject.toml"}
    needed |= {*PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-scripts"]}
    assert needed <= {path for paths in copied for path in paths}
    installs = [line for line in DOCKER.splitlines() if "pip install" in line]  # with the versions that make takes
    assert len(installs) == 2 and all("-c /etc/anygrpo/constraints.txt" in line for line in installs)
    assert "COPY constraints.txt /etc/anygrpo/constraints.txt" in DOCKER
    assert "install -c constraints.txt" in (ROOT / "Makefile").read_text(encoding="utf-8")
    (python,) = {*re.findall(r"^FROM python:(\d\.\d+)-", DOCKER, re.M)}
    assert python in CI["jobs"]["quick"]["strategy"]["matrix"]["python"]


def test_the_runs_of_the_demo_are_small_and_name_no_place():
    files = [path for path in (ROOT / "grpo" / "view" / "demo").rglob("*") if path.is_file()]
    assert len(files) > 20 and sum(path.stat().st_size for path in files) < 500_000
    told = [path for path in files if path.suffix in (".json", ".jsonl")]
    assert not [path for path in told if re.search(r'"/\w|/tmp/|/home/', path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    ("dist", "worker", "collects"), [("no", False, True), ("load", True, True), ("load", False, False)]
)
def test_garbage_is_left_alone_only_where_tests_are_collected(monkeypatch, dist, worker, collects):
    """Who hands tests out to workers collects none, and would never look after its garbage again."""
    left = []
    monkeypatch.setattr(conftest, "gc", SimpleNamespace(disable=lambda: left.append(True)))
    config = SimpleNamespace(stash={}, getoption=lambda name, default: dist if name == "dist" else default)
    conftest.pytest_configure(SimpleNamespace(**vars(config), workerinput={}) if worker else config)
    assert bool(left) == collects
