"""Layers by hand on a GPU: as near to float32 as the module in bfloat16, whatever is kept; out of memory; no growth."""

import copy
import gc
from dataclasses import replace

import pytest
import torch

from grpo.language.scoring import memory
from grpo.language.scoring.decoder_layout import KEEP
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
    return scores.logp_NT.detach().double(), torch.cat([p.grad.flatten().double() for p in model.parameters()])


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


@pytest.mark.parametrize("keep", KEEP[1:])
def test_what_is_kept_changes_rounding_at_most(keep):
    model = family("qwen3")
    logp, grad = found(model, "auto", keep=KEEP[0])
    other_logp, other_grad = found(model, "auto", keep=keep)
    assert torch.equal(logp, other_logp) and relative(other_grad, grad) < 1e-2


def test_memory_decides_what_is_kept(monkeypatch):
    scorer = make_scorer(family("llama").cuda(), 1.0, autocast=torch.bfloat16)
    each = [scorer.plan.layers.kept_bytes(keep) for keep in KEEP]
    tile, passing = 2 * memory.TILE_BYTES["cuda"], scorer.plan.layers.passing_bytes()
    for free, expected in ((each[0] + 1, KEEP[0]), (each[1] + 1, KEEP[1]), (1, KEEP[2])):
        monkeypatch.setattr(memory, "free_memory", lambda _, free=free: (1000 * (free + passing) + tile) / 0.9)
        assert memory.most_to_keep(scorer.plan.layers, 1000, scorer.device) == expected
    monkeypatch.setattr(memory, "free_memory", lambda _: 0)
    assert scorer.budget == memory.LEAST
    monkeypatch.setattr(memory, "free_memory", lambda _: 10**15)
    assert scorer.budget == memory.MOST


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
