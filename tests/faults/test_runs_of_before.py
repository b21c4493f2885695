"""Run folders of an older version are looked at, evaluated and gone on with, with the numbers it would have had."""

import json
import tarfile
from pathlib import Path

import pytest

from grpo.cli import main

pytest.importorskip("gymnasium")
pytest.importorskip("transformers")

FOLDERS = sorted((Path(__file__).parent / "runs_of_before").glob("*.tar.xz"))


def unpacked(name: str, tmp_path: Path) -> Path:
    with tarfile.open(next(path for path in FOLDERS if path.name == f"{name}.tar.xz")) as file:
        file.extractall(tmp_path, filter="data")
    return tmp_path / name


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", [path.name.partition(".")[0] for path in FOLDERS])
def test_a_run_of_before_goes_on_with_its_numbers(name, tmp_path, capsys):
    run = unpacked(name, tmp_path)
    before, then = lines(run / "metrics.jsonl"), lines(run / "then.jsonl")
    assert main(["train", "--resume", str(run), "--run.steps", str(len(before) + len(then))]) == 0, capsys.readouterr()
    after = lines(run / "metrics.jsonl")
    plan = json.loads((run / "config.json").read_text())["run"]
    assert (plan["keep_samples"], plan["keep_metrics"]) == (None, None)  # it knew of no thinning: all is kept
    assert after[: len(before)] == before
    for now, was in zip(after[len(before) :], then, strict=True):
        assert set(was) <= set(now)
        for metric, value in was.items():  # other machines round differently
            expected = value if value is None else pytest.approx(value, rel=1e-3, abs=1e-5)
            assert now[metric] == expected, metric


@pytest.mark.parametrize("name", ["cartpole", "language", "dreamer"])
def test_a_run_of_before_is_evaluated(name, tmp_path, capsys):
    run = unpacked(name, tmp_path)
    words = ["--limit", "4"] if name == "language" else ["--episodes", "2"]
    assert main(["eval", str(run), *words]) == 0, capsys.readouterr()
    assert "step 2" in capsys.readouterr().out
