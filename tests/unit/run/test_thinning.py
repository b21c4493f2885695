"""A long run's folder stops growing, and is the same whether the run was cut or not."""

import pytest

from grpo.run.config import RunConfig
from grpo.run.folder import MANY, RunFolder
from grpo.run.start import MOST, Told, as_before
from grpo.run.thinning import due, stays
from tests.faults.tiny import QUICK, make_folder, make_trainer, run

OFTEN = QUICK | {"checkpoint_every": 7, "sample_every": 1, "keep_samples": 6, "keep_metrics": 8}


@pytest.mark.parametrize(("every", "keep"), [(1, 2), (1, 7), (3, 10), (10, 50)])
def test_the_newest_stay_older_ones_ever_further_apart_and_what_has_gone_has_gone(every, keep):
    there: list[int] = []
    for now in range(every, 20 * every * keep + 1, every):
        there.append(now)
        if due(now, every, keep):
            there = [step for step in there if stays(step, now, every, keep)]
            assert there == [step for step in range(every, now + 1, every) if stays(step, now, every, keep)]
            assert len(there) <= keep
        assert len(there) <= 1.5 * keep
    newest = there[-(keep // 2) :]
    assert newest == list(range(newest[0], newest[-1] + 1, every))
    assert there[0] <= now / keep * 4  # the beginning is still told


def looks(folder):
    return {path.name: path.read_bytes() for path in (folder.path / "samples").iterdir()} | {
        "metrics": (folder.path / "metrics.jsonl").read_bytes(),
        "timed": [row["step"] for row in folder.timing()],
    }


def test_a_thinned_run_is_the_same_cut_or_not_and_can_be_drawn(tmp_path):
    judged = {"evaluate": lambda step: {"mark": float(step)}, "evaluate_every": 5}
    whole = make_folder(tmp_path / "whole")
    run(make_trainer(), 40, whole, **OFTEN | judged | {"curve": True})
    assert (tmp_path / "whole" / "curve.png").exists()
    rows = whole.metrics()
    assert [row["step"] for row in rows] == [10, 16, 20, 25, 30, 32, 35, 37, 38, 39, 40]
    assert [row["step"] for row in rows if "eval/mark" in row] == [10, 20, 25, 30, 35, 40]
    cut = make_folder(tmp_path / "cut")
    for steps in (9, 17, 26, 40):
        run(make_trainer(), steps, cut, resume=True, **OFTEN | judged)
    assert looks(cut) == looks(whole)


def test_a_run_that_ends_before_the_bounds_is_as_without_them(tmp_path):
    folders = [make_folder(tmp_path / name) for name in ("bounded", "free")]
    for folder, keep in zip(folders, (30, None), strict=True):
        run(make_trainer(), 12, folder, **OFTEN | {"keep_samples": keep, "keep_metrics": keep})
    assert looks(folders[0]) == looks(folders[1])


def test_films_stay_with_their_samples(tmp_path):
    folder = make_folder(tmp_path / "run")
    for step in range(1, 11):
        folder.write_samples(step, [{"row": 0}], {})
    (tmp_path / "run" / "samples" / "step-00000003-0.mp4").write_bytes(b"film")
    folder.thin_samples(10, 1, 4)
    assert folder.sample_steps() == [1, 3, 8, 9, 10]


def test_a_folder_that_cannot_be_thinned_grows_and_the_run_goes_on(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "_sift", refuse)
    summary = run(make_trainer(), 9, make_folder(tmp_path / "run"), **OFTEN)
    assert (summary.reason, summary.events["not_thinned"]) == ("done", 2)
    assert len(RunFolder.open(tmp_path / "run").metrics()) == 9


def test_an_event_that_comes_again_and_again_is_counted_and_not_always_written(tmp_path):
    folder = make_folder(tmp_path / "run")
    for step in range(MANY + 250):
        folder.event(step, "odd", "again")
    assert folder.counts["odd"] == MANY + 250
    assert [row["count"] for row in folder.events()[-3:]] == [MANY, MANY + 100, MANY + 200]


def test_only_so_many_reports_are_handed_back():
    class Report:
        def forget(self): ...

    told = Told([])
    for _ in range(MOST + 5):
        told.enough(Report())
    assert len(told.reports) == MOST


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
@pytest.mark.parametrize("line", ['{"hello": 1}\n', "not JSON\n", '{"step": 3, "reward": "much"}\n'])
def test_a_line_of_somebody_elses_does_not_end_a_run(name, line, tmp_path):
    folder = make_folder(tmp_path / "run")

    def intrude(report):
        if report.step == 2:
            with (folder.path / name).open("a") as file:
                file.write(line)
        return False

    summary = run(make_trainer(), 9, folder, **OFTEN | {"stop": intrude, "curve": True})
    assert (summary.reason, summary.step, summary.checkpoint.name) == ("done", 9, "step-00000009")
    assert summary.events["not_thinned"] == 2 and summary.metrics["step"] == 9
    assert line in (folder.path / name).read_text()


def test_the_first_thing_that_goes_is_told(tmp_path):
    folder = make_folder(tmp_path / "run")
    summary = run(make_trainer(), 40, folder, **OFTEN)
    assert (summary.events["lines_thinned"], summary.events["samples_thinned"]) == (1, 1)
    told = {row["event"]: row for row in folder.events() if row["event"].endswith("_thinned")}
    assert told["lines_thinned"]["step"] == 8
    assert "run.keep_metrics=8; None: all stay" in told["lines_thinned"]["message"]
    assert told["samples_thinned"]["step"] == 6


def test_a_run_that_is_older_than_thinning_keeps_all_unless_asked(tmp_path):
    folder, now = make_folder(tmp_path / "run"), RunConfig(steps=3)
    for plan, expected in (
        (None, (None, None)),
        ({"steps": 2}, (None, None)),
        ({"keep_samples": 7, "keep_metrics": None}, (7, None)),
        ({"keep_samples": 500, "keep_metrics": 20_000}, (500, 20_000)),
    ):
        folder.write_config({"run": plan})
        how = as_before(now, folder)
        assert (how.keep_samples, how.keep_metrics, how.steps) == (*expected, 3)
    folder.write_config({"run": {}})
    assert as_before(RunConfig(keep_metrics=1000), folder).plan()["keep_metrics"] == 1000


def test_a_script_that_goes_on_with_an_older_run_lets_nothing_go(tmp_path):
    make_trainer().train(steps=1, folder=tmp_path / "run", progress=None)
    document = RunFolder.open(tmp_path / "run").config
    assert (document["run"].pop("keep_samples"), document["run"].pop("keep_metrics")) == (500, 20_000)
    RunFolder.open(tmp_path / "run").write_config(document)
    for steps in (2, 3):
        make_trainer().train(steps=steps, folder=tmp_path / "run", progress=None)
        plan = RunFolder.open(tmp_path / "run").config["run"]
        assert (plan["steps"], plan["keep_samples"], plan["keep_metrics"]) == (steps, None, None)
