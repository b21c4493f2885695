"""Attention in segments: the flash kernel's part played by plain PyTorch, the rest as on a GPU."""

from itertools import pairwise

import pytest
import torch

from grpo.config import ConfigError
from grpo.language.samples import Prompt, Sample
from grpo.language.scoring import dense, segments
from grpo.language.scoring.flash import TokenRanges
from grpo.language.scoring.packing import fill, pack
from grpo.language.scoring.probe import make_scorer
from grpo.language.scoring.segments import Segments, attend
from tests.unit.language.families import family
from tests.unit.language.tiny import tiny_model


def _ranges(where):
    starts = where.starts.tolist()
    return list(pairwise(starts))


def _scores(q, k, causal, scale):
    """(heads, L, K) of one range; query heads share key heads in order."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    score = torch.einsum("lhd,khd->hlk", q, k) * scale
    return score.masked_fill(~torch.ones(score.shape[1:]).tril().bool(), -torch.inf) if causal else score


def plain_forward(q, k, v, at_q, at_k, causal, scale):
    if q.dtype == torch.bfloat16:  # as the kernel does: sums in float32
        out, lse, random = plain_forward(q.float(), k.float(), v.float(), at_q, at_k, causal, scale)
        return out.bfloat16(), lse, random
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], len(q)), -torch.inf, dtype=q.dtype)
    for (a, b), (c, d) in zip(_ranges(at_q), _ranges(at_k), strict=True):
        if a == b or c == d:
            continue
        score = _scores(q[a:b], k[c:d], causal, scale)
        values = v[c:d].repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[a:b] = torch.einsum("hlk,khd->lhd", score.softmax(-1), values)
        lse[:, a:b] = score.logsumexp(-1)
    return out, lse, [torch.zeros(1), torch.zeros(1)]


def plain_backward(grad, q, k, v, out, lse, random, at_q, at_k, causal, scale):
    """By the kernel's own formula: weights from the given log-sum-exps, not from the scores at hand."""
    if q.dtype == torch.bfloat16:
        given = (x.float() for x in (grad, q, k, v, out))
        return tuple(x.bfloat16() for x in plain_backward(*given, lse, random, at_q, at_k, causal, scale))
    dq, dk, dv, group = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), q.shape[1] // k.shape[1]
    for (a, b), (c, d) in zip(_ranges(at_q), _ranges(at_k), strict=True):
        weight = (_scores(q[a:b], k[c:d], causal, scale) - lse[:, a:b, None]).exp()
        keys, values = (x[c:d].repeat_interleave(group, 1) for x in (k, v))
        falls = (grad[a:b] * out[a:b]).sum(-1).t()[..., None]
        dscore = weight * (torch.einsum("lhd,khd->hlk", grad[a:b], values) - falls) * scale
        dq[a:b] = torch.einsum("hlk,khd->lhd", dscore, keys)
        for to, value in (
            (dk, torch.einsum("hlk,lhd->khd", dscore, q[a:b])),
            (dv, torch.einsum("hlk,lhd->khd", weight, grad[a:b])),
        ):
            to[c:d] = value.unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setattr(segments, "flash_forward", plain_forward)
    monkeypatch.setattr(segments, "flash_backward", plain_backward)


def samples():
    """Three prompts, one of a single token, completions of different lengths, some tokens not the policy's."""
    random = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(i, torch.randint(3, 60, (n,), generator=random).tolist(), "", None) for i, n in enumerate((5, 1, 9))
    ]
    made = []
    for number, length in ((0, 4), (1, 7), (0, 1), (2, 6), (2, 3), (1, 2), (0, 5)):
        ids = torch.randint(3, 60, (length,), generator=random)
        mine = torch.rand(length, generator=random) < 0.8
        made.append(Sample(prompts[number], ids, mine, None, "eos", ""))
    return made


def in_one_piece(kernel):
    """cuDNN's part, played by what plays the flash kernel's."""

    def played(*given):
        where = TokenRanges.of([len(given[0])], torch.device("cpu"))
        return kernel(*given[:-1], where, where, True, given[-1])

    return played


@pytest.mark.parametrize("long", [dense.LONG, 3, 4])
def test_completions_see_themselves_and_their_prompt(plain, monkeypatch, long):
    torch.manual_seed(0)
    monkeypatch.setattr(dense, "LONG", long)
    monkeypatch.setattr(dense, "usable", lambda q, k: True)
    monkeypatch.setattr(dense, "rounded", lambda length: length + 2)
    monkeypatch.setattr(dense, "_kernel", in_one_piece(plain_forward))
    monkeypatch.setattr(dense, "_kernel_backward", in_one_piece(plain_backward))
    prompts, completions = [3, 1, 4], [[2, 3], [], [1, 4, 2]]
    where = Segments.of(prompts, completions, torch.device("cpu"))
    assert [run.long for run in where.runs].count(True) == {3: 4, 4: 2}.get(long, 0)
    length, n = 20, 8
    q = torch.randn(length, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(length, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out = attend(q, k, v, where, 0.4)
    owner = torch.tensor([0] * 3 + [1] + [2] * 4 + [0] * 5 + [2] * 7)
    segment = torch.tensor([0] * 3 + [1] + [2] * 4 + [3] * 2 + [4] * 3 + [5] + [6] * 4 + [7] * 2)
    at = torch.arange(length)
    sees = (segment[:, None] == segment) & (at[:, None] >= at)
    sees |= (owner[:, None] == owner) & (at[:, None] >= n) & (at < n)
    wide = [x.repeat_interleave(2, 1) for x in (k, v)]
    score = torch.einsum("lhd,khd->hlk", q, wide[0]) * 0.4
    expected = torch.einsum("hlk,khd->lhd", score.masked_fill(~sees, -torch.inf).softmax(-1), wide[1])
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    mine = torch.autograd.grad(out, (q, k, v), grad)
    for a, b in zip(mine, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_log_probs_and_gradients_are_those_of_rows_by_themselves(plain, name, checkpointing):
    found = []
    for packing in ("padded", "segments"):
        model = family(name).double()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        scores = make_scorer(model, 0.7, packing)(samples(), 7, entropy=True)
        (scores.logp_NT.sum() + (scores.entropy_NT**2).sum()).backward()
        found.append((scores.logp_NT, scores.entropy_NT, *(p.grad for p in model.parameters())))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)  # the models' norms compute in float32


def test_lengths_are_rounded_to_few():
    lengths = range(dense.LONG, dense.EXACT)
    assert len({dense.rounded(length) for length in lengths}) < 50 and dense.rounded(40_001) == 40_001
    assert all(length <= dense.rounded(length) <= 1.0625 * length for length in lengths)


def test_it_is_one_row_without_padding_and_every_prompt_once():
    rows = samples()
    batch = pack(rows, 7, "segments", 0, torch.device("cpu"))
    assert batch.input_ids.shape == (1, 5 + 1 + 9 + 28) and batch.segments.prompt_tokens == 15
    assert batch.segments.each.starts.tolist()[:4] == [0, 5, 6, 15]
    assert batch.segments.groups.starts.tolist() == [0, 10, 19, 28]
    parts = fill(rows, 24, "segments")
    assert sorted(row for part in parts for row in part) == list(range(7))
    for part in parts:
        assert pack([rows[row] for row in part], 7, "segments", 0, torch.device("cpu")).input_ids.shape[1] <= 24


def test_where_it_cannot_be_it_is_refused_and_not_chosen():
    model = tiny_model()
    with pytest.raises(ConfigError, match="packing=segments needs a GPU"):
        make_scorer(model, 1.0, "segments")
    assert model.config._attn_implementation == "sdpa"
    assert make_scorer(model, 1.0).packing == "shared"


def test_the_module_is_otherwise_what_it_was(plain):
    """With this attention chosen, calls without segments are as before, padding included."""
    model = tiny_model()
    ids, mask = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    with torch.no_grad():
        before = model(ids, attention_mask=mask).logits
        make_scorer(model, 1.0, "segments")
        assert model.config._attn_implementation == segments.INTERFACE
        torch.testing.assert_close(model(ids, attention_mask=mask).logits, before)
