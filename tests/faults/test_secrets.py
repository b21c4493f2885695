"""Secrets that are planted wherever a run gets something from appear in nothing that it leaves or says."""

import contextlib
import json
import os
import stat
import sys
from pathlib import Path

import pytest

from grpo import cli
from grpo.control import GRPOTrainer
from grpo.errors import SamplesFailed
from grpo.run.folder import RunFolder
from tests.faults.tiny import QUICK, make_folder, make_trainer, run

WALK = """
import os
from gymnasium.envs.classic_control import CartPoleEnv
class Env(CartPoleEnv):
    def __init__(self, **kwargs): super().__init__()
    def reset(self, **kwargs):
        found = super().reset(**kwargs)
        if os.environ.get("TELL"):
            raise RuntimeError(os.environ["TELL"])
        return found
"""
REWARD = """
import os
def talkative(completion, trainer_state):
    if trainer_state.global_step > 1:
        raise RuntimeError("401: " + os.environ["TELL"])
    return 1.0 + len(completion) + completion.count("1")
"""
VARIABLES = {"OPENAI_KEY": "planted-aa-1", "PGPASSWORD": "planted-bb-2", "DB_PASS": "planted-cc-3"}
VARIABLES |= {"GITHUB_PAT": "planted-dd-4", "DATABASE_URL": "postgres://me:planted-ee-5@host/db"}
SETTINGS = {"api_key": "planted-ff-6", "api_keys": ["planted-gg-7"], "auth": {"user": "me", "pw": "planted-hh-8"}}
SETTINGS |= {"url": "https://host/v1?api_key=planted-ii-9", "redis": "redis://:planted-jj-10@host/0"}
PLANTED = [f"planted-{2 * letter}-{n}" for n, letter in enumerate("abcdefghijkl", 1)]


@pytest.fixture
def planted(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TELL", "")
    return monkeypatch


def expect_none(text: bytes, where: object) -> None:
    assert not [secret for secret in PLANTED if secret.encode() in text], where


def commanded(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["grpo", *words])
    return cli.main([*words])


def test_planted_secrets_appear_in_nothing_that_a_model_leaves(tmp_path, planted, capfd):
    """Config, events, samples, logs, manifests, card and exported folder of a language run, resumed once."""
    (tmp_path / "judge.py").write_text(REWARD)
    planted.setenv("TELL", " ".join(PLANTED))
    words = ["train", "tiny-language", "--rewards", f"{tmp_path}/judge.py:talkative", "--eval-by", "talkative"]
    words += ["--groups-per-step", "1", "--groups-per-minibatch", "1", "--group-size", "2", "--warm-start-steps", "0"]
    secret = ["--chat-template-kwargs", json.dumps(SETTINGS), "--run.project", "https://me:planted-kk-11@host/x"]
    secret += ["--system-prompt", "see https://h/?token=planted-ll-12"]
    words += [*secret, "--num-iterations", "1", "--reward-workers", "1"]
    words += ["--run.logdir", str(tmp_path / "run"), "--run.failure-budget", "1", "--run.sample-every", "1"]
    words += ["--run.checkpoint-every", "1", "--preflight", "false", "--run.best-by", "reward"]
    assert commanded(planted, *words, "--run.steps", "2") == 0
    assert commanded(planted, "train", "--resume", str(tmp_path / "run"), *secret, "--run.steps", "3") == 0
    assert commanded(planted, "export", str(tmp_path / "run"), "--to", str(tmp_path / "model")) == 0
    run, files = tmp_path / "run", [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in files:
        expect_none(path.read_bytes(), path)
    told = capfd.readouterr()
    expect_none((told.out + told.err).encode(), "what was printed")
    assert "[redacted]" in (run / "config.json").read_text() and "[redacted]" in (run / "events.jsonl").read_text()
    assert {"manifest.json", "README.md", "step-00000001.jsonl", "run.json"} <= {path.name for path in files}
    assert "401: [redacted]" in (run / "events.jsonl").read_text() + (run / "samples/step-00000002.jsonl").read_text()


def test_a_script_that_goes_on_knows_its_secrets(tmp_path, planted):
    """The folder does not hold them any more; the trainer's settings do."""
    (tmp_path / "walk.py").write_text(WALK)
    small = {"group_size": 2, "groups_per_step": 1, "num_iterations": 1, "hidden": (4,), "video": False}
    given = {"env": f"{tmp_path}/walk.py:Env", "env_kwargs": SETTINGS, "vector": "serial", "max_episode_steps": 5}
    for step in (1, 2):
        made = GRPOTrainer(**given | small)
        made.train(steps=step, folder=tmp_path / "run", progress=None)
        made.source.close()
    folder = RunFolder.open(tmp_path / "run")
    made = GRPOTrainer(**given | small)
    planted.setenv("TELL", " ".join(PLANTED[:10]))
    with contextlib.suppress(SamplesFailed):
        made.train(steps=3, folder=tmp_path / "run", progress=None)
    made.source.close()
    assert any("[redacted]" in row["message"] for row in folder.events())
    for path in (tmp_path / "run").rglob("*"):
        expect_none(path.read_bytes() if path.is_file() else b"", path)


def test_a_run_does_not_go_on_with_what_stands_for_a_secret(tmp_path, monkeypatch, capsys):
    """Given again it goes on, also with another secret; ordinary settings that sound like one were kept."""
    (tmp_path / "walk.py").write_text(WALK)
    plain = {"num_keys": 3, "success_key": "won", "mlp_keys": "state|goal", "separator_token": "<sep>", "n_pass": "two"}
    run = tmp_path / "run"
    words = ["--env", f"{tmp_path}/walk.py:Env", "--group-size", "2", "--groups-per-step", "1", "--vector", "serial"]
    words += ["--max-episode-steps", "5", "--video", "false", "--num-iterations", "1", "--hidden", "[4]"]
    words += ["--eval-episodes", "2", "--run.steps", "1", "--run.logdir", str(run)]
    given = json.dumps(plain | {"api_key": PLANTED[0]})
    assert commanded(monkeypatch, "train", "cartpole", *words, "--env-kwargs", given) == 0
    assert RunFolder.open(run).config["env_kwargs"] == plain | {"api_key": "[redacted]"}
    capsys.readouterr()
    more = ["train", "--resume", str(run), "--run.steps", "2"]
    assert commanded(monkeypatch, *more) == 2
    told = capsys.readouterr().err
    assert f"{run}/config.json: env_kwargs.api_key was taken for a secret" in told and "--env-kwargs" in told
    other = plain | {"num_keys": 4, "api_key": PLANTED[1]}
    assert commanded(monkeypatch, *more, "--env-kwargs", json.dumps(other)) == 2
    assert "num_keys: 3 → 4" in capsys.readouterr().err
    assert commanded(monkeypatch, *more, "--env-kwargs", json.dumps(other | {"num_keys": 3})) == 0


def test_a_path_below_the_working_folder_is_kept(tmp_path, monkeypatch, capsys):
    """PWD, HOME and their like are no secrets: a run must find its files again."""
    (tmp_path / "walk.py").write_text(WALK)
    monkeypatch.chdir(tmp_path)
    for name in ("PWD", "OLDPWD", "HOME", "SSH_AUTH_SOCK", "MY_CREDENTIALS", "PROJECT_KEY"):
        monkeypatch.setenv(name, str(tmp_path))
    words = ["train", "cartpole", "--env", f"{tmp_path}/walk.py:Env", "--group-size", "2", "--groups-per-step", "1"]
    words += ["--vector", "serial", "--max-episode-steps", "5", "--run.logdir", f"{tmp_path}/run", "--video", "false"]
    words += ["--num-iterations", "1", "--hidden", "[4]", "--eval-episodes", "2"]
    assert commanded(monkeypatch, *words, "--run.steps", "1") == 0
    assert RunFolder.open("run").config["env"] == f"{tmp_path}/walk.py:Env"
    assert "redacted" not in "".join(path.read_text() for path in Path("run").glob("*.json*"))
    assert commanded(monkeypatch, "train", "--resume", "run", "--run.steps", "2") == 0
    assert commanded(monkeypatch, "eval", "run", "--episodes", "1") == 0


@pytest.mark.parametrize(("mask", "others"), [(0o077, 0), (0o027, stat.S_IRGRP | stat.S_IXGRP)])
def test_files_are_as_open_as_the_users_umask_says(mask, others, tmp_path):
    before = os.umask(mask)
    try:
        run(make_trainer(), 4, make_folder(tmp_path / "run"), trackers=["tensorboard"], **QUICK | {"curve": True})
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o077 for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]}
    assert len(modes) > 10 and not {str(path): oct(mode) for path, mode in modes.items() if mode & ~others}
