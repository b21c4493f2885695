"""One, two and three ranks: the same steps."""

import math

import pytest
import torch

from grpo.recipes import RECIPES
from tests.distributed import cases


def expect_same(one, other, tolerance):
    """Metrics, gradients and weights of two runs, to rounding."""
    for mine, theirs in zip(one[0], other[0], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            if value is None or not math.isfinite(value):
                assert str(theirs[name]) == str(value), name
            else:
                assert theirs[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name  # shares are float32
    assert len(one[1]) == len(other[1])
    for mine, theirs in zip(one[1], other[1], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    for name, weight in one[2].items():
        torch.testing.assert_close(weight, other[2][name], rtol=10 * tolerance, atol=10 * tolerance)


def expect_one_two_three(pool, case, tolerance, sizes=(2, 3), **given):
    """The case on so many ranks, against one."""
    alone = pool.run(case, 1, **given)[0]
    for size in sizes:
        for found in pool.run(case, size, **given):
            expect_same(alone, found, tolerance)
    return alone


SCORED = sorted(
    name
    for name, row in RECIPES.items()
    if (row.teacher_over, row.teacher_sees) == ("sampled", "prompt")
    and row.baseline not in ("optimal_token", "greedy", "optimal_value")
    and not row.turn_coef
)
"""Recipes without a teacher or a comparison that must know the room."""


ROOM = {
    "otb": {}, "remax": {}, "opsd": {"teacher_template": "{prompt} {answer}"}, "sdpo": {},
    "gkd": {"teacher": 7}, "a_star_po": {"value_samples": 2},
    "gigpo": {"turns": True, "max_completion_length": 24, "stop": tuple("abcdefghijklm01234")},
}  # fmt: skip
"""Of the others what they need."""


@pytest.mark.parametrize("recipe", SCORED)
def test_every_recipe(pool, recipe):
    sizes = (2, 3) if recipe in ("grpo", "dapo", "gspo", "clip_cov") else (3,)
    expect_one_two_three(pool, cases.bandit, 1e-12, sizes, double=True, loss_type=recipe, num_iterations=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.1, "num_iterations": 2},
        {"groups_per_minibatch": 1, "num_iterations": 2},
        {"rows_per_minibatch": 3, "num_iterations": 2, "old_logp": "recomputed"},
        {"no_signal": "resample", "max_attempts": 3},
        {"target_kl": 1e-4, "num_iterations": 4, "learning_rate": 1.0},
        {"max_ratio": 1.0001, "num_iterations": 3, "learning_rate": 1.0},
        {"groups_per_step": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_users_own_models(pool, settings):
    alone = pool.run(cases.own_models, 1, **settings)[0]
    for size in (2, 3):
        found = pool.run(cases.own_models, size, **settings)
        for one in found:
            expect_same(alone, one, 1e-12)
        assert sum(sum(one[3]) for one in found) == sum(alone[3])  # nobody is judged twice


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "dapo"},
        {"tied": True, "num_iterations": 2, "beta": 0.1},
        {"groups_per_minibatch": 2, "num_iterations": 2},
        {"lora_rank": 2, "prompts_per_step": 2, "beta": 0.1, "ref_sync_steps": 1},
        {"no_signal": "resample", "max_attempts": 3, "warm_start_steps": 1},
        {"loss_type": "dapo", "double": False, "evaluate": False},
        {"staleness": 1.0, "engine": "inline", "steps": 3, "evaluate": False},
        *({"loss_type": name, "evaluate": False, **more} for name, more in ROOM.items()),
    ],
    ids=["dapo", "tied", "minibatches", "lora", "resample", "float32", "ahead", *ROOM],
)
def test_language(pool, settings):
    # An adapter is float32, and so are the head's products of a group that is cut, which sums them in another order.
    narrow = not settings.get("double", True) or {"lora_rank", "groups_per_minibatch"} & settings.keys()
    tolerance = 1e-6 if narrow else 1e-12
    alone = pool.run(cases.language, 1, **settings)[0]
    for size in (2, 3):
        for one in pool.run(cases.language, size, **settings):
            expect_same(alone, one, tolerance)
            assert one[3] == alone[3]


@pytest.mark.parametrize(
    "settings",
    [
        {"eval_episodes": 5},
        {"group_by": "batch", "scale_observations": True, "num_envs": 3},
        {"action_chunk": 2, "minibatches": 2, "memory": 4},
        {"group_size": 2, "groups_per_step": 1, "advantage": "critic"},
        {"env": "FrozenLake-v1", "no_signal": "resample", "max_attempts": 3, "advantage": "episode"},
        {"env": "Pendulum-v1", "action_head": "beta", "max_episode_steps": 20, "advantage": "fitted", "gamma": 0.9},
        {"env": "Pendulum-v1", "group_by": "branch", "max_episode_steps": 20, "logprob_type": "token_level"},
    ],
    ids=["start", "batch", "chunks", "one group", "resample", "beta", "branch"],
)
def test_control(pool, settings):
    settings = {"draws": "episode", **settings}
    alone = pool.run(cases.control, 1, **settings)[0]
    for size in (2, 3):
        found = pool.run(cases.control, size, **settings)
        for one in found:
            expect_same(alone, one, 1e-6)
        trunks = 2 * 3 * (size - 1) if settings.get("group_by") == "branch" else 0  # which everybody plays
        assert sum(sum(one[3]) for one in found) == sum(alone[3]) + trunks  # and nothing else twice


@pytest.mark.parametrize("settings", [{"draws": "step"}, {"group_by": "steps", "advantage": "step"}], ids=str)
def test_control_that_is_played_alike(pool, settings):
    expect_one_two_three(pool, cases.control, 1e-6, sizes=(2,), **settings)


@pytest.mark.parametrize("settings", [{}, {"groups_per_step": 2, "actor": "critic"}], ids=["four starts", "two"])
def test_worldmodel(pool, settings):
    alone = pool.run(cases.worldmodel, 1, **settings)[0]
    for size in (2, 3):
        found = pool.run(cases.worldmodel, size, **settings)
        for one in found:
            expect_same(alone, one, 1e-6)
        assert sum(sum(one[3]) for one in found) == sum(alone[3])  # no future is imagined twice
