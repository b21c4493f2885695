"""How many processes a pool has of its own accord."""

import os
import subprocess
import sys

import pytest

ASKED = "from grpo.workers import processors; print(processors())"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to processors")
def test_processors_are_those_that_a_process_may_run_on():
    one = min(os.sched_getaffinity(0))
    bind = f"import os; os.sched_setaffinity(0, {{{one}}}); {ASKED}"
    assert subprocess.run([sys.executable, "-c", bind], capture_output=True, text=True).stdout.strip() == "1"


def test_processors_are_shared_with_the_other_ranks_of_a_machine(monkeypatch):
    from grpo import workers

    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _: range(12), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert workers.processors() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert workers.processors() == 1
