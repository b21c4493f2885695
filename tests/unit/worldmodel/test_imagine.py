"""Imagined futures: which states they start from, what they are worth, and that they can be had again."""

import math

import pytest
import torch

from grpo.config import ConfigError
from grpo.core.advantages import reward_to_go
from grpo.protocols import CollectRequest
from grpo.worldmodel.imagine import Futures, Imagination, own_rewards
from grpo.worldmodel.model.rssm import Latent
from grpo.worldmodel.returns import Critic, ReturnNormalizer, as_rewards, discounted, lambda_returns
from tests.unit.worldmodel.worlds import generator, make

GAMMA = 0.9


@pytest.fixture(scope="module")
def agent():
    trainer = make()
    trainer.step()
    yield trainer
    trainer.source.close()


def futures(agent, count=6, group=4, horizon=7, seed=0):
    model = agent.source.learner.model
    size = model.size
    one_hot = torch.eye(size.classes)[torch.randint(size.classes, (count, size.stoch), generator=generator(seed))]
    start = Latent(torch.randn(count, size.deter, generator=generator(seed)), one_hot)
    return start, Imagination(model, agent.policy)(start, group, horizon, generator(3))


def test_the_futures_of_a_group_begin_in_one_state_and_part(agent):
    start, found = futures(agent)
    assert found.flat.shape == (24, 8, agent.source.learner.model.flat_width)
    for p in range(6):
        group = found.flat[4 * p : 4 * p + 4]
        assert all(torch.equal(row, start.flat[p]) for row in group[:, 0])
        assert not torch.equal(group[0, -1], group[1, -1])
    assert found.action_NH.shape == found.reward_NH.shape == found.continue_NH.shape == (24, 7)
    assert not found.flat.requires_grad and not found.logp_NH.requires_grad


def test_the_same_generator_gives_the_same_futures(agent):
    one, other = futures(agent)[1], futures(agent)[1]
    assert torch.equal(one.flat, other.flat) and torch.equal(one.action_NH, other.action_NH)


def test_many_at_once_are_one_at_a_time(agent):
    """A step of the loop is the model's own step with the actions that were drawn."""
    _, found = futures(agent, group=2, horizon=3)
    model, actions = agent.source.learner.model, agent.policy.actions
    uniform = torch.rand(3, 12, model.size.stoch, generator=generator(3))
    for t in range(3):
        led = model.rssm.imagine_step(found.latent[:, t], actions.code(found.action_NH[:, t]), uniform[t])
        torch.testing.assert_close(led.deter, found.latent.deter[:, t + 1])
        assert torch.equal(led.stoch, found.latent.stoch[:, t + 1])


def test_weights_are_the_chance_to_get_there_discounted(agent):
    _, found = futures(agent)
    weight = found.weight_NH(GAMMA)
    assert torch.equal(weight[:, 0], torch.ones(24))
    by_hand = math.prod(GAMMA * float(c) for c in found.continue_NH[5, :4])
    assert float(weight[5, 4]) == pytest.approx(by_hand, rel=1e-5)


# --- returns --------------------------------------------------------------------------------------------------------


def given(seed=0, rows=5, steps=6):
    reward = torch.randn(rows, steps, generator=generator(seed))
    continues = torch.rand(rows, steps, generator=generator(seed + 1))
    value = torch.randn(rows, steps, generator=generator(seed + 2))
    return reward, continues, value


def test_returns_are_what_a_loop_by_hand_gives():
    reward, continues, value = given()
    found = lambda_returns(reward, continues, value, value[:, -1], GAMMA, 0.8)
    for n in range(5):
        ahead = float(value[n, -1])
        for t in reversed(range(6)):
            ahead = float(reward[n, t]) + GAMMA * float(continues[n, t]) * (0.2 * float(value[n, t]) + 0.8 * ahead)
            assert float(found[n, t]) == pytest.approx(ahead, rel=1e-4, abs=1e-5)


def test_rewards_made_of_returns_sum_to_them_in_the_hall():
    """With the certain chance to go on they are the rewards themselves."""
    reward, continues, _ = given()
    nothing = torch.zeros(5)
    returns = discounted(reward, continues, nothing, GAMMA)
    mask = torch.ones(5, 6, dtype=torch.bool)
    torch.testing.assert_close(reward_to_go(as_rewards(returns, GAMMA), mask, GAMMA).float(), returns)
    sure = discounted(reward, torch.ones(5, 6), nothing, GAMMA)
    torch.testing.assert_close(as_rewards(sure, GAMMA), reward, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("credit", ["reward_to_go", "trajectory"])
def test_the_hall_sees_the_discounted_weighted_return_of_the_first_decision(credit):
    trainer = make(credit=credit, scale="none", return_scale="none", gamma=GAMMA)
    source = trainer.source
    rollouts = source.collect(CollectRequest(0)).rollouts
    last = source._last
    expected = (last.weight_NH(GAMMA) * last.reward_NH).sum(1)
    if credit == "trajectory":
        found = rollouts.reward_NT.sum(1)
    else:
        found = reward_to_go(rollouts.reward_NT, rollouts.mask_NT, GAMMA)[:, 0].float()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    source.close()


def test_a_range_is_at_least_one_and_follows_slowly():
    seen = ReturnNormalizer()
    assert seen.update(torch.zeros(10, 10)) == 1.0
    wide = torch.linspace(0, 100, 101)[None]
    fresh = ReturnNormalizer()
    assert fresh.update(wide) == pytest.approx(90, abs=1)
    assert fresh.update(torch.zeros(10, 10)) == pytest.approx(0.99 * 90, abs=1)


def test_a_critic_learns_the_value_of_a_state_and_its_slow_copy_follows():
    flat = torch.eye(3)[None].expand(8, 3, 3)
    returns = torch.tensor([5.0, -2.0, 0.5]).expand(8, 3)
    critic = Critic(3, 32, 1, rate=3e-3, slow_rate=0.05, seed=0)
    assert torch.equal(critic.value(flat), torch.zeros(8, 3))
    losses = [critic.learn(flat, returns, torch.ones(8, 3)) for _ in range(500)]
    assert losses[-1] < losses[0]
    torch.testing.assert_close(critic.value(flat)[0], torch.tensor([5.0, -2.0, 0.5]), atol=0.3, rtol=0)
    again = Critic(3, 32, 1, rate=3e-3, slow_rate=0.05, seed=1)
    again.load_state(critic.state())
    one, other = (c.learn(flat, returns, torch.ones(8, 3)) for c in (critic, again))
    assert one == other


def test_a_critic_s_update_that_is_not_finite_is_skipped():
    critic = Critic(3, 8, 1, rate=1e-3, slow_rate=0.05, seed=0)
    before = critic.state().arrays["network/layers.0.weight"].clone()
    critic.learn(torch.full((1, 1, 3), torch.nan), torch.ones(1, 1), torch.ones(1, 1))
    assert critic.skipped == 1 and torch.equal(before, critic.state().arrays["network/layers.0.weight"])


# --- rewards of one's own -------------------------------------------------------------------------------------------


def test_a_batch_of_futures_holds_what_the_model_believes(agent):
    _, found = futures(agent)
    batch = Futures(found, agent.source.learner.model, agent.policy)
    assert batch["action"].shape == (24, 7, 2) and batch["continue"].shape == (24, 7)
    assert "vector" not in batch and batch["vector"].shape == (24, 7, 4) and "vector" in batch


@pytest.mark.parametrize("how", ["returned", "set"])
@pytest.mark.parametrize("shape", [(24,), (24, 7)])
def test_rewards_are_returned_or_set(agent, how, shape):
    _, found = futures(agent)
    wanted = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)

    def pays(batch):
        if how == "returned":
            return wanted
        batch["rewards"] = wanted

    assert torch.equal(own_rewards(pays, Futures(found, agent.source.learner.model, agent.policy)), wanted)


@pytest.mark.parametrize("actor", ["group", "critic"])
@pytest.mark.parametrize("dense", [False, True])
def test_they_take_the_place_of_the_reward_head(actor, dense):
    """Action 1 pays, and soon nothing else is done."""

    def pays(batch):
        return batch["action"][..., 1] if dense else batch["action"][..., 1].sum(1)

    still = {"train_ratio": 0, "pretrain": None}  # a world need not be learned for that
    trainer = make(reward_fn=pays, actor=actor, learning_rate=0.01, groups_per_step=16, **still)
    reports = [trainer.step() for _ in range(25)]
    chosen = reports[-1].experience.rollouts.inputs["action"].float().mean()
    assert float(chosen) > 0.8
    assert reports[-1]["imagined/return"] > reports[0]["imagined/return"]
    trainer.source.close()


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gae_lambda": 0.9}, "gae_lambda has no effect here: it needs actor=critic"),
        ({"slow_rate": 0.1}, "slow_rate has no effect here: it needs actor=critic or tail=critic"),
        ({"return_scale": "none"}, "return_scale has no effect here: it needs scale=none"),
        ({"adapt": "actor"}, "adapt has no effect here: it needs adapter_rank"),
        ({"adapter_rank": 4}, "say with init_from whose they are"),
        ({"train_ratio": 0, "pretrain": 5}, "pretrain has no effect here"),
        ({"vector": "serial", "workers": 2}, "workers has no effect here: it needs vector=processes"),
        ({"actor": "critic", "baseline": "group_mean"}, "actor=critic brings its own baseline"),
        ({"baseline": "given"}, "baseline=given needs actor=critic"),
        ({"credit": "per_reward"}, "credit=per_reward needs several rewards"),
        ({"size": "2m"}, "size='2m' is not one of 0.5m, 1m, 4m"),
        ({"replay_capacity": 10}, "replay_capacity=10 is too small"),
        ({"beta": 0.1, "kl_estimator": "exact"}, "kl_estimator=exact is KL"),
        ({"horizonn": 3}, "unknown setting 'horizonn'; did you mean \"horizon\"?"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_remedy(settings, message):
    with pytest.raises(ConfigError) as error:
        make(**{"workers": None, "pretrain": None} | settings)
    assert message in str(error.value)


def test_an_environment_that_is_made_already_is_refused():
    import gymnasium as gym

    with pytest.raises(TypeError, match="pass the environment's id, or a function that makes it"):
        make(gym.make("CartPole-v1"))
