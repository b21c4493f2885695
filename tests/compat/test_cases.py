"""The list of TRL's own test cases: complete, every one represented by a test that is there, or with the reason."""

import importlib
import math
import tomllib
from pathlib import Path

import pytest

CASES = tomllib.loads((Path(__file__).parent / "cases.toml").read_text(encoding="utf-8"))["cases"]
TOTAL, WANTED = 175, 144
"""Cases there are, and how many of them must be represented at least."""


def passes(case):
    return case.get("passes", case["count"])


def test_most_of_trls_cases_are_represented():
    assert sum(case["count"] for case in CASES.values()) == TOTAL
    assert sum(passes(case) for case in CASES.values()) >= WANTED


@pytest.mark.parametrize("name", sorted({case["test"] for case in CASES.values() if "test" in case}))
def test_a_test_that_represents_cases_is_there_and_has_as_many(name):
    file, function = name.split("::")
    found = getattr(importlib.import_module(f"tests.compat.{file.removesuffix('.py')}"), function)
    marks = [mark for mark in getattr(found, "pytestmark", []) if mark.name == "parametrize"]
    claimed = sum(passes(case) for case in CASES.values() if case.get("test") == name)
    assert math.prod(len(list(mark.args[1])) for mark in marks) >= claimed


def test_every_case_that_is_not_represented_says_why():
    assert all(case.get("reason") for case in CASES.values() if passes(case) < case["count"])
    assert all("test" in case for case in CASES.values() if passes(case))
