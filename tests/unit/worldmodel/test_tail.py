"""What lies beyond a future's last step: closed forms, nobody valued by itself, and what the trainer makes of it."""

import numpy as np
import pytest
import torch

from grpo.config import ConfigError
from grpo.protocols import CollectRequest, State
from grpo.worldmodel.returns import discounted
from grpo.worldmodel.tail import FittedTail
from tests.unit.worldmodel.worlds import generator, make, same, weights

GAMMA, STATES, GROUP, STEPS = 0.9, 12, 4, 3


def ring(starts, seed=0):
    """Futures in a ring of states: a step leads on with chance ¾, the step into state 0 pays 1, that into 6 may end."""
    state_S = torch.randn(STATES, 40, generator=generator(9))
    at = torch.randint(STATES, (starts,), generator=generator(seed)).repeat_interleave(GROUP)
    moves = (torch.rand(starts * GROUP, STEPS, generator=generator(seed + 1)) < 0.75).long()
    way = torch.cat([at[:, None], at[:, None] + moves.cumsum(1)], 1) % STATES
    reward = ((way[:, 1:] == 0) & (moves == 1)).float()
    on = torch.where((way[:, 1:] == 6) & (moves == 1), 0.5, 1.0)
    return way, state_S[way], reward, on, torch.ones_like(reward)


def exact():
    """V of each state by solving its equations."""
    left, right = np.eye(STATES), np.zeros(STATES)
    for s in range(STATES):
        led = (s + 1) % STATES
        left[s, s] -= GAMMA * 0.25
        left[s, led] -= GAMMA * 0.75 * (0.5 if led == 6 else 1.0)
        right[s] = 0.75 * (led == 0)
    return np.linalg.solve(left, right)


def fitted(lam=0.5):
    return FittedTail(40, GAMMA, lam, 0, torch.device("cpu"))


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_futures_of_three_steps_tell_what_lies_twelve_steps_ahead(lam):
    """Linear in more features than there are states, the value is that of the chain, wherever the future stops."""
    way, flat, reward, on, weight = ring(3_000)
    found = fitted(lam).value(flat, reward, on, weight, GROUP, True).numpy()
    np.testing.assert_allclose(found, exact()[way[:, -1]], atol=0.06)
    assert exact()[1] < 0.3 < 0.8 < exact()[11]  # which three steps of reward alone cannot tell from 1 to 8


def test_no_future_is_valued_by_itself():
    """What a group earns moves the values of the others alone."""
    _, flat, reward, on, weight = ring(10)
    tail = fitted()
    before = tail.value(flat, reward, on, weight, GROUP, False)
    richer = reward.clone()
    richer[:GROUP] += 5.0
    after = tail.value(flat, richer, on, weight, GROUP, False)
    even = torch.arange(len(flat)) // GROUP % 2 == 0
    assert torch.equal(before[even], after[even]) and not torch.allclose(before[~even], after[~even])


def test_earlier_steps_are_remembered_and_fade():
    """A second start from the same sums is the same; what was learned once moves the values and is forgotten."""
    _, flat, reward, on, weight = ring(40)
    fresh, other = fitted(), fitted()
    alone = fresh.value(flat, reward, on, weight, GROUP, False)
    other.value(flat, 3 * reward, on, weight, GROUP, True)
    again = fitted()
    again.load_state(other.state())
    moved = other.value(flat, reward, on, weight, GROUP, True)
    assert torch.equal(again.value(flat, reward, on, weight, GROUP, True), moved)
    assert float((moved - alone).mean()) > 0.1
    for _ in range(80):
        last, never = (one.value(flat, reward, on, weight, GROUP, True) for one in (other, fresh))
    assert float((last - never).abs().mean()) < 0.1 * float((moved - alone).mean())


def noise(random):
    """Futures that wander, with rewards that mean nothing, as many and as long as by default."""
    start = torch.randn(32, 160, generator=random).repeat_interleave(8, 0)
    way = [start]
    for _ in range(32):
        way.append(0.95 * way[-1] + 0.3 * torch.randn(256, 160, generator=random))
    return torch.stack(way, 1), torch.randn(256, 32, generator=random), torch.ones(256, 32)


@pytest.mark.parametrize("seed", range(3))
def test_little_that_was_seen_says_little(seed):
    """From the first step on, noise moves those that are valued by the same weights less than what they earn itself."""
    random, tail = generator(seed), FittedTail(160, 0.997, 0.95, seed, torch.device("cpu"))
    weight = (0.997 ** torch.arange(32)).expand(256, 32)
    even = torch.arange(256) // 8 % 2 == 0
    for _ in range(3):
        flat, reward, on = noise(random)
        beyond = tail.value(flat, reward, on, weight, 8, True)
        earned = float(discounted(reward, on, torch.zeros(256), 0.997)[:, 0].std())
        assert max(float(beyond[half].std()) for half in (even, ~even)) < 0.8 * earned


@pytest.mark.parametrize("where", ["reward", "latent", "weight"])
def test_what_is_not_finite_is_left_out_and_counted(where):
    """The half that it is in is valued by the other one as ever; that one by earlier steps, and all goes on."""
    _, flat, reward, on, weight = ring(40)
    tail, clean = fitted(), fitted()
    for one in (tail, clean):
        one.value(flat, reward, on, weight, GROUP, True)
    broken = {"reward": reward.clone(), "latent": flat.clone(), "weight": weight.clone()}
    broken[where][0, 1] = float("nan")
    given = broken["latent"], broken["reward"], on, broken["weight"], GROUP
    tail.value(*given, False)
    assert tail.skipped == 0
    found, wanted = tail.value(*given, True), clean.value(flat, reward, on, weight, GROUP, False)
    even = torch.arange(len(flat)) // GROUP % 2 == 0
    assert bool(found.isfinite().all()) and torch.equal(found[even], wanted[even])
    assert tail.skipped == 1 and all(bool(x.isfinite().all()) for x in tail.state().arrays.values())
    again = fitted()
    again.load_state(tail.state())
    assert again.skipped == 1
    after = again.value(flat, reward, on, weight, GROUP, True)
    assert float((after - wanted).abs().mean()) < 0.1 and again.skipped == 1


def test_sums_that_an_older_state_kept_of_what_is_not_finite_are_begun_anew():
    _, flat, reward, on, weight = ring(40)
    tail = fitted()
    tail.value(flat, reward, on, weight, GROUP, True)
    state = tail.state()
    state.arrays["left"][3, 4] = float("nan")
    tail.load_state(State({"count": state.values["count"]}, state.arrays))
    wanted = fitted().value(flat, reward, on, weight, GROUP, False)
    assert torch.equal(tail.value(flat, reward, on, weight, GROUP, True), wanted)


@pytest.mark.parametrize("settings", [{"tail": "fitted"}, {"tail": "critic"}, {"tail": "fitted", "loss_type": "grpo"}])
def test_a_decision_is_paid_what_comes_and_what_lies_beyond(settings, monkeypatch):
    """With every tail worth 2 the returns are those of the rewards, ended by 2."""
    trainer = make(entropy_coef=0, **settings)
    source = trainer.source
    monkeypatch.setattr(FittedTail, "value", lambda self, flat, *rest: torch.full((len(flat),), 2.0))
    if source.critic is not None:
        monkeypatch.setattr(source.critic, "value", lambda flat: torch.full(flat.shape[:-1], 2.0))
    rows = source.collect(CollectRequest(0)).rollouts
    imagined, gamma = source._last, trainer.config.discount
    wanted = discounted(imagined.reward_NH, imagined.continue_NH, torch.full((12,), 2.0), gamma)[:, 0]
    discount_H = gamma ** torch.arange(5) if rows.weight_NT is not None else 1.0
    torch.testing.assert_close((rows.reward_NT * discount_H).sum(1), wanted)
    assert source.metrics()["imagined/tail"] == 2.0
    assert source.metrics().get("tail/sums_skipped") == (0.0 if settings["tail"] == "fitted" else None)
    source.close()


def test_without_a_tail_everything_is_as_it_is_by_default():
    one, other = make(), make(tail="none")
    assert [dict(one.step()) for _ in range(2)] == [dict(other.step()) for _ in range(2)]
    assert same(weights(one.policy.module), weights(other.policy.module))
    assert "imagined/tail" not in one.source.metrics()
    for trainer in (one, other):
        trainer.source.close()


def test_a_learned_tail_is_the_bootstrap():
    """But for what each actor changes in the recipe."""
    one = make(actor="bootstrap")
    other = make(tail="critic", scale="none", entropy_coef=3e-4)
    assert [dict(one.step()) for _ in range(2)] == [dict(other.step()) for _ in range(2)]
    for trainer in (one, other):
        trainer.source.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"actor": "critic", "tail": "fitted"}, "actor=critic sees past the horizon by itself; leave tail out"),
        ({"actor": "bootstrap", "tail": "none"}, "actor=bootstrap without a tail is actor=group with scale=none"),
        ({"tail": "fitted", "slow_rate": 0.1}, "slow_rate has no effect here: it needs actor=critic or tail=critic"),
        ({"gae_lambda": 0.5}, "gae_lambda has no effect here: it needs actor=critic or tail=fitted"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(settings, message):
    with pytest.raises(ConfigError) as error:
        make(**settings)
    assert message in str(error.value)
