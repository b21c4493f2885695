"""A command's libraries stay out of searches for garbage, and their threads rest; what a run leaves does not."""

import gc
import os
import subprocess
import sys
from pathlib import Path

from grpo.app.loading import loading, resting

ROOT = str(Path(__file__).parents[3])
SCRIPT = """
import gc, sys
from grpo.app.loading import loading
try:
    with loading():
        assert not gc.isenabled(), "it searches while libraries are loaded"
        {loads}
finally:
    print(gc.isenabled(), gc.get_freeze_count() > 1000)
"""


def told(loads: str) -> str:
    ended = subprocess.run([sys.executable, "-c", SCRIPT.format(loads=loads)], capture_output=True)
    return ended.stdout.decode().strip()


def test_what_was_loaded_is_left_alone_and_searching_goes_on() -> None:
    assert told("import pydantic") == "True True"


def test_searching_goes_on_where_a_library_is_missing() -> None:
    assert told("import no_such_library").startswith("True")


ENV = """
import gymnasium as gym, numpy as np

class Env(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(2)

    def __init__(self):
        self.log = open("log.txt", "a")
        self.note = self.said  # a cycle: nothing but a search for garbage closes the file

    def said(self, text):
        self.log.write(text)

    def reset(self, *, seed=None, options=None):
        self.note("reset ")
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(action), True, False, {}
"""


def test_a_file_that_an_environment_left_open_is_written_when_the_command_ends(tmp_path) -> None:
    (tmp_path / "env.py").write_text(ENV, encoding="utf-8")
    words = "train --env env.py:Env --group-size 2 --starts 2 --run.steps 1 --vector serial --video false --films false"
    command = [sys.executable, "-m", "grpo", *words.split(), "--logdir", "run"]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ROOT}
    )
    assert ended.returncode == 0, ended.stderr
    assert "reset" in (tmp_path / "log.txt").read_text(encoding="utf-8")


def test_a_process_that_had_its_libraries_already_keeps_its_garbage_in_sight() -> None:
    """A notebook's or a test's: what is alive there may become garbage later."""
    import torch  # noqa: F401

    before = gc.get_freeze_count()
    with loading():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_threads_rest_unless_somebody_wants_them_otherwise(monkeypatch) -> None:
    monkeypatch.delenv("OPENBLAS_THREAD_TIMEOUT", raising=False)
    resting()
    assert os.environ["OPENBLAS_THREAD_TIMEOUT"] == "12"
    monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", "20")
    resting()
    assert os.environ["OPENBLAS_THREAD_TIMEOUT"] == "20"


def test_a_command_says_so_before_numpy_is_there() -> None:
    source = "import os, sys; sys.argv = ['grpo']\n"
    source += "from grpo.cli import main; main()\n"
    source += "print('numpy' in sys.modules, 'OPENBLAS_THREAD_TIMEOUT' in os.environ)"
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "False True"
