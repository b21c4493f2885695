"""curve.png: which panels it has, in which order, and what is in them."""

import matplotlib.figure
import numpy as np
import pytest

from grpo.run import plot
from tests.faults.tiny import make_folder


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws rows of metrics; gives the panels by name, top first."""

    def draw(rows, first=()):
        figures = []

        class Kept(matplotlib.figure.Figure):
            def __init__(self, **options):
                super().__init__(**options)
                figures.append(self)

        monkeypatch.setattr(plot, "Figure", Kept)
        folder = make_folder(tmp_path / f"run-{len(list(tmp_path.iterdir()))}")
        for step, row in enumerate(rows, 1):
            folder.append_metrics(step, row)
        path = plot.draw(folder, first)
        assert path.read_bytes().startswith(b"\x89PNG") and path == folder.path / "curve.png"
        return {axes.get_ylabel(): axes for axes in figures[0].axes}

    return draw


def test_what_the_source_names_comes_first_then_health_then_evaluations(drawn):
    row = {"return": 3.0, "return_std": 1.0, "kl": 0.1, "reward": 3.0, "grad_norm": 1.0, "loss": 0.5}
    judged = {"eval/return": 4.0, "eval/length": 7.0, "eval/return_std": 1.0}
    panels = drawn([row, row | judged], ("return", "success", "eval/return"))
    assert list(panels) == ["return", "eval/return", "kl", "grad_norm", "eval/length"]
    assert panels["eval/length"].get_xlabel() == "step" and not panels["return"].get_xlabel()


def test_without_a_word_from_the_source_the_reward_comes_first(drawn):
    assert list(drawn([{"reward": 1.0, "entropy": 0.5}])) == ["reward", "entropy"]


def test_steps_without_a_value_are_passed_over(drawn):
    """Nothing has ended yet, or nothing was evaluated: a line through what there is."""
    rows = [{"return": None}, {"return": 2.0}, {"return": None}, {"return": 4.0}]
    (line,) = drawn(rows, ("return",))["return"].get_lines()
    np.testing.assert_array_equal(line.get_xdata(), [2, 4])
    np.testing.assert_array_equal(line.get_ydata(), [2.0, 4.0])


def test_the_spread_is_shown_around_the_mean(drawn):
    rows = [{"return": 10.0, "return_std": 2.0}, {"return": 12.0, "return_std": 1.0}]
    axes = drawn(rows, ("return",))["return"]
    heights = np.concatenate([part.get_paths()[0].vertices[:, 1] for part in axes.collections])
    assert (heights.min(), heights.max()) == (8.0, 13.0)


def test_a_run_without_steps_has_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="no steps to draw"):
        plot.draw(make_folder(tmp_path / "run"))
