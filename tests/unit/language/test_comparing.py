"""Recipes that compare with more than rewards: a greedy try, turns that were told the same, tokens by their energy."""

from __future__ import annotations

import pytest
import torch

from grpo.config import ConfigError
from grpo.core.advantages import decision_energy
from grpo.language.comparing import VALUES, turn_groups
from grpo.language.samples import Prompt, Sample
from grpo.protocols import CollectRequest
from tests.unit.language.functions import length, no_opinion_of_two
from tests.unit.language.test_teacher import make, whole
from tests.unit.language.tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def test_remax_compares_with_the_likeliest_answer():
    trainer = make(loss_type="remax", rewards=[length])
    rollouts = trainer.source.collect(CollectRequest(0)).rollouts
    for start in range(2):
        sample = rollouts.inputs[4 * start]
        ids = torch.as_tensor(sample.prompt.ids)
        for _ in range(5):  # by hand, the likeliest token each time
            best = trainer.model(ids[None]).logits[0, -1].argmax()
            ids = torch.cat([ids, best[None]])
            if int(best) == TOKENIZER.eos_token_id:
                break
        text = TOKENIZER.decode(ids[len(sample.prompt.ids) :], skip_special_tokens=True)
        want = length([None], [text])[0]
        assert rollouts.baseline_NT[4 * start : 4 * start + 4].unique().tolist() == pytest.approx([want])
    experience = trainer.step().experience
    reward_N = rollouts.reward_parts_NK[:, 0]
    got_N = experience.advantage_NT[:, 0]
    torch.testing.assert_close(got_N, (reward_N - rollouts.baseline_NT[:, 0]).to(got_N))


def test_a_greedy_try_that_fails_leaves_the_groups_mean():
    trainer = make(loss_type="remax", rewards=[no_opinion_of_two], overlap_rewards=False)
    rollouts = trainer.source.collect(CollectRequest(0)).rollouts
    mean_N = rollouts.reward_parts_NK[:, 0].reshape(2, 4).mean(1).repeat_interleave(4)
    torch.testing.assert_close(rollouts.baseline_NT[:, 0], mean_N.to(rollouts.baseline_NT))


def test_roles_are_compared_with_what_they_were_given_before():
    """One reward after the other, over steps; the means are those of a column's values."""
    rows = [{"prompt": f"{i}?", "role": "ab"[i % 2]} for i in range(4)]
    trainer = make(loss_type="rae", rewards=[length], data=rows, role_column="role", baseline_decay=0.5)
    means = {"a": 0.0, "b": 0.0}
    for _ in range(2):
        experience = trainer.step().experience
        reward_N, got_N = experience.rollouts.reward_parts_NK[:, 0], experience.advantage_NT[:, 0]
        for sample, reward, got in zip(experience.rollouts.inputs, reward_N.tolist(), got_N.tolist(), strict=True):
            role = sample.prompt.columns["role"]
            assert got == pytest.approx(reward - means[role], rel=1e-5)
            means[role] = (means[role] + reward) / 2
    with pytest.raises(ConfigError, match="role_column=player: no such column; found role"):
        make(loss_type="rae", rewards=[length], data=rows, role_column="player")
    with pytest.raises(ConfigError, match=r"row 1 has no role \(role_column\)"):
        make(loss_type="rae", rewards=[length], data=[rows[0], rows[1] | {"role": ""}], role_column="role")
    with pytest.raises(ConfigError, match="role_column has no effect here: it needs baseline=role_mean"):
        make(loss_type="grpo", rewards=[length], data=rows, role_column="role")


def test_the_best_policys_value_is_of_answers_before_the_first_step():
    trainer = make(loss_type="a_star_po", rewards=[length], value_samples=3, value_beta=2.0)
    before = [prompt.row for prompt in trainer.source.prompts.first()]
    source, sampling = trainer.source, trainer.config.sampling
    asked = [source.judged([source.prompts[i], source.prompts[i + 1]], 3, sampling, VALUES, (0, i)) for i in (0, 2, 4)]
    reward_R3 = torch.cat([torch.as_tensor(judged.parts_NK[:, 0]) for _, judged in asked]).reshape(6, 3)
    report = trainer.step()
    want_R = 2.0 * (reward_R3 / 2.0).exp().mean(1).log()
    torch.testing.assert_close(trainer.source.value_R[before], want_R.double(), rtol=1e-5, atol=1e-6)
    rollouts = report.experience.rollouts
    value_N = want_R[[sample.prompt.row for sample in rollouts.inputs]]
    got_N = report.experience.advantage_NT[:, 0]  # the start is the reference: no KL yet
    torch.testing.assert_close(got_N, (rollouts.reward_parts_NK[:, 0] - value_N).to(got_N), rtol=1e-4, atol=1e-5)
    assert report["grad_norm"] > 0
    with pytest.raises(ConfigError, match="the prompt was not answered before the first step"):
        trainer.step(["another?"])


@pytest.mark.parametrize("settings", [
    {"loss_type": "rae", "rewards": [length]},
    {"loss_type": "a_star_po", "rewards": [length], "value_samples": 2},
    {"loss_type": "opsd", "teacher_decay": 0.5},
    {"loss_type": "opsd", "teacher_decay": 0.5, "lora_rank": 2},
], ids=["rae", "a_star_po", "average", "average of an adapter"])  # fmt: skip
def test_what_they_remember_is_gone_on_with(settings):
    through, again = (make(model=tiny_model(3), **settings) for _ in range(2))
    through.step()
    state = through.state()
    want = through.step()
    again.load_state(state)
    got = again.step()
    assert got["loss"] == want["loss"] and got["grad_norm"] == want["grad_norm"] > 0
    torch.testing.assert_close(again.state().arrays, through.state().arrays, rtol=0, atol=0)


def test_energies_are_those_of_whole_distributions():
    trainer = make(loss_type="otb", rewards=[length], temperature=0.8)
    report = trainer.step()
    assert report["grad_norm"] > 0
    trainer = make(loss_type="otb", rewards=[length], temperature=0.8)
    rollouts = trainer.source.collect(CollectRequest(0)).rollouts
    for row, sample in enumerate(rollouts.inputs):
        logp_TV = whole(trainer.model, sample, 0.8)
        logp_T = logp_TV.gather(-1, sample.ids[:, None])[:, 0]
        want = decision_energy(logp_T, logp_TV.exp().square().sum(-1))
        torch.testing.assert_close(rollouts.energy_NT[row, : sample.length], want, rtol=1e-4, atol=1e-5)
        assert not rollouts.energy_NT[row, sample.length :].any()


def sample(row, said):
    """A conversation: what the model said (letters) and what it was told (digits), a token a character."""
    made = torch.tensor([letter.isalpha() for letter in said])
    ids = torch.tensor([ord(letter) for letter in said])
    return Sample(Prompt(row, [1, 2], "?", None), ids, made, None, "eos", said)


def test_turns_that_were_told_the_same_are_compared():
    samples = [sample(0, "ab7c8d"), sample(0, "a7bc88d"), sample(0, "ab9c"), sample(1, "ab7c")]
    mask_NT = torch.zeros(4, 7, dtype=torch.bool)
    for row, one in enumerate(samples):
        mask_NT[row, : one.length] = one.made
    found = turn_groups(samples, [0, 0, 0, 1], mask_NT)
    assert found[0, 0] == found[0, 1] == found[1, 0] == found[2, 0]  # all begin with the prompt
    assert found[0, 3] == found[1, 2] == found[1, 3] != found[2, 3]  # told 7, and 9
    assert found[0, 5] != found[1, 6] and found[0, 3] != found[0, 0]  # told 8, and 88
    assert found[3, 0] != found[0, 0] and found[3, 3] != found[0, 3]  # another prompt
    assert not found[~mask_NT].any()


class Echo:
    """Says one of two things, by what it heard; three turns."""

    def reset(self, row):
        self.turns = 0

    def step(self, completion):
        self.turns += 1
        return f"{len(completion) % 2}", float(len(set(completion))), self.turns == 3


def test_gigpo_learns_from_conversations():
    trainer = make(loss_type="gigpo", environment=Echo, max_completion_length=40, stop=tuple("abcdefghi01234"))
    report = trainer.step()
    rollouts = report.experience.rollouts
    assert rollouts.group_NT[rollouts.mask_NT].unique().numel() > 2 and report["grad_norm"] > 0
    first_N, advantage_NT = rollouts.mask_NT.long().argmax(1), report.experience.advantage_NT
    assert any(len(advantage_NT[row][rollouts.mask_NT[row]].unique()) > 1 for row in range(len(first_N)))


def test_gigpo_without_turns_is_refused():
    with pytest.raises(
        ConfigError, match=r'"gigpo" compares turns of conversations \(turn_coef\); give tools or an env'
    ):
        make(loss_type="gigpo", rewards=[length])
