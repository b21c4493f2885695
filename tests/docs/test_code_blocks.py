"""Every fenced block in the documentation is what it claims to be.

Python blocks of one file run in order, in one namespace and an empty folder. In bash and console blocks,
`grpo …` and `python examples/…` run and must succeed; `make …` must name a target; the other commands that
may be shown are listed.
"""

import re
import shlex
import shutil
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt

from tests.docs.shell import run

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(path for path in (ROOT / "grpo").rglob("*.md") if "templates" not in path.parts),
]
SHELLS = {"bash", "console"}
UNTESTED = {"", "text", "yaml", "toml"}
SHOWN_ONLY = {"pip", "git", "cd", "pytest"}
DONE: set[tuple[str, ...]] = set()
"""Commands that have worked and leave nothing that another needs: several pages show them."""
KEPT: dict[tuple[str, ...], Path] = {}
"""Commands that have trained a run, and the folder of runs it lies in: another page that shows one gets a copy."""
LONG = {"docs/control.md", "docs/language.md", "docs/worldmodel.md", "docs/vision.md", "docs/howto/sweeps.md"}
"""Pages whose commands train for more than a few seconds: `make slow` runs those."""
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


class Block(NamedTuple):
    language: str
    line: int  # of the first line of code, counted from 1
    code: str


@cache
def blocks(path: Path) -> list[Block]:
    tokens = MarkdownIt("commonmark").disable("inline").parse(path.read_text(encoding="utf-8"))
    fences = (token for token in tokens if token.type == "fence")
    return [Block(token.info.partition(" ")[0], token.map[0] + 2, token.content) for token in fences]


def commands(block: Block) -> Iterator[tuple[int, list[str]]]:
    """Line number and words of each command: every line in bash, what follows `$ ` in console."""
    lines = enumerate(block.code.splitlines(), block.line)
    for number, line in lines:
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line.removeprefix("$ ")
        while line.endswith("\\"):
            line = line[:-1] + next(lines)[1]
        if words := shlex.split(line, comments=True):
            yield number, words


def runnable(words: list[str]) -> list[str] | None:
    """The command to run, None if it is only shown; ValueError if it may not stand in the documentation."""
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, *arguments = words
    if set("|&;<>") & set("".join(words)):
        raise ValueError("one plain command a line, without pipes or redirections")
    if program == "grpo":
        return words
    if program == "python" and arguments and arguments[0].startswith("examples/"):
        return [program, str(ROOT / arguments[0]), *arguments[1:]]
    if program == "make":
        unknown = {argument for argument in arguments if "=" not in argument} - TARGETS
        if unknown:
            raise ValueError(f"no such make target: {', '.join(sorted(unknown))}")
        return None
    if program in SHOWN_ONLY:
        return None
    raise ValueError(f"{program} is neither run nor one of {', '.join(sorted(SHOWN_ONLY))}")


def cases(languages: set[str]) -> list:
    """The documents that have a block in one of these languages, with those blocks."""
    found = ((path, [b for b in blocks(path) if b.language in languages]) for path in DOCUMENTS)
    names = [(str(path.relative_to(ROOT)), path, some) for path, some in found if some]
    slow = LONG if languages == SHELLS else set()
    return [pytest.param(*case, id=name, marks=pytest.mark.slow if name in slow else ()) for name, *case in names]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_languages_are_known(path):
    known = {"python"} | SHELLS | UNTESTED
    for block in blocks(path):
        directive = block.language.startswith("{") and path.is_relative_to(ROOT / "docs")
        if block.language not in known and not directive:
            pytest.fail(f"{path.relative_to(ROOT)}:{block.line}: unknown language {block.language!r}")


@pytest.mark.parametrize(("path", "python"), cases({"python"}))
def test_python_blocks_run(path, python, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("documented")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in python:
        place = f"{path.relative_to(ROOT)}:{block.line}"
        try:
            # Empty lines in front give a traceback the document's own line numbers.
            code = block.code.replace('if __name__ == "__main__":', "if True:")  # a script's own part runs, too
            exec(compile("\n" * (block.line - 1) + code, path, "exec"), module.__dict__)
        except Exception as error:
            raise AssertionError(f"{place}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize(("path", "shell"), cases(SHELLS))
def test_commands_work(path, shell, tmp_path):
    for number, words in (command for block in shell for command in commands(block)):
        place = f"{path.relative_to(ROOT)}:{number}"
        try:
            command = runnable(words)
        except ValueError as error:
            pytest.fail(f"{place}: {error}")
        if command and (*command,) in KEPT:
            shutil.copytree(KEPT[*command,], tmp_path / "runs", dirs_exist_ok=True)
        elif command and (*command,) not in DONE:
            code, said = run(command, tmp_path, ROOT)
            assert code == 0, f"{place}: {shlex.join(words)}\n{said}"
            if not any("runs/" in word for word in command):  # the next command may need the folder
                DONE.add((*command,))
            elif command[1] == "train":
                KEPT[*command,] = tmp_path / "runs"


def test_commands_of_a_console_block():
    block = Block("console", 7, "$ grpo train \\\n    --steps 3  # short\nstep=1\n$ make test\n")
    assert list(commands(block)) == [(7, ["grpo", "train", "--steps", "3"]), (10, ["make", "test"])]


@pytest.mark.parametrize("line", ["make no-such-target", "curl x", "grpo presets | head", "python -c pass"])
def test_unknown_commands_are_refused(line):
    with pytest.raises(ValueError):
        runnable(line.split())
