"""Compiles every kernel for a GPU that need not be there, as a script: `python compile_kernels.py`."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from grpo.language.engines.cuda_graphs import kernels, sampler
from grpo.language.scoring.kernels import head as head_kernels
from grpo.language.scoring.kernels import layers as layer_kernels

FLOATS = {"scale", "softcap", "eps", "temperature", "penalty", "top_p", "min_p"}
TYPES = {
    "state_ptr": "*i32", "table_ptr": "*i32", "made_ptr": "*i32", "ended_ptr": "*i32", "eos_ptr": "*i32",
    "floor_ptr": "*i32", "block_ptr": "*i64", "offset_ptr": "*i64", "seen_ptr": "*i8", "uniform_ptr": "*fp64",
    **dict.fromkeys(
        ("partial_ptr", "shared_ptr", "cos_ptr", "sin_ptr", "summary_ptr", "logp_ptr", "kept_ptr", "sums_ptr",
         "lse_ptr", "more_lse_ptr"), "*fp32"
    ),
}  # fmt: skip
HEADS = {"KV_HEADS": 8, "HD": 128, "HALF_P": 64, "BLOCK_SIZE": 32}
ATTENTION = HEADS | {"GROUP": 2, "TILE": 64, "ROPE": True, "NORM": True}
ROPE = {"HEADS": 9, "KV_HEADS": 3, "HD": 64, "HALF": 32, "HEADS_P": 16, "KV_HEADS_P": 4, "HALF_P": 32}
PLAIN, ODD = {"SOFTCAP": False, "WINDOW": False}, {"SOFTCAP": True, "WINDOW": True}
CASES = [
    (kernels._attend, ATTENTION | PLAIN | {"GROUP_P": 16, "DIVIDED": False, "SHARED": 0, "EXACT": False}),
    (kernels._attend, ATTENTION | ODD | {"GROUP_P": 16, "DIVIDED": True, "SHARED": 2, "EXACT": True}),
    (kernels._attend_shared, ATTENTION | PLAIN | {"ROWS_P": 16, "SPLITS": 2, "TOGETHER": 8, "EXACT": False}),
    (kernels._attend_shared, ATTENTION | ODD | {"ROWS_P": 16, "SPLITS": 1, "TOGETHER": 8, "EXACT": True}),
    (kernels._combine, {"HEADS": 16, "HD": 128, "HD_P": 128, "SPLITS_P": 4}),
    (kernels._rope_and_store, HEADS | {"HEADS": 16, "HEADS_P": 16, "KV_HEADS_P": 8, "NORM": True}),
    (kernels._add_norm, {"D": 576, "D_P": 1024, "DELTA": True}),
    (layer_kernels._gate, {"BLOCK": 1024, "GELU": False, "BACK": False}),
    (layer_kernels._norm, {"D": 576, "D_P": 1024}),
    (layer_kernels._norm_backward, {"D": 2048, "D_P": 2048, "AROUND": True}),
    (layer_kernels._rope, ROPE | {"NORM": True}),
    (layer_kernels._rope_backward, ROPE | {"NORM": True, "V_P": 1024}),
    (layer_kernels._rope_backward, ROPE | {"NORM": False, "V_P": 1024}),
    (layer_kernels._gate, {"BLOCK": 1024, "GELU": True, "BACK": True}),
    (layer_kernels._merge, {"HEADS": 9, "HD": 64, "HEADS_P": 16, "HD_P": 64}),
    (sampler._floors, {"BLOCK": 2048, "PENALTY": True, "TOP_K": True, "TOP_P": True, "MIN_P": True}),
    (sampler._summaries, {"BLOCK": 2048, "PENALTY": True, "FLOOR": True}),
    (sampler._draw, {"BLOCK": 2048, "BLOCKS_P": 32, "EOS_P": 2, "PENALTY": True, "FLOOR": True, "GREEDY": False}),
    (sampler._draw, {"BLOCK": 2048, "BLOCKS_P": 32, "EOS_P": 2, "PENALTY": False, "FLOOR": False, "GREEDY": True}),
]  # fmt: skip


def compiled(kernel, constants, wide):
    """For a Hopper GPU; wide: float32 where else bfloat16."""
    types, known = {}, {}
    for number, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name], known[number,] = "constexpr", constants[name]
        elif name.endswith("_ptr"):
            types[name] = TYPES.get(name, "*fp32" if wide else "*bf16")
        else:
            types[name] = "fp32" if name in FLOATS else "i32"
    made = triton.compile(ASTSource(kernel, types, known), GPUTarget("cuda", 90, 32), {"num_warps": 8, "num_stages": 2})
    assert made.asm["ptx"]


if __name__ == "__main__":
    assert head_kernels
    for kernel, constants in CASES:
        compiled(kernel, constants, constants.get("EXACT", False))
        print(kernel.__name__, flush=True)
    sys.exit(0)
