"""Projections with adapters beside them: PEFT's numbers and gradients; weights held once; what is not plain LoRA."""

import copy
import gc
import sys
import types
import weakref

import pytest
import torch
from torch import nn

from grpo.language.scoring import projections
from grpo.language.scoring.decoder_layout import Unsupported, unwrapped
from grpo.language.scoring.projections import Gradients, Packed, rounded

peft = pytest.importorskip("peft")


TOKENS, WIDTH, SIZES = 11, 12, (8, 4, 6)


class Three(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, size, bias=bias) for size in SIZES)

    def forward(self, x):
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


def adapted(biased=False, targets=("q", "k", "v"), dtype=torch.float32, **how):
    torch.manual_seed(0)
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 3, "target_modules": list(targets)} | how)
    model = peft.get_peft_model(Three(biased).to(dtype), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


def parts(model):
    inner = model.get_base_model()
    return [inner.q, inner.k, inner.v]


def laid(modules, dtype=torch.float32):
    copies = []
    found = Packed(modules, dtype).now(copies)
    for to, of in copies:
        to.copy_(of)
    return found


def by_hand(modules, x, grad, tiles=1, dtype=torch.float32):
    """What comes out, the gradient by what was read, and by each parameter."""
    now = laid(modules, dtype)
    needed = [p.requires_grad for p in now.parameters]
    sums, back = Gradients(now, needed, tiles), []
    for mine, theirs in zip(torch.chunk(x, tiles), torch.chunk(grad, tiles), strict=True):
        side = now.side_back(theirs)
        sums.add(theirs, side, mine)
        back.append(now.back(theirs, side))
    return now(x), torch.cat(back), dict(zip(map(id, now.parameters), sums.found(), strict=True))


CASES = {
    "all three": {},
    "some": {"targets": ("q", "v")},
    "ranks and scales of their own": {"rank_pattern": {"k": 5}, "alpha_pattern": {"v": 1}},
    "rsLoRA": {"use_rslora": True},
    "with a bias that is trained": {"bias_": True, "bias": "all"},
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_peft(case):
    how = dict(CASES[case])
    model = adapted(how.pop("bias_", False), **how)
    x, grad = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randn(TOKENS, sum(SIZES))
    expected = model(x)
    expected.backward(grad)
    for tiles in (1, 3):
        out, d_x, found = by_hand(parts(model), x.detach(), grad, tiles)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(d_x, x.grad, rtol=1e-5, atol=1e-5)
        for name, parameter in model.named_parameters():
            mine = found[id(parameter)]
            assert (mine is None) == (not parameter.requires_grad), name
            if mine is not None:
                torch.testing.assert_close(mine, parameter.grad, rtol=1e-5, atol=1e-5)


def test_onto_adds_the_adapter_too():
    model = adapted(targets=("q",))
    around, x = torch.randn(TOKENS, SIZES[0], dtype=torch.float32), torch.randn(TOKENS, WIDTH)
    found = laid(parts(model)[:1]).onto(around, x)
    torch.testing.assert_close(found, around + parts(model)[0](x), rtol=1e-5, atol=1e-5)


def test_float32_adapters_on_bfloat16_weights_are_rounded_as_under_autocast():
    exact = adapted()
    model = adapted(dtype=torch.bfloat16)
    assert {p.dtype for name, p in model.named_parameters() if "lora" in name} == {torch.float32}
    with torch.no_grad():
        for mine, theirs in zip(exact.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    x, grad = torch.randn(TOKENS, WIDTH).bfloat16(), torch.randn(TOKENS, sum(SIZES)).bfloat16()
    exact(x.float()).backward(grad.float())
    with torch.autocast("cpu", torch.bfloat16):
        model(x).backward(grad)
    _, _, found = by_hand(parts(model), x, grad, dtype=torch.bfloat16)

    def gap(grads):
        whole = [p.grad for p in exact.parameters() if p.grad is not None]
        return float(torch.cat([(a - b).flatten() for a, b in zip(grads, whole, strict=True)]).norm())

    mine = [found[id(p)] for p in model.parameters() if p.requires_grad]
    assert all(grad.dtype == torch.float32 for grad in mine)
    assert gap(mine) < 1.5 * gap([p.grad for p in model.parameters() if p.requires_grad])


def test_a_frozen_base_costs_no_product_and_no_memory(monkeypatch):
    made = []
    monkeypatch.setattr(projections, "product", lambda left, right, out: made.append(tuple(out.shape)))
    model = adapted(dtype=torch.bfloat16)
    by_hand(parts(model), torch.randn(TOKENS, WIDTH).bfloat16(), torch.randn(TOKENS, 18).bfloat16(), 1, torch.bfloat16)
    assert made == [(6, WIDTH), (8, 2), (4, 2), (6, 2)]


def test_weights_of_the_type_that_is_computed_in_are_held_once():
    model = adapted(dtype=torch.bfloat16)
    before = [module.base_layer.weight.clone() for module in parts(model)]
    whole = laid(parts(model), torch.bfloat16).whole
    for module, weight in zip(parts(model), before, strict=True):
        assert module.base_layer.weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert torch.equal(module.base_layer.weight, weight)
    assert laid(parts(model), torch.bfloat16).whole.data_ptr() == whole.data_ptr()


def test_adapters_are_taken_as_they_are_at_that_moment():
    model = adapted()
    x = torch.randn(TOKENS, WIDTH)
    packed = Packed(parts(model), torch.float32)

    def now():
        copies = []
        found = packed.now(copies)
        for to, of in copies:
            to.copy_(of)
        return found

    before = now()
    on = before(x)
    with model.disable_adapter():
        torch.testing.assert_close(now()(x), model(x))
    assert not torch.allclose(now()(x), laid([m.base_layer for m in parts(model)])(x))
    model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    model.set_adapter("other")
    torch.testing.assert_close(now()(x), model(x))  # its B is 0
    assert torch.equal(before(x), on)  # a pass that is under way is left alone
    model.set_adapter("default")
    torch.testing.assert_close(now()(x), on)


@pytest.mark.parametrize("why", ["Dora", "bias", "at once", "hook"])
def test_what_is_not_plain_lora_says_why(why):
    model = adapted(**{"Dora": {"use_dora": True}, "bias": {"lora_bias": True}}.get(why, {}))
    if why == "at once":
        model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
        model.base_model.set_adapter(["default", "other"])
    if why == "hook":
        parts(model)[0].register_forward_hook(lambda *_: None)
    with pytest.raises(Unsupported, match=why):
        unwrapped(parts(model)[0])


def test_adapters_that_are_not_lora_are_named():
    model = peft.get_peft_model(Three(False), peft.IA3Config(target_modules=["q"], feedforward_modules=[]))
    with pytest.raises(Unsupported, match="no LoRA"):
        Packed(parts(model), torch.float32)


class Params4bit(nn.Parameter):
    """As bitsandbytes' class of that name: codes, and a state with which they are numbers again."""


class Linear4bit(nn.Module):
    """As bitsandbytes' class of that name: its weight is a column of codes."""

    def __init__(self, linear):
        super().__init__()
        self.out_features, self.in_features, self.bias = *linear.weight.shape, None
        scale = linear.weight.detach().abs().max() / 7
        codes = (linear.weight.detach() / scale).round().to(torch.int8)
        self.weight = Params4bit(codes.flatten()[:, None], requires_grad=False)
        self.weight.quant_state = (scale, codes.shape)

    def forward(self, x):
        return nn.functional.linear(x, dequantize_4bit(self.weight.data, self.weight.quant_state))


def dequantize_4bit(codes, state):
    scale, shape = state
    return codes.view(shape) * scale


def test_quantised_weights_are_made_whole_for_a_product_and_again_on_the_way_back(monkeypatch):
    calls = []

    def counted(codes, state):
        calls.append(1)
        return dequantize_4bit(codes, state)

    fake = types.ModuleType("bitsandbytes")
    fake.functional = types.SimpleNamespace(dequantize_4bit=counted)
    monkeypatch.setitem(sys.modules, "bitsandbytes", fake)
    model = adapted()
    for module in parts(model):
        module.base_layer = Linear4bit(module.base_layer)
    x, grad = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randn(TOKENS, sum(SIZES))
    expected = model(x)
    expected.backward(grad)
    out, d_x, found = by_hand(parts(model), x.detach(), grad)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d_x, x.grad, rtol=1e-5, atol=1e-5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(found[id(parameter)], parameter.grad, rtol=1e-5, atol=1e-5)
    assert len(calls) == 6


def test_what_is_rounded_for_sampling_and_for_gradients_is_one_memory():
    one, other = (nn.Linear(4, 3, bias=False) for _ in range(2))
    parts = [one.weight, other.weight]
    first, second = Packed([one, other], torch.bfloat16), Packed([one, other], torch.bfloat16)
    held = [packed.now([]).whole for packed in (first, second)]
    assert held[0].data_ptr() == held[1].data_ptr() == rounded(parts, torch.bfloat16).data_ptr()
    assert torch.equal(held[0], torch.cat(parts).bfloat16())
    assert rounded(parts[::-1], torch.bfloat16).data_ptr() != held[0].data_ptr()
    assert rounded(parts, torch.float16).data_ptr() != held[0].data_ptr()
    gone = weakref.ref(held[0])
    del first, second, held
    gc.collect()
    assert gone() is None  # nobody holds it: it is given back
