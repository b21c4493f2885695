"""Ours: a rollout of the inline engine, an update, or a whole training step."""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path
from typing import Any

import models
import plan
import torch
from cells import job, measure, peak
from floor import decode_floor

WARM_UP = 2
"""Rollouts before those that are timed: graphs are captured and memory is taken in the first."""


def ceilings(device: str, dtype: str) -> dict[str, float]:
    """Bytes a second of a copy, reading and writing; operations a second of a matrix product."""
    size, side = (2**30, 8192) if device == "cuda" else (2**24, 256)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    factor = torch.randn(side, side, device=device).to(getattr(torch, dtype))
    return {
        "copy_bytes_per_s": 2 * size / _seconds(lambda: target.copy_(source), device),
        "matmul_flops_per_s": 2 * side**3 / _seconds(lambda: factor @ factor, device),
    }


def _seconds(work: Any, device: str, at_once: int = 10, repeats: int = 7) -> float:
    """Of one of several in a row, the median."""
    found = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        for _ in range(at_once):
            work()
        _wait(device)
        found.append((time.perf_counter() - start) / at_once)
    return statistics.median(found)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rollout(model: Any, limits: dict[str, float], asked: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each rollout and what it made; prompts and completions start and end on the CPU."""
    from grpo.language.engines import Sampling, Tokens
    from grpo.language.engines.inline import InlineEngine

    settings, prompts, device = cell["settings"], cell["prompts"], asked["device"]
    nothing = [model.config.vocab_size]
    engine = InlineEngine(model, Tokens(None, frozenset(cell["ends"] or nothing), 0))
    sampling = Sampling(max_new_tokens=settings["tokens"])
    seeds = range(len(prompts) * settings["group"])

    for _ in range(WARM_UP):
        engine.generate(prompts, settings["group"], sampling, seeds)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, tokens, told, made = [], [], [], []
    for _ in range(settings["repeats"]):
        _wait(device)
        start = time.perf_counter()
        made = engine.generate(prompts, settings["group"], sampling, seeds)
        seconds.append(time.perf_counter() - start)
        tokens.append(sum(len(completion.ids) for completion in made))
        told.append(dict(engine.metrics()))
    assert all(completion.logp is not None for completion in made)
    lengths = [len(completion.ids) for completion in made]
    groups = [lengths[i : i + settings["group"]] for i in range(0, len(lengths), settings["group"])]
    shape = models.counted(model)
    least = decode_floor(
        shape, [len(p) for p in prompts], groups, limits["copy_bytes_per_s"], limits["matmul_flops_per_s"]
    )
    found = {
        "seconds": seconds,
        "tokens": tokens,
        "longest": max(lengths),
        "peak": peak(device),
        "captures_while_timed": int(sum(one.get("engine/captures", 0.0) for one in told)),
        "graphs": "engine/captures" in told[-1],
        "engine": told[-1],
        "weights": shape.weights,
        "ceilings": limits,
        "floor_seconds": least,
    }
    engine.close()
    del engine
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def step(asked: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each training step: sampling, rewards, gradients and update."""
    from grpo.language import GRPOConfig, GRPOTrainer
    from grpo.run.stepping import Stopwatch

    settings, device = cell["settings"], asked["device"]
    source: dict[str, Any] = {"model": asked["folder"]}
    if asked["model"] != "smollm" or asked["tiny"]:
        kept = asked["dtype"] if "lora_rank" in settings else "float32"
        made = models.random_model(models.shape_of(asked), kept, device)
        source = {"model": made, "processing_class": models.words(made.config.vocab_size)}
    config = GRPOConfig(
        device=device,
        dtype=asked["dtype"],
        beta=0.0,
        loss_type="grpo",
        learning_rate=1e-6,
        group_size=settings["group"],
        groups_per_step=len(cell["texts"]),
        max_completion_length=settings["tokens"],
        skip_apply_chat_template=True,
        preflight=False,
        reward_workers=1,
        **_adapter(settings),
    )
    rewards = f"{Path(__file__).parent / 'reward.py'}:variety"
    rows = [{"prompt": text} for text in cell["texts"]]
    trainer = GRPOTrainer(**source, reward_funcs=rewards, args=config, train_dataset=rows)
    weights = sum(p.numel() for p in trainer.policy.parameters().values())
    trainer.phase = watch = Stopwatch()
    planned = _planned(settings, device)
    seconds, lengths, phases = [], [], []
    for number in range(1 + settings["repeats"]):
        if number == 1 and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _wait(device)
        start = time.perf_counter()
        report = trainer.step()
        _wait(device)
        seconds.append(time.perf_counter() - start)
        lengths.append(report["completions/mean_length"])
        engine = {name: value for name, value in report.metrics.items() if name.startswith("engine/")}
        phases.append({**watch.take(), **engine})
    trainer.source.close()
    by_hand = trainer.policy.scorer.by_hand
    own = [len(trainer.tokens.tokenizer.encode(text, add_special_tokens=False)) for text in cell["texts"]]
    timed = slice(1, None) if settings["repeats"] else slice(None)
    return {
        "seconds": seconds[timed],
        "first_seconds": seconds[0],
        "mean_length": lengths[timed],
        "prompt_tokens": own,
        "peak": peak(device),
        "phases": phases[timed],
        "weights": weights,
        "layers_by_hand": by_hand,
        "weights_in": "float32, products in bfloat16" if asked["dtype"] == "bfloat16" else asked["dtype"],
        "out_of_memory": [report.get("microbatch_halvings", 0.0)],
        **planned,
    }


def _planned(settings: dict[str, Any], device: str) -> dict[str, Any]:
    """What `grpo plan` says of these settings, before they are tried."""
    return {"planned": plan.predicted(settings)} if device == "cuda" and settings["model"] != "tiny" else {}


def _adapter(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run: an adapter on all linear layers, or none."""
    return {"lora_rank": settings["lora_rank"], "lora_targets": "all-linear"} if "lora_rank" in settings else {}


def _operations(config: Any, weights: int, adapter: bool, cell: dict[str, Any]) -> float:
    """Of an update: products with weights (no gradient of theirs where an adapter is trained), and attention."""
    group, made = cell["settings"]["group"], cell["settings"]["tokens"]
    computed = sum(len(ids) + group * made for ids in cell["prompts"])
    # Pairs of positions that attend: a prompt's among themselves, and those of every completion.
    pairs = sum(len(p) ** 2 / 2 + group * (made * len(p) + made**2 / 2) for p in cell["prompts"])
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return (4 if adapter else 6) * weights * computed + 12 * width * pairs


def update(asked: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each update: forward, back, AdamW; of all weights, kept in float32, or of an adapter's."""
    from grpo.language.config import LanguageConfig
    from grpo.language.model.adapters import with_adapter
    from grpo.language.samples import Prompt, Sample
    from grpo.language.scoring.policy import LanguagePolicy
    from grpo.language.scoring.probe import make_scorer

    settings, device = cell["settings"], asked["device"]
    model = models.load(asked)
    if "lora_rank" in settings:
        model, _ = with_adapter(model, LanguageConfig(**_adapter(settings)))
    else:
        model = model.float()
    low = None if asked["dtype"] == "float32" else getattr(torch, asked["dtype"])
    scorer = make_scorer(model, 1.0, budget=settings.get("tokens_per_microbatch"), autocast=low)
    policy = LanguagePolicy(model, scorer)
    optimizer = torch.optim.AdamW(policy.parameters().values(), lr=1e-6, fused=device == "cuda")
    draw, steps = torch.Generator().manual_seed(0), settings["tokens"]
    rows = []
    for number, ids in enumerate(cell["prompts"]):
        prompt = Prompt(number, ids, "", None)
        for _ in range(settings["group"]):
            made = torch.randint(0, scorer.causal.config.vocab_size, (steps,), generator=draw)
            rows.append(Sample(prompt, made, torch.ones(steps, dtype=torch.bool), None, "length", ""))
    worth = torch.randn(len(rows), 1, generator=draw).to(device) / (len(rows) * steps)
    tokens = sum(map(len, cell["prompts"])) + len(rows) * steps

    def once() -> int:
        policy.train()
        parts = scorer.split(rows, None)
        for part in parts:
            with scorer.precision():
                logp_NT = scorer([rows[row] for row in part], steps).logp_NT
            (logp_NT * worth[list(part)]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return len(parts)

    if settings["repeats"]:
        try:
            once()
        except torch.OutOfMemoryError as error:
            how = f"by hand: {scorer.by_hand}, {scorer.packing}, passes chosen now: {scorer.chosen(rows)}"
            raise torch.OutOfMemoryError(f"{how}: {error}") from error
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    planned = _planned(settings, device)
    seconds, passes = [], []
    for _ in range(settings["repeats"] or 1):
        _wait(device)
        start = time.perf_counter()
        passes.append(once())
        _wait(device)
        seconds.append(time.perf_counter() - start)
    weights, most = sum(p.numel() for p in model.parameters()), peak(device)
    return {
        "seconds": seconds,
        "computed_tokens": tokens,
        "passes": passes,
        "weights": weights,
        "peak": most,
        "packing": scorer.packing,
        "operations": _operations(scorer.causal.config, weights, "lora_rank" in settings, cell),
        "layers_by_hand": scorer.by_hand,
        **planned,
        "ceilings": ceilings(device, asked["dtype"]),
    }


def _alone(work: Any, asked: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """With the memory of those before it given back."""
    gc.collect()
    if asked["device"] == "cuda":
        torch.cuda.empty_cache()
    return work(asked, cell)


def main() -> None:
    asked = job()
    if asked["peer"] in ("step", "update"):
        work = {"step": step, "update": update}[asked["peer"]]
        measure(asked, lambda cell: _alone(work, asked, cell))
        return
    model, limits = models.load(asked), ceilings(asked["device"], asked["dtype"])
    measure(asked, lambda cell: rollout(model, limits, asked, cell))


if __name__ == "__main__":
    main()
