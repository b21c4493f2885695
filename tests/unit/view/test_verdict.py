"""The first screen: is it learning, is something wrong, and how a run that broke says so."""

import numpy as np
import pytest

from grpo.view.library import Library
from tests.faults.tiny import QUICK, make_folder, make_trainer, run
from tests.unit.view.folders import RECIPE, add_samples, end, make_run, try_row

WAVE = {step: 0.1 * ((7 * step) % 5 - 2) for step in range(1, 100)}


@pytest.mark.parametrize(
    ("curve", "way", "words"),
    [
        (lambda step: step / 40 + WAVE[step], "up", "It learned"),
        (lambda step: -step / 40 + WAVE[step], "down", "It got worse"),
        (lambda step: 0.5 + WAVE[step], "flat", "It did not learn"),
        (lambda step: 1.0, "flat", "It did not learn"),
        (lambda step: min(step, 40) / 20 - max(step - 40, 0) / 8, "lost", "It lost what it had learned"),
    ],
)
def test_a_curve_is_judged_against_its_scatter(tmp_path, curve, way, words):
    end(make_run(tmp_path / "run", 60, reward=curve))
    found = Library(tmp_path).answer("/api/runs/run")["verdict"]
    assert (found["way"], found["metric"], found["title"]) == (way, "reward", words)


def test_less_may_be_better_and_few_values_say_nothing(tmp_path):
    settings = {"resolved": {"run.best_by": "-loss", "run.steps": 40}}
    end(make_run(tmp_path / "less", 40, config=settings, loss=lambda step: 1 / step))
    end(make_run(tmp_path / "short", 2))
    end(make_run(tmp_path / "none", 0))
    library = Library(tmp_path)
    assert library.answer("/api/runs/less")["verdict"]["way"] == "up"
    end(make_run(tmp_path / "arms", 40, reward=lambda step: -step, regret=lambda step: max(0.0, 1 - step / 20)))
    assert library.answer("/api/runs/arms")["verdict"]["says"] == "regret 0.725 at first, 0 at the end"
    assert library.answer("/api/runs/short")["verdict"]["title"] == "Too short to tell"
    assert library.answer("/api/runs/none")["verdict"] is None


def test_a_few_looks_that_rise_each_time_are_learning_and_a_goal_that_was_reached_is(tmp_path):
    looks = {2: 132.4, 4: 264.0, 6: 272.6, 8: 486.7}
    settings = {"resolved": {"run.best_by": "eval/return", "run.steps": 200, "run.stop_at": 475}}
    made = make_run(tmp_path / "pole", 8, config=settings, **{"eval/return": lambda step: looks.get(step)})
    end(made, "stopped")
    found = Library(tmp_path).answer("/api/runs/pole")["verdict"]
    assert found["title"] == "It learned" and found["says"] == "eval/return 132 at first, 487 at the end"
    end(make_run(tmp_path / "rise", 6, reward=lambda step: float(2**step)))
    assert Library(tmp_path).answer("/api/runs/rise")["verdict"]["title"] == "It learned"


def test_a_few_looks_that_scatter_leave_it_to_the_longer_curve(tmp_path):
    looks = {100: 0.94, 200: 0.95, 300: 0.92, 400: 0.98, 500: 0.99}
    settings = {"resolved": {"run.best_by": "eval/accuracy", "run.steps": 500}}
    rises = {"reward": lambda step: min(step / 50, 2.0), "eval/accuracy": lambda step: looks.get(step)}
    end(make_run(tmp_path / "rises", 500, config=settings, **rises))
    end(
        make_run(
            tmp_path / "hacked", 500, config=settings, **rises | {"eval/accuracy": lambda step: WAVE[step % 99 + 1]}
        )
    )
    library = Library(tmp_path)
    assert library.answer("/api/runs/rises")["verdict"]["says"] == "reward 0.11 at first, 2 at the end"
    assert library.answer("/api/runs/hacked")["verdict"]["title"] == "It did not learn"


def test_the_mean_return_of_a_few_episodes_says_nothing(tmp_path):
    for name, count in (("few", 1), ("many", 2)):
        curves = {"return": lambda step: float(step), "episodes": lambda step, count=count: float(count * step)}
        end(make_run(tmp_path / name, 20, task="worldmodel", **curves))
    library = Library(tmp_path)
    few = library.answer("/api/runs/few")["verdict"]
    assert (few["title"], few["says"]) == ("Too short to tell", "return 20 after 20 episodes")
    assert library.answer("/api/runs/many")["verdict"]["title"] == "It learned"
    dreamt = {"return": lambda step: 20 + WAVE[step], "reward": lambda step: float(step), "episodes": 90.0}
    end(make_run(tmp_path / "dreamt", 8, task="worldmodel", **dreamt))
    assert library.answer("/api/runs/dreamt")["verdict"]["metric"] == "return"


def test_what_has_been_learned_is_no_fault(tmp_path):
    """Right answers alone, always the same: a note after a rise, a warning where nothing rose."""
    sure = {"frac_reward_zero_std": 0.95, "entropy": lambda step: 2.0 if step < 10 else 0.01}
    end(make_run(tmp_path / "learned", 40, **sure))
    end(make_run(tmp_path / "stuck", 40, **sure, reward=lambda step: 0.5 + WAVE[step]))
    library = Library(tmp_path)
    learned, stuck = library.answer("/api/runs/learned"), library.answer("/api/runs/stuck")
    assert [(one["code"], one["level"]) for one in learned["warnings"]] == [("no_signal", "info"), ("entropy", "info")]
    assert [(one["code"], one["level"]) for one in stuck["warnings"]] == [("no_signal", "bad"), ("entropy", "bad")]
    listed = {run["name"]: run for run in library.answer("/api/runs")["runs"]}
    assert (listed["learned"]["verdict"]["title"], listed["learned"]["troubles"]) == ("It learned", 0)
    assert (listed["stuck"]["verdict"]["title"], listed["stuck"]["troubles"]) == ("It did not learn", 2)


def test_a_run_that_failures_ended_names_what_failed(tmp_path):
    folder = make_run(tmp_path / "run", 20, ratio=lambda step: 0.0 if step > 18 else 1.0)
    folder.event(20, "samples_failed", "16 of 16 samples failed: Mine member 0: RuntimeError: no answer (mine.py:10)")
    end(folder, "failures")
    found = Library(tmp_path).answer("/api/runs/run")["warnings"]
    assert "RuntimeError: no answer (mine.py:10)" in found[0]["message"]
    assert "ratio" not in {warning["code"] for warning in found}  # steps without a try have none


def test_what_was_looked_at_is_said_with_what_was_found(tmp_path):
    end(make_run(tmp_path / "run", 20, failed=0.0, entropy=lambda step: 2.0 if step < 10 else 0.01))
    found = {check["name"]: check for check in Library(tmp_path).answer("/api/runs/run")["checks"]}
    assert found["signal"]["text"] == "rewards differ in 90 % of the groups" and found["signal"]["level"] == "ok"
    assert found["choices"]["level"] == "bad" and found["tries"]["text"] == "no try failed"


def test_equal_returns_are_no_warning_where_rewards_to_go_differ(tmp_path):
    folder = make_run(tmp_path / "run", 20, task="control", frac_reward_zero_std=1.0)
    folder.write_status({"steps": 20, "recipe": RECIPE | {"credit": "reward_to_go"}, "reason": "done"})
    assert Library(tmp_path).answer("/api/runs/run")["warnings"] == []


def test_a_group_taught_nothing_where_no_decision_had_an_advantage(tmp_path):
    """Equal returns of rewards to go teach; older folders, which do not say, go by the rewards."""
    folder = make_run(tmp_path / "run")
    end(folder)
    told = {0: 0.7, 1: 0.0, 2: None}
    rows = [
        try_row(2 * group + i, group, "a b", [1.0, 0.0]) | ({} if told[group] is None else {"signal": told[group]})
        for group in told
        for i in range(2)
    ]
    add_samples(folder, 5, rows)
    listed = Library(tmp_path).answer("/api/runs/run/steps/5/groups")["groups"]
    assert ["no_signal" in group["badges"] for group in listed] == [False, True, True]
    assert all("all_right" in group["badges"] for group in listed)


def test_a_run_that_broke_says_why_and_offers_a_checkpoint_only_if_there_is_one(tmp_path):
    trainer = make_trainer()
    trainer.step = lambda states: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run(trainer, 2, make_folder(tmp_path / "run"), **QUICK)
    found = Library(tmp_path).answer("/api/runs/run")
    crash = found["warnings"][0]
    assert (
        found["state"] == "crashed" and "ZeroDivisionError: division by zero (test_verdict.py, line" in crash["message"]
    )
    assert "no checkpoint" in crash["remedy"] and "resume" not in crash["remedy"]
    (tmp_path / "run" / "checkpoints").mkdir(exist_ok=True)
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step-00000001")
    assert "--resume run" in Library(tmp_path).answer("/api/runs/run")["warnings"][0]["remedy"]


def test_the_clock_goes_on_over_steps_whose_lines_were_thinned_out(tmp_path):
    folder = make_run(tmp_path / "run", 0)
    for step in (1, 2, 4, 8):
        folder.append_metrics(step, {"reward": 1.0})
        folder.append_timing(step, {}, 2.0)
    found = Library(tmp_path).answer("/api/runs/run/metrics")
    assert found["clock"] == [2, 4, 8, 16]


def test_the_answer_of_a_prompt_is_beside_its_tries(tmp_path):
    folder = make_run(tmp_path / "run")
    end(folder)
    add_samples(folder, 5, [try_row(0, 0, "8", [1.0, 0.0], answer="8"), try_row(1, 0, "9", [0.0, 0.0], answer="8")])
    library = Library(tmp_path)
    group = library.answer("/api/runs/run/steps/5/groups/0")
    assert group["answer"] == "8" and group["samples"][0]["fields"] == {}
    history = library.answer(f"/api/prompts/{group['prompt_key']}", {"run": "run"})
    assert history["answer"] == "8"


def test_states_and_actions_of_an_own_policy_have_a_place(tmp_path):
    folder = make_run(tmp_path / "run")
    rows = [
        {"row": i, "group": 0, "reward": float(i), "advantage": i - 0.5, "state": "3", "action": str(i)} for i in (0, 1)
    ]
    add_samples(folder, 5, rows, mask=np.ones((2, 1), bool))
    sample = Library(tmp_path).answer("/api/runs/run/steps/5/groups/0")["samples"][0]
    assert (sample["kind"], sample["state"], sample["action"]) == ("pair", "3", "1")
