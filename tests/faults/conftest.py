"""One forge for all faults, and the run that nothing happened to."""

import time

import pytest

from tests.faults.forge import Forge
from tests.faults.tiny import fingerprint


@pytest.fixture(scope="session")
def forge():
    made = Forge()
    yield made
    made.close()


@pytest.fixture(scope="session")
def whole(forge, tmp_path_factory):
    """The uninterrupted run: its path, what it leaves, how long it took."""
    path = tmp_path_factory.mktemp("whole") / "run"
    forge(tmp_path_factory.mktemp("warm") / "run", 1)  # the first answer waits for loading
    began = time.perf_counter()
    assert forge(path)["code"] == 0
    return path, fingerprint(path), time.perf_counter() - began
