"""Log-probs of a tile of logits as on a GPU, the kernels interpreted: the definition's values and gradients."""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are loaded
pytest.importorskip("triton", reason="kernels need triton, which is there for Linux")
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # 0 · −∞, which nobody reads
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
]

from grpo.language.samples import Prompt, Sample  # noqa: E402
from grpo.language.scoring import head, probe  # noqa: E402
from grpo.language.scoring import scorer as scorer_module  # noqa: E402
from grpo.language.scoring.decoder_layout import Adapter  # noqa: E402
from grpo.language.scoring.head import log_probs, summaries  # noqa: E402
from grpo.language.scoring.kernels import head as head_kernels  # noqa: E402
from grpo.language.scoring.probe import head_fuses, make_scorer  # noqa: E402
from tests.unit.language.tiny import tiny_model  # noqa: E402

TOKENS, VOCABULARY, WIDTH = 7, 83, 12


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    """Of a small vocabulary; the last one is not full."""
    monkeypatch.setattr(head_kernels, "BLOCK_V", 32)


def numbers(seed=0, loud=1.0, dtype=torch.float32):
    """Hidden states, weight, bias, targets, and what comes back for log-probs and entropies."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random).to(DEVICE, dtype)

    hidden, weight, bias = normal(TOKENS, WIDTH) * loud, normal(VOCABULARY, WIDTH), normal(VOCABULARY)
    target = torch.randint(VOCABULARY, (TOKENS,), generator=random).to(DEVICE)
    return hidden, weight, bias, target, normal(TOKENS).float(), normal(TOKENS).float()


def defined(hidden, weight, bias, target, temperature):
    """By the definition, in float64."""
    logits = hidden.double() @ weight.double().t()
    logp_MV = ((logits if bias is None else logits + bias.double()) / temperature).log_softmax(-1)
    return logp_MV.gather(1, target[:, None])[:, 0], -(logp_MV.exp() * logp_MV).sum(-1), logp_MV.exp().square().sum(-1)


def leaves(*values):
    return [value if value is None else value.clone().requires_grad_() for value in values]


def pulled(outputs, weights, inputs):
    """Gradients of a weighted sum; None outputs are left out."""
    loss = sum((out * w).sum() for out, w in zip(outputs, weights, strict=True) if out is not None)
    return torch.autograd.grad(loss, [x for x in inputs if x is not None])


def check(found, expected, rtol=1e-4, atol=2e-5):
    for mine, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), exact.double(), rtol=rtol, atol=atol)


def test_an_adapter_on_the_head_gets_the_definition_s_gradients_and_its_frozen_weight_none():
    hidden, weight, bias, target, *weights = numbers()
    a, b, scale = torch.randn(3, WIDTH, device=DEVICE), torch.randn(VOCABULARY, 3, device=DEVICE), 1.7
    mine, exact = (leaves(hidden, a, b) for _ in range(2))
    adapter = Adapter(mine[1], mine[2], scale)
    found = log_probs(mine[0], weight, target, 0.6, bias_V=bias, adapter=adapter, entropy=True, tile=3)
    whole = weight.double() + scale * exact[2].double() @ exact[1].double()
    expected = defined(exact[0], whole, bias, target, 0.6)[:2]
    check(found, expected)
    check(pulled(found, weights, mine), pulled(expected, weights, exact))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("entropy", [False, True], ids=["log-probs alone", "with entropy"])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_values_and_gradients_are_the_definition_s(temperature, entropy, biased):
    hidden, weight, bias, target, *weights = numbers()
    mine, exact = (leaves(hidden, weight, bias if biased else None) for _ in range(2))
    found = log_probs(*mine[:2], target, temperature, bias_V=mine[2], entropy=entropy)
    expected = defined(*exact, target, temperature)[:2]
    assert found[0].dtype == torch.float32
    if not entropy:
        assert found[1] is None
        expected = (expected[0], None)
    check([x for x in found if x is not None], [x for x in expected if x is not None])
    check(pulled(found, weights, mine), pulled(expected, weights, exact))


def test_the_entropy_s_gradient_comes_alone():
    hidden, weight, _, target, _, w = numbers(1)
    mine, exact = leaves(hidden, weight), leaves(hidden, weight)
    _, entropy_M = log_probs(*mine, target, 0.8, entropy=True)
    _, expected_M, _ = defined(*exact, None, target, 0.8)
    check(pulled([entropy_M], [w], mine), pulled([expected_M], [w], exact))


def test_nothing_comes_back_for_an_entropy_that_is_only_looked_at():
    hidden, weight, _, target, w, _ = numbers(1)
    mine, exact = leaves(hidden, weight), leaves(hidden, weight)
    logp_M, entropy_M = log_probs(*mine, target, 0.8, entropy=True)
    assert entropy_M.isfinite().all()
    check(pulled([logp_M], [w], mine), pulled([defined(*exact, None, target, 0.8)[0]], [w], exact))


def test_the_sum_of_squares_is_there_for_who_asks():
    hidden, weight, bias, target, *_ = numbers(2)
    found = summaries(hidden, weight, target, 0.7, bias, True, 3)
    logp_M, entropy_M, squares_M = defined(hidden, weight, bias, target, 0.7)
    check([found.logp_M, found.entropy_M, found.sum_of_squares_M], [logp_M, entropy_M, squares_M])
    assert summaries(hidden, weight, target, 0.7, bias, False, 3).sum_of_squares_M is None


@pytest.mark.parametrize("tile", [1, 3, 7, 50])
def test_tiles_change_nothing(tile):
    hidden, weight, bias, target, *weights = numbers(3)
    found = []
    for size in (tile, None):
        mine = leaves(hidden, weight, bias)
        out = log_probs(*mine[:2], target, 0.9, bias_V=mine[2], entropy=True, tile=size)
        found.append([*out, *pulled(out, weights, mine)])
    check(*found, rtol=1e-4, atol=1e-5)


def test_there_is_one_tile_of_logits(monkeypatch):
    hidden, weight, _, target, *_ = numbers(3)
    shapes, memory = [], set()
    plain = head.product

    def seen(left, right, out):
        plain(left, right, out)
        if out.shape[1] == VOCABULARY:
            shapes.append(len(out))
            memory.add(out.untyped_storage().data_ptr())

    monkeypatch.setattr(head, "product", seen)
    mine = leaves(hidden, weight)
    logp_M, _ = log_probs(*mine, target, 1.0, tile=3)
    assert shapes == [3, 3, 1] and len(memory) == 1
    logp_M.sum().backward()
    assert shapes == 2 * [3, 3, 1], "logits were kept for the way back"


@pytest.mark.parametrize("learned", ["hidden", "weight", "bias"])
def test_only_what_is_learned_gets_a_gradient(monkeypatch, learned):
    hidden, weight, bias, target, w, _ = numbers(4)
    given = {"hidden": hidden, "weight": weight, "bias": bias}
    given[learned].requires_grad_()
    logp_M, _ = log_probs(given["hidden"], given["weight"], target, 1.0, bias_V=given["bias"])
    added, products = [], []
    monkeypatch.setattr(head, "added", lambda to, left, right, out: added.append(out))
    plain = head.product
    monkeypatch.setattr(head, "product", lambda *arguments: (products.append(1), plain(*arguments)))
    (logp_M * w).sum().backward()
    assert (len(added), len(products)) == {"hidden": (0, 2), "weight": (1, 1), "bias": (0, 1)}[learned]
    assert [name for name, value in given.items() if value.grad is not None] == [learned]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_logits_do_not_overflow(sign):
    """±80 at temperature 0.5; the target is the likeliest token, and one that is all but impossible."""
    hidden = torch.full((2, 1), 80.0 * sign, device=DEVICE)
    weight = torch.linspace(-1, 1, VOCABULARY, device=DEVICE)[:, None].clone()
    target = torch.tensor([VOCABULARY - 1, 0], device=DEVICE)
    mine, exact = leaves(hidden, weight), leaves(hidden, weight)
    w = [torch.tensor([0.5, 2.0], device=DEVICE)] * 2
    found, expected = log_probs(*mine, target, 0.5, entropy=True), defined(*exact, None, target, 0.5)[:2]
    check(found, expected, rtol=1e-5, atol=1e-5)
    check(pulled(found, w, mine), pulled(expected, w, exact), rtol=1e-4, atol=1e-3)


def test_a_token_that_is_ruled_out_has_no_part():
    hidden, weight, bias, target, *weights = numbers(5)
    bias[3], bias[40:72] = -torch.inf, -torch.inf  # a whole block among them
    target = target.where(target != 3, 4).where((target < 40) | (target >= 72), 4)
    mine, exact = leaves(hidden, weight), leaves(hidden, weight)
    found = log_probs(*mine, target, 1.0, bias_V=bias, entropy=True)
    left = bias.isfinite()
    new = (left.cumsum(0) - 1)[target]
    expected = defined(exact[0], exact[1][left], bias[left], new, 1.0)[:2]
    check(found, expected)
    check(pulled(found, weights, mine), pulled(expected, weights, exact))


def test_a_number_that_is_none_is_told():
    hidden, weight, _, target, *_ = numbers(6)
    hidden[2, 0] = torch.nan
    logp_M, entropy_M = log_probs(hidden, weight, target, 1.0, entropy=True)
    assert logp_M.isnan().tolist() == entropy_M.isnan().tolist() == [row == 2 for row in range(TOKENS)]


def test_no_tokens():
    hidden, weight, _, target, *_ = numbers()
    mine = leaves(hidden[:0], weight)
    logp_M, entropy_M = log_probs(*mine, target[:0], 1.0, entropy=True)
    (logp_M.sum() + entropy_M.sum()).backward()
    assert mine[0].grad.shape == (0, WIDTH) and not mine[1].grad.any()


# --- lower precision ------------------------------------------------------------------------------------------------


@pytest.fixture
def wide_products(monkeypatch):
    """Products of bfloat16 into float32, which only GPUs have."""

    def product(left, right, out):
        out.copy_(left.float() @ right.float())

    def added(to, left, right, out):
        return torch.add(to, left.float() @ right.float(), out=out)

    monkeypatch.setattr(head, "wide", lambda *arguments: True)
    monkeypatch.setattr(head, "product", product)
    monkeypatch.setattr(head, "added", added)


@pytest.mark.parametrize("tile", [None, 3])
def test_a_bfloat16_gradient_takes_the_place_of_float32_logits(wide_products, tile):
    hidden, weight, bias, target, *weights = numbers(7, dtype=torch.bfloat16)
    mine, exact = leaves(hidden, weight, bias), leaves(hidden.float(), weight.float(), bias.float())
    found = log_probs(*mine[:2], target, 0.7, bias_V=mine[2], entropy=True, tile=tile)
    expected = defined(*exact, target, 0.7)[:2]
    check(found, expected)  # logits were not rounded
    grads = pulled(found, weights, mine)
    assert {grad.dtype for grad in grads} == {torch.bfloat16}
    for grad, other in zip(grads, pulled(expected, weights, exact), strict=True):
        assert (grad.double() - other).norm() < 1e-2 * other.norm()


def test_where_products_cannot_be_wide_logits_are_rounded(monkeypatch):
    monkeypatch.setattr(head, "wide", lambda product, dtype, device: dtype == torch.float32)
    hidden, weight, bias, target, *weights = numbers(7, dtype=torch.bfloat16)
    mine, exact = leaves(hidden, weight, bias), leaves(hidden.float(), weight.float(), bias.float())
    found = log_probs(*mine[:2], target, 0.7, bias_V=mine[2], entropy=True, tile=3)
    expected = defined(*exact, target, 0.7)[:2]
    check(found, expected, rtol=1e-2, atol=5e-2)
    for grad, other in zip(pulled(found, weights, mine), pulled(expected, weights, exact), strict=True):
        assert (grad.double() - other).norm() < 3e-2 * other.norm()


def test_under_autocast_weights_keep_their_type_and_a_gradient_of_it(monkeypatch):
    hidden, weight, _, target, *weights = numbers(8)
    mine, exact = leaves(hidden, weight), leaves(hidden, weight)
    types = []
    plain = head.product
    monkeypatch.setattr(head, "product", lambda *factors: (types.append(factors[0].dtype), plain(*factors)))
    with torch.autocast(DEVICE, torch.bfloat16):
        found = log_probs(*mine, target, 0.7, entropy=True)
        grads = pulled(found, weights, mine)  # on the way back as well
    assert {*types} == {torch.bfloat16} and {x.dtype for x in (*found, *grads)} == {torch.float32}
    expected = defined(*exact, None, target, 0.7)[:2]
    check(found, expected, rtol=2e-2, atol=1e-1)
    for grad, other in zip(grads, pulled(expected, weights, exact), strict=True):
        assert (grad.double() - other).norm() < 3e-2 * other.norm()


# --- in the scorer --------------------------------------------------------------------------------------------------


def scored(model, entropy=True):
    """Log-probs, entropies and gradients of two completions."""
    prompt = Prompt(0, [3, 4, 5], "", None)
    rows = [
        Sample(prompt, torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool), None, "eos", "")
        for ids in ([4, 9, 30], [50, 2])
    ]
    scores = make_scorer(model, 0.7, "padded")(rows, 3, entropy)
    loss = scores.logp_NT.square().sum()
    if entropy:
        loss = loss + scores.entropy_NT.square().sum()
    learned = [p for p in model.parameters() if p.requires_grad]
    values = [scores.logp_NT, scores.entropy_NT] if entropy else [scores.logp_NT]
    return [*(value.detach() for value in values), *torch.autograd.grad(loss, learned)]


@pytest.mark.parametrize("entropy", [False, True], ids=["log-probs alone", "with entropy"])
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_the_scorer_gets_the_numbers_of_the_plain_path(monkeypatch, entropy, tied):
    model = tiny_model(tie_word_embeddings=tied).to(DEVICE)
    calls = []
    monkeypatch.setattr(probe, "fuses", lambda *arguments: False)
    plain = scored(model, entropy)
    monkeypatch.setattr(probe, "fuses", lambda *arguments: True)
    monkeypatch.setattr(scorer_module, "log_probs", lambda *a, **k: (calls.append(1), log_probs(*a, **k))[1])
    check(scored(model, entropy), plain, rtol=1e-4, atol=1e-4)
    assert calls


def test_a_head_with_something_behind_it_takes_the_plain_path(monkeypatch):
    scorer = make_scorer(tiny_model().to(DEVICE), 1.0, "padded")
    monkeypatch.setattr(probe, "fuses", lambda *arguments: True)
    assert head_fuses(scorer)
    scorer.after_head = lambda logits: logits * 0.5
    assert not head_fuses(scorer)


def test_kernels_that_fail_or_give_other_numbers_are_not_used(monkeypatch):
    scorer = make_scorer(tiny_model().to(DEVICE), 1.0, "padded")
    monkeypatch.setattr(probe, "fuses", lambda *arguments: True)
    monkeypatch.setattr(scorer_module, "log_probs", lambda h, *a, **k: log_probs(1.1 * h, *a, **k))
    with pytest.warns(UserWarning, match="without the fused head.*other numbers"):
        assert not head_fuses(scorer)
    monkeypatch.setattr(scorer_module, "log_probs", lambda *a, **k: {}["no compiler"])
    with pytest.warns(UserWarning, match="without the fused head.*no compiler"):
        assert not head_fuses(scorer)


class Other(torch.nn.Linear):
    """An adapter's, say."""


def test_what_is_fused(monkeypatch):
    class OnGPU:  # as much of a tensor as is asked for
        is_cuda, dtype = True, torch.bfloat16

    class Exact(OnGPU):
        dtype = torch.float64

    linear = torch.nn.Linear(2, 3)
    assert head.fuses(linear, OnGPU())
    assert not head.fuses(linear, torch.zeros(1, 2))
    assert not head.fuses(linear, Exact())
    assert not head.fuses(Other(2, 3), OnGPU())
    linear.register_forward_hook(lambda *arguments: None)
    assert not head.fuses(linear, OnGPU())
    monkeypatch.setattr(head.importlib.util, "find_spec", lambda name: None)
    assert not head.fuses(torch.nn.Linear(2, 3), OnGPU())
