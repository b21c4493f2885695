"""Our world model, for `worldmodel_speed.py`: `Study.update` without a replay behind it, and `imagine`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from dreamer_turns import Built, batch, serve
from gymnasium.spaces import Discrete

from grpo.envs.heads import Categorical
from grpo.worldmodel.imagine import imagine
from grpo.worldmodel.learner import WorldModel
from grpo.worldmodel.policy import ActorPolicy, make_network
from grpo.worldmodel.replay import Sample
from grpo.worldmodel.rssm import Size
from grpo.worldmodel.study import Study

RATE, WARMUP, ACTOR_LAYERS = 4e-5, 1000, 3
"""As published."""


class _NoReplay:
    """Writing latents back is the replay's work, which nobody is timed for here."""

    def write_latents(self, *_: Any) -> None:
        pass


def build(cell: dict[str, Any]) -> Built:
    """Both operations."""
    given, size, actions = batch(cell), Size(**cell["widths"]), cell["actions"]
    given["action"] = np.eye(actions, dtype=np.float32)[given.pop("choice")]
    shapes = {key: x.shape[2:] for key, x in given.items() if key in ("vector", "image")}
    model, random = WorldModel(shapes, actions, size), torch.Generator().manual_seed(0)
    study, replay = Study(model, RATE, WARMUP, frozen=False), _NoReplay()
    zeros = np.zeros((cell["batch"], size.deter), np.float32)
    stoch = np.zeros((cell["batch"], size.stoch, size.classes), np.float32)
    sample = Sample(given, np.zeros(given["is_first"].shape, np.int64), zeros, stoch, online=0)
    head = Categorical(Discrete(actions))
    policy = ActorPolicy(make_network(model.flat_width, size.units, head, ACTOR_LAYERS, seed=0), head)
    start = model.rssm.initial(cell["starts"])
    return Built(
        weights=sum(x.numel() for x in model.parameters()),
        operations={
            "update": lambda: study.update(sample, replay, random),  # type: ignore[arg-type]
            "imagine": lambda: imagine(model, policy, start, 1, cell["horizon"], random),
        },
    )


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    serve(build, ["torch"])
