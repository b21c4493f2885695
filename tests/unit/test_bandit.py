"""The smallest room: payoffs, metrics by hand, the same numbers again, stop and go on, settings that are refused."""

import json
import math

import pytest
import torch

from grpo.bandit import BanditConfig, BanditSource, SoftmaxPolicy, make_trainer
from grpo.config import ConfigError
from grpo.protocols import CollectRequest, State
from grpo.reference import FrozenReference

LOGITS = torch.tensor([0.5, -1.0, 0.25, 2.0, 0.0])


def source(**settings) -> BanditSource:
    return BanditSource(SoftmaxPolicy(LOGITS), BanditConfig(**settings))


def logits(trainer) -> list[float]:
    return trainer.policy.parameters()["logits"].tolist()


# --- payoffs and sampling -------------------------------------------------------------------------------------------


def test_payoffs_change_every_twenty_steps():
    config = BanditConfig()
    assert [config.phase(step) for step in (0, 19, 20, 39, 40, 60, 80, 99)] == [0, 0, 1, 1, 2, 3, 4, 4]
    assert config.phase(100) == 0, "after the last phase the first comes again"
    flat = (0.4,) * 5
    assert config.payoffs == (flat, (0.1, 0.2, 0.0, 0.8, 0.3), flat, (0.7, 0.1, 0.3, 0.2, 0.0), flat)
    assert config.arms == 5


@pytest.mark.parametrize("step", [0, 25, 70])
def test_each_arm_pays_what_its_phase_says(step):
    rollouts = source().collect(CollectRequest(step)).rollouts
    payoff = BanditConfig().payoffs[step // 20]
    assert rollouts.reward_N.tolist() == pytest.approx([payoff[arm] for arm in rollouts.inputs.tolist()])
    expected = LOGITS.log_softmax(0)[rollouts.inputs][:, None]
    torch.testing.assert_close(rollouts.old_logp_NT, expected)


def test_arms_are_drawn_with_the_policys_probabilities():
    count = 20_000
    arms = source(group_size=count).collect(CollectRequest(3)).rollouts.inputs
    p = LOGITS.softmax(0)
    spread = (p * (1 - p) / count).sqrt()
    assert ((arms.bincount(minlength=5) / count - p).abs() < 4 * spread).all()


def test_noise_has_the_given_deviation_and_no_bias():
    rewards = source(noise=0.3, group_size=20_000).collect(CollectRequest(0)).rollouts.reward_N
    assert float(rewards.mean()) == pytest.approx(0.4, abs=0.01)
    assert float(rewards.std()) == pytest.approx(0.3, abs=0.01)


def test_randomness_comes_from_seed_step_and_attempt_alone():
    def arms(room, *request):
        return room.collect(CollectRequest(*request)).rollouts.inputs.tolist()

    used = source()
    for step in range(5):
        used.collect(CollectRequest(step))
    assert arms(used, 7) == arms(source(), 7)
    draws = [arms(source(), 7), arms(source(), 8), arms(source(), 7, 1), arms(source(seed=1), 7)]
    assert len({tuple(draw) for draw in draws}) == 4


def test_groups_are_numbered_by_start():
    collected = source(groups_per_step=3, group_size=4).collect(CollectRequest(0))
    assert collected.rollouts.group_N.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert len(collected.starts) == 3
    again = source(groups_per_step=3, group_size=4).collect(CollectRequest(0, 1, ["a", "b"]))
    assert again.rollouts.group_N.tolist() == [0] * 4 + [1] * 4
    assert list(again.starts) == ["a", "b"]


# --- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_by_hand():
    room = BanditSource(SoftmaxPolicy(torch.log(torch.tensor([0.1, 0.2, 0.3, 0.3, 0.1]))), BanditConfig())
    room.collect(CollectRequest(20))
    metrics = room.metrics()
    # best 0.8; 0.1·0.1 + 0.2·0.2 + 0.3·0.0 + 0.3·0.8 + 0.1·0.3 = 0.32
    assert metrics["regret"] == pytest.approx(0.48)
    assert metrics["best_arm_probability"] == pytest.approx(0.3)
    assert (metrics["best_arm"], metrics["phase"]) == (3.0, 1.0)
    assert [metrics[f"arm_probability/{arm}"] for arm in range(5)] == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.1])
    room.collect(CollectRequest(21))
    assert room.metrics()["regret_total"] == pytest.approx(0.96)
    room.collect(CollectRequest(21, 1))
    assert room.metrics()["regret_total"] == pytest.approx(0.96), "the same step again is not counted again"


def test_a_flat_phase_has_no_best_arm_and_no_regret():
    room = source()
    room.collect(CollectRequest(0))
    assert room.metrics()["regret"] == 0.0
    assert room.metrics()["best_arm"] is None
    assert room.metrics()["best_arm_probability"] is None


def test_arms_that_pay_the_best_alike_are_all_best():
    room = BanditSource(SoftmaxPolicy(torch.zeros(4)), BanditConfig(payoffs=[[1, 0, 1, 0]]))
    room.collect(CollectRequest(0))
    assert room.metrics()["best_arm_probability"] == pytest.approx(0.5)


def test_uniform_play_costs_19_point_2():
    room = BanditSource(SoftmaxPolicy(torch.zeros(5)), BanditConfig())
    for step in range(100):
        room.collect(CollectRequest(step))
    assert room.metrics()["regret_total"] == pytest.approx(19.2)


def test_metrics_are_of_the_policy_that_sampled():
    trainer = make_trainer(BanditConfig())
    reports = trainer.train(steps=22)
    first = reports[20]  # the first step with a best arm: the policy has seen nothing yet
    assert first["best_arm_probability"] == pytest.approx(0.2)
    assert first["regret"] == pytest.approx(0.8 - 0.28)
    assert reports[21]["best_arm_probability"] > 0.5


# --- learning rule --------------------------------------------------------------------------------------------------


def test_a_flat_phase_moves_nothing_but_the_decay():
    trainer = make_trainer(BanditConfig())
    with torch.no_grad():
        trainer.policy.parameters()["logits"].copy_(LOGITS)
    trainer.step()
    assert logits(trainer) == pytest.approx((LOGITS * (1 - 5 * 0.02)).tolist())


@pytest.mark.parametrize("settings", [{}, {"loss_type": "dr_grpo"}, {"optimizer": "adamw", "learning_rate": 2.0}])
def test_first_update_by_hand(settings):
    config = BanditConfig(payoffs=[[0.1, 0.2, 0.0, 0.8, 0.3]], **settings)
    trainer = make_trainer(config)
    rollouts = trainer.step().experience.rollouts
    reward, arm = rollouts.reward_N.double(), rollouts.inputs
    advantage = reward - reward.mean()
    if config.loss_type == "grpo":
        advantage = advantage / (reward.std() + 1e-4)
    onehot = torch.nn.functional.one_hot(arm, 5).double()
    ascent = (advantage[:, None] * (onehot - 0.2)).mean(0)
    step = 5 * ascent if config.optimizer == "sgd" else 2 * ascent.sign()
    assert logits(trainer) == pytest.approx(step.tolist(), rel=1e-5)


def test_entropy_is_exact():
    rollouts = source().collect(CollectRequest(0)).rollouts
    p = LOGITS.softmax(0)
    scores = SoftmaxPolicy(LOGITS).score(rollouts, entropy=True)
    torch.testing.assert_close(scores.entropy_NT, torch.full((32, 1), float(-(p * p.log()).sum())))
    assert SoftmaxPolicy(LOGITS).score(rollouts).entropy_NT is None


def test_rows_in_parts_give_the_same_weights():
    whole, parts = (make_trainer(BanditConfig(rows_per_microbatch=rows)) for rows in (None, 5))
    whole.train(steps=30), parts.train(steps=30)
    assert logits(parts) == pytest.approx(logits(whole), rel=1e-4, abs=1e-5)


# --- reference ------------------------------------------------------------------------------------------------------


def test_no_reference_without_beta():
    assert make_trainer(BanditConfig()).reference is None
    assert isinstance(make_trainer(BanditConfig(beta=0.1)).reference, FrozenReference)


def test_reference_stays_until_it_is_synced():
    policy = SoftmaxPolicy(LOGITS)
    reference = FrozenReference.copy_of(policy)
    rows = source().collect(CollectRequest(0)).rollouts
    torch.testing.assert_close(reference.score(rows), policy.score(rows).logp_NT.detach())
    with torch.no_grad():
        policy.logits_V.zero_()
    assert reference.parameters()["logits"].tolist() == LOGITS.tolist()
    reference.sync(policy.parameters(), 0.25)
    torch.testing.assert_close(reference.parameters()["logits"], 0.75 * LOGITS)
    assert not reference.parameters()["logits"].requires_grad


def test_the_kl_holds_the_policy_near_its_start():
    free, held = (make_trainer(BanditConfig(beta=beta)) for beta in (0.0, 0.2))
    probability = "best_arm_probability"
    assert held.train(steps=40)[-1][probability] < free.train(steps=40)[-1][probability]


def test_a_reference_synced_every_step_is_the_policy():
    trainer = make_trainer(BanditConfig(beta=0.1, ref_sync_steps=1))
    trainer.train(steps=25)
    assert trainer.reference.parameters()["logits"].tolist() == logits(trainer)


# --- the same again, and stopping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"noise": 0.3}, {"optimizer": "adamw", "learning_rate": 2.0}])
def test_same_seed_same_weights(settings):
    one, two, other = (make_trainer(BanditConfig(seed=seed, **settings)) for seed in (4, 4, 5))
    for trainer in (one, two, other):
        trainer.train(steps=45)
    assert logits(one) == logits(two)
    assert logits(one) != logits(other)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"noise": 0.2, "beta": 0.05, "ref_sync_steps": 10, "entropy_coef": 0.01, "num_iterations": 2},
        {"optimizer": "adamw", "learning_rate": 2.0, "no_signal": "resample", "groups_per_step": 2},
    ],
    ids=["preset", "everything", "adamw"],
)
def test_stopped_at_step_37_and_resumed_is_uninterrupted(settings):
    config = BanditConfig(seed=3, **settings)
    straight = make_trainer(config)
    straight.train(steps=37)
    saved = straight.state()
    values = json.loads(json.dumps(saved.values))
    arrays = {name: array.numpy().copy() for name, array in saved.arrays.items()}
    after = straight.train(steps=63)

    resumed = make_trainer(config)
    resumed.load_state(State(values, arrays))
    again = resumed.train(steps=63)
    assert logits(resumed) == logits(straight)
    assert [dict(report) for report in again] == [dict(report) for report in after]
    assert json.dumps(resumed.state().values) == json.dumps(straight.state().values)


def test_shows_the_arm_of_each_row():
    room = source()
    rollouts = room.collect(CollectRequest(0)).rollouts
    assert room.show(rollouts.select([4, 2])) == [{"arm": int(rollouts.inputs[i])} for i in (4, 2)]
    room.close()


# --- settings that are refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"payoffs": []}, "at least one phase"),
        ({"payoffs": [[1.0, 2.0], [1.0]]}, "the same number of arms"),
        ({"payoffs": [[1.0], [2.0]]}, "at least two arms"),
        ({"payoffs": [[1.0, math.nan]]}, "payoffs.0.1: .*finite"),
        ({"payoffs": [[1.0, "much"]]}, "payoffs.0.1: .*number"),
        ({"phase_length": 0}, "phase_length: .*greater than or equal to 1"),
        ({"noise": -0.1}, "noise: .*greater than or equal to 0"),
        ({"noise": math.inf}, "noise: .*finite"),
        ({"optimizer": "adam"}, "'sgd' or 'adamw'"),
        ({"learning_rate": 250.0}, "below 1"),
        ({"weight_decay": 0.2}, "below 1"),
        ({"group_size": 1}, "group_size: .*greater than or equal to 2"),
        ({"phase_lenght": 10}, 'did you mean "phase_length"'),
    ],
)
def test_refused_in_one_line(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        BanditConfig(**settings)
    assert "\n" not in str(error.value)


def test_unknown_device_is_refused():
    with pytest.raises(ValueError, match="tpu"):
        make_trainer(BanditConfig(device="tpu"))


def test_other_spellings_are_understood():
    config = BanditConfig(num_generations=4, kl_beta=0.02)
    assert (config.group_size, config.algorithm.beta) == (4, 0.02)
