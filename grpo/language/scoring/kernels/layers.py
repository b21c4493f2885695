"""The Triton kernels between the products of a layer, forward and backward; sums are in float32, what is kept is not.

    norm, norm_backward     RMSNorm; backward: with the gradient that goes around it, and the weight's
    rope, rope_backward     queries and keys of packed projections: normed where the model does that, rotated
    merge                   what attention found in two ranges of keys, as if it had looked at both at once
    gate, gate_backward     act(gate) · up; backward: that once more, for the weight behind it, with both gradients

A program takes many rows where it adds up a weight's gradient, so that few partial sums are written down.

Letters: L tokens of the row, D width, C half a head, I and O a projection's sides, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 528
"""That share the rows where a weight's gradient is added up: four for each of a large GPU's multiprocessors."""


def _power(n: int) -> int:
    return max(triton.next_power_of_2(n), 16)


def _warps(width: int) -> int:
    return min(max(width // 256, 1), 8)


# --- RMSNorm --------------------------------------------------------------------------------------------------------


@triton.jit
def _norm(x_ptr, weight_ptr, out_ptr, eps, D: tl.constexpr, D_P: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D_P)
    in_d = d < D
    x = tl.load(x_ptr + row * D + d, mask=in_d, other=0.0).to(tl.float32)
    unit = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    weight = tl.load(weight_ptr + d, mask=in_d, other=0.0).to(tl.float32)
    out = weight * unit.to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), mask=in_d)


def norm(x_LD: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """weight · x / √(mean x² + eps), in this type."""
    size, out_LD = x_LD.shape[1], torch.empty_like(x_LD, dtype=dtype)
    wide = _power(size)
    _norm[(len(x_LD),)](x_LD, weight_D, out_LD, eps, D=size, D_P=wide, num_warps=_warps(wide))
    return out_LD


@triton.jit
def _norm_backward(
    grad_ptr, x_ptr, weight_ptr, around_ptr, out_ptr, low_ptr, sums_ptr, eps, rows,
    D: tl.constexpr, D_P: tl.constexpr, AROUND: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    d = tl.arange(0, D_P)
    in_d = d < D
    weight = tl.load(weight_ptr + d, mask=in_d, other=0.0).to(tl.float32)
    total = tl.zeros((D_P,), tl.float32)
    for number in range(program, rows, programs):
        row = tl.cast(number, tl.int64)
        x = tl.load(x_ptr + row * D + d, mask=in_d, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * D + d, mask=in_d, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        unit = x * inverse
        total += grad * unit
        grad *= weight
        back = inverse * (grad - unit * (tl.sum(grad * unit, 0) / D))
        if AROUND:
            back += tl.load(around_ptr + row * D + d, mask=in_d, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * D + d, back.to(out_ptr.dtype.element_ty), mask=in_d)
        if LOW:
            tl.store(low_ptr + row * D + d, back.to(low_ptr.dtype.element_ty), mask=in_d)
    tl.store(sums_ptr + program * D + d, total, mask=in_d)


def norm_backward(
    grad_LD: Tensor,
    x_LD: Tensor,
    weight_D: Tensor,
    eps: float,
    around_LD: Tensor | None = None,
    room: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by x, with what went around the norm added: in x's type and in grad's; and by the weight (float32).

    room: where the first two go; one memory where the types are the same.
    """
    rows, size = x_LD.shape
    programs, wide = min(PROGRAMS, rows), _power(size)
    sums_PD = torch.empty(programs, size, dtype=torch.float32, device=x_LD.device)
    if room is None:
        out_LD = torch.empty_like(x_LD)
        room = out_LD, out_LD if grad_LD.dtype == x_LD.dtype else torch.empty_like(grad_LD)
    out_LD, low_LD = room
    _norm_backward[(programs,)](
        grad_LD, x_LD, weight_D, x_LD if around_LD is None else around_LD, out_LD, low_LD, sums_PD, eps, rows,
        D=size, D_P=wide, AROUND=around_LD is not None, LOW=low_LD.dtype != out_LD.dtype, num_warps=_warps(wide),
    )  # fmt: skip
    return out_LD, low_LD, sums_PD.sum(0)


# --- rotary embeddings ------------------------------------------------------------------------------------------------


@triton.jit
def _half_norm(x1, x2, eps, HD: tl.constexpr):
    """1 / √(mean x² + eps) of each head, whose halves are apart."""
    return tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / HD + eps)[:, None]


@triton.jit
def _rope_heads(
    from_ptr, to_ptr, w1, w2, c, s, eps, heads,
    HD: tl.constexpr, HALF: tl.constexpr, HEADS_P: tl.constexpr, HALF_P: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    h, d = tl.arange(0, HEADS_P)[:, None], tl.arange(0, HALF_P)[None, :]
    inside = (h < heads) & (d < HALF)
    at = h * HD + d
    x1 = tl.load(from_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(from_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = to_ptr.dtype.element_ty
    if NORM:
        inverse = _half_norm(x1, x2, eps, HD)
        x1 = (x1 * inverse).to(dtype).to(tl.float32) * w1
        x2 = (x2 * inverse).to(dtype).to(tl.float32) * w2
    tl.store(to_ptr + at, (x1 * c - x2 * s).to(dtype), mask=inside)
    tl.store(to_ptr + at + HALF, (x2 * c + x1 * s).to(dtype), mask=inside)


@triton.jit
def _halves(ptr, d, HALF: tl.constexpr):
    in_d = d < HALF
    first = tl.load(ptr + d, mask=in_d, other=0.0).to(tl.float32)
    return first, tl.load(ptr + HALF + d, mask=in_d, other=0.0).to(tl.float32)


@triton.jit
def _rope(
    qkv_ptr, q_ptr, k_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HD: tl.constexpr, HALF: tl.constexpr,
    HEADS_P: tl.constexpr, KV_HEADS_P: tl.constexpr, HALF_P: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALF_P)[None, :]
    c = tl.load(cos_ptr + row * HALF + d, mask=d < HALF, other=0.0)
    s = tl.load(sin_ptr + row * HALF + d, mask=d < HALF, other=0.0)
    q1, q2, k1, k2 = c, c, c, c
    if NORM:
        q1, q2 = _halves(q_norm_ptr, d, HALF)
        k1, k2 = _halves(k_norm_ptr, d, HALF)
    here = qkv_ptr + row * (HEADS + 2 * KV_HEADS) * HD
    _rope_heads(here, q_ptr + row * HEADS * HD, q1, q2, c, s, eps, HEADS, HD, HALF, HEADS_P, HALF_P, NORM)
    there = k_ptr + row * KV_HEADS * HD
    _rope_heads(here + HEADS * HD, there, k1, k2, c, s, eps, KV_HEADS, HD, HALF, KV_HEADS_P, HALF_P, NORM)


@triton.jit
def _rope_heads_backward(
    from_ptr, grad_ptr, to_ptr, w1, w2, c, s, eps, heads,
    HD: tl.constexpr, HALF: tl.constexpr, HEADS_P: tl.constexpr, HALF_P: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Writes the projections' gradients; returns those of the norm's weights, (1, HALF_P) each."""
    h, d = tl.arange(0, HEADS_P)[:, None], tl.arange(0, HALF_P)[None, :]
    inside = (h < heads) & (d < HALF)
    at = h * HD + d
    y1 = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y2 = tl.load(grad_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    g1, g2 = y1 * c + y2 * s, y2 * c - y1 * s
    sum1, sum2 = tl.zeros((1, HALF_P), tl.float32), tl.zeros((1, HALF_P), tl.float32)
    if NORM:
        x1 = tl.load(from_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(from_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
        inverse = _half_norm(x1, x2, eps, HD)
        x1, x2 = x1 * inverse, x2 * inverse
        sum1, sum2 = tl.sum(g1 * x1, 0)[None, :], tl.sum(g2 * x2, 0)[None, :]
        g1, g2 = g1 * w1, g2 * w2
        along = ((tl.sum(g1 * x1, 1) + tl.sum(g2 * x2, 1)) / HD)[:, None]
        g1, g2 = inverse * (g1 - x1 * along), inverse * (g2 - x2 * along)
    dtype = to_ptr.dtype.element_ty
    tl.store(to_ptr + at, g1.to(dtype), mask=inside)
    tl.store(to_ptr + at + HALF, g2.to(dtype), mask=inside)
    return sum1, sum2


@triton.jit
def _rope_backward(
    qkv_ptr, dq_ptr, dk_ptr, dv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, out_ptr, sums_ptr, eps, rows,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HD: tl.constexpr, HALF: tl.constexpr, V_P: tl.constexpr,
    HEADS_P: tl.constexpr, KV_HEADS_P: tl.constexpr, HALF_P: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    d = tl.arange(0, HALF_P)[None, :]
    in_d = d < HALF
    v = tl.arange(0, V_P)
    in_v = v < KV_HEADS * HD
    zero = tl.zeros((1, HALF_P), tl.float32)
    q1, q2, k1, k2 = zero, zero, zero, zero
    if NORM:
        q1, q2 = _halves(q_norm_ptr, d, HALF)
        k1, k2 = _halves(k_norm_ptr, d, HALF)
    sq1, sq2, sk1, sk2 = zero, zero, zero, zero
    for number in range(program, rows, programs):
        row = tl.cast(number, tl.int64)
        c = tl.load(cos_ptr + row * HALF + d, mask=in_d, other=0.0)
        s = tl.load(sin_ptr + row * HALF + d, mask=in_d, other=0.0)
        first = row * (HEADS + 2 * KV_HEADS) * HD
        a, b = _rope_heads_backward(
            qkv_ptr + first, dq_ptr + row * HEADS * HD, out_ptr + first, q1, q2, c, s, eps, HEADS,
            HD, HALF, HEADS_P, HALF_P, NORM,
        )  # fmt: skip
        sq1, sq2 = sq1 + a, sq2 + b
        first += HEADS * HD
        a, b = _rope_heads_backward(
            qkv_ptr + first, dk_ptr + row * KV_HEADS * HD, out_ptr + first, k1, k2, c, s, eps, KV_HEADS,
            HD, HALF, KV_HEADS_P, HALF_P, NORM,
        )  # fmt: skip
        sk1, sk2 = sk1 + a, sk2 + b
        first += KV_HEADS * HD
        grad = tl.load(dv_ptr + row * KV_HEADS * HD + v, mask=in_v, other=0.0)
        tl.store(out_ptr + first + v, grad, mask=in_v)
    if NORM:
        sums_ptr += program * 2 * HD
        tl.store(sums_ptr + d, sq1, mask=in_d)
        tl.store(sums_ptr + HALF + d, sq2, mask=in_d)
        tl.store(sums_ptr + HD + d, sk1, mask=in_d)
        tl.store(sums_ptr + HD + HALF + d, sk2, mask=in_d)


Norms = tuple[Tensor, Tensor, float]
"""Weights for queries and for keys, and eps."""


def _sizes(heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "HEADS": heads, "KV_HEADS": kv_heads, "HD": head_dim, "HALF": head_dim // 2,
        "HEADS_P": triton.next_power_of_2(heads), "KV_HEADS_P": triton.next_power_of_2(kv_heads),
        "HALF_P": triton.next_power_of_2(head_dim // 2),
    }  # fmt: skip


def rope(
    qkv_LO: Tensor, heads: int, kv_heads: int, cos_LC: Tensor, sin_LC: Tensor, norms: Norms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(L, heads, width) queries, keys and values; the values are a view."""
    rows, width = len(qkv_LO), qkv_LO.shape[1] // (heads + 2 * kv_heads)
    q, k = qkv_LO.new_empty(rows, heads, width), qkv_LO.new_empty(rows, kv_heads, width)
    q_norm, k_norm, eps = (cos_LC, cos_LC, 0.0) if norms is None else norms
    sizes = _sizes(heads, kv_heads, width)
    _rope[(rows,)](qkv_LO, q, k, q_norm, k_norm, cos_LC, sin_LC, eps, **sizes, NORM=norms is not None, num_warps=4)
    return q, k, qkv_LO[:, (heads + kv_heads) * width :].view(rows, kv_heads, width)


def rope_backward(
    qkv_LO: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, cos_LC: Tensor, sin_LC: Tensor, norms: Norms | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients by the packed projections, and by the norms' weights (float32)."""
    rows, heads, width = dq.shape
    kv_heads, programs = dk.shape[1], min(PROGRAMS * 2, rows)
    out_LO = torch.empty_like(qkv_LO)
    sums_P2C = torch.empty(programs, 2, width, dtype=torch.float32, device=dq.device)
    q_norm, k_norm, eps = (cos_LC, cos_LC, 0.0) if norms is None else norms
    _rope_backward[(programs,)](
        qkv_LO, dq.contiguous(), dk.contiguous(), dv.contiguous(), q_norm, k_norm, cos_LC, sin_LC, out_LO, sums_P2C,
        eps, rows, **_sizes(heads, kv_heads, width), V_P=triton.next_power_of_2(kv_heads * width),
        NORM=norms is not None, num_warps=4,
    )  # fmt: skip
    if norms is None:
        return out_LO, None, None
    d_q, d_k = sums_P2C.sum(0)
    return out_LO, d_q, d_k


# --- attention to two ranges ------------------------------------------------------------------------------------------


@triton.jit
def _merge(
    out_ptr, more_ptr, lse_ptr, more_lse_ptr, out_row, out_head, more_row, more_head, lse_stride, more_stride,
    HEADS: tl.constexpr, HD: tl.constexpr, HEADS_P: tl.constexpr, HD_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, HEADS_P), tl.arange(0, HD_P)[None, :]
    in_h = h < HEADS
    lse_ptr += h.to(tl.int64) * lse_stride + row
    own = tl.load(lse_ptr, mask=in_h, other=0.0)
    seen = tl.load(more_lse_ptr + h.to(tl.int64) * more_stride + row, mask=in_h, other=0.0)
    most = tl.maximum(own, seen)
    own, seen = tl.exp(own - most), tl.exp(seen - most)
    total = own + seen
    tl.store(lse_ptr, most + tl.log(total), mask=in_h)
    head = h.to(tl.int64)[:, None]
    out_ptr += row * out_row + head * out_head + d
    inside = in_h[:, None] & (d < HD)
    x = tl.load(out_ptr, mask=inside, other=0.0).to(tl.float32) * (own / total)[:, None]
    more_ptr += row * more_row + head * more_head + d
    x += tl.load(more_ptr, mask=inside, other=0.0).to(tl.float32) * (seen / total)[:, None]
    tl.store(out_ptr, x.to(out_ptr.dtype.element_ty), mask=inside)


def merge(out: Tensor, lse: Tensor, seen: Tensor, seen_lse: Tensor) -> None:
    """(L, heads, width) found and (heads, L) log-sum-exps of one range of keys, changed into those of it and `seen`.

    Both lie in memory as their queries did: heads may come before tokens.
    """
    rows, heads, width = out.shape
    _merge[(rows,)](
        out, seen, lse, seen_lse, *out.stride()[:2], *seen.stride()[:2], lse.stride(0), seen_lse.stride(0),
        HEADS=heads, HD=width, HEADS_P=triton.next_power_of_2(heads), HD_P=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


# --- the gated MLP --------------------------------------------------------------------------------------------------


@triton.jit
def _bent(gate, GELU: tl.constexpr):
    """The activation and its slope."""
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        open = 1.0 / (1.0 + tl.exp(-2.0 * inner))
        steep = 2.0 * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * gate * gate)
        slope = open + gate * open * (1.0 - open) * steep
    else:
        open = 1.0 / (1.0 + tl.exp(-gate))
        slope = open * (1.0 + gate * (1.0 - open))
    return gate * open, slope


@triton.jit
def _gate(both_ptr, grad_ptr, out_ptr, back_ptr, size, BLOCK: tl.constexpr, GELU: tl.constexpr, BACK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_i = i < size
    at = row * 2 * size + i
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(both_ptr + at, mask=in_i, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + at + size, mask=in_i, other=0.0).to(tl.float32)
    act, slope = _bent(gate, GELU)
    act = act.to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + i, (act * up).to(dtype), mask=in_i)
    if BACK:
        grad = tl.load(grad_ptr + row * size + i, mask=in_i, other=0.0).to(tl.float32)
        tl.store(back_ptr + at, (grad * up * slope).to(dtype), mask=in_i)
        tl.store(back_ptr + at + size, (grad * act).to(dtype), mask=in_i)


def gate(both_LI: Tensor, gelu: bool) -> Tensor:
    """act(first half) · second half."""
    return _gated(both_LI, None, gelu)[0]


def gate_backward(grad_LI: Tensor, both_LI: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """act(first half) · second half once more, and the gradient by both halves."""
    return _gated(both_LI, grad_LI, gelu)


def _gated(both_LI: Tensor, grad_LI: Tensor | None, gelu: bool) -> tuple[Tensor, Tensor]:
    rows, size = both_LI.shape[0], both_LI.shape[1] // 2
    out_LI = both_LI.new_empty(rows, size)
    back_LI = both_LI if grad_LI is None else torch.empty_like(both_LI)
    block = min(_power(size), 1024)
    _gate[(rows, triton.cdiv(size, block))](
        both_LI, both_LI if grad_LI is None else grad_LI, out_LI, back_LI, size,
        BLOCK=block, GELU=gelu, BACK=grad_LI is not None, num_warps=_warps(block),
    )  # fmt: skip
    return out_LI, back_LI
