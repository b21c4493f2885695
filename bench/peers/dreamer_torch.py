"""NM512/dreamerv3-torch, for `worldmodel_speed.py`: its own `WorldModel._train`, and `_imagine` with what reads it.

    python dreamer_torch.py FOLDER [even]        a checkout; its interpreter needs torch, tensorboard and ruamel.yaml

Settings are those of its `configs.yaml`, with the widths and numbers of layers that a cell asks for. Its memory is
dense, so the same widths are more weights; `even` takes the width of memory that comes closest to the cell's weights.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from dreamer_turns import Built, batch, serve

FOLDER = Path(sys.argv[1])
sys.path.insert(0, str(FOLDER))  # before this file's own folder, where other things are called `models`

import models  # noqa: E402
import networks  # noqa: E402
from ruamel.yaml import YAML  # noqa: E402

MLP_DEFAULTS = networks.MLP.__init__.__defaults__


def build(cell: dict[str, Any]) -> Built:
    """Both operations."""
    # Vectors are encoded on "cuda" whatever its settings say: the one thing that keeps it from running on a CPU.
    networks.MLP.__init__.__defaults__ = tuple(cell["device"] if x == "cuda" else x for x in MLP_DEFAULTS)
    given = batch(cell)
    given["action"] = np.eye(cell["actions"], dtype=np.float32)[given.pop("choice")]
    shapes = {key: given[key].shape[2:] for key in ("vector", "image") if key in given}
    given.setdefault("image", np.zeros((*given["reward"].shape, 1, 1, 3), np.uint8))  # it always asks for one
    spaces = SimpleNamespace(spaces={key: SimpleNamespace(shape=shape) for key, shape in shapes.items()})
    config = settings(cell, even(cell, spaces) if sys.argv[2:] == ["even"] else cell["widths"]["deter"])
    world = models.WorldModel(spaces, None, 0, config).to(cell["device"])
    actor = models.ImagBehavior(config, world).to(cell["device"])
    world.requires_grad_(False)
    start = {key: x.detach()[None] for key, x in world.dynamics.initial(cell["starts"]).items()}

    @torch.no_grad()
    def imagine() -> None:
        feat, _, action = actor._imagine(start, actor.actor, cell["horizon"])
        actor.actor(feat).log_prob(action)
        world.heads["reward"](feat).mean()
        _ = world.heads["cont"](feat).mean
        finish()

    def update() -> None:
        world._train(given)
        finish()

    def finish() -> None:
        if cell["device"] == "cuda":
            torch.cuda.synchronize()

    return Built(
        weights=sum(x.numel() for x in world.parameters()),
        operations={"update": update, "imagine": imagine},
    )


def even(cell: dict[str, Any], spaces: SimpleNamespace) -> int:
    """The widest memory, in steps of 8, that has no more weights than the cell."""
    low, high = 1, cell["widths"]["deter"] // 8
    while high - low > 1:
        middle = (low + high) // 2
        world = models.WorldModel(spaces, None, 0, settings(cell, middle * 8))
        fits = sum(x.numel() for x in world.parameters()) <= cell["weights"]
        low, high = (middle, high) if fits else (low, middle)
    return low * 8


def settings(cell: dict[str, Any], deter: int) -> SimpleNamespace:
    """Its defaults, for these widths."""
    found = YAML(typ="safe").load((FOLDER / "configs.yaml").read_text(encoding="utf-8"))["defaults"]
    numbers = {key: float(x) if _is_number(x) else x for key, x in found.items()}
    widths, vector = cell["widths"], cell["observation"] == "vector"
    keys = {"mlp_keys": "vector" if vector else "$^", "cnn_keys": "$^" if vector else "image"}
    layers = {"mlp_layers": 3, "mlp_units": widths["units"], "cnn_depth": widths["depth"], **keys}
    changed = {
        "device": cell["device"],
        "num_actions": cell["actions"],
        "dyn_hidden": widths["hidden"],
        "dyn_deter": deter,
        "dyn_stoch": widths["stoch"],
        "dyn_discrete": widths["classes"],
        "units": widths["units"],
        "encoder": {**found["encoder"], **layers},
        "decoder": {**found["decoder"], **layers},
        "reward_head": {**found["reward_head"], "layers": 1},
        "cont_head": {**found["cont_head"], "layers": 1},
        "actor": {**_floats(found["actor"]), "layers": 3, "dist": "onehot", "std": "none"},
        "critic": _floats(found["critic"]),
        "imag_gradient": "reinforce",
    }
    return SimpleNamespace(**{**numbers, **changed})


def _is_number(x: Any) -> bool:
    """YAML reads 1e-4 as a word."""
    try:
        return isinstance(x, str) and bool(float(x) or True)
    except ValueError:
        return False


def _floats(found: dict[str, Any]) -> dict[str, Any]:
    return {key: float(x) if _is_number(x) else x for key, x in found.items()}


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    serve(build, ["torch"])
