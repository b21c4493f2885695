"""One pool of processes for all tests of ranks."""

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool():
    made = Pool()
    yield made
    made.close()
