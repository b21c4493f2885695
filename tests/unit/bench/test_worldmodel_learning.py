"""The bench of learning in imagination: what is judged, what is kept, and what is not run again."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "bench"))

import pages  # noqa: E402
import worldmodel_learning as learning  # noqa: E402


def task(**given):
    limits = {"env_steps": 10, "every": 5, "episodes": 2, "stop_at": None, "success_above": None, "minutes": 1.0}
    limits["through"] = False
    return learning.Task(argparse.Namespace(**limits | given))


def test_a_score_is_the_return_or_the_share_of_successes():
    returns = np.array([0.0, 1.0, 0.5, 0.0])
    assert task().scored(returns).keys() == {"return", "return_std"} and not task().good(task().scored(returns))
    seen = task(success_above=0.0, stop_at=0.5)
    assert seen.scored(returns)["success"] == 0.5 and seen.good(seen.scored(returns))
    assert not task(stop_at=0.5).good(task().scored(returns))


def test_a_cell_takes_the_place_of_what_was_there_of_it(tmp_path):
    path = tmp_path / "new" / "worldmodel_task.json"
    cells = [{"actor": "group", "seed": seed, "settings": {}} for seed in (1, 0)]
    for cell in cells:
        learning.keep(path, {"env": "E"}, {**cell, "whole": False})
    learning.keep(path, {"env": "E"}, {**cells[0], "whole": True})
    learning.keep(path, {"env": "E"}, {**cells[0], "settings": {"horizon": "8"}, "whole": True})
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept["env"] == "E"
    assert [(c["seed"], c["settings"], c["whole"]) for c in kept["cells"]] == [
        (0, {}, False), (1, {}, True), (1, {"horizon": "8"}, True),
    ]  # fmt: skip


def test_a_small_cell_is_learned_judged_and_not_run_again(tmp_path, monkeypatch, capsys):
    small = {"prefill": 40, "pretrain": 1, "horizon": 3, "train_ratio": 4, "batch_length": 8, "batch_size": 4}
    words = ["--actors", "random,group", "--seeds", "0", "--env-steps", "60", "--every", "40", "--episodes", "2"]
    words += ["--out", str(tmp_path), "--name", "x", *(f"--set={name}={value}" for name, value in small.items())]
    monkeypatch.setattr(sys, "argv", ["worldmodel_learning.py", *words])
    learning.main()
    first = learning.read(tmp_path / "worldmodel_x.json")["cells"]
    assert [cell["actor"] for cell in first] == ["group", "random"] and all(cell["whole"] for cell in first)
    assert first[0]["curve"][-1]["env_steps"] >= 60 and first[0]["final"]["return"] > 0
    assert "CartPole-v1, group, seed 0" in capsys.readouterr().out
    learning.main()
    assert "CartPole-v1, group, seed 0" not in capsys.readouterr().out
    assert learning.read(tmp_path / "worldmodel_x.json")["cells"] == first


def look(steps, greedy, drawn):
    return {"env_steps": steps, "return": greedy, "drawn": drawn}


def suite(folder):
    """Files of every task: two seeds of each actor, and chance."""
    for task in learning.SUITE:
        for seed in (1, 0):
            for actor, gain in (("group", 100), ("critic", 0)):
                curve = [look(2000 * i, gain + 10 * i, gain + seed) for i in range(1, 8)]
                ends = {"curve": curve, "final": {"return": gain + seed, "drawn": gain + 5.0}}
                cell = {"actor": actor, "seed": seed, "settings": {}, **ends}
                learning.keep(folder / f"worldmodel_{task}.json", {"env": task}, cell)
        chance = {"actor": "random", "seed": 0, "settings": {}, "curve": [], "final": {"return": 3.0}}
        learning.keep(folder / f"worldmodel_{task}.json", {"env": task}, chance)


def test_the_suite_has_a_row_for_each_actor_with_every_seed_beside_chance(tmp_path):
    suite(tmp_path)
    ends = {"curve": [look(2000, 900, 800)], "final": {"return": 901.0, "drawn": 801.0}}
    cell = {"actor": "group", "seed": 0, "settings": {"scale_observations": "true"}, **ends}
    for way in ("scaled", "limited"):
        learning.keep(tmp_path / f"worldmodel_reacher_{way}.json", {"env": "reacher"}, cell)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{pages.begins('worldmodel_learning.py')}\nold\n{pages.END}\nafter\n", encoding="utf-8")
    (tmp_path / "figures").mkdir()
    learning.tell_suite(tmp_path, page)
    text = page.read_text(encoding="utf-8")
    assert "| cartpole-swingup | group | 100, 101 | 105, 105 | 150, 150 | 100, 101 | 14000, 14000 |" in text
    assert "| reacher-easy | group, scaled observations | 901 | 801 | 900 | 800 | 2000 |" in text
    assert "| reacher-easy | group, scaled, max_std=1 | 901 | 801 | 900 | 800 | 2000 |" in text
    assert "| reacher-easy | drawn evenly | – | 3 | – | – | – |" in text
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert (tmp_path / "figures" / "worldmodel-suite.png").read_bytes().startswith(b"\x89PNG")


def test_a_suite_that_was_not_measured_and_a_page_without_marks_say_so(tmp_path):
    with pytest.raises(SystemExit, match=r"worldmodel_swingup\.json is not there"):
        learning.tell_suite(tmp_path, None)
    suite(tmp_path)
    (tmp_path / "page.md").write_text("text", encoding="utf-8")
    with pytest.raises(SystemExit, match="has no lines <!-- made by"):
        learning.tell_suite(tmp_path, tmp_path / "page.md")


def test_the_page_says_what_the_files_say():
    page = (ROOT / "docs" / "worldmodel.md").read_text(encoding="utf-8")
    made = learning.table(learning.RESULTS)
    assert made in page, "run bench/worldmodel_learning.py --suite --page docs/worldmodel.md"
