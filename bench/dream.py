"""Milliseconds of a dream on a GPU, 1,024 futures × 15 steps of the 12m model on vectors: what each setting brings.

    python bench/dream.py        # writes bench/results/worldmodel_dream_gpu.json

Ours alone and quick, for whoever changes imagination; beside other Dreamers: `worldmodel_speed.py`. Weights are random.
Medians of 50 calls after six: by CUDA's events, by the clock, and of the captured graph alone; what is between them is
drawing random numbers, copying them in and copying what was found out. A first step beside plain float32 says that
they dream the same: how far memories are apart, and the share of futures whose latents are the same. The file that is
there was read off an earlier, longer form, as its `note` says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import cells
import torch
from gymnasium.spaces import Discrete

from grpo.envs.heads import Categorical
from grpo.worldmodel.imagine import Imagination, Imagined
from grpo.worldmodel.model.rssm import SIZES
from grpo.worldmodel.model.world_model import WorldModel
from grpo.worldmodel.policy import ActorPolicy, make_network
from grpo.worldmodel.process import prepare

RESULTS = Path(__file__).parent / "results" / "worldmodel_dream_gpu.json"
FUTURES, STEPS, CALLS, FIRST = 1024, 15, 50, 6
VARIANTS: dict[str, tuple[str, dict[str, bool]]] = {
    "float32, plain": ("float32", {"compiled": False, "graphs": False}),
    "float32, compiled": ("float32", {"compiled": True, "graphs": False}),
    "float32, compiled, captured": ("float32", {"compiled": True}),
    "tf32, compiled": ("tf32", {"compiled": True, "graphs": False}),
    "tf32, captured": ("tf32", {"compiled": False}),
    "tf32, compiled, captured (the default)": ("tf32", {"compiled": True}),
    "bfloat16, compiled, captured": ("tf32", {"compiled": True, "coarse": True}),
}


def made(device: torch.device) -> tuple[WorldModel, ActorPolicy]:
    """A model and an actor; noise on all weights, for heads that begin at zero say nothing."""
    torch.manual_seed(0)
    size, head = SIZES["12m"], Categorical(Discrete(2))
    model = WorldModel({"vector": (4,)}, 2, size).to(device)
    policy = ActorPolicy(make_network(model.flat_width, size.units, head, 3, seed=0).to(device), head)
    with torch.no_grad():
        for weight in [*model.parameters(), *policy.network.parameters()]:
            weight.add_(0.02 * torch.randn_like(weight))
    return model, policy


def median(call: Any) -> tuple[float, float]:
    """Milliseconds by events and by the clock."""
    spans, walls = [], []
    for _ in range(CALLS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        at = time.perf_counter()
        begun.record()
        call()
        ended.record()
        torch.cuda.synchronize()
        walls.append(1e3 * (time.perf_counter() - at))
        spans.append(begun.elapsed_time(ended))
    return round(statistics.median(spans), 3), round(statistics.median(walls), 3)


def apart(one: Imagined, other: Imagined) -> dict[str, float]:
    """Of two first steps."""
    gap = (one.latent.deter[:, 1] - other.latent.deter[:, 1]).abs().max()
    same = (one.latent.stoch[:, 1] == other.latent.stoch[:, 1]).all(-1).float().mean()
    return {"memory_gap": float(gap), "latents_same": float(same)}


def main() -> None:
    """Every variant, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    device = torch.device("cuda")
    model, policy = made(device)
    start, exact = model.rssm.initial(FUTURES), None
    rows: dict[str, dict[str, Any]] = {}
    for name, (precision, how) in VARIANTS.items():
        prepare(device, precision)
        imagination = Imagination(model, policy, **how)
        random = torch.Generator()

        def dream(imagination: Imagination = imagination, random: torch.Generator = random) -> Imagined:
            return imagination(start, 1, STEPS, random)

        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*goes on without")  # that would be another variant
            for _ in range(FIRST):
                found = dream()
            events, wall = median(dream)
            found = dream(random=torch.Generator().manual_seed(0))
        exact = exact or found
        graphs = list(imagination._futures._graphs.values())
        rows[name] = {"events_ms": events, "wall_ms": wall, **apart(found, exact)}
        rows[name] |= {"graph_ms": median(graphs[0].graph.replay)[0]} if graphs else {}
        print(name, rows[name], flush=True)
    about = {"futures": FUTURES, "steps": STEPS, "machine": cells.machine("cuda"), "versions": cells.versions()}
    args.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
