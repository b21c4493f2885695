"""Public names, their parameters and defaults, and the settings are those of public.txt: none changes by accident."""

import difflib
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOW = """what is public has changed. If that is meant: keep the old spelling working if possible (docs/stability.md),
write a line into CHANGELOG.md, run `python scripts/public_names.py` and commit tests/architecture/public.txt."""


@pytest.fixture(scope="module")
def names():
    pytest.importorskip("gymnasium")
    pytest.importorskip("transformers")
    return runpy.run_path(str(ROOT / "scripts" / "public_names.py"))


def test_what_is_public_is_listed(names):
    listed = names["LIST"].read_text(encoding="utf-8").splitlines()
    changed = [
        *difflib.unified_diff(listed, names["listing"]().splitlines(), "public.txt", "the code", n=0, lineterm="")
    ]
    assert changed == [], HOW


def test_a_change_of_any_kind_is_seen(names):
    def before(a, b=1, *, c=None): ...
    def after(a, b=2, *, c=None): ...
    def renamed(a, d=1, *, c=None): ...

    said = [names["described"]("f", function) for function in (before, after, renamed)]
    assert said[0] == ["f(a, b=1, *, c=None)"] and len({*map(tuple, said)}) == 3
