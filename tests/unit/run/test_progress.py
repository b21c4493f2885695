"""What a person sees."""

import io

import pytest
from rich.console import Console

from grpo.run.plot import draw
from grpo.run.progress import Live, Plain, Silent, make_progress, printable
from tests.faults.tiny import make_folder, train


def test_plain_lines(tmp_path):
    out = io.StringIO()
    train(tmp_path / "run", 4, progress=Plain(every=2, file=out))
    lines = out.getvalue().splitlines()
    assert lines[0] == f"run={tmp_path / 'run'} step=0 steps=4"
    assert [line.split()[0] for line in lines[1:3]] == ["step=2/4", "step=4/4"]
    assert " reward=" in lines[1] and " kl=" in lines[1]
    assert lines[3] == "ended=done"
    assert lines[-1] == f"results={tmp_path / 'run'}"


def test_the_live_bar_and_the_table(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    train(tmp_path / "run", 3, progress=Live(console))
    shown = console.file.getvalue()
    assert "3/3" in shown and "reward=" in shown and "step-00000003" in shown and "results" in shown


def test_auto_is_plain_without_a_terminal(capsys):
    assert isinstance(make_progress("auto"), Plain)
    assert isinstance(make_progress(None), Silent)


@pytest.mark.parametrize("text", ["\x1b[31mred", "a\rb", "a\0b", "\u202eevil", "a\nb", "\x9b1m", "\ud800"])
def test_control_characters_never_reach_the_terminal(text):
    assert printable(text).isprintable()


def test_markup_in_a_metric_is_text(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    live = Live(console)
    live.start(tmp_path / "[bold]x[/nope]", 0, 1)
    live.close()
    assert "[bold]x[/nope]" in console.file.getvalue()


def test_curves_of_a_run_with_gaps(tmp_path):
    folder = make_folder(tmp_path / "run")
    with pytest.raises(ValueError, match="no steps"):
        draw(folder)
    for step in range(1, 6):
        folder.append_metrics(
            step, {"reward": None if step == 2 else step, "reward_std": 0.5, "kl": None, "eval/score": 1}
        )
    folder.close()
    assert draw(folder).read_bytes().startswith(b"\x89PNG")
