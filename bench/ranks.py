"""A step on several ranks: what the cost model says, beside what is measured where there are GPUs to measure it on.

    python bench/ranks.py                                         # the model alone: a step on 1, 2, 8, 64 GPUs
    python bench/ranks.py --ranks 8                               # 1 and 8 GPUs of this machine, measured, beside it
    python bench/ranks.py --ranks 2 --shared-gpu --shape qwen06   # two that share one GPU: all but the speed
    python bench/ranks.py --ranks 2 --tiny                        # on a CPU, to see that it runs

Three runs in processes of their own: one rank, N ranks, and N ranks with `--shard gradients`. Each makes the same steps
(random weights, the same prompts and seeds). Told are: whether gradients are the same, seconds of a step, memory a
rank, and what of a step goes into what ranks tell each other: `waiting` is for the slowest of them, `moving` is all the
rest, packing and unpacking of records too. Everything goes to bench/results/ranks.json.

Gradients are looked at in AdamW's first moments after one small step in float32: from nothing they become 0.1 times the
gradient, and a checkpoint has all of them, whoever owns them.

step(G) = T·(a + b·rows/G) + c·tokens/G + sum(G) + gather(G) + d      a, b, c, d: one H200, 1.7 billion weights
    decode: T tokens one after the other, each for rows/G rows · update: tokens/G · sum: 4 bytes a weight, a ring
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCH), str(BENCH / "peers")]

DECODE, DECODE_ROW, TOKEN, REST = 1.16e-3, 10.8e-6, 22.3e-6, 30e-3
"""Seconds: a step of decoding, a row more of it, a token of the update, everything else of a step. Measured on one H200
with the shape of Qwen3-1.7B in bfloat16."""
WEIGHTS = 1.72e9
INSIDE, BETWEEN, RECORDS = 350e9, 300e9, 1e9
"""Bytes a second: sums inside a node of 8 and between nodes (assumed), records over gloo (assumed)."""
RECORD = 20
"""Bytes of a token that every rank gets."""
PROMPT = 16
COLLECTING, COMPARING = "collecting", "comparing the step"
GATHERS, SUMS = (COLLECTING, COMPARING), ("the gradients", "a gradient")
"""What ranks exchange is named by what it is for. With `--shard gradients` each gradient is summed by itself."""
KINDS = ("moving", "waiting")


def predicted(gpus: int, prompts: int, group: int, tokens: int, prompt: int = PROMPT) -> dict[str, float]:
    """Seconds of a step and of its parts."""
    rows = prompts * group
    every = rows * (tokens + prompt)
    ring = 0.0 if gpus == 1 else 2 * (gpus - 1) / gpus * 4 * WEIGHTS / (INSIDE if gpus <= 8 else BETWEEN)
    parts = {
        "decode": tokens * (DECODE + DECODE_ROW * rows / gpus),
        "update": TOKEN * every / gpus,
        "sum": ring,
        "gather": 0.0 if gpus == 1 else RECORD * every / RECORDS,
        "rest": REST,
    }
    return {"step": sum(parts.values()), **parts}


def table() -> str:
    """The model for two sizes of a step."""
    lines = [
        "computed, not measured; H200, 1.7 billion weights",
        "step            GPUs  seconds  of linear  decode  update    sum  gather",
    ]
    for prompts, group, tokens in ((128, 8, 256), (512, 16, 1024)):
        alone = predicted(1, prompts, group, tokens)["step"]
        for gpus in (1, 2, 8, 64):
            found = predicted(gpus, prompts, group, tokens)
            parts = "".join(f"{found[name]:8.2f}" for name in ("decode", "update", "sum", "gather"))
            linear = alone / gpus / found["step"]
            name = f"{prompts}x{group}x{tokens}"
            lines.append(f"{name:14}  {gpus:4}  {found['step']:7.2f}  {linear:9.2f}{parts}")
    return "\n".join(lines)


BILLIONS = {"0.6B": 0.596, "1.7B": 1.72, "7B": 7.616, "14B": 14.77, "32B": 32.76}
"""Weights of Qwen3-0.6B and -1.7B, Qwen2.5-7B, -14B and -32B."""


def gigabytes(billions: float, gpus: int, shard: str) -> float:
    """Of a GPU: bfloat16 weights and gradients, AdamW's two float32 moments. No activations, no cache."""
    each = {
        "none": 2 + 2 + 8,
        "states": 2 + 2 + 8 / gpus,
        "gradients": 2 + (2 + 8) / gpus,
        "weights": (2 + 2 + 8) / gpus,
    }
    return billions * each[shard]


def memory() -> str:
    """Gigabytes of a GPU by size, number of GPUs and what is divided."""
    lines = [
        "computed: GB of weights, gradients and states on each GPU, --weights bfloat16",
        "model   GPUs    none  states  gradients  weights",
    ]
    for name, billions in BILLIONS.items():
        for gpus in (1, 2, 8, 64):
            found = {kind: gigabytes(billions, gpus, kind) for kind in ("none", "states", "gradients", "weights")}
            lines.append(
                f"{name:6}  {gpus:4}  {found['none']:6.1f}  {found['states']:6.1f}  {found['gradients']:9.1f}  "
                f"{found['weights']:7.1f}"
            )
    return "\n".join(lines)


# --- one rank of a measurement ----------------------------------------------------------------------------------------


def make_trainer(asked: argparse.Namespace, kind: str, small: bool) -> Any:
    """Random weights of a shape; small: a step in float32 whose gradients can be compared."""
    import models
    import torch
    from shapes import SHAPES, TINY

    from grpo.language import GRPOConfig, GRPOTrainer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    made = models.random_model(
        TINY if small or asked.tiny else SHAPES[asked.shape], "float32" if small else asked.weights, device
    )
    prompts, group, tokens = (6, 4, 12) if small else (asked.prompts, asked.group, asked.tokens)
    words = ["the", "old", "king", "asks", "what", "plus", "may", "be", "and", "brown", "fox", "runs", "to"]
    rows = [{"prompt": " ".join(words[(i + j) % len(words)] for j in range(4 + i % 12))} for i in range(prompts)]
    config = GRPOConfig(
        device=device, dtype="float32" if small or device == "cpu" else "bfloat16", beta=0.0, loss_type="dapo",
        learning_rate=1e-6, group_size=group, groups_per_step=prompts, max_completion_length=tokens, shard=kind,
        skip_apply_chat_template=True, preflight=False, reward_workers=1, max_grad_norm=None,
        tokens_per_microbatch=32_768,
        **({"weights": asked.weights} if asked.weights == "bfloat16" and not small else {}),
    )  # fmt: skip
    reward = f"{BENCH / 'peers' / 'reward.py'}:variety"
    return GRPOTrainer(made, reward, config, rows, processing_class=models.words(made.config.vocab_size))


Told = dict[str, dict[str, float]]
"""Of a step: calls, seconds of waiting and of moving, by what they were for."""


def timed_collectives(ranks: Any, steps: list[Told]) -> None:
    """From here on everything that ranks tell each other adds to the last of `steps`.

    A barrier before each collective is where a rank waits for the others; the rest of a call is moving, and so is what
    makes records into arrays before it and out of them afterwards.
    """
    import torch
    import torch.distributed as dist

    import grpo.language.source as source
    from grpo import together

    def synchronized() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def entry(what: str) -> dict[str, float]:
        return steps[-1].setdefault(what, {"calls": 0, "waiting": 0.0, "moving": 0.0})

    call = ranks._call

    def waited(what: str, collective: Any, *given: Any, **how: Any) -> None:
        began = synchronized()
        dist.barrier(group=ranks._words)
        waiting = time.perf_counter() - began
        call(what, collective, *given, **how)
        of = entry(what)
        of["calls"] += 1
        of["waiting"] += waiting
        of["moving"] -= waiting  # the whole of it is added around this call

    ranks._call = waited

    def whole(function: Any, of: str = "") -> Any:
        def timed(*given: Any) -> Any:
            began = synchronized()
            try:
                return function(*given)
            finally:
                entry(of or given[-1])["moving"] += synchronized() - began

        return timed

    for name in ("gather", "broadcast", "sum", "onto", "sent"):  # what for is the last thing they are given
        setattr(ranks, name, whole(getattr(ranks, name)))
    for module, name in ((together, "packed"), (together, "joined"), (source, "pack")):
        setattr(module, name, whole(getattr(module, name), COLLECTING))


def rank_main(asked: argparse.Namespace) -> None:
    """What one rank does; the chief writes what all found."""
    import torch

    from grpo import together
    from grpo.distributed.group import join
    from grpo.protocols import State
    from grpo.seeding import seed_all

    together.here()  # from now on this rank's GPU is the one that is meant
    small = make_trainer(asked, asked.kind, small=True)
    seed_all(0, 0)
    small.step()
    whole = small.state().arrays  # whole on the chief, which every rank helps with, as for a checkpoint
    moments = {name: x for name, x in whole.items() if name.startswith("optimizer/") and name.endswith("/exp_avg")}
    small.source.close()
    del small
    trainer = make_trainer(asked, asked.kind, small=False)
    ranks = trainer.ranks
    seconds: list[float] = []
    spent: list[Told] = []
    for number in range(1 + asked.repeats):
        spent.append({})
        if number == 1:
            if ranks.size > 1:
                timed_collectives(join(), spent)
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
        seed_all(0, number)
        began = time.perf_counter()
        report = trainer.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    held = sum(p.numel() * p.element_size() for p in trainer.policy.parameters().values())
    states = sum(
        x.numel() * x.element_size()
        for entry in trainer.optimizer.state.values()
        for x in entry.values()
        if torch.is_tensor(x)
    )
    mine = {
        "seconds": seconds[1:],
        "peak_gib": peak,
        "weights_gib": held / 2**30,
        "states_gib": states / 2**30,
        "collectives": spent[1 : 1 + asked.repeats],
    }
    spent.append({})
    told = [found.values for found in ranks.gather(State(mine, {}), "the figures")]
    trainer.source.close()
    if ranks.chief:
        from safetensors.torch import save_file

        figures = {"ranks": told, "length": report["completions/mean_length"], "kind": asked.kind}
        Path(asked.into).write_text(json.dumps(figures), encoding="utf-8")
        save_file(
            {name: torch.as_tensor(x).contiguous().cpu() for name, x in moments.items()}, f"{asked.into}.safetensors"
        )
    from grpo.distributed import group

    group.leave()


# --- all of them ------------------------------------------------------------------------------------------------------


def measured(asked: argparse.Namespace, ranks: int, kind: str, into: Path) -> dict[str, Any]:
    """One run of so many ranks, whose figures go to a file."""
    from grpo.distributed.places import Machine
    from grpo.distributed.start import start

    words = [
        f"--{name.replace('_', '-')}={getattr(asked, name)}"
        for name in ("shape", "prompts", "group", "tokens", "repeats", "weights")
    ]
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        *words,
        *(["--tiny"] if asked.tiny else []),
        f"--kind={kind}",
        f"--into={into}",
    ]
    extra = {"GRPO_SHARED_GPU": "1"} if asked.shared_gpu else {}
    if ranks == 1:
        import subprocess

        code = subprocess.run(command, env={**os.environ, **extra}, check=False).returncode
    else:
        code = start(Machine(0, 1, ranks, "127.0.0.1", 0), command, extra)
    if code or not into.exists():
        return {"failed": code}
    return json.loads(into.read_text(encoding="utf-8"))


def figures(run: dict[str, Any]) -> dict[str, Any]:
    """Of a run: a step's seconds, memory, and what of a step each kind of call takes; medians over steps.

    Shares are those of the rank that has the most of it, seconds those of the middle one.
    """
    ranks = run["ranks"]
    names = dict.fromkeys(name for rank in ranks for step in rank["collectives"] for name in step)

    def share(rank: dict[str, Any], kind: str, of: Sequence[str]) -> float:
        each = zip(rank["collectives"], rank["seconds"], strict=True)
        return statistics.median(sum(step[x][kind] for x in of if x in step) / seconds for step, seconds in each)

    def most(kind: str, *of: str) -> float:
        return max((share(rank, kind, of) for rank in ranks if rank["collectives"]), default=0.0)

    return {
        "seconds": statistics.median(statistics.median(rank["seconds"]) for rank in ranks),
        "peak_gib": max(rank["peak_gib"] for rank in ranks),
        "states_gib": max(rank["states_gib"] for rank in ranks),
        "gathers of records": {kind: most(kind, *GATHERS) for kind in KINDS},
        "sum of gradients": {kind: most(kind, *SUMS) for kind in KINDS},
        "each": {
            name: {
                "calls": statistics.median(step.get(name, {"calls": 0})["calls"] for step in ranks[0]["collectives"]),
                **{kind: most(kind, name) for kind in KINDS},
            }
            for name in names
        },
    }


def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """How far tensors are from those of one rank: against the largest number of the same tensor, and of all."""
    if one.keys() != other.keys():
        raise ValueError(f"other tensors: {sorted(one.keys() ^ other.keys())}")
    off = {name: float((one[name] - other[name]).abs().max()) for name in one}
    largest = {name: float(x.abs().max()) for name, x in one.items()}
    relative = [off[name] / largest[name] if largest[name] else (math.inf if off[name] else 0.0) for name in one]
    return {
        "tensors": len(one),
        "without a gradient": sum(not x for x in largest.values()),
        "largest": max(largest.values()),
        "of the same tensor": max(relative),
        "overall": max(off.values()) / max(largest.values()),
    }


def compared(runs: dict[str, dict[str, Any]], files: Mapping[str, Path]) -> None:
    """Have every run of several ranks say how far its gradients are from those of one.

    Divided weights are sampled from by another engine, which draws other answers.
    """
    from safetensors.torch import load_file

    found = {
        name: load_file(f"{files[name]}.safetensors")
        for name, run in runs.items()
        if run.get("kind", "weights") != "weights"
    }
    alone = [name for name in found if len(runs[name]["ranks"]) == 1]
    for name in found.keys() - alone if alone else ():
        runs[name]["gradients"] = apart(found[alone[0]], found[name])


def told(asked: argparse.Namespace, runs: dict[str, dict[str, Any]]) -> str:
    """Prediction beside measurement, in lines."""
    shape, shared = "tiny" if asked.tiny else asked.shape, ", ranks share a GPU" if asked.shared_gpu else ""
    lines = [f"{asked.prompts} x {asked.group} x {asked.tokens}, {shape}{shared}"]
    for name, run in runs.items():
        if "failed" in run:
            lines.append(f"{name}: failed ({run['failed']})")
            continue
        found = run["figures"]
        model = predicted(len(run["ranks"]), asked.prompts, asked.group, asked.tokens)["step"]
        aside = f"(model, 1.7 billion weights on H200s of their own: {model:.2f} s)"
        lines.append(
            f"{name}: {found['seconds']:.2f} s a step {aside}, at most {found['peak_gib']:.1f} GiB a rank, "
            f"states {found['states_gib']:.2f} GiB"
        )
        if len(run["ranks"]) == 1:
            continue
        for of in ("gathers of records", "sum of gradients"):
            moving, waiting = (found[of][kind] for kind in ("moving", "waiting"))
            lines.append(f"  {of:18} {moving:6.2%} of a step, {waiting:6.2%} more waiting for the slowest rank")
        for what, entry in found["each"].items():
            moving, waiting = (entry[kind] for kind in ("moving", "waiting"))
            lines.append(f"    {what:22} {entry['calls']:6.0f} a step, moving {moving:7.2%}, waiting {waiting:7.2%}")
        if "gradients" in run:
            off = run["gradients"]
            lines.append(
                f"  gradients (AdamW's first moments after one small float32 step, {off['tensors']} tensors) against 1 "
                f"rank: {off['of the same tensor']:.1e} of the largest of the same tensor apart at most, "
                f"{off['overall']:.1e} of the largest of all"
            )
    return "\n".join(lines)


def main() -> None:
    """The table, or a measurement beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="measure on so many GPUs of this machine")
    parser.add_argument("--shared-gpu", action="store_true", help="ranks share one GPU, over gloo")
    parser.add_argument("--shape", default="qwen17", help="of bench/shapes.py")
    parser.add_argument("--weights", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--only", nargs="+", default=["one", "none", "gradients"], help="one none states gradients weights"
    )
    parser.add_argument("--kind", default="none", help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=BENCH / "results" / "ranks.json")
    asked = parser.parse_args()
    if asked.into:
        rank_main(asked)
        return
    print(table(), memory() if not asked.ranks else "", sep="\n\n", flush=True)
    if not asked.ranks:
        return
    with tempfile.TemporaryDirectory() as folder:
        runs, files = {}, {}
        for word in asked.only:
            count, kind = (1, "none") if word == "one" else (asked.ranks, word)
            name = f"{count} rank{'s' if count > 1 else ''}, shard {kind}"
            files[name] = Path(folder) / f"{count}-{kind}.json"
            runs[name] = measured(asked, count, kind, files[name])
        compared(runs, files)
    for run in runs.values():
        run |= {} if "failed" in run else {"figures": figures(run)}
    text = told(asked, runs)
    print(text, flush=True)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(asked).items() if name not in ("into", "kind", "out")}
    asked.out.write_text(
        json.dumps({"settings": settings, "runs": runs, "lines": text.splitlines()}, indent=1), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
