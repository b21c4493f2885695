"""From rewards to advantages and masks, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from grpo import bandit
from grpo.credit import advantages
from grpo.experience import Experience, with_gates
from grpo.recipes import recipe
from grpo.report import reward_metrics
from grpo.rollouts import Rollouts, Scores, Status
from tests.batches import MAKERS


def record(make=torch.as_tensor, steps=1, **changes):
    rows = len(next(iter(changes.values())))
    base = {
        "group_N": np.zeros(rows, dtype=int),
        "mask_NT": np.ones((rows, steps)),
        "old_logp_NT": -np.ones((rows, steps)),
    } | {name: np.asarray(value) for name, value in changes.items()}
    return Rollouts(**{name: make(value) for name, value in base.items()})


def column(advantage):
    return np.asarray(advantage)[:, 0]


@pytest.mark.parametrize("kind", MAKERS)
def test_grpo_by_hand(kind):
    rewards = np.array([1.0, 3.0, 2.0, 10.0, 20.0])
    got = advantages(record(MAKERS[kind], reward_N=rewards, group_N=[5, 5, 5, -2, -2]), recipe("grpo", scale_eps=0.0))
    np.testing.assert_allclose(column(got), [-1, 1, 0, -(0.5**0.5), 0.5**0.5], atol=1e-12)


def test_failed_rows_do_not_count():
    """Their reward is never read, they get nothing, and the others are compared without them."""
    rollouts = record(reward_N=[1.0, np.nan, 3.0], status_N=[0, int(Status.FAILED), 0])
    assert column(advantages(rollouts, recipe("dr_grpo"))).tolist() == [-1.0, 0.0, 1.0]
    experience = Experience.build(rollouts, recipe("grpo"))
    assert experience.mask_NT[:, 0].tolist() == [True, False, True]


def test_rows_of_one_episode_count_once():
    """Episode 0 has three turns with mean 1, episode 1 one turn with 4: the baseline is 2.5, not 1.75."""
    rollouts = record(reward_N=[0.0, 1.0, 2.0, 4.0], episode_N=[0, 0, 0, 1])
    assert column(advantages(rollouts, recipe("dr_grpo"))).tolist() == [-1.5, -1.5, -1.5, 1.5]
    assert column(advantages(rollouts, recipe("rloo"))).tolist() == [-3.0, -3.0, -3.0, 3.0]


def test_dense_and_final_rewards_add_up():
    rollouts = record(steps=2, reward_N=[1.0, 0.0], reward_NT=np.array([[1.0, 1.0], [0.0, 5.0]]))
    assert column(advantages(rollouts, recipe("dr_grpo"))).tolist() == [-1.0, 1.0]


def test_reward_to_go_is_compared_at_the_same_step():
    """The second try ended after one step: at step 1 nobody is left to compare the first with."""
    rollouts = record(
        steps=2,
        reward_NT=np.array([[1.0, 2.0], [1.0, 9.0], [0.0, 4.0]]),
        mask_NT=np.array([[1, 1], [1, 0], [1, 1]]),
    )
    got = advantages(rollouts, recipe("grpo", credit="reward_to_go", scale="none"))
    # returns: [3, 2], [1, -], [4, 4]; means: 8/3 at step 0, 3 at step 1
    np.testing.assert_allclose(np.asarray(got), [[1 / 3, -1], [-5 / 3, 0], [4 / 3, 1]])
    half = advantages(rollouts, recipe("grpo", credit="reward_to_go", scale="none", gamma=0.5))
    # returns: [2, 2], [1, -], [2, 4]
    np.testing.assert_allclose(np.asarray(half), [[1 / 3, -1], [-2 / 3, 0], [1 / 3, 1]])


def test_final_reward_lands_on_the_last_decision():
    rollouts = record(steps=3, reward_N=[1.0, 0.0], mask_NT=np.array([[1, 1, 0], [1, 0, 1]]))
    got = advantages(rollouts, recipe("grpo", credit="reward_to_go", baseline="none", scale="none", gamma=0.5))
    np.testing.assert_allclose(np.asarray(got), [[0.5, 1, 0], [0, 0, 0]])


def test_groups_inside_trajectories():
    """group_NT: decisions are compared with those that share an anchor, wherever they stand."""
    rollouts = record(steps=2, reward_N=[0.0, 2.0], group_NT=np.array([[7, 8], [9, 7]]))
    got = advantages(rollouts, recipe("dr_grpo"))
    assert np.asarray(got).tolist() == [[-1.0, 0.0], [0.0, 1.0]]


def test_a_given_baseline_is_taken_off():
    baseline = np.array([[0.5, 0.25], [1.0, 1.0]])
    rollouts = record(steps=2, reward_N=[1.0, 1.0], baseline_NT=baseline)
    got = advantages(rollouts, recipe("grpo", baseline="given", scale="none"))
    np.testing.assert_allclose(np.asarray(got), 1.0 - baseline)
    with pytest.raises(ValueError, match="needs baseline_NT"):
        advantages(record(reward_N=[0.0, 1.0]), recipe("grpo", baseline="given"))


def test_kl_in_the_reward_is_taken_off_before_the_comparison():
    rollouts = record(steps=2, reward_N=[1.0, 1.0], old_logp_NT=np.array([[-1.0, -1.0], [-1.0, -3.0]]))
    ref = torch.full((2, 2), -2.0, dtype=torch.float64)
    got = advantages(rollouts, recipe("rloo", beta=0.5), ref)
    # k1 sums: 2 and 0; rewards 0 and 1; against each other
    assert column(got).tolist() == [-1.0, 1.0]
    assert rollouts.reward_N.tolist() == [1.0, 1.0]  # no stage overwrites an earlier one


def test_reward_parts_are_weighted_and_none_means_no_opinion():
    parts = np.array([[1.0, 0.0], [np.nan, 4.0], [np.nan, np.nan], [3.0, 0.0]])
    rollouts = record(reward_parts_NK=parts)
    got = advantages(rollouts, recipe("dr_grpo", reward_weights=(1.0, 0.5)))
    assert column(got).tolist() == [-1.0, 0.0, 0.0, 1.0]  # rewards 1, 2, none, 3
    with pytest.raises(ValueError, match="reward_weights has 3 entries for 2 reward parts"):
        advantages(rollouts, recipe("dr_grpo", reward_weights=(1.0, 1.0, 1.0)))


def test_one_reward_is_its_own_only_part():
    single = advantages(record(reward_N=[0.0, 1.0, 5.0]), recipe("gdpo"))
    assert (
        column(single).tolist()
        == column(advantages(record(reward_parts_NK=[[0.0], [1.0], [5.0]]), recipe("gdpo"))).tolist()
    )


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ValueError, match="needs rewards ≥ 0, got -1"):
        advantages(record(reward_N=[-1.0, 1.0]), recipe("maxrl"))


def test_maxrl_divides_by_the_success_rate():
    got = advantages(record(reward_N=[1.0, 0.0, 0.0, 0.0]), recipe("maxrl", scale_eps=0.0))
    assert column(got).tolist() == [3.0, -1.0, -1.0, -1.0]


def test_truncated_rows_and_groups_without_signal_leave_the_mask():
    rollouts = record(
        reward_N=[1.0, 0.0, 1.0, 1.0],
        group_N=[0, 0, 1, 1],
        status_N=[int(Status.TRUNCATED), 0, 0, 0],
    )
    experience = Experience.build(rollouts, recipe("dapo"))
    assert experience.mask_NT[:, 0].tolist() == [False, True, False, False]
    assert experience.denominators.tokens == 1.0
    assert Experience.build(rollouts, recipe("grpo")).denominators.tokens == 4.0


def test_beta_without_a_reference_says_what_to_do():
    with pytest.raises(ValueError, match=r"beta=0.1 needs reference log-probs: pass ref_logp_NT, or set beta=0"):
        Experience.build(record(reward_N=[0.0, 1.0]), recipe("grpo", beta=0.1))
    with pytest.raises(ValueError, match=r"ref_logp_NT: row 1, decision 0 is nan"):
        reference = torch.tensor([[0.0], [float("nan")]], dtype=torch.float64)
        Experience.build(record(reward_N=[0.0, 1.0]), recipe("grpo", beta=0.1), reference)


def test_minibatch_counts_anew_and_micro_batch_does_not():
    rollouts = record(steps=3, reward_N=[0.0, 1.0, 2.0, 3.0])
    experience = Experience.build(rollouts, recipe("grpo"))
    assert experience.minibatch([0, 1], recipe("grpo")).denominators[:2] == (6.0, 2.0)
    assert experience.select([0, 1]).denominators[:2] == (12.0, 4.0)
    assert experience.select([3, 1]).advantage_NT[:, 0].tolist() == experience.advantage_NT[[3, 1], 0].tolist()


def test_gates_need_what_they_read():
    experience = Experience.build(record(reward_N=[0.0, 1.0]), recipe("grpo"))
    scores = Scores(experience.rollouts.old_logp_NT)
    with pytest.raises(ValueError, match="needs a policy that gives entropies"):
        with_gates(experience, scores, recipe("grpo", top_entropy=0.5))
    with pytest.raises(ValueError, match="pass priority_NT"):
        with_gates(experience, scores, recipe("clip_cov"))


def test_a_failed_row_leaves_its_episode_s_mean_alone():
    rollouts = record(reward_N=[2.0, np.nan, 4.0], episode_N=[0, 0, 1], status_N=[0, int(Status.FAILED), 0])
    assert column(advantages(rollouts, recipe("dr_grpo"))).tolist() == [-1.0, 0.0, 1.0]


def test_dropped_groups_leave_the_denominators():
    rollouts = record(reward_N=[1.0, 1.0, 0.0, 1.0], group_N=[0, 0, 1, 1])
    assert Experience.build(rollouts, recipe("grpo", drop_no_signal=True)).denominators.rows == 2.0
    assert Experience.build(rollouts, recipe("grpo")).denominators.rows == 4.0


def test_a_fixed_length_is_not_the_padding():
    wide = record(steps=3, reward_N=[0.0, 1.0])
    with pytest.raises(ValueError, match="needs length, the longest a trajectory may be"):
        Experience.build(wide, recipe("dr_grpo"))
    assert Experience.build(wide, recipe("dr_grpo", length=8.0)).denominators.length == 8.0


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        ({"group_NT": np.zeros((2, 1), dtype=int)}, {"credit": "per_reward"}, "cannot compare inside trajectories"),
        ({"group_NT": np.zeros((2, 1), dtype=int)}, {"baseline": "length_weighted"}, "inside trajectories"),
        ({"group_NT": np.zeros((2, 1), dtype=int)}, {"whiten": "rows"}, "use whiten=decisions"),
        ({"baseline_NT": np.zeros((2, 1))}, {"baseline": "given", "whiten": "rows"}, "use whiten=decisions"),
        ({"reward_parts_NK": np.zeros((2, 2))}, {"credit": "per_reward"}, "give every reward as a part"),
        ({"episode_N": [0, 1]}, {"credit": "reward_to_go"}, "episode_N needs credit=trajectory"),
        ({}, {"reward_weights": (1.0,)}, "reward_weights needs reward_parts_NK"),
    ],
)
def test_what_a_record_cannot_mean_is_refused(fields, changes, message):
    with pytest.raises(ValueError, match=message):
        advantages(record(reward_N=[0.0, 1.0], **fields), recipe("grpo", **changes))


def test_rows_as_arrays_and_lists_select_the_same():
    experience = Experience.build(record(reward_N=[0.0, 1.0, 2.0]), recipe("grpo"))
    for rows in ([0, 2], np.array([0, 2]), torch.tensor([0, 2]), range(0, 3, 2)):
        assert experience.select(rows).rollouts.reward_N.tolist() == [0.0, 2.0]
    assert experience.select(range(3)) is experience


def lost(**settings):
    """Three groups: whole, one member left of two, one member from the beginning."""
    failed = int(Status.FAILED)
    rollouts = Rollouts(
        group_N=torch.tensor([0, 0, 1, 1, 2]),
        mask_NT=torch.ones(5, 2, dtype=torch.bool),
        old_logp_NT=torch.zeros(5, 2),
        reward_N=torch.tensor([0.0, 1.0, 1.0, float("nan"), 1.0]),
        status_N=torch.tensor([0, 0, 0, failed, 0]),
    )
    chosen = recipe("grpo", beta=0.0, **settings)
    return Experience.build(rollouts, chosen), reward_metrics(rollouts, chosen)


def test_a_group_with_one_member_left_is_dropped_and_counted():
    experience, metrics = lost()
    assert experience.present_N.tolist() == [True, True, False, False, True]
    assert experience.mask_NT.any(1).tolist() == [True, True, False, False, True]
    assert metrics["groups_dropped"] == 1.0


def test_where_members_are_not_compared_one_is_enough():
    experience, metrics = lost(baseline="none")
    assert experience.present_N.all() and experience.mask_NT.any(1).tolist() == [True, True, True, False, True]
    assert "groups_dropped" not in metrics


@pytest.mark.parametrize(("name", "told"), [
    ("remax", "baseline=greedy needs a greedy try of every start, which the language room has"),
    ("otb", "baseline=optimal_token needs energy_NT, which the language room gives; elsewhere use group_mean"),
    ("gigpo", "turn_coef compares turns of conversations: give tools or an environment"),
])  # fmt: skip
def test_a_recipe_that_needs_what_is_not_there_says_what(name, told):
    with pytest.raises(ValueError, match=told):
        bandit.make_trainer(bandit.BanditConfig(loss_type=name)).step()
