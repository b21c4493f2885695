"""What a person sees."""

import io

import pytest

pytest.importorskip("gymnasium")

import gymnasium as gym
import numpy as np
from rich.console import Console

from grpo import GRPOConfig, GRPOTrainer
from grpo.bandit import BanditConfig
from grpo.bandit import make_trainer as make_bandit
from grpo.control import GRPOTrainer as ControlTrainer
from grpo.run.plot import draw
from grpo.run.progress import SHOWN, Live, Plain, Silent, make_progress, printable
from tests.faults.tiny import make_folder, train
from tests.toys import Match, Softmax


def test_plain_lines(tmp_path):
    out = io.StringIO()
    train(tmp_path / "run", 4, progress=Plain(every=2, file=out))
    lines = out.getvalue().splitlines()
    assert lines[0] == f"run={tmp_path / 'run'} step=0 steps=4"
    assert [line.split()[0] for line in lines[1:3]] == ["step=2/4", "step=4/4"]
    assert " reward=" in lines[1] and " kl=" in lines[1]
    assert lines[3] == "ended=done"
    assert lines[-1] == f"results={tmp_path / 'run'}"


def test_the_live_bar_and_the_table(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    train(tmp_path / "run", 3, progress=Live(console))
    shown = console.file.getvalue()
    assert "3/3" in shown and "reward=" in shown and "step-00000003" in shown and "results" in shown


def test_auto_is_plain_without_a_terminal(capsys):
    assert isinstance(make_progress("auto"), Plain)
    assert isinstance(make_progress(None), Silent)


@pytest.mark.parametrize("text", ["\x1b[31mred", "a\rb", "a\0b", "\u202eevil", "a\nb", "\x9b1m", "\ud800"])
def test_control_characters_never_reach_the_terminal(text):
    assert printable(text).isprintable()


def test_markup_in_a_metric_is_text(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    live = Live(console)
    live.start(tmp_path / "[bold]x[/nope]", 0, 1)
    live.close()
    assert "[bold]x[/nope]" in console.file.getvalue()


def test_curves_of_a_run_with_gaps(tmp_path):
    folder = make_folder(tmp_path / "run")
    with pytest.raises(ValueError, match="no steps"):
        draw(folder)
    for step in range(1, 6):
        folder.append_metrics(
            step, {"reward": None if step == 2 else step, "reward_std": 0.5, "kl": None, "eval/score": 1}
        )
    folder.close()
    assert draw(folder).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_line_has_step_bar_number_and_time_left_and_never_more_than_fits(width):
    live = Live(Console(file=io.StringIO(), force_terminal=True, width=width))
    live.names = ("return", "episode_length", "env_steps", "eval/return", *SHOWN)
    live.start(None, 0, 200)
    row = {"step": 8, "return": 249.8, "reward": 249.8, "episode_length": 249.8, "env_steps": 6876, "kl": 0.01234}
    live.step(row | {"eval/return": 486.7, "grad_norm": 0.05015, "entropy": 0.6421}, 0.1)
    live.phase("evaluate")
    line = live.line(width, 3725.0)
    live.close()
    assert len(line) < width and line.startswith("step 8/200  ") and "return=249.8" in line and "1:02:05 left" in line
    assert "reward" not in line  # which is the return
    assert ("evaluating" in line, "episode_length" in line) == (width > 60, width > 80)


def test_no_time_is_left_of_a_run_that_has_ended():
    live = Live(Console(file=io.StringIO(), force_terminal=True, width=80))
    live.start(None, 0, 200)
    live.step({"step": 8, "reward": 1.0}, 0.1)
    assert "0:00:09 left" in live.line(80, 9.0)
    live.phase("closing")  # solved: no further step comes
    assert "left" not in live.line(80, 9.0) and "drawing" in live.line(80, 9.0)
    live.close()
    done = Live(Console(file=io.StringIO(), force_terminal=True, width=80))
    done.start(None, 0, 200)
    done.step({"step": 200, "reward": 1.0}, 0.1)
    assert "left" not in done.line(80, 0.0)
    done.close()


def test_a_list_of_states_has_its_number_of_steps():
    out = io.StringIO()
    trainer = GRPOTrainer(GRPOConfig(group_size=2), Softmax(), reward_model=Match())
    trainer.train([[0, 1]] * 3, progress=Plain(file=out))
    trainer.train(iter([[0, 1]]), progress=Plain(file=out))  # nobody knows how many come
    steps = [line.split()[0] for line in out.getvalue().splitlines() if line.startswith("step=")]
    assert steps == ["step=1/3", "step=2/3", "step=3/3", "step=4"]
    assert len(trainer.train([[0, 1]] * 3, steps=2, progress=None)) == 2
    with pytest.raises(ValueError, match=r"got no states: give it a list of batches, one for each step"):
        trainer.train([])


def test_the_end_says_what_happened_and_what_to_do_next(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trainer = ControlTrainer(env="CartPole-v1", hidden=(8,), video=False, films=False)
    trainer.train(steps=50, stop_at=5, evaluate_every=1, folder="runs/pole", progress="plain")
    out = capsys.readouterr().out
    assert "ended=solved\nwhy=eval/return reached" in out and "(run.stop_at=5)\n" in out
    assert "anygrpo[export]" not in out
    assert " return=" in out and "\nreturn=" in out and "reward=" not in out  # which is the return
    assert "next=grpo view runs/pole" in out and "next=grpo eval runs/pole" in out and "event_" not in out
    monkeypatch.setattr("grpo.run.runs.find_spec", lambda name: None)
    assert trainer.looked_at_with()[0][-1] == "export (pip install 'anygrpo[export]')"
    flat = make_bandit(BanditConfig())  # in whose first phase all arms pay alike
    flat.train(steps=2, folder="runs/flat", progress="plain")
    assert "\nwarning=nothing was learned: in every group all tries got the same reward" in capsys.readouterr().out


class Even(gym.Env):
    """Pays the same whatever is done, which a baseline fits badly enough to move the policy."""

    observation_space, action_space = gym.spaces.Box(0, 1, (2,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.left = 5
        return np.array([0.0, 1.0], np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.array([action, self.left / 5], np.float32), 1.0, False, self.left == 0, {}


def test_a_run_without_a_folder_says_that_nothing_was_learned_and_how_it_is_kept(capsys):
    reports = ControlTrainer(env=Even, hidden=(8,), vector="serial").train(steps=2, progress="plain")
    assert reports[-1]["grad_norm"] > 0
    out = capsys.readouterr().out
    assert "\nwarning=nothing was learned: in every group" in out and "\nnot_kept=folder='runs/mine' keeps it" in out
    assert "ended=" not in out
    ControlTrainer(env=Even, hidden=(8,), vector="serial").train(steps=9, stop_at=5, evaluate_every=1, progress="plain")
    assert "\nended=solved\nwhy=eval/return reached 5 (run.stop_at=5)\n" in capsys.readouterr().out


def test_a_run_that_ended_before_its_first_evaluation_says_so(tmp_path, capsys):
    trainer = ControlTrainer(env=Even, hidden=(8,), vector="serial", video=False, films=False)
    trainer.train(steps=1, folder=tmp_path / "run", progress="plain")
    said = (
        "note=the run ended before its first evaluation (run.evaluate_every): the last checkpoint stands for the best"
    )
    assert said in capsys.readouterr().out


def test_a_notebook_without_widgets_gets_plain_lines(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    for there, kind in ((None, Plain), (object(), Live)):
        monkeypatch.setattr("grpo.run.progress.find_spec", lambda name, there=there: there)
        assert isinstance(make_progress("auto"), kind)
