"""Layers by hand on a GPU: as near to float32 as the module in bfloat16, whatever is kept; out of memory; no growth."""

import copy
import gc
import warnings
from dataclasses import replace

import pytest
import torch

from grpo.language.scoring import memory
from grpo.language.scoring.decoder_layout import HOSTED, KEEP
from grpo.language.scoring.probe import make_scorer
from tests.gpu.test_language import make
from tests.unit.language.families import FUSED, family
from tests.unit.language.test_segments import samples
from tests.unit.language.tiny import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def found(model, packing, low=torch.bfloat16, keep=None, by_hand=True):
    model = copy.deepcopy(model).cuda()
    scorer = make_scorer(model, 0.7, packing, autocast=low)
    scorer.keep = keep
    assert not by_hand or scorer.by_hand
    if not by_hand:
        scorer.plan = replace(scorer.plan, layers=None)
    with scorer.precision():
        scores = scorer(samples(), 7)
    scores.logp_NT.sum().backward()
    grads = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    return scores.logp_NT.detach().double(), torch.cat(grads)


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", [name for name in FUSED if name != "mistral"])
def test_as_near_to_float32_as_the_module(name):
    model = family(name)
    exact = found(model, "padded", None, by_hand=False)
    module = found(model, "padded", by_hand=False)
    mine = found(model, "auto")
    for a, b, c in zip(mine, module, exact, strict=True):
        assert relative(a, c) < 2 * relative(b, c) + 1e-3


def with_lora(model, **how):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "target_modules": "all-linear"} | how))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


@pytest.mark.parametrize("how", ["all", "with the head", "rsLoRA, some"])
def test_adapters_are_as_near_to_float32_as_peft_s(how):
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    given = {
        "with the head": {"target_modules": [*linear, "lm_head"]},
        "rsLoRA, some": {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True},
    }.get(how, {})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*which is slower")
        model = with_lora(family("qwen3").bfloat16(), **given)
        exact = found(copy.deepcopy(model).float(), "padded", None, by_hand=False)
        module, mine = found(model, "padded", by_hand=False), found(model, "auto")
    for a, b, c in zip(mine, module, exact, strict=True):
        assert relative(a, c) < 2 * relative(b, c) + 1e-3


def test_the_reference_without_adapter_goes_by_hand_too():
    model = with_lora(family("qwen3").bfloat16()).cuda()
    scorer = make_scorer(model, 0.7, autocast=torch.bfloat16)
    assert scorer.by_hand and scorer.plan.fused_head
    base = make_scorer(copy.deepcopy(model).unload(), 0.7, autocast=torch.bfloat16)
    with scorer.precision(), torch.no_grad():
        on, expected = scorer(samples(), 7).logp_NT, base(samples(), 7).logp_NT
        with model.disable_adapter():
            off = scorer(samples(), 7).logp_NT
    assert torch.equal(off, expected) and not torch.allclose(on, off, atol=1e-3)


@pytest.mark.parametrize("how", [{"use_dora": True}, {"lora_bias": True}, {"modules_to_save": ["embed_tokens"]}])
def test_what_is_more_than_plain_lora_goes_through_the_module_and_says_why(how):
    model = with_lora(family("llama-mha"), **how).cuda()
    with pytest.warns(UserWarning, match="through the module, which is slower: .*(Dora|lora_bias|ModulesToSave)"):
        assert not make_scorer(model, 0.7, autocast=torch.bfloat16).by_hand


def test_sampler_and_update_hold_bfloat16_weights_once():
    model = with_lora(tiny_model().bfloat16())
    base = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "lora" not in name)
    trainer = make(model, dtype="bfloat16")
    assert trainer.policy.scorer.by_hand
    trainer.step()
    layers, decoder = trainer.policy.scorer.plan.layers, trainer.source.engine._runner.decoder
    for block, part in zip(layers.blocks, decoder.parts, strict=True):
        for packed, linears in ((block.qkv, part.qkv), (block.gate_up, part.gate_up), (block.down, part.down)):
            assert packed.now([]).whole.data_ptr() == linears.weight.data_ptr() == packed.bases[0].weight.data_ptr()
    assert base > 0 and all(p.grad is None for name, p in model.named_parameters() if "lora" not in name)
    trainer.source.close()


@pytest.mark.parametrize("keep", [*KEEP[1:], *HOSTED])
def test_what_is_kept_changes_rounding_at_most(keep):
    model = family("qwen3")
    logp, grad = found(model, "auto", keep=KEEP[0])
    other_logp, other_grad = found(model, "auto", keep=keep)
    assert torch.equal(logp, other_logp) and relative(other_grad, grad) < 1e-2


def test_host_memory_is_pinned_used_again_and_given_back():
    layers = 6
    model = with_lora(tiny_model(num_hidden_layers=layers).bfloat16()).cuda()
    scorer = make_scorer(model, 0.7, autocast=torch.bfloat16)
    scorer.keep = "host"
    found = []
    for _ in range(3):
        with scorer.precision():
            scorer(samples(), 7).logp_NT.sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        model.zero_grad()
    memory = scorer.plan.layers._host
    assert len(memory.free) == 1 and set(memory.free[0]) == set(range(layers - 1))
    assert all(piece.bytes.is_pinned() for piece in memory.free[0].values())
    with scorer.precision():  # one that is broken off leaves the next as it was
        first, second = scorer(samples(), 7).logp_NT.sum(), scorer(samples(), 7).logp_NT.sum()
    del first
    second.backward()
    found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert all(relative(other, found[0]) < 1e-3 for other in found[1:])


def test_memory_decides_what_is_kept(monkeypatch):
    scorer = make_scorer(family("llama").cuda(), 1.0, autocast=torch.bfloat16)
    layers, tile = scorer.plan.layers, 2 * memory.TILE_BYTES["cuda"]
    each = [layers.kept_bytes(keep) + layers.passing_bytes(1000, keep) for keep in KEEP]
    for free, expected in (*zip((size + 1 for size in each), KEEP, strict=True), (1, HOSTED[0])):
        monkeypatch.setattr(memory, "free_memory", lambda _, free=free: (1000 * free + tile) / 0.9)
        assert memory.most_to_keep(scorer.plan.layers, 1000, scorer.device) == expected
    rows = samples()
    monkeypatch.setattr(memory, "free_memory", lambda _: 0)
    least, _ = scorer.chosen(rows)
    monkeypatch.setattr(memory, "free_memory", lambda _: 10**15)
    assert least < scorer.chosen(rows)[0] <= sum(len(row.prompt.ids) + row.length for row in rows)


def test_out_of_memory_halves_the_passes_and_leaves_the_gradient(monkeypatch):
    def weights(fail):
        trainer = make(dtype="bfloat16")
        assert trainer.policy.scorer.by_hand
        if fail:
            layers, left = trainer.policy.scorer.plan.layers, [1]
            former = type(layers).__call__

            def failing(self, *args):
                if torch.is_grad_enabled() and left:
                    left.pop()
                    raise torch.OutOfMemoryError("injected")
                return former(self, *args)

            monkeypatch.setattr(type(layers), "__call__", failing)
            monkeypatch.setattr(type(trainer.source), "make_room", lambda self: False)
        report = trainer.step()
        trainer.source.close()
        return report, torch.cat([p.detach().flatten() for p in trainer.policy.parameters().values()])

    (whole, plain), (halved, other) = weights(False), weights(True)
    assert "microbatch_halvings" not in whole and halved["microbatch_halvings"] == 1
    assert relative(other.double(), plain.double()) < 1e-3


def test_weights_in_bfloat16_are_updated_by_hand_and_move():
    trainer = make(tiny_model().bfloat16(), weights="bfloat16")
    assert trainer.policy.scorer.by_hand and trainer.policy.scorer.packing == "segments"
    before = torch.cat([p.detach().flatten() for p in trainer.policy.parameters().values()])
    assert trainer.step()["updates"] == 1
    after = torch.cat([p.detach().flatten() for p in trainer.policy.parameters().values()])
    assert after.dtype == torch.bfloat16 and bool(torch.isfinite(after).all()) and not torch.equal(before, after)
    trainer.source.close()


def test_three_hundred_steps_take_no_more_memory():
    trainer = make(dtype="bfloat16")
    for _ in range(20):
        trainer.step().forget()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(280):
        trainer.step().forget()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**20
    trainer.source.close()
