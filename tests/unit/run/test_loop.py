"""The loop: what it leaves, what it returns, what it refuses."""

import json
import os
import random
import signal

import numpy as np
import pytest
import torch

from grpo.run.budget import FailureBudget
from grpo.run.checkpoint import CheckpointError, fingerprint
from grpo.run.folder import RunFolder
from grpo.run.lock import Busy, locked
from grpo.run.session import Session
from grpo.seeding import derive, seed_all
from tests.faults import tiny
from tests.faults.tiny import QUICK, make_folder, make_trainer, run, train


def test_a_run_learns_and_leaves_everything(tmp_path):
    trainer, folder = make_trainer(learning_rate=0.3, group_size=16), make_folder(tmp_path / "run")
    summary = run(trainer, 40, folder, **QUICK | {"curve": True})
    assert (summary.reason, summary.step, summary.exit_code) == ("done", 40, 0)
    rows = folder.metrics()
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert np.mean([row["reward"] for row in rows[-5:]]) > np.mean([row["reward"] for row in rows[:5]]) + 0.2
    assert {"collect", "reference", "update", "total"} <= set(folder.timing()[0])
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert summary.metrics == rows[-1]
    assert summary.checkpoint.name == "step-00000040"


def test_samples_hold_what_there_is_to_see(tmp_path):
    folder = make_folder(tmp_path / "run")
    run(make_trainer(), 5, folder, **QUICK | {"sample_groups": 1})
    rows, arrays = folder.samples(5)
    assert len(rows) == 4
    assert {row["group"] for row in rows} == {0}
    assert {"row", "group", "reward", "advantage", "status", "state", "action"} <= set(rows[0])
    assert abs(sum(row["advantage"] for row in rows)) < 1e-5
    assert set(arrays) == {"mask", "old_logp", "logp", "ref_logp", "advantage", "gate", "log_ratio", "term", "kl"}
    assert {array.shape for array in arrays.values()} == {(4, 1)}
    assert arrays["logp"].dtype == np.float16
    assert (arrays["logp"] != arrays["old_logp"]).any()  # of the last pass


def test_a_folder_that_holds_steps_is_not_written_over(tmp_path):
    train(tmp_path / "run", 3)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"already holds 3 steps.*resume=True"):
        train(tmp_path / "run", 3, resume=False)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_the_same_trainer_may_go_on_in_its_folder(tmp_path):
    trainer, folder = make_trainer(), make_folder(tmp_path / "run")
    run(trainer, 3, folder, **QUICK)
    assert run(trainer, 5, folder, **QUICK).step == 5
    train(tmp_path / "whole", 5)
    files = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("run", "whole")]
    assert files[0] == files[1]


def test_a_used_trainer_cannot_begin_an_empty_run_again(tmp_path):
    trainer = make_trainer()
    trainer.step()
    with pytest.raises(CheckpointError, match="build it anew"):
        run(trainer, 3, make_folder(tmp_path / "run"), resume=True, **QUICK)


def test_without_a_stop_all_steps_are_done(tmp_path):
    assert run(make_trainer(), 2, make_folder(tmp_path / "run"), stop=None, **QUICK).reason == "done"


def test_stop_ends_with_a_checkpoint(tmp_path):
    summary, _ = train(tmp_path / "run", stop=lambda report: report.step == 4)
    assert (summary.reason, summary.exit_code, summary.checkpoint.name) == ("stopped", 0, "step-00000004")


def test_the_best_are_kept_by_metric(tmp_path):
    scores = iter([5.0, 1.0, 2.0, 3.0])
    options = {"evaluate": lambda step: {"score": next(scores)}, "evaluate_every": 3, "keep_last": 1, "keep_best": 1}
    train(tmp_path / "run", best_by="-eval/score", **options)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert names == ["step-00000006", "step-00000012"]


def test_a_metric_that_never_comes_is_reported(tmp_path):
    summary, _ = train(tmp_path / "run", keep_best=1, best_by="rewrad")
    assert summary.events["best_by_missing"] == 1


def test_wrong_use_is_refused(tmp_path):
    for wrong in ({"evaluate_every": 2}, {"checkpoint_every": 0}, {"progress": "loud"}):
        with pytest.raises(ValueError):
            train(tmp_path / "run", **wrong)


def test_the_trainers_stopwatch_is_given_back(tmp_path):
    trainer = make_trainer()
    before = trainer.phase
    run(trainer, 1, make_folder(tmp_path / "run"), **QUICK)
    assert trainer.phase is before


def test_one_holder_at_a_time(tmp_path):
    with locked(tmp_path), pytest.raises(Busy, match="in use by process"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_seeds_are_fixed_and_apart():
    assert derive(0, 0, "train") == 344891775994632878
    seeds = {derive(seed, step, stream) for seed in range(9) for step in range(9) for stream in ("train", "evaluate")}
    assert len(seeds) == 162


def test_every_generator_is_seeded():
    draws = []
    for _ in range(2):
        seed_all(3, 4)
        draws.append((random.random(), np.random.rand(), torch.rand(()).item()))
    seed_all(3, 5)
    assert draws[0] == draws[1] != (random.random(), np.random.rand(), torch.rand(()).item())


def test_the_budget_counts_a_window():
    budget = FailureBudget(0.01)
    budget.add(8, 8)
    assert not budget.spent()  # 8 of 800 in a full window
    budget.add(1, 8)
    assert budget.spent()
    for _ in range(100):
        budget.add(0, 8)
    assert budget.failed == 0


def test_resume_is_told(tmp_path):
    train(tmp_path / "run", 4)
    train(tmp_path / "run", 6)
    assert [e["message"] for e in RunFolder.open(tmp_path / "run").events()] == ["from step-00000004"]


def test_a_run_that_is_older_than_a_setting_goes_on_where_that_is_at_its_default(tmp_path):
    train(tmp_path / "run", 4)
    path = tmp_path / "run" / "checkpoints" / "step-00000004" / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    del manifest["self"], manifest["settings"]["max_grad_norm"], manifest["settings"]["old_logp"]
    path.write_text(json.dumps(manifest | {"self": fingerprint(manifest)}), encoding="utf-8")
    changed = make_trainer(max_grad_norm=2.0)
    with pytest.raises(CheckpointError, match=r"other settings \(max_grad_norm: 1\.0 → 2\.0\)"):
        run(changed, 6, RunFolder.open(tmp_path / "run"), **QUICK | {"resume": True})
    assert train(tmp_path / "run", 6)[0].step == 6


# --- evaluating, stopping, leaving something to look at -------------------------------------------------------------


class Leaving:
    """A source that notes which policy it is asked to show."""

    def __init__(self, trainer):
        self._inner, self.trainer, self.shown = trainer.source, trainer, []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def leave(self, folder):
        self.shown.append((self.trainer.steps_done, self.trainer.policy.parameters()["logits"].detach().clone()))
        (folder / "video.mp4").write_bytes(b"film")
        return {"video": folder / "video.mp4"}


class Notes:
    """A tracker that notes what it is shown."""

    def __init__(self):
        self.shown = []

    def log(self, step, metrics): ...
    def close(self): ...
    def show(self, step, name, path):
        self.shown.append((step, name, path.name))


def leaving_run(path, scores=(3.0, 9.0, 1.0), **options):
    """A run whose second of three checkpoints is the best."""
    trainer, notes, at_step = make_trainer(), Notes(), {}
    trainer.source = Leaving(trainer)

    def evaluate(step):
        at_step[step] = trainer.policy.parameters()["logits"].detach().clone()
        return {"score": scores[step // 2 - 1]}

    judged = {"evaluate": evaluate, "evaluate_every": 2, "checkpoint_every": 2, "keep_best": 1}
    usual = QUICK | judged | {"best_by": "eval/score", "trackers": [notes]}
    summary = run(trainer, 6, make_folder(path), **usual | options)
    return summary, trainer, notes, at_step


def test_the_best_policy_is_shown_and_the_last_goes_on(tmp_path):
    _, trainer, notes, at_step = leaving_run(tmp_path / "run")
    ((step, weights),) = trainer.source.shown
    assert step == 4 and torch.equal(weights, at_step[4]) and not torch.equal(weights, at_step[6])
    assert trainer.steps_done == 6 and torch.equal(trainer.policy.parameters()["logits"], at_step[6])
    assert [found[1:] for found in notes.shown] == [("video", "video.mp4")]


def test_what_is_shown_is_filed_under_the_last_step(tmp_path):
    _, _, notes, _ = leaving_run(tmp_path / "run")
    assert notes.shown == [(6, "video", "video.mp4")]


def test_without_a_best_the_last_is_shown(tmp_path):
    _, trainer, _, at_step = leaving_run(tmp_path / "run", keep_best=0)
    ((step, weights),) = trainer.source.shown
    assert step == 6 and torch.equal(weights, at_step[6])


def test_a_run_that_was_interrupted_shows_nothing(tmp_path):
    def interrupt(report):
        if report.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    summary, trainer, _, _ = leaving_run(tmp_path / "run", stop=interrupt)
    assert summary.reason == "interrupted" and not trainer.source.shown


def test_what_cannot_be_shown_is_an_event(tmp_path):
    trainer = make_trainer()
    trainer.source = Leaving(trainer)
    trainer.source.leave = lambda folder: 1 // 0
    summary = run(trainer, 2, make_folder(tmp_path / "run"), **QUICK)
    assert (summary.reason, summary.events) == ("done", {"nothing_to_show": 1})


def test_a_run_may_stop_at_what_it_was_evaluated_at(tmp_path):
    def enough(report):
        return (report.get("eval/score") or 0) >= 9

    summary, trainer, _, _ = leaving_run(tmp_path / "run", stop=enough)
    assert (summary.reason, summary.step, summary.metrics["eval/score"]) == ("stopped", 4, 9.0)
    assert trainer.source.shown[0][0] == 4


class Clock:
    """Seconds that pass only when a step is done."""

    def __init__(self, seconds_a_step):
        self.now, self._step = 0.0, seconds_a_step

    def __call__(self):
        return self.now

    def passes(self, point):
        self.now += self._step * (point == "step")


def _kept(path):
    return sorted(int(found.name.removeprefix("step-")) for found in (path / "checkpoints").glob("step-*"))


def _saved_at(path, seconds_a_step, **options):
    """The steps that were saved, whether they are still there or not."""
    clock, saved = Clock(seconds_a_step), []

    def at(point):
        clock.passes(point)
        if point == "pointer":
            saved.append(int((path / "checkpoints" / "latest").read_text().strip().removeprefix("step-")))

    train(path, 9, **{"clock": clock, "at": at, "keep_last": None} | options)
    return saved


@pytest.mark.parametrize(
    "seconds, options, expected",
    [
        (299, {}, [1, 4, 7, 9]),  # three steps are more than ten minutes, and so are nine like the first
        (700, {}, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (60, {}, [9]),
        (70, {}, [1, 9]),
        (299, {"checkpoint_every": 2}, [2, 4, 6, 8, 9]),
        (299, {"checkpoint_minutes": 20}, [1, 6, 9]),
        (700, {"checkpoint_minutes": 0}, [9]),
        (700, {"checkpoint_minutes": None}, [9]),
    ],
)
def test_checkpoints_by_the_clock(seconds, options, expected, tmp_path):
    assert _saved_at(tmp_path / "run", seconds, **{"checkpoint_every": None} | options) == expected


def test_checkpoints_by_the_clock_change_nothing_else(tmp_path):
    """Nor which one is the best, though every step is saved here."""
    best = {"checkpoint_every": 4, "keep_best": 1, "keep_last": 1}
    assert _saved_at(tmp_path / "slow", 700, **best) == list(range(1, 10))
    assert _saved_at(tmp_path / "quick", 0, **best) == [4, 8, 9]
    assert _kept(tmp_path / "slow") == _kept(tmp_path / "quick")
    files = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("slow", "quick")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    "keep_last, after_seven, expected",
    [(None, [2, 4, 6, 7], [2, 4, 6, 8, 9]), (3, [2, 4, 6, 7], [6, 8, 9]), (1, [6, 7], [9])],
)
def test_checkpoints_by_the_clock_neither_stay_nor_push_out_planned_ones(keep_last, after_seven, expected, tmp_path):
    """Also where the run is cut in between, and goes on from one of them."""
    often, clock = {"checkpoint_every": 2, "keep_last": keep_last}, Clock(700)

    def cut(point):
        clock.passes(point)
        if point == "step" and clock.now > 7 * 700:
            raise KeyError(point)

    _saved_at(tmp_path / "whole", 700, **often)
    with pytest.raises(KeyError):
        train(tmp_path / "cut", 9, clock=clock, at=cut, **often)
    assert _kept(tmp_path / "cut") == after_seven
    assert train(tmp_path / "cut", 9, **often)[0].reason == "done"
    assert _kept(tmp_path / "cut") == _kept(tmp_path / "whole") == expected
    assert tiny.fingerprint(tmp_path / "cut") == tiny.fingerprint(tmp_path / "whole")


def test_a_checkpoint_that_does_not_say_whether_it_was_planned_was(tmp_path):
    often = {"checkpoint_every": 2, "keep_last": None}
    train(tmp_path / "run", 4, **often)
    for path in (tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"):
        manifest = json.loads(path.read_text())
        del manifest["self"], manifest["planned"]
        path.write_text(json.dumps(manifest | {"self": fingerprint(manifest)}))
    train(tmp_path / "run", 6, **often)
    assert _kept(tmp_path / "run") == [2, 4, 6]


@pytest.mark.parametrize("ends", ["asked", "nothing left"])
def test_a_run_that_ends_early_has_its_last_groups_with_its_last_checkpoint(ends, tmp_path, monkeypatch):
    folder, saved = make_folder(tmp_path / "run"), []
    save, step = Session.save, Session.step

    def noted(session, *given, **named):
        saved.append((session.trainer.steps_done, folder.sample_steps()))
        return save(session, *given, **named)

    monkeypatch.setattr(Session, "save", noted)
    if ends == "nothing left":
        monkeypatch.setattr(Session, "step", lambda session: step(session) if session.trainer.steps_done < 4 else None)
    stop = (lambda report: report.step == 4) if ends == "asked" else None
    run(make_trainer(), 9, folder, stop=stop, **QUICK | {"sample_every": 3, "checkpoint_every": 4})
    assert folder.sample_steps() == [1, 3, 4]
    assert ends != "asked" or saved[0] == (4, [1, 3, 4])
