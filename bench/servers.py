"""vLLM servers, measured: seconds of a push by each way, how far their log-probs are from ours, tokens a second.

    python bench/servers.py --serve --model PATH --output out.json          starts one on this machine, on the same GPU
    python bench/servers.py --servers http://a:8000,http://b:8000 --model PATH --transfer nccl
    python bench/servers.py --servers http://a:8000 --model PATH --gsm8k 120     and 120 s of GSM8K at staleness 0 and 1

Whatever fails is kept in the output with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.language.data.chat import prepare_tokenizer
from grpo.language.engines import Sampling
from grpo.language.engines.vllm import RECEIVER, VLLMEngine

PORT = 8123
PUSHES = 5


@contextmanager
def served(args: argparse.Namespace) -> Any:
    """A server of our own, on the GPU that is trained on, or those that were named."""
    if not args.serve:
        yield args.servers.split(",")
        return
    command = ["vllm", "serve", args.model, "--port", str(PORT), "--load-format", "dummy",
               "--generation-config", "vllm",
               "--worker-extension-cls", RECEIVER, "--gpu-memory-utilization", str(args.share), "--dtype", args.dtype,
               "--max-model-len", "2048", "--weight-transfer-config", '{"backend": "nccl"}']  # fmt: skip
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    server = subprocess.Popen(command, env=environment, stdout=sys.stderr, stderr=sys.stderr)
    try:
        yield [f"http://127.0.0.1:{PORT}"]
    finally:
        server.terminate()
        server.wait(60)


def pushes(engine: VLLMEngine) -> dict[str, Any]:
    """Seconds of a push, its proof included, after weights that changed."""
    seconds = []
    for number in range(PUSHES):
        with torch.no_grad():
            next(iter(engine.model.parameters())).mul_(1.0 + 2**-12)
        began = time.perf_counter()
        engine.refresh(number + 1)
        seconds.append(time.perf_counter() - began)
    size = sum(p.numel() * p.element_size() for p in engine.model.parameters())
    return {"push_seconds": seconds, "median": statistics.median(seconds), "gib": size / 2**30}


def gaps(engine: VLLMEngine, rows: int, length: int) -> dict[str, float]:
    """Nats between what the servers recorded and what the module says, and tokens a second."""
    prompts = [[10 + i, 20 + i, 30 + i] for i in range(rows)]
    began = time.perf_counter()
    made = engine.generate(prompts, 4, Sampling(length), range(4 * rows))
    seconds, off = time.perf_counter() - began, []
    device = next(engine.model.parameters()).device
    for i, completion in enumerate(made):
        prompt = prompts[i // 4]
        ids = torch.tensor([[*prompt, *completion.ids.tolist()]], device=device)
        with torch.no_grad():
            logits = engine.model(ids).logits[0, len(prompt) - 1 : -1].float()
        logp = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()
        assert completion.logp is not None
        off.append((logp - completion.logp).abs())
    gap = torch.cat(off)
    return {"tokens_per_second": len(gap) / seconds, "gap_mean": float(gap.mean()), "gap_median": float(gap.median()),
            "gap_p99": float(gap.quantile(0.99)), "tokens": len(gap)}  # fmt: skip


def gsm8k(args: argparse.Namespace, urls: list[str], staleness: float) -> dict[str, Any]:
    """A short run; its accuracy on held-out rows and how long its steps took."""
    folder = Path(args.folder) / f"staleness-{staleness:g}"
    command = [sys.executable, "-m", "grpo", "train", "gsm8k", "--model", args.model, "--engine", "vllm", "--servers",
               ",".join(urls), "--staleness", str(staleness), "--logdir", str(folder), "--steps",
               str(args.steps)]  # fmt: skip
    began = time.perf_counter()
    done = subprocess.run(command, check=False, timeout=10 * args.gsm8k, capture_output=True, text=True)
    lines = [json.loads(line) for path in folder.rglob("metrics.jsonl") for line in path.read_text().splitlines()]
    last = lines[-1] if lines else {"failed": done.stderr[-500:]}
    return {"staleness": staleness, "seconds": time.perf_counter() - began, "steps": len(lines), "last": last}


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--servers", default="")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--model", required=True)
    parser.add_argument("--transfer", default="ipc,nccl,file")
    parser.add_argument("--share", type=float, default=0.3, help="of the GPU's memory, for a server of our own")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gsm8k", type=float, default=0.0, help="seconds of a GSM8K run, about")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", default="/tmp/grpo-servers")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(device).eval()
    tokens = prepare_tokenizer(AutoTokenizer.from_pretrained(args.model))
    told: dict[str, Any] = {"model": args.model, "device": device, "torch": torch.__version__, "ways": {}}
    with served(args) as urls:
        for way in args.transfer.split(","):
            try:
                engine = VLLMEngine(model, tokens, servers=urls, transfer=way, deadline=600.0)
                told["ways"][way] = pushes(engine) | gaps(engine, 16, 128)
                engine.close()
            except Exception as error:
                told["ways"][way] = {"failed": f"{type(error).__name__}: {error}"}
            print(way, told["ways"][way], flush=True)
        if args.gsm8k:
            told["gsm8k"] = [gsm8k(args, urls, staleness) for staleness in (0.0, 1.0)]
    if args.output:
        args.output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
