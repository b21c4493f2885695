"""Completions of a prompt's last visit as drafts of the next: the same distribution, fewer steps, exact resumption."""

import copy

import numpy as np
import pytest
import torch

from grpo.config import ConfigError
from grpo.language import GRPOConfig, GRPOTrainer
from grpo.language.engines import Sampling, Tokens
from grpo.language.engines.inline import InlineEngine
from grpo.language.samples import Prompt, Sample
from grpo.language.speculation import Speculation
from tests.unit.language.functions import digits
from tests.unit.language.tiny import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"What is {a}+{a}?", "answer": str(a + a)} for a in range(4)]


def ids_of(completions):
    return [completion.ids.tolist() for completion in completions]


def changed(model, by, seed=0):
    """The same model after some training."""
    other, random = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn(p.shape, generator=random) * by)
    return other


# --- the engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.0), Sampling(temperature=0.8, top_k=30, top_p=0.9), Sampling(stop=("7", "3 "))],
    ids=["", "greedy", "cut", "stop"],
)
def test_a_draft_changes_nothing_that_is_sampled(sampling):
    old = tiny_model()
    new = changed(old, 0.04)
    sampling = Sampling(**{**vars(sampling), "max_new_tokens": 12})
    eos = Tokens(tiny_tokenizer(), frozenset(range(40, 44)), 0)
    asked = [tiny_tokenizer().encode(text) for text in ("What is 1 + 2?", "x")]
    drafts = ids_of(InlineEngine(old, eos).generate(asked, 6, sampling, range(12)))
    expected = InlineEngine(new, eos).generate(asked, 6, sampling, range(12))
    engine = InlineEngine(new, eos)
    engine.expect({seed: draft for seed, draft in enumerate(drafts) if seed != 3} | {5: [9] * 40})
    made = engine.generate(asked, 6, sampling, range(12))
    assert ids_of(made) == ids_of(expected) and [c.stop for c in made] == [c.stop for c in expected]
    for a, b in zip(made, expected, strict=True):
        torch.testing.assert_close(a.logp, b.logp, atol=1e-5, rtol=1e-4)
        assert a.kept == pytest.approx(b.kept, abs=1e-5)
    assert sampling.temperature == 0.0 or 0 < engine.metrics()["engine/draft_accepted"] < 1
    assert drafts != ids_of(expected), "the policy has changed"


def test_what_comes_of_drafts_is_distributed_as_the_policy_says():
    """Exactly enumerated: the joint probabilities of two tokens, by χ²."""
    old = tiny_model(vocab_size=6, num_hidden_layers=1, eos_token_id=5, bos_token_id=0, pad_token_id=0)
    with torch.no_grad():
        old.lm_head.weight.mul_(2)
    new, eos, rows = changed(old, 0.03), Tokens(None, frozenset({99}), 0), 1500
    sampling, prompt = Sampling(max_new_tokens=2), [1, 2, 3]
    engine = InlineEngine(new, eos)
    drafts = ids_of(InlineEngine(old, eos).generate([prompt], rows, sampling, range(rows)))
    engine.expect(dict(enumerate(drafts)))
    made = np.array(ids_of(engine.generate([prompt], rows, sampling, range(rows))))
    with torch.no_grad():
        first = new(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        second = new(torch.tensor([[*prompt, token] for token in range(6)])).logits[:, -1].softmax(-1)
        former = old(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    expected = (first[:, None] * second).flatten().double().numpy() * rows
    seen = np.bincount(made[:, 0] * 6 + made[:, 1], minlength=36)
    often = expected > 5
    chi2 = ((seen - expected)[often] ** 2 / expected[often]).sum()
    assert chi2 < 2 * often.sum() + 20
    assert ((former - first).abs().sum() / 2) > 0.03 and 0.5 < engine.metrics()["engine/draft_accepted"] < 1


# --- what is remembered ---------------------------------------------------------------------------------------------


class Known:
    """As many prompts as that."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count


def prompts(*rows):
    return [Prompt(row, [1], "", None) for row in rows]


def sampled(prompt, ids):
    ids = torch.tensor(ids)
    return Sample(prompt, ids, torch.ones(len(ids), dtype=torch.bool), None, "eos", "")


def test_numbers_are_those_of_the_prompt_until_they_are_used_up():
    kept = Speculation(2, 0, Known(4), 2)
    first = kept.seeds(0, prompts(1, 3), 2)
    again = [kept.seeds(step, prompts(3, 1), 2) for step in (2, 4)]  # other passes, another order
    assert all(seeds == [*first[2:], *first[:2]] for seeds in again)
    assert len({*first}) == 4 and not {*first} & {*kept.seeds(6, prompts(1, 3), 2)}, "then they are fresh"
    twice = kept.seeds(0, prompts(1, 1), 2)
    assert len({*twice}) == 4, "a prompt that comes twice in a step is answered twice"
    assert not {*first} & {*Speculation(2, 1, Known(4), 2).seeds(0, prompts(1, 3), 2)}, "another run"


def test_drafts_are_forgotten_when_they_are_of_no_use_or_too_many():
    kept = Speculation(1, 0, Known(2), 2, most=7)
    some = prompts(0, 1)
    seeds = kept.seeds(0, some, 1)
    kept.keep(seeds, [sampled(some[0], [1, 2, 3]), sampled(some[1], [4, 5])])
    assert kept.drafts([*seeds, 7]) == {seeds[0]: [1, 2, 3], seeds[1]: [4, 5]}
    other = Speculation(1, 0, Known(2), 2)
    other.load_state(kept.state())
    assert other.drafts(seeds) == kept.drafts(seeds)
    other.load_state({})
    assert other.drafts(seeds) == {}
    kept.keep(seeds[1:] * 2, [sampled(some[1], [6] * 5)] * 2)
    assert kept.drafts(seeds) == {seeds[1]: [6] * 5}, "the oldest goes first"
    kept.keep(kept.seeds(1, some, 1), [sampled(some[0], [1]), sampled(some[1], [1])])
    assert kept.drafts(seeds) == {}, "the numbers will not be used again"
    other.load_state(kept.state())
    assert other.drafts(seeds) == {}, "nothing is remembered, and that is kept, too"


# --- a run ----------------------------------------------------------------------------------------------------------


def trainer(tmp_path, **settings):
    model = tiny_model()
    config = GRPOConfig(**{"num_generations": 4, "prompts_per_step": 2, "max_completion_length": 8, "preflight": False,
                           "learning_rate": 1e-4, "reward_workers": 1, "output_dir": str(tmp_path),
                           "speculate": 1} | settings)  # fmt: skip
    given = {"processing_class": tiny_tokenizer(), "train_dataset": ROWS}
    return GRPOTrainer(model=model, reward_funcs=digits, args=config, **given)


def test_a_run_speculates_from_the_second_pass_on_and_resumes_exactly(tmp_path):
    whole, told = trainer(tmp_path), []
    for step in range(5):
        if step == 3:
            state = whole.state()
        report = whole.step()
        told.append({name: report.metrics[name] for name in ("reward", "grad_norm", "loss") if name in report.metrics})
        accepted = whole.source.measures().get("engine/draft_accepted")
        assert (accepted is not None and accepted > 0.3) == (step in (2, 3)), "then the numbers are fresh"
    parts = trainer(tmp_path)
    parts.load_state(state)
    for step in (3, 4):
        report = parts.step()
        assert {name: report.metrics[name] for name in told[step]} == told[step]
    for a, b in zip(whole.policy.parameters().values(), parts.policy.parameters().values(), strict=True):
        assert torch.equal(a, b)
    for one in (whole, parts):
        one.source.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"environment": "x.py:World"}, "one answer"),
        ({"engine": "transformers"}, "needs our own loop"),
    ],
)
def test_what_speculation_does_not_go_with_is_refused(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, **settings)
