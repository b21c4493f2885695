"""One browser and one server for all these tests; `GRPO_PICTURES=docs/figures` keeps their screenshots there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo.run.folder import RunFolder
from tests.browser.chromium import Page, installed, launch

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def browser():
    """Chromium, if it is installed."""
    paths = installed()
    if paths is None:
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    driver = launch(*paths)
    yield driver
    driver.quit()


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """`grpo view` over a folder, as its own process; gives the address that it prints."""
    command = [sys.executable, "-m", "grpo.cli", "view", str(folder), "--no-browser", "--no-token"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=plain()) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            yield next(found[0] for line in lines if (found := re.search(r"http://127[^\s#]*", line)))
        finally:
            process.terminate()


def plain() -> dict[str, str]:
    """The environment of a child: one thread, no proxy between it and the page."""
    return {k: v for k, v in os.environ.items() if "proxy" not in k.lower()} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def pictures() -> Path | None:
    """Where screenshots go, if anybody wants them."""
    wanted = os.environ.get("GRPO_PICTURES")
    return Path(wanted) if wanted else None


@pytest.fixture(scope="session")
def runs(tmp_path_factory, browser) -> Path:
    """Real runs of every room, small: what a person has after an afternoon."""
    from grpo.cli import main
    from tests.unit.language.tiny import tiny_model, tiny_tokenizer

    root = tmp_path_factory.mktemp("view")
    tiny_model().save_pretrained(root / "model")
    tiny_tokenizer().save_pretrained(root / "model")
    pairs = [(2, 3), (4, 5), (7, 1), (6, 6)]
    rows = [
        {"prompt": f"What is {a} + {b}?", "answer": f"<think>{a} and {b}</think>\nIt is **{a + b}**", "total": a + b}
        for a, b in pairs
    ]
    (root / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def train(*words: str) -> None:
        assert main(["train", *words, "--run.logdir", str(root / "runs" / "{name}")]) == 0

    rewards = json.dumps([f"{HERE / 'rewards.py'}:{name}" for name in ("right", "thought")])
    words = ["--model", str(root / "model"), "--rewards", rewards, "--reward-workers", "1", "--run.name", "sums"]
    words += ["--run.steps", "40", "--run.sample_every", "10", "--groups-per-step", "4", "--group-size", "6"]
    words += ["--num-iterations", "3", "--beta", "0.02", "--learning-rate", "0.001", "--max-completion-length", "40"]
    words += ["--warm-start-steps", "60", "--warm-start-batch", "16", "--warm-start-learning-rate", "0.01"]
    train(str(root / "sums.jsonl"), *words)
    for seed in ("0", "1"):
        steps = ["--run.steps", "6", "--run.sample_every", "1", "--run.stop_at", "1000"]
        train("cartpole", *steps, "--seed", seed, "--run.name", f"poles-{seed}")
    train("bandit", "--run.steps", "60", "--run.name", "arms")
    dream = ["--env", "CartPole-v1", "--pretrain", "10", "--eval-episodes", "4", "--run.steps", "2"]
    train("dreamer", *dream, "--run.sample_every", "1", "--run.name", "dream")
    filmed(root / "runs" / "films", root / "runs" / "poles-0" / "video.mp4")
    return root / "runs"


def filmed(path: Path, video: Path) -> None:
    """A run whose rows name a film and strips each, as a room may: of three episodes, the last the longest."""
    import matplotlib.image
    import numpy as np

    config = {"resolved": {"run.stop_at": 25, "run.best_by": "reward"}}
    run = RunFolder.create(path, task="control", config=config, created="2026-01-01T00:00:00+00:00", seed=0)
    run.append_metrics(1, {"reward": 20.0})
    run.append_metrics(2, {"reward": 30.0})
    lengths, rows = (10, 20, 30), []
    for row, length in enumerate(lengths):
        media = [{"kind": "video", "name": "episode", "file": f"film-{row}.mp4"}]
        shutil.copy(video, path / "samples" / media[0]["file"])
        for place, name in enumerate(("real", "imagined", "error")):
            media.append({"kind": "strip", "name": name, "file": f"{name}-{row}.png"})
            waves = np.sin(np.linspace(0, 6 + place, 30 * 16))[None, :] * np.linspace(0, 1, 16)[:, None]
            matplotlib.image.imsave(path / "samples" / media[-1]["file"], waves, cmap="gray")
        shown = {"actions": [t % 2 for t in range(length)], "rewards": [1.0] * length, "media": media}
        rows.append(
            {"row": row, "group": 0, "reward": float(length), "advantage": row - 1.0, "length": length, **shown}
        )
    mask = np.arange(30)[None, :] < np.array(lengths)[:, None]
    zeros = np.zeros(mask.shape, np.float16)
    advantage = zeros + np.array([-1, 0, 1], np.float16)[:, None]
    run.write_samples(1, rows, {"mask": mask, "gate": mask, "old_logp": zeros, "logp": zeros, "advantage": advantage})
    run.write_status({"steps": 100, "recipe": {}, "reason": "stopped"})
    run.close()


@pytest.fixture(scope="session")
def address(runs) -> Iterator[str]:
    """The server over those runs."""
    with serving(runs) as url:
        yield url


@pytest.fixture
def page(browser, address, pictures) -> Iterator[Page]:
    """The page of the module's server, which must not have stumbled by the end of the test."""
    page = Page(browser, address, pictures)
    page.complaints()  # of tests before
    yield page
    found = page.complaints()
    page.leave()
    assert [line for line in found if not re.search(r"status of 4\d\d", line)] == []  # those a view shows itself
