"""What no source file may contain, and what none may be called."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "grpo").rglob("*.py"))

UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {
    *("eval", "exec", "os.system", "os.popen"),
    *("torch.load", "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load"),
}
UNSAFE_FLAGS = {"shell", "allow_pickle"}
NAMELESS = {"util", "utils", "common", "helper", "helpers", "misc"}


def unsafe(source: str) -> Iterator[str]:
    """Every construct in `source` that could execute data, as `line: construct`."""
    tree = ast.parse(source)
    full_name = {}  # what a local name stands for: `from torch import load` makes load torch.load
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            full_name |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full_name |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            is_from = isinstance(node, ast.ImportFrom)
            modules = [node.module or ""] if is_from else [alias.name for alias in node.names]
            found = [f"import {name}" for name in modules if name.partition(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.Call):
            first, dot, rest = ast.unparse(node.func).partition(".")
            called = full_name.get(first, first) + dot + rest
            found = [called] if called in UNSAFE_CALLS else []
            flags = {flag.arg for flag in node.keywords if ast.unparse(flag.value) != "False"}
            found += [f"{flag}=True" for flag in sorted(UNSAFE_FLAGS & flags)]
        else:
            continue
        yield from (f"{node.lineno}: {construct}" for construct in found)


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_never_executes_data(path):
    assert list(unsafe(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("source", "construct"),
    [
        ("import pickle", "import pickle"),
        ("from dill import loads", "import dill"),
        ("import torch as t\nt.load('x')", "torch.load"),
        ("from yaml import load as read\nread('x')", "yaml.load"),
        ("eval('1')", "eval"),
        ("exec('1')", "exec"),
        ("run('ls', shell=True)", "shell=True"),
        ("numpy.load('x', allow_pickle=flag)", "allow_pickle=True"),
    ],
)
def test_finds_what_executes_data(source, construct):
    assert [line.partition(": ")[2] for line in unsafe(source)] == [construct]


def test_leaves_the_safe_namesakes_alone():
    safe = ["policy.eval()", "yaml.safe_load(x)", "numpy.load(x, allow_pickle=False)", "run(x, shell=False)"]
    assert list(unsafe("\n".join(safe))) == []


def test_every_module_has_a_name():
    folders = ("grpo", "tests", "docs", "examples", "bench")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    nameless = [m for m in modules if NAMELESS & {*m.relative_to(ROOT).parent.parts, m.stem}]
    assert nameless == []
