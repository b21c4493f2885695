"""One token from logits: the same survivors as transformers, and draws that follow the weights."""

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo.language.engines import Sampling
from grpo.language.engines.sampling import Numbers, StopTexts, draw, penalised, pick, survivors, uniforms
from tests.unit.language.tiny import tiny_tokenizer


def logits(rows=6, size=5000, scale=2.0, seed=0):
    """From flat rows to peaked ones."""
    drawn = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))
    return drawn * torch.linspace(0.1, scale, rows)[:, None]


@pytest.mark.parametrize(
    ("sampling", "warpers"),
    [
        (Sampling(top_k=50), [TopKLogitsWarper(50)]),
        (Sampling(top_p=0.95), [TopPLogitsWarper(0.95)]),
        (Sampling(top_p=0.3), [TopPLogitsWarper(0.3)]),
        (Sampling(top_p=1e-6), [TopPLogitsWarper(1e-6)]),
        (Sampling(min_p=0.05), [MinPLogitsWarper(0.05)]),
        (
            Sampling(top_k=800, top_p=0.7, min_p=0.02),
            [TopKLogitsWarper(800), TopPLogitsWarper(0.7), MinPLogitsWarper(0.02)],
        ),
    ],
)
@pytest.mark.parametrize("scale", [2.0, 8.0])
def test_the_survivors_are_those_of_transformers(sampling, warpers, scale):
    drawn = logits(scale=scale)
    expected = LogitsProcessorList(warpers)(torch.zeros(6, 1, dtype=torch.long), drawn.clone()).isfinite()
    assert torch.equal(survivors(drawn, sampling), expected)
    assert 1 < expected.sum() < expected.numel() or sampling.top_p == 1e-6


def test_nothing_is_cut_when_nothing_is_asked():
    assert survivors(logits(), Sampling(top_k=5000)) is None


def test_ties_at_the_limit_of_top_k_survive_as_in_transformers():
    drawn = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert survivors(drawn, Sampling(top_k=2)).tolist() == [[False, True, True, True, False]]


def test_penalty_and_temperature_are_those_of_transformers():
    drawn, seen = logits(size=300), torch.randint(0, 300, (6, 40), generator=torch.Generator().manual_seed(1))
    expected = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7), TemperatureLogitsWarper(0.6)])(seen, drawn)
    marks = torch.zeros(6, 300, dtype=torch.bool).scatter(1, seen, True)
    scaled = drawn / 0.6
    torch.testing.assert_close(torch.where(marks, penalised(scaled, 1.7), scaled), expected)


@pytest.mark.parametrize("size", [3, 255, 256, 257, 1000])
def test_a_number_picks_the_token_where_the_running_sum_passes_it(size):
    weight = torch.rand(40, size, generator=torch.Generator().manual_seed(size)) ** 4
    weight[:, ::3] = 0.0
    number = uniforms(range(40), 1)[:, 0]
    running = weight.double().cumsum(-1)
    expected = (running <= number[:, None] * running[:, -1:]).sum(-1)
    assert torch.equal(pick(weight, number), expected)


def test_numbers_are_the_same_in_parts_and_from_any_place():
    whole = uniforms([7, 2**70], 100)
    numbers = Numbers(7)
    assert [*numbers.next(3), *numbers.next(40)] == whole[0, :43].tolist()
    assert Numbers(2**70, 60).next(40).tolist() == whole[1, 60:].tolist()
    assert whole[0].tolist() == np.random.default_rng(7).random(100).tolist()


def test_a_token_of_weight_zero_is_never_picked():
    weight = torch.zeros(6, 600)
    weight[:, [300, 301, 400]] = torch.tensor([1e-30, 1.0, 1e-3])
    number = torch.tensor([0.0, 1e-300, 0.5, 1 - 1e-10, 1 - 2**-53, 0.999999])
    picked = pick(weight, number)
    assert set(picked.tolist()) <= {300, 301, 400}
    assert picked[0] == 300 and picked[2] == 301 and picked[4] == 400


def test_recorded_log_probs_come_before_penalty_and_truncation():
    drawn, number = logits(size=400), uniforms(range(6), 1)[:, 0]
    seen = torch.zeros(6, 400, dtype=torch.bool)
    seen[:, ::2] = True
    made = draw(drawn, Sampling(temperature=0.8, top_k=10, repetition_penalty=2.0), number, seen)
    whole = (drawn / 0.8).log_softmax(-1)
    torch.testing.assert_close(made.logp_N, whole.gather(-1, made.token_N[:, None])[:, 0], atol=1e-5, rtol=0)
    kept = survivors(torch.where(seen, penalised(drawn / 0.8, 2.0), drawn / 0.8), Sampling(top_k=10))
    torch.testing.assert_close(made.kept_N, (whole.exp() * kept).sum(-1))
    assert kept.gather(-1, made.token_N[:, None]).all()


def test_a_longer_row_of_numbers_begins_with_the_shorter_one():
    assert torch.equal(uniforms([3, 2**62], 50)[:, :7], uniforms([3, 2**62], 7))
    assert not torch.equal(uniforms([3], 7), uniforms([4], 7))


def test_stop_texts_are_found_across_tokens_and_only_at_the_end():
    tokenizer = tiny_tokenizer()
    stops = StopTexts(tokenizer, ["</a>", "<eos>"])
    said = ["so </a>", "</a", "</a> and a good many tokens after it", "x<eos>"]
    assert stops.reached([tokenizer.encode(text) for text in said]) == [True, False, False, True]
