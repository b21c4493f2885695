"""What the viewer makes of a run folder."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from grpo.run.lock import locked
from grpo.view.about import entries, key_of
from grpo.view.index import _head
from grpo.view.library import BadRequest, Library
from tests.unit.view.folders import CONFIG, add_samples, end, make_run, try_row, two_groups

ROOT = Path(__file__).parents[3]


def quiet(path: Path) -> None:
    """As if nothing had been written for an hour."""
    for file in path.iterdir():
        os.utime(file, (time.time() - 3600,) * 2)


def lines(library: Library) -> dict[str, dict]:
    return {line["name"]: line for line in library.answer("/api/runs")["runs"]}


def warned(library: Library, run: str) -> dict[str, dict]:
    return {item["code"]: item for item in library.answer(f"/api/runs/{run}")["warnings"]}


# --- runs ------------------------------------------------------------------------------------------------------------


def test_states_are_told_apart(tmp_path):
    for reason in ("done", "stopped", "interrupted", "preempted", "failures", "diverged", None):
        end(make_run(tmp_path / str(reason)), reason)
        quiet(tmp_path / str(reason))
    states = {name: (line["state"], line["reason"]) for name, line in lines(Library(tmp_path)).items()}
    assert states == {
        "done": ("finished", "done"),
        "stopped": ("stopped", "stopped"),
        "interrupted": ("stopped", "interrupted"),
        "preempted": ("stopped", "preempted"),
        "failures": ("crashed", "failures"),
        "diverged": ("crashed", "diverged"),
        "None": ("crashed", None),
    }


@pytest.mark.parametrize(
    ("settings", "ending"),
    [
        ({"run.stop_at": 475.0, "run.best_by": "eval/return"}, "reached return 475"),
        ({"run.stop_at": 1.5, "run.best_by": "-regret_total"}, "reached regret_total 1.5"),
        ({"run.env_steps": 1_000_000}, "made 1,000,000 environment steps"),
        ({"run.stop_at": 501.0, "run.best_by": "eval/return"}, None),
        ({}, None),
    ],
)
def test_a_run_that_reached_its_aim_is_finished_and_says_so(tmp_path, settings, ending):
    metrics = {"eval/return": 480.0, "regret_total": 1.0, "env_steps": 1_000_016}
    end(make_run(tmp_path / "run", config={"resolved": CONFIG["resolved"] | settings}, **metrics), "stopped", 1000)
    quiet(tmp_path / "run")
    line = lines(Library(tmp_path))["run"]
    assert (line["state"], line["ending"]) == ("finished" if ending else "stopped", ending)


def test_a_run_that_holds_its_lock_is_running_and_one_that_lost_it_has_crashed(tmp_path):
    folder = make_run(tmp_path / "run")
    end(folder, None)
    library = Library(tmp_path)
    with locked(folder.path):
        quiet(folder.path)
        assert lines(library)["run"]["state"] == "running"
        assert library.answer("/api/runs/run")["memory"]["host_gib"] > 0
    assert lines(library)["run"]["state"] == "crashed"
    assert "no checkpoint" in warned(library, "run")["crashed"]["remedy"]


def test_looking_never_takes_the_lock(tmp_path):
    folder = make_run(tmp_path / "run")
    library = Library(tmp_path)
    library.answer("/api/runs/run")
    with locked(folder.path):
        library.answer("/api/runs/run")


def test_older_folders_without_a_status_are_judged_by_their_steps(tmp_path):
    make_run(tmp_path / "all", 40)
    make_run(tmp_path / "part", 20)
    make_run(tmp_path / "saved", 20)
    (tmp_path / "saved" / "checkpoints" / "latest").write_text("step-00000020\n")
    for name in ("all", "part", "saved"):
        quiet(tmp_path / name)
    assert {name: line["state"] for name, line in lines(Library(tmp_path)).items()} == {
        "all": "finished",
        "part": "crashed",
        "saved": "stopped",
    }


def test_a_line_has_the_score_the_shape_and_the_plan(tmp_path):
    folder = make_run(tmp_path / "run", 100, reward=lambda step: -abs(step - 30))
    folder.event(50, "resumed", "from step-00000050")
    end(folder, steps=200)
    line = lines(Library(tmp_path))["run"]
    assert line["score"] == {"name": "reward", "best": 0, "step": 30, "last": -70, "lower_is_better": False}
    assert (line["step"], line["steps"], line["resumed"]) == (100, 200, 1)
    assert len(line["spark"]["values"]) == 50 and max(line["spark"]["values"]) == line["spark"]["values"][14]


def test_a_score_with_a_minus_is_best_when_lowest(tmp_path):
    config = {"resolved": {"run.best_by": "-loss"}}
    make_run(tmp_path / "run", 5, config=config, loss=lambda step: (step - 3) ** 2)
    assert lines(Library(tmp_path))["run"]["score"] == {
        "name": "loss", "best": 0, "step": 3, "last": 4, "lower_is_better": True,
    }  # fmt: skip


def test_rate_and_time_left_of_a_running_run(tmp_path):
    folder = make_run(tmp_path / "run", 20)
    end(folder, None, steps=50)
    with locked(folder.path):
        found = Library(tmp_path).answer("/api/runs/run")
    assert (found["seconds_per_step"], found["eta_seconds"], found["elapsed_seconds"]) == (1, 30, 20)
    assert found["time_split"] == {"collect": 0.5, "update": 0.25, "other": 0.25}


def test_what_two_runs_differ_in_and_which_are_seeds_of_one(tmp_path):
    for seed, rate in ((0, 0.1), (1, 0.1), (2, 0.3)):
        resolved = CONFIG["resolved"] | {"task.seed": seed, "task.learning_rate": rate, "run.name": f"n{seed}"}
        make_run(tmp_path / f"run{seed}", seed=seed, config=CONFIG | {"resolved": resolved})
    found = Library(tmp_path).answer("/api/compare", {"runs": "run0,run1,run2"})
    assert {d["key"]: d["values"] for d in found["differences"]} == {
        "run.name": ["n0", "n1", "n2"],
        "task.learning_rate": [0.1, 0.1, 0.3],
        "task.seed": [0, 1, 2],
    }
    assert found["seeds"] == [["run0", "run1"], ["run2"]]
    assert "reward" in found["metrics"]


def test_runs_lie_deeper_too_and_their_ids_fit_a_url(tmp_path):
    make_run(tmp_path / "sweep" / "lr=0.1" / "run ä")
    library = Library(tmp_path)
    (line,) = library.answer("/api/runs")["runs"]
    assert line["name"] == "sweep/lr=0.1/run ä"
    assert line["run"] == "sweep~2Flr=0.1~2Frun~20~C3~A4"
    assert library.answer(f"/api/runs/{line['run']}")["name"] == line["name"]


def test_many_runs_are_read_piece_by_piece_and_listed_at_once(tmp_path, monkeypatch):
    for seed in range(5):
        end(make_run(tmp_path / f"run{seed}", seed=seed))
        quiet(tmp_path / f"run{seed}")
    monkeypatch.setattr("grpo.view.patience.AT_ONCE", -1.0)  # a question reads one run and no more
    library = Library(tmp_path)
    for read in range(1, 6):
        found = lines(library).values()
        assert len(found) == 5 and {line["state"] for line in found} == {"finished"}
        assert sum(line["spark"] is not None for line in found) == read


def test_one_run_alone_can_be_looked_at(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    library = Library(tmp_path, only="a")
    assert list(lines(library)) == ["a"]
    with pytest.raises(LookupError):
        library.answer("/api/runs/b")


# --- curves ----------------------------------------------------------------------------------------------------------


def test_curves_have_nulls_where_a_value_is_missing(tmp_path):
    make_run(tmp_path / "run", 3, kl=lambda step: None if step == 2 else 0.5, **{"eval/accuracy": float("nan")})
    found = Library(tmp_path).answer("/api/runs/run/metrics")
    assert found["step"] == [1, 2, 3]
    assert found["columns"]["kl"] == [0.5, None, 0.5]
    assert found["columns"]["eval/accuracy"] == [None, None, None]
    json.dumps(found, allow_nan=False)


def test_many_steps_come_in_buckets_with_their_extremes(tmp_path):
    make_run(tmp_path / "run", 100, kl=lambda step: 50.0 if step == 37 else 0.0)
    found = Library(tmp_path).answer("/api/runs/run/metrics", {"points": "10", "names": "kl"})
    assert found["bucket"] == 10 and found["count"] == 100
    assert found["step"] == list(range(10, 101, 10))
    assert found["columns"]["kl"] == [0, 0, 0, 5, 0, 0, 0, 0, 0, 0]
    assert found["high"]["kl"][3] == 50 and found["low"]["kl"][3] == 0
    later = Library(tmp_path).answer("/api/runs/run/metrics", {"after": "98", "points": "10"})
    assert later["step"] == [99, 100] and later["bucket"] == 1


def test_lines_are_read_as_they_are_written_and_half_a_line_waits(tmp_path):
    folder = make_run(tmp_path / "run", 2)
    library = Library(tmp_path)
    assert library.answer("/api/runs/run/metrics")["step"] == [1, 2]
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
        file.flush()
        assert library.answer("/api/runs/run/metrics")["step"] == [1, 2]
        file.write('ard": 7.0}\n')
    found = library.answer("/api/runs/run/metrics")
    assert found["step"] == [1, 2, 3] and found["columns"]["reward"][-1] == 7


def test_a_resumption_that_cuts_the_file_back_is_a_new_generation(tmp_path):
    folder = make_run(tmp_path / "run", 5)
    library = Library(tmp_path)
    before = library.answer("/api/runs/run/metrics")
    folder.truncate_after(3)
    folder.append_metrics(4, {"reward": 9.0})
    after = library.answer("/api/runs/run/metrics")
    assert after["generation"] != before["generation"]
    assert after["step"] == [1, 2, 3, 4] and after["columns"]["reward"][-1] == 9


def test_every_documented_metric_has_an_entry_and_names_find_theirs():
    keys = {entry["key"] for entry in entries()}
    assert {"reward", "kl", "clip_ratio/low_mean", "completions/min_length", "eval/accuracy", "regret_total"} <= keys
    assert key_of("rewards/correct/mean") == "rewards/NAME/mean"
    assert key_of("rewards/0/mean") == "rewards/K/mean"
    assert key_of("arm_probability/3") == "arm_probability/V"
    assert key_of("eval/pass@8") == "eval/pass@k"
    assert key_of("before/accuracy") == "before/…"
    assert key_of("no_such_metric") is None
    assert all(entry["formula"] for entry in entries())


# --- warnings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metrics", "code", "words"),
    [
        ({"frac_reward_zero_std": 0.6}, "no_signal", "60 % of the groups have no signal"),
        ({"completions/clipped_ratio": 0.97}, "truncated", "97 % of the completions are truncated: raise the limit"),
        ({"entropy": lambda step: 2.0 if step < 10 else 0.01}, "entropy", "entropy collapsed"),
        ({"entropy": lambda step: 1.0 if step < 10 else 8.0}, "entropy", "entropy explodes"),
        ({"kl": lambda step: 0.01 if step < 18 else 30.0}, "kl", "kl blows up"),
        ({"grad_norm": 0.0}, "grad", "the gradient was 0"),
        ({"grad_norm": lambda step: 1.0 if step < 18 else 99.0}, "grad", "99 times its usual size"),
        ({"ratio": 3.0}, "ratio", "mean ratio 3"),
        ({"clip_ratio/region_mean": 0.5}, "clipped", "50 % of the decisions are clipped"),
        ({"failed": 1.0}, "failed", "10 tries of the last 10 steps failed"),
        ({"updates_skipped": 1.0}, "skipped", "10 updates"),
        ({"microbatch_halvings": 1.0}, "memory", "halved"),
        ({"reward": 0.0, "reward_std": 0.0}, "flat", "every reward of every step so far is 0"),
    ],
)
def test_warnings_say_what_is_wrong(tmp_path, metrics, code, words):
    make_run(tmp_path / "run", 20, **metrics)
    found = warned(Library(tmp_path), "run")
    assert words in found[code]["message"]
    assert found[code]["remedy"]


def test_a_healthy_run_has_no_warning_and_a_time_limit_is_none_for_control(tmp_path):
    end(make_run(tmp_path / "run", 30, entropy=1.0, kl=0.01, ratio=1.0, approx_kl=0.001))
    end(make_run(tmp_path / "control", 30, task="control", truncated=1.0))
    end(make_run(tmp_path / "token", 30, **{"completions/clipped_ratio": 1.0, "completions/mean_length": 1.0}))
    library = Library(tmp_path)
    assert all(warned(library, name) == {} for name in ("run", "control", "token"))


def test_events_that_matter_are_warnings_and_all_are_listed(tmp_path):
    folder = make_run(tmp_path / "run")
    folder.event(3, "checkpoint_failed", "step 3 was not saved")
    folder.event(4, "no_curve", "curve.png was not drawn")
    library = Library(tmp_path)
    assert warned(library, "run")["checkpoint_failed"]["message"] == "step 3 was not saved"
    found = library.answer("/api/runs/run/events", {"offset": "1"})
    assert [row["event"] for row in found["events"]] == ["no_curve"] and found["total"] == 2


# --- groups ----------------------------------------------------------------------------------------------------------


def test_groups_of_a_step_with_badges_and_neighbours(tmp_path):
    folder = make_run(tmp_path / "run")
    end(folder)
    for step in (5, 10, 15):
        two_groups(folder, step)
    found = Library(tmp_path).answer("/api/runs/run/steps/10/groups")
    first, second = found["groups"]
    assert (found["previous"], found["next"], found["total"]) == (5, 15, 2)
    assert first["rewards"] == [1.25, 0.5] and first["mean"] == 0.875  # weights 1 and 0.5
    assert first["std"] == pytest.approx(np.std([1.25, 0.5], ddof=1))
    assert first["lengths"] == [2, 3, 4] and first["badges"] == ["truncated"]
    assert second["badges"] == ["no_signal", "all_wrong", "duplicates"]
    assert found["badges"] == {"no_signal": 1, "all_wrong": 1, "truncated": 1, "duplicates": 1}


def test_badges_of_failures_refills_masked_rows_and_lonely_groups(tmp_path):
    folder = make_run(tmp_path / "run")
    rows = [
        try_row(0, 0, "a", [1.0, 0.0], attempt=1),
        try_row(1, 0, "b", [0.0, 0.0], attempt=1, teaching=0),
        try_row(2, 1, "c", [1.0, 0.0]),
        try_row(3, 1, "d", [None, None], status="failed", error="ValueError: no"),
        try_row(4, 2, "e", [1.0, 0.0]),
        try_row(5, 2, "f", [1.0, 0.0]),
    ]
    add_samples(folder, 1, rows)
    found = Library(tmp_path).answer("/api/runs/run/steps/1/groups")["groups"]
    assert [set(group["badges"]) for group in found] == [
        {"refilled", "masked"},
        {"failed", "reward_error", "unusable"},
        {"no_signal", "all_right"},
    ]


ROW = {"group": 3, "decisions": 2, "completion": 'so, "tokens": [1, "x": 2', "tokens": ["a, ", '"b": [']}


@pytest.mark.parametrize(
    ("row", "short"),
    [
        (ROW, True),
        (ROW | {"attempt": 1}, True),
        (ROW | {"extras": {"a": [1, 2], "b": ["], "]}, "error": 'x], "y": 1'}, True),
        (ROW | {"tokens": ["], ", ": 1, ", "b"], "attempt": 1}, False),
        (ROW | {"tokens": ["], ", "b"]}, False),
        (ROW | {"tokens": [[1], "x"], "attempt": 1}, False),
        ({"group": 3, "decisions": 2, "extras": {"a": 1, "tokens": [1]}}, False),
        ({"group": 3, "tokens": ["a"]}, False),
        ({"group": 3, "decisions": 2, "completion": "none"}, False),
        ({"group": 3, "decisions": 2, "tokens": ["\\", '\\"', '": 1, "reward": 2']}, True),
    ],
)
def test_tokens_are_passed_over_only_where_nothing_is_lost(row, short):
    """An index reads rows without their tokens, which are most of their bytes; text can look like anything."""
    found = _head(json.dumps(row).encode())
    assert found == ({name: x for name, x in row.items() if name != "tokens"} if short else None)


def test_lists_are_filtered_sorted_paged_and_searched(tmp_path):
    folder = make_run(tmp_path / "run")
    for step in (1, 2):
        rows = [
            try_row(2 * g + m, g, f'step {step} says "word{g}" Äpfel\n<b>', [float(g), float(m)], prompt=f"Q{g}")
            for g in range(10)
            for m in range(2)
        ]
        add_samples(folder, step, rows)
    library = Library(tmp_path)

    def groups(**query: str) -> list[tuple[int, int]]:
        found = library.answer("/api/runs/run/groups", query)
        assert found["complete"] and found["of"] == 2
        return [(group["step"], group["group"]) for group in found["groups"]]

    assert groups(limit="3") == [(2, 0), (2, 1), (2, 2)]  # the newest step first
    assert groups(sort="mean", order="desc", limit="3") == [(1, 9), (2, 9), (1, 8)]
    assert groups(sort="mean", order="desc", limit="2", offset="2") == [(1, 8), (2, 8)]
    assert groups(q="WORD7") == [(2, 7), (1, 7)]
    assert groups(q='"step 1" word7') == [(1, 7)]
    assert groups(q="äpfel word3 q3") == [(2, 3), (1, 3)]
    assert groups(q='says "says "') == groups()[:20]
    assert groups(q="completion") == []  # a name in the file, not a text
    assert groups(min_mean="8.4", sort="step") == [(1, 8), (1, 9), (2, 8), (2, 9)]
    assert groups(badge="no_signal") == [] and len(groups(badge="-no_signal,duplicates")) == 20
    for wrong in (
        {"sort": "no"},
        {"badge": "no"},
        {"limit": "501"},
        {"offset": "-1"},
        {"min_mean": "x"},
        {"order": "up"},
    ):
        with pytest.raises(BadRequest):
            groups(**wrong)


def test_a_long_run_is_read_piece_by_piece(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run", 1)
    for step in range(1, 31):
        two_groups(folder, step)
    monkeypatch.setattr("grpo.view.patience.AT_ONCE", -1.0)  # a question reads one piece and no more
    library = Library(tmp_path)
    far = [library.answer("/api/runs/run/groups")["scanned"] for _ in range(5)]
    assert far == [1, 2, 3, 4, 5]
    answers = [library.answer("/api/runs/run/groups", {"q": "four"}) for _ in range(60)]
    assert not answers[3]["complete"] and answers[-1]["complete"]
    assert answers[-1]["total"] == answers[-1]["scanned"] == answers[-1]["of"] == 30


def test_one_group_with_every_number(tmp_path):
    folder = make_run(tmp_path / "run")
    end(folder)
    two_groups(folder, 5)
    two_groups(folder, 10)
    library = Library(tmp_path)
    found = library.answer("/api/runs/run/steps/5/groups/0")
    assert [sample["row"] for sample in found["samples"]] == [0, 1]  # by advantage
    best = found["samples"][0]
    assert best["parts"] == [{"name": "right", "value": 1, "weight": 1}, {"name": "short", "value": 0.5, "weight": 0.5}]
    assert best["completion"] == "the answer is four" and best["clipped"] == [0, 1]
    assert found["samples"][1]["clipped"] == [1, 0]
    assert found["objective"]["formula"] == "−min(r·A, clip(r, 0.8, 1.3)·A)"
    assert found["objective"]["advantage_formula"] == "(reward − mean) / (std + 0.0001)"
    assert (found["previous"], found["next"]) == (None, {"step": 5, "group": 1})
    assert library.answer("/api/runs/run/steps/5/groups/1")["next"] == {"step": 10, "group": 0}


def test_tokens_with_their_numbers(tmp_path):
    folder = make_run(tmp_path / "run")
    end(folder)
    two_groups(folder, 5)
    library = Library(tmp_path)
    first, second = library.answer("/api/runs/run/steps/5/groups/0/tokens")["rows"]
    assert first["tokens"] == ["the ", "answer ", "is ", "four "] and first["ratio"][0] == 1.5
    assert first["clip"] == [1, 0, 0, 0] and second["clip"] == [-1, 0]
    assert second["total"] == 2 and second["mask"] == [1, 1]
    part = library.answer("/api/runs/run/steps/5/groups/0/tokens", {"rows": "0", "from": "1", "to": "3"})
    assert part["rows"][0]["tokens"] == ["answer ", "is "] and part["rows"][0]["total"] == 4
    with pytest.raises(LookupError, match="rows 0, 1"):
        library.answer("/api/runs/run/steps/5/groups/0/tokens", {"rows": "2"})


def test_folders_without_ratio_and_kl_have_them_computed(tmp_path):
    folder = make_run(tmp_path / "run")
    end(folder)
    logp = np.full((1, 2), -1.0, np.float16)
    add_samples(folder, 1, [try_row(0, 0, "a b", [1.0, 0.0])], logp=logp, ref_logp=logp - 1, sampled_logp=logp + 0.5)
    (row,) = Library(tmp_path).answer("/api/runs/run/steps/1/groups/0/tokens")["rows"]
    assert row["ratio"] == [1, 1] and row["sampler"] == [-0.5, -0.5]
    assert row["kl"] == pytest.approx([np.exp(-1.0) + 1.0 - 1.0] * 2, rel=1e-3)
    assert row["entropy"] is None and row["term"] is None


def test_traces_are_thinned_and_arms_are_shown(tmp_path):
    folder = make_run(tmp_path / "run", task="control")
    long = {"length": 5000, "actions": list(range(5000)), "rewards": [1.0] * 5000}
    add_samples(folder, 1, [{"row": 0, "group": 0, "reward": 5000.0, "advantage": 1.0, "status": "truncated", **long}])
    add_samples(
        folder, 2, [{"row": 0, "group": 0, "reward": 1.0, "advantage": 0.0, "status": "ok", "arm": 2, "new": 7}]
    )
    library = Library(tmp_path)
    (sample,) = library.answer("/api/runs/run/steps/1/groups/0")["samples"]
    assert sample["kind"] == "trace" and sample["trace"]["length"] == 5000
    assert sample["trace"]["actions"] == list(range(0, 5000, 3)) and sample["trace"]["stride"] == 3
    (sample,) = library.answer("/api/runs/run/steps/2/groups/0")["samples"]
    assert (sample["kind"], sample["arm"], sample["fields"]) == ("arm", 2, {"new": 7})


def test_a_long_text_is_cut_and_read_in_parts(tmp_path):
    folder = make_run(tmp_path / "run")
    add_samples(folder, 1, [try_row(0, 0, "ab" * 150_000, [1.0, 0.0])])
    library = Library(tmp_path)
    (sample,) = library.answer("/api/runs/run/steps/1/groups/0")["samples"]
    assert len(sample["completion"]) == 200_000 and sample["completion_cut"] == 300_000
    rest = library.answer("/api/runs/run/steps/1/groups/0/text", {"row": "0", "from": "200000"})
    assert sample["completion"] + rest["text"] == "ab" * 150_000 and rest["total"] == 300_000


def test_one_prompt_through_time_and_across_runs(tmp_path):
    for name in ("a", "b"):
        folder = make_run(tmp_path / name)
        for step in (5, 10):
            add_samples(
                folder, step, [try_row(m, 0, f"{name} {step} {m}", [float(m), 0.0], prompt="why?") for m in (0, 1)]
            )
    library = Library(tmp_path)
    key = library.answer("/api/runs/a/steps/5/groups")["groups"][0]["prompt_key"]
    found = library.answer(f"/api/prompts/{key}", {"run": "a", "runs": "b"})
    assert found["prompt"] == "why?" and found["complete"]
    assert [(e["run"], e["step"]) for e in found["entries"]] == [("a", 5), ("a", 10), ("b", 5), ("b", 10)]
    assert [s["completion"] for s in found["entries"][0]["samples"]] == ["a 5 1", "a 5 0"]  # best first
    with pytest.raises(LookupError):
        library.answer("/api/prompts/0000000000000001", {"run": "a"})


# --- what it does not load -------------------------------------------------------------------------------------------


def test_reading_and_serving_never_loads_a_framework(tmp_path):
    two_groups(make_run(tmp_path / "run"), 5)
    program = f"""
import sys
from pathlib import Path
from grpo.view.library import Library
from grpo.view.export import export_html
from grpo.view.server import make_app
library = Library({str(tmp_path)!r})
make_app(library)
for path in ("runs", "docs", "runs/run", "runs/run/metrics", "runs/run/groups", "runs/run/steps/5/groups/0/tokens"):
    library.answer("/api/" + path)
print({{"torch", "jax", "transformers", "gymnasium", "matplotlib"}} & {{*sys.modules}})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.strip() == "set()", done.stderr


def test_no_text_makes_a_row_another_one():
    """Whatever tokens are made of, what is read without them is what is read with them, or nothing."""
    random, pieces = (
        np.random.default_rng(0),
        ["]", ", ", '"', ":", "\\", "{", "}", "[", " ", '"reward": 9', "], ", "a"],
    )
    short = 0
    for _ in range(3000):
        words = ["".join(random.choice(pieces, random.integers(0, 5))) for _ in range(5)]
        row = {
            "group": 1,
            "decisions": 3,
            "completion": words[0],
            "tokens": words[1:4],
            "reward": 0.5,
            "error": words[4],
        }
        found = _head(json.dumps(row).encode())
        assert found is None or found == {name: x for name, x in row.items() if name != "tokens"}
        short += found is not None
    assert short > 1000


def test_a_list_of_groups_shows_images_and_the_same_words_about_another_image_are_another_prompt(tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    shown = [{"kind": "image", "name": "image 1", "file": f"image-{group}.png"} for group in range(2)]
    film = {"kind": "video", "name": "film", "file": "film.mp4"}
    rows = [try_row(n, n // 2, "a", [1.0, 0.0], media=[shown[n // 2], film]) | {"prompt": "where?"} for n in range(4)]
    add_samples(run, 1, rows)
    groups = Library(tmp_path).answer("/api/runs/run/steps/1/groups", {})["groups"]
    assert [group["images"] for group in groups] == [[f"media/run/samples/image-{n}.png"] for n in range(2)]
    assert groups[0]["prompt_key"] != groups[1]["prompt_key"]
