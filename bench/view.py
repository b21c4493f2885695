"""What `grpo view` costs on large run folders: server CPU and memory, in a process of its own.

many    100,000 groups: 12,500 steps of 8 groups of 8 short completions
long    2,000 groups of 8 completions of 1,024 tokens, over 250 steps
one     the same 2,000 groups in the file of a single step

First paint is everything the page asks for until it shows a run's curves and the groups of its newest step: its files,
the list, the run, metrics, timing, groups. The aims: under 1 s of CPU and under 300 MB. Then come reading all groups
(piece by piece, as the page asks again), a search over all text, one group and its tokens.
Writes bench/results/view.json.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from grpo.run.folder import RunFolder

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "view.json"
CASES = {"many": (12_500, 8, 12), "long": (250, 8, 1024), "one": (1, 2_000, 1024)}
"""Steps, groups a step, tokens a completion."""
GROUP = 8
AIM = {"first_paint_cpu_seconds": 1.0, "peak_mb": 300.0}
WORDS = (
    "the",
    "sum",
    "of",
    "both",
    "is",
    "carried",
    "over",
    "answer",
    "let",
    "us",
    "see",
    "then",
    "four",
    "nine",
    "so",
    "and",
)


def make_folder(path: Path, steps: int, groups: int, tokens: int) -> None:
    """A language run as its own writer leaves it, without waiting for the disk."""
    folder = RunFolder.create(
        path, task="language", config={"resolved": {"run.steps": steps}}, created="2026-11-15", seed=0
    )
    names = [f"metric/{k}" for k in range(30)]
    with (path / "metrics.jsonl").open("w") as metrics, (path / "timing.jsonl").open("w") as timing:
        for step in range(1, max(steps, 100) + 1):
            row = {
                "step": step,
                "reward": step / steps,
                "frac_reward_zero_std": 0.2,
                **dict.fromkeys(names, step * 0.37),
            }
            metrics.write(json.dumps(row) + "\n")
            timing.write(json.dumps({"step": step, "total": 1.5, "collect": 1.0, "update": 0.5}) + "\n")
    random = np.random.default_rng(0)
    text = [f"{WORDS[k]} " for k in random.integers(0, len(WORDS), tokens)]
    ending = json.dumps({"completion": "".join(text), "stop": "eos", "rewards": {"right": 1.0}, "tokens": text})[1:]
    arrays = io.BytesIO()
    shape = (groups * GROUP, tokens)
    numbers = {
        name: random.standard_normal(shape).astype(np.float16)
        for name in ("logp", "old_logp", "ratio", "term", "entropy")
    }
    np.savez_compressed(
        arrays, mask=np.ones(shape, bool), gate=np.ones(shape, bool), advantage=numbers["logp"], **numbers
    )
    for step in range(1, steps + 1):
        rows = (
            f'{{"row": {row}, "group": {row // GROUP}, "reward": {(row * step) % 7 / 6}, "advantage": {(row % 5) - 2}, '
            f'"decisions": {tokens}, "teaching": {tokens}, "status": "terminated", '
            f'"prompt": "question {(step * groups + row // GROUP) % 5000}", {ending}\n'
            for row in range(groups * GROUP)
        )
        (path / "samples" / f"step-{step:08d}.jsonl").write_text("".join(rows))
        (path / "samples" / f"step-{step:08d}.npz").write_bytes(arrays.getvalue())
    folder.write_status(
        {"steps": steps, "recipe": {"name": "grpo", "surrogate": "clip", "epsilon": 0.2}, "reason": "done"}
    )


class Viewer:
    """A served folder, and what the server's process has used."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-m", "grpo.cli", "view", str(root), "--no-browser"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().split()[2].rstrip("/")

    def ask(self, path: str) -> Any:
        """The answer: JSON, or bytes."""
        with urllib.request.urlopen(self.url + path, timeout=600) as answer:
            body = answer.read()
        return json.loads(body) if path.startswith("/api") else body

    def cpu(self) -> float:
        """Seconds of CPU so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mb(self) -> float:
        """The most memory it ever held."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1000

    def close(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)


def measure(root: Path) -> dict[str, Any]:
    viewer = Viewer(root)
    try:
        found: dict[str, Any] = {"start_cpu_seconds": viewer.cpu(), "start_mb": viewer.peak_mb()}

        def timed(name: str, work: Any) -> Any:
            cpu, began = viewer.cpu(), time.perf_counter()
            result = work()
            found[f"{name}_cpu_seconds"] = round(viewer.cpu() - cpu, 3)
            found[f"{name}_seconds"] = round(time.perf_counter() - began, 3)
            found[f"{name}_peak_mb"] = viewer.peak_mb()
            return result

        def paint() -> str:
            page = ROOT / "grpo" / "view" / "page"
            for path in ["/", *(f"/page/{file.relative_to(page)}" for file in page.rglob("*.js")), "/page/style.css"]:
                viewer.ask(path)
            run = viewer.ask("/api/runs")["runs"][0]["run"]
            detail = viewer.ask(f"/api/runs/{run}")
            for path in ("metrics", "timing", f"steps/{detail['sample_steps']['last']}/groups"):
                viewer.ask(f"/api/runs/{run}/{path}")
            viewer.ask("/api/docs")
            return f"/api/runs/{run}"

        def whole(path: str) -> dict[str, Any]:
            while not (answer := viewer.ask(path))["complete"]:
                pass
            return answer

        run = timed("first_paint", paint)
        timed("second_paint", paint)
        group = whole(f"{run}/groups?limit=1")["groups"][0]
        here = f"{run}/steps/{group['step']}/groups/{group['group']}"
        timed("one_group", lambda: viewer.ask(here))
        timed("its_tokens", lambda: viewer.ask(f"{here}/tokens"))
        viewer.close()
        viewer = Viewer(root)
        listed = timed("all_groups", lambda: whole(f"{run}/groups?sort=std&order=desc"))
        found["groups"] = listed["all"]
        timed("page_of_all_groups", lambda: whole(f"{run}/groups?sort=mean&offset=500"))
        timed("search", lambda: whole(f"{run}/groups?q=answer%20%22question%2077%22"))
        timed(
            "one_prompt_through_time", lambda: whole(f"/api/prompts/{group['prompt_key']}?run={run.rpartition('/')[2]}")
        )
        return found
    finally:
        viewer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "measures": "CPU seconds and peak memory of the server of `grpo view`, on large run folders",
        "aims": AIM, "python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine(),
        "rounds": arguments.rounds, "cases": {},
    }  # fmt: skip
    for case, (steps, groups, tokens) in CASES.items():
        with tempfile.TemporaryDirectory() as root:
            make_folder(Path(root) / "run", steps, groups, tokens)
            size = sum(file.stat().st_size for file in Path(root).rglob("*") if file.is_file())
            rounds = [measure(Path(root)) for _ in range(arguments.rounds)]
        figures = {name: sorted(one[name] for one in rounds) for name in rounds[0]}
        about = {
            "steps": steps,
            "groups_per_step": groups,
            "group_size": GROUP,
            "tokens": tokens,
            "folder_mb": round(size / 1e6),
        }
        cpu, peak = figures["first_paint_cpu_seconds"][-1], figures["first_paint_peak_mb"][-1]
        kept = cpu < AIM["first_paint_cpu_seconds"] and peak < AIM["peak_mb"]
        results["cases"][case] = about | {"aims_kept": kept, "figures": figures}
        print(case, "aims kept" if kept else "AIMS MISSED", json.dumps({k: v[len(v) // 2] for k, v in figures.items()}))
    arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
