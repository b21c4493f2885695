"""Our world model, for `worldmodel_speed.py`: `Learner.update` without a replay behind it, and `Imagination`.

    python dreamer_ours.py [compiled | uncompiled | plain | bfloat16]

As settings have it: torch_compile=true · torch_compile=false · and cuda_graphs=false too · precision=bfloat16.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from dreamer_turns import Built, batch, serve
from gymnasium.spaces import Discrete

from grpo.envs.heads import Categorical
from grpo.worldmodel.imagine import Imagination
from grpo.worldmodel.model.compiled import wanted
from grpo.worldmodel.model.learner import Learner
from grpo.worldmodel.model.rssm import Size
from grpo.worldmodel.model.world_model import WorldModel
from grpo.worldmodel.policy import ActorPolicy, make_network
from grpo.worldmodel.process import prepare
from grpo.worldmodel.replay.buffer import Sample

RATE, WARMUP, ACTOR_LAYERS = 4e-5, 1000, 3
"""As published."""
ASKED = {"compiled": True, "uncompiled": False, "plain": False}
HOW = (*sys.argv[1:], "")[0]


class _NoReplay:
    """Writing latents back is the replay's work, which nobody is timed for here."""

    def write_latents(self, *_: Any) -> None:
        pass


def build(cell: dict[str, Any]) -> Built:
    """Both operations."""
    given, size, actions = batch(cell), Size(**cell["widths"]), cell["actions"]
    given["action"] = np.eye(actions, dtype=np.float32)[given.pop("choice")]
    shapes = {key: x.shape[2:] for key, x in given.items() if key in ("vector", "image")}
    device = torch.device(cell["device"])
    model, random = WorldModel(shapes, actions, size).to(device), torch.Generator().manual_seed(0)
    prepare(device, "tf32")  # as a run does
    how = {"graphs": HOW != "plain", "compiled": wanted(ASKED.get(HOW), device)}
    learner, replay = Learner(model, RATE, WARMUP, frozen=False, coarse=HOW == "bfloat16", **how), _NoReplay()
    zeros = np.zeros((cell["batch"], size.deter), np.float32)
    stoch = np.zeros((cell["batch"], size.stoch, size.classes), np.float32)
    sample = Sample(given, np.zeros(given["is_first"].shape, np.int64), zeros, stoch, online=0)
    head = Categorical(Discrete(actions))
    policy = ActorPolicy(make_network(model.flat_width, size.units, head, ACTOR_LAYERS, seed=0).to(device), head)
    imagination = Imagination(model, policy, coarse=HOW == "bfloat16", **how)
    start = model.rssm.initial(cell["starts"])
    update = lambda: learner.update(sample, replay, random)  # type: ignore[arg-type]  # noqa: E731
    return Built(
        weights=sum(x.numel() for x in model.parameters()),
        operations={
            "update": whole(update, device),
            "imagine": whole(lambda: imagination(start, 1, cell["horizon"], random), device),
        },
    )


def whole(work: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """It has ended when the device has done it."""

    def done() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return done


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    serve(build, ["torch"])
