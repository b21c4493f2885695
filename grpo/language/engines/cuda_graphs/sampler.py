"""A token from logits, for every slot on the device: what `sampling.draw` does on a CPU, in the same definitions.

    floors      the lowest logit that top-k, top-p and min-p leave
    summaries   of each block of the vocabulary: its highest logit, and the sum above it
    draw        the block, then the token in it; its log-prob, and whether the row has ended

Nothing here waits for the host.

Letters: S slots, F fields of a slot's state, R sequences as rows of the outputs, W numbers of a row that are there,
E ends of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo.language.engines import Sampling
from grpo.language.engines.cuda_graphs.kernels import power

ENDED_BY_EOS = 1
"""In the last two bits of a row's end; the limit has ended the others."""
BLOCK_V = 2048
"""Tokens of the vocabulary in one summary."""


@triton.jit
def _ordered(x):
    """Integers in the order of the float32 numbers they stand for."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _logits(at_ptr, seen_ptr, v, in_v, temperature, penalty, PENALTY: tl.constexpr):
    """The model's logits over temperature, and the same after the penalty."""
    x = tl.load(at_ptr + v, mask=in_v, other=float("-inf")).to(tl.float32) / temperature
    chosen = x
    if PENALTY:
        seen = tl.load(seen_ptr + v, mask=in_v, other=0)
        chosen = tl.where(seen != 0, tl.where(x < 0, x * penalty, x / penalty), x)
    return x, chosen


@triton.jit(do_not_specialize=["state_stride", "vocabulary"])
def _summaries(
    logits_ptr, seen_ptr, out_ptr, state_ptr, floor_ptr, vocabulary, blocks, temperature, penalty,
    BLOCK: tl.constexpr, PENALTY: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Of a block: its highest logit and the sum above it, of the model and of what is drawn from."""
    slot, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(state_ptr + slot) == 0:
        return
    v = block * BLOCK + tl.arange(0, BLOCK)
    x, chosen = _logits(
        logits_ptr + slot * vocabulary, seen_ptr + slot * vocabulary, v, v < vocabulary, temperature, penalty, PENALTY
    )
    at = out_ptr + (slot * blocks + block) * 6
    best = tl.max(x, 0)
    weight = tl.exp(x - tl.where(best == float("-inf"), 0.0, best))
    tl.store(at, best)
    tl.store(at + 1, tl.sum(weight, 0))
    best = tl.max(chosen, 0)
    drawn = tl.exp(chosen - tl.where(best == float("-inf"), 0.0, best))
    kept = weight
    if FLOOR:
        keep = _ordered(chosen) >= tl.load(floor_ptr + slot)
        drawn = tl.where(keep, drawn, 0.0)
        kept = tl.where(keep, weight, 0.0)
    tl.store(at + 2, best)
    tl.store(at + 3, tl.sum(drawn, 0))
    tl.store(at + 4, tl.sum(kept, 0))
    tl.store(at + 5, tl.argmax(chosen, 0).to(tl.float32))


@triton.jit(do_not_specialize=["vocabulary"])
def _floors(
    logits_ptr, seen_ptr, floor_ptr, state_ptr, vocabulary, temperature, penalty, top_k, top_p, min_p,
    BLOCK: tl.constexpr, PENALTY: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """The lowest logit that top-k, top-p and min-p leave, as an ordered integer, found by halving its range."""
    slot = tl.program_id(0).to(tl.int64)
    if tl.load(state_ptr + slot) == 0:
        return
    logits_ptr += slot * vocabulary
    seen_ptr += slot * vocabulary
    offset = tl.arange(0, BLOCK)
    best_b = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        v = start + offset
        _, chosen = _logits(logits_ptr, seen_ptr, v, v < vocabulary, temperature, penalty, PENALTY)
        best_b = tl.maximum(best_b, chosen)
    best = tl.max(best_b, 0)
    top = tl.max(_ordered(best_b), 0)
    floor = tl.full((), -2147483647, tl.int32)  # below every number: all are left
    if TOP_K:  # the highest floor with at least k numbers on or above it
        low, high = floor.to(tl.int64), top.to(tl.int64)
        while low < high:
            middle = (low + high + 1) >> 1
            count_b = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, vocabulary, BLOCK):
                v = start + offset
                _, chosen = _logits(logits_ptr, seen_ptr, v, v < vocabulary, temperature, penalty, PENALTY)
                count_b += (_ordered(chosen).to(tl.int64) >= middle).to(tl.int32)
            enough = tl.sum(count_b, 0) >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        floor = low.to(tl.int32)
    if TOP_P:  # the lowest floor above which less than p of what is left lies
        all_b = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocabulary, BLOCK):
            v = start + offset
            _, chosen = _logits(logits_ptr, seen_ptr, v, v < vocabulary, temperature, penalty, PENALTY)
            all_b += tl.where(_ordered(chosen) >= floor, tl.exp(chosen - best), 0.0)
        target = tl.sum(all_b, 0) * top_p
        low, high = floor.to(tl.int64), top.to(tl.int64)
        while low < high:
            middle = (low + high) >> 1
            above_b = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, vocabulary, BLOCK):
                v = start + offset
                _, chosen = _logits(logits_ptr, seen_ptr, v, v < vocabulary, temperature, penalty, PENALTY)
                above_b += tl.where(_ordered(chosen).to(tl.int64) > middle, tl.exp(chosen - best), 0.0)
            little = tl.sum(above_b, 0) < target
            high = tl.where(little, middle, high)
            low = tl.where(little, low, middle + 1)
        floor = tl.maximum(floor, low.to(tl.int32))
    if MIN_P:
        floor = tl.maximum(floor, _ordered(best + tl.log(min_p)))
    tl.store(floor_ptr + slot, floor)


@triton.jit(do_not_specialize=["state_stride", "vocabulary", "made_stride", "eos_count", "window"])
def _draw(
    logits_ptr, seen_ptr, summary_ptr, floor_ptr, state_ptr, uniform_ptr, made_ptr, logp_ptr, kept_ptr, ended_ptr,
    eos_ptr, eos_count, vocabulary, blocks, state_stride, made_stride, window, temperature, penalty,
    BLOCK: tl.constexpr, BLOCKS_P: tl.constexpr, EOS_P: tl.constexpr,
    PENALTY: tl.constexpr, FLOOR: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    if tl.load(state_ptr + slot) == 0:
        return
    row = tl.load(state_ptr + 5 * state_stride + slot).to(tl.int64)
    step = tl.load(state_ptr + 3 * state_stride + slot)
    b = tl.arange(0, BLOCKS_P)
    in_b = b < blocks
    at = summary_ptr + (slot * blocks + b) * 6
    best_b = tl.load(at, mask=in_b, other=float("-inf"))
    best = tl.max(best_b, 0)
    share_b = tl.exp(best_b - best)
    total = tl.sum(tl.load(at + 1, mask=in_b, other=0.0) * share_b, 0)
    chosen_b = tl.load(at + 2, mask=in_b, other=float("-inf"))
    highest = tl.max(chosen_b, 0)
    logits_ptr += slot * vocabulary
    seen_ptr += slot * vocabulary
    if GREEDY:
        block = tl.minimum(tl.argmax(chosen_b, 0), blocks - 1)  # were all of them NaN
        token = block * BLOCK + tl.load(summary_ptr + (slot * blocks + block) * 6 + 5).to(tl.int32)
    else:
        weight_b = tl.load(at + 3, mask=in_b, other=0.0) * tl.exp(chosen_b - highest)
        running_b = tl.cumsum(weight_b.to(tl.float64), 0)
        target = tl.load(uniform_ptr + row * window + step % window) * tl.max(running_b, 0)
        last = tl.max(tl.where(weight_b > 0, b, 0), 0)
        block = tl.minimum(tl.sum((running_b <= target).to(tl.int32), 0), last)
        rest = target - tl.sum(tl.where(b < block, weight_b.to(tl.float64), 0.0), 0)
        i = tl.arange(0, BLOCK)
        v = block * BLOCK + i
        _, chosen = _logits(logits_ptr, seen_ptr, v, v < vocabulary, temperature, penalty, PENALTY)
        weight = tl.exp(chosen - highest)
        if FLOOR:
            weight = tl.where(_ordered(chosen) >= tl.load(floor_ptr + slot), weight, 0.0)
        running = tl.cumsum(weight.to(tl.float64), 0)
        last = tl.max(tl.where(weight > 0, i, 0), 0)
        token = block * BLOCK + tl.minimum(tl.sum((running <= rest).to(tl.int32), 0), last)
    token = tl.minimum(token, vocabulary - 1)
    x = tl.load(logits_ptr + token).to(tl.float32) / temperature
    tl.store(logp_ptr + row * made_stride + step, x - best - tl.log(total))
    tl.store(made_ptr + row * made_stride + step, token)
    if FLOOR or PENALTY:
        kept = tl.sum(tl.load(at + 4, mask=in_b, other=0.0) * share_b, 0)
        tl.store(kept_ptr + row * made_stride + step, kept / total)
    if PENALTY:
        tl.store(seen_ptr + token, tl.full((), 1, tl.int8))
    e = tl.arange(0, EOS_P)
    over = tl.sum(((tl.load(eos_ptr + e, mask=e < eos_count, other=-1) == token) & (e < eos_count)).to(tl.int32), 0) > 0
    reason = tl.where(over, 1, 2)
    over = over | (step + 1 >= tl.load(state_ptr + 4 * state_stride + slot))
    if over:
        tl.store(state_ptr + slot, 0)
        tl.store(ended_ptr + row, (step + 1) * 4 + reason)
    tl.store(state_ptr + state_stride + slot, token)
    at_position = state_ptr + 2 * state_stride + slot
    tl.store(at_position, tl.load(at_position) + 1)
    tl.store(state_ptr + 3 * state_stride + slot, step + 1)


@dataclass(frozen=True)
class Outputs:
    """What is made of the rows, and what it is made with; (R, T)."""

    made_RT: Tensor
    logp_RT: Tensor
    kept_RT: Tensor
    """Written where something is cut; else it has no columns but one."""
    uniform_RW: Tensor
    """float64: the number of a row's step stands at its remainder."""
    ended_R: Tensor
    """4 · length + why, where a row has ended; 0 where not."""
    eos_E: Tensor
    seen_SV: Tensor | None = None
    """int8, for the repetition penalty: the tokens of prompt and completion."""


def sample(logits_SV: Tensor, sampling: Sampling, state_FS: Tensor, outputs: Outputs) -> None:
    """Draw every live slot's next token, record it, and go one position further."""
    slots, vocabulary = logits_SV.shape
    blocks, device = triton.cdiv(vocabulary, BLOCK_V), logits_SV.device
    greedy = sampling.temperature == 0.0
    temperature, penalty = sampling.temperature or 1.0, sampling.repetition_penalty
    cuts = {
        "TOP_K": 0 < sampling.top_k < vocabulary and not greedy,
        "TOP_P": sampling.top_p < 1.0 and not greedy,
        "MIN_P": sampling.min_p > 0.0 and not greedy,
    }
    seen = logits_SV if outputs.seen_SV is None else outputs.seen_SV
    settings: dict[str, Any] = {"PENALTY": outputs.seen_SV is not None, "BLOCK": BLOCK_V}
    floor_S = torch.empty(slots, dtype=torch.int32, device=device)
    if any(cuts.values()):
        _floors[(slots,)](
            logits_SV, seen, floor_S, state_FS, vocabulary, temperature, penalty,
            sampling.top_k, sampling.top_p, sampling.min_p or 1.0, **cuts, **settings, num_warps=8,
        )  # fmt: skip
    settings["FLOOR"] = any(cuts.values())
    summary = torch.empty(slots, blocks, 6, dtype=torch.float32, device=device)
    _summaries[(slots, blocks)](
        logits_SV, seen, summary, state_FS, floor_S, vocabulary, blocks, temperature, penalty, **settings, num_warps=4
    )
    _draw[(slots,)](
        logits_SV, seen, summary, floor_S, state_FS, outputs.uniform_RW, outputs.made_RT, outputs.logp_RT,
        outputs.kept_RT, outputs.ended_R, outputs.eos_E, len(outputs.eos_E), vocabulary, blocks, state_FS.stride(0),
        outputs.made_RT.stride(0), outputs.uniform_RW.shape[1], temperature, penalty,
        BLOCKS_P=power(blocks, 2), EOS_P=power(len(outputs.eos_E), 2), GREEDY=greedy, **settings, num_warps=4,
    )  # fmt: skip
