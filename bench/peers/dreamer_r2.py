"""NM512/r2dreamer, for `worldmodel_speed.py`: its modules, optimizer and scaler, the first part of its loss, its prior.

    python dreamer_r2.py FOLDER [free]        a checkout; its interpreter needs torch and PyYAML

With a decoder (its `rep_loss: dreamer`), or with `free` without one (its own `r2dreamer`, from which the repository has
its name). Settings are those of its `configs`, with the widths that a cell asks for. On a GPU as it trains: float16 by
autocast with a scaled loss, TF32 elsewhere, losses and imagination each through torch.compile in its mode
"reduce-overhead", which unrolls all steps and records CUDA graphs: the first calls take minutes. On a CPU, for which it
has no settings, float32, not compiled: torch.compile takes minutes there too.

What differs from its own training. One function of its trainer makes the losses of the world model, imagines, and makes
those of actor and critic, in one backward pass; here is the part of the world model (this file, from its modules), so
that neither actor nor critic learns, nor the world model from the critic. A future is 15 transitions, all of them read,
where its loop makes one more that nobody reads. Batches lie on the device as in its replay; pictures are made numbers
there at every update.

What its modules import and do not use here (tensordict, tensorboard) need not be installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml
from dreamer_turns import Built, batch, serve
from torch import Tensor

FOLDER = Path(sys.argv[1])
sys.path.insert(0, str(FOLDER))


def stand_in(module: str, name: str) -> None:
    """Something to import by that name, whether it is installed or not."""
    sys.modules[module] = ModuleType(module)
    setattr(sys.modules[module], name, None)


stand_in("tensordict", "TensorDict")  # its replay holds these; losses and imagination only take what is in them
stand_in("torch.utils.tensorboard", "SummaryWriter")

from dreamer import Dreamer  # noqa: E402

FREE = sys.argv[2:] == ["free"]
SIZED = {"deter": "deter", "hidden": "hidden", "discrete": "classes", "depth": "depth", "units": "units"}
"""Its names of widths, and ours."""
SMALLEST = 1.0
"""Scale of the loss under which no gradient was finite for long: it starts at 65,536 and is halved each time."""


class Settings(dict[str, Any]):
    """A mapping whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, x: Any) -> None:
        self[name] = x


def build(cell: dict[str, Any]) -> Built:
    """Both operations."""
    device, on_gpu = torch.device(cell["device"]), cell["device"] == "cuda"
    if on_gpu:
        torch.set_float32_matmul_precision("high")  # as its train.py does
    given = batch(cell)
    given["action"] = np.eye(cell["actions"], dtype=np.float32)[given.pop("choice")]
    seen = SimpleNamespace(spaces={key: given[key][0, 0] for key in ("vector", "image") if key in given})
    model = Dreamer(settings(cell), seen, SimpleNamespace(n=cell["actions"], discrete=True)).to(device)
    model._scaler = torch.amp.GradScaler(cell["device"], enabled=on_gpu)
    scalars = ("reward", "is_first", "is_terminal")  # of which its replay has (B, T, 1)
    there = {key: torch.from_numpy(x[..., None] if key in scalars else x).to(device) for key, x in given.items()}
    initial, start = model.rssm.initial(cell["batch"]), model.rssm.initial(cell["starts"])
    autocast = torch.autocast(cell["device"], torch.float16, enabled=on_gpu)
    losses, futures = compiled(world_losses, on_gpu), compiled(imagined, on_gpu)

    def update() -> dict[str, Any]:
        torch.compiler.cudagraph_mark_step_begin()
        data = model.preprocess(dict(there))
        with autocast:
            total, _, metrics = losses(model, data, initial)
            model._scaler.scale(total).backward()
        model._scaler.unscale_(model._optimizer)
        model._agc(
            model._named_params.values()
        )  # actor and critic have no gradients, and are passed over here and below
        model._scaler.step(model._optimizer)
        model._scaler.update()
        model._scheduler.step()
        model._optimizer.zero_grad(set_to_none=True)
        metrics = {**metrics, "lr": model._scheduler.get_lr()[0], "scale": model._scaler.get_scale()}
        if metrics["scale"] < SMALLEST:
            raise FloatingPointError("no update was finite: its optimizer has not learned")
        finish()
        return metrics

    def imagine() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad(), autocast:
            futures(model, start, cell["horizon"])
        finish()

    def finish() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    world = [model.encoder, model.rssm, model.reward, model.cont, model.prj if FREE else model.decoder]
    weights = sum(x.numel() for module in world for x in module.parameters())
    return Built(weights, {"update": update, "imagine": imagine})


def compiled(function: Callable[..., Any], on_gpu: bool) -> Callable[..., Any]:
    """As its `compile: True` compiles."""
    return torch.compile(function, mode="reduce-overhead") if on_gpu else function


def world_losses(model: Any, data: Mapping[str, Tensor], latent: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
    """The world model's part of the loss, the latents that its replay would get, and the metrics that belong to it."""
    rssm = model.rssm
    embed = model.encoder(data)
    stoch, deter, posterior = rssm.observe(embed, data["action"], latent, data["is_first"])
    prior = rssm.prior(deter)[1]
    losses = dict(zip(("dyn", "rep"), map(torch.mean, rssm.kl_loss(posterior, prior, model.kl_free)), strict=True))
    feat = rssm.get_feat(stoch, deter)
    if FREE:
        both = correlation(model.prj(feat.flatten(0, 1)), embed.flatten(0, 1).detach())
        across = both[~torch.eye(len(both), dtype=torch.bool, device=both.device)]  # by a mask, as there: two graphs
        losses["barlow"] = (both.diagonal() - 1).pow(2).sum() + model.barlow_lambd * across.pow(2).sum()
    else:
        losses |= {key: -said.log_prob(data[key]).mean() for key, said in model.decoder(stoch, deter).items()}
    losses["rew"] = -model.reward(feat).log_prob(data["reward"]).mean()
    losses["con"] = -model.cont(feat).log_prob(1 - data["is_terminal"].float()).mean()
    total = sum(model._loss_scales[key] * x for key, x in losses.items())
    entropies = {key: rssm.get_dist(x).entropy().mean() for key, x in (("dyn", prior), ("rep", posterior))}
    return total, (stoch.detach(), deter.detach()), {"losses": losses, "entropies": entropies, "total": total}


def correlation(said: Tensor, target: Tensor) -> Tensor:
    """Of every number that the latents say with every one that the encoder does (Barlow Twins, arXiv 2103.03230)."""
    said, target = ((x - x.mean(0)) / (x.std(0) + 1e-8) for x in (said, target))
    return said.T @ target / len(said)


def imagined(model: Any, latent: tuple[Tensor, Tensor], horizon: int) -> tuple[Tensor, ...]:
    """Futures from its actor and prior, with log-probs, rewards and continuations."""
    rssm, (stoch, deter) = model._frozen_rssm, latent
    feats, actions = [rssm.get_feat(stoch, deter)], []
    for _ in range(horizon):
        actions.append(model._frozen_actor(feats[-1]).rsample())
        stoch, deter = rssm.img_step(stoch, deter, actions[-1])
        feats.append(rssm.get_feat(stoch, deter))
    feat, action = torch.stack(feats, 1), torch.stack(actions, 1)
    logp = model.actor(feat[:, :-1]).log_prob(action)
    return feat, action, logp, model._frozen_reward(feat[:, 1:]).mode(), model._frozen_cont(feat[:, 1:]).mean


def settings(cell: dict[str, Any]) -> Settings:
    """Its defaults, for these widths."""
    widths, pictures = cell["widths"], cell["observation"] == "image"
    found = {
        "device": cell["device"],
        "env": read(f"env/dmc_{'vision' if pictures else 'proprio'}"),
        "model": {
            **read("model/_base_"),
            **{key: x for key, x in read("model/size12M").items() if key != "defaults"},
            **{its: widths[ours] for its, ours in SIZED.items()},
            "rep_loss": "r2dreamer" if FREE else "dreamer",
            "compile": False,  # of the whole, which is not what is called here
        },
    }
    found["model"]["rssm"]["stoch"] = widths["stoch"]
    whole: Settings = resolved(found["model"], found)
    return whole


def read(name: str) -> dict[str, Any]:
    """One of its files."""
    found: dict[str, Any] = yaml.safe_load((FOLDER / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    return found


def resolved(x: Any, whole: Mapping[str, Any]) -> Any:
    """With `${a.b}` replaced by what stands there, and 1e-4 a number, which YAML reads as a word."""
    if isinstance(x, dict):
        return Settings({key: resolved(value, whole) for key, value in x.items()})
    if isinstance(x, str) and x.startswith("${"):
        place: Any = whole
        for part in x[2:-1].split("."):
            place = place[part]
        return resolved(place, whole)
    try:
        return float(x) if isinstance(x, str) else x
    except ValueError:
        return x


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    serve(build, ["torch"])
