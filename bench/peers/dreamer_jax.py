"""danijar/dreamerv3, for `worldmodel_speed.py`: its modules and optimizer, the first half of its loss, its imagination.

    python dreamer_jax.py FOLDER        a checkout; its interpreter needs jax, ninjax, elements, optax, chex, portal, …

Settings are those of its `configs.yaml`, with the widths that a cell asks for, compiled as a whole. It computes in
float32 on a CPU, in its own bfloat16 on a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dreamer_turns import Built, batch, serve

FOLDER = Path(sys.argv[1])
sys.path.insert(0, str(FOLDER))

import elements  # noqa: E402
import embodied.jax  # noqa: E402
import ninjax as nj  # noqa: E402
from dreamerv3 import agent  # noqa: E402
from embodied.jax import nets  # noqa: E402
from ruamel.yaml import YAML  # noqa: E402

WORLD = ("dyn/", "enc/", "dec/", "rew/", "con/")
OUTSIDE = ("action", "is_first", "is_last", "is_terminal", "reward")


def build(cell: dict[str, Any]) -> Built:
    """Both operations, compiled when they are first called."""
    nets.COMPUTE_DTYPE = jnp.float32 if cell["device"] == "cpu" else jnp.bfloat16
    assert jax.default_backend() == ("cpu" if cell["device"] == "cpu" else "gpu"), jax.default_backend()
    given = batch(cell)
    prevact = {"action": given.pop("choice")}
    space = {key: elements.Space(given[key].dtype, given[key].shape[2:]) for key in given if key not in OUTSIDE}
    model = object.__new__(agent.Agent)  # its constructor would set up devices, and compile the critic too
    model.__init__(space, {"action": elements.Space(np.int32, (), 0, cell["actions"])}, settings(cell))
    modules = [model.dyn, model.enc, model.dec, model.rew, model.con]
    optimizer = embodied.jax.Optimizer(modules, model._make_opt(**model.config.opt), name="world_opt")

    def loss(obs: Any, act: Any) -> Any:
        reset = obs["is_first"]
        carry = model.dyn.initial(len(reset))
        _, _, tokens = model.enc({}, obs, reset, True)
        _, _, losses, feat, metrics = model.dyn.loss(carry, tokens, act, reset, True)
        _, _, painted = model.dec({}, feat, reset, True)
        flat = model.feat2tensor(feat)
        losses["rew"] = model.rew(flat, 2).loss(obs["reward"])
        losses["con"] = model.con(flat, 2).loss(jnp.float32(~obs["is_terminal"]))
        for key, recon in painted.items():
            losses[key] = recon.loss(obs[key] if key == "vector" else jnp.float32(obs[key]) / 255)
        total = sum(x.mean() * model.scales[key] for key, x in losses.items())
        return total, (metrics, {key: feat[key] for key in ("deter", "stoch")})

    def update(obs: Any, act: Any) -> Any:
        return optimizer(loss, obs, act, has_aux=True)

    def imagine(start: Any) -> Any:
        def draw(feat: Any) -> Any:
            policy = model.pol(model.feat2tensor(feat), 1)
            return jax.tree.map(lambda x: x.sample(nj.seed()), policy, is_leaf=lambda x: hasattr(x, "sample"))

        _, feat, act = model.dyn.imagine(start, draw, cell["horizon"], False)
        flat = model.feat2tensor(feat)
        logp = model.pol(flat, 2)["action"].logp(act["action"])
        return feat, act, logp, model.rew(flat, 2).pred(), model.con(flat, 2).prob(1)

    seeds = iter(np.random.default_rng(0).integers(0, 2**32, (1_000_000, 2), dtype=np.uint32))
    start = model.dyn.initial(cell["starts"])
    learned = {"state": nj.init(update)({}, given, prevact, seed=next(seeds))}
    weights = sum(x.size for key, x in learned["state"].items() if key.startswith(WORLD))
    dreaming = nj.init(imagine)(dict(learned["state"]), start, seed=next(seeds))
    step = jax.jit(nj.pure(update), donate_argnums=0)
    dream = jax.jit(lambda state, start, seed: nj.pure(imagine)(state, start, seed=seed)[1])

    def updated() -> None:
        learned["state"], out = step(learned["state"], given, prevact, seed=next(seeds))
        jax.block_until_ready((learned["state"], out))

    def dreamt() -> None:
        jax.block_until_ready(dream(dreaming, start, next(seeds)))

    return Built(weights, {"update": updated, "imagine": dreamt})


def settings(cell: dict[str, Any]) -> Any:
    """Its defaults, for these widths."""
    found = YAML(typ="safe").load((FOLDER / "dreamerv3" / "configs.yaml").read_text(encoding="utf-8"))["defaults"]
    widths = cell["widths"]
    config = elements.Config(found).update(
        {
            r".*\.rssm": {key: widths[key] for key in ("deter", "hidden", "classes", "stoch")},
            r".*\.depth": widths["depth"],
            r".*\.units": widths["units"],
        }
    )
    return config.agent


if __name__ == "__main__":
    serve(build, ["jax", "jaxlib", "ninjax"])
