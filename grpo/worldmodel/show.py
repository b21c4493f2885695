"""Pictures of what the world model believes: predictions beside the truth, and imagined groups with their returns.

forecast.png    each number of some observations, the reward and the chance to go on: seen, predicted, error
forecast.mp4    the same for pictures: truth, prediction and error one below the other
groups.png      imagined futures, group by group: what each had earned by when
groups.mp4      the same futures as pictures: a group a row, a future a column

Beside the samples of some steps: of one replayed sequence strips of pictures (real, imagined, error), or its forecast;
of each future in the group a film, where observations are pictures.

Letters: B replayed sequences, F numbers of a latent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo.envs.video import write_video
from grpo.run.files import write_atomic
from grpo.worldmodel.imagine import Imagined
from grpo.worldmodel.model.learner import Learner
from grpo.worldmodel.model.rssm import Latent
from grpo.worldmodel.model.world_model import Forecast, WorldModel
from grpo.worldmodel.replay.buffer import Sample
from grpo.worldmodel.views import VECTOR

CONTEXT = 5
"""Steps that the model sees before it goes on alone."""
MOST_SEEN = 8
"""Numbers of an observation that are kept to look at; larger ones say little to the eye."""
MOST_CURVES = 8
MOST_GROUPS = 6
MOST_SIDE_BY_SIDE = 4
MOST_IN_STRIP = 48
FPS = 8
ENLARGED = 4
"""Pixels a side that a pixel becomes in a film, if that leaves it no wider than this:"""
MOST_ACROSS = 2048


@torch.no_grad()
def imagined_vectors(model: WorldModel, flat: Tensor) -> Tensor | None:
    """The numbers that the model sees in imagined states, (N, T, F) → (N, T, numbers); None: none, or too many."""
    if model.shapes.get(VECTOR, (MOST_SEEN + 1,))[0] > MOST_SEEN:
        return None
    deter, stoch = flat[..., : model.size.deter], flat[..., model.size.deter :]
    painted = model.decoder(deter, stoch.view(*stoch.shape[:-1], model.size.stoch, model.size.classes))
    return model.decoder.observations(painted)[VECTOR].round(decimals=4)


@torch.no_grad()
def imagined_pictures(model: WorldModel, latent: Latent) -> np.ndarray | None:
    """What the model sees in imagined states, (N, T) → (N, T, H, W, 3) bytes; None: it sees no pictures."""
    name = next((key for key, shape in model.shapes.items() if len(shape) == 3), None)
    if name is None:
        return None
    painted = model.decoder.observations(model.decoder(latent.deter, latent.stoch))[name]
    return _coloured(painted.cpu().numpy())


def forecasts(learner: Learner, sample: Sample, random: torch.Generator) -> dict[str, Forecast]:
    """Open-loop predictions for replayed sequences, those first in which the fewest episodes end: ends go unseen."""
    batch, latent = learner.given(sample)
    context = min(CONTEXT, batch["is_first"].shape[1] - 1)
    found = learner.model.open_loop(batch, context, latent, random)
    order_B = batch["is_first"][:, 1:].sum(1).argsort(stable=True)
    return {key: Forecast(f.truth[order_B], f.prediction[order_B], f.error[order_B]) for key, f in found.items()}


def leave_forecast(learner: Learner, sample: Sample, folder: Path, random: torch.Generator) -> dict[str, Path]:
    """Write the pictures of a prediction; their paths by kind."""
    found = {key: _host(forecast) for key, forecast in forecasts(learner, sample, random).items()}
    left = {"forecast": _curves({k: f for k, f in found.items() if f.truth.ndim <= 3}, folder / "forecast.png")}
    pictures = [forecast for forecast in found.values() if forecast.truth.ndim == 5]
    if pictures:
        left["forecast_video"] = write_video(_film(pictures[0]), folder / "forecast.mp4", FPS)
    return left


def leave_strips(
    learner: Learner, sample: Sample, stem: Path, horizon: int, random: torch.Generator
) -> list[dict[str, str]]:
    """Write one sequence's strips, as long as a future of `horizon` steps, or its curves; what a row says of them."""
    found = {key: _host(forecast) for key, forecast in forecasts(learner, sample, random).items()}
    picture = next((forecast for forecast in found.values() if forecast.truth.ndim == 5), None)
    if picture is None:
        path = _curves(found, stem.with_name(f"{stem.name}-forecast.png"))
        return [{"kind": "image", "name": "forecast", "file": path.name}]
    media = []
    for name, film in (("real", picture.truth), ("imagined", picture.prediction), ("error", picture.error)):
        path = stem.with_name(f"{stem.name}-{name}.png")
        _write_picture(_strip(_coloured(film[0]), horizon), path)
        media.append({"kind": "strip", "name": name, "file": path.name})
    return media


def leave_futures(model: WorldModel, flat: Tensor, stem: Path) -> list[dict[str, str]]:
    """Write a film of each future, (N, T, F), in what the model sees; what each row says of its own."""
    deter, stoch = flat[..., : model.size.deter], flat[..., model.size.deter :]
    latent = Latent(deter, stoch.view(*stoch.shape[:-1], model.size.stoch, model.size.classes))
    films = imagined_pictures(model, latent)
    if films is None:
        return []
    media = []
    for number, film in enumerate(films):
        path = write_video(_enlarged(film), stem.with_name(f"{stem.name}-future-{number}.mp4"), FPS)
        media.append({"kind": "video", "name": "dreamt", "file": path.name})
    return media


def leave_groups(
    model: WorldModel, imagined: Imagined, paid_NH: torch.Tensor, gamma: float, folder: Path
) -> dict[str, Path]:
    """Write the picture of imagined groups, with the rewards that they were paid, and where there are some a film."""
    earned_NH = (imagined.weight_NH(gamma) * paid_NH).cumsum(1).cpu().numpy()
    groups = earned_NH.reshape(-1, imagined.group, earned_NH.shape[1])[:MOST_GROUPS]
    figure, axes = _axes(len(groups))
    for number, (axis, group_GH) in enumerate(zip(axes, groups, strict=True)):
        axis.plot(group_GH.T, linewidth=0.8)
        axis.set_title(f"start {number}: {group_GH[:, -1].min():.3g} … {group_GH[:, -1].max():.3g}", fontsize=8)
        axis.set_xlabel("imagined step", fontsize=7)
    left = {"groups": _saved(figure, folder / "groups.png")}
    most = min(MOST_SIDE_BY_SIDE, len(groups)) * imagined.group
    films = imagined_pictures(model, imagined.latent[:most])
    if films is not None:
        rows = [np.concatenate(list(group), axis=2) for group in films.reshape(-1, imagined.group, *films.shape[1:])]
        left["groups_video"] = write_video(_enlarged(np.concatenate(rows, axis=1)), folder / "groups.mp4", FPS)
    return left


def _curves(found: dict[str, Forecast], path: Path) -> Path:
    """The first sequence: what was seen, what was predicted, and the error, for some of the numbers."""
    lines: list[tuple[str, np.ndarray, np.ndarray]] = []
    for key, forecast in found.items():
        truth, guess = (x[0].reshape(len(x[0]), -1).T for x in (forecast.truth, forecast.prediction))
        lines += [
            (f"{key} {i}" if len(truth) > 1 else key, a, b) for i, (a, b) in enumerate(zip(truth, guess, strict=True))
        ]
    numbers, others = [x for x in lines if " " in x[0]], [x for x in lines if " " not in x[0]]
    chosen = numbers[: MOST_CURVES - len(others)] + others
    figure, axes = _axes(len(chosen))
    for axis, (name, truth_T, guess_T) in zip(axes, chosen, strict=True):
        axis.plot(truth_T, label="truth")
        axis.plot(guess_T, "--", label="prediction")
        axis.plot(guess_T - truth_T, ":", color="grey", label="error")
        axis.axvline(CONTEXT - 1, color="black", linewidth=0.5)
        axis.set_title(name, fontsize=8)
    axes[0].legend(fontsize=6)
    return _saved(figure, path)


def _film(forecast: Forecast) -> list[np.ndarray]:
    """Frames: sequences side by side; truth, prediction, error one below the other."""
    rows = [
        np.concatenate(list(x[:MOST_SIDE_BY_SIDE, ..., :3]), axis=2)
        for x in (forecast.truth, forecast.prediction, forecast.error)
    ]
    return _enlarged(_coloured(np.concatenate(rows, axis=1)))


def _enlarged(film: np.ndarray) -> list[np.ndarray]:
    """(T, H, W, 3) as frames that an eye can follow, no wider than MOST_ACROSS."""
    times = max(1, min(ENLARGED, MOST_ACROSS // film.shape[2]))
    return [frame.repeat(times, 0).repeat(times, 1) for frame in film]


def _strip(film: np.ndarray, horizon: int) -> np.ndarray:
    """Frames side by side, at most MOST_IN_STRIP, as many as a future has; white where the sequence is shorter."""
    stride = -(-horizon // MOST_IN_STRIP)
    frames = film[:horizon:stride]
    blank = np.full((-(-horizon // stride) - len(frames), *frames.shape[1:]), 255, np.uint8)
    return np.concatenate([*frames, *blank], axis=1)


def _coloured(film: Any) -> np.ndarray:
    """(…, 3), whatever number of channels it had."""
    film = film[..., :3]
    film = np.repeat(film, 3, -1) if film.shape[-1] == 1 else film
    return film if film.shape[-1] == 3 else np.concatenate([film, film[..., :1]], -1)


def _write_picture(picture: np.ndarray, path: Path) -> None:
    from matplotlib.image import imsave

    write_atomic(path, lambda file: imsave(file, picture, format="png"))


def _host(forecast: Forecast) -> Forecast:
    parts = (x.cpu().numpy() for x in (forecast.truth, forecast.prediction, forecast.error))
    return Forecast(*parts)  # type: ignore[arg-type]


def _axes(count: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    across = min(count, 4)
    down = -(-count // across)
    figure = Figure(figsize=(3 * across, 2.2 * down), layout="constrained")
    return figure, [figure.add_subplot(down, across, i + 1) for i in range(count)]


def _saved(figure: Any, path: Path) -> Path:
    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=110))
    return path
