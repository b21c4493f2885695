"""Attention in segments on a GPU, by torch's own flash kernel: the log-probs and gradients of rows by themselves."""

import pytest
import torch

from grpo.language.scoring import dense, segments
from grpo.language.scoring.probe import make_scorer
from grpo.language.scoring.segments import Segments, attend
from tests.gpu.test_language import make
from tests.unit.language.families import family
from tests.unit.language.test_segments import plain_backward, plain_forward, samples

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def relative(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize("long", [4096, 60])
def test_the_kernel_s_results_are_merged_exactly(monkeypatch, long):
    torch.manual_seed(0)
    monkeypatch.setattr(dense, "LONG", long)
    where = Segments.of([130, 1, 57], [[300, 20, 77], [5], [64, 64]], torch.device("cuda"))
    length = int(where.each.starts[-1])
    shapes = ((length, 8, 64), (length, 2, 64), (length, 2, 64))
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    grad = torch.randn(length, 8, 64, device="cuda", dtype=torch.bfloat16)
    assert torch.cuda.get_device_capability()[0] < 9 or dense.usable(q, k)
    out = attend(q, k, v, where, 0.125)
    mine = torch.autograd.grad(out, (q, k, v), grad)
    monkeypatch.setattr(segments, "flash_forward", plain_forward)
    monkeypatch.setattr(segments, "flash_backward", plain_backward)
    there = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    where = Segments.of([130, 1, 57], [[300, 20, 77], [5], [64, 64]], torch.device("cpu"))
    expected = attend(*there, where, 0.125)
    assert relative(out.cpu(), expected) < 1e-2
    for a, b in zip(mine, torch.autograd.grad(expected, there, grad.double().cpu()), strict=True):
        assert relative(a.cpu(), b) < 2e-2


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi3"])
def test_log_probs_and_gradients_in_bfloat16(name):
    if name == "gemma3":  # its window is left to rows with padding
        assert make_scorer(family(name).cuda(), 0.7, autocast=torch.bfloat16).packing == "padded"
        return
    found = []
    for packing in ("padded", "auto"):
        model = family(name).cuda()
        scorer = make_scorer(model, 0.7, packing, autocast=torch.bfloat16)
        with scorer.precision():
            scores = scorer(samples(), 7)
        scores.logp_NT.sum().backward()
        found.append((scores.logp_NT, [p.grad for p in model.parameters()]))
    assert scorer.packing == "segments"
    assert (found[0][0] - found[1][0]).abs().max() < 0.2
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert relative(b, a) < 0.1


def test_a_trainer_takes_it_and_learns():
    trainer = make(dtype="bfloat16", gradient_checkpointing=True)
    assert trainer.policy.scorer.packing == "segments"
    report = trainer.step()
    assert report["loss"] is not None and report["updates"] == 1
    trainer.source.close()
