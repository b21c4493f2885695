"""vLLM for real: seconds of a push by each way, its log-probs beside ours, and short runs with and without staleness.

    python bench/servers.py --shape 1.7b                       a server of our own, on the GPU that is trained on
    python bench/servers.py --shape 1.7b --in-process          vLLM in this process
    python bench/servers.py --model PATH --runs smollm-arithmetic,gsm8k --data FOLDER --steps 40 --graphs
    python bench/servers.py --model PATH --lora 16             adapters alone
    python bench/servers.py --servers http://a:8000,http://b:8000 --model PATH --transfer nccl

A shape is a model with random weights, made on the spot; nobody needs them on a disk, for vLLM gets them from us.
Several of these may start at a time: with --turn FILE each measures alone. Whatever fails is kept in the output with
its reason.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cells
import torch
from gsm8k import FLAGS, as_folder
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config

from grpo.language.data.chat import prepare_tokenizer
from grpo.language.engines import Sampling
from grpo.language.engines.inline import head_of
from grpo.language.engines.vllm import RECEIVER, VLLMEngine
from grpo.language.engines.vllm.server import VLLMServer
from grpo.language.scoring.head import unrounded

SHAPES: dict[str, dict[str, Any]] = {
    "1.7b": {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151_936, "tie_word_embeddings": True},
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
             "head_dim": 64, "intermediate_size": 256, "vocab_size": 512, "tie_word_embeddings": True},
}  # fmt: skip
PUSHES = 7
KEYS = 4 << 30
"""Bytes of vLLM's cache: said outright, so that nobody measures free memory while others start."""
START = 150.0
"""Seconds that a server may take to start."""


# --- models and servers ----------------------------------------------------------------------------------------------


def made(shape: str, place: Path) -> str:
    """A folder with a config and a tokenizer of one word for each id."""
    config = Qwen3Config(**SHAPES[shape], dtype=torch.bfloat16, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(place)
    words = {"<unk>": 0, "<eos>": 1, "<pad>": 2} | {f"w{i}": i for i in range(3, SHAPES[shape]["vocab_size"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # type: ignore[arg-type]
    plain.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(place)
    return str(place)


def loaded(folder: str, device: str, dtype: torch.dtype) -> nn.Module:
    """The model in a folder; where there is a config alone, with random weights."""
    if any(Path(folder).glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    with torch.device(device):
        config = AutoConfig.from_pretrained(folder)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@contextmanager
def served(args: argparse.Namespace, folder: str) -> Iterator[tuple[list[str], float]]:
    """A server of our own, on the GPU that is trained on, or those that were named; the seconds that it took."""
    if args.servers:
        yield args.servers.split(","), 0.0
        return
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(args.port),
               "--host", "127.0.0.1", "--generation-config", "vllm", "--dtype", args.dtype, "--max-model-len", "2048",
               "--gpu-memory-utilization", str(args.share), "--kv-cache-memory-bytes", str(KEYS),
               "--disable-log-stats", "--disable-uvicorn-access-log"]  # fmt: skip
    command += [] if args.graphs else ["--enforce-eager"]
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if args.lora:
        command += [
            "--hf-overrides",
            '{"head_dtype": "float32"}',
            "--enable-lora",
            "--max-lora-rank",
            str(args.lora),
            "--max-loras",
            "4",
        ]
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    else:
        command += ["--load-format", "dummy", "--worker-extension-cls", RECEIVER]
        command += ["--weight-transfer-config", '{"backend": "nccl"}']
    log = Path(args.folder) / f"server-{args.port}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    url, began = f"http://127.0.0.1:{args.port}", time.perf_counter()
    try:
        while not VLLMServer(url, 5.0).healthy(2.0) and time.perf_counter() - began < START:
            if server.poll() is not None:
                raise SystemExit(f"the server ended:\n{tail(args, 60)}")
            time.sleep(0.5)
        yield [url], time.perf_counter() - began
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


def tail(args: argparse.Namespace, lines: int = 40) -> str:
    """What the server said last."""
    log = Path(args.folder) / f"server-{args.port}.log"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


@contextmanager
def alone(file: str | None) -> Iterator[None]:
    """Nobody else measures in here."""
    if file is None:
        yield
        return
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- figures ---------------------------------------------------------------------------------------------------------


def pushes(engine: VLLMEngine) -> dict[str, Any]:
    """Seconds of a push, its proof included, after weights that changed."""
    seconds: list[float] = []
    for number in range(PUSHES):
        if sum(seconds) > 15:
            break
        with torch.no_grad():
            next(iter(engine.model.parameters())).mul_(1.0 + 2**-7)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        engine.refresh(number + 1)
        seconds.append(time.perf_counter() - began)
    size = sum(p.numel() * p.element_size() for p in engine.model.parameters())
    return {"push_seconds": seconds, "push_median": statistics.median(seconds), "gib": size / 2**30}


def gaps(engine: VLLMEngine, rows: int, length: int) -> dict[str, Any]:
    """Nats between what vLLM recorded and what the module says, beside what rounding costs the module; tokens a second.

    `rounding` is how far the module in bfloat16 is from itself in float32: no two implementations can be nearer.
    """
    prompts = [[10 + i, 20 + i, 30 + i] for i in range(rows)]
    engine.generate(prompts, 4, Sampling(length), range(4 * rows))  # kernels are compiled the first time
    began = time.perf_counter()
    answers = engine.generate(prompts, 4, Sampling(length), range(4 * rows))
    seconds = time.perf_counter() - began
    exact = copy.deepcopy(engine.model).float()
    ours, whole, theirs = [], [], []
    for i, completion in enumerate(answers):
        ours.append(scored(engine.model, prompts[i // 4], completion.ids))
        whole.append(scored(exact, prompts[i // 4], completion.ids))
        assert completion.logp is not None
        theirs.append(completion.logp)
    own, true, their = torch.cat(ours), torch.cat(whole), torch.cat(theirs)
    return {"tokens_per_second": len(own) / seconds, "tokens": len(own), "gap": spread(own - their),
            "rounding": spread(own - true), "vllm_to_float32": spread(their - true)}  # fmt: skip


def scored(model: nn.Module, prompt: list[int], completion: torch.Tensor) -> torch.Tensor:
    """Log-probs of a completion's tokens."""
    ids = torch.tensor([[*prompt, *completion.tolist()]], device=next(model.parameters()).device)
    with torch.no_grad(), unrounded(head_of(model)):
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()


def spread(gap: torch.Tensor) -> dict[str, float]:
    """Of differences: how large they are, where they lie, and half their mean square, which is about the KL."""
    size = gap.abs()
    return {"mean": float(size.mean()), "median": float(size.median()), "p99": float(size.quantile(0.99)),
            "max": float(size.max()), "bias": float(gap.mean()), "kl": float(gap.square().mean() / 2)}  # fmt: skip


def measured(model: nn.Module, tokens: Any, **engine_kwargs: Any) -> dict[str, Any]:
    """Pushes and gaps of an engine; what went wrong instead."""
    began = time.perf_counter()
    try:
        engine = VLLMEngine(model, tokens, **engine_kwargs)
        start = time.perf_counter() - began
        told = {"start_seconds": start, **pushes(engine), **gaps(engine, 16, 128)}
        engine.close()
    except Exception as error:
        traceback.print_exc()
        told = {"failed": f"{type(error).__name__}: {error}"}
    return told


def run(args: argparse.Namespace, folder: str, urls: list[str], preset: str, staleness: float) -> dict[str, Any]:
    """A short run by the command that a user types: accuracy on held-out rows, seconds, who waited."""
    place = Path(args.folder) / f"{preset}-{args.port}-{staleness:g}"
    command = [sys.executable, "-m", "grpo", "train", preset, "--model", folder, "--engine", "vllm", "--servers",
               ",".join(urls), "--staleness", f"{staleness:g}", "--logdir", str(place), "--overwrite",
               "--run.steps", str(args.steps), "--run.evaluate-every", str(args.steps), "--eval-on-start", "true",
               "--seed", str(args.seed)]  # fmt: skip
    given: dict[str, Any] = {}
    if preset == "gsm8k":
        given = {**FLAGS, "dataset": f"{args.data}/train.jsonl", "eval_dataset": f"{args.data}/test.jsonl"}
        given |= {"eval_prompts": 200, "dtype": "bfloat16"}
    given |= dict(word.split("=", 1) for word in args.set)
    command += [word for name, value in given.items() for word in (f"--{name}", str(value))]
    began = time.perf_counter()
    try:
        done = subprocess.run(command, check=False, timeout=args.limit, capture_output=True, text=True)
        said = done.stderr[-3000:]
    except subprocess.TimeoutExpired as late:
        said = f"it did not end in {args.limit:g} s; " + (late.stderr or b"").decode(errors="replace")[-600:]
    told = {
        "preset": preset,
        "staleness": staleness,
        "seconds": time.perf_counter() - began,
        "said": said,
        **read(place),
    }
    return told | ({"again": looked_at_again(place)} if args.again else {})


def looked_at_again(place: Path) -> Any:
    """What `grpo eval` says of the last checkpoint, in a process of its own."""
    command = [sys.executable, "-m", "grpo", "eval", str(place), "--checkpoint", "last", "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    try:
        return json.loads(done.stdout)
    except ValueError:
        return {"failed": done.stderr[-1500:]}


def read(place: Path) -> dict[str, Any]:
    """What a run's folder tells."""
    rows = [json.loads(line) for path in place.rglob("metrics.jsonl") for line in path.read_text().splitlines()]
    timing = [json.loads(line) for path in place.rglob("timing.jsonl") for line in path.read_text().splitlines()]
    if not rows:
        return {"steps": 0}
    steps = [row for row in timing[2:] if "total" in row]
    found: dict[str, Any] = {
        "steps": rows[-1]["step"],
        "before": rows[0].get("before/accuracy"),
        "after": next((row["eval/accuracy"] for row in reversed(rows) if row.get("eval/accuracy") is not None), None),
        "rewards": [row.get("reward") for row in rows],
        "mismatches": [row.get("mismatch_kl") for row in rows],
        "lengths": [row.get("completions/mean_length") for row in rows],
        "evaluations": [own for row in rows if (own := {k: v for k, v in row.items() if k.startswith("eval/")})],
        "mismatch_kl": statistics.median([row.get("mismatch_kl") or 0.0 for row in rows]),
        "staleness_mean": statistics.mean([row.get("staleness") or 0.0 for row in rows]),
        "step_seconds": statistics.median([row["total"] for row in steps]) if steps else None,
    }
    for name in ("learner_waits", "sampler_waits", "rollout", "update", "refresh"):
        known = [row[name] for row in steps if row.get(name) is not None]
        found[name] = statistics.median(known) if known else None
    return found


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default="", help="that run already; none: one of our own")
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--model", default="", help="a folder, or a .gguf file")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--transfer", default="ipc,file,nccl")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="push adapters alone")
    parser.add_argument("--dtype", default="bfloat16", help="of shapes and servers")
    parser.add_argument("--share", type=float, default=0.2, help="of the GPU's memory, for a server of our own")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument(
        "--graphs", action="store_true", help="let a server of our own capture its graphs: a slower start"
    )
    parser.add_argument("--runs", default="", help="presets")
    parser.add_argument("--staleness", default="0,1", help="of the runs")
    parser.add_argument("--data", default="", help="GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings of the runs")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="of a run")
    parser.add_argument("--again", action="store_true", help="evaluate the last checkpoint of a run once more")
    parser.add_argument("--turn", metavar="FILE", help="measure alone: whoever names the same file waits")
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "grpo-servers"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place = Path(args.folder) / f"model-{args.port}"
    folder = as_folder(args.model, place) if args.model else made(args.shape, place)
    told: dict[str, Any] = {
        "model": Path(args.model).name if args.model else args.shape,
        "machine": cells.machine(device),
        "versions": cells.versions(),
        "ways": {},
        "runs": [],
    }
    try:
        if args.in_process:
            with alone(args.turn):
                in_process(args, folder, device, told)
        else:
            on_servers(args, folder, device, told)
    finally:
        if args.output:
            cells.write(args.output, told)


def in_process(args: argparse.Namespace, folder: str, device: str, told: dict[str, Any]) -> None:
    """vLLM here."""
    model, tokens = (
        loaded(folder, device, getattr(torch, args.dtype)),
        prepare_tokenizer(AutoTokenizer.from_pretrained(folder)),
    )
    settings = {"enforce_eager": True, "max_model_len": 2048, "gpu_memory_utilization": args.share}
    if device == "cuda":
        settings["kv_cache_memory_bytes"] = KEYS
    told["ways"]["in process"] = measured(model, tokens, **settings)
    print("in process", told["ways"]["in process"], flush=True)


def on_servers(args: argparse.Namespace, folder: str, device: str, told: dict[str, Any]) -> None:
    """Ways, then runs."""
    ways = ["adapter"] if args.lora else [way for way in args.transfer.split(",") if way]
    with served(args, folder) as (urls, told["server_seconds"]), alone(args.turn):
        print(f"{told['model']}: the server was there after {told['server_seconds']:.0f} s", flush=True)
        model = adapted(loaded(folder, device, getattr(torch, args.dtype)), args.lora) if ways else None
        for way in ways:
            if way == "nccl" and not args.servers and torch.cuda.device_count() < 2:
                told["ways"][way] = {"failed": "NCCL refuses two ranks on one GPU: a server must be on another one"}
            else:
                tokens = prepare_tokenizer(AutoTokenizer.from_pretrained(folder))
                told["ways"][way] = measured(model, tokens, servers=urls, transfer=way, deadline=60.0)  # type: ignore[arg-type]
            print(way, told["ways"][way], flush=True)
        del model
        for preset in filter(None, args.runs.split(",")):
            for word in args.staleness.split(","):
                told["runs"].append(run(args, folder, urls, preset, float(word)))
                print(json.dumps(told["runs"][-1]), flush=True)
    if any("failed" in way for way in told["ways"].values()) or any(not r["steps"] for r in told["runs"]):
        print(f"--- the server said last:\n{tail(args)}", flush=True)


def adapted(model: nn.Module, rank: int) -> nn.Module:
    """With a LoRA adapter that changes something."""
    if not rank:
        return model
    from peft import LoraConfig, get_peft_model

    wrapped: nn.Module = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    return wrapped.eval()


if __name__ == "__main__":
    main()
