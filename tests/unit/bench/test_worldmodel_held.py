"""The table of how long CartPole stays balanced in imagination: what is counted, and in which order."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

import worldmodel_held as held


def cell(seed, returns, **settings):
    looks = [{"env_steps": 250.0 * (at + 2), "return": value} for at, value in enumerate(returns)]
    return {"seed": seed, "settings": settings, "curve": looks}


def test_looks_count_from_the_first_good_one():
    edges = [{"seed": 0, "starts": "usual", "settings": {}, "curve": [[500, 20.0], [750, 480.0], [1000, 300.0]]}]
    edges += [edges[0] | {"starts": "half at the ends"}, edges[0] | {"settings": {"horizon": "64"}}]
    far = [cell(1, [9, 500, 100, 475, 474, 500, 500], horizon="200"), cell(0, [9, 9], horizon="200")]
    assert held.table(edges, far).splitlines()[2:] == [
        "| the preset `dreamer` | 0 | 750 | 1 of 2 | 1 | 1,000 |",
        "| `horizon=200` | 0 | never | 0 of 0 | 0 | 750 |",
        "| `horizon=200` | 1 | 750 | 4 of 6 | 3 | 2,000 |",
    ]
