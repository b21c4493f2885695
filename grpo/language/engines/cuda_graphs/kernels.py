"""The Triton kernels of a decoding step, and what calls them.

    rope_and_store   the tokens of prompts: rotate them, write their keys and values
    attend           one new token a slot: rotate it, write its keys and values, attend to the sequence's live positions
    add_norm         residual += delta, then RMSNorm

Heads are handled in halves, as rotary embeddings are: no shuffling inside a tile. float32 is computed as float32, not
in the matrix units' shorter format. Nothing here waits for the host.

Letters: S slots, F fields of a slot's state, B blocks of a sequence, M tokens of prompts, X heads · width, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LIVE, TOKEN, POSITION, STEP, LIMIT, ROW, PROMPT = range(7)
"""Rows of the slots' state, (7, S) int32: whether it is written at all · the token to read next · that token's position
· tokens made so far · how many may be made · the row of the outputs · tokens of the prompt in shared blocks."""
FIELDS = 7
TARGET_PROGRAMS = 512
"""Below so many programs a GPU is not full, and a row's positions are split among several."""
LONG = 2048
"""Positions from which on a row is worth up to MOST_SPLITS programs, where too few rows are left to fill a GPU."""
SPLITS, MOST_SPLITS = 16, 64
"""Programs that a row is divided among at most: any row, and a long one."""
TOGETHER = 8
"""Neighbouring slots whose shared prompt is read once for all of them."""


def power(n: int, least: int = 16) -> int:
    """The next power of two."""
    return max(least, 1 << (n - 1).bit_length())


# --- attention ------------------------------------------------------------------------------------------------------


@triton.jit
def _rope(x1, x2, c, s):
    return x1 * c - x2 * s, x2 * c + x1 * s


@triton.jit
def _normed(x1, x2, w1, w2, eps, HD: tl.constexpr, axis: tl.constexpr):
    square = (tl.sum(x1 * x1, axis) + tl.sum(x2 * x2, axis)) / HD
    scale = tl.rsqrt(square + eps)
    if axis == 1:
        scale = scale[:, None]
        w1 = w1[None, :]
        w2 = w2[None, :]
    return x1 * scale * w1, x2 * scale * w2


@triton.jit
def _looked_at(
    q1, q2, keys_ptr, values_ptr, at_nd, in_nd, sees, m, total, acc1, acc2, scale, softcap,
    HALF: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One tile of positions: the highest score so far, the sum of weights above it, and the weighted values."""
    k1 = tl.load(keys_ptr + at_nd, mask=in_nd, other=0.0)
    k2 = tl.load(keys_ptr + at_nd + HALF, mask=in_nd, other=0.0)
    v1 = tl.load(values_ptr + at_nd, mask=in_nd, other=0.0)
    v2 = tl.load(values_ptr + at_nd + HALF, mask=in_nd, other=0.0)
    if EXACT:
        score = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        score += tl.dot(q2, tl.trans(k2), input_precision="ieee")
    else:
        score = tl.dot(q1, tl.trans(k1))
        score = tl.dot(q2, tl.trans(k2), score)
    score *= scale
    if SOFTCAP:
        score = softcap * (2.0 / (1.0 + tl.exp(-2.0 * score / softcap)) - 1.0)
    LOG2E: tl.constexpr = 1.4426950408889634
    score = tl.where(sees, score * LOG2E, float("-inf"))
    higher = tl.maximum(m, tl.max(score, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see nothing of this tile, nor of any before
    weight = tl.exp2(score - safe[:, None])
    less = tl.exp2(m - safe)
    total = total * less + tl.sum(weight, 1)
    acc1 *= less[:, None]
    acc2 *= less[:, None]
    if EXACT:
        acc1 += tl.dot(weight, v1, input_precision="ieee")
        acc2 += tl.dot(weight, v2, input_precision="ieee")
    else:
        acc1 = tl.dot(weight.to(v1.dtype), v1, acc1)
        acc2 = tl.dot(weight.to(v2.dtype), v2, acc2)
    return higher, total, acc1, acc2


@triton.jit(do_not_specialize=["table_stride", "state_stride", "splits"])
def _attend(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, shared_ptr, keys_ptr, values_ptr, table_ptr, state_ptr,
    cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr,
    q_stride, k_stride, v_stride, out_stride, table_stride, state_stride,
    splits, scale, softcap, window, eps,
    GROUP: tl.constexpr, GROUP_P: tl.constexpr, KV_HEADS: tl.constexpr, HD: tl.constexpr, HALF_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, DIVIDED: tl.constexpr, SHARED: tl.constexpr,
    ROPE: tl.constexpr, NORM: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    slot, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(state_ptr + slot) == 0:
        return
    HALF: tl.constexpr = HD // 2
    position = tl.load(state_ptr + 2 * state_stride + slot)
    prompt = tl.load(state_ptr + 6 * state_stride + slot)
    base = (prompt + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    new = base + position - prompt  # where the new token lies among the row's blocks
    g, d, n = tl.arange(0, GROUP_P), tl.arange(0, HALF_P), tl.arange(0, TILE)
    in_d = d < HALF
    in_gd = (g < GROUP)[:, None] & in_d[None, :]
    dtype = keys_ptr.dtype.element_ty

    at_q = q_ptr + slot * q_stride + (head * GROUP + g[:, None]) * HD + d[None, :]
    q1 = tl.load(at_q, mask=in_gd, other=0.0).to(tl.float32)
    q2 = tl.load(at_q + HALF, mask=in_gd, other=0.0).to(tl.float32)
    at_k = k_ptr + slot * k_stride + head * HD + d
    k1 = tl.load(at_k, mask=in_d, other=0.0).to(tl.float32)
    k2 = tl.load(at_k + HALF, mask=in_d, other=0.0).to(tl.float32)
    at_v = v_ptr + slot * v_stride + head * HD + d
    v1 = tl.load(at_v, mask=in_d, other=0.0).to(dtype)
    v2 = tl.load(at_v + HALF, mask=in_d, other=0.0).to(dtype)
    if NORM:
        w1 = tl.load(q_weight_ptr + d, mask=in_d, other=0.0).to(tl.float32)
        w2 = tl.load(q_weight_ptr + HALF + d, mask=in_d, other=0.0).to(tl.float32)
        q1, q2 = _normed(q1, q2, w1, w2, eps, HD, 1)
        w1 = tl.load(k_weight_ptr + d, mask=in_d, other=0.0).to(tl.float32)
        w2 = tl.load(k_weight_ptr + HALF + d, mask=in_d, other=0.0).to(tl.float32)
        k1, k2 = _normed(k1, k2, w1, w2, eps, HD, 0)
    if ROPE:
        c = tl.load(cos_ptr + position * HALF + d, mask=in_d, other=0.0)
        s = tl.load(sin_ptr + position * HALF + d, mask=in_d, other=0.0)
        q1, q2 = _rope(q1, q2, c[None, :], s[None, :])
        k1, k2 = _rope(k1, k2, c, s)
    q1, q2, k1, k2 = q1.to(dtype), q2.to(dtype), k1.to(dtype), k2.to(dtype)

    LOG2E: tl.constexpr = 1.4426950408889634
    m = tl.full((GROUP_P,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_P,), tl.float32)
    acc1 = tl.zeros((GROUP_P, HALF_P), tl.float32)
    acc2 = tl.zeros((GROUP_P, HALF_P), tl.float32)
    if split == 0:  # the new token: written for later, and attended to from here
        block = tl.load(table_ptr + slot * table_stride + new // BLOCK_SIZE).to(tl.int64)
        to = (block * KV_HEADS + head) * BLOCK_SIZE * HD + (new % BLOCK_SIZE) * HD + d
        tl.store(keys_ptr + to, k1, mask=in_d)
        tl.store(keys_ptr + to + HALF, k2, mask=in_d)
        tl.store(values_ptr + to, v1, mask=in_d)
        tl.store(values_ptr + to + HALF, v2, mask=in_d)
        own = tl.sum(q1.to(tl.float32) * k1.to(tl.float32)[None, :], 1)
        own += tl.sum(q2.to(tl.float32) * k2.to(tl.float32)[None, :], 1)
        own *= scale
        if SOFTCAP:
            own = softcap * (2.0 / (1.0 + tl.exp(-2.0 * own / softcap)) - 1.0)
        m = own * LOG2E
        total = tl.full((GROUP_P,), 1.0, tl.float32)
        acc1 += v1.to(tl.float32)[None, :]
        acc2 += v2.to(tl.float32)[None, :]
        for part in tl.static_range(SHARED):  # what `_attend_shared` found in the prompt
            at = shared_ptr + ((slot * KV_HEADS * GROUP + head * GROUP + g) * SHARED + part) * (HD + 2)
            its_m = tl.load(at + HD, mask=g < GROUP, other=float("-inf"))
            higher = tl.maximum(m, its_m)
            less, its_less = tl.exp2(m - higher), tl.exp2(its_m - higher)
            total = total * less + tl.load(at + HD + 1, mask=g < GROUP, other=0.0) * its_less
            acc1 *= less[:, None]
            acc2 *= less[:, None]
            acc1 += tl.load(at[:, None] + d[None, :], mask=in_gd, other=0.0) * its_less[:, None]
            acc2 += tl.load(at[:, None] + d[None, :] + HALF, mask=in_gd, other=0.0) * its_less[:, None]
            m = higher

    first = 0
    if SHARED > 0:
        first = base
    if WINDOW:  # positions before the window are not even read
        oldest = tl.maximum(position - window + 1, 0)
        first = tl.maximum(first, tl.where(oldest < prompt, oldest, base + oldest - prompt) // TILE * TILE)
    tiles = (new - first + TILE - 1) // TILE
    each = tiles * TILE
    if DIVIDED:
        each = (tiles + splits - 1) // splits * TILE
    start_at = first + split * each
    stop_at = tl.minimum(start_at + each, new)
    for start in tl.range(start_at, stop_at, TILE):
        index = start + n
        in_n = (index < stop_at) & ((index < prompt) | (index >= base))
        if WINDOW:
            at = tl.where(index < prompt, index, index - base + prompt)
            in_n = in_n & (at > position - window)
        block_n = tl.load(table_ptr + slot * table_stride + index // BLOCK_SIZE, mask=in_n, other=0).to(tl.int64)
        from_n = (block_n * KV_HEADS + head) * BLOCK_SIZE * HD + (index % BLOCK_SIZE) * HD
        in_nd = in_n[:, None] & in_d[None, :]
        at_nd = from_n[:, None] + d[None, :]
        m, total, acc1, acc2 = _looked_at(
            q1, q2, keys_ptr, values_ptr, at_nd, in_nd, in_n[None, :], m, total, acc1, acc2, scale, softcap,
            HALF, SOFTCAP, EXACT,
        )  # fmt: skip

    heads = head * GROUP + g
    if not DIVIDED:
        to = out_ptr + slot * out_stride + heads[:, None] * HD + d[None, :]
        tl.store(to, (acc1 / total[:, None]).to(out_ptr.dtype.element_ty), mask=in_gd)
        tl.store(to + HALF, (acc2 / total[:, None]).to(out_ptr.dtype.element_ty), mask=in_gd)
    else:
        WIDTH: tl.constexpr = HD + 2
        at = partial_ptr + ((slot * KV_HEADS * GROUP + heads) * splits + split) * WIDTH
        tl.store(at[:, None] + d[None, :], acc1, mask=in_gd)
        tl.store(at[:, None] + d[None, :] + HALF, acc2, mask=in_gd)
        tl.store(at + HD, m, mask=g < GROUP)
        tl.store(at + HD + 1, total, mask=g < GROUP)


@triton.jit(do_not_specialize=["table_stride", "state_stride", "slots"])
def _attend_shared(
    q_ptr, shared_ptr, keys_ptr, values_ptr, table_ptr, state_ptr, cos_ptr, sin_ptr, q_weight_ptr,
    q_stride, table_stride, state_stride, slots, scale, softcap, window, eps,
    GROUP: tl.constexpr, ROWS_P: tl.constexpr, KV_HEADS: tl.constexpr, HD: tl.constexpr, HALF_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, TOGETHER: tl.constexpr,
    ROPE: tl.constexpr, NORM: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Neighbouring slots attend to the prompts they share: a prompt is read once for all of its rows among them."""
    first_slot, head, split = tl.program_id(0) * TOGETHER, tl.program_id(1), tl.program_id(2)
    HALF: tl.constexpr = HD // 2
    r, d, n, c = tl.arange(0, ROWS_P), tl.arange(0, HALF_P), tl.arange(0, TILE), tl.arange(0, TOGETHER)
    in_d = d < HALF
    slot_r = first_slot + r // GROUP
    in_r = (r < TOGETHER * GROUP) & (slot_r < slots)
    live_r = tl.load(state_ptr + slot_r, mask=in_r, other=0) != 0
    position_r = tl.load(state_ptr + 2 * state_stride + slot_r, mask=live_r, other=0)
    prompt_r = tl.load(state_ptr + 6 * state_stride + slot_r, mask=live_r, other=0)
    block_r = tl.load(table_ptr + slot_r * table_stride, mask=live_r & (prompt_r > 0), other=-1)  # names the prompt
    prompt_c = tl.load(state_ptr + 6 * state_stride + first_slot + c, mask=first_slot + c < slots, other=0)
    live_c = tl.load(state_ptr + first_slot + c, mask=first_slot + c < slots, other=0) != 0
    block_c = tl.load(table_ptr + (first_slot + c) * table_stride, mask=live_c & (prompt_c > 0), other=-1)

    in_rd = live_r[:, None] & in_d[None, :]
    at_q = q_ptr + slot_r[:, None] * q_stride + (head * GROUP + r[:, None] % GROUP) * HD + d[None, :]
    q1 = tl.load(at_q, mask=in_rd, other=0.0).to(tl.float32)
    q2 = tl.load(at_q + HALF, mask=in_rd, other=0.0).to(tl.float32)
    if NORM:
        w1 = tl.load(q_weight_ptr + d, mask=in_d, other=0.0).to(tl.float32)
        w2 = tl.load(q_weight_ptr + HALF + d, mask=in_d, other=0.0).to(tl.float32)
        q1, q2 = _normed(q1, q2, w1, w2, eps, HD, 1)
    if ROPE:
        at = position_r[:, None] * HALF + d[None, :]
        q1, q2 = _rope(
            q1, q2, tl.load(cos_ptr + at, mask=in_rd, other=0.0), tl.load(sin_ptr + at, mask=in_rd, other=0.0)
        )
    dtype = keys_ptr.dtype.element_ty
    q1, q2 = q1.to(dtype), q2.to(dtype)

    m = tl.full((ROWS_P,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS_P,), tl.float32)
    acc1 = tl.zeros((ROWS_P, HALF_P), tl.float32)
    acc2 = tl.zeros((ROWS_P, HALF_P), tl.float32)
    for j in range(TOGETHER):
        block = tl.sum(tl.where(c == j, block_c, 0), 0)
        prompt = tl.sum(tl.where(c == j, prompt_c, 0), 0)
        known = tl.sum(((block_c == block) & (c < j)).to(tl.int32), 0) > 0
        if (block >= 0) & (known == 0):
            mine_r = block_r == block
            tiles = (prompt + TILE - 1) // TILE
            each = (tiles + SPLITS - 1) // SPLITS * TILE
            stop_at = tl.minimum((split + 1) * each, prompt)
            for start in tl.range(split * each, stop_at, TILE):
                index = start + n
                in_n = index < stop_at
                block_n = tl.load(table_ptr + (first_slot + j) * table_stride + index // BLOCK_SIZE, mask=in_n, other=0)
                from_n = (block_n.to(tl.int64) * KV_HEADS + head) * BLOCK_SIZE * HD + (index % BLOCK_SIZE) * HD
                in_nd = in_n[:, None] & in_d[None, :]
                at_nd = from_n[:, None] + d[None, :]
                sees = mine_r[:, None] & in_n[None, :]
                if WINDOW:
                    sees = sees & (index[None, :] > position_r[:, None] - window)
                m, total, acc1, acc2 = _looked_at(
                    q1, q2, keys_ptr, values_ptr, at_nd, in_nd, sees, m, total, acc1, acc2, scale, softcap,
                    HALF, SOFTCAP, EXACT,
                )  # fmt: skip
    at = shared_ptr + ((slot_r * KV_HEADS * GROUP + head * GROUP + r % GROUP) * SPLITS + split) * (HD + 2)
    tl.store(at[:, None] + d[None, :], acc1, mask=in_rd)
    tl.store(at[:, None] + d[None, :] + HALF, acc2, mask=in_rd)
    tl.store(at + HD, m, mask=live_r)
    tl.store(at + HD + 1, total, mask=live_r)


@triton.jit(do_not_specialize=["splits"])
def _combine(
    partial_ptr, out_ptr, state_ptr, out_stride, splits,
    HEADS: tl.constexpr, HD: tl.constexpr, HD_P: tl.constexpr, SPLITS_P: tl.constexpr,
):  # fmt: skip
    slot, head = tl.program_id(0), tl.program_id(1)
    if tl.load(state_ptr + slot) == 0:
        return
    WIDTH: tl.constexpr = HD + 2
    k, d = tl.arange(0, SPLITS_P), tl.arange(0, HD_P)
    in_k = k < splits
    at = partial_ptr + ((slot * HEADS + head) * splits + k) * WIDTH
    m = tl.load(at + HD, mask=in_k, other=float("-inf"))
    total = tl.load(at + HD + 1, mask=in_k, other=0.0)
    weight = tl.exp2(m - tl.max(m, 0))
    acc = tl.load(at[:, None] + d[None, :], mask=in_k[:, None] & (d < HD)[None, :], other=0.0)
    out = tl.sum(acc * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out_ptr + slot * out_stride + head * HD + d, out.to(out_ptr.dtype.element_ty), mask=d < HD)


@dataclass(frozen=True)
class Attention:
    """How one layer attends."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None


def splits_for(rows: int, kv_heads: int, target: int, most: int = SPLITS) -> int:
    """Programs among which a row's positions are divided."""
    return min(max(target // max(rows * kv_heads, 1), 1), most)


def attend(
    how: Attention,
    q_SX: Tensor,
    k_SX: Tensor,
    v_SX: Tensor,
    keys: Tensor,
    values: Tensor,
    table_SB: Tensor,
    state_FS: Tensor,
    *,
    rope: tuple[Tensor, Tensor] | None = None,
    norm: tuple[Tensor, Tensor, float] | None = None,
    share_prompts: bool = False,
    long_rows: int = 0,
    tile: int = 64,
    warps: int = 2,
    stages: int = 2,
) -> Tensor:
    """(S, heads · head_dim): each slot's new token attends to its row, itself included; keys and values are written.

    share_prompts: neighbouring slots often have the same prompt, so that it pays to read it for all of them at once.
    long_rows: if not 0, so few of the slots are live, and some of them are LONG; it decides how fast this is, no more.
    """
    slots, group = q_SX.shape[0], how.heads // how.kv_heads
    out_SX = torch.empty(slots, how.heads * how.head_dim, dtype=keys.dtype, device=keys.device)
    many = SPLITS if not long_rows or (how.window or LONG) < LONG else MOST_SPLITS
    splits = splits_for(long_rows or slots, how.kv_heads, TARGET_PROGRAMS, many)
    partial = out_SX
    if splits > 1:
        partial = torch.empty(slots, how.heads, splits, how.head_dim + 2, dtype=torch.float32, device=keys.device)
    (cos, sin), shared, parts = rope or (state_FS, state_FS), out_SX, 0
    q_weight, k_weight, eps = norm or (state_FS, state_FS, 0.0)
    settings: dict[str, Any] = {
        "GROUP": group, "KV_HEADS": how.kv_heads, "HD": how.head_dim, "HALF_P": power(how.head_dim // 2),
        "BLOCK_SIZE": keys.shape[2], "TILE": tile, "ROPE": rope is not None, "NORM": norm is not None,
        "SOFTCAP": how.softcap is not None, "WINDOW": how.window is not None, "EXACT": keys.dtype == torch.float32,
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
    if share_prompts:
        clusters = triton.cdiv(slots, TOGETHER)
        parts = splits_for(clusters, how.kv_heads, TARGET_PROGRAMS // 2)
        shared = torch.empty(slots, how.heads, parts, how.head_dim + 2, dtype=torch.float32, device=keys.device)
        _attend_shared[(clusters, how.kv_heads, parts)](
            q_SX, shared, keys, values, table_SB, state_FS, cos, sin, q_weight,
            q_SX.stride(0), table_SB.stride(0), state_FS.stride(0), slots,
            how.scale, how.softcap or 1.0, how.window or 0, eps,
            ROWS_P=power(group * TOGETHER), SPLITS=parts, TOGETHER=TOGETHER, **settings,
        )  # fmt: skip
    _attend[(slots, how.kv_heads, splits)](
        q_SX, k_SX, v_SX, out_SX, partial, shared, keys, values, table_SB, state_FS, cos, sin, q_weight, k_weight,
        q_SX.stride(0), k_SX.stride(0), v_SX.stride(0), out_SX.stride(0), table_SB.stride(0), state_FS.stride(0),
        splits, how.scale, how.softcap or 1.0, how.window or 0, eps,
        GROUP_P=power(group), DIVIDED=splits > 1, SHARED=parts, **settings,
    )  # fmt: skip
    if splits > 1:
        _combine[(slots, how.heads)](
            partial, out_SX, state_FS, out_SX.stride(0), splits,
            HEADS=how.heads, HD=how.head_dim, HD_P=power(how.head_dim), SPLITS_P=power(splits, 2), num_warps=1,
        )  # fmt: skip
    return out_SX


# --- prompts --------------------------------------------------------------------------------------------------------


@triton.jit
def _rotated(at, weight_ptr, c, s, mask, d, in_d, eps, HD: tl.constexpr, NORM: tl.constexpr):
    HALF: tl.constexpr = HD // 2
    x1, x2 = tl.load(at, mask=mask, other=0.0).to(tl.float32), tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        w1 = tl.load(weight_ptr + d, mask=in_d, other=0.0).to(tl.float32)
        w2 = tl.load(weight_ptr + HALF + d, mask=in_d, other=0.0).to(tl.float32)
        x1, x2 = _normed(x1, x2, w1, w2, eps, HD, 1)
    return _rope(x1, x2, c, s)


@triton.jit(do_not_specialize=["steps"])
def _rope_and_store(
    qkv_ptr, q_ptr, k_ptr, keys_ptr, values_ptr, block_ptr, offset_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr,
    qkv_stride, steps, eps,
    HEADS: tl.constexpr, HEADS_P: tl.constexpr, KV_HEADS: tl.constexpr, KV_HEADS_P: tl.constexpr,
    HD: tl.constexpr, HALF_P: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = HD // 2
    d, h, j = tl.arange(0, HALF_P), tl.arange(0, HEADS_P), tl.arange(0, KV_HEADS_P)
    in_d = d < HALF
    position = token % steps
    c = tl.load(cos_ptr + position * HALF + d, mask=in_d, other=0.0)[None, :]
    s = tl.load(sin_ptr + position * HALF + d, mask=in_d, other=0.0)[None, :]
    dtype = q_ptr.dtype.element_ty

    in_hd = (h < HEADS)[:, None] & in_d[None, :]
    at = h[:, None] * HD + d[None, :]
    q1, q2 = _rotated(qkv_ptr + token * qkv_stride + at, q_weight_ptr, c, s, in_hd, d, in_d, eps, HD, NORM)
    tl.store(q_ptr + token * HEADS * HD + at, q1.to(dtype), mask=in_hd)
    tl.store(q_ptr + token * HEADS * HD + at + HALF, q2.to(dtype), mask=in_hd)

    in_jd = (j < KV_HEADS)[:, None] & in_d[None, :]
    at = j[:, None] * HD + d[None, :]
    from_k = qkv_ptr + token * qkv_stride + HEADS * HD + at
    k1, k2 = _rotated(from_k, k_weight_ptr, c, s, in_jd, d, in_d, eps, HD, NORM)
    tl.store(k_ptr + token * KV_HEADS * HD + at, k1.to(dtype), mask=in_jd)
    tl.store(k_ptr + token * KV_HEADS * HD + at + HALF, k2.to(dtype), mask=in_jd)
    block, offset = tl.load(block_ptr + token), tl.load(offset_ptr + token)
    to = (block * KV_HEADS + j[:, None]) * BLOCK_SIZE * HD + offset * HD + d[None, :]
    from_v = from_k + KV_HEADS * HD
    tl.store(keys_ptr + to, k1.to(dtype), mask=in_jd)
    tl.store(keys_ptr + to + HALF, k2.to(dtype), mask=in_jd)
    tl.store(values_ptr + to, tl.load(from_v, mask=in_jd, other=0.0), mask=in_jd)
    tl.store(values_ptr + to + HALF, tl.load(from_v + HALF, mask=in_jd, other=0.0), mask=in_jd)


def rope_and_store(
    how: Attention,
    qkv_MX: Tensor,
    keys: Tensor,
    values: Tensor,
    block_M: Tensor,
    offset_M: Tensor,
    steps: int,
    rope: tuple[Tensor, Tensor],
    norm: tuple[Tensor, Tensor, float] | None,
) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys (M, heads, width) of whole prompts, `steps` tokens each; keys and values are written."""
    tokens = len(qkv_MX)
    q, k = qkv_MX.new_empty(tokens, how.heads, how.head_dim), qkv_MX.new_empty(tokens, how.kv_heads, how.head_dim)
    q_weight, k_weight, eps = norm or (qkv_MX, qkv_MX, 0.0)
    _rope_and_store[(tokens,)](
        qkv_MX, q, k, keys, values, block_M, offset_M, *rope, q_weight, k_weight, qkv_MX.stride(0), steps, eps,
        HEADS=how.heads, HEADS_P=power(how.heads, 2), KV_HEADS=how.kv_heads, KV_HEADS_P=power(how.kv_heads, 2),
        HD=how.head_dim, HALF_P=power(how.head_dim // 2), BLOCK_SIZE=keys.shape[2], NORM=norm is not None, num_warps=2,
    )  # fmt: skip
    return q, k


# --- the rest of a layer --------------------------------------------------------------------------------------------


@triton.jit
def _add_norm(
    hidden_ptr, delta_ptr, weight_ptr, out_ptr, eps,
    D: tl.constexpr, D_P: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D_P)
    in_d = d < D
    dtype = hidden_ptr.dtype.element_ty
    x = tl.load(hidden_ptr + row * D + d, mask=in_d, other=0.0).to(tl.float32)
    if DELTA:
        x += tl.load(delta_ptr + row * D + d, mask=in_d, other=0.0).to(tl.float32)
        x = x.to(dtype)
        tl.store(hidden_ptr + row * D + d, x, mask=in_d)
        x = x.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    weight = tl.load(weight_ptr + d, mask=in_d, other=0.0).to(tl.float32)
    y = weight * x.to(dtype).to(tl.float32)
    tl.store(out_ptr + row * D + d, y.to(out_ptr.dtype.element_ty), mask=in_d)


def add_norm(hidden_SD: Tensor, delta_SD: Tensor | None, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm of hidden + delta, which hidden becomes."""
    rows, size = hidden_SD.shape
    out_SD = torch.empty(rows, size, dtype=dtype, device=hidden_SD.device)
    wide = power(size)
    _add_norm[(rows,)](
        hidden_SD, hidden_SD if delta_SD is None else delta_SD, weight_D, out_SD, eps,
        D=size, D_P=wide, DELTA=delta_SD is not None, num_warps=min(max(wide // 256, 1), 8),
    )  # fmt: skip
    return out_SD
