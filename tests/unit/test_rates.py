"""The learning rate follows from a step's number and the run's length."""

import math

import pytest

from grpo.bandit import BanditConfig, make_trainer
from grpo.control import GRPOTrainer
from grpo.errors import ConfigError
from grpo.rates import FALLING, falling

POLE = {
    "env": "CartPole-v1", "hidden": [8], "group_size": 4, "groups_per_step": 1, "max_episode_steps": 20,
    "learning_rate": 0.01, "lr_schedule": "linear", "vector": "classic",
}  # fmt: skip


def bandit(**settings):
    return make_trainer(BanditConfig(learning_rate=0.4, optimizer="sgd", **settings))


@pytest.mark.parametrize("name", FALLING)
def test_the_formulas_are_those_of_transformers(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    dummy = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = transformers.get_scheduler(name, dummy, 0, 7).lr_lambdas[0]
    assert [falling(name)(step, 7) for step in range(9)] == pytest.approx(
        [theirs(step) if step <= 7 else 0.0 for step in range(9)]
    )


def test_a_run_takes_a_linear_schedule_to_nearly_zero_and_tells_it():
    reports = bandit(lr_schedule="linear").train(steps=4, progress=None)
    assert [report["learning_rate"] for report in reports] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    reports = bandit(lr_schedule="cosine").train(steps=2, progress=None)
    assert [report["learning_rate"] for report in reports] == pytest.approx([0.4, 0.2])
    assert "learning_rate" not in bandit().train(steps=1, progress=None)[0]


def test_the_optimizer_steps_as_far_as_the_schedule_says():
    scheduled_one, by_hand = bandit(lr_schedule="cosine"), bandit()
    scheduled_one.train(steps=3, progress=None)
    for step in range(3):
        by_hand.optimizer.param_groups[0]["lr"] = 0.4 * (1 + math.cos(math.pi * step / 3)) / 2
        by_hand.step()
    assert scheduled_one.policy.logits_V.tolist() == by_hand.policy.logits_V.tolist()


def test_a_run_that_was_cut_goes_on_with_the_rate_it_would_have_had(tmp_path):
    whole = bandit(lr_schedule="linear")
    whole.train(steps=6, progress=None, folder=tmp_path / "whole")
    cut = bandit(lr_schedule="linear")
    cut.train(steps=6, progress=None, folder=tmp_path / "cut", callbacks=[lambda report: report.step < 3])
    on = bandit(lr_schedule="linear")
    on.train(steps=6, progress=None, folder=tmp_path / "cut")
    assert on.steps_done == 6 and on.policy.logits_V.tolist() == whole.policy.logits_V.tolist()
    metrics = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "cut")]
    assert metrics[0] == metrics[1]


def test_without_a_length_there_is_no_schedule():
    with pytest.raises(ConfigError, match=r"needs to know the length of the run in steps: set run\.steps"):
        bandit(lr_schedule="linear").step()
    with pytest.raises(ConfigError, match="the length of the run in steps"):
        GRPOTrainer(**POLE).train(env_steps=100, progress=None)


def test_another_word_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match='is not one of constant, linear, cosine; did you mean "linear"'):
        bandit(lr_schedule="linaer")


def test_cleanrls_word_is_understood():
    assert BanditConfig(anneal_lr=True).lr_schedule == "linear"
    assert BanditConfig(anneal_lr=False).lr_schedule == "constant"


@pytest.mark.parametrize("compiled", [False, True])
def test_control_follows_it_compiled_or_not(compiled):
    if compiled:
        pytest.importorskip("jax")
    trainer = GRPOTrainer(**POLE, compiled=compiled, advantage="step")
    rates = [report["learning_rate"] for report in trainer.train(steps=4, progress=None)]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    assert (trainer.compiled is not None) == compiled
