"""The engines: the conformance checks, what they share, and the kinds of models."""

import warnings

import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from grpo.config import ConfigError
from grpo.language.engines import Sampling
from grpo.language.engines.choose import make_engine
from grpo.language.engines.hf import HFEngine
from grpo.language.engines.inline import InlineEngine
from tests.unit.language.conformance import CHECKS, ids_of, naive, prompts, scored, tokens
from tests.unit.language.tiny import tiny_model

ENGINES = [InlineEngine, HFEngine]
GREEDY = Sampling(max_new_tokens=10, temperature=0.0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_engines_conform(check, engine):
    check(engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_at_a_time_changes_no_completion(engine):
    model, asked = tiny_model(), prompts()
    whole = ids_of(engine(model, tokens()).generate(asked, 3, GREEDY, range(9)))
    assert ids_of(engine(model, tokens(), rows_at_a_time=2).generate(asked, 3, GREEDY, range(9))) == whole


def test_a_prompt_is_read_once_and_finished_rows_cost_nothing():
    model, seen = tiny_model(), []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    made = InlineEngine(model, tokens({2, 50, 51, 52, 53, 54})).generate(
        [*prompts("abc", "def"), *prompts("abc")], 4, Sampling(max_new_tokens=40), range(12)
    )
    lengths = [len(completion.ids) for completion in made]
    assert seen[0] == (2, 3)  # two distinct prompts of three tokens, not twelve
    assert [rows for rows, _ in seen[1:]] == [sum(length > t for length in lengths) for t in range(1, max(lengths))]


def test_long_prompts_are_not_padded_to_with_short_ones():
    model, seen = tiny_model(), []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    InlineEngine(model, tokens()).generate(prompts("a" * 90, "b" * 10, "c" * 12), 1, GREEDY, range(3))
    assert seen[:2] == [(2, 12), (1, 90)]


def test_caches_grow_and_prompts_are_read_in_parts_without_a_trace(monkeypatch):
    model, asked = tiny_model(), prompts("abc", "abd", "abcd", "bcde")
    monkeypatch.setattr("grpo.language.engines.attention.SPARE", 2)
    monkeypatch.setattr("grpo.language.engines.reading.TOKENS_AT_A_TIME", 8)
    assert ids_of(InlineEngine(model, tokens()).generate(asked, 1, GREEDY, range(4))) == [
        naive(model, prompt, 10) for prompt in asked
    ]


def test_kept_is_the_share_that_truncation_left():
    model, (prompt,) = tiny_model(), prompts("x")
    with torch.no_grad():
        share = model(torch.tensor([prompt])).logits[0, -1].softmax(-1).topk(5).values.sum()
    (cut,) = InlineEngine(model, tokens()).generate([prompt], 1, Sampling(max_new_tokens=1, top_k=5), [0])
    (whole,) = InlineEngine(model, tokens()).generate([prompt], 1, Sampling(max_new_tokens=1), [0])
    assert cut.kept == pytest.approx(float(share), abs=1e-6) and whole.kept == 1.0


def test_lora_is_sampled_with_its_adapter():
    base = tiny_model()
    before = naive(base, prompts()[0], 10)
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    model.gradient_checkpointing_enable()
    model.train()
    for engine in ENGINES:
        made = engine(model, tokens()).generate(prompts(), 1, GREEDY, range(3))
        model.eval()
        assert ids_of(made) == [naive(model, prompt, 10) for prompt in prompts()]
        assert ids_of(made)[0] != before
        model.train()


def kinds():
    """Tiny models of other architectures."""
    shape = {
        "vocab_size": 104,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    sliding = {"sliding_window": 6}
    yield "qwen3", transformers.Qwen3Config(**shape)
    yield "mistral", transformers.MistralConfig(**shape, **sliding)
    yield (
        "gemma3",
        transformers.Gemma3TextConfig(
            **shape, **sliding, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        ),
    )
    yield "gemma2", transformers.Gemma2Config(**shape, **sliding, attn_implementation="eager")
    yield (
        "gpt2",
        transformers.GPT2Config(vocab_size=104, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
    )
    yield "bloom", transformers.BloomConfig(vocab_size=104, hidden_size=32, n_layer=2, n_head=4)
    yield "llama eager", transformers.LlamaConfig(**shape, attn_implementation="eager")


@pytest.mark.parametrize(("name", "config"), list(kinds()), ids=lambda value: value if isinstance(value, str) else "")
def test_architectures_agree_with_full_forward_passes(name, config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    asked = prompts()
    expected = [naive(model, prompt, 10) for prompt in asked]
    engine = InlineEngine(model, tokens())
    assert ids_of(engine.generate(asked, 1, GREEDY, range(3))) == expected
    for row, completion in enumerate(engine.generate(asked, 2, Sampling(max_new_tokens=12), range(6))):
        torch.testing.assert_close(
            completion.logp, scored(model, asked[row // 2], completion.ids.tolist()), atol=1e-4, rtol=0
        )


def test_bfloat16_weights_are_sampled_with_a_float32_softmax():
    model, asked = tiny_model().to(torch.bfloat16), prompts()
    for row, completion in enumerate(InlineEngine(model, tokens()).generate(asked, 2, Sampling(12), range(6))):
        assert completion.logp.dtype == torch.float32
        expected = scored(model, asked[row // 2], completion.ids.tolist())
        torch.testing.assert_close(completion.logp, expected, atol=0.1, rtol=0)


def mamba():
    config = transformers.MambaConfig(vocab_size=104, hidden_size=32, num_hidden_layers=2, state_size=4)
    torch.manual_seed(0)
    return transformers.MambaForCausalLM(config).eval()


def test_auto_falls_back_to_transformers_and_says_why():
    model = mamba()
    with pytest.warns(UserWarning, match="recurrent state"):
        engine = make_engine("auto", model, tokens())
    assert engine.name == "transformers"
    made = engine.generate(prompts("hello"), 1, GREEDY, [0])
    assert ids_of(made) == [naive(model, prompts("hello")[0], 10)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_engine("auto", tiny_model(), tokens()).name == "inline"
    with pytest.raises(ConfigError, match=r"recurrent state.*engine=transformers"):
        make_engine("inline", model, tokens())


def test_models_that_inline_cannot_run_are_named():
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 104}
    encoder = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape))
    assert InlineEngine.supports(encoder) == "it has an encoder"
    with pytest.raises(ConfigError, match="has an encoder"):
        HFEngine(encoder, tokens())
    assert "not a transformers model" in InlineEngine.supports(torch.nn.Linear(2, 2))
    soft = get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert "PROMPT_TUNING" in InlineEngine.supports(soft)


def test_wrong_engine_settings_are_named():
    with pytest.raises(ConfigError, match="inline does not take rows; it takes rows_at_a_time"):
        make_engine("inline", tiny_model(), tokens(), rows=3)
    with pytest.raises(ConfigError, match="engine=tgi: use auto, inline"):
        make_engine("tgi", tiny_model(), tokens())


def test_a_setting_s_former_name_is_understood():
    assert make_engine("inline", tiny_model(), tokens(), pages=7)._blocks == 7


@pytest.mark.parametrize("engine", ENGINES)
def test_what_cannot_be_sampled_is_refused(engine):
    made = engine(tiny_model(max_position_embeddings=32), tokens())
    with pytest.raises(ConfigError, match="prompt 1 is empty"):
        made.generate([[5], []], 1, GREEDY, range(2))
    with pytest.raises(ConfigError, match="prompt 0 has 32 tokens and the model's context 32"):
        made.generate([[5] * 32], 1, GREEDY, [0])
    with pytest.raises(ConfigError, match="outside the model's vocabulary"):
        made.generate([[5, 9999]], 1, GREEDY, [0])
    with pytest.raises(ValueError, match="need as many seeds, not 3"):
        made.generate([[5]], 2, GREEDY, range(3))
    assert made.generate([], 2, GREEDY, []) == []


def test_weights_that_are_not_finite_are_an_error():
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        InlineEngine(model, tokens()).generate(prompts(), 1, Sampling(4), range(3))
