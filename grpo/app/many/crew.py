"""Carries out runs in processes of their own, some at a time; each ends by itself, saves where it is asked to stop.

    jobs ─► a free place? ─► process: `grpo train …` with its output in a file ─► how it ended

A process is forked from one that has loaded the task's libraries already, where the system can: a run of a second is
not worth three of imports.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from grpo.processors import processors
from grpo.run.signals import StopSignals

PERIOD = 0.2
"""Seconds between looks at whether somebody wants to stop."""


@dataclass(frozen=True)
class Job:
    """One run: its folder and the command that makes or resumes it."""

    folder: Path
    words: tuple[str, ...]

    @property
    def log(self) -> Path:
        """What the command printed."""
        return self.folder.with_name(f"{self.folder.name}.log")


def carried_out(
    jobs: Iterable[Job], parallel: int, asked: StopSignals, load: Sequence[str] = ()
) -> Iterator[tuple[Job, int]]:
    """Jobs and their exit codes in the order in which they end; the next is asked for when there is a place for it.

    load: modules that every process needs. Once somebody wants to stop, those at work are told to, and none is begun.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    start: Any = multiprocessing.get_context(method)
    start.set_forkserver_preload(["grpo.cli", "grpo.app.builders", *load])
    waiting, working, told = iter(jobs), dict[BaseProcess, Job](), False
    threads = str(max(1, processors() // parallel))
    try:
        while True:
            while len(working) < parallel and asked.reason is None and (job := next(waiting, None)) is not None:
                job.folder.parent.mkdir(parents=True, exist_ok=True)
                process = start.Process(target=_carry_out, args=(job.words, str(job.log), threads))
                process.start()
                working[process] = job
            if asked.reason is not None and not told:
                told = True
                _signal(working, signal.SIGINT if asked.reason == "interrupted" else signal.SIGTERM)
            if not working:
                return
            connection.wait([process.sentinel for process in working], PERIOD)
            for process in [process for process in working if not process.is_alive()]:
                job = working.pop(process)
                process.join()
                yield job, process.exitcode or 0
    finally:  # somebody left at once
        _signal(working, signal.SIGKILL)


def last_words(log: Path) -> str:
    """The last line that a command printed, for people."""
    with suppress(OSError):
        lines = [line.strip() for line in log.read_text("utf-8", "replace")[-20_000:].splitlines() if line.strip()]
        return lines[-1].removeprefix("grpo: ") if lines else ""
    return ""


def _signal(working: Iterable[BaseProcess], number: int) -> None:
    for process in working:
        if process.pid is not None and process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _carry_out(words: Sequence[str], log: str, threads: str) -> None:
    """In the process: the command, with its output in a file and no terminal whose Ctrl-C could reach it twice."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    torch = sys.modules.get("torch")
    if torch is not None and os.environ["OMP_NUM_THREADS"].isdecimal():  # loaded before, with all of the machine's
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.argv = ["grpo", *words]
    print(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}", flush=True)
    runpy.run_module("grpo", run_name="__main__", alter_sys=True)
