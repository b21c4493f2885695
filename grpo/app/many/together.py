"""Runs from many seeds in this process, by one compiled program (`grpo.control.compiled.seeds`), each with its folder.

    jobs ─► blocks of seeds, one a processor at a time ─► legs ─► metrics, timing, checkpoints that were due ─► status

A folder is that of any run, but for what is only looked at: no curve, video or samples of its own. Of the checkpoints
that a leg makes due, those are written that would still be there after it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from grpo.app.builders import document_of
from grpo.app.many.crew import PERIOD, Job
from grpo.app.settings import Resolved
from grpo.control.compiled import seeds
from grpo.control.compiled.record import BROKEN
from grpo.control.compiled.room import (
    evaluation_starts,
    read_adam,
    read_scale,
    seed_key,
    stacked,
    write_adam,
    write_scale,
)
from grpo.control.networks import make_network
from grpo.control.trainer import GRPOTrainer
from grpo.envs.functions.numbers import numbers
from grpo.errors import ConfigError, line
from grpo.report import MAX_NONFINITE
from grpo.run import checkpoint
from grpo.run.budget import WINDOW, FailureBudget
from grpo.run.files import FolderError
from grpo.run.folder import RunFolder
from grpo.run.lock import locked
from grpo.run.saving import MAX_UNSAVED, Saving, Waited
from grpo.run.signals import StopSignals
from grpo.run.stepping import EXIT_CODES

BLOCK = 8
"""Seeds of a block: on a CPU they follow each other, and a block is what a processor does at a time."""
Stacked = TypeVar("Stacked", seeds.Run, seeds.Leg)
FIRST, SECONDS = 8, 2.0
"""Steps of a block's first leg, and how long later ones take: somebody may want to stop."""


class Together:
    """The runs of one set of settings, from several seeds."""

    def __init__(self, resolved: Resolved, trainer: GRPOTrainer) -> None:
        assert trainer.compiled is not None
        self._resolved, self._trainer, self._program = resolved, trainer, trainer.compiled.program
        how, self.names = resolved.run, seeds.names(trainer.compiled.program)
        self.how = how
        self.until, self.samples = trainer.total_steps(how), trainer.config.episodes
        greedy = trainer.config.eval_greedy
        self._fresh, self._turn = trainer.state(), threading.Lock()
        self._plan = seeds.Plan(
            how.evaluate_every, how.best_by, how.stop_at, how.env_steps, greedy, how.checkpoint_every, how.keep_best
        )

    @staticmethod
    def of(resolved: Resolved, trainer: GRPOTrainer) -> Together | None:
        """None: runs are judged by something that the program does not reckon."""
        assert trainer.compiled is not None
        known = resolved.run.best_by.removeprefix("-") in seeds.names(trainer.compiled.program)
        return Together(resolved, trainer) if known else None

    def carried_out(
        self, jobs: Iterable[tuple[Job, int]], parallel: int, asked: StopSignals
    ) -> Iterator[tuple[Job, int]]:
        """Jobs and their exit codes as blocks end; once somebody wants to stop, each after its leg."""
        waiting = iter(jobs)
        self._load()
        with ThreadPoolExecutor(parallel) as pool:
            working: set[Future[list[tuple[Job, int]]]] = set()
            while True:
                while len(working) < parallel and asked.reason is None and (some := list(islice(waiting, BLOCK))):
                    working.add(pool.submit(self._block, some, asked))
                if not working:
                    return
                ended, working = wait(working, PERIOD, FIRST_COMPLETED)
                for one in ended:
                    yield from one.result()

    def _load(self) -> None:
        """Have the program compiled, or read from the disk, before several threads want it: runs that are over."""
        with numbers():
            over = seeds.begun(self.policy(0, None))._replace(over=np.bool_(True))
            run_S, state_SE = (stacked([one] * BLOCK) for one in (over, self.starts(0)))
            key_S = np.stack([seed_key(0)] * BLOCK)
            loaded = seeds.legs(self._program, self._plan, run_S, key_S, state_SE, self.until, 1)
            loaded[1].made.block_until_ready()

    def _block(self, jobs: Sequence[tuple[Job, int]], asked: StopSignals) -> list[tuple[Job, int]]:
        """Some runs from where they are to their end, or to where somebody wanted to stop."""
        with ExitStack() as held, numbers():
            runs = [run for job, seed in jobs if (run := self._opened(job, seed, held)) is not None]
            if not runs:
                return [(job, 1) for job, _ in jobs]
            padded = [*runs, *[runs[-1]] * (BLOCK - len(runs))]  # one program serves every block
            over = np.array([False] * len(runs) + [True] * (BLOCK - len(runs)))
            key_S = np.stack([seed_key(run.seed) for run in padded])
            starts = {run.seed: run.starts for run in runs}
            state_SE = stacked([starts[run.seed] for run in padded])
            run_S = stacked([run.begun for run in padded])
            run_S = run_S._replace(over=run_S.over | over)
            going, most, waited = True, FIRST, Waited(self.how.checkpoint_minutes, time.monotonic)
            while going and asked.reason is None:
                began = time.perf_counter()
                run_S, leg_S = jax.device_get(
                    seeds.legs(self._program, self._plan, run_S, key_S, state_SE, self.until, most)
                )
                took = time.perf_counter() - began
                most = min(max(int(most * SECONDS / took), 1), seeds.LEG)
                for i, run in enumerate(runs):
                    run.write(_of(leg_S, i), took / max(int(leg_S.made.sum()), 1))
                borne_S = np.array([run.bears_failures for run in padded])
                full_S = np.array([run.full is not None for run in padded])
                run_S = run_S._replace(failed=(run_S.failed & ~borne_S) | full_S)
                going = any(self.reason(_of(run_S, i), run) is None for i, run in enumerate(runs))
                if going and waited.too_long(0):
                    for i, run in enumerate(runs):
                        if self.reason(_of(run_S, i), run) is None:  # those that have ended are saved as such
                            run.save(_of(run_S, i).now, planned=False)
                    waited.restart()
            ended = {run.job: run.end(_of(run_S, i), asked.reason) for i, run in enumerate(runs)}
            return [(job, ended.get(job, 1)) for job, _ in jobs]

    def _opened(self, job: Job, seed: int, held: ExitStack) -> _Written | None:
        """A run's folder; None: it cannot be gone on with, and its log says why, while the others go on."""
        try:
            return _Written(self, job, seed, held)
        except (FolderError, ConfigError) as error:
            job.log.write_text(f"{line(error)}\n", encoding="utf-8")
            return None

    def reason(self, run: seeds.Run, written: _Written) -> str | None:
        """Why a run has ended; None: it has not."""
        if written.full is not None:
            return "unsaved"
        if bool(run.failed):
            return "failures"
        if int(run.lost) >= MAX_NONFINITE:
            return "diverged"
        if bool(run.over):
            return "stopped"
        return "done" if int(run.now.number) >= self.until else None

    def snapshot(self, policy: seeds.Policy, seed: int, score: float | None, planned: bool) -> checkpoint.Snapshot:
        """The trainer's own state with these weights, as a run of this seed would save it."""
        trainer, source = self._trainer, self._trainer.source
        assert trainer.optimizer is not None
        with self._turn:
            write_adam(policy.adam, self._program.policy.weights, source.policy, trainer.optimizer)
            write_scale(policy.scale, source.scaling)
            source.env_steps, source.episodes = int(policy.env_steps), int(policy.episodes)
            source.policy.version, trainer.steps_done = int(policy.version), int(policy.number)
            settings = self.config(seed).model_dump(mode="json")
            return checkpoint.snapshot(
                trainer.state(), trainer.steps_done, settings=settings, score=score, planned=planned
            )

    def policy(self, seed: int, found: checkpoint.Checkpoint | None) -> seeds.Policy:
        """A run's as a program takes it: fresh, or as a checkpoint left it."""
        trainer, source, config = self._trainer, self._trainer.source, self._trainer.config
        assert trainer.optimizer is not None
        if found is not None and not found.state.values["source"].get("compiled"):
            way = f"{found.path} is of a run that was played the ordinary way"
            raise ConfigError(f"{way}; go on with it alone: grpo train --resume {found.path.parent.parent}")
        with self._turn:
            if found is not None:
                checkpoint.restore(trainer, found)
            else:
                trainer.load_state(self._fresh)
                space, size = source.fleet.observation_space, source.policy.head.size
                made = make_network(space, size, config.hidden, config.activation, 0, seed)
                source.policy.network.load_state_dict(made.state_dict())
            counted = [np.int64(x) for x in (source.env_steps, source.episodes, source.policy.version)]
            adam, scale = read_adam(source.policy, trainer.optimizer), read_scale(source.scaling)
            return seeds.Policy(adam, scale, np.int32(trainer.steps_done), *counted)

    def folder(self, path: Path, seed: int) -> RunFolder:
        """A run's, made or opened."""
        if (path / "run.json").exists():
            return RunFolder.open(path)
        how = self._resolved.run.model_copy(update={"logdir": str(path), "name": self._resolved.name})
        own = replace(self._resolved, config=self.config(seed), run=how)
        created = datetime.now().astimezone().isoformat(timespec="seconds")
        return RunFolder.create(
            path, task="control", config=document_of(own, how) | {"seed": seed}, created=created, seed=seed
        )

    def config(self, seed: int) -> Any:
        """The settings of one run."""
        return self._trainer.config.model_copy(update={"seed": seed})

    def starts(self, seed: int) -> Any:
        """Where a run's evaluations begin."""
        return evaluation_starts(self._program.task, seed, self._trainer.config.eval_episodes)

    def told(self) -> dict[str, Any]:
        """What status.json says besides how a run ended."""
        return {"steps": self.until, "recipe": self._trainer.recipe.told()}


class _Written:
    """One run's folder while it is carried out."""

    def __init__(self, room: Together, job: Job, seed: int, held: ExitStack) -> None:
        self._room, self.job, self.seed, self._folder = room, job, seed, room.folder(job.folder, seed)
        self._why = ""
        self._last_score: float | None = None
        held.enter_context(locked(self._folder.path))
        held.callback(self._folder.close)
        how, before = room.how, (job.folder / "metrics.jsonl").exists()
        self._saving = Saving(self._folder, how.keep_last, how.keep_best)
        held.callback(self._saving.finish, cut=False)
        found = checkpoint.resume_point(self._folder)
        policy = room.policy(seed, found)
        self._step = int(policy.number)
        if before:
            checkpoint.sweep(self._folder, after=self._step)
            self._folder.event(self._step, "resumed", f"from {found.path.name if found else 'the start'}")
        self._folder.truncate_after(self._step)
        self._saving.step = self._step or None
        self._scores = checkpoint.scores(self._folder)
        """Of planned checkpoints by their steps, and of steps of a leg."""
        self._budget = FailureBudget(how.failure_budget)
        self._budget.replay(deque(self._folder.each_step(), maxlen=WINDOW))
        self._unrecorded = 0
        self.begun, self.starts = seeds.begun(policy), room.starts(seed)
        self._folder.write_status(room.told() | {"reason": None})

    def write(self, leg: seeds.Leg, seconds: float) -> None:
        """The lines of some steps, and those of their checkpoints that will stay."""
        due = [jax.tree.map(lambda x_K, k=k: x_K[k], leg.saved_K) for k in range(int(leg.saves))]
        measured: dict[int, float | None] = {}
        for row_V in leg.row_LV[: int(leg.made)]:
            row = dict(zip(self._room.names, row_V.tolist(), strict=True))
            step = self._step = self._step + 1
            self._record(step, _told(row), seconds)
            measured[step] = self._score(row)
            self._budget.add(row["failed"], self._room.samples)
            if row["failed"]:
                self._why = f"{row['failed']:.0f} of {self._room.samples} samples failed: {BROKEN}"
                self._folder.event(step, "samples_failed", self._why)
        self._last_score = measured.get(self._step)
        self._scores |= {int(policy.number): measured[int(policy.number)] for policy in due}
        self._scores = checkpoint.retained(self._scores, self._room.how.keep_last, self._room.how.keep_best)
        for policy in due:
            if int(policy.number) in self._scores:
                self.save(policy)

    def _record(self, step: int, told: Mapping[str, float], seconds: float) -> None:
        """A step's lines; a disk that takes no more is borne for as long as by a run alone."""
        try:
            self._folder.append_metrics(step, {"samples": self._room.samples, **told})
            self._folder.append_timing(step, {"compiled": seconds}, seconds)
            self._unrecorded = 0
        except OSError as error:
            self._unrecorded += 1
            self._folder.alarm(step, "metrics_failed", f"step {step} was not recorded: {error}")

    def _score(self, row: Mapping[str, float]) -> float | None:
        """What a checkpoint of this step is judged by, turned so that higher is better."""
        by = self._room.how.best_by
        value = row[by.removeprefix("-")]
        if not self._room.how.keep_best or not np.isfinite(value):
            return None
        return -value if by.startswith("-") else value

    @property
    def full(self) -> str | None:
        """Why it ends although nothing else ends it: what it leaves cannot be written."""
        if self._unrecorded >= MAX_UNSAVED:
            return f"{MAX_UNSAVED} steps in a row were not recorded; make room, then resume"
        return self._saving.why if self._saving.given_up else None

    @property
    def bears_failures(self) -> bool:
        """Whether it goes on although episodes failed: not on its first step, and not with too many."""
        return self._step > 1 and not self._budget.spent()

    def save(self, policy: seeds.Policy, planned: bool = True, last: bool = False) -> None:
        """A checkpoint, where there is none of this step."""
        self._saving.settle()
        step = int(policy.number)
        if step == 0 or step == self._saving.step:
            return
        score = self._scores.get(step, self._last_score if step == self._step else None) if planned else None
        self._saving.save(self._room.snapshot(policy, self.seed, score, planned), last)

    def end(self, run: seeds.Run, asked: str | None) -> int:
        """Its last checkpoint and how it ended; the exit code. The log says what went wrong, as a process would."""
        reason = self._room.reason(run, self) or asked or "done"
        self._saving.settle()
        if not (reason == "failures" and self._step == 1):  # nothing was learned yet, and nothing is to go on from
            self.save(run.now, last=True)
        reason = "unsaved" if self.full is not None else reason
        self._folder.write_status(self._room.told() | {"reason": reason})
        code = EXIT_CODES.get(reason, 1)
        if code == 1:
            lost = f"{MAX_NONFINITE} steps in a row had no finite update; lower the learning rate"
            why = f"step {self._step}: {self.full or (self._why if reason == 'failures' else lost)}"
            self.job.log.write_text(f"{why}\n", encoding="utf-8")
        return code


def _told(row: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics, those of an evaluation where there was one and as far as it knows them."""
    told = {name: value for name, value in row.items() if not name.startswith("eval/")}
    if np.isnan(row["eval/failed"]):
        return told
    judged = {name: row[name] for name in seeds.JUDGED if not np.isnan(row[name]) or name == "eval/return"}
    return told | {name: value for name, value in judged.items() if value or name != "eval/failed"}


def _of(all_S: Stacked, i: int) -> Stacked:
    """One of several runs, or of their legs."""
    one: Stacked = jax.tree.map(lambda x: x[i], all_S)
    return one
