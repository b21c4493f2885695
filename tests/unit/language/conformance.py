"""What every engine must do, as functions of a way to make one: `make(model, tokens) -> Engine`. `CHECKS` lists them.

The yardstick is a plain loop of full forward passes: no cache, no padding, one row at a time.
"""

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo.language.engines import Sampling, Tokens
from tests.unit.language.tiny import tiny_model, tiny_tokenizer

NEVER = frozenset({10_000})
"""Ends nothing: completions run to their limit."""
TEXTS = ("What is 17 + 25?", "x", "Sort these: 4 1 9 3, and say nothing more than the sorted digits.")


def tokens(eos=NEVER):
    return Tokens(tiny_tokenizer(), frozenset(eos), 0)


def prompts(*texts):
    return [tiny_tokenizer().encode(text) for text in (texts or TEXTS)]


@torch.no_grad()
def naive(model, prompt, length, processors=()):
    """Greedy decoding by full forward passes."""
    ids = torch.tensor([list(prompt)])
    for _ in range(length):
        scores = LogitsProcessorList(processors)(ids, model(ids).logits[:, -1].float())
        ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], 1)
    return ids[0, len(prompt) :].tolist()


@torch.no_grad()
def scored(model, prompt, completion, temperature=1.0):
    """Log-probs of a completion in one full forward pass."""
    logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def ids_of(completions):
    return [completion.ids.tolist() for completion in completions]


def greedy_is_the_argmax_of_full_forward_passes(make):
    model, asked = tiny_model(), prompts()
    made = make(model, tokens()).generate(asked, 2, Sampling(max_new_tokens=12, temperature=0.0), range(6))
    expected = [naive(model, prompt, 12) for prompt in asked for _ in range(2)]
    assert ids_of(made) == expected


def prompts_of_very_different_lengths_give_what_they_give_alone(make):
    engine, asked = make(tiny_model(), tokens()), prompts("a", "b" * 150, "hello", "c" * 40, "hello there")
    sampling = Sampling(max_new_tokens=8, temperature=0.0)
    together = ids_of(engine.generate(asked, 1, sampling, range(5)))
    assert together == [ids_of(engine.generate([prompt], 1, sampling, [0]))[0] for prompt in asked]


def completions_stay_in_the_vocabulary_and_come_as_promised(make):
    model = tiny_model()
    made = make(model, tokens({2})).generate(prompts(), 4, Sampling(max_new_tokens=9), range(12))
    assert len(made) == 12
    for completion in made:
        assert completion.ids.dtype == torch.int64 and completion.ids.device.type == "cpu"
        assert 1 <= len(completion.ids) <= 9
        assert 0 <= int(completion.ids.min()) <= int(completion.ids.max()) < model.config.vocab_size
        assert completion.stop == ("eos" if completion.ids[-1] == 2 else "length")
        assert 2 not in completion.ids[:-1]


def completions_of_a_prompt_stand_together(make):
    model, asked = tiny_model(), prompts()
    one_token = Sampling(max_new_tokens=6, temperature=0.01)
    made = ids_of(make(model, tokens()).generate(asked, 3, one_token, range(9)))
    likeliest = [naive(model, prompt, 1)[0] for prompt in asked]
    assert len(set(likeliest)) > 1
    assert [ids[0] for ids in made] == [token for token in likeliest for _ in range(3)]


def the_same_seeds_give_the_same_completions(make):
    engine, sampling = make(tiny_model(), tokens()), Sampling(max_new_tokens=10)
    first = ids_of(engine.generate(prompts(), 2, sampling, range(6)))
    assert ids_of(engine.generate(prompts(), 2, sampling, range(6))) == first
    others = ids_of(engine.generate(prompts(), 2, sampling, range(6, 12)))
    assert all(a != b for a, b in zip(first, others, strict=True))
    assert len({tuple(ids) for ids in first}) == 6


def a_row_does_not_depend_on_its_neighbours(make):
    engine, asked = make(tiny_model(), tokens({2, 50, 51, 52})), prompts()
    if not engine.row_seeds:
        return
    sampling = Sampling(max_new_tokens=20, top_p=0.9)
    together = ids_of(engine.generate(asked, 3, sampling, range(100, 109)))
    assert len({len(ids) for ids in together}) > 1  # some ended, and left the batch
    for row, ids in enumerate(together):
        assert ids_of(engine.generate([asked[row // 3]], 1, sampling, [100 + row])) == [ids]
    longer = ids_of(engine.generate(asked, 3, Sampling(max_new_tokens=30, top_p=0.9), range(100, 109)))
    assert [ids[:20] for ids in longer] == together


def an_end_of_sequence_token_ends_and_is_kept(make):
    model, asked = tiny_model(), prompts()
    whole = [naive(model, prompt, 12) for prompt in asked]
    ends = {whole[0][3], whole[1][6]}
    made = make(model, tokens(ends)).generate(asked, 1, Sampling(max_new_tokens=12, temperature=0.0), range(3))
    for ids, completion in zip(whole, made, strict=True):
        at = next((i for i, token in enumerate(ids) if token in ends), None)
        assert completion.stop == ("length" if at is None else "eos")
        assert completion.ids.tolist() == (ids if at is None else ids[: at + 1])
    assert {completion.stop for completion in made[:2]} == {"eos"}


def a_stop_text_ends_with_the_token_that_completes_it(make):
    model, asked = tiny_model(), prompts()
    whole, tokenizer = [naive(model, prompt, 12) for prompt in asked], tiny_tokenizer()
    stop = (tokenizer.decode(whole[0][3:5]), tokenizer.decode(whole[1][:1]))
    sampling = Sampling(max_new_tokens=12, temperature=0.0, stop=stop)
    for ids, completion in zip(whole, make(model, tokens()).generate(asked, 1, sampling, range(3)), strict=True):
        grown = (n for n in range(1, 13) if any(text in tokenizer.decode(ids[:n]) for text in stop))
        length = next(grown, None)
        assert completion.ids.tolist() == ids[:length]
        assert completion.stop == ("length" if length is None else "stop")


def the_last_token_may_complete_a_stop_text_or_end_the_sequence(make):
    model, asked = tiny_model(), prompts("x")
    whole = naive(model, asked[0], 4)
    sampling = Sampling(max_new_tokens=4, temperature=0.0, stop=(tiny_tokenizer().decode(whole[2:4]),))
    assert make(model, tokens()).generate(asked, 1, sampling, [0])[0].stop == "stop"
    assert make(model, tokens({whole[3]})).generate(asked, 1, sampling, [0])[0].stop == "eos"


def recorded_log_probs_are_those_of_a_scoring_pass(make):
    model, asked = tiny_model(), prompts()
    for sampling in (
        Sampling(max_new_tokens=16, temperature=0.7),
        Sampling(max_new_tokens=16, temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3),
        Sampling(max_new_tokens=16, temperature=0.0),
    ):
        made = make(model, tokens({2, 60})).generate(asked, 4, sampling, range(12))
        for row, completion in enumerate(made):
            if completion.logp is None:
                continue
            assert completion.logp.dtype == torch.float32
            expected = scored(model, asked[row // 4], completion.ids.tolist(), sampling.temperature or 1.0)
            torch.testing.assert_close(completion.logp, expected, atol=1e-4, rtol=0)


def tokens_come_as_often_as_the_distribution_says(make):
    model, asked, count = tiny_model(), prompts("What is"), 1500
    with torch.no_grad():
        ids = torch.tensor(asked)
        logits = model(ids).logits[:, -1]
    for seed, sampling, warpers in (
        (0, Sampling(max_new_tokens=1), []),
        (1, Sampling(max_new_tokens=1, temperature=0.5), [TemperatureLogitsWarper(0.5)]),
        (2, Sampling(max_new_tokens=1, top_k=7), [TopKLogitsWarper(7)]),
        (3, Sampling(max_new_tokens=1, top_p=0.6), [TopPLogitsWarper(0.6)]),
        (4, Sampling(max_new_tokens=1, min_p=0.1), [MinPLogitsWarper(0.1)]),
        (
            5,
            Sampling(max_new_tokens=1, temperature=1.5, top_k=30, top_p=0.8, min_p=0.2, repetition_penalty=1.5),
            [
                RepetitionPenaltyLogitsProcessor(1.5),
                TemperatureLogitsWarper(1.5),
                TopKLogitsWarper(30),
                TopPLogitsWarper(0.8),
                MinPLogitsWarper(0.2),
            ],
        ),
    ):
        expected = count * LogitsProcessorList(warpers)(ids, logits.clone()).softmax(-1)[0]
        made = make(model, tokens()).generate(asked, count, sampling, range(seed * count, (seed + 1) * count))
        found = torch.bincount(torch.cat([completion.ids for completion in made]), minlength=len(expected)).float()
        assert not found[expected == 0].any(), "a token that truncation forbids"
        often = expected >= 5
        chi2 = float(((found - expected)[often] ** 2 / expected[often]).sum())
        freedom = int(often.sum()) - 1
        assert freedom > 0 and chi2 < freedom + 4 * (2 * freedom) ** 0.5, (sampling, chi2, freedom)


def the_repetition_penalty_is_about_prompt_and_completion_and_not_about_padding(make):
    model, asked = tiny_model(), prompts()
    sampling = Sampling(max_new_tokens=16, temperature=0.0, repetition_penalty=3.0)
    made = ids_of(make(model, tokens()).generate(asked, 1, sampling, range(3)))
    assert made == [naive(model, prompt, 16, [RepetitionPenaltyLogitsProcessor(3.0)]) for prompt in asked]
    assert made != [naive(model, prompt, 16) for prompt in asked]


def the_model_is_left_as_it_was(make):
    model = tiny_model()
    model.gradient_checkpointing_enable()
    model.train()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)
    model.generation_config.top_k = 3

    def state():
        return (
            [module.training for module in model.modules()],
            [getattr(module, "gradient_checkpointing", None) for module in model.modules()],
            [parameter.requires_grad for parameter in model.parameters()],
            model.config.to_dict(),
            model.generation_config.to_dict(),
            torch.get_rng_state().tolist(),
        )

    before = state()
    engine = make(model, tokens())
    made = engine.generate(prompts(), 2, Sampling(max_new_tokens=8, temperature=0.0), range(6))
    engine.generate(prompts(), 2, Sampling(max_new_tokens=8), range(6))
    assert state() == before
    model.eval()
    assert ids_of(made) == [naive(model, prompt, 8) for prompt in prompts() for _ in range(2)]


def completions_end_at_the_context(make):
    made = make(tiny_model(max_position_embeddings=40), tokens()).generate(
        prompts("a" * 37, "b" * 5), 1, Sampling(max_new_tokens=6), range(2)
    )
    assert [(len(completion.ids), completion.stop) for completion in made] == [(3, "length"), (6, "length")]


CHECKS = [
    greedy_is_the_argmax_of_full_forward_passes,
    prompts_of_very_different_lengths_give_what_they_give_alone,
    completions_stay_in_the_vocabulary_and_come_as_promised,
    completions_of_a_prompt_stand_together,
    the_same_seeds_give_the_same_completions,
    a_row_does_not_depend_on_its_neighbours,
    an_end_of_sequence_token_ends_and_is_kept,
    a_stop_text_ends_with_the_token_that_completes_it,
    the_last_token_may_complete_a_stop_text_or_end_the_sequence,
    recorded_log_probs_are_those_of_a_scoring_pass,
    tokens_come_as_often_as_the_distribution_says,
    the_repetition_penalty_is_about_prompt_and_completion_and_not_about_padding,
    the_model_is_left_as_it_was,
    completions_end_at_the_context,
]
