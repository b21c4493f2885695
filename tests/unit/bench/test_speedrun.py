"""The speedrun: what its clock counts, and what its table says."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "bench"))  # its scripts import each other as scripts do

import speedrun  # noqa: E402


def test_the_clock_starts_with_the_command_and_stands_still_while_others_look(monkeypatch):
    monkeypatch.setattr(speedrun.time, "time", lambda: 130.0)
    clock = speedrun.Clock(began=100.0)
    assert clock() == 30.0
    clock.stood += 12.0
    assert clock() == 18.0


def test_the_first_look_that_is_high_enough_counts():
    looks = [{"clock": at, "accuracy": right} for at, right in ((9.0, 0.3), (20.0, 0.49), (30.0, 0.5), (40.0, 0.6))]
    assert speedrun.seconds_to(looks) == 30.0
    assert speedrun.seconds_to(looks[:2]) is None


def test_a_table_has_a_row_for_every_seed_that_ended(tmp_path):
    looks = [{"clock": 9.0, "accuracy": 0.3, "step": 0}, {"clock": 31.0, "accuracy": 0.6, "step": 12}]
    told = {"before": 0.3, "after": 0.6, "gain": 0.3, "low": 0.2, "high": 0.4}
    about = {"course": "sums", "model": "M", "seed": 1, "looks": looks, "flags": {"beta": 0.0}}
    machine = {"machine": {"gpu": "a GPU"}, "versions": {"torch": "2"}}
    (tmp_path / "a.json").write_text(json.dumps(about | told | machine))
    (tmp_path / "b.json").write_text(json.dumps(about))  # was interrupted
    text = speedrun.table(tmp_path)
    assert text.splitlines()[2] == "| sums, M | 1 | 30.0% | 31 | 60.0% | +30.0 (+20.0 to +40.0) | 31 | 12 | 9 |"
    assert len(text.splitlines()) == 3
    assert "`grpo train smollm-arithmetic --beta 0.0`" in speedrun.flags_told(tmp_path)
    assert speedrun.table(tmp_path / "none") == "Not measured.\n"
