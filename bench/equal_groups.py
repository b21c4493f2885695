"""What an update saves where groups of equal rewards need no backward pass: one thread of the CPU, or a GPU.

    python bench/equal_groups.py [--device cuda] [--model FOLDER] [--tokens 256]

One step's record of 16 prompts with 8 completions each is learned from with 0, a quarter, a half and three quarters of
its groups rewarded alike, in turns with the same update that computes every gradient. Gradients of both must be the
same. Seconds are CPU seconds, on a GPU those of the clock. Writes bench/results/equal_groups.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results" / "equal_groups.json"
GROUPS, SIZE, PROMPT, REPEATS = 16, 8, 32, 3
SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 2048}  # fmt: skip
"""A random Llama of 6 million weights, unless a model is named."""


def made(options: argparse.Namespace) -> Any:
    """A trainer; its rewards are put in place of by `measure`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from grpo.language import GRPOConfig, GRPOTrainer
    from grpo.language.tasks import TASKS

    model, tokenizer = TASKS["sort-digits"].tiny(seed=0)
    if options.model:
        model = options.model
    else:
        torch.manual_seed(0)
        known = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, **known))
    args = GRPOConfig(
        group_size=SIZE, groups_per_step=GROUPS, max_completion_length=options.tokens, max_prompt_length=None,
        loss_type="grpo", beta=0.0, device=options.device, preflight=False, reward_workers=1, seed=0,
    )  # fmt: skip
    rows = [{"prompt": str(n % 10) * PROMPT} for n in range(GROUPS)]
    return GRPOTrainer(
        model=model, processing_class=None if options.model else tokenizer, reward_funcs=length,
        train_dataset=rows, args=args,
    )  # fmt: skip


def length(completion: str) -> float:
    """Any reward: it is not learned from."""
    return float(len(completion))


def update(trainer: Any, experience: Any, apart: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Seconds of one minibatch's gradients, and the gradients."""
    trainer.shards.passes_alone = apart
    cuda = trainer._home.type == "cuda"
    clock = time.perf_counter if cuda else time.process_time
    began = clock()
    trainer._gradients(experience)
    if cuda:
        torch.cuda.synchronize()
    seconds = clock() - began
    return seconds, {name: p.grad.clone() for name, p in trainer.policy.parameters().items() if p.grad is not None}


def measure(trainer: Any, rollouts: Any, share: float) -> dict[str, Any]:
    """Both ways in turns, with that share of the groups rewarded alike."""
    from grpo.experience import Experience

    alike_N = rollouts.group_N < round(share * GROUPS)
    reward_N = (torch.arange(len(rollouts)) % SIZE).float().masked_fill(alike_N.cpu(), 1.0)
    rewarded = rollouts.but(reward_N=reward_N.to(alike_N.device), reward_parts_NK=None, reward_names=None)
    experience = Experience.build(rewarded, trainer.recipe, detached=True)
    trainer.policy.train()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    gradients = {}
    for _ in range(REPEATS):
        for apart in (True, False):
            spent, gradients[apart] = update(trainer, experience, apart)
            seconds[apart].append(spent)
    far = max(
        float((gradients[True][name] - g).abs().max() / g.abs().max().clip(min=1e-30))
        for name, g in gradients[False].items()
    )
    ratios = [a / b for a, b in zip(seconds[True], seconds[False], strict=True)]
    return {"alike": share, "seconds": statistics.median(seconds[True]), "plain": statistics.median(seconds[False]),
            "ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "gradients": far}  # fmt: skip


def table(results: dict[str, Any]) -> str:
    """Markdown made from the results file."""
    lines = ["| groups rewarded alike | update / the same with every gradient | lowest – highest |", "|--:|--:|--:|"]
    for row in results["rows"]:
        lines.append(f"| {row['alike']:.0%} | {row['ratio']:.2f} | {row['low']:.2f} – {row['high']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="a folder or id; else a random one of 6 million weights")
    parser.add_argument("--tokens", type=int, default=48, help="of a completion, at most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer = made(options)
    from grpo.protocols import CollectRequest

    rollouts = trainer.source.collect(CollectRequest(0, 0, None)).rollouts
    results = {
        "measures": "gradients of one update, groups without signal forward only, against every gradient",
        "device": options.device, "model": options.model or SHAPE, "torch": torch.__version__,
        "python": platform.python_version(), "tokens": int(rollouts.mask_NT.sum()), "repeats": REPEATS,
        "rows": [measure(trainer, rollouts, share) for share in (0.0, 0.25, 0.5, 0.75)],
    }  # fmt: skip
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
