"""World-model updates and imagined steps a second: ours beside public Dreamers, in one run on the same shapes.

    python bench/worldmodel_speed.py --jax-python VENV/bin/python --jax-path CHECKOUT/dreamerv3 \\
        --torch-python VENV/bin/python --torch-path CHECKOUT/dreamerv3-torch \\
        --r2-python VENV/bin/python --r2-path CHECKOUT/r2dreamer
    python bench/worldmodel_speed.py --device cuda --cells 12m:vector,12m:image --out FILE …
    python bench/worldmodel_speed.py --only ours,r2,r2_free --out FILE …
    python bench/worldmodel_speed.py --table --out FILE

Peers: danijar/dreamerv3 in JAX (e3f0224), NM512/dreamerv3-torch (6ef8646) and NM512/r2dreamer (546e4fa), each in an
interpreter of its own and from a checkout of your own. Every implementation is a process that waits for its turn. A
round gives each of them one turn of about `--turn` seconds, in changing order; the first calls, which compile, are not
timed. A ratio is taken within a round.

An update is forward, backward and optimizer step of the world model alone (16 sequences × 64 steps), with the metrics
that its trainer reports: actor and critic updates, replay and environments are left out everywhere. Imagination is 1024
futures × 15 steps without gradients: actor, prior and draws, then rewards, continuations and log-probs for all steps.

What differs. The JAX peer is the same network to the last weight; it is compiled as a whole and computes in float32 on
a CPU, on a GPU in its own bfloat16 where ours has TF32, under a newer jax than it pins. The PyTorch peer is DreamerV3's
first version. Its memory is dense where ours is in blocks, about twice the weights in all; it is measured once more
with a narrower memory and as many weights. Its convolutions are 4×4 and strided where ours are 5×5 at full resolution
before pooling: a tenth of the multiplications. Its optimizer is Adam after clipping one norm, and it makes the prior
inside the loop. It runs as shipped, which is not compiled (its `torch.compile` wraps modules whose `forward` is never
called) and on a GPU means matrix products in float32, torch's default.

r2dreamer is the same author's DreamerV3 made anew for speed: with its decoder the same network to the last weight, on a
GPU in float16 with a scaled loss, torch.compile and CUDA graphs. It is measured without a decoder too, which is
R2-Dreamer: a product of the latents is to be correlated with the encoder's numbers, number by number and not across.
Its trainer makes the losses of world model, actor and critic in one pass; here is the first part, with its modules,
optimizer and clipping. Its batches lie on the device, as in its replay, where those of the others come from host
memory. Its divergences are of latents without the hundredth that is drawn evenly, and its optimizer goes from one array
of weights to the next. On a CPU it computes in float32 and is not compiled, which would take minutes.

No peer checks that an update is finite, but for r2dreamer where it scales its loss. Ours paints on the small picture
instead of enlarging it first (the same numbers), keeps freed memory as its trainer does
(`grpo.worldmodel.model.memory`), and its recurrence takes one of the threads; without pictures, so does all of an
update of a small model. It draws the random numbers of an update on the CPU.

Threads wait without spinning (OMP_WAIT_POLICY=PASSIVE): where others use the cores too, spinning makes two threads many
times slower than one. CPU seconds stand beside those of the clock for the same reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo.worldmodel.model.rssm import SIZES

RESULT = Path(__file__).parent / "results" / "worldmodel_speed.json"
PEERS = Path(__file__).parent / "peers"
OURS = "ours"
VARIANTS = {"cpu": ["compiled"], "cuda": ["uncompiled", "plain", "bfloat16"]}
"""Of ours: settings that are not the default there."""
CALLED = {
    OURS: "ours",
    "ours_compiled": "ours, torch_compile on",
    "ours_uncompiled": "ours, torch_compile off",
    "ours_plain": "ours, and cuda_graphs off",
    "ours_bfloat16": "ours, precision=bfloat16",
    "jax": "DreamerV3 (JAX)",
    "torch": "dreamerv3-torch",
    "torch_even": "dreamerv3-torch, as many weights",
    "r2": "r2dreamer, with a decoder",
    "r2_free": "r2dreamer, decoder-free",
}
PAIRS = {"ours_bfloat16": ["jax", "r2", "r2_free"]}
"""Settings of ours that a peer is compared with beside the default: what computes alike, in 16 bits."""
PEER_VARIANTS = {"torch": {"torch_even": "even"}, "r2": {"r2_free": "free"}}
"""Of a peer: its process is told the word."""
SHAPES = {"batch": 16, "length": 64, "starts": 1024, "horizon": 15, "actions": 2}
UNITS = {"update": 1, "imagine": SHAPES["starts"] * SHAPES["horizon"]}
"""What one call counts for: updates, imagined steps."""
FIRST = 5
"""Calls that are not counted: in them some compile, and ours records its graphs."""
WHAT = {"update": "updates", "imagine": "imagined steps"}


class Failed(RuntimeError):
    """A worker could not do what it was asked for."""


class Worker:
    """One implementation in its own process."""

    def __init__(self, name: str, command: Sequence[str], threads: int) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  it lives as long as the process
        limits = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        paths = [str(PEERS.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(paths)} if name.startswith(OURS) else {}
        own["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # others need room on the same GPU
        self._process = subprocess.Popen(
            [*command],
            env={**os.environ, **limits, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
        )

    def ask(self, **order: Any) -> dict[str, Any]:
        """Its answer to an order."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(order), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._log.seek(0)
            last = self._log.read().strip().splitlines()[-1:] or ["it said nothing"]
            raise Failed(f"{self.name} has ended: {last[0]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """No more orders: it ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass(frozen=True)
class Spread:
    """The middle value, and the quartiles around it."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least two values."""
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def __str__(self) -> str:
        return f"{_short(self.middle)} ({_short(self.low)} – {_short(self.high)})"


def _short(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}" if x >= 10 else f"{x:.2f}"


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(
    workers: Sequence[Worker], cell: str, what: Sequence[str], rounds: int, turn: float, device: str
) -> Iterator[dict[str, Any]]:
    """One model, SIZE:OBSERVATION: each operation in turns."""
    size, observation = cell.split(":")
    about = {"size": size, "observation": observation}
    built: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for worker in workers:
        if worker.name == "torch_even" and observation == "image":
            continue  # most of its weights paint: as many as ours would leave it hardly any memory
        try:
            weights = built[OURS]["weights"] if OURS in built else None
            asked = {**about, "widths": asdict(SIZES[size]), "weights": weights, "device": device, **SHAPES}
            built[worker.name] = worker.ask(cell=asked)
        except Failed as error:
            errors[worker.name] = str(error)
    for operation in what:
        turns = in_turns([worker for worker in workers if worker.name in built], operation, rounds, turn, errors)
        yield {
            **about,
            "operation": operation,
            "turns": turns,
            "weights": {name: found["weights"] for name, found in built.items()},
            "versions": {name: found["versions"] for name, found in built.items()},
            "errors": dict(errors),
        }


def in_turns(
    workers: Sequence[Worker], operation: str, rounds: int, turn: float, errors: dict[str, str]
) -> dict[str, list[dict[str, float]]]:
    """Everybody once in every round, after calls that are not counted; who begins moves on by one each round."""
    able, calls = [], {}
    for worker in workers:
        try:
            worker.ask(operation=operation, calls=FIRST)
            tried = worker.ask(operation=operation, calls=1)
        except Failed as error:
            errors[worker.name] = str(error)
            continue
        able.append(worker)
        calls[worker.name] = max(1, round(turn / tried["wall_s"]))
    turns: dict[str, list[dict[str, float]]] = {worker.name: [] for worker in able}
    for number in range(rounds):
        first = number % len(able)
        for worker in (*able[first:], *able[:first]):
            turns[worker.name].append(worker.ask(operation=operation, calls=calls[worker.name]))
    return turns


# --- reading ---------------------------------------------------------------------------------------------------------


def rates(turns: Sequence[Mapping[str, float]], operation: str, clock: str) -> list[float]:
    """Updates or imagined steps a second, for each turn; `clock` is wall_s or cpu_s."""
    return [UNITS[operation] * turn["calls"] / turn[clock] for turn in turns]


def ratios(cell: Mapping[str, Any], peer: str, clock: str, ours: str = OURS) -> list[float]:
    """Ours to a peer's, round by round."""
    own, other = (rates(cell["turns"][name], cell["operation"], clock) for name in (ours, peer))
    return [a / b for a, b in zip(own, other, strict=True)]


def table(found: Mapping[str, Any]) -> str:
    """The file as markdown: medians with quartiles, and how many times as much ours does."""
    lines = [
        "| model, a second | ours | peer | | ours ÷ peer, by the clock | by CPU seconds |",
        "|---|--:|---|--:|--:|--:|",
    ]
    for cell in found["cells"]:
        seen = "" if cell["operation"] == "imagine" else f", {cell['observation']}"
        name = f"{cell['size']}{seen}: {WHAT[cell['operation']]}"
        pairs = [(OURS, peer) for peer in cell["turns"] if peer != OURS]
        pairs += [(how, peer) for how, peers in PAIRS.items() for peer in peers if {how, peer} <= cell["turns"].keys()]
        for ours, peer in pairs:
            own, other = (Spread.of(rates(cell["turns"][who], cell["operation"], "wall_s")) for who in (ours, peer))
            by = [Spread.of(ratios(cell, peer, clock, ours)) for clock in ("wall_s", "cpu_s")]
            which = CALLED[ours].removeprefix(CALLED[OURS])
            lines.append(f"| {name}{which} | {own} | {CALLED[peer]} | {other} | {by[0]} | {by[1]} |")
        for peer, error in cell["errors"].items():
            lines.append(f"| {name} | | {CALLED[peer]} | {error} | | |")
    return "\n".join(lines)


def chosen(commands: Mapping[str, Sequence[str]], names: Sequence[str]) -> dict[str, Sequence[str]]:
    """Those of these names, in the order of the commands."""
    for name in names:
        if name not in CALLED:
            raise ValueError(f"{name!r} is none of {', '.join(CALLED)}")
        if name not in commands:
            raise ValueError(f"{name} cannot run on this --device or without the interpreter and checkout of its peer")
    if OURS not in names:
        raise ValueError(f"{OURS} has to be among them: every ratio is to it")
    return {name: command for name, command in commands.items() if name in names}


def main() -> None:
    """Measure, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jax-python", help="interpreter with jax and what danijar/dreamerv3 needs")
    parser.add_argument("--jax-path", help="checkout of danijar/dreamerv3")
    parser.add_argument("--torch-python", help="interpreter with torch, tensorboard and ruamel.yaml")
    parser.add_argument("--torch-path", help="checkout of NM512/dreamerv3-torch")
    parser.add_argument("--r2-python", help="interpreter with torch and PyYAML")
    parser.add_argument("--r2-path", help="checkout of NM512/r2dreamer")
    parser.add_argument("--only", metavar="NAME,NAME", help=f"run these alone, ours among them: {', '.join(CALLED)}")
    parser.add_argument("--cells", default="1m:vector,1m:image", help="SIZE:vector or SIZE:image, commas between")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn", type=float, default=1.0, help="seconds of one turn")
    parser.add_argument("--threads", type=int, default=2, help="of every implementation")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", action="store_true", help="print the table of --out and measure nothing")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.out.read_text(encoding="utf-8"))))
        return
    for cell in args.cells.split(","):
        if not re.fullmatch(rf"({'|'.join(map(re.escape, SIZES))}):(vector|image)", cell):
            parser.error(f"--cells: {cell!r} is not SIZE:vector or SIZE:image with a size of {', '.join(SIZES)}")
    if args.device == "cpu" and hasattr(os, "sched_setaffinity"):  # XLA has as many threads as it sees cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    commands: dict[str, Sequence[str]] = {OURS: [sys.executable, str(PEERS / "dreamer_ours.py")]}
    for how in VARIANTS[args.device]:
        commands[f"ours_{how}"] = [*commands[OURS], how]
    for name in ("jax", "torch", "r2"):
        python, path = getattr(args, f"{name}_python"), getattr(args, f"{name}_path")
        if bool(python) != bool(path):
            parser.error(f"--{name}-python and --{name}-path go together; give both or neither")
        if missing := [x for x in (python, path) if x and not Path(x).exists()]:
            parser.error(f"--{name}-python, --{name}-path: {missing[0]} does not exist")
        if python and path:
            commands[name] = [python, str(PEERS / f"dreamer_{name}.py"), path]
            for variant, word in PEER_VARIANTS.get(name, {}).items():
                commands[variant] = [*commands[name], word]
    if args.only:
        try:
            commands = chosen(commands, args.only.split(","))
        except ValueError as error:
            parser.error(f"--only: {error}")
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    cells: list[dict[str, Any]] = []
    workers = [Worker(name, command, args.threads) for name, command in commands.items()]
    settings = {"rounds": args.rounds, "turn_s": args.turn, "threads": args.threads, "device": args.device, **SHAPES}
    machine = {"cpu": platform.machine(), "cores": os.cpu_count(), "load_before": load}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        for asked in args.cells.split(","):
            dreamt = {cell["size"] for cell in cells}
            what = (
                ["update"] if asked.split(":")[0] in dreamt else ["update", "imagine"]
            )  # no observation matters to it
            for found in measure(workers, asked, what, args.rounds, args.turn, args.device):
                cells.append({**found, "load_after": os.getloadavg() if load else None})
                whole = {"settings": settings, "machine": machine, "cells": cells}
                args.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")  # what is measured stays
                print(table({"cells": [found]}), flush=True)
    finally:
        for worker in workers:
            worker.close()


if __name__ == "__main__":
    main()
