"""`pytest tests/golden --golden DIR` runs any folder of vectors in the format of `tests/golden/README.md`."""

from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--golden", metavar="DIR", help="folder of golden vectors to run instead of tests/golden/data")


def pytest_generate_tests(metafunc):
    if "vector" not in metafunc.fixturenames:
        return
    from tests.golden.backends import BACKENDS
    from tests.golden.vectors import load

    folder = metafunc.config.getoption("--golden")
    vectors = load(Path(folder) if folder else Path(__file__).parent / "data")
    cases = [(vector, backend) for vector in vectors for backend in BACKENDS if backend.runs(vector)]
    metafunc.parametrize(("vector", "backend"), [pytest.param(v, b, id=f"{v.file}:{v.id}:{b.name}") for v, b in cases])
