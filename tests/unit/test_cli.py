"""The command's contract with a shell: what it prints, where, and the exit code."""

import subprocess
import sys
from pathlib import Path

import pytest

import grpo
from grpo.cli import main
from grpo.recipes import RECIPES, table_text

ROOT = Path(__file__).parents[2]


def test_prints_the_whole_table(capsys):
    assert main(["presets", "--recipes"]) == 0
    assert capsys.readouterr().out.strip() == table_text().strip()


def test_prints_the_rows_asked_for(capsys):
    assert main(["presets", "--recipes", "grpo", "dapo"]) == 0
    assert capsys.readouterr().out.strip() == table_text(["grpo", "dapo"]).strip()


def test_unknown_recipe_names_the_nearest(capsys):
    assert main(["presets", "--recipes", "grpo", "dap0"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error == f'unknown recipe "dap0"; did you mean "dapo"? Known: {", ".join(RECIPES)}\n'


def test_unknown_recipe_without_a_near_one(capsys):
    assert main(["presets", "--recipes", "0000"]) == 2
    assert capsys.readouterr().err == f'unknown recipe "0000". Known: {", ".join(RECIPES)}\n'


@pytest.mark.parametrize("arguments", [[], ["presets"], ["no-such-command"]])
def test_bad_usage_exits_with_2(arguments):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"grpo {grpo.__version__}\n"


def test_a_closed_pipe_is_not_an_error():
    command = subprocess.Popen(
        [sys.executable, "-m", "grpo.cli", "presets", "--recipes"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    command.stdout.close()  # before the command can have written: the interpreter is still starting
    error = command.stderr.read()
    assert (command.wait(), error) == (0, "")
