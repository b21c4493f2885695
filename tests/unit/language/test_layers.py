"""Layers with a backward pass by hand: the module's own numbers, whatever is kept; kernels interpreted on a CPU."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton, which is there for Linux")

from grpo.language.scoring import layers as module_layers
from grpo.language.scoring import segments
from grpo.language.scoring.decoder_layout import KEEP, Unsupported
from grpo.language.scoring.kernels import layers as kernels
from grpo.language.scoring.layers import Layers
from grpo.language.scoring.packing import pack
from grpo.language.scoring.projections import one_memory
from grpo.language.scoring.scorer import Scorer, ScoringPlan
from tests.unit.language.families import FUSED, family
from tests.unit.language.test_segments import plain_backward, plain_forward, samples
from tests.unit.language.tiny import tiny_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels compiled")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    monkeypatch.setattr(segments, "flash_forward", plain_forward)
    monkeypatch.setattr(segments, "flash_backward", plain_backward)


def by_the_module(model, rows, steps=7):
    scorer = Scorer(model, 0.7, ScoringPlan())
    scores = scorer(rows, steps, entropy=True)
    (scores.logp_NT.sum() + 0.1 * scores.entropy_NT.sum()).backward()
    return scores, gradients(model)


def forward(model, rows, keep="input", steps=7, dtype=torch.float32):
    scorer = Scorer(model, 0.7, ScoringPlan())
    batch = pack(rows, steps, "segments", 0, torch.device("cpu"))
    layers = Layers(scorer.causal, dtype)
    hidden = layers(batch.input_ids[0], batch.position_ids[0], batch.segments, batch.at_M, keep)
    logp_M, entropy_M = scorer.of_hidden(hidden, batch.target_M, True)
    found = torch.zeros(len(rows) * steps).scatter(0, batch.cell_M, logp_M.detach()).view(len(rows), steps)
    return found, logp_M, entropy_M


def by_hand(model, rows, keep, steps=7, dtype=torch.float32):
    found, logp_M, entropy_M = forward(model, rows, keep, steps, dtype)
    (logp_M.sum() + 0.1 * entropy_M.sum()).backward()
    return found, gradients(model)


def gradients(model):
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        if grad is None:
            assert found[name] is None
        else:
            assert torch.allclose(found[name], grad, rtol=2e-4, atol=2e-5 * float(grad.abs().max())), name


FAMILIES = [name for name in FUSED if name != "mistral"]  # it has a window
SEEN_ELSEWHERE = {"llama", "qwen2"}
"""Without and with biases, as the models of the tests below."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SEEN_ELSEWHERE)) for name in FAMILIES]
)
def test_every_family_of_the_layout_gets_its_own_gradients(name):
    model, rows = family(name), samples()[:4]
    scores, expected = by_the_module(model, rows)
    logp_NT, found = by_hand(model, rows, "everything")
    assert torch.allclose(logp_NT, scores.logp_NT.detach(), atol=2e-5)
    same(found, expected)


@pytest.mark.parametrize("keep", KEEP)
def test_what_is_kept_changes_no_number(keep):
    model, rows = tiny_model(attention_bias=True, mlp_bias=True), samples()[:4]
    _, expected = by_the_module(model, rows)
    same(by_hand(model, rows, keep)[1], expected)


@pytest.mark.parametrize("name", ["llama-mha", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_float32_weights_in_bfloat16_are_as_near_to_float32_as_the_module(name):
    model, rows = family(name), samples()[:4]
    exact = by_the_module(model, rows)[1]
    with torch.autocast("cpu", torch.bfloat16):
        theirs = by_the_module(model, rows)[1]
        mine = by_hand(model, rows, "everything", dtype=torch.bfloat16)[1]

    def error(found):
        gaps = [(found[name] - exact[name]).norm() ** 2 for name in exact]
        return float(sum(gaps) / sum(grad.norm() ** 2 for grad in exact.values())) ** 0.5

    assert all(grad.dtype == torch.float32 for grad in mine.values())
    assert 0 < error(mine) < 2.5 * error(theirs)  # interpreted kernels cut where they should round


def test_less_is_kept_when_asked():
    layers = Layers(tiny_model(), torch.float32)
    sizes = [layers.kept_bytes(keep) for keep in KEEP]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
    model, rows = tiny_model(), samples()[:4]
    held = []
    for keep in KEEP:
        batch = pack(rows, 7, "segments", 0, torch.device("cpu"))
        seen: dict[int, int] = {}

        def note(x, seen=seen):
            seen[x.data_ptr()] = x.numel() * x.element_size()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            Layers(model, torch.float32)(batch.input_ids[0], batch.position_ids[0], batch.segments, batch.at_M, keep)
        held.append(sum(seen.values()))
    assert held == sorted(held, reverse=True) and held[0] > 2 * held[2]
    tokens = batch.input_ids.numel()  # what is said is what is taken, to the byte, but for the kernel's random state
    assert held[0] - held[1] == tokens * (sizes[0] - sizes[1])
    assert 0 <= held[1] - held[2] - tokens * (sizes[1] - sizes[2]) <= 64


def test_weights_that_are_frozen_get_no_gradient():
    model, rows = tiny_model(), samples()[:4]
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.1.mlp.up" in name or "layers.0.self_attn.q" in name or "norm" in name
    _, expected = by_the_module(model, rows)
    same(by_hand(model, rows, "attention")[1], expected)


def test_an_adapter_beside_frozen_weights_gets_peft_s_gradients_tile_by_tile(monkeypatch):
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(module_layers, "ALIGNED", 24)
    monkeypatch.setattr(module_layers, "MLP_TILE", 1)
    rows, config = samples(), peft.LoraConfig(r=2, lora_alpha=3, target_modules="all-linear")
    model = peft.get_peft_model(tiny_model(attention_bias=True), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    scores, expected = by_the_module(model, rows)
    assert len(Layers(model.get_base_model(), torch.float32).blocks[0].now([]).tiles(43)) == 2
    logp_NT, found = by_hand(model, rows, "host")
    assert torch.allclose(logp_NT, scores.logp_NT.detach(), atol=1e-5)
    assert all((grad is None) == ("lora" not in name) for name, grad in found.items())
    same(found, expected)
    with model.disable_adapter(), torch.no_grad():
        expected = Scorer(model, 0.7, ScoringPlan())(rows, 7).logp_NT
        assert torch.allclose(forward(model, rows)[0], expected, atol=1e-5)


def test_the_weights_of_now_are_computed_with():
    model, rows = tiny_model(), samples()[:4]
    batch = pack(rows, 7, "segments", 0, torch.device("cpu"))
    layers = Layers(model, torch.float32)
    where = batch.input_ids[0], batch.position_ids[0], batch.segments, batch.at_M, "input"
    with torch.no_grad():
        before = layers(*where)
        model.model.layers[0].mlp.gate_proj.weight.mul_(0.5)
        model.model.layers[1].self_attn.v_proj.weight.mul_(0.5)
        after = layers(*where)
    assert (before - after).abs().max() > 1e-3
    assert torch.equal(after, Layers(model, torch.float32)(*where).detach())


def test_projections_that_lie_side_by_side_are_read_in_place():
    whole = torch.randn(9, 4)
    parts = list(torch.split(whole, [4, 2, 3]))
    found = one_memory(parts, torch.float32)
    assert found is not None and found.data_ptr() == whole.data_ptr() and torch.equal(found, whole)
    assert one_memory(parts[::-1], torch.float32) is None
    assert one_memory(parts, torch.bfloat16) is None
    assert one_memory([parts[0], parts[1].clone()], torch.float32) is None


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "phi3"])
def test_other_layouts_are_refused_or_give_other_numbers(name):
    """Who asks compares before use; here it is enough that nothing is taken for what it is not."""
    model, rows = family(name), samples()[:4]
    try:
        found, _ = by_hand(model, rows, "everything")
    except Unsupported:
        return
    scores, _ = by_the_module(model, rows)
    assert not torch.allclose(found, scores.logp_NT.detach(), atol=1e-2)


def test_the_gate_s_slopes_are_those_of_autograd():
    torch.manual_seed(0)
    both, grad = torch.randn(5, 40, dtype=torch.float64), torch.randn(5, 20, dtype=torch.float64)
    for gelu, act in (
        (False, torch.nn.functional.silu),
        (True, lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ):
        x = both.clone().requires_grad_()
        out = act(x[:, :20]) * x[:, 20:]
        again, back = kernels.gate_backward(grad.float(), both.float(), gelu)
        assert torch.allclose(again.double(), out, atol=1e-5)
        assert torch.allclose(back.double(), torch.autograd.grad(out, x, grad)[0], atol=1e-5)


@pytest.mark.parametrize("heads_first", [False, True])
def test_two_ranges_are_merged_in_place(heads_first):
    torch.manual_seed(0)
    out, seen = torch.randn(7, 3, 5), torch.randn(4, 3, 5)
    if heads_first:  # as some models lay their queries, and so what is found for them
        out, seen = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (out, seen))
    lse, seen_lse = torch.randn(3, 7), torch.randn(3, 4)
    whole = torch.logaddexp(lse[:, 3:], seen_lse)
    shares = [(part - whole).exp().t()[..., None] for part in (lse[:, 3:], seen_lse)]
    expected, before = out[3:] * shares[0] + seen * shares[1], (out[:3].clone(), lse[:, :3].clone())
    kernels.merge(out[3:], lse[:, 3:], seen, seen_lse)
    assert torch.allclose(out[3:], expected, atol=1e-6) and torch.allclose(lse[:, 3:], whole, atol=1e-6)
    assert torch.equal(out[:3], before[0]) and torch.equal(lse[:, :3], before[1])
