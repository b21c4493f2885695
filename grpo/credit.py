"""Rewards → advantages: each try against its group, or each decision, or each turn. Rewards are read, not changed."""

from __future__ import annotations

from grpo.core import advantages as adv
from grpo.core import gates, kl
from grpo.core.arrays import Array, astype, clip, masked, namespace, row_count, row_sum, wide, zeros
from grpo.recipes import Recipe
from grpo.rollouts import Rollouts

_FROM_ROOM = ("given", "greedy", "role_mean", "optimal_value")  # baselines that come with the rollouts


def advantages(rollouts: Rollouts, recipe: Recipe, ref_logp_NT: Array | None = None) -> Array:
    """advantage_NT: each try against its group, 0 where nothing was decided. Rewards are not changed, only read."""
    _expect_meaning(rollouts, recipe)
    inside = rollouts.group_NT is not None and not recipe.turn_coef
    if recipe.credit == "reward_to_go":
        advantage_NT = _per_step(rollouts, recipe, ref_logp_NT)
    elif inside or recipe.baseline in _FROM_ROOM:
        reward_N, weight_N = trajectory_reward(rollouts, recipe, ref_logp_NT)
        value_NT = masked(reward_N[:, None] * _ones(rollouts), rollouts.mask_NT)
        advantage_NT = _compare_decisions(value_NT, rollouts, recipe, weight_N)
    else:
        advantage_NT = trajectory_advantages(rollouts, recipe, ref_logp_NT)[:, None] * _ones(rollouts)
        if recipe.turn_coef:
            advantage_NT = advantage_NT + recipe.turn_coef * _per_turn(rollouts, recipe, ref_logp_NT)
    counted_NT = rollouts.mask_NT & rollouts.scored_N[:, None]
    if recipe.whiten == "decisions":
        return adv.whiten(advantage_NT, counted_NT, None, recipe.whiten_ddof, recipe.whiten_eps, recipe.whiten_root)
    return masked(advantage_NT, counted_NT)


def _expect_meaning(rollouts: Rollouts, recipe: Recipe) -> None:
    """Raise where the recipe asks for something that this record cannot mean: nothing is silently left out."""
    inside = rollouts.group_NT is not None and not recipe.turn_coef
    given = recipe.baseline in _FROM_ROOM
    parts, plain = rollouts.reward_parts_NK is not None, rollouts.reward_N is not None
    dense = rollouts.reward_NT is not None
    for wrong, remedy in (
        (recipe.baseline == "given" and rollouts.baseline_NT is None, "baseline=given needs baseline_NT from the room"),
        (
            recipe.baseline == "greedy" and rollouts.baseline_NT is None,
            "baseline=greedy needs a greedy try of every start, which the language room has; elsewhere use group_mean",
        ),
        (
            recipe.baseline == "role_mean" and rollouts.baseline_NT is None,
            "baseline=role_mean needs the means of earlier tries, which a trainer keeps (baseline_NT)",
        ),
        (
            recipe.baseline == "optimal_value" and rollouts.baseline_NT is None,
            "baseline=optimal_value needs answers of the starting model to every start, which the language room has; "
            "elsewhere use group_mean",
        ),
        (
            recipe.baseline == "optimal_token" and rollouts.energy_NT is None,
            "baseline=optimal_token needs energy_NT, which the language room gives; elsewhere use group_mean",
        ),
        (
            bool(recipe.turn_coef) and rollouts.group_NT is None,
            "turn_coef compares turns of conversations: give tools or an environment (or group_NT)",
        ),
        (
            inside and recipe.baseline == "length_weighted",
            "baseline=length_weighted cannot compare inside trajectories",
        ),
        (inside and recipe.credit == "per_reward", "credit=per_reward cannot compare inside trajectories (group_NT)"),
        ((inside or given) and recipe.whiten == "rows", "whiten=rows needs one advantage a row; use whiten=decisions"),
        (
            recipe.credit == "per_reward" and parts and (plain or dense),
            "credit=per_reward: give every reward as a part",
        ),
        (recipe.credit == "reward_to_go" and rollouts.episode_N is not None, "episode_N needs credit=trajectory"),
        (recipe.reward_weights is not None and not parts, "reward_weights needs reward_parts_NK, one column a reward"),
        (
            recipe.reward_clip is not None and recipe.credit == "reward_to_go" and not (parts or plain),
            "reward_clip limits a trajectory's reward; with dense rewards alone use credit=trajectory",
        ),
    ):
        if wrong:
            raise ValueError(remedy)


def compare(
    value_M: Array,
    group_M: Array,
    weight_M: Array,
    recipe: Recipe,
    length_M: Array | None = None,
    size_M: Array | None = None,
) -> Array:
    """(value − baseline) / scale within each group; 0 where the weight is 0 or the group has a single member."""
    value_M = adv.settle_ties(value_M, group_M, weight_M, size_M)
    if recipe.baseline == "entropic":
        return adv.entropic(value_M, group_M, weight_M)
    if recipe.baseline == "length_weighted":
        baseline_M = adv.length_weighted_mean(value_M, group_M, length_M, weight_M)
    elif recipe.baseline in ("none", "optimal_token", *_FROM_ROOM):  # what there is has been taken off
        baseline_M = value_M * 0
    else:
        baseline_M = {
            "group_mean": adv.group_mean,
            "leave_one_out": adv.leave_one_out,
            "best_of_group": adv.runner_up,
        }[recipe.baseline](value_M, group_M, weight_M)
    centred_M = value_M - baseline_M
    if recipe.scale == "group_std":
        centred_M = adv.divide(
            centred_M, adv.group_std(value_M, group_M, weight_M, recipe.scale_ddof), recipe.scale_eps
        )
    elif recipe.scale == "batch_std":
        centred_M = adv.divide(centred_M, adv.batch_std(value_M, weight_M, recipe.scale_ddof), recipe.scale_eps)
    elif recipe.scale == "group_mean":
        adv.expect_not_negative(value_M, weight_M)
        centred_M = adv.divide(centred_M, adv.group_mean(value_M, group_M, weight_M), recipe.scale_eps)
    elif recipe.scale == "signal_share":
        centred_M = centred_M * adv.signal_share(gates.has_signal(value_M, group_M, weight_M), value_M)
    return masked(centred_M, weight_M > 0)


def _ones(rollouts: Rollouts) -> Array:
    like = wide(rollouts.old_logp_NT)
    return zeros(tuple(like.shape), like, 1.0)


def _kl_in_reward(rollouts: Rollouts, recipe: Recipe, ref_logp_NT: Array | None) -> Array | None:
    """β·KL of each sampled decision, for taking off the reward."""
    if not recipe.beta or recipe.kl_in != "reward" or ref_logp_NT is None:
        return None
    estimate_NT = kl.estimate(rollouts.old_logp_NT, ref_logp_NT, recipe.kl_estimator, cap=recipe.kl_cap)
    return recipe.beta * masked(estimate_NT, rollouts.mask_NT)


def _combined(rollouts: Rollouts, recipe: Recipe) -> tuple[Array | None, Array]:
    """One reward a row from its parts and its plain reward, None where neither is given; and which rows have one."""
    reward_N, valid_N = rollouts.reward_N, rollouts.scored_N
    if rollouts.reward_parts_NK is not None:
        total_N, opinion_N = adv.combine_rewards(rollouts.reward_parts_NK, _part_weights(rollouts, recipe))
        reward_N = total_N if reward_N is None else masked(wide(reward_N), valid_N) + total_N
        valid_N = valid_N & opinion_N
    return None if reward_N is None else masked(wide(reward_N), valid_N), valid_N


def reward_size(rollouts: Rollouts, recipe: Recipe) -> Array | None:
    """How large the numbers are that each row's reward is summed from: rounding is relative to these.

    None: it is not summed from anything.
    """
    if rollouts.reward_parts_NK is None and rollouts.reward_NT is None:
        return None
    valid_N = rollouts.scored_N
    size_N = _ones(rollouts)[:, 0] * 0
    xp = namespace(size_N)
    if rollouts.reward_N is not None:
        size_N = size_N + xp.abs(masked(wide(rollouts.reward_N), valid_N))
    if rollouts.reward_parts_NK is not None:
        parts_NK = wide(rollouts.reward_parts_NK) * _part_weights(rollouts, recipe)
        size_N = size_N + xp.sum(xp.abs(masked(parts_NK, ~xp.isnan(parts_NK))), axis=1)
    if rollouts.reward_NT is not None:
        size_N = size_N + row_sum(xp.abs(wide(rollouts.reward_NT)), rollouts.mask_NT)[:, 0]
    return masked(size_N, valid_N)


def left_alone(rollouts: Rollouts, recipe: Recipe, weight_N: Array) -> Array:
    """Rows that are dropped with their group: tries failed, and fewer than two are left to be compared."""
    if recipe.baseline in ("none", *_FROM_ROOM) or not recipe.outcome_coef:
        return weight_N != weight_N
    return gates.left_alone(weight_N, rollouts.group_N)


def _part_weights(rollouts: Rollouts, recipe: Recipe) -> Array:
    parts_NK = wide(rollouts.reward_parts_NK)
    weights = recipe.reward_weights or (1.0,) * parts_NK.shape[1]
    if len(weights) != parts_NK.shape[1]:
        raise ValueError(f"reward_weights has {len(weights)} entries for {parts_NK.shape[1]} reward parts")
    xp = namespace(parts_NK)
    return astype(xp.asarray(weights), parts_NK)


def trajectory_reward(rollouts: Rollouts, recipe: Recipe, ref_logp_NT: Array | None = None) -> tuple[Array, Array]:
    """Total reward of each row, limited, less its KL; and its weight in statistics (rows of one episode count once)."""
    reward_N, valid_N = _combined(rollouts, recipe)
    if rollouts.reward_NT is not None:
        counted_NT = rollouts.mask_NT & valid_N[:, None]
        dense_N = row_sum(wide(rollouts.reward_NT), counted_NT)[:, 0]
        reward_N = dense_N if reward_N is None else reward_N + dense_N
    reward_N = clip(reward_N, *recipe.reward_clip) if recipe.reward_clip else reward_N
    penalty_NT = _kl_in_reward(rollouts, recipe, ref_logp_NT)
    if penalty_NT is not None:
        reward_N = reward_N - row_sum(penalty_NT, rollouts.mask_NT)[:, 0]
    weight_N = astype(valid_N, reward_N)
    if rollouts.episode_N is not None:
        return adv.episode_mean(reward_N, rollouts.episode_N, weight_N)
    return reward_N, weight_N


def trajectory_advantages(rollouts: Rollouts, recipe: Recipe, ref_logp_NT: Array | None = None) -> Array:
    """One advantage a row."""
    reward_N, weight_N = trajectory_reward(rollouts, recipe, ref_logp_NT)
    length_N = row_count(rollouts.mask_NT, reward_N)[:, 0]
    if recipe.credit == "per_reward" and rollouts.reward_parts_NK is not None:
        advantage_N = _per_reward(rollouts, recipe, length_N)
    else:  # a single reward is its own only part
        size_N = reward_size(rollouts, recipe)
        advantage_N = compare(reward_N, rollouts.group_N, weight_N, recipe, length_N, size_N)
    if recipe.whiten != "rows":
        return advantage_N
    return adv.whiten(
        advantage_N[:, None],
        weight_N[:, None] > 0,
        weight_N[:, None],
        recipe.whiten_ddof,
        recipe.whiten_eps,
        recipe.whiten_root,
    )[:, 0]


def _per_reward(rollouts: Rollouts, recipe: Recipe, length_N: Array) -> Array:
    """Σ_k w_k · (reward k compared by itself)."""
    parts_NK, weight_K = wide(rollouts.reward_parts_NK), _part_weights(rollouts, recipe)
    advantage_N = zeros((len(rollouts),), parts_NK)
    for k in range(parts_NK.shape[1]):
        part_N = parts_NK[:, k]
        opinion_N = astype(rollouts.scored_N & ~namespace(part_N).isnan(part_N), part_N)
        if rollouts.episode_N is not None:
            part_N, opinion_N = adv.episode_mean(part_N, rollouts.episode_N, opinion_N)
        advantage_N = advantage_N + weight_K[k] * compare(part_N, rollouts.group_N, opinion_N, recipe, length_N)
    return advantage_N


def _per_step(rollouts: Rollouts, recipe: Recipe, ref_logp_NT: Array | None) -> Array:
    """Reward-to-go of each decision against the group at the same step (or `group_NT`)."""
    reward_NT, valid_N = _dense(rollouts, recipe, ref_logp_NT)
    return_NT = adv.reward_to_go(reward_NT, rollouts.mask_NT, recipe.gamma)
    return _compare_decisions(return_NT, rollouts, recipe, astype(valid_N, return_NT))


def _per_turn(rollouts: Rollouts, recipe: Recipe, ref_logp_NT: Array | None) -> Array:
    """Reward-to-go of each turn, discounted by turns, against other turns of `group_NT`; a turn counts once."""
    reward_NT, valid_N = _dense(rollouts, recipe, ref_logp_NT)
    group_NT = rollouts.group_NT
    assert group_NT is not None  # `_expect_meaning`
    first_NT, number_NT = adv.turns(rollouts.mask_NT)
    return_NT = adv.reward_to_go(masked(adv.to_turns(reward_NT, number_NT), first_NT), first_NT, recipe.gamma)
    weight_NT = masked(astype(valid_N, return_NT)[:, None] * _ones(rollouts), first_NT)
    flat_M = compare(return_NT.reshape(-1), group_NT.reshape(-1), weight_NT.reshape(-1), recipe)
    return adv.to_turns(flat_M.reshape(return_NT.shape), number_NT)


def _dense(rollouts: Rollouts, recipe: Recipe, ref_logp_NT: Array | None) -> tuple[Array, Array]:
    """All rewards at the decisions they belong to, those of the whole trajectory at its last; and rows with any."""
    reward_N, valid_N = _combined(rollouts, recipe)
    if reward_N is not None and recipe.reward_clip:
        reward_N = clip(reward_N, *recipe.reward_clip)
    reward_NT = _ones(rollouts) * 0 if rollouts.reward_NT is None else wide(rollouts.reward_NT)
    reward_NT = masked(reward_NT, rollouts.mask_NT & valid_N[:, None])
    if reward_N is not None:
        reward_NT = reward_NT + reward_N[:, None] * astype(_last_decision(rollouts.mask_NT), reward_NT)
    penalty_NT = _kl_in_reward(rollouts, recipe, ref_logp_NT)
    return reward_NT if penalty_NT is None else reward_NT - penalty_NT, valid_N


def _compare_decisions(value_NT: Array, rollouts: Rollouts, recipe: Recipe, weight_N: Array) -> Array:
    """`compare`, decision by decision."""
    group_NT = adv.step_groups(rollouts.group_N, value_NT.shape[1]) if rollouts.group_NT is None else rollouts.group_NT
    weight_NT = masked(weight_N[:, None] * _ones(rollouts), rollouts.mask_NT)
    if recipe.baseline in _FROM_ROOM:
        value_NT = value_NT - wide(rollouts.baseline_NT)
    if recipe.baseline == "optimal_token":
        value_M = adv.settle_ties(value_NT.reshape(-1), group_NT.reshape(-1), weight_NT.reshape(-1))
        value_NT = value_M.reshape(value_NT.shape)
        value_NT = value_NT - adv.optimal_token_baseline(value_NT, rollouts.energy_NT, weight_NT > 0, rollouts.group_N)
    flat_M = compare(value_NT.reshape(-1), group_NT.reshape(-1), weight_NT.reshape(-1), recipe)
    return flat_M.reshape(value_NT.shape)


def _last_decision(mask_NT: Array) -> Array:
    xp = namespace(mask_NT)
    done_NT = xp.cumsum(mask_NT * 1, axis=1)
    return mask_NT & (done_NT == done_NT[:, -1:])
