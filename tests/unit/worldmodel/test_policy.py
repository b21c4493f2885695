"""The actor's update is the hall's objective on imagined rollouts, and nothing else moves."""

import copy

import pytest
import torch
from gymnasium import spaces

from grpo.envs.heads import make_head
from grpo.experience import Experience
from grpo.objective import objective
from grpo.protocols import CollectRequest
from grpo.reference import FrozenReference
from grpo.worldmodel.actions import Actions
from grpo.worldmodel.policy import ActorPolicy, make_network
from tests.unit.worldmodel.worlds import generator, make, same, weights

RECIPES = [
    {},
    {"loss_type": "grpo", "beta": 0.1},
    {"loss_type": "dapo"},
    {"loss_type": "gspo"},
    {"loss_type": "dr_grpo", "length": 5},
    {"actor": "critic", "entropy_coef": 0.01},
    {"entropy_coef": 0},
    {"scale": "none", "whiten": "decisions"},
    {"actor": "bootstrap"},
    {"tail": "fitted"},
    {"credit": "trajectory"},
]


@pytest.mark.parametrize("settings", RECIPES, ids=str)
def test_the_update_is_the_objective_on_the_imagined_rollouts(settings):
    """The same gradient, taken by hand with Adam's first step beside it, gives the same weights."""
    trainer = make(max_grad_norm=None, **settings)
    own, seen = copy.deepcopy(trainer.policy), []
    collect = trainer.source.collect
    trainer.source.collect = lambda request: seen.append(collect(request)) or seen[-1]
    trainer.step()
    rollouts, recipe = seen[0].rollouts, trainer.recipe
    ref = FrozenReference.copy_of(own).score(rollouts) if recipe.beta else None
    batch = Experience.build(rollouts, recipe, ref, detached=True)
    loss = objective(own.score(rollouts, entropy=bool(recipe.entropy_coef)), batch, recipe).loss
    loss.backward()
    grads = [p.grad for p in own.parameters().values()]
    assert sum(float(g.abs().sum()) for g in grads) > 0
    optimizer = torch.optim.Adam(own.parameters().values(), lr=trainer.config.learning_rate)
    optimizer.step()
    for name, p in trainer.policy.parameters().items():
        torch.testing.assert_close(p, own.parameters()[name], rtol=0, atol=0)
    trainer.source.close()


def test_without_advantages_the_actor_stays_as_it_is():
    """Every future pays the same; β, entropy and weight decay are 0, and the optimizer is fresh."""
    trainer = make(reward_fn=lambda batch: torch.ones(len(batch["reward"])), beta=0, entropy_coef=0, weight_decay=0)
    before = weights(trainer.policy.module)
    report = trainer.step()
    assert report["updates"] == 1 and report["grad_norm"] == 0
    assert same(before, weights(trainer.policy.module))
    trainer.source.close()


def test_with_advantages_it_does_not():
    trainer = make(reward_fn=lambda batch: batch["action"][..., 0].mean(1))
    before = weights(trainer.policy.module)
    assert trainer.step()["grad_norm"] > 0
    assert not same(before, weights(trainer.policy.module))
    trainer.source.close()


@pytest.mark.parametrize("actor", ["group", "bootstrap", "critic"])
def test_the_world_model_gets_no_gradient_from_the_actor(actor):
    """Its weights are the same after the update as before it, and no gradient is left on them."""
    trainer = make(actor=actor)
    trainer.step()
    model = trainer.source.learner.model
    kept: dict[str, torch.Tensor] = {}
    collect = trainer.source.collect

    def collected(request):
        found = collect(request)
        kept.update(weights(model))
        assert not any(x.requires_grad for x in found.rollouts.inputs.values())
        return found

    trainer.source.collect = collected
    trainer.step()
    assert kept and same(kept, weights(model))
    assert all(p.grad is None for p in model.parameters())
    trainer.source.close()


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_the_kl_of_a_policy_to_itself_is_zero_in_imagination(env):
    trainer = make(env, beta=0.5)
    report = trainer.step()
    assert report["kl"] == 0.0
    rollouts = report.experience.rollouts
    logp_NT = FrozenReference.copy_of(trainer.policy).score(rollouts)
    assert torch.equal(logp_NT, trainer.policy.score(rollouts).logp_NT.detach())
    assert trainer.step()["kl"] > 0.0
    trainer.source.close()


def test_the_recorded_log_probs_are_the_policy_s():
    trainer = make(num_iterations=2)
    rollouts = trainer.source.collect(CollectRequest(0)).rollouts
    torch.testing.assert_close(trainer.policy.score(rollouts).logp_NT, rollouts.old_logp_NT, rtol=0, atol=1e-6)
    trainer.source.close()


def test_an_untrained_actor_finds_every_action_about_equally_likely():
    head = make_head(spaces.Discrete(5))
    network = make_network(12, 16, head, 2, seed=3)
    probs = network(torch.randn(100, 12)).softmax(-1).detach()
    assert float((probs - 0.2).abs().max()) < 0.02
    assert torch.equal(network[0].weight, make_network(12, 16, head, 2, seed=3)[0].weight)
    assert not torch.equal(network[0].weight, make_network(12, 16, head, 2, seed=4)[0].weight)


def nothing(batch):
    return torch.zeros_like(batch["reward"])


def test_where_nothing_is_at_stake_an_entropy_bonus_widens_the_noise_up_to_its_limit():
    """Futures that are all worth the same leave the entropy alone to be learned from, and a Gaussian's has no top."""
    widest = {}
    for most in (None, 0.8):
        trainer = make("Pendulum-v1", reward_fn=nothing, entropy_coef=0.1, learning_rate=0.02, max_std=most)
        for _ in range(10):
            trainer.step()
        flat = trainer.source.collect(CollectRequest(10)).rollouts.inputs["flat"]
        _, log_std = trainer.policy.head.describe(trainer.policy.network(flat)).chunk(2, -1)
        widest[most] = log_std.max().exp().item()
        trainer.source.close()
    assert widest[None] > 2 and widest[0.8] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("env", "settings", "message"),
    [
        ("Pendulum-v1", {"max_std": 0.5}, r"log_std=-0\.5 starts wider than max_std=0\.5 allows; lower it to -0\.69"),
        ("Pendulum-v1", {"max_std": 0.0}, "max_std"),
    ],
)
def test_limits_of_the_noise_that_mean_nothing_are_refused(env, settings, message):
    with pytest.raises(ValueError, match=message):
        make(env, **settings)


def test_a_limit_of_the_noise_beside_actions_without_any_is_said():
    """A preset's, perhaps, of which another environment was asked for."""
    with pytest.warns(UserWarning, match="max_std has no effect: this environment's actions are not drawn"):
        make("CartPole-v1", max_std=1.0).source.close()


# --- codes and draws ------------------------------------------------------------------------------------------------

SPACES = {
    "discrete": spaces.Discrete(3, start=2),
    "multi-discrete": spaces.MultiDiscrete([2, 4]),
    "switches": spaces.MultiBinary(3),
    "box": spaces.Box(-2.0, 4.0, (2,)),
}


@pytest.mark.parametrize("name", SPACES)
def test_draws_follow_the_head_s_own_probabilities(name):
    head = make_head(SPACES[name], state_std=True)
    actions, out = Actions(head), torch.randn(1, head.size, generator=generator(1)).expand(20_000, -1)
    drawn = actions.draw(out, actions.noise((20_000,), generator(2), out))
    assert tuple(drawn.shape[1:]) == head.shape
    # the mean of −log p over draws is the entropy exactly when the draws are p's own
    surprise = -head.logp(out, drawn)
    assert abs(float(surprise.mean() - head.entropy(out).mean())) < 4 * float(surprise.std()) / 20_000**0.5 + 1e-3


@pytest.mark.parametrize(
    ("name", "recorded", "code"),
    [
        ("discrete", [0, 2], [[1, 0, 0], [0, 0, 1]]),
        ("multi-discrete", [[1, 3]], [[0, 1, 0, 0, 0, 0, 0, 1]]),
        ("switches", [[1, 0, 1]], [[1, -1, 1]]),
        ("box", [[0.25, -3.0]], [[0.25, -1.0]]),
    ],
)
def test_codes_are_numbers_between_the_bounds(name, recorded, code):
    actions = Actions(make_head(SPACES[name], state_std=True))
    found = actions.code(torch.tensor(recorded))
    assert found.tolist() == code and found.shape[-1] == actions.width


def test_a_policy_on_a_device_of_its_own_is_found():
    head = make_head(spaces.Discrete(2))
    assert ActorPolicy(make_network(4, 8, head, 1, 0), head).device == torch.device("cpu")
