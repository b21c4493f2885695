"""The words of `grpo sweep` and `grpo train --seeds`. Nothing heavy is loaded before one of them runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo.app.arguments import count, given_flags

if TYPE_CHECKING:
    from grpo.app.many.book import Asked

SUMMARY = "try settings: runs in one folder, a table, the best of them"
EXAMPLES = """\
  grpo sweep cartpole --over group_size=4,8,16                               every value
  grpo sweep cartpole --over learning_rate=1e-4..1e-2 group_size=4,8 --trials 40 --seeds 3 --parallel 4
  grpo sweep --resume runs/cartpole-sweep-20261115-101500 --trials 80
"""


def add_seed_flags(made: argparse.ArgumentParser, seeds: int | None = None) -> None:
    """What `train` and `sweep` say about several runs; `seeds`: how many a sweep makes of each trial."""
    group = made.add_argument_group("several runs")
    group.add_argument(
        "--seeds", type=count, default=seeds, metavar="N",
        help="runs from as many seeds, from --seed on: their curves with the spread, a table"
        if seeds is None else f"runs of each trial, from --seed on; their mean decides ({seeds})",
    )  # fmt: skip
    group.add_argument("--parallel", type=count, metavar="N", help="runs at a time (control: one a core; others: one)")


def add_sweep_flags(made: argparse.ArgumentParser) -> None:
    """What a search goes over, and for how long."""
    made.add_argument(
        "--over", nargs="+", default=[], metavar="SETTING=…", help="LOW..HIGH for a range, A,B,C for a list"
    )
    made.add_argument(
        "--trials", type=count, metavar="N", help="settings to try, chosen by Optuna; without it every combination"
    )
    made.add_argument("--by", metavar="METRIC", help="what decides, with a leading minus the lowest (run.best_by)")
    made.add_argument("--resume", metavar="FOLDER", help="go on with a sweep; more --trials may be asked for")
    made.add_argument("--trust", action="store_true", help="with --resume: run code that lies inside of it, too")


def _asked(arguments: argparse.Namespace, rest: Sequence[str]) -> Asked:
    """What a command for several runs says."""
    from grpo.app.many.book import Asked

    a = arguments
    flags = tuple(given_flags(a.set, rest))
    if a.command == "train":
        return Asked((*a.configs, *a.presets), flags, ())
    return Asked((*a.configs, *a.presets), flags, (), tuple(a.over), a.trials, a.by)


def meant(arguments: argparse.Namespace) -> bool:
    """Whether `grpo train` is asked for several runs, or to go on with some."""
    a, book = arguments, False
    if a.resume is not None:
        from grpo.app.many.book import is_book

        book = is_book(Path(a.resume))
    if (a.parallel or (a.seeds and a.resume)) and not (book or (a.seeds and not a.resume)):
        name = "parallel" if a.parallel else "seeds"
        raise ValueError(f"--{name} is for several runs: give --seeds with a new one, or leave it out")
    return book or a.seeds is not None


def run(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    """Several runs, from the beginning or where they stopped."""
    from grpo.app.arguments import resolved
    from grpo.app.many.space import EXAMPLE
    from grpo.app.many.sweep import begin, go_on
    from grpo.run.files import FolderError

    a = arguments
    if a.command == "train" and (a.ranks or a.rank_timeout or a.shared_gpu):
        raise ValueError("--seeds makes runs beside each other, --ranks divides one; give one of them")
    if a.command == "train" and a.overwrite:
        raise ValueError("--overwrite begins one run anew; for several choose another --logdir, or --resume")
    if a.trust and not a.resume:
        raise ValueError("--trust is for --resume: what you name yourself runs without it; leave it out")
    asked = _asked(a, rest)
    try:
        if not a.resume:
            if a.command == "sweep" and not a.over:
                raise ValueError(f"a sweep needs something to go over: {EXAMPLE}")
            return begin(asked, a.seeds or 1, resolved, a.parallel)
        if asked.names or asked.flags:
            raise ValueError("--resume takes its settings from the folder; leave the others out")
        trials = a.trials if a.command == "sweep" else None
        seeds = a.seeds if a.command == "train" else None
        return go_on(Path(a.resume), resolved, a.parallel, trials, seeds, a.trust)
    except FolderError as error:
        raise ValueError(str(error)) from None
