"""vLLM: the same prompts, the same number of tokens, log-probs on or off, from a folder with the same weights."""

from __future__ import annotations

import importlib.util
import os
import time
from typing import Any

from cells import job, measure, peak

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
    "TOKENIZERS_PARALLELISM": "false",
    # It opens a group of one process and asks for its own address: there may be no network.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""So that it runs on a machine without network; what is set already stays."""

GRAPHS = (1, 8, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Rows that it captures a graph for: those it is asked for, and a few below, in a quarter of the time that its own 83
take. Rows that all run to their limit are never another number for long."""


def rollout(llm: Any, asked: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each rollout and what it made."""
    import vllm
    from vllm import SamplingParams

    settings, how = cell["settings"], cell["settings"]["configuration"]
    given = {
        "n": settings["group"],
        "temperature": 1.0,
        "logprobs": 0 if how.get("logprobs", True) else None,
        "ignore_eos": True,
        "detokenize": how["detokenize"],
    }
    if cell["ends"]:
        given["stop_token_ids"] = cell["ends"]
    prompts = [{"prompt_token_ids": prompt} for prompt in cell["prompts"]]
    llm.generate(prompts, SamplingParams(max_tokens=8, **given), use_tqdm=False)
    params = SamplingParams(max_tokens=settings["tokens"], **given)
    seconds, tokens, made = [], [], []
    for _ in range(settings["repeats"]):
        llm.reset_prefix_cache()  # as after every step of training: its weights have changed
        start = time.perf_counter()
        made = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        tokens.append(sum(len(row.token_ids) for request in made for row in request.outputs))
    rows = [row for request in made for row in request.outputs]
    assert len(rows) == len(prompts) * settings["group"] and all(
        bool(row.logprobs) == how.get("logprobs", True) for row in rows
    )
    longest = max(len(row.token_ids) for row in rows)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "longest": longest,
        "peak": peak(asked["device"]),
        "vllm": vllm.__version__,
    }


def main() -> None:
    asked = job()
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("vllm is not installed: pip install vllm, or give --vllm-path")
    how = asked["cells"][0]["settings"]["configuration"]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if how["multiprocessing"] else "0"
    from vllm import LLM

    further: dict[str, Any] = {}
    if how["widest_graph"]:
        sizes = [size for size in GRAPHS if size <= how["widest_graph"]]
        further["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    if "async_scheduling" in how:
        further["async_scheduling"] = how["async_scheduling"]
    llm = LLM(
        model=asked["folder"],
        dtype=asked["dtype"],
        gpu_memory_utilization=how["gpu_memory_utilization"],
        max_model_len=1024,
        max_num_seqs=1024,
        enable_prefix_caching=True,
        **further,
    )
    measure(asked, lambda cell: rollout(llm, asked, cell))


if __name__ == "__main__":
    main()
