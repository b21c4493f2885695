"""A short soak: memory, open files, threads and the folder stay flat. `make soak` does the same for very many steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.run.folder import RunFolder

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("room", "steps", "most"), [pytest.param("bandit", 300, 400, marks=pytest.mark.slow), ("language", 40, 5000)]
)
def test_many_steps_leave_nothing_but_their_folder(room, steps, most, tmp_path):
    """In a process of its own, whose memory nobody else decides. Bytes a step that Python's allocator holds show a row
    that is kept; resident memory would show it after hours. A language model's trainer keeps the last 10,000 rows of
    its `log_history`."""
    plan = {"checkpoint_every": steps // 8, "sample_every": 2, "keep_samples": 20}
    command = [sys.executable, str(ROOT / "bench" / "soak.py"), "--room", room, "--steps", str(steps), "--trace"]
    done = subprocess.run(
        [*command, "--place", str(tmp_path), "--plan", json.dumps(plan)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["steps"], found["reason"]) == (steps, "done")
    half, last = found["looks"][len(found["looks"]) // 2 - 1], found["looks"][-1]
    assert (last["traced"] - half["traced"]) / (last["step"] - half["step"]) < most
    assert last["memory_mb"] - half["memory_mb"] < 5
    for name in ("files", "threads", "children"):  # at its very end a run opens events.jsonl for what it noticed
        assert found["looks"][-2][name] <= max(row[name] for row in found["looks"][: len(found["looks"]) // 2]), name
    folder = RunFolder.open(tmp_path / "run")
    assert len(folder.sample_steps()) <= 30
    assert len(folder.metrics()) == len(folder.timing()) == steps  # thinned from 1,000 lines on
    assert len(list(folder.checkpoints.iterdir())) <= 4  # the newest two, the best, the pointer
