"""What one step is once it is kept: a record of fixed size, and another for its latents; and what may become one.

The first step fixes what a step is. Later ones must be like it, and every number finite: what is kept is learned from
many times, so this is where a bad step has a lane and a number.

Letters: N steps at once, D width of the deterministic latent, S × C the discrete.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from grpo.config import ConfigError

FLAGS = ("is_first", "is_last", "is_terminal")
FIXED: Mapping[str, type] = {"action": np.float32, "reward": np.float32} | dict.fromkeys(FLAGS, np.bool_)
"""Keys of every step beside its observations, and how they are kept."""

Form: TypeAlias = dict[str, tuple[np.dtype, tuple[int, ...]]]
"""Of every key of a step: the type it comes in, and its shape."""


class ReplayError(ConfigError):
    """Steps that cannot be taken in or given out, in one line that says which and what to do."""


# --- steps ----------------------------------------------------------------------------------------------------------


def step_record(form: Form) -> np.dtype:
    """One step as bytes in a row; wide numbers first, so that each lies where the machine reads it best."""
    missing = sorted(FIXED.keys() - form.keys())
    if missing:
        raise ReplayError(f"a step has no {', '.join(missing)}; every step has {', '.join(FIXED)}")
    for key, (dtype, shape) in form.items():
        if dtype.kind not in "biuf":
            raise ReplayError(f"{key} has the type {dtype}; steps hold numbers")
        if key in FIXED and bool(shape) != (key == "action"):
            raise ReplayError(f"{key} has the shape {shape}; an action is a vector, a reward or a flag one number")
    fields = [(key, kept_type(key, dtype), shape) for key, (dtype, shape) in form.items()]
    return np.dtype(sorted(fields, key=lambda field: (-field[1].itemsize, field[0])), align=True)


def kept_type(key: str, given: np.dtype) -> np.dtype:
    """The type a key is kept in: observations as they come, but never in double precision."""
    if key in FIXED:
        return np.dtype(FIXED[key])
    return np.dtype(np.float32) if given == np.float64 else given


def admitted(
    steps: Mapping[str, np.ndarray], form: Form, lane_N: np.ndarray, position_N: np.ndarray
) -> dict[str, np.ndarray]:
    """The steps as they are kept, once each is what the first one was and every number is finite."""

    def place(bad_N: Any = slice(None)) -> str:
        return f"lane {lane_N[bad_N][0]}, step {position_N[bad_N][0]}"

    if steps.keys() != form.keys():
        differ = ", ".join(sorted(steps.keys() ^ form.keys()))
        raise ReplayError(f"{place()}: the keys differ from the first step's in {differ}")
    fit = {}
    for key, x in steps.items():
        dtype, shape = form[key]
        if x.shape[:1] != lane_N.shape:
            raise ReplayError(f"{key} has {len(x)} rows for {len(lane_N)} lanes; name the lanes the steps are of")
        if x.shape[1:] != shape:
            raise ReplayError(f"{place()}: {key} has the shape {x.shape[1:]}, at first it was {shape}")
        if x.dtype != dtype and key not in FIXED:
            raise ReplayError(f"{place()}: {key} has the type {x.dtype}, at first it was {dtype}")
        fit[key] = x = x.astype(kept_type(key, dtype), copy=False)
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            bad_N = ~np.isfinite(x).reshape(len(lane_N), -1).all(1)
            raise ReplayError(f"{place(bad_N)}: {key} is NaN or infinite; mend the environment")
    odd_N = fit["is_terminal"] & ~fit["is_last"]
    if odd_N.any():
        raise ReplayError(f"{place(odd_N)}: is_terminal without is_last; an end is both")
    return fit


# --- latents --------------------------------------------------------------------------------------------------------


def latent_record(latent: tuple[int, int, int] | None, dtype: str) -> np.dtype:
    """The latents of one step: discrete ones as the number of their class."""
    width, variables, classes = latent or (0, 0, 0)
    number = np.dtype(np.uint8 if classes <= 256 else np.uint16)
    return np.dtype(
        [("deter", np.dtype(dtype), (width,)), ("stoch", number, (variables,)), ("known", np.bool_)], align=True
    )


def latent_records(
    deter: Any, stoch: Any, shape: tuple[int, ...], latent: tuple[int, int, int], record: np.dtype
) -> np.ndarray:
    """Latents (…, D) and one-hot (…, S, C) of steps of this shape, one record a step; arrays or tensors."""
    (D, S, C), deter, stoch = latent, _array(deter), _array(stoch)
    if deter.shape != (*shape, D) or stoch.shape != (*shape, S, C):
        raise ReplayError(
            f"latents of {shape} steps have the shapes {deter.shape} and {stoch.shape}, not (…, {D}) and (…, {S}, {C})"
        )
    deter, stoch = deter.reshape(-1, D), stoch.reshape(-1, S, C)
    records = np.zeros(len(deter), record)
    records["deter"], records["stoch"], records["known"] = deter, stoch.argmax(-1), True
    if not np.isfinite(records["deter"]).all():
        raise ReplayError(f"latents are NaN or infinite as {records['deter'].dtype}; none of them was kept")
    square = np.einsum("...c,...c->...", stoch, stoch)  # with the largest, enough to tell, and quick
    if not ((np.abs(stoch.max(-1) - 1) < 1e-3) & (np.abs(square - 1) < 1e-2)).all():
        raise ReplayError("stoch is not one-hot; write the sampled latents, not their probabilities")
    return records


def _array(x: Any) -> np.ndarray:
    """An array on this side, from a tensor or anything like an array."""
    return x.detach().float().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
