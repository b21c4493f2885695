"""One browser for all, servers in threads of this process; `GRPO_PICTURES=docs/figures` keeps screenshots there."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo.run.folder import RunFolder
from grpo.view.launch import DEMO
from tests.browser.chromium import Page, installed, launch


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
    """The server of `grpo view` over a folder; gives its address."""
    import uvicorn

    from grpo.view.library import Library
    from grpo.view.server import make_app

    settings = uvicorn.Config(make_app(Library(folder), "127.0.0.1", None), port=0, log_level="error", ws="none")
    server = uvicorn.Server(settings)
    settings.timeout_graceful_shutdown = 1
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="session")
def pictures() -> Path | None:
    """Where screenshots go, if anybody wants them."""
    wanted = os.environ.get("GRPO_PICTURES")
    return Path(wanted) if wanted else None


@pytest.fixture(scope="session")
def runs(tmp_path_factory, browser) -> Path:
    """What a person has after an afternoon: the runs of `grpo view --demo`, a world model, and one with films."""
    from grpo.cli import main

    root = tmp_path_factory.mktemp("view") / "runs"
    shutil.copytree(DEMO, root)
    dream = ["--env", "CartPole-v1", "--pretrain", "2", "--eval-episodes", "1", "--run.steps", "2"]
    dream += ["--run.sample_every", "1", "--run.name", "dream", "--run.logdir", str(root / "{name}")]
    assert main(["train", "dreamer", "debug", *dream]) == 0
    filmed(root / "films", root / "cartpole-0" / "video.mp4")
    return root


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
