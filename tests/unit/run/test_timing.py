"""Where the time of a run went."""

import io
from pathlib import Path

import pytest

from grpo.run.folder import RunFolder
from grpo.run.progress import Plain, summary_rows
from grpo.run.session import Summary
from grpo.run.timing import in_words, time_split
from tests.faults.tiny import QUICK, make_folder, make_trainer, run, train

LANGUAGE = [
    {"step": 1, "total": 10.0, "collect": 4.0, "generate": 3.5, "rewards_wait": 0.2, "reference": 0.0, "update": 6.0},
    {"step": 2, "total": 9.0, "collect": 4.0, "generate": 3.7, "rewards_wait": 0.2, "reference": 0.0, "update": 5.0,
     "engine/captures": 7.0},
    {"step": 3, "total": 8.9, "collect": 3.9, "generate": 3.1, "rewards_wait": 0.1, "reference": 0.0, "update": 3.0,
     "evaluate": 2.0, "checkpoint": 1.1},
]  # fmt: skip


def test_rollout_reward_and_update_of_a_language_model():
    assert time_split(LANGUAGE[:1]) == pytest.approx({"rollout": 0.38, "reward": 0.02, "update": 0.6})
    assert in_words(time_split(LANGUAGE[:1])) == "rollout 38 %, reward 2 %, update 60 %"


def test_the_whole_run_counts():
    seconds = {"rollout": 11.4, "reward": 0.5, "update": 14.0, "evaluation": 2.0, "checkpoint": 1.1}
    split = time_split(LANGUAGE)
    assert split == pytest.approx({name: amount / 29.0 for name, amount in seconds.items()})
    assert sum(split.values()) == pytest.approx(1.0)
    assert in_words(split) == "rollout 39 %, reward 2 %, update 48 %, evaluation 7 %, checkpoint 4 %"


def test_a_room_without_generation_collects():
    rows = [{"step": 1, "total": 2.0, "collect": 1.5, "reference": 0.01, "update": 0.45}]
    assert in_words(time_split(rows)) == "collect 75 %, update 22 %, other 2 %"


def test_a_world_model_plays_learns_and_imagines():
    rows = [{"step": 1, "total": 2.0, "collect": 1.6, "play": 0.2, "world_model": 1.0, "update": 0.4}]
    assert in_words(time_split(rows)) == "imagine 20 %, play 10 %, world model 50 %, update 20 %"


def test_a_warm_start_and_a_teacher_are_named():
    rows = [{"step": 1, "total": 4.0, "warm_start": 1.0, "collect": 1.0, "teacher": 1.0, "update": 1.0}]
    assert in_words(time_split(rows)) == "collect 25 %, warm start 25 %, teacher 25 %, update 25 %"


def test_less_than_a_hundredth_is_not_named():
    rows = [{"step": 1, "total": 100.0, "collect": 60.0, "generate": 59.0, "rewards_wait": 0.9, "update": 40.0}]
    assert in_words(time_split(rows)) == "rollout 59 %, update 40 %"


def test_nothing_measured_is_nothing_said():
    assert time_split([]) == {}
    nothing = Summary("done", 0, Path("run"), None)
    assert "time" not in dict(summary_rows(nothing))


def test_the_summary_says_it(tmp_path):
    out = io.StringIO()
    summary, _ = train(tmp_path / "run", 4, progress=Plain(file=out))
    assert summary.time_split == time_split(RunFolder.open(tmp_path / "run").timing())
    assert f"time={in_words(summary.time_split)}" in out.getvalue().splitlines()
    assert {"collect", "update"} <= set(summary.time_split)


def test_steps_of_an_earlier_process_are_not_counted(tmp_path):
    train(tmp_path / "run", 3)
    again, _ = train(tmp_path / "run", 5)
    rows = RunFolder.open(tmp_path / "run").timing()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert again.time_split == time_split(rows[3:]) != time_split(rows)


def test_what_an_evaluation_generates_is_not_the_step_s(tmp_path):
    trainer, folder = make_trainer(), make_folder(tmp_path / "run")

    def evaluate(step):
        with trainer.phase("generate"), trainer.phase("rewards_wait"):
            return {"score": 1.0}

    run(trainer, 2, folder, **QUICK | {"evaluate": evaluate, "evaluate_every": 2})
    assert ["evaluate" in row for row in folder.timing()] == [False, True]
    assert not any("generate" in row or "rewards_wait" in row for row in folder.timing())
