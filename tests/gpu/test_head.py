"""Log-probs of hidden states on a GPU: the definition's numbers, the plain path's, little memory, no waiting.

Bounds, against the definition in float64 on the same rounded inputs. bfloat16: log-probs and entropies within 2e-3
where products go into float32 (else logits are rounded: 6e-2), gradients within 2e-2 of their norm. float32: both 1e-4.
"""

import pytest
import torch

from grpo.language.scoring import head
from grpo.language.scoring.head import log_probs
from grpo.language.scoring.scorer import Scorer, ScoringPlan
from tests.unit.language.tiny import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def numbers(tokens, vocabulary, width, dtype, seed=0):
    random = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, device="cuda")

    hidden, weight = normal(tokens, width).to(dtype), (3 * normal(vocabulary, width) / width**0.5).to(dtype)
    target = torch.randint(vocabulary, (tokens,), generator=random, device="cuda")
    return hidden, weight, target, normal(tokens), normal(tokens)


def leaves(*values):
    return [value.detach().clone().requires_grad_() for value in values]


def defined(hidden, weight, target, temperature):
    """In float64."""
    logp_MV = (hidden @ weight.t() / temperature).log_softmax(-1)
    return logp_MV.gather(1, target[:, None])[:, 0], -(logp_MV.exp() * logp_MV).sum(-1)


def pulled(outputs, weights, inputs):
    return torch.autograd.grad(sum((out * w).sum() for out, w in zip(outputs, weights, strict=True)), inputs)


@pytest.mark.parametrize("vocabulary", [100, 4096, 32003, 151_936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tile", [None, 100], ids=["one tile", "several tiles"])
def test_the_definition_s_values_and_gradients(vocabulary, dtype, tile):
    hidden, weight, target, *weights = numbers(384, vocabulary, 128, dtype)
    mine, exact = leaves(hidden, weight), leaves(hidden.double(), weight.double())
    found = log_probs(*mine, target, 0.7, entropy=True, tile=tile)
    expected = defined(*exact, target, 0.7)
    wide = head.wide("mm", dtype, hidden.device)
    bound = 1e-4 if dtype == torch.float32 else 2e-3 if wide else 6e-2
    for out, other in zip(found, expected, strict=True):
        torch.testing.assert_close(out.double(), other, rtol=0, atol=bound)
    for grad, other in zip(pulled(found, weights, mine), pulled(expected, weights, exact), strict=True):
        assert grad.dtype == dtype
        assert (grad - other).norm() < (1e-4 if dtype == torch.float32 else 2e-2) * other.norm()


def test_a_gradient_is_not_written_where_logits_are_still_read():
    """The narrower gradient lies over the logits: the same numbers every time, and those of one that is as wide."""
    from grpo.language.scoring.kernels.head import differentiate, room_for, summarise

    random = torch.Generator("cuda").manual_seed(1)
    logits = 3 * torch.randn(512, 151_936, generator=random, device="cuda")
    target = torch.randint(151_936, (512,), generator=random, device="cuda")
    out = room_for(512, True, logits.device)
    summarise(logits, target, 1.0, None, out)
    w = torch.randn(2, 512, generator=random, device="cuda")

    def gradient(dtype):
        return differentiate(logits.clone(), target, 1.0, None, out.lse_M, out.entropy_M, w[0], w[1], dtype)

    first = gradient(torch.bfloat16)
    torch.testing.assert_close(first.float(), gradient(torch.float32), rtol=1e-2, atol=1e-8)
    for _ in range(20):
        assert torch.equal(gradient(torch.bfloat16), first)


def test_no_tensor_of_all_tokens_and_the_vocabulary():
    tokens, vocabulary = 32_768, 32_768
    hidden, weight, target, w, _ = numbers(tokens, vocabulary, 256, torch.bfloat16)
    mine = leaves(hidden, weight)
    log_probs(hidden[:16], weight, target[:16], 1.0)  # what is loaded at first use is not the pass's
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logp_M, entropy_M = log_probs(*mine, target, 1.0, entropy=True)
    pulled([logp_M, entropy_M], [w, w], mine)
    assert torch.cuda.max_memory_allocated() - before < 2 * tokens * vocabulary


def test_nobody_waits():
    hidden, weight, target, *weights = numbers(64, 1000, 32, torch.bfloat16)
    mine = leaves(hidden, weight)
    pulled(log_probs(*mine, target, 1.0, entropy=True), weights, mine)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pulled(log_probs(*mine, target, 1.0, entropy=True), weights, mine)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("trained", [True, False], ids=["head is trained", "head is frozen"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_the_plain_path_s_numbers(trained, autocast):
    model = tiny_model(vocab_size=5003, hidden_size=64).cuda()
    model.lm_head.weight.requires_grad_(trained)
    hidden, _, target, *weights = numbers(300, 5003, 64, torch.float32)
    found = []
    for fused in (False, True):
        mine = leaves(hidden) + ([model.lm_head.weight] if trained else [])
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            assert head.fuses(model.lm_head, hidden)
            out = Scorer(model, 0.7, ScoringPlan(fused_head=fused)).of_hidden(mine[0], target, True)
            found.append([*out, *pulled(out, weights, mine)])  # here: the plain path computes its tiles again
    assert len(found[0]) == 3 + trained
    for plain, mine in zip(*found, strict=True):
        assert plain.dtype == mine.dtype == torch.float32
        if autocast:  # whose logits are rounded
            assert (plain - mine).norm() < 2e-2 * plain.norm()
        else:
            torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-4)
