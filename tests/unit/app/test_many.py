"""Several runs in one folder: what is gone over, what decides, and that nothing is lost or made twice."""

import csv
import json

import pytest

from grpo.app.arguments import resolved
from grpo.app.many import results
from grpo.app.many.book import Asked, Book
from grpo.app.many.crew import carried_out
from grpo.app.many.pictures import draw_settings
from grpo.app.many.results import Goal, Reached
from grpo.app.many.space import Choice, Range, Study, grid
from grpo.app.many.sweep import _space
from grpo.cli import main
from grpo.config import ConfigError
from grpo.run.folder import RunFolder
from grpo.run.signals import StopSignals


def found(*over, flags=()):
    return _space(Asked(("bandit",), flags, (0,), over), resolved)


def test_settings_are_gone_over_as_their_kind_says():
    space = found("learning_rate=1e-4..1e-2", "group-size=4..12", "loss_type=grpo,dapo", "noise=0.5..1")
    assert space["learning_rate"] == Range(1e-4, 1e-2, whole=False) and space["learning_rate"].by_powers
    assert space["group_size"] == Range(4, 12, whole=True) and not space["group_size"].by_powers
    assert space["noise"] == Range(0.5, 1, whole=False)  # a whole end of a setting that is none
    assert space["loss_type"] == Choice(("grpo", "dapo"))
    assert set(found("credit=reward_to_go", "gamma=0.9,0.99")) == {"credit", "gamma"}  # the one needs the other
    assert grid(found("group_size=4,8", "learning_rate=0.1,0.2"))[1] == {"group_size": "4", "learning_rate": "0.2"}


@pytest.mark.parametrize(
    ("over", "told"),
    [
        ("learning_rate", "expected SETTING=LOW..HIGH"),
        ("learning_rate=1..0.1", "from the lower to the higher"),
        ("learning_rate=low..high", "learning_rate"),
        ("lerning_rate=1e-4..1e-3", "did you mean"),
        ("loss_type=1..2", "loss_type"),
        ("group_size=4,many", "group_size"),
        ("seed=0,1", "--seeds"),
        ("beta=0,0.1", "both fixed and gone over"),
    ],
)
def test_what_cannot_be_gone_over_is_said_before_anything_begins(over, told):
    with pytest.raises(ConfigError, match=told):
        found(over, flags=(("beta", "0.1"),))


def test_a_range_without_a_number_of_trials_is_an_error():
    with pytest.raises(ConfigError, match="--trials"):
        grid(found("learning_rate=1e-4..1e-2"))


def test_a_study_goes_where_it_is_better_and_is_told_of_trials_of_an_earlier_process():
    space = found("learning_rate=0.001..1", "loss_type=grpo,dapo")
    study = Study(space, seed=0)
    study.tell(0, {"learning_rate": "0.5", "loss_type": "dapo"}, 1.0)
    study.tell(1, {"learning_rate": "0.001", "loss_type": "grpo"}, None)  # failed
    asked = []
    for number in range(2, 30):
        words = study.ask(number)
        asked.append(float(words["learning_rate"]))
        assert 0.001 <= asked[-1] <= 1 and words["loss_type"] in ("grpo", "dapo")
        study.tell(number, words, -abs(asked[-1] - 0.5))
    late = sorted(abs(rate - 0.5) for rate in asked[-10:])
    assert late[5] < 0.25  # the median of a draw by powers lies at 0.03
    again = Study(space, seed=0)
    again.tell(0, {"learning_rate": "0.5", "loss_type": "dapo"}, 1.0)
    again.tell(1, {"learning_rate": "0.001", "loss_type": "grpo"}, None)
    assert float(again.ask(2)["learning_rate"]) == asked[0]


def test_what_reached_the_goal_is_judged_by_when(tmp_path):
    goal = Goal("eval/return", stop_at=475.0)

    def score(value, step, goal=goal):
        return goal.score(Reached(tmp_path, value, step, 1.0, "done"))

    assert score(480.0, 8) > score(500.0, 9) > score(474.0, 2) > score(10.0, 1)
    assert score(None, 3) is None
    lowest = Goal("-loss", stop_at=0.5)
    assert score(0.4, 3, lowest) > score(0.1, 4, lowest) > score(0.6, 1, lowest)


def test_runs_from_several_seeds_leave_a_table_and_curves_and_each_is_the_run_of_its_seed(tmp_path, capfd):
    root = tmp_path / "with {braces}"
    words = ["bandit", "--run.steps", "2", "--noise", "0.5"]
    logdir = str(root).replace("{", "{{").replace("}", "}}")
    assert main(["train", *words, "--seeds", "2", "--seed", "3", "--parallel", "2", "--logdir", logdir]) == 0
    told = capfd.readouterr().out
    assert "[2/2] seed" in told and "mean" in told and "std" in told and "grpo view" in told
    with (root / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["seed"], row["reason"], row["folder"]) for row in rows] == [
        ("3", "done", "seed-3"),
        ("4", "done", "seed-4"),
    ]
    assert (root / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert main(["train", *words, "--seed", "4", "--logdir", str(tmp_path / "alone")]) == 0
    alone = (tmp_path / "alone" / "metrics.jsonl").read_bytes()
    assert alone == (root / "seed-4" / "metrics.jsonl").read_bytes()
    before = (root / "seed-3" / "metrics.jsonl").stat().st_mtime_ns
    assert main(["train", "--resume", str(root), "--seeds", "3"]) == 0  # one more; what is over is not made again
    assert (root / "seed-5" / "metrics.jsonl").exists()
    assert (root / "seed-3" / "metrics.jsonl").stat().st_mtime_ns == before
    assert main(["train", *words, "--seeds", "2", "--logdir", logdir]) == 2
    assert "--resume" in capfd.readouterr().err


def test_a_sweep_goes_on_where_it_stopped_and_a_run_that_fails_is_told(tmp_path, capfd):
    root = tmp_path / "sweep"
    asked = Asked(("bandit",), (("run.steps", "3"),), (0,), ("learning_rate=0.1..1",), trials=2)
    book = Book.create(root, asked)
    book.note(0, {"learning_rate": "0.25"})
    stopped = book.job(0, 0, {"learning_rate": "0.25"})
    with StopSignals() as signals:
        assert [code for _, code in carried_out([stopped], 1, signals)] == [0]
    (book.folder(0, 0) / "status.json").unlink()  # as if it had been cut
    assert main(["sweep", "--resume", str(root)]) == 0
    trials = [json.loads(line) for line in (root / "trials.jsonl").read_text().splitlines()]
    assert [row["trial"] for row in trials] == [0, 1] and trials[0]["settings"] == {"learning_rate": "0.25"}
    told = capfd.readouterr().out
    assert "the best again: grpo train bandit --run.steps=3 --learning_rate=" in told
    assert RunFolder.open(book.folder(0, 0)).status["reason"] == "done"
    assert (root / "sweep.png").read_bytes().startswith(b"\x89PNG")

    (book.folder(1, 0) / "config.json").write_text("{")
    (book.folder(1, 0) / "status.json").unlink()
    assert main(["sweep", "--resume", str(root)]) == 0  # the other trial is good
    assert "failed: " in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "bandit", "--parallel", "2"], "--seeds"),
        (["train", "bandit", "--seeds", "2", "--ranks", "2"], "give one of them"),
        (["sweep", "bandit"], "needs something to go over"),
        (["sweep", "bandit", "--over", "group_size=4..8"], "--trials"),
        (["sweep", "--resume", "nowhere"], "no many.json"),
        (["sweep", "bandit", "--over", "group_size=1,2"], "group_size"),
    ],
)
def test_words_that_do_not_go_together_are_refused(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert told in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_secret_is_not_kept_and_then_not_gone_on_with(tmp_path, monkeypatch):
    token = "hf_" + "abcDEF123456" * 3
    book = Book.create(tmp_path / "runs", Asked(("bandit",), (("api_key", token),), (0,)))
    assert token not in (book.root / "many.json").read_text()
    with pytest.raises(ConfigError, match="secret"):
        Book.open(book.root)


def test_without_optuna_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"anygrpo\[sweep\]"):
        Study(found("learning_rate=0.1..1"), seed=0)


def test_pictures_of_lists_and_ranges(tmp_path):
    space = found("learning_rate=0.001..1", "loss_type=grpo,dapo")
    trials = [
        ({"learning_rate": "0.1", "loss_type": "dapo"}, 0.5),
        ({"learning_rate": "0.2", "loss_type": "grpo"}, None),
    ]
    assert draw_settings(tmp_path / "a.png", space, trials, "reward", 1.0)
    assert not draw_settings(tmp_path / "b.png", space, trials[1:], "reward", 1.0) and not (tmp_path / "b.png").exists()
    assert results.in_words([1.0, 3.0]).startswith("mean 2 ")


def test_going_on_with_several_runs_runs_no_code_that_came_with_their_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    book = tmp_path / "book"
    book.mkdir()
    (book / "own.py").write_text("open('ran', 'w')\n")
    asked = {"schema": 1, "names": ["control"], "flags": [["env", "book/own.py:Env"]], "seeds": [0], "over": []}
    (book / "many.json").write_text(json.dumps({**asked, "trials": None, "by": None}))
    assert main(["train", "--resume", "book", "--parallel", "1"]) == 2
    told = capsys.readouterr().err
    assert "many.json: env names book/own.py:Env" in told and "--trust" in told
    assert not (tmp_path / "ran").exists() and not (book / "seed-0").exists()
    (book / "many.json").write_text(json.dumps({**asked, "seeds": ["../x"], "trials": None, "by": None}))
    assert main(["train", "--resume", "book"]) == 2 and "lacks something" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--overwrite", "--trust", "--shared-gpu"])
def test_what_means_nothing_for_several_runs_is_refused(flag, capsys):
    assert main(["train", "bandit", "--seeds", "2", flag]) == 2
    assert flag in capsys.readouterr().err or flag == "--shared-gpu"
