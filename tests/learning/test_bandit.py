"""The preset finds the best arm, loses it, and finds the next: each of four seeds, of twenty when there is time."""

import runpy
from pathlib import Path
from statistics import mean

import pytest

from grpo.bandit import BanditConfig, make_trainer

SCRIPT = Path(__file__).parents[2] / "examples" / "bandit.py"
SEEDS = [range(4), pytest.param(range(20), marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=SEEDS, ids=["4 seeds", "20 seeds"])
def runs(request):
    """Reports of 100 steps for each seed."""
    return [make_trainer(BanditConfig(seed=seed)).train(steps=100) for seed in request.param]


def regrets(runs) -> list[float]:
    return [sum(report["regret"] for report in run) for run in runs]


def test_regret_of_the_policy_that_sampled(runs):
    assert mean(regrets(runs)) <= 3.0
    assert max(regrets(runs)) <= 4.5


def test_best_arm_in_the_structured_phases(runs):
    played = [r["best_arm_probability"] for run in runs for r in run if r["best_arm_probability"] is not None]
    assert len(played) == len(runs) * 40
    assert mean(played) >= 0.85


def test_both_phases_are_learned_and_forgotten(runs):
    for run in runs:
        for last, arm in ((39, 3), (79, 0)):
            assert run[last]["best_arm"] == arm
            assert run[last]["best_arm_probability"] >= 0.85
        for last in (59, 99):  # after twenty flat steps
            assert max(run[last][f"arm_probability/{arm}"] for arm in range(5)) <= 0.5


def test_the_summed_regret_is_reported(runs):
    assert [run[-1]["regret_total"] for run in runs] == pytest.approx(regrets(runs))


def test_the_script_prints_a_table_and_draws(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves" / "bandit.png"
    monkeypatch.setattr("sys.argv", ["bandit.py", "--seeds", "2", "--noise", "0", "0.1", "--out", str(picture)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line[:16].strip() for line in lines[3:6]] == ["uniform play", "noise 0", "noise 0.1"]
    assert "19.20" in lines[3]
    assert picture.read_bytes().startswith(b"\x89PNG")
