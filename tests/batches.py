"""Made-up batches with every awkward part: ragged groups, holes, an empty row, a group without signal, garbage."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from grpo.experience import Experience
from grpo.recipes import RECIPES, Recipe
from grpo.rollouts import Rollouts, Taught

try:
    import jax
    import jax.numpy as jnp
except ImportError:  # a machine with a GPU and without JAX can still run tests/gpu
    MAKERS = {"numpy": np.asarray, "torch": torch.as_tensor}
else:
    jax.config.update("jax_enable_x64", True)
    MAKERS = {"numpy": np.asarray, "torch": torch.as_tensor, "jax": jnp.asarray}


def numbers(
    seed: int, groups: tuple[int, ...] = (4, 3, 5, 1), steps: int = 6, dtype: Any = np.float64
) -> dict[str, Any]:
    """Arrays of one batch; values outside the mask are garbage on purpose."""
    rng = np.random.default_rng(seed)
    rows = sum(groups)
    mask = rng.random((rows, steps)) < 0.8
    mask[0] = False
    old = -rng.random((rows, steps)) * 3 - 0.05
    reward = rng.random(rows)
    reward[: groups[0]] = 0.3
    parts = np.stack([reward, np.round(rng.random(rows), 1)], axis=1)
    x = {
        "group": np.repeat(np.arange(len(groups)), groups),
        "mask": mask,
        "old": old,
        "logp": np.minimum(old + rng.normal(size=old.shape) * 0.4, -0.01),
        "ref": np.minimum(old + rng.normal(size=old.shape) * 0.4, -0.01),
        "sampled": old + rng.normal(size=old.shape) * 0.2,
        "entropy": rng.random(old.shape) * 2,
        "parts": parts,
        "priority": rng.random(old.shape),
        "status": rng.integers(0, 4, rows) % 4,
    }
    x["status"][x["status"] == 1] = 0
    x["told"] = np.cumsum(~mask, axis=1) % 3
    x["teacher"] = np.minimum(old + rng.normal(size=old.shape) * 0.4, -0.01)
    for name in ("choices", "teacher_choices"):
        logits = rng.normal(size=(*old.shape, 7))
        x[name] = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[..., :5].astype(dtype)
    for name in ("old", "logp", "ref", "sampled", "entropy", "teacher"):
        x[name] = np.where(mask, x[name], 1e6).astype(dtype)
    return x | {"parts": parts.astype(dtype), "priority": x["priority"].astype(dtype)}


def rollouts(x: dict[str, Any], make: Any, recipe: Recipe | None = None, **more: Any) -> Rollouts:
    """The batch as a record of one kind of array."""
    return Rollouts(
        group_N=make(x["group"]),
        mask_NT=make(x["mask"]),
        old_logp_NT=make(x["old"]),
        reward_parts_NK=make(x["parts"]),
        sampled_logp_NT=make(x["sampled"]),
        status_N=make(x["status"]),
        **{**_asked(x, make, recipe), **more},
    )


def _asked(x: dict[str, Any], make: Any, recipe: Recipe | None) -> dict[str, Any]:
    """What a room would add because this recipe asks for it."""
    if recipe is None:
        return {}
    turned = {"group_NT": make(x["group"][:, None] * 10 + x["told"])} if recipe.turn_coef else {}
    outside = recipe.baseline in ("greedy", "role_mean", "optimal_value")
    judged = {"baseline_NT": make(x["entropy"])} if outside else {}
    return turned | judged | ({"energy_NT": make(x["entropy"])} if recipe.baseline == "optimal_token" else {})


def taught(batch: Experience, x: dict[str, Any], make: Any, recipe: Recipe) -> Experience:
    """The batch with what a teacher says, where the recipe has one."""
    if not recipe.teacher_coef:
        return batch
    choices = make(x["teacher_choices"][..., : recipe.teacher_top_k])
    return batch.taught(Taught(make(x["teacher"]), make(np.zeros(tuple(choices.shape), int)), choices), recipe)


def loaded(name: str) -> Recipe:
    """A recipe with every term that can be added to it switched on: KL, entropy bonus, gates."""
    row = RECIPES[name]
    picks = row.ratio not in ("chunk", "trajectory")
    return row.but(
        length=8.0 if row.reduction == "fixed_length" else None,
        beta=0.04,
        entropy_coef=0.01,
        off_policy_threshold=0.1,
        mismatch="truncate",
        mismatch_high=1.2,
        top_entropy=0.6 if picks else 1.0,
        clip_cov=0.2 if row.clip_cov else 0.0,
        clip_cov_low=0.0,
        kl_cov=0.2 if row.kl_cov else 0.0,
    )
