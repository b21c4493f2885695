"""What a shell is told about the command."""

import shutil
import subprocess

import pytest

from grpo.cli import main

TRIED = {
    "grpo tr": "train",
    "grpo train cartp": "cartpole",
    "grpo train cartpole --group-s": "--group-size",
    "grpo train cartpole --run.ste": "--run.steps",
    "grpo train cartpole --loss-type dr_": "dr_grpo",
    "grpo train cartpole --group-size 8 --kl-e": "--kl-estimator",
    "grpo view --exp": "--export",
    "grpo train mine": "mine.yaml",
    "grpo new pol": "policy",
    "grpo config hopp": "hopper",
}
"""What is typed, and what Tab makes of its last word."""
BASH = """
source ./grpo.sh
while read -r -a COMP_WORDS; do
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    _shtab_grpo
    echo "${COMPREPLY[*]}"
done
"""
FISH = "source ./grpo.fish; while read line; complete -C $line | string split -f1 \\t | string join ' '; end"


@pytest.mark.parametrize(
    ("shell", "name", "program"), [("bash", "grpo.sh", BASH), ("fish", "grpo.fish", FISH)], ids=["bash", "fish"]
)
def test_tab_completes_commands_presets_settings_and_values(shell, name, program, tmp_path, capsys) -> None:
    assert main(["completion", shell]) == 0
    (tmp_path / name).write_text(capsys.readouterr().out, encoding="utf-8")
    (tmp_path / "mine.yaml").touch()
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    typed = "\n".join(TRIED) + "\n"
    ran = subprocess.run([shell, "-c", program], input=typed, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    found = dict(zip(TRIED, ran.stdout.splitlines(), strict=True))
    assert {line: found[line].split() for line in TRIED} == {line: [word] for line, word in TRIED.items()}, ran.stderr


def test_zsh_reads_the_same_words(tmp_path, capsys) -> None:
    assert main(["completion", "zsh"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#compdef grpo") and "cartpole" in text and "--group-size" in text and "dr_grpo" in text
    if shutil.which("zsh") is not None:
        subprocess.run(["zsh", "-n"], input=text, text=True, check=True, timeout=60)


def test_other_shells_are_named(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "ksh"])
    assert ended.value.code == 2 and "bash, zsh, fish" in capsys.readouterr().err.replace("'", "")
