"""`grpo sweep` and `grpo train --seeds`: runs from several seeds, of one setting or of many, compared at the end.

asked ─► Book ─► trial: settings ─► a run for each seed ─► what they reached ─► the next trial ─► table, picture
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from grpo.app.builders import TASKS, saved_settings
from grpo.app.many import results
from grpo.app.many.book import NAME, Asked, Book
from grpo.app.many.crew import Job, carried_out
from grpo.app.many.pictures import draw_curves, draw_settings
from grpo.app.many.results import Goal, Reached
from grpo.app.many.space import Space, Study, first_word, grid, space_of, told
from grpo.app.settings import COMMAND_LINE, Resolved
from grpo.app.trust import untrusted
from grpo.config import ConfigError
from grpo.processors import processors
from grpo.run.files import FolderError
from grpo.run.folder import RunFolder
from grpo.run.signals import StopSignals
from grpo.run.stepping import EXIT_CODES

if TYPE_CHECKING:
    from grpo.app.many.together import Together
    from grpo.control.config import ControlConfig

OK, FAILED = 0, 1
MOST_LINES = 20
"""Of the table that is printed; the file has all."""
Resolve = Callable[[Sequence[str], Sequence[tuple[str, str]]], Resolved]
"""Settings from presets and flags."""


def begin(asked: Asked, seeds: int, resolve: Resolve, parallel: int | None) -> int:
    """New runs, all that was asked for, from the seed that the settings say on; the exit code."""
    resolved = resolve(asked.names, asked.flags)
    TASKS[resolved.task].expect_whole(resolved.config)
    first = resolved.config.seed
    asked = replace(asked, flags=_of_every_run(asked, resolve, resolved), seeds=tuple(range(first, first + seeds)))
    space = _space(asked, resolve)
    if asked.trials is None and asked.over:
        grid(space)
    name = f"{resolved.name}-{'sweep' if asked.over else 'seeds'}"
    root = resolved.run.folder(name, resolved.task, first, datetime.now())
    search = _Search(Book.create(root, asked), resolved, space, parallel)
    search.trust = _unconfirmed(search.book, resolve, root, {}) is not None  # said when it is to be gone on with
    return search.run()


def go_on(
    root: Path, resolve: Resolve, parallel: int | None, trials: int | None, seeds: int | None, trust: bool = False
) -> int:
    """The runs of a folder that are not over, and those that are asked for beyond; the exit code.

    trust: also where that runs code which came with the folder.
    """
    book = Book.open(root)
    asked = book.asked
    if seeds is not None:
        asked = replace(asked, seeds=tuple(range(asked.seeds[0], asked.seeds[0] + seeds)))
    if trials is not None:
        if asked.trials is None:
            raise ConfigError(f"{root}: all combinations of its lists are tried; leave --trials out")
        asked = replace(asked, trials=trials)
    book = book.asking(asked)
    search = _Search(book, resolve(asked.names, asked.flags), _space(asked, resolve), parallel)
    search.trust, search.unconfirmed = trust, partial(_unconfirmed, book, resolve)
    return search.run()


def _unconfirmed(book: Book, resolve: Resolve, folder: Path, settings: Mapping[str, str]) -> str | None:
    """What of a run's settings, which somebody else may have written, would have to be confirmed first."""
    file = NAME
    if (folder / "run.json").exists():
        file = f"{folder.relative_to(book.root)}/config.json"
        try:
            found = saved_settings(RunFolder.open(folder), trust=True)
        except (FolderError, ConfigError):
            return None  # the run itself says what is wrong with it, and does nothing else
    else:
        found = resolve(book.asked.names, [*book.asked.flags, *settings.items()])
    return untrusted(replace(found, origins={}), book.root, file=file)


def _of_every_run(asked: Asked, resolve: Resolve, resolved: Resolved) -> tuple[tuple[str, str], ...]:
    """The flags but for those, in whatever spelling, that say the folder and the seed: each run has its own."""
    kept = []
    for flag in asked.flags:
        without = [other for other in asked.flags if other is not flag]
        try:
            found = resolve(asked.names, without)
        except ConfigError:  # it cannot be done without
            kept.append(flag)
            continue
        if found.run.logdir == resolved.run.logdir and found.config.seed == resolved.config.seed:
            kept.append(flag)
    return tuple(kept)


def _space(asked: Asked, resolve: Resolve) -> Space:
    """What is gone over; each end of it is a setting that the task takes."""
    given = {key.replace("-", "_") for key, _ in asked.flags}
    firsts = dict(first_word(item) for item in asked.over)

    def expect(key: str, word: str) -> Any:
        """Beside the first words of the others: one may mean something only where another is set."""
        if key in given:
            raise ConfigError(f"{key} is both fixed and gone over; leave out --{key.replace('_', '-')}")
        others = [(other, first) for other, first in firsts.items() if other != key]
        tried = _flagged(resolve(asked.names, [*asked.flags, *others, (key, word)]))
        try:
            before = _flagged(resolve(asked.names, [*asked.flags, *others]))
        except ConfigError:  # the others need this one
            before = {name: value for name, value in tried.items() if name[1] != key}
        return next((value for name, value in tried.items() if name not in before), word)

    return space_of(asked.over, expect) if asked.over else {}


def _flagged(resolved: Resolved) -> dict[tuple[str, str], Any]:
    """Settings that flags have set."""
    return {(block, name): value for block, name, value, origin in resolved.table() if origin.startswith(COMMAND_LINE)}


Unconfirmed = Callable[[Path, Mapping[str, str]], str | None]
"""What has to be confirmed before the run in a folder is carried out, with a trial's settings; None: nothing."""


def _nothing(folder: Path, settings: Mapping[str, str]) -> None:
    """Settings were given just now."""


class _Search:
    """One command's work: which runs there are, what they reached, what people are told."""

    def __init__(self, book: Book, resolved: Resolved, space: Space, parallel: int | None) -> None:
        self.book, self.asked, self.space, self.resolved = book, book.asked, space, resolved
        run = resolved.run
        self.goal = Goal(self.asked.by or run.best_by, run.stop_at if self.asked.by in (None, run.best_by) else None)
        small = resolved.task in ("bandit", "control")  # others fill the machine by themselves
        self.parallel = parallel or (processors() if small else 1)
        self.load = [TASKS[resolved.task].module]
        self.fixed = grid(space) if self.asked.over and self.asked.trials is None else None
        self.total = len(self.fixed) if self.fixed is not None else self.asked.trials or 1
        self.study = Study(space, self.asked.seeds[0]) if self.asked.trials is not None else None
        self.settings: dict[int, dict[str, str]] = {}
        self.found: dict[int, dict[int, Reached]] = {}
        self.places: dict[Path, tuple[int, int]] = {}
        self.began, self.made = time.perf_counter(), 0
        self.trust = False
        self.unconfirmed: Unconfirmed = _nothing

    def run(self) -> int:
        """Carry out what is left; the exit code."""
        what = f"{self.total} trials of {len(self.asked.seeds)}" if self.asked.over else str(len(self.asked.seeds))
        many = "runs" if len(self.asked.seeds) > 1 or not self.asked.over else "run"
        print(
            f"{what} {many}, {self.parallel} at a time, in {self.book.root}; decided by {self.goal.metric}", flush=True
        )
        with StopSignals() as asked:
            for job, code in self._carried_out(asked):
                number, seed = self.places[job.folder]
                self.made += 1
                failed = code not in EXIT_CODES.values() and asked.reason is None
                self._take(number, seed, results.reached(job.folder, self.goal, failed))
        self._leave()
        if asked.reason is not None:
            trust = " --trust" if self.trust else ""
            print(f"stopped; go on with: grpo {self.asked.command} --resume {self.book.root}{trust}")
            return EXIT_CODES[asked.reason]
        ended = [one for trial in self.found.values() for one in trial.values()]
        lost = [one for one in ended if not one.over]
        return FAILED if len(lost) == len(ended) or (lost and not self.asked.over) else OK

    def _carried_out(self, asked: StopSignals) -> Iterator[tuple[Job, int]]:
        """In processes; or all seeds in this one, where a program takes them together."""
        jobs = self._jobs()
        first = next(jobs, None)  # by now what it runs is confirmed
        left = jobs if first is None else chain([first], jobs)
        together = None if first is None or self.asked.over else self._together()
        if together is None:
            return carried_out(left, self.parallel, asked, self.load)
        return together.carried_out(((job, self.places[job.folder][1]) for job in left), self.parallel, asked)

    def _together(self) -> Together | None:
        """Runs that are compiled, whose learning rate stays, and of which no tracker is told, need no processes."""
        config = self.resolved.config
        if self.resolved.task != "control" or self.resolved.run.trackers or config.lr_schedule != "constant":
            return None
        from grpo.control.trainer import is_asked

        if not is_asked(config := cast("ControlConfig", config), config.env):
            return None
        trainer: Any = TASKS["control"].trainer(self.resolved.config)
        if trainer.compiled is None:
            trainer.source.close()
            return None
        from grpo.app.many.together import Together

        return Together.of(self.resolved, trainer)

    def _jobs(self) -> Iterator[Job]:
        """Every run that is not over, trial by trial, whose settings are chosen when there is a place for it."""
        known = self.book.trials()
        for number in range(self.total):
            if number not in known and self.asked.over:
                chosen = self.fixed[number] if self.fixed is not None else self.study.ask(number) if self.study else {}
                self.book.note(number, chosen)
                known[number] = chosen
            self.settings[number] = known.get(number, {})
            for seed in self.asked.seeds:
                before = results.reached(self.book.folder(number, seed), self.goal)
                if before.over:
                    self._take(number, seed, before)
                    continue
                place = self.book.folder(number, seed)
                if not self.trust and (said := self.unconfirmed(place, self.settings[number])) is not None:
                    raise ConfigError(said)
                job = self.book.job(number, seed, self.settings[number], self.trust)
                self.places[job.folder] = number, seed
                yield job

    def _take(self, number: int, seed: int, reached: Reached) -> None:
        """A run is over, or as far as it came; when it was the trial's last, the search hears of it."""
        self.found.setdefault(number, {})[seed] = reached
        if reached.reason == "unfinished" or reached.reason in ("interrupted", "preempted"):
            return
        whole = set(self.found[number]) == set(self.asked.seeds)
        if whole and self.study is not None:
            self.study.tell(number, self.settings[number], self.score(number))
        self._tell(number, seed, reached)

    def score(self, number: int) -> float | None:
        """Of a trial: the mean of its runs, if all of them reached something."""
        scores = [None if not one.over else self.goal.score(one) for one in self.found[number].values()]
        known = [score for score in scores if score is not None]
        return statistics.fmean(known) if len(known) == len(self.asked.seeds) else None

    def best(self) -> int | None:
        """The trial with the highest score."""
        scores = {number: score for number in self.found if (score := self.score(number)) is not None}
        return max(scores, key=lambda number: scores[number], default=None)

    def _tell(self, number: int, seed: int, one: Reached) -> None:
        done, whole = sum(map(len, self.found.values())), self.total * len(self.asked.seeds)
        what = f"trial {number}: {told(self.settings[number])}, seed {seed}" if self.asked.over else f"seed {seed}"
        if one.over:
            value = "was not measured" if one.value is None else f"{one.value:.4g} at step {one.step}"
            how = f"{self.goal.name} {value}, {results.duration(one.seconds)}"
        else:
            how = f"{one.reason}: {one.why}" if one.why else f"{one.reason}; see {one.folder}.log"
        left = ""
        if self.made and done < whole:
            left = f"; about {results.duration((time.perf_counter() - self.began) / self.made * (whole - done))} left"
        print(f"[{done}/{whole}] {what}: {how}{left}", flush=True)

    def _leave(self) -> None:
        """The table, the picture and what to do next."""
        if not self.found:
            return
        root, over = self.book.root, self.asked.over
        runs = [
            (number, seed, one) for number, trial in sorted(self.found.items()) for seed, one in sorted(trial.items())
        ]
        header = ["trial", *self.space, "seed", self.goal.name, "step", "seconds", "reason", "folder"]
        rows = [
            [number, *self.settings[number].values(), seed, one.value, one.step, round(one.seconds, 3), one.reason,
             one.folder.relative_to(root)]
            for number, seed, one in runs
        ]  # fmt: skip
        results.write_csv(root / "table.csv", header, rows)
        print(f"\n{self._trials_text() if over else self._seeds_text()}\n")
        if over:
            scores = [(self.settings[number], self.score(number)) for number in self.found]
            drawn = draw_settings(root / "sweep.png", self.space, scores, self.goal.name, self.goal.sign)
        else:
            names = [self.goal.name, "reward", "return", "entropy"]
            drawn = draw_curves(root / "curve.png", {f"seed {seed}": one.folder for _, seed, one in runs}, names)
        left = [root / "table.csv", *([root / ("sweep.png" if over else "curve.png")] if drawn else [])]
        print(f"wrote {' and '.join(map(str, left))}; look at the runs with: grpo view {root}")
        scored = {one.folder: score for _, _, one in runs if (score := self.goal.score(one)) is not None}
        if not over and len(scored) > 1:
            print(f"the best of them: grpo eval {max(scored, key=lambda folder: scored[folder])}")
        if over and (best := self.best()) is not None:
            flags = [f"--{key}={word}" for key, word in (*self.asked.flags, *self.settings[best].items())]
            print(f"the best again: grpo train {' '.join([*self.asked.names, *flags])}")

    def _seeds_text(self) -> str:
        rows = []
        for seed, one in sorted(self.found[0].items()):
            value = "—" if one.value is None else f"{one.value:.4g}"
            rows.append([str(seed), value, str(one.step), results.duration(one.seconds), one.reason])
        values = [one.value for one in self.found[0].values() if one.over and one.value is not None]
        table = results.aligned(["seed", self.goal.name, "at step", "took", ""], rows)
        return f"{table}\n\n{self.goal.name}: {results.in_words(values)}"

    def _trials_text(self) -> str:
        def order(number: int) -> float:
            score = self.score(number)
            return float("inf") if score is None else -score

        rows = []
        for number in sorted(self.found, key=order)[:MOST_LINES]:
            ended = [one for one in self.found[number].values() if one.over and one.value is not None]
            values = [one.value for one in ended if one.value is not None]
            mean = f"{statistics.fmean(values):.4g}" if values else "—"
            spread = f"± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
            step = f"{statistics.fmean([one.step for one in ended]):.0f}" if ended else "—"
            lost = len(self.found[number]) - len(ended)
            remark = f"{lost} of {len(self.found[number])} not over" if lost else ""
            rows.append([str(number), *self.settings[number].values(), f"{mean} {spread}".strip(), step, remark])
        table = results.aligned(["trial", *self.space, self.goal.name, "at step", ""], rows)
        more = len(self.found) - len(rows)
        return table + (f"\n… and {more} more in table.csv" if more else "")
