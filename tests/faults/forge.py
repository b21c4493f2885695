"""A process that has torch loaded and forks a child for every run that is to be hurt: cheap, no threads of pytest's.

    python -m tests.faults.forge          one JSON job a line in, one JSON result a line out

A job: {"path": …, "steps": …, "hurt": [[point, nth, signal], …], "kill_after": seconds, "kill_with": signal,
"second": bool, "closed": [descriptor, …], "model": folder of a language run's, "options": {}}.
`hurt` sends the signal the nth time the point is reached; `closed` ones are printed to at each. A result:
{"code": …} is the exit code, or −signal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Forge:
    """The test's end of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.forge"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )

    def __call__(self, path: Path, steps: int = 12, **job: Any) -> dict[str, Any]:
        self._process.stdin.write(json.dumps({"path": str(path), "steps": steps, **job}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


def child(job: dict[str, Any]) -> int:
    """One run, hurt as asked."""
    from grpo.run.lock import Busy
    from grpo.run.signals import StopSignals
    from tests.faults.tiny import train

    seen: Counter[str] = Counter()
    path = Path(job["path"])

    for number in job.get("closed", []):
        os.close(number)

    def at(point: str) -> None:
        seen[point] += 1
        for number in job.get("closed", []):
            os.write(number, b"as a library would, past Python")
        for name, nth, number in job.get("hurt", []):
            if (name, nth) == (point, seen[point]):
                os.kill(os.getpid(), number)
                noted()
        if job.get("second") and (point, seen[point]) == ("step", 2):
            os._exit(77 if refused(path) else 78)

    def noted() -> None:
        """Wait until the run has heard it: a system delivers two signals of a kind that come together as one."""
        listener, until = getattr(signal.getsignal(signal.SIGINT), "__self__", None), time.monotonic() + 10
        while isinstance(listener, StopSignals) and listener.reason is None and time.monotonic() < until:
            time.sleep(0.001)

    def refused(path: Path) -> bool:
        """Whether another process is kept out, told whom to ask, and changes nothing."""
        before, owner = (path / "metrics.jsonl").read_bytes(), os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                train(path)
            except Busy as error:
                os._exit(0 if f"process {owner}" in str(error) else 1)
            os._exit(2)
        return os.waitpid(pid, 0)[1] == 0 and (path / "metrics.jsonl").read_bytes() == before

    if "model" in job:
        from tests.faults import tiny_language

        return tiny_language.train(path, job["steps"], at, job["model"], **job.get("options", {}))
    summary, _ = train(path, job["steps"], at=at, **job.get("options", {}))
    return summary.exit_code


def serve() -> None:
    """Fork a child for each job and say how it ended."""
    import torch

    from tests.faults.tiny import train

    torch.set_num_threads(1)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a suite under nohup would hand its deafness on
    with tempfile.TemporaryDirectory() as warm:  # torch loads much of itself with the first optimizer step
        train(Path(warm) / "run", 1)
    for line in sys.stdin:
        job = json.loads(line)
        if "model" in job:
            import tests.faults.tiny_language  # noqa: F401  before the fork, for all that follow
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            try:
                os._exit(child(job))
            except KeyboardInterrupt:
                os._exit(99)
            except BaseException:
                os._exit(98)
        if "kill_after" in job:
            time.sleep(job["kill_after"])
            os.kill(pid, job.get("kill_with", signal.SIGKILL))
        status = os.waitpid(pid, 0)[1]
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    serve()
