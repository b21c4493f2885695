"""A run folder that somebody sends: looking at it, and going on with it, runs none of the code that came along."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import gymnasium as gym
import pytest

from grpo import cli
from grpo.app import builders, look, trust
from grpo.app.explain import meanings
from grpo.config import ConfigError, NamedCode
from grpo.control import ControlConfig
from grpo.control import GRPOTrainer as ControlTrainer
from grpo.language import GRPOTrainer, LanguageConfig
from grpo.run.folder import RunFolder
from grpo.run.stepping import Summary
from grpo.worldmodel import WorldModelConfig
from tests.unit.language.tiny import tiny_model, tiny_tokenizer

EVIL = """
from importlib import import_module
from pathlib import Path
Path({marker!r}).touch()
from gymnasium.envs.classic_control import CartPoleEnv as Env
def reward(completion): return 1.0
def tool(x: int) -> int:
    '''A tool.

    Args:
        x: a number
    '''
    return x
class Talk:
    def reset(self, row): return ""
    def step(self, text): return "", 1.0, True
"""
PROMPTS = {"model": "tiny", "dataset": "sort-digits"}


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "it-ran"


def written(place: Path, marker: Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(EVIL.format(marker=str(marker)))
    return place


def sent(path: Path, task: str, marker: Path, **settings) -> Path:
    """A run folder with evil.py inside; its settings may say {here} for where it is."""
    told = json.loads(json.dumps(settings).replace("{here}", str(path)))
    RunFolder.create(path, task=task, config={"task": task, **told}, created="2026-11-15T10:15:00Z", seed=0)
    written(path / "evil.py", marker)
    return path


def said(capsys, *words: str) -> tuple[int, str]:
    code = cli.main([*words])
    return code, capsys.readouterr().err


ENVS = ["{here}/evil.py:Env", "{here}/../run/evil.py:Env", "{here}/checkpoints/../evil.py:Env"]
REWARD, TOOL, TALK = "{here}/evil.py:reward", "{here}/evil.py:tool", "{here}/evil.py:Talk"
DRAWN = {"env": "grpo.envs.pictures:drawn", "env_kwargs": {"id": "{here}/evil.py:Env"}}
CASES = [
    *((task, {"env": env}, "env") for task in ("control", "worldmodel") for env in ENVS),
    *((task, DRAWN, "env_kwargs") for task in ("control", "worldmodel")),
    ("control", {"warm_start": "{here}/evil.py:reward"}, "warm_start"),
    ("language", PROMPTS | {"rewards": ["length", REWARD]}, "rewards"),
    ("language", PROMPTS | {"rewards": ["{here}/evil.py"]}, "rewards"),
    ("language", PROMPTS | {"rewards": ["length"], "tools": [TOOL]}, "tools"),
    ("language", PROMPTS | {"environment": TALK}, "environment"),
]


@pytest.mark.parametrize(("task", "settings", "setting"), CASES)
def test_no_command_runs_code_that_lies_inside(task, settings, setting, tmp_path, marker, capsys):
    run = sent(tmp_path / "run", task, marker, **settings)
    doors = [["eval", str(run)], ["train", "--resume", str(run)]]
    if setting != "rewards":  # saving and talking need none: see below
        doors += [["export", str(run)], *([["chat", str(run), "--message", "?"]] if task == "language" else [])]
    for words in doors:
        code, error = said(capsys, *words)
        assert code == 2 and "--trust" in error and "evil.py" in error and f"{run}/config.json: {setting}" in error
    with pytest.raises(ConfigError, match="trust=True"):
        look.trained(run)
    assert not marker.exists()


@pytest.mark.parametrize(
    "word", ["evil:Env", "run.evil:Env", "evil/Env-v0", "Evil/Env-v0", "./evil.py:Env", "~/evil.py:Env"]
)
@pytest.mark.parametrize("inside", [True, False])
def test_a_module_is_found_without_importing_it(word, inside, tmp_path, marker, capsys, monkeypatch):
    """The working folder is searched for modules: it may be the run's own, or the one around it."""
    run = sent(tmp_path / "run", "control", marker, env=word)
    written(run / "~" / "evil.py", marker)
    written(run / "Evil.py", marker)
    monkeypatch.chdir(run if inside else tmp_path)
    monkeypatch.setenv("HOME", str(run))
    reachable = inside != word.startswith("run.") or word.startswith("~")
    code, error = said(capsys, "eval", str(run))
    assert code == 2 and ("--trust" in error) == reachable and not marker.exists()


def test_links_are_followed_before_it_is_decided(tmp_path, marker, capsys):
    outside = written(tmp_path / "mine" / "walk.py", marker)
    run = sent(tmp_path / "run", "control", marker, env="{here}/linked.py:Env")
    (run / "linked.py").symlink_to(outside)  # who made the folder chose it
    (tmp_path / "alias").symlink_to(run)
    (tmp_path / "file.py").symlink_to(run / "evil.py")
    for word in (f"{run}/linked.py", f"{tmp_path}/alias/linked.py", f"{tmp_path}/file.py", "/proc/self/cwd/evil.py"):
        config = json.loads((run / "config.json").read_text()) | {"env": f"{word}:Env"}
        (run / "config.json").write_text(json.dumps(config))
        before = os.getcwd()
        os.chdir(run)
        try:
            code, error = said(capsys, "eval", str(tmp_path / "alias"))
        finally:
            os.chdir(before)
        assert code == 2 and "--trust" in error and not marker.exists(), word


WITH_ENVS = ("control", "worldmodel")
GADGETS = [
    ("control", {"env": "os:system", "env_kwargs": {"command": "touch {here}/it"}}),
    ("control", {"env": "subprocess:run", "env_kwargs": {"args": ["touch", "{here}/it"]}}),
    ("control", {"env": "runpy:run_path", "env_kwargs": {"path_name": "{here}/evil.py"}}),
    ("control", {"env": "grpo.cli:main", "env_kwargs": {"argv": ["train", "--env", "x"]}}),
    ("control", {"env": "torch.hub:load", "env_kwargs": {"repo_or_dir": "{here}", "source": "local"}}),
    ("control", {"env": "gymnasium:make", "env_kwargs": {"id": "evil:Env-v0"}}),
    ("control", {"env": "grpo.envs.pictures:drawn", "env_kwargs": {"id": "os:system"}}),
    ("control", {"env": "{library}:system"}),
    ("control", {"env": "__main__:main"}),
    *((task, {"env": "{other}:getoutput", "env_kwargs": {"cmd": "touch {here}/it"}}) for task in WITH_ENVS),
    ("control", {"env": "grpo.envs.pictures:drawn", "env_kwargs": {"id": "{other}:getoutput"}}),
    ("control", {"env": "grpo.envs.pictures:drawn", "env_kwargs": {"id": "sys:exit"}}),
    ("control", {"env": "/opt/conda/lib/python3.12/site-packages/torch/hub.py:load"}),
    ("control", {"env": "/srv/x/Lib/site-packages/torch/hub.py:load"}),
    ("control", {"env": "/usr/share/dh-python/dhpython/tools.py:execute"}),
    ("control", {"warm_start": "{other}:getoutput"}),
    ("worldmodel", {"reward": "{other}:getoutput"}),
    ("language", PROMPTS | {"rewards": ["length"], "tools": ["{other}:getoutput"]}),
    ("language", PROMPTS | {"environment": "{other}:Popen"}),
    ("language", PROMPTS | {"rewards": ["length"], "tools": ["os:system"]}),
    ("language", PROMPTS | {"environment": "subprocess:Popen"}),
    ("language", PROMPTS | {"rewards": ["length"], "trust_remote_code": True, "model": "{here}/model"}),
    ("language", PROMPTS | {"rewards": ["length"], "trust_remote_code": True, "model": "somebody/model"}),
    ("language", PROMPTS | {"rewards": ["length"], "model_kwargs": {"weights_only": False}}),
    (
        "language",
        PROMPTS | {"rewards": ["length"], "engine": "vllm", "engine_kwargs": {"worker_extension_cls": "evil.E"}},
    ),
]


@pytest.mark.parametrize(("task", "settings"), GADGETS, ids=str)
def test_functions_that_were_not_made_for_it_are_not_called(task, settings, tmp_path, marker, capsys):
    other = tmp_path / "lib" / "python3.9" / "subprocess.py"  # another Python's
    other.parent.mkdir(parents=True)
    shutil.copy(subprocess.__file__, other)
    told = json.dumps(settings).replace("{library}", os.__file__).replace("{other}", str(other))
    settings = json.loads(told)
    run = sent(tmp_path / "run", task, marker, **settings)
    (run / "model").mkdir()
    doors = [["eval", str(run)], ["export", str(run)], ["train", "--resume", str(run)]]
    for words in doors + ([["chat", str(run), "--message", "?"]] if task == "language" else []):
        code, error = said(capsys, *words)
        assert code == 2 and "--trust" in error
    assert not marker.exists() and not (run / "it").exists()


@pytest.mark.parametrize("word", ["{other}:getoutput", "{other}"])
def test_a_reward_of_another_python_is_not_loaded(word, tmp_path, marker, capsys):
    other = written(tmp_path / "usr" / "lib" / "python3.9" / "evil.py", marker)
    (tmp_path / "linked").symlink_to(other.parent)
    for place in (other, tmp_path / "linked" / "evil.py"):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        told = PROMPTS | {"rewards": ["length", word.replace("{other}", str(place))]}
        run = sent(tmp_path / "run", "language", marker, **told)
        code, error = said(capsys, "eval", str(run))
        assert code == 2 and "--trust" in error and not marker.exists()


def test_addresses_of_a_run_are_not_asked_by_who_looks_at_it(tmp_path, capsys):
    """Its servers may be gone, or somebody else's: the model that is looked at samples here, and nobody teaches."""
    run = tmp_path / "run"
    how = {"max_completion_length": 4, "group_size": 2, "groups_per_step": 1, "device": "cpu", "warm_start_steps": 0}
    made = GRPOTrainer(args=LanguageConfig(**PROMPTS, **how, rewards=["length"]))
    made.train(steps=1, folder=run, progress=None)
    made.source.close()
    (tmp_path / "run" / "config.json").rename(tmp_path / "config.json")
    config = json.loads((tmp_path / "config.json").read_text())
    with socket.create_server(("127.0.0.1", 0)) as port:
        port.settimeout(0.1)
        address = f"http://127.0.0.1:{port.getsockname()[1]}"
        for more in (
            {"engine": "vllm", "servers": [address], "staleness": 1.0},
            {"engine": "vllm", "engine_kwargs": {"base_url": address}},
            {"loss_type": "opd", "teacher": address},
        ):
            (run / "config.json").write_text(json.dumps(config | more))
            assert said(capsys, "eval", str(run), "--limit", "2")[0] == 0
            assert said(capsys, "chat", str(run), "--message", "3,1")[0] == 0
            with pytest.raises(TimeoutError):
                port.accept()


# --- what must go on working ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def controlled(tmp_path_factory):
    """A run with an environment of one's own, outside of its folder."""
    place = tmp_path_factory.mktemp("own")
    written(place / "walk.py", place / "it-ran")
    options = {"group_size": 2, "groups_per_step": 1, "num_iterations": 1, "hidden": (4,), "video": False}
    made = ControlTrainer(env=f"{place}/walk.py:Env", vector="serial", max_episode_steps=5, **options)
    made.train(steps=1, folder=place / "run", progress=None)
    made.source.close()
    return place


def loaded_again() -> None:
    """Forget the files that were loaded, as a new process would."""
    for name in [name for name, module in sys.modules.items() if Path(str(module.__dict__.get("__file__"))).name in
                 ("walk.py", "evil.py")]:  # fmt: skip
        del sys.modules[name]


def test_a_run_of_ones_own_is_looked_at_and_gone_on_with(controlled, capsys):
    loaded_again()
    assert said(capsys, "eval", str(controlled / "run"), "--episodes", "1")[0] == 0
    assert said(capsys, "train", "--resume", str(controlled / "run"), "--run.steps", "2")[0] == 0
    assert RunFolder.open(controlled / "run").metrics()[-1]["step"] == 2


@pytest.mark.parametrize("word", ["random:3", "select:best", "cuda:0", "http://host", "torch:fast", "time:12:30"])
def test_words_of_an_environment_are_no_code(word, tmp_path, marker, capsys):
    run = sent(tmp_path / "run", "control", marker, env="CartPole-v1", env_kwargs={"policy": word})
    assert "has no checkpoint yet" in said(capsys, "eval", str(run))[1]


def test_what_is_confirmed_runs(controlled, tmp_path, marker, capsys):
    run = tmp_path / "run"
    shutil.copytree(controlled / "run", run)
    written(run / "evil.py", marker)
    config = json.loads((run / "config.json").read_text()) | {"env": f"{run}/evil.py:Env"}
    (run / "config.json").write_text(json.dumps(config))
    assert said(capsys, "eval", str(run), "--episodes", "1")[0] == 2 and not marker.exists()
    assert said(capsys, "eval", str(run), "--episodes", "1", "--trust")[0] == 0 and marker.exists()
    marker.unlink()
    loaded_again()
    look.trained(run, trust=True)[0].source.close()
    assert marker.exists()


@pytest.mark.parametrize(("inside", "flag"), [(True, " --trust"), (False, "")])
def test_what_is_said_at_the_end_goes_on(inside, flag, tmp_path, marker, capsys, monkeypatch):
    """Where the folder's settings will have to be confirmed, the command that is printed confirms them."""
    env = "{here}/evil.py:Env" if inside else f"{written(tmp_path / 'mine' / 'walk.py', marker)}:Env"
    run = sent(tmp_path / "run", "control", marker, env=env)
    monkeypatch.setattr(builders, "_run", lambda *_, **__: Summary("preempted", 1, run, None))
    cli.main(["train", "--resume", str(run), "--trust"])
    assert capsys.readouterr().out == f"go on with: grpo train --resume {run}{flag}\n"


def test_what_was_named_on_this_command_line_runs(tmp_path, marker, capsys):
    run = sent(tmp_path / "run", "control", marker, env="{here}/evil.py:Env")
    quick = ["--vector", "serial", "--video", "false", "--run.steps", "1", "--max-episode-steps", "5"]
    _, error = said(capsys, "train", "--resume", str(run), "--env", f"{run}/evil.py:Env", *quick)
    assert "--trust" not in error and marker.exists()


def test_a_folder_cannot_be_called_command_line(tmp_path, marker, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = sent(tmp_path / "command line (env", "control", marker, env="{here}/evil.py:Env")
    code, error = said(capsys, "eval", run.name)
    assert code == 2 and "--trust" in error and not marker.exists()


def test_trust_without_a_folder_is_refused(capsys):
    code, error = said(capsys, "train", "bandit", "--trust")
    assert code == 2 and "--trust is for --resume" in error


def test_saving_and_talking_load_no_reward(tmp_path, marker, capsys):
    run = tmp_path / "run"
    reward = written(tmp_path / "mine" / "walk.py", tmp_path / "ok")
    config = LanguageConfig(
        model="tiny", dataset="sort-digits", rewards=("length", f"{reward}:reward"), group_size=2, groups_per_step=1,
        max_completion_length=4, reward_workers=1, preflight=False, reward_weights=(1.0, 0.5),
    )  # fmt: skip
    trainer = GRPOTrainer(args=config)
    trainer.train(steps=1, folder=run, progress=None)
    trainer.source.close()
    written(run / "evil.py", marker)
    told = json.loads((run / "config.json").read_text()) | {"rewards": ["length", f"{run}/evil.py:reward"]}
    (run / "config.json").write_text(json.dumps(told))
    assert said(capsys, "chat", str(run), "--message", "hello")[0] == 0
    assert said(capsys, "export", str(run), "--to", str(tmp_path / "model"))[0] == 0
    assert not marker.exists()
    card = (tmp_path / "model" / "README.md").read_text()
    assert "length" in card and "reward" in card and "Unloaded" not in card


def test_code_of_a_model_outside_is_still_the_users_choice(tmp_path, marker, capsys):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    settings = PROMPTS | {"model": str(tmp_path / "model"), "rewards": ["length", "code:5"], "trust_remote_code": True}
    run = sent(tmp_path / "run", "language", marker, **settings)
    code, error = said(capsys, "eval", str(run))
    assert code == 2 and "has no checkpoint yet" in error


def test_presets_name_nothing_that_would_have_to_be_confirmed():
    """Else a run of ours could be started and not be looked at."""
    presets = Path(trust.__file__).parent / "presets"
    named = {word for file in presets.glob("*.yaml") for word in re.findall(r"grpo\.[\w.]+:\w+", file.read_text())}
    environments = {"grpo.envs.atari:Atari", "grpo.envs.metaworld:MetaWorld", "grpo.envs.tmaze:TMaze"}
    assert named <= {*trust.OURS, *environments}
    for word in environments & named:
        module, name = word.split(":")
        assert issubclass(getattr(import_module(module), name), gym.Env)


def test_every_setting_that_may_name_code_says_so():
    """A setting whose meaning speaks of file.py:name, or of code, is among those that are looked at."""
    own = {"env", "env_kwargs", "warm_start", "reward", "rewards", "tools", "environment"}
    for task in (None, "control", "worldmodel", "language"):
        told = meanings(task)
        assert {name for name in told if any(word in told[name] for word in (".py:", "module:"))} <= own, task
    made = ControlConfig(env="a:b", env_kwargs={"id": ["c:d", {"e": "f:g"}]}, warm_start="h:i")
    assert [code.word for code in made.named_code()] == ["a:b", "c:d", "f:g", "h:i"]
    named = list(WorldModelConfig(env="a:b", reward="c:d").named_code())
    assert named[0] == NamedCode("env", "a:b") and NamedCode("reward", "c:d") in named
