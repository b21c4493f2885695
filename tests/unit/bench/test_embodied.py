"""The bench of robots: which cells are there already, whoever wrote them, and that they can be shown."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "bench"))

import embodied as bench  # noqa: E402

CHUNKED = {"action_chunk": "4", "env_steps": "300000"}
CELLS = [
    {"seed": 0, "settings": {}, "curve": [{"step": 35}, {"step": 40}]},  # as the first ones are
    {"seed": 0, "preset": "rlinf_embodied", "settings": {}, "steps": 20, "curve": []},
    {"seed": 1, "settings": CHUNKED, "steps": 19, "curve": []},
]


def there(key, steps=None):
    return bench.is_there(key, bench.planned(key, steps)[1], CELLS)


def test_steps_tell_cells_apart_also_older_ones():
    """40 are the preset's own number; of the other, which would make 100, 20 were made."""
    own, other = {"seed": 0, "settings": {}}, {"seed": 0, "preset": "rlinf_embodied", "settings": {}}
    assert there(own) and there(own, 40) and not there(own, 20) and not there(own | {"seed": 7})
    assert there(other, 20) and not there(other) and not there(other, 21)


def test_environment_steps_count_instead_where_they_are_asked_for():
    key = {"seed": 1, "settings": CHUNKED}
    assert bench.planned(key, None)[1] is None and there(key)
    assert not there(key | {"settings": CHUNKED | {"env_steps": "400000"}})


def test_a_cell_that_was_run_is_not_run_again(monkeypatch, tmp_path, capsys):
    pytest.importorskip("gymnasium_robotics")  # the file says which
    ran = []

    def cell(config, steps, env_steps):
        ran.append((config.seed, steps, env_steps))
        share = {"success": 0.5, "success_low": 0.4, "success_high": 0.6}
        return {"untrained": share, "trained": share, "steps": steps or 3, "env_steps": 9, "curve": [], "cpu_s": 1}

    monkeypatch.setattr(bench, "cell", cell)
    monkeypatch.setattr(bench, "PATH", tmp_path / "embodied.json")
    for words in ("--steps 5", "--steps 6", "--steps 5", "--env-steps 9", "--env-steps 9", ""):
        monkeypatch.setattr(sys, "argv", ["embodied.py", "--seeds", "3", *words.split()])
        bench.main()
    assert ran == [(3, 5, None), (3, 6, None), (3, None, 9), (3, 40, None)]
    assert "| pointmaze | 3 | 50% [40, 60] | – | 50% [40, 60] | 6 | 9 | 1 |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["embodied.py", "--steps", "5", "--env-steps", "9"])
    with pytest.raises(SystemExit):
        bench.main()


def test_what_is_there_can_be_shown(capsys):
    kept = json.loads((ROOT / "bench" / "results" / "embodied.json").read_text(encoding="utf-8"))["cells"]
    bench.table({"cells": kept})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(kept) and len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(("greedy", "word"), [(True, "greedy"), (False, "drawn")])
def test_a_run_of_pong_is_shown_with_the_evaluation_that_it_had(greedy, word, tmp_path, monkeypatch, capsys):
    settings = {"seed": 4, "eval_greedy": greedy, "eval_episodes": 3, "device": "cuda", "workers": 2}
    lines = [{"step": n, "env_steps": 10.0 * n, "return": n / 4} for n in range(1, 8)]
    lines[6] |= {"eval/return": 6.5}
    files = {
        "run.json": [{"seed": 4, "versions": {"torch": "2"}}],
        "config.json": [{"resolved": {f"task.{name}": value for name, value in settings.items()}}],
        "status.json": [{"reason": "stopped"}],
        "metrics.jsonl": lines,
        "timing.jsonl": [{"step": n, "total": 2.0} for n in range(1, 8)],
    }
    for name, rows in files.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    run = bench.pong(tmp_path)
    assert settings.items() <= run.items() and run["ended"] == "stopped"
    assert [(one["step"], one["seconds"], one["eval"]) for one in run["curve"]] == [(5, 10.0, None), (7, 14.0, 6.5)]
    bench.table({"cells": [], "pong": [run]})
    assert "seed 4: 70 decisions, 14 s (stopped), last 20 games 1.75, best evaluation 6.5" in capsys.readouterr().out
    pyplot = pytest.importorskip("matplotlib.pyplot")
    titles = []
    monkeypatch.setattr(pyplot.Axes, "set_title", lambda axes, text: titles.append(text))
    bench.draw([run], tmp_path / "pong.png")
    assert titles == [f"pong: the last 20 games played (●: 3 {word} games on other starts)"]
    assert (tmp_path / "pong.png").stat().st_size > 1000
