"""Each layout of image-text models: the ids of its own processor, the plain module's numbers, images in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo.errors import ConfigError
from grpo.language.config import LanguageConfig
from grpo.language.data.chat import Chat, prepare_tokenizer
from grpo.language.data.prompts import Prompts
from grpo.language.engines import Sampling
from grpo.language.engines.hf import HFEngine
from grpo.language.engines.inline import InlineEngine
from grpo.language.model import vision
from grpo.language.model.adapters import with_adapter
from grpo.language.pictures.processor import Pictures
from grpo.language.samples import Sample
from grpo.language.scoring.scorer import Scorer, ScoringPlan
from grpo.language.source import OneAnswer
from tests.unit.language.pictures import drawn, layouts

ASKED = [
    {"role": "system", "content": "look well"},
    {"role": "user", "content": [{"type": "text", "text": "first "}, {"type": "image"}, {"type": "image"}]},
    {"role": "assistant", "content": "seen"},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " and?"}]},
]
"""Several turns, several images."""


def chat_of(processor: Any) -> Chat:
    return Chat(vision.tokenizer_of(processor), pictures=Pictures(processor))


def plainly(model: Any, processor: Any, sample: Sample, image: Any) -> torch.Tensor:
    """Log-probs of a completion as the module gives them for what its processor makes of prompt and image."""
    own = processor(text=[sample.prompt.text], images=[[image]], return_tensors="pt", add_special_tokens=False)
    length = own["input_ids"].shape[1]
    for name, value in own.items():
        if value.ndim == 2 and value.shape[1] == length:  # a number a token: those of the completion come behind
            more = sample.ids if name == "input_ids" else torch.full_like(sample.ids, name == "attention_mask")
            own[name] = torch.cat([value, more[None]], 1)
    logp_TV = model(**own).logits[0, length - 1 : -1].log_softmax(-1)
    return logp_TV.gather(1, sample.ids[:, None])[:, 0]


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_ids_are_those_of_the_models_own_processor(layout: str) -> None:
    _, processor = layouts.make(layout)
    images = [drawn.noise(0), drawn.noise(1, 40, 20), drawn.noise(2, 16, 48)]
    prompt = Prompts([{"prompt": ASKED, "images": images}], chat_of(processor), max_length=None)[0]
    parts = [
        {**m, "content": [{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else m["content"]}
        for m in ASKED
    ]
    text = processor.tokenizer.apply_chat_template(parts, add_generation_prompt=True, tokenize=False)
    own = processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
    assert list(prompt.ids) == own["input_ids"][0].tolist()
    assert prompt.text == text


def test_the_text_of_an_image_token_is_text() -> None:
    _, processor = layouts.make("qwen2_5_vl")
    row = {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "<image>?"}]}]}
    with pytest.warns(UserWarning, match="control tokens"):
        prompt = Prompts([{**row, "image": drawn.noise(0)}], chat_of(processor), max_length=None)[0]
    image = layouts.CONTROL.index("<image>")
    assert list(prompt.ids).count(image) == 6  # 24 × 16 pixels are 6 × 4 patches, of which four make a token
    assert "<image>?" in processor.tokenizer.decode([i for i in prompt.ids if i != image])


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_gradients_are_the_plain_modules(layout: str) -> None:
    """The tower's, too: it reads an image once for all completions, the plain module once for each."""
    model, processor = layouts.make(layout)
    rows = drawn.rows(3)
    rows[1] |= {"image": drawn.noise(7, 44, 20)}
    prompts = Prompts(rows, chat_of(processor), max_length=None)
    asked, random = [prompts[i] for i in (2, 0, 1)], torch.Generator().manual_seed(3)
    samples = []
    for number in range(7):  # of different lengths, one prompt three times, in no order
        ids = torch.randint(len(layouts.CONTROL), 60, (1 + number % 4,), generator=random)
        samples.append(Sample(asked[number % 3], ids, torch.ones(len(ids), dtype=torch.bool), None, "length", ""))
    weight_NT = torch.randn(len(samples), 4, generator=random)

    ours = (Scorer(model, 1.0, ScoringPlan())(samples, 4).logp_NT * weight_NT).sum()
    wanted = list(model.parameters())
    got = torch.autograd.grad(ours, wanted, materialize_grads=True)
    each = [plainly(model, processor, sample, rows[sample.prompt.row]["image"]) for sample in samples]
    plain = sum((logp * weight_T[: len(logp)]).sum() for logp, weight_T in zip(each, weight_NT, strict=True))
    expected = torch.autograd.grad(plain, wanted, materialize_grads=True)
    assert torch.allclose(ours, plain, atol=1e-5)
    for mine, right in zip(got, expected, strict=True):
        assert (mine - right).norm() <= 1e-5 * max(float(right.norm()), 1.0)
    assert any(float(g.norm()) > 0 for (name, _), g in zip(model.named_parameters(), got, strict=True) if "vis" in name)


@pytest.mark.parametrize("layout", ["qwen3_vl", "gemma3", "llava_next"])
def test_images_stay_with_their_prompts(layout: str) -> None:
    """Shuffled, in groups, in passes of their own: a completion is scored beside the image of its own row."""
    model, processor = layouts.make(layout)
    with torch.no_grad():  # louder than the initial weights: what an image shows must be heard
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    rows = drawn.rows(5)
    prompts = Prompts(rows, chat_of(processor), max_length=None, seed=1)
    tokens = prepare_tokenizer(processor.tokenizer)
    asked = prompts.batch(1, 4)
    order = [prompt.row for prompt in asked]
    assert order != sorted(order)
    player, sampling = OneAnswer(tokens), Sampling(max_new_tokens=3)
    engine = HFEngine(model, tokens, rows_at_a_time=4)
    groups = sorted(player(engine, asked, 2, sampling, list(range(8))))
    samples = [sample for _, group in groups for sample in group]
    assert [sample.prompt.row for sample in samples] == [row for row in order for _ in range(2)]
    logp_NT = Scorer(model, 1.0, ScoringPlan(), budget=100).in_parts(samples, 3).logp_NT
    apart = 0.0
    for sample, logp_T in zip(samples, logp_NT, strict=True):
        own, other = (
            plainly(model, processor, sample, rows[row]["image"]).detach()
            for row in (sample.prompt.row, (sample.prompt.row + 1) % 5)
        )
        assert torch.allclose(logp_T[: len(own)], own, atol=1e-4)
        apart = max(apart, float((own - other).abs().max()))
    assert apart > 1e-3, "the images are told apart"


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_our_own_loop_reads_images_as_the_module_does(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, it says what `generate` says; drawn, its log-probs are the scorer's. The tower sees an image once."""
    model, processor = layouts.make(layout)
    with torch.no_grad():  # louder than the initial weights: what an image shows must be heard
        for parameter in model.parameters():
            parameter.mul_(2.0 if parameter.ndim > 1 else 1.0)
    rows = drawn.rows(3)
    rows[1] |= {"image": drawn.noise(7, 44, 20)}
    prompts = Prompts(rows, chat_of(processor), max_length=None)
    tokens = prepare_tokenizer(processor.tokenizer, pictures=Pictures(processor))
    asked = [prompts[i] for i in (2, 0, 1)]
    inline, theirs = InlineEngine(model, tokens, rows_at_a_time=None), HFEngine(model, tokens)
    greedy, seeds = Sampling(max_new_tokens=6, temperature=0.0), list(range(12))
    told = [
        [one.ids.tolist() for one in engine.generate([prompt.ids for prompt in asked], 1, greedy, seeds[:3])]
        for engine in (inline, theirs)
    ]
    assert told[0] == told[1]

    seen: list[int] = []
    plain = model.base_model.get_image_features
    monkeypatch.setattr(
        model.base_model, "get_image_features", lambda **given: (seen.append(len(given)), plain(**given))[1]
    )
    groups = sorted(OneAnswer(tokens)(inline, asked, 4, Sampling(max_new_tokens=5), seeds))
    assert len(seen) <= 3, "once a prompt, or once for all"
    samples = [sample for _, group in groups for sample in group]
    logp_NT = Scorer(model, 1.0, ScoringPlan())(samples, 5).logp_NT
    for sample, logp_T in zip(samples, logp_NT, strict=True):
        assert sample.logp is not None and torch.allclose(sample.logp, logp_T[: sample.length], atol=1e-4)


def test_a_layout_that_our_own_loop_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = layouts.make("gemma3")
    monkeypatch.setattr(model.config, "model_type", "unheard_of", raising=False)
    tokens = prepare_tokenizer(processor.tokenizer, pictures=Pictures(processor))
    with pytest.raises(ConfigError, match=r"not of unheard_of; use engine=transformers"):
        InlineEngine(model, tokens)


def test_graphs_that_would_not_see_the_images_are_refused() -> None:
    model, processor = layouts.make("gemma3")
    tokens = prepare_tokenizer(processor.tokenizer, pictures=Pictures(processor))
    with pytest.raises(ConfigError, match="graphs: images are read by the plain loop; leave graphs out"):
        InlineEngine(model, tokens, graphs=True)


def test_the_decoder_alone_is_trained() -> None:
    model, _ = layouts.make("gemma3")
    kept = vision.freeze(model)
    assert kept == ["vision_tower", "multi_modal_projector"]
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and not [name for name in trained if "vision" in name or "projector" in name]
    adapted, _ = with_adapter(model, LanguageConfig(lora_rank=2), left_out=kept)
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert trained and all(".language_model." in name for name in trained)


def test_image_tokens_are_never_said() -> None:
    model, processor = layouts.make("qwen2_5_vl")
    image = layouts.CONTROL.index("<image>")
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    tokens = prepare_tokenizer(processor.tokenizer, pictures=Pictures(processor))
    assert image in tokens.unsaid
    prompts = Prompts(drawn.rows(1), chat_of(processor), max_length=None)
    for engine in (HFEngine(model, tokens), InlineEngine(model, tokens)):
        made = engine.generate([prompts[0].ids], 8, Sampling(max_new_tokens=32), list(range(8)))
        said = [int(i) for completion in made for i in completion.ids]
        assert len(said) > 60 and image not in said
