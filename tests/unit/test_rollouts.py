"""The record is checked once, at its door; what is wrong is named by field and row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from grpo.recipes import recipe
from grpo.report import reward_metrics
from grpo.rollouts import Rollouts, Status
from tests.batches import MAKERS


def fields(make=torch.as_tensor, **changes):
    base = {
        "group_N": np.array([0, 0, 1]),
        "mask_NT": np.array([[1, 1], [1, 0], [1, 1]]),
        "old_logp_NT": -np.ones((3, 2)),
        "reward_N": np.array([0.0, 1.0, 2.0]),
    } | changes
    return {name: make(value) if isinstance(value, np.ndarray) else value for name, value in base.items()}


@pytest.mark.parametrize("kind", MAKERS)
def test_select_and_cat_round_trip(kind):
    make = MAKERS[kind]
    whole = Rollouts(**fields(make), inputs={"text": ["a", "b", "c"], "ids": make(np.arange(3))})
    parts = [whole.select([2]), whole.select([0, 1])]
    again = Rollouts.cat(parts).select([1, 2, 0])
    for name in ("group_N", "mask_NT", "old_logp_NT", "reward_N"):
        np.testing.assert_array_equal(np.asarray(getattr(again, name)), np.asarray(getattr(whole, name)))
    assert again.inputs["text"] == ["a", "b", "c"]
    assert np.asarray(again.inputs["ids"]).tolist() == [0, 1, 2]
    assert len(again) == 3


def test_cat_pads_to_the_longest():
    short = Rollouts(**fields())
    long = Rollouts(**fields(mask_NT=np.ones((3, 4)), old_logp_NT=-np.ones((3, 4))))
    both = Rollouts.cat([short, long])
    assert both.mask_NT.shape == (6, 4)
    assert not both.mask_NT[:3, 2:].any()


def test_cat_refuses_a_field_that_some_records_lack():
    with_parts = Rollouts(**fields(status_N=np.zeros(3)))
    with pytest.raises(ValueError, match="status_N is given in some"):
        Rollouts.cat([with_parts, Rollouts(**fields())])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_N": np.array([0.0, np.nan, 1.0])}, r"reward_N: row 1 is nan"),
        ({"reward_N": np.array([0.0, 1.0, np.inf])}, r"reward_N: row 2 is inf"),
        ({"old_logp_NT": np.array([[0.0, -np.inf], [0, 0], [0, 0]])}, r"old_logp_NT: row 0, decision 1 is -inf"),
        ({"reward_NT": np.array([[0.0, 0], [np.nan, 0], [0, 0]])}, r"reward_NT: row 1, decision 0 is nan"),
        ({"weight_NT": np.array([[0.0, 0], [0, 0], [0, np.nan]])}, r"weight_NT: row 2, decision 1 is nan"),
        ({"reward_N": np.zeros((3, 1))}, r"reward_N has shape \(3, 1\), expected \(3,\)"),
        ({"old_logp_NT": np.zeros((3, 4))}, r"old_logp_NT has shape \(3, 4\), expected \(3, 2\)"),
        ({"group_N": np.zeros(4, dtype=int)}, r"group_N has shape \(4,\), expected \(3,\)"),
        ({"mask_NT": np.ones(3)}, r"mask_NT has shape \(3,\), expected 2 dimension"),
        ({"mask_NT": np.array([[1, 0.5], [1, 1], [1, 1]])}, "fractional weights go into weight_NT"),
        ({"mask_NT": np.ones((0, 2))}, "nothing to learn from"),
        ({"reward_N": None}, "need a reward"),
        ({"reward_parts_NK": np.zeros((2, 1))}, r"reward_parts_NK has shape \(2, 1\), expected \(3, 1\)"),
        ({"inputs": ["a", "b"]}, "inputs has 2 entries for 3 rows"),
    ],
)
def test_bad_records_are_refused_with_the_place(changes, message):
    with pytest.raises(ValueError, match=message):
        Rollouts(**fields(**changes))


def test_group_ids_are_integers():
    with pytest.raises(TypeError, match="group_N must hold integers"):
        Rollouts(**fields(group_N=np.array([0.0, 0.0, 1.0])))


def test_one_kind_of_array():
    with pytest.raises(TypeError, match="reward_N is a numpy array, mask_NT a torch one"):
        Rollouts(**fields() | {"reward_N": np.zeros(3)})


def test_lists_are_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"convert it first"):
        Rollouts(**fields() | {"group_N": [0, 0, 1]})


def test_garbage_where_nothing_counts_is_allowed():
    old = np.array([[0.0, 0.0], [0.0, np.nan], [0.0, 0.0]])
    assert len(Rollouts(**fields(old_logp_NT=old))) == 3
    failed = np.array([int(Status.OK), int(Status.FAILED), int(Status.OK)])
    record = Rollouts(**fields(reward_N=np.array([0.0, np.nan, 1.0]), status_N=failed))
    assert record.scored_N.tolist() == [True, False, True]
    assert len(Rollouts(**fields(sampled_logp_NT=np.full((3, 2), np.nan)))) == 3


def test_records_are_frozen():
    with pytest.raises(AttributeError):
        Rollouts(**fields()).reward_N = None


def test_the_parts_of_a_reward_keep_their_names_and_are_told_by_who_named_them():
    parts_NK, names = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, np.nan]]), ["form", "truth"]
    plain, named = (
        Rollouts(**fields(reward_parts_NK=parts_NK), reward_names=x, inputs=torch.zeros(3, 2)) for x in (None, names)
    )
    assert Rollouts.cat([named.select([2]), named.select([0])]).reward_names == names
    assert named.decisions().reward_names is None and named.decisions().reward_parts_NK is None
    told = reward_metrics(plain, recipe("grpo"))
    assert (told["rewards/0/mean"], told["rewards/1/mean"]) == (1.0, 1.0)
    assert not any(name.startswith("rewards/") for name in reward_metrics(named, recipe("grpo")))
    with pytest.raises(ValueError, match="1 reward_names for 2 parts"):
        named.but(reward_names=["form"])
