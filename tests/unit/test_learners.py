"""More tries are sampled than are learned from."""

from __future__ import annotations

import pytest
import torch

from grpo import GRPOConfig, GRPOTrainer
from grpo.config import ConfigError
from grpo.credit import advantages
from grpo.experience import Experience
from grpo.language.config import LanguageConfig
from grpo.learners import marked, scored
from grpo.recipes import recipe
from grpo.rollouts import Rollouts, Status
from grpo.shards import Unsharded
from tests.toys import Given, Match, Softmax, trainer


def tries(**changes):
    group_N = torch.arange(2).repeat_interleave(6)
    length_N = torch.tensor([3, 1, 2, 4, 4, 1, 1, 2, 3, 4, 2, 1])
    given = {
        "group_N": group_N,
        "mask_NT": torch.arange(4)[None] < length_N[:, None],
        "old_logp_NT": -torch.rand(12, 4, generator=torch.Generator().manual_seed(0)),
        "reward_N": torch.tensor([0.0, 1, 5, 2, 2, 2, 7, 7, 1, 7, 7, 0]),
        "inputs": torch.arange(12),
    }
    return Rollouts(**given | changes)


@pytest.mark.parametrize(
    ("by", "rows"),
    [("variance", [0, 2, 10, 11]), ("extremes", [0, 2, 10, 11]), ("length", [1, 5, 6, 11])],
)
def test_so_many_of_each_group_learn(by, rows):
    config = GRPOConfig(generate=6, select=2, select_by=by)
    found = marked(tries(), config, step=3)
    assert found.learns_N.nonzero()[:, 0].tolist() == rows
    assert marked(found, config, step=4) is found  # who has marked them already is right


def test_truncated_tries_that_a_recipe_masks_are_not_chosen():
    ends = torch.zeros(12, dtype=torch.int64)
    ends[[0, 2]] = int(Status.TRUNCATED)  # the worst and the best of the first group
    config = GRPOConfig(generate=6, select=2, select_by="extremes", loss_type="grpo")
    assert marked(tries(status_N=ends), config, step=0).learns_N[[0, 2]].all()
    masks = GRPOConfig(generate=6, select=2, select_by="extremes", loss_type="grpo", mask_truncated=True)
    found = marked(tries(status_N=ends), masks, step=0)
    assert not found.learns_N[[0, 2]].any() and found.learns_N.sum() == 4


def test_those_that_learn_have_the_advantages_they_would_have_among_all():
    everyone, how = tries(), recipe("grpo")
    found = marked(everyone, GRPOConfig(generate=6, select=2, loss_type="grpo"), step=0)
    part = Experience.build(found, how)
    rows = found.learns_N.nonzero()[:, 0]
    assert len(part) == 4 and torch.equal(part.advantage_NT, advantages(everyone, how)[rows])
    assert part.denominators.rows == 4 and part.denominators.tokens == float(everyone.mask_NT[rows].sum())


def test_a_random_choice_follows_from_seed_step_and_group():
    config = GRPOConfig(generate=6, select=2, select_by="random", seed=5)
    first = marked(tries(), config, step=1).learns_N
    assert torch.equal(first, marked(tries(), config, step=1).learns_N) and first.sum() == 4
    assert any(not torch.equal(first, marked(tries(), config, step=n).learns_N) for n in (2, 3, 4))
    alone = tries().select(range(6, 12))  # another rank, which has this group alone
    assert torch.equal(marked(alone, config, step=1).learns_N, first[6:])


def test_only_those_that_learn_are_scored():
    found, asked = marked(tries(), GRPOConfig(generate=6, select=2), step=0), []

    def score(rows):
        asked.append(rows.inputs.tolist())
        return rows.old_logp_NT * 2

    scores = scored(found, score, recipe("grpo", beta=0.1))
    assert len(asked[0]) == 4 and torch.equal(scores[asked[0]], found.old_logp_NT[asked[0]] * 2)
    assert not scores[~found.learns_N].any()
    scored(found, score, recipe("rloo", beta=0.1))  # its KL is taken off every reward
    assert len(asked[1]) == 12


def test_a_step_learns_from_as_many_and_tells_of_all():
    class Counted(Softmax):
        scored = 0

        def get_log_probabilities(self, states, actions):
            Counted.scored += torch.is_grad_enabled() * len(actions)
            return super().get_log_probabilities(states, actions)

    whole = trainer(policy=Counted(), group_size=16, loss_type="grpo").step([0, 1, 2])
    before, Counted.scored = Counted.scored, 0
    report = trainer(policy=Counted(), group_size=16, select=4, loss_type="grpo").step([0, 1, 2])
    assert (before, Counted.scored) == (48, 12) and len(report.experience) == 12
    assert report["reward"] == whole["reward"] and report["reward_std"] == whole["reward_std"]


def test_all_that_is_sampled_may_learn():
    """`select` of all is the same update as none."""
    one, other = (trainer(group_size=8, loss_type="grpo", **given) for given in ({}, {"select": 8}))
    for made in (one, other):
        torch.manual_seed(1)
        made.step([0, 1, 2])
    assert torch.equal(one.policy.model.logits, other.policy.model.logits)


def test_the_random_choice_is_right_on_average():
    """Over all choices of k of the G tries, the mean update direction is that of all G."""
    everyone, how = tries(), recipe("dr_grpo", length=4.0)
    whole = Experience.build(everyone, how).advantage_NT.mean(0)
    config = GRPOConfig(generate=6, select=2, select_by="random")
    some = [Experience.build(marked(everyone, config, step), how).advantage_NT.mean(0) for step in range(400)]
    torch.testing.assert_close(torch.stack(some).mean(0), whole, rtol=0, atol=0.25)


def test_what_cannot_be():
    with pytest.raises(ConfigError, match=r"select=16 of each group cannot learn where .*8.* are sampled"):
        LanguageConfig(generate=8, select=16)
    with pytest.raises(ConfigError, match="select_by has no effect here: it needs select"):
        GRPOConfig(select_by="random")
    found = tries(episode_N=torch.arange(12) // 2)
    with pytest.raises(ValueError, match="several make one episode"):
        marked(found, GRPOConfig(generate=6, select=2), 0)
    made = GRPOTrainer(GRPOConfig(generate=4, select=2, no_signal="resample"), Softmax(), None, Match())
    made.step([0, 1])


def test_every_room_samples_many_and_learns_from_few():
    from grpo.bandit import BanditConfig
    from grpo.bandit import make_trainer as bandit
    from grpo.control.config import ControlConfig
    from grpo.control.trainer import make_trainer as control
    from grpo.language.trainer import make_trainer as language

    made = [
        bandit(BanditConfig(generate=16, select=4)),
        control(ControlConfig(env="CartPole-v1", generate=8, select=2, groups_per_step=2)),
        language(LanguageConfig(model="tiny", dataset="addition", rewards=("correctness",), generate=8, select=2,
                                groups_per_step=2, max_completion_length=2, engine="transformers", preflight=False)),
    ]  # fmt: skip
    for one in made:
        assert len(one.step().experience) == 4
        one.source.close()
    with pytest.raises(ConfigError, match="which group_by=batch has not"):
        ControlConfig(env="CartPole-v1", group_by="batch", advantage="step", generate=8, select=2)


# --- rows that cannot move the policy ---------------------------------------------------------------------------------


class Watched(Softmax):
    """Remembers of each pass of an update which states it had, and whether gradients were asked for."""

    def __init__(self):
        super().__init__(dtype=torch.float64)
        self.passes, self.learning = [], False

    def train(self, mode=True):
        self.learning = mode
        return super().train(mode)

    def get_log_probabilities(self, states, actions):
        if self.learning:
            self.passes.append((set(states), torch.is_grad_enabled()))
        return super().get_log_probabilities(states, actions)


def half(states, actions):
    """States 0 and 2 tell their tries apart, 1 and 3 do not."""
    return torch.tensor([float(a) if s in (0, 2) else 1.0 for s, a in zip(states, actions, strict=True)])


def learned(apart, reward=half, optimizer=torch.optim.SGD, **settings):
    """A watched policy after two steps of two updates, and the metrics of the last."""
    policy = Watched()
    optimizer = optimizer(policy.parameters(), lr=0.1)
    made = trainer(0, reward=Given(reward), policy=policy, optimizer=optimizer, num_iterations=2, **settings)
    if not apart:
        made.shards = Elsewhere()
    report = [made.step([0, 1, 2, 3]) for _ in range(2)][-1]
    return policy, report


class Elsewhere(Unsharded):
    """Other ranks take part in every pass, so that each has its gradient."""

    passes_alone = False


@pytest.mark.parametrize("rows", [3, 8, 16])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "gspo", "cispo"])
def test_groups_of_equal_tries_pass_forward_only_and_nothing_changes(rows, loss_type):
    found, report = learned(True, rows_per_microbatch=rows, loss_type=loss_type)
    whole, plain = learned(False, rows_per_microbatch=rows, loss_type=loss_type)
    assert all(gradients for _, gradients in whole.passes)
    assert {state for states, gradients in found.passes if gradients for state in states} == {0, 2}
    assert {state for states, gradients in found.passes if not gradients for state in states} == {1, 3}
    torch.testing.assert_close(found.logits, whole.logits, rtol=1e-12, atol=1e-14)
    assert report.keys() == plain.keys()
    for name, value in plain.items():
        assert report[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_where_nothing_can_move_one_pass_has_its_gradient_so_that_moments_fade():
    learns, seen = [], []

    def reward(states, actions):
        seen.append(states)
        return half(states, actions) if len(seen) == 1 else torch.ones(len(states))

    for apart in (True, False):
        seen.clear()
        policy, _ = learned(apart, reward, torch.optim.AdamW, rows_per_microbatch=8, loss_type="grpo")
        learns.append(policy.logits.detach())
        if apart:
            assert [gradients for _, gradients in policy.passes[-4:]] == [True, False, False, False]
    torch.testing.assert_close(learns[0], learns[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "settings", [{"beta": 0.1}, {"entropy_coef": 0.01}, {"loss_type": "kl_cov"}, {"loss_type": "dro"}], ids=str
)
def test_terms_that_pull_at_every_decision_need_every_gradient(settings):
    policy, _ = learned(True, rows_per_microbatch=8, **{"loss_type": "grpo"} | settings)
    learning = [gradients for states, gradients in policy.passes if states & {1, 3}]
    assert any(learning)


def test_groups_that_a_recipe_drops_pass_forward_only_whatever_pulls():
    policy, _ = learned(True, rows_per_microbatch=8, loss_type="grpo", no_signal="drop", entropy_coef=0.01)
    assert not any(gradients for states, gradients in policy.passes if states & {1, 3})


class Heads(Watched):
    """Each state has parameters of its own, which only its own rows reach."""

    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ParameterList([torch.zeros(5, dtype=torch.float64) for _ in range(4)])

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        return [
            torch.multinomial(self.heads[s].softmax(-1), num_actions_per_state, replacement=True).tolist()
            for s in states
        ]

    def get_log_probabilities(self, states, actions):
        pairs = zip(states, actions, strict=True)
        return super().get_log_probabilities(states, actions) * 0 + torch.stack(
            [self.heads[s].log_softmax(-1)[a] for s, a in pairs]
        )

    def get_parameters(self):
        return {f"heads.{number}": head for number, head in enumerate(self.heads)}


def test_parameters_that_only_still_rows_reach_have_a_gradient_of_zero_and_move_as_ever():
    """Their first step has tries to tell apart, so that there are moments, which must fade."""
    found = []
    for alone in (True, False):
        seen: list[int] = []

        def reward(states, actions, seen=seen):
            seen.append(1)
            told = {0, 1, 2, 3} if len(seen) == 1 else {0, 2}
            return torch.tensor([float(a) if s in told else 1.0 for s, a in zip(states, actions, strict=True)])

        policy = Heads()
        optimizer = torch.optim.AdamW(policy.heads.parameters(), lr=0.1)
        made = trainer(0, Given(reward), policy, optimizer, rows_per_microbatch=8, loss_type="grpo")
        if not alone:
            made.shards = Elsewhere()
        for _ in range(4):
            made.step([0, 1, 2, 3])
        found.append(torch.stack([*policy.heads]).detach())
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)
    assert found[0][3].abs().max() > 0.1  # it went on after its last signal


def test_what_fits_one_pass_stays_one():
    policy, _ = learned(True, loss_type="grpo")
    assert all(states == {0, 1, 2, 3} and gradients for states, gradients in policy.passes)
