"""Recipes that compare with more than rewards: a greedy try, turns that were told the same, tokens by their energy."""

from __future__ import annotations

import pytest
import torch

from grpo.config import ConfigError
from grpo.core.advantages import decision_energy
from grpo.language.comparing import turn_groups
from grpo.language.samples import Prompt, Sample
from grpo.protocols import CollectRequest
from tests.unit.language.functions import length, no_opinion_of_two
from tests.unit.language.test_teacher import make, whole
from tests.unit.language.tiny import tiny_tokenizer

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
