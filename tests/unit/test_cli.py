"""The command's contract with a shell: what it prints, where, and the exit code."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import grpo
from grpo.app.look import trained
from grpo.cli import main
from grpo.config import ConfigError
from grpo.recipes import RECIPES, table_text
from tests.unit.run.test_trackers import fake

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


def test_a_resumed_run_names_its_folder_as_before(elsewhere, capsys):
    assert main(["train", "bandit", "--logdir", "runs/a", "--steps", "1"]) == 0
    assert main(["train", "--resume", "runs/a", "--run.steps", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count(f"run={elsewhere}/runs/a ") == out.count(f"results={elsewhere}/runs/a\n") == 2


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
        ("trian bandit", "there is no command 'trian'; did you mean \"train\"?; see grpo --help"),
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
        ("train bandit --set foo.bar=3", "unknown setting 'foo.bar'"),
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


@pytest.mark.parametrize(
    ("words", "usage", "message"),
    [
        ("new contrl x", "grpo new", "there is no 'contrl'; did you mean \"control\"?"),
        ("presets --recips", "grpo presets", 'unrecognised argument --recips; did you mean "--recipes"?'),
    ],
)
def test_words_that_a_command_does_not_know_get_its_own_usage(words, usage, message, capsys):
    with pytest.raises(SystemExit):
        main(words.split())
    error = capsys.readouterr().err
    assert error.startswith(f"usage: {usage} ") and message in error


def test_a_run_that_was_mistyped_is_named(elsewhere, capsys):
    assert main(["train", "bandit", "--logdir", "runs/pole", "--steps", "1"]) == 0
    for words in (["eval", "runs/pol"], ["train", "--resume", "runs/pol"]):
        assert 'did you mean "runs/pole"?' in refused(capsys, *words)


@pytest.mark.parametrize("words", [[], ["presets"], ["doctor"], ["train", "cartpole", "--settings"]], ids=str)
def test_a_narrow_terminal_is_not_overrun(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(words) == 0
    long = [line for line in capsys.readouterr().out.splitlines() if len(line) > 60]
    assert all(max(map(len, line.split())) > 30 for line in long)  # one word, an address or a path, is not cut


def test_settings_show_what_a_preset_says(capsys):
    assert main(["train", "cartpole", "--settings", "--group-size", "6"]) == 0
    out = capsys.readouterr().out
    assert "--run.stop-at (475)" in out and "--hidden ((32, 32))" in out and "--group-size (6)" in out


def test_what_is_not_installed_is_named_before_a_model_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr("grpo.app.builders.find_spec", lambda name: None)
    assert "this task needs transformers: pip install 'anygrpo[language]'" in refused(capsys, "train", "gsm8k")


def test_presets_and_doctor(capsys):
    assert main(["presets"]) == 0
    assert "grpo_multi" in capsys.readouterr().out
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out and "free disk" in out


def test_settings_are_explained(capsys):
    assert main(["train", "--settings"]) == 0
    assert "A group of one has nothing to be compared with" in " ".join(capsys.readouterr().out.split())
    assert main(["train", "bandit", "--settings"]) == 0
    assert "--payoffs" in capsys.readouterr().out


def test_prints_the_recipe_table(capsys):
    assert main(["presets", "--recipes"]) == 0
    assert capsys.readouterr().out.strip() == table_text().strip()
    assert main(["presets", "--recipes", "grpo", "dapo"]) == 0
    assert capsys.readouterr().out.strip() == table_text(["grpo", "dapo"]).strip()
    assert len(RECIPES) > 18


def test_bad_usage_exits_with_2():
    assert main(["no-such-command"]) == 2
    with pytest.raises(SystemExit) as exit:
        main(["doctor", "--nonsense"])
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


def test_a_preset_is_trained_judged_filmed_and_exported(elsewhere, capsys, monkeypatch):
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
    for error, remedy in ((ConfigError("train anew"), "train anew"), (ValueError("other weights"), "in Python")):
        monkeypatch.setattr("grpo.control.source.ControlSource.load_state", Mock(side_effect=error))
        assert refused(capsys, "eval", "runs/c").rstrip().endswith(remedy)


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
    for room in ("control", "envs"):  # an import anew would leave its module there
        monkeypatch.setattr(grpo, room, importlib.import_module(f"grpo.{room}"))
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


# --- language models ------------------------------------------------------------------------------------------------

SMALL = "--num-generations 4 --prompts-per-step 2 --max-completion-length 6 --use-cpu --preflight false"
SMALL += " --reward-workers 1"  # each is a process that loads torch


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """A folder with a model, data, rewards and a run of two steps."""
    pytest.importorskip("transformers")
    from tests.unit.language.tiny import tiny_model, tiny_tokenizer

    place = tmp_path_factory.mktemp("spoken")
    tiny_model().save_pretrained(place / "small")
    tiny_tokenizer().save_pretrained(place / "small")
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    (place / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "judges.py").write_text(
        "def digits(completion):\n    return sum(c.isdigit() for c in completion) / 6\n\n"
        "def short(completion):\n    return -len(completion) / 6\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        flags = "--reward judges.py:digits --reward judges.py:short --num-train-epochs 0.5 --output-dir runs/s"
        assert main(["train", "sums.jsonl", "--model", "./small", *SMALL.split(), *flags.split()]) == 0
    return place


def test_a_data_file_a_reward_and_a_model_are_a_run(spoken, monkeypatch, capsys):
    monkeypatch.chdir(spoken)
    config = json.loads(Path("runs/s/config.json").read_text())
    assert (config["task"], config["dataset"], config["groups_per_step"]) == ("language", "sums.jsonl", 2)
    assert config["rewards"] == ["judges.py:digits", "judges.py:short"]
    lines = [json.loads(line) for line in Path("runs/s/metrics.jsonl").read_text().splitlines()]
    assert [line["samples"] for line in lines] == [8, 8]  # half of eight prompts, two at a time
    assert (Path("runs/s/model") / "config.json").exists()


def test_a_model_without_a_run_is_judged_and_asked(spoken, monkeypatch, capsys):
    monkeypatch.chdir(spoken)
    words = ["eval", "runs/s/model", "--dataset", "sums.jsonl", "--limit", "3"]
    assert main([*words, "--reward", "judges.py:digits"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("runs/s/model, 3 held-out prompts") and "rewards/digits" in out
    assert "say what to ask it with --dataset" in refused(capsys, "eval", "runs/s/model")
    model = grpo.load("runs/s")
    answer = model.generate("1 + 1 =", temperature=0.0)
    assert answer == grpo.load("runs/s/model").generate("1 + 1 =", temperature=0.0, max_new_tokens=6)
    assert model.generate(["1 + 1 =", "2 + 2 ="], count=2)[1:] and len(model.generate("2 + 2 =", count=3)) == 3
    drawn = [model.generate("1 + 1 =", count=4, temperature=2.0, seed=seed) for seed in (None, None, 7, 7)]
    assert drawn[0] != drawn[1] and drawn[2] == drawn[3]
    assert (model.save("again") / "config.json").exists() and model.tokenizer.vocab_size > 1


def test_held_out_prompts_are_judged(spoken, monkeypatch, capsys):
    monkeypatch.chdir(spoken)
    assert main(["eval", "runs/s", "--dataset", "sums.jsonl", "--samples", "4", "--limit", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["prompts"], found["samples"], found["checkpoint"]) == (3, 4, 2)
    told = {row["quantity"]: row for row in found["results"]}
    assert {"accuracy", "pass@2", "pass@4", "rewards/digits", "rewards/short"} <= {*told}
    assert all(row["low"] <= row["mean"] <= row["high"] for row in told.values())
    assert main(["eval", "runs/s", "--dataset", "sums.jsonl", "--limit", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("runs/s, step 2, 3 held-out prompts, the likeliest answer each") and "95 % interval" in out
    assert "--episodes means nothing for a run of the task language" in refused(
        capsys, *["eval", "runs/s", "--episodes", "3"]
    )
    assert main(["eval", "runs/s"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("grpo: there are no held-out rows")


def test_a_model_is_talked_to(spoken, monkeypatch, capsys):
    monkeypatch.chdir(spoken)
    said = []
    monkeypatch.setattr(
        "grpo.language.trainer.GRPOTrainer.reply",
        lambda self, messages, **drawn: said.append((list(messages), drawn)) or "a\x1b[2Jb\nc",
    )
    assert main(["chat", "runs/s", "--message", "hi", "--temperature", "0"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and out.endswith("b\nc\n")
    assert said.pop() == ([{"role": "user", "content": "hi"}], {"temperature": 0.0})
    lines = iter(["one", "", "two", "/reset", "three", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert main(["chat", "runs/s/model", "--system", "be kind"]) == 0
    roles = [[message["content"] for message in messages] for messages, _ in said]
    assert roles == [
        ["be kind", "one"], ["be kind", "one", "a\x1b[2Jb\nc", "two"], ["be kind", "three"],
    ]  # fmt: skip


def test_a_conversation_ends_with_the_input(spoken, monkeypatch, capsys):
    monkeypatch.chdir(spoken)

    def ended(prompt):
        raise EOFError

    monkeypatch.setattr("builtins.input", ended)
    assert main(["chat", "runs/s"]) == 0
    assert "nor a model's folder" in refused(capsys, "chat", str(spoken))


def test_a_trained_model_is_written_for_others(spoken, monkeypatch, capsys):
    monkeypatch.chdir(spoken)
    from transformers import AutoModelForCausalLM

    assert main(["export", "runs/s", "--checkpoint", "last", "--to", "out"]) == 0
    assert capsys.readouterr().out.endswith("out: the model of step 2\n")
    assert AutoModelForCausalLM.from_pretrained("out").config.hidden_size == 32
    name = json.loads(Path("runs/s/config.json").read_text())["run"]["name"]
    card = Path("out/README.md").read_text()
    assert f"# {name} trained with GRPO" in card and "Measured at step 2" in card
    assert "--onnx means nothing" in refused(capsys, *["export", "runs/s", "--onnx", "x"])


def test_a_preset_on_rows_of_ones_own_gives_up_looking_at_held_out_ones_unless_asked(spoken, monkeypatch, capsys):
    monkeypatch.chdir(spoken)
    rows = [{"question": f"{n} and 1?", "answer": f"Add them. #### {n + 1}"} for n in range(4)]
    Path("words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["train", "gsm8k", "--dataset", "words.jsonl", "--model", "./small", *SMALL.split(), "--steps", "1"]
    assert main([*words, "--logdir", "runs/w"]) == 0
    (line,) = [json.loads(line) for line in Path("runs/w/metrics.jsonl").read_text().splitlines()]
    assert {"rewards/correctness/mean", "rewards/xml/mean"} <= {*line}
    assert "best_by_missing" not in capsys.readouterr().out
    assert main(["train", "--resume", "runs/w", "--run.steps", "2"]) == 0  # the plan that was given up is not kept
    assert main([*words, "--logdir", "runs/x", "--eval-steps", "1"]) == 2
    assert "run.evaluate_every: there are no held-out rows; give --eval-dataset" in capsys.readouterr().err
    shutil.copy("words.jsonl", "held.jsonl")
    assert main([*words, "--logdir", "runs/y", "--eval-steps", "1", "--eval-dataset", "held.jsonl"]) == 0
    (line,) = [json.loads(line) for line in Path("runs/y/metrics.jsonl").read_text().splitlines()]
    assert line["eval/accuracy"] is not None


def test_a_planned_run_is_looked_at(spoken, monkeypatch, capsys):
    monkeypatch.chdir(spoken)
    (spoken / "broken.py").write_text("def broken(completion):\n    return 1 / 0\n")
    words = f"--model ./small {SMALL}".split()
    assert main(["doctor", "--config", "sums.jsonl", "--reward", "broken.py:broken", *words]) == 1
    assert "ZeroDivisionError" in (out := capsys.readouterr().out) and "not ready" in out
    assert main(["doctor", "--config", "sums.jsonl", "--reward", "judges.py:digits", *words]) == 0
    assert capsys.readouterr().out.endswith("ready\n")
    assert "the task bandit has no pre-flight" in refused(capsys, "doctor", "--config", "bandit")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train gsm8k", "no model was named; give --model with a hub id, a folder or a .gguf file"),
        ("train --model small", "no dataset was named; give --dataset"),
        ("train nowhere.jsonl --model small", "nowhere.jsonl: No such file"),
        ("train gsm8k --model m --per-device-train-batch-size 6", "give prompts_per_step=1 instead"),
        ("train gsm8k --model m --deepspeed z.json", "deepspeed: not done here: weights are divided among ranks"),
        ("train gsm8k --model m --num-generatons 4", 'did you mean "num_generations"'),
        ("train bandit --num-train-epochs 2", "this task has no data set to pass over; use run.steps"),
        ("chat nowhere", "nowhere is no run folder"),
    ],
)
def test_mistakes_with_language_models_are_one_line_and_leave_no_folder(words, message, capsys, elsewhere):
    more = ["--logdir", "runs/x"] if words.startswith("train") else []
    assert message in refused(capsys, *words.split(), *more)
    assert not Path("runs/x").exists()


def test_config_shows_the_issue_s_command(capsys):
    words = "--repo_id P --attn_mechanism vanilla --num-return-sequences 4 --total-batch-size 16 --use-wandb"
    assert main(["config", "gsm8k", *words.split()]) == 0
    out = capsys.readouterr().out
    assert "command line (attn_mechanism)" in out and "command line (use_wandb)" in out and "preset gsm8k" in out


def test_the_command_alone_says_what_to_do_next(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    for words in ("grpo train cartpole", "grpo view", "grpo presets", "grpo doctor"):
        assert words in said


def test_help_shows_ten_settings_of_the_task_first(capsys):
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--group-size (8)" in shown and "`grpo train --settings` explains all" in shown
    assert main(["train", "cartpole", "--hidden", "[32]", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--env (CartPole-v1)" in shown and "--hidden ((32,))" in shown
    assert "`grpo train control --settings` explains all" in shown
    assert main(["train", "grpo_kl", "-h"]) == 0  # a variation alone says no task
    assert "--group-size (8)" in capsys.readouterr().out


def test_a_preset_says_whose_settings_are_explained(capsys):
    assert main(["train", "cartpole", "--settings"]) == 0
    assert "--group-by (start)" in capsys.readouterr().out
