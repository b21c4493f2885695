"""How many processors are a process's own."""

import os
import subprocess
import sys

import pytest

import grpo.processors as module

ASKED = "from grpo.processors import processors; print(processors())"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to processors")
def test_processors_are_those_that_a_process_may_run_on():
    one = min(os.sched_getaffinity(0))
    bind = f"import os; os.sched_setaffinity(0, {{{one}}}); {ASKED}"
    assert subprocess.run([sys.executable, "-c", bind], capture_output=True, text=True).stdout.strip() == "1"


@pytest.mark.parametrize(
    ("variables", "bound", "expected"),
    [
        ({}, 12, 12),
        ({"LOCAL_WORLD_SIZE": "4"}, 96, 24),  # torchrun binds nobody …
        ({"LOCAL_WORLD_SIZE": "8"}, 12, 12),  # … srun may have given each rank its own
        ({"LOCAL_WORLD_SIZE": "128"}, 96, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 12, 12),
        ({"OMP_PROC_BIND": "true"}, 1, 96),
        ({"OMP_PROC_BIND": "false", "OMP_PLACES": "cores"}, 12, 12),
        ({"OMP_PLACES": "cores"}, 1, 96),
        ({"OMP_PROC_BIND": "true", "LOCAL_WORLD_SIZE": "2"}, 1, 48),
    ],
)
def test_processors_are_those_of_a_rank_and_not_of_a_thread(monkeypatch, variables, bound, expected):
    for name in ("LOCAL_WORLD_SIZE", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 96)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: range(bound), raising=False)
    assert module.processors() == expected
