"""Between turns keys and values are kept: the same is said, and each turn reads what is new in it."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from grpo.language.data.chat import Chat, prepare_tokenizer
from grpo.language.engines import Sampling, reading
from grpo.language.engines.copied import CopyEngine
from grpo.language.engines.inline import InlineEngine
from grpo.language.engines.prefixes import Prefixes
from grpo.language.samples import Prompt
from grpo.language.turns.conversation import Conversation

from .tiny import CHARACTERS, SPECIAL, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TOKENS = prepare_tokenizer(TOKENIZER)
CHAT = Chat(TOKENIZER)


class Asks:
    """Answers with more or fewer words, by what was said."""

    def reset(self, row):
        self.turn = 0

    def step(self, completion):
        self.turn += 1
        return "ab" * (1 + (len(completion) + self.turn) % 4), float(len(completion)), self.turn == 4


def played(engine, texts=("1+1?", "what is 2?"), count=2, **how):
    prompts = [Prompt(row, *CHAT.render(text), {}) for row, text in enumerate(texts)]
    player = Conversation(CHAT, TOKENS, environment=Asks, max_turns=4)
    sampling = Sampling(**{"max_new_tokens": 60, "stop": ("a", "3", "7", "x"), **how})
    seeds = list(range(100, 100 + count * len(prompts)))
    return [sample for _, group in player(engine, prompts, count, sampling, seeds) for sample in group]


def read(model):
    """Tokens that pass through a model, from now on."""
    seen = []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"].numel()), with_kwargs=True)
    return seen


def expect_alike(samples, others):
    assert max(len(sample.messages) for sample in samples) > 4, "several turns were played"
    for one, other in zip(samples, others, strict=True):
        assert one.error is None and one.ids.tolist() == other.ids.tolist() and one.stop == other.stop
        torch.testing.assert_close(one.logp, other.logp, atol=2e-5, rtol=0)


@pytest.mark.parametrize("how", [{}, {"repetition_penalty": 1.3, "top_k": 20, "temperature": 0.7}], ids=str)
def test_the_same_is_said_with_and_without_what_was_kept(how):
    model = tiny_model()
    engine = InlineEngine(model, TOKENS)
    samples = played(engine, **how)
    kept = engine.metrics()["engine/prompt_kept"]
    expect_alike(samples, played(InlineEngine(model, TOKENS, kept_bytes=0), **how))
    assert kept > 0.4


def test_a_turn_reads_what_is_new_in_it():
    model = tiny_model()
    seen = read(model)
    played(InlineEngine(model, TOKENS))
    with_kept, decoded = sum(seen), 0
    seen.clear()
    samples = played(InlineEngine(model, TOKENS, kept_bytes=0))
    decoded = sum(int(sample.made.sum()) for sample in samples)
    assert with_kept - decoded < 0.6 * (sum(seen) - decoded)


def test_a_copy_of_the_model_keeps_them_too_and_models_with_learned_positions():
    shape = {"vocab_size": len(SPECIAL) + len(CHARACTERS), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**shape)).eval()
    engine = CopyEngine(model, TOKENS)
    samples = played(engine)
    assert engine.metrics()["engine/prompt_kept"] > 0.4
    expect_alike(samples, played(InlineEngine(model, TOKENS, kept_bytes=0)))


def test_too_little_room_lets_go_of_the_oldest_and_changes_nothing():
    model = tiny_model()
    engine = InlineEngine(model, TOKENS, kept_bytes=40_000)
    samples = played(engine)
    some = engine.metrics()["engine/prompt_kept"]
    expect_alike(samples, played(InlineEngine(model, TOKENS, kept_bytes=0)))
    assert 0 < some < 0.6
    assert played(InlineEngine(model, TOKENS, kept_bytes=1))[0].error is None


def test_what_goes_on_is_read_in_passes_of_bounded_size(monkeypatch):
    model = tiny_model()
    whole = played(InlineEngine(model, TOKENS))
    monkeypatch.setattr(reading, "TOKENS_AT_A_TIME", 1)
    seen = []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"].shape), with_kwargs=True)
    samples = played(InlineEngine(model, TOKENS))
    expect_alike(samples, whole)
    assert {rows for rows, steps in seen if steps > 1} == {1}


def test_nothing_outlives_a_rollout_or_the_weights():
    model = tiny_model()
    engine = InlineEngine(model, TOKENS)
    with engine.conversing():
        first = engine.generate([[3, 10, 11]], 1, Sampling(4), [0])[0]
        then = [3, 10, 11, *first.ids.tolist(), 12]
        with torch.no_grad():
            model.lm_head.weight.mul_(2.0)
            model.model.layers[0].self_attn.k_proj.weight.mul_(-1.0)
        engine.refresh(1)
        renewed = engine.generate([then], 1, Sampling(4), [1])[0]
    seen = read(model)
    assert "engine/prompt_kept" in engine.metrics()
    again = engine.generate([[*then, *renewed.ids.tolist(), 9]], 1, Sampling(1), [2])[0]
    assert "engine/prompt_kept" not in engine.metrics(), "of a conversation, which this was not"
    assert seen == [len(then) + len(renewed.ids) + 1], "outside of a rollout all is read"
    assert len(again.ids) == 1
    assert renewed.ids.tolist() == InlineEngine(model, TOKENS).generate([then], 1, Sampling(4), [1])[0].ids.tolist()


def test_models_that_look_at_columns_keep_nothing():
    shape = {"vocab_size": len(SPECIAL) + len(CHARACTERS), "hidden_size": 32, "intermediate_size": 64}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8}
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**shape)).eval()
    engine = InlineEngine(model, TOKENS)
    samples = played(engine)
    assert "engine/prompt_kept" not in engine.metrics()
    expect_alike(samples, played(InlineEngine(model, TOKENS, kept_bytes=0)))


def test_who_is_asked_for_is_found_by_all_of_his_tokens():
    kept = Prefixes()
    states = torch.arange(2 * 1 * 3 * 1, dtype=torch.float32).view(2, 1, 3, 1)
    kept.put([[1, 2, 3], [1, 2, 4]], [(states, states)], None)
    assert kept.take([1, 2]) is None and kept.take([1, 2, 3]) is None, "the last token must be read"
    found = kept.take([1, 2, 4, 9])
    assert found is not None and found.row == 1
    assert kept.take([1, 2, 4, 9]) is None, "it goes on once"
    assert kept.take([1, 2, 3, 3]) is not None
    assert (kept.kept.asked, kept.kept.found) == (2 + 3 + 4 + 4 + 4, 6)
