"""Flags that several commands have in common, and what their values may be. Nothing heavy is loaded."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.dialects.values import Bare
from grpo.errors import nearest

if TYPE_CHECKING:
    from grpo.app.settings import Resolved

NEXT = {
    "grpo train cartpole": "balance a pole: seconds on one core; curve, video and checkpoints stay in runs/",
    "grpo view": "look at runs in the browser: curves, groups, every decision's numbers",
    "grpo presets": "what else there is to train: control, language models, world models",
    "grpo doctor": "what is installed here, what is missing, and the command that fixes it",
}
"""What `grpo` alone offers."""
WIDEST = 120
"""Columns that are used where there are more, or nobody says how many there are: a pipe is not a terminal of 80."""


def columns() -> int:
    """How wide a line may be."""
    return min(WIDEST, max(40, shutil.get_terminal_size((WIDEST, 24)).columns))


def hanging(head: str, text: str, width: int) -> str:
    """A name and what it means, whose further lines stand below the meaning; a name that fills half stands alone."""
    indent = " " * (len(head) if 2 * len(head) <= width else 4)
    lines = textwrap.wrap(text, max(width - len(indent), 20), break_on_hyphens=False, break_long_words=False) or [""]
    if len(head) > len(indent):
        return "\n".join([head.rstrip(), *(indent + line for line in lines)])
    return "\n".join([head + lines[0], *(indent + line for line in lines[1:])])


def next_text(version: str) -> str:
    """What `grpo` alone says."""
    width = columns()
    about = f"anygrpo {version}: sample a group of tries from one start, score them, reinforce what beat the group."
    more = "grpo --help lists all commands, grpo COMMAND --help explains one."
    offered = [hanging(f"  {command:29}", meaning, width) for command, meaning in NEXT.items()]
    return "\n".join([textwrap.fill(about, width), "", *offered, "", textwrap.fill(more, width)])


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Every command's own parser; argparse has no other way to ask."""
    found = (action for action in vars(parser)["_actions"] if isinstance(action, argparse._SubParsersAction))
    return dict(next(found).choices)


def count(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isdecimal() or len(text) > 15 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def seconds(text: str) -> float:
    """A time above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def seed(text: str) -> int:
    """A seed."""
    if not text.isdecimal() or len(text) > 20 or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**64 - 1")
    return int(text)


def port(text: str) -> int:
    """A TCP port."""
    if not text.isdecimal() or len(text) > 5 or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 1 to 65535")
    return int(text)


def one_of(known: Sequence[str]) -> Callable[[str], str]:
    """One of a few words; another is answered with the nearest."""

    def word(given: str) -> str:
        if given not in known:
            raise argparse.ArgumentTypeError(f"there is no {given!r}{nearest(given, known)} known: {', '.join(known)}")
        return given

    return word


def unknown(parser: argparse.ArgumentParser, command: str, word: str) -> None:
    """Refuse an argument that a command does not know, with that command's own usage."""
    own = commands_of(parser)[command]
    own.error(f"unrecognised argument {word}{nearest(word, re.findall('--[a-z-]+', own.format_help()))}")


def perhaps(names: Sequence[str], flags: Sequence[tuple[str, str]]) -> Resolved | None:
    """What was named, resolved; None: nothing, a variation alone, or what does not go together. Help is for that."""
    from grpo.config import ConfigError

    try:
        return resolved(names, flags) if names else None
    except ConfigError:
        return None


def add_look_flags(
    looked: argparse.ArgumentParser, talked: argparse.ArgumentParser, exported: argparse.ArgumentParser
) -> None:
    """What `eval`, `chat` and `export` have of their own."""
    prompts = looked.add_argument_group("language models")
    prompts.add_argument("--dataset", metavar="FILE", help="held-out rows, a file or a hub id (the run's own)")
    prompts.add_argument("--samples", type=count, metavar="K", help="answers to each prompt; 1: the likeliest tokens")
    prompts.add_argument(
        "--reward",
        action="append",
        default=[],
        metavar="NAME",
        help="who judges, where no run says (correctness)",
    )
    prompts.add_argument("--limit", type=count, metavar="N", help="only the first N rows")
    plays = looked.add_argument_group("control and world models")
    plays.add_argument("--episodes", type=count, help="how many (20)")
    plays.add_argument("--sampled", action="store_true", help="draw actions instead of taking the likeliest")
    plays.add_argument("--render", action="store_true", help="show a window; without a display, write a video")
    plays.add_argument("--video", nargs="?", const="", metavar="FILE", help="write one (RUN/eval.mp4)")
    plays.add_argument("--seed", type=seed, help="of the starts; by default ones that the run has never seen")
    looked.add_argument("--json", action="store_true", help="print JSON")
    talked.add_argument("--system", metavar="TEXT", help="the system prompt (the run's own)")
    talked.add_argument("--temperature", type=float, help="0: the likeliest tokens (the run's own)")
    talked.add_argument("--message", metavar="TEXT", help="say this, print the answer and stop")
    exported.add_argument(
        "--onnx", type=Path, nargs="?", const=Path(), metavar="FILE", help="control: where (RUN/policy.onnx)"
    )
    exported.add_argument("--to", type=Path, metavar="FOLDER", help="a folder for grpo.load (a model's: RUN/model)")
    exported.add_argument("--push", metavar="OWNER/NAME", help="upload that folder to the Hugging Face hub")
    exported.add_argument("--private", action="store_true", help="with --push: for you alone")
    exported.add_argument("--merge", action="store_true", help="language models: an adapter goes into the weights")


def add_rank_flags(made: argparse.ArgumentParser) -> None:
    """What `train` and `doctor` say about several processes."""
    several = made.add_argument_group("several processes")
    several.add_argument(
        "--ranks", type=count, metavar="N",
        help="that work together, one a GPU, on this machine; under torchrun, srun, … as many as these have started",
    )  # fmt: skip
    several.add_argument(
        "--rank-timeout", type=seconds, metavar="SECONDS", help="that one may wait for another before all end (1800)"
    )
    several.add_argument("--shared-gpu", action="store_true", help="let ranks share a GPU, and talk through the CPU")


def resolved(names: Sequence[str], flags: Sequence[tuple[str, str]]) -> Resolved:
    """The settings that presets, files and flags say together."""
    from grpo.app.loading import loading

    with loading():  # settings are classes of libraries, too
        from grpo.app.builders import configs
        from grpo.app.settings import flag_layer, resolve

        return resolve([*layers(names, [key for key, _ in flags]), flag_layer(flags)], configs())


def layers(names: Sequence[str], flags: Sequence[str] = ()) -> list[Any]:
    """What presets, files and data files say, in their order; where none is named, what the flags are about."""
    from grpo.app.settings import DATA_FILES, data_layer, file_layer, preset_layer

    found = []
    given = {key.replace("-", "_").rpartition(".")[2] for key in flags}
    if not names and "env" in given:
        names = ["control"]  # an environment alone says which task
    elif not names and given & {"dataset", "model", "repo_id"}:
        names = ["language"]
    for name in names:
        if name.endswith(DATA_FILES):
            found.append(data_layer(Path(name)))
        elif name.endswith((".yaml", ".yml")) or os.sep in name:
            found.append(file_layer(Path(name)))
        else:
            found.append(preset_layer(name))
    return found


def add_job_flags(made: argparse.ArgumentParser) -> None:
    """What `launch` asks a cluster for."""
    made.add_argument("--on", choices=("slurm", "skypilot", "kubernetes"), help="the same as naming it first")
    made.add_argument("--nodes", type=count, default=1, help="machines (1)")
    made.add_argument("--gpus", type=count, default=8, help="on each of them, one rank a GPU (8)")
    made.add_argument("--time", default="24:00:00", help="slurm: how long at most (24:00:00)")
    made.add_argument("--accelerator", default="H100", help="skypilot: which GPU (H100)")
    made.add_argument("--image", default="anygrpo:latest", help="kubernetes: a container with anygrpo (anygrpo:latest)")
    made.add_argument("--set", action="append", default=[], metavar="BLOCK.KEY=VALUE")


def given_flags(sets: Sequence[str], rest: Sequence[str]) -> list[tuple[str, str]]:
    """(key, value) of `--set key=value` and of every other flag: `--key value`, `--key=value`, `--key` for true."""
    found = []
    for item in sets:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--set {item}: expected KEY=VALUE, e.g. --set run.steps=200")
        found.append((key, value))
    words = list(rest)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ValueError(f"unexpected {word!r}; settings are flags, e.g. --beta 0.1, and presets come before them")
        key, equals, value = word[2:].partition("=")
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else Bare("true")
        found.append((key, value))
    return found
