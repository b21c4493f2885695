"""The command's contract with a shell: what it prints, where, and the exit code."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import grpo
from grpo.app.look import trained
from grpo.cli import main
from grpo.recipes import RECIPES, table_text
from tests.unit.run.test_sinks import fake

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def only_run(folder):
    (found,) = (folder / "runs").iterdir()
    return found


def test_train_leaves_a_run_and_says_where(elsewhere, capsys):
    assert main(["train", "bandit", "--run.steps", "3"]) == 0
    run = only_run(elsewhere)
    assert run.name.startswith("bandit-")
    out = capsys.readouterr().out
    assert str(run) in out
    assert "\nregret_total=" in out  # what this room is about, before what all share
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert (run / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_the_flags_of_the_issue(elsewhere):
    flags = "--beta 0.1 --epsilon 0.2 --num-generations 4 --loss-type dr_grpo --logdir runs/{timestamp} --steps 2"
    assert main(["train", "bandit", "grpo_kl", *flags.split()]) == 0
    config = json.loads((only_run(elsewhere) / "config.json").read_text())
    assert (config["beta"], config["epsilon"], config["group_size"], config["loss_type"]) == (0.1, 0.2, 4, "dr_grpo")


def test_a_file_and_set(elsewhere):
    Path("my.yaml").write_text("algorithm:\n  ratio_clip_eps: 0.3\n")
    assert main(["train", "bandit", "my.yaml", "--set", "algorithm.kl_beta=0.02", "--steps=2"]) == 0
    config = json.loads((only_run(elsewhere) / "config.json").read_text())
    assert (config["epsilon"], config["beta"]) == (0.3, 0.02)


def test_resume_goes_on_and_equals_the_uninterrupted_run(elsewhere):
    assert main(["train", "bandit", "--logdir", "runs/whole", "--steps", "6"]) == 0
    assert main(["train", "bandit", "--logdir", "runs/cut", "--steps", "4"]) == 0
    assert main(["train", "--resume", "runs/cut", "--steps", "6"]) == 0
    assert Path("runs/cut/metrics.jsonl").read_bytes() == Path("runs/whole/metrics.jsonl").read_bytes()


def test_resume_keeps_what_was_asked_for_last(elsewhere, capsys):
    """Longer by a flag once, then cut: the next plain resumption knows."""
    assert main(["train", "bandit", "--logdir", "runs/a", "--steps", "3"]) == 0
    assert main(["train", "--resume", "runs/a", "--steps", "5"]) == 0
    assert json.loads(Path("runs/a/config.json").read_text())["run"]["steps"] == 5
    assert main(["train", "--resume", "runs/a", "--steps", "4"]) == 2
    assert "has done 5 steps already, more than run.steps=4" in capsys.readouterr().err
    assert main(["train", "--resume", "runs/a", "--steps", "9", "--learning-rate", "7"]) == 2
    capsys.readouterr()
    assert json.loads(Path("runs/a/config.json").read_text())["run"]["steps"] == 5  # what was refused is not kept
    assert main(["train", "--resume", "runs/a"]) == 0
    assert main(["train", "--resume", "runs/a", "--logdir", "runs/b"]) == 2
    assert "leave --logdir out" in capsys.readouterr().err


def test_every_checkpoint_damaged_is_an_error_that_changes_nothing(elsewhere, capsys):
    assert main(["train", "bandit", "--logdir", "runs/a", "--steps", "3"]) == 0
    for path in Path("runs/a/checkpoints").glob("step-*/arrays.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    before = Path("runs/a/metrics.jsonl").read_bytes()
    assert main(["train", "--resume", "runs/a", "--steps", "5"]) == 2
    error = capsys.readouterr().err
    assert "is damaged" in error and error.count("\n") == 1
    assert Path("runs/a/metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("words", ["--device cuda:99", "--device tpu", "--trackers nosuch"])
def test_a_run_that_never_began_leaves_no_folder(words, elsewhere):
    assert main(["train", "bandit", "--logdir", "runs/a", "--steps", "2", *words.split()]) == 2
    assert not Path("runs/a").exists()


def test_an_early_interrupt_is_130(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("grpo.app.builders.start", interrupted)
    assert main(["train", "bandit", "--steps", "1"]) == 130
    assert capsys.readouterr().err == "grpo: interrupted\n"


def test_resume_refuses_other_settings(elsewhere, capsys):
    assert main(["train", "bandit", "--logdir", "runs/a", "--steps", "2"]) == 0
    before = Path("runs/a/metrics.jsonl").read_bytes()
    assert main(["train", "--resume", "runs/a", "--learning-rate", "7"]) == 2
    error = capsys.readouterr().err
    assert "learning_rate" in error and error.count("\n") == 1
    assert Path("runs/a/metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train bandit --betaa 1", 'did you mean "beta"'),
        ("train nosuch", "there is no preset or file 'nosuch'"),
        ("train grpo", "no task was named"),
        ("train bandit --tau-pos 2", "tau_pos has no effect here"),
        ("train bandit missing.yaml", "missing.yaml: No such file"),
        ("train bandit --group-size 1", "group_size"),
        ("train bandit --set oops", "expected KEY=VALUE"),
        ("train bandit --logdir runs/{tim} --steps 1", "the words that are filled in are"),
        ("train bandit --beta 1 stray", "unexpected 'stray'"),
        ("train bandit --trackers nosuch --steps 1", "nosuch"),
        ("train --resume nowhere", "nowhere is no run folder"),
        ("train bandit --resume x", "leave the presets out"),
        ("train bandit --logdir file/x --steps 1", "cannot write to"),
        ("config nosuch", "there is no preset or file"),
        ("presets --recipes dap0", 'unknown recipe "dap0"; did you mean "dapo"?'),
    ],
)
def test_mistakes_are_one_line_and_exit_2(words, message, capsys, elsewhere):
    Path("file").write_text("in the way")
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1 and "Traceback" not in error


def test_a_run_is_never_overwritten(capsys):
    assert main(["train", "bandit", "--logdir", "runs/a", "--steps", "2"]) == 0
    before = Path("runs/a/metrics.jsonl").read_bytes()
    assert main(["train", "bandit", "--logdir", "runs/a", "--steps", "5"]) == 2
    assert "already holds a run; resume it, or choose another folder" in capsys.readouterr().err
    assert Path("runs/a/metrics.jsonl").read_bytes() == before


def test_two_runs_in_one_second_have_two_folders(elsewhere):
    for _ in range(2):
        assert main(["train", "bandit", "--steps", "1"]) == 0
    assert len(list((elsewhere / "runs").iterdir())) == 2


def test_config_says_where_each_setting_came_from(capsys):
    assert main(["config", "bandit", "grpo_kl", "--kl-coeff", "0.3"]) == 0
    out = capsys.readouterr().out
    assert "command line (kl_coeff)" in out and "preset grpo_kl" in out
    assert main(["config", "--dialects"]) == 0
    assert "early_stop_imp_ratio" in capsys.readouterr().out


def test_presets_and_doctor(capsys):
    assert main(["presets"]) == 0
    assert "grpo_multi" in capsys.readouterr().out
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out and "free disk" in out


def test_settings_are_explained(capsys):
    assert main(["train", "--settings"]) == 0
    assert "A group of one has nothing to be compared with" in capsys.readouterr().out
    assert main(["train", "bandit", "--settings"]) == 0
    assert "--payoffs" in capsys.readouterr().out


def test_prints_the_recipe_table(capsys):
    assert main(["presets", "--recipes"]) == 0
    assert capsys.readouterr().out.strip() == table_text().strip()
    assert main(["presets", "--recipes", "grpo", "dapo"]) == 0
    assert capsys.readouterr().out.strip() == table_text(["grpo", "dapo"]).strip()
    assert len(RECIPES) > 18


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["doctor", "--nonsense"]])
def test_bad_usage_exits_with_2(arguments):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"grpo {grpo.__version__}\n"


def test_a_closed_pipe_is_not_an_error():
    command = subprocess.Popen(
        [sys.executable, "-m", "grpo.cli", "presets", "--recipes"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    command.stdout.close()  # before the command can have written: the interpreter is still starting
    error = command.stderr.read()
    assert (command.wait(), error) == (0, "")


# --- environments ---------------------------------------------------------------------------------------------------


def refused(capsys, *words) -> str:
    """The single line that a mistake prints."""
    capsys.readouterr()
    assert main([*words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("grpo: ") and error.count("\n") == 1 and "Traceback" not in error
    return error


def test_a_preset_is_trained_judged_filmed_and_exported(elsewhere, capsys):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    assert main(["train", "cartpole", "--steps", "2", "--logdir", "runs/c"]) == 0
    out = capsys.readouterr().out
    assert "\nreturn=" in out and "\neval/return=" in out and "video=" in out
    run = elsewhere / "runs/c"
    assert {"metrics.jsonl", "curve.png", "video.mp4", "checkpoints", "config.json"} <= {p.name for p in run.iterdir()}
    assert main(["eval", "runs/c", "--episodes", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoint"] == 2 and found["results"][0]["episodes"] == 3
    assert main(["eval", "runs/c", "--episodes", "3", "--video"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("runs/c, step 2, 3 greedy episodes") and "video: runs/c/eval.mp4" in out
    assert f"{found['results'][0]['mean']:.4g}" in out and (run / "eval.mp4").stat().st_size > 1000
    assert main(["export", "runs/c"]) == 0
    assert capsys.readouterr().out == "runs/c/policy.onnx: the policy of step 2, checked with onnxruntime\n"
    session = onnxruntime.InferenceSession(str(run / "policy.onnx"), providers=["CPUExecutionProvider"])
    made, _ = trained(run, "best")
    seen = np.random.default_rng(0).normal(size=(99, 4)).astype(np.float32)
    theirs = session.run(["action"], {"observation": seen})[0]
    assert theirs.tolist() == made.source.policy.act(seen, None).recorded.tolist() and len({*theirs.tolist()}) == 2
    assert "there: 2" in refused(capsys, "eval", "runs/c", "--checkpoint", "9999")
    assert "there: 2" in refused(capsys, "export", "runs/c", "--checkpoint", "9999")


def test_an_environment_alone_says_which_task(elsewhere):
    words = "--env CartPole-v1 --group-size 4 --starts 2 --steps 2 --video false --logdir runs/c"
    assert main(["train", *words.split()]) == 0
    config = json.loads(Path("runs/c/config.json").read_text())
    assert (config["task"], config["env"]) == ("control", "CartPole-v1")
    assert (config["group_size"], config["groups_per_step"]) == (4, 2)
    lines = [json.loads(line) for line in Path("runs/c/metrics.jsonl").read_text().splitlines()]
    assert [line["samples"] for line in lines] == [8, 8] and not Path("runs/c/video.mp4").exists()
    assert main(["train", "--resume", "runs/c", "--steps", "3"]) == 0
    assert len(Path("runs/c/metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("flags", "steps"), [("--env-steps 100", 1), ("--stop-at 5 --evaluate-every 2 --best-by eval/return", 2)]
)
def test_a_run_ends_when_it_has_what_it_was_for(flags, steps, elsewhere):
    words = f"--env CartPole-v1 --steps 9 --video false --logdir runs/c {flags}"
    assert main(["train", *words.split()]) == 0
    assert len(Path("runs/c/metrics.jsonl").read_text().splitlines()) == steps


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --env no_such_module:Env-v0", "no_such_module cannot be imported"),
        ("train --env CartPol-v1", "nearest: CartPole-v1"),
        ("train --env nowhere.py:Env", "there is no file nowhere.py"),
        ("train --env CartPole-v1 --group-by anchor", "needs advantage=step or leave_one_out"),
        ("train --env CartPole-v1 --group-by anchor --advantage step", "never equal; use group_by=start"),
        ("train --env CartPole-v1 --action-head beta", "there is no beta head for the action space Discrete(2)"),
        ("train --env CartPole-v1 --vector procesess", "vector: input should be"),
        ("train --env Pendulum-v1 --env-kwargs {'h':1}", "cannot be made with {'h': 1}"),
        ("train --env CartPole-v1 --gropu-size 4", 'did you mean "group_size"'),
        ("eval nowhere", "nowhere is no run folder"),
        ("export nowhere", "nowhere is no run folder"),
    ],
)
def test_mistakes_with_environments_are_one_line_and_leave_no_folder(words, message, capsys, elsewhere):
    more = ["--steps", "1", "--logdir", "runs/x"] if words.startswith("train") else []
    assert message in refused(capsys, *words.split(), *more)
    assert not Path("runs/x").exists()


def test_a_run_without_a_policy_to_play_says_so(elsewhere, capsys):
    assert main(["train", "bandit", "--steps", "1", "--logdir", "runs/b"]) == 0
    assert "runs/b: this task has nothing to evaluate" in refused(capsys, "eval", "runs/b")
    assert "runs/b: this task has no policy that can be exported" in refused(capsys, "export", "runs/b")
    assert "has no evaluation" in refused(capsys, *["train", "bandit", "--evaluate-every", "1", "--logdir", "runs/x"])


def test_a_missing_gymnasium_says_what_to_install(elsewhere, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    for name in [name for name in sys.modules if name.startswith(("grpo.control", "grpo.envs"))]:
        monkeypatch.delitem(sys.modules, name)
    error = refused(capsys, "train", "cartpole", "--logdir", "runs/x")
    assert error == "grpo: this task needs gymnasium: pip install 'anygrpo[control]'\n"
    assert main(["train", "bandit", "--steps", "1"]) == 0  # the others do not mind


def test_a_tracker_and_its_project_are_asked_for_by_flags(elsewhere, monkeypatch):
    calls = []
    module = fake("wandb", calls)
    module.Video = lambda path, format: Path(path).name
    monkeypatch.setitem(sys.modules, "wandb", module)
    words = "train --env CartPole-v1 --steps 1 --group-size 2 --starts 1 --trackers wandb --project poles"
    assert main([*words.split(), "--logdir", "runs/c"]) == 0
    assert calls[0]["project"] == "poles" and calls[0]["config"]["env"] == "CartPole-v1"
    assert calls[1][1]["return"] > 0 and calls[2:] == [(1, {"video": "video.mp4"}), "finish"]


def test_the_room_explains_its_settings(capsys):
    assert main(["train", "control", "--settings"]) == 0
    assert "--group-by" in capsys.readouterr().out
    assert main(["presets"]) == 0
    assert "cartpole" in capsys.readouterr().out
