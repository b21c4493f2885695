"""Weights laid out for a rollout on the CPU: the same numbers, and nothing left behind."""

import pytest
import torch

from grpo.language.engines import Sampling, Tokens, linears
from grpo.language.engines.inline import InlineEngine
from grpo.language.engines.linears import laid_out
from tests.unit.language.tiny import tiny_model

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
NEVER = Tokens(None, frozenset({10_000}), 0)
ASKED = [[5, 6, 7, 8], [9] * 12]


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    monkeypatch.setattr(linears, "LEAST_SIZE", 1)


def ids_of(completions):
    return [completion.ids.tolist() for completion in completions]


def test_layers_give_the_same_and_are_themselves_again():
    model = tiny_model(attention_bias=True)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.normal_()
        for ids in (torch.tensor(ASKED[:1]), torch.randint(0, 60, (3, 40))):
            plain = model(ids).logits
            with laid_out(model, 8):
                assert "forward" in vars(model.lm_head) and "forward" in vars(model.model.layers[0].mlp.up_proj)
                torch.testing.assert_close(model(ids).logits, plain, atol=1e-5, rtol=1e-5)
    assert not any("forward" in vars(module) for module in model.modules())


def test_it_is_done_where_it_pays(monkeypatch):
    model = tiny_model()

    def count(steps=8):
        with laid_out(model, steps):
            return sum("forward" in vars(module) for module in model.modules())

    assert count() == 15 and count(steps=7) == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert count() == 0
    monkeypatch.setattr(linears, "free_bytes", lambda: 1000.0)
    assert count() == 0
    monkeypatch.setattr(linears, "free_bytes", lambda: 1e12)
    monkeypatch.setattr(linears, "LEAST_SIZE", 3000)
    assert count() == 1  # the head


def test_a_rollout_sees_the_weights_of_now_and_leaves_the_module_alone():
    model = tiny_model()
    engine, sampling = InlineEngine(model, NEVER), Sampling(max_new_tokens=10, temperature=0.0)
    before = ids_of(engine.generate(ASKED, 1, sampling, range(2)))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    after = ids_of(engine.generate(ASKED, 1, sampling, range(2)))
    assert after != before
    plain = ids_of(engine.generate(ASKED, 1, Sampling(max_new_tokens=7, temperature=0.0), range(2)))
    assert [ids[:7] for ids in after] == plain  # so few are made without
    stream = engine.stream(ASKED, 1, sampling, range(2))
    next(stream)
    stream.close()
    assert not any("forward" in vars(module) for module in model.modules())
