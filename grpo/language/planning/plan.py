"""The plan of a step: how it is cut into passes, what it takes by part, whether that fits, and what would."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo.language.config import LanguageConfig
from grpo.language.planning import cost
from grpo.language.planning.cost import Setup
from grpo.language.planning.gpus import GPU, GPUS
from grpo.language.planning.shape import ModelShape
from grpo.language.scoring import memory
from grpo.language.scoring.decoder_layout import HOSTED, KEEP
from grpo.language.scoring.memory import Rows, Way
from grpo.run.files import read_json

PROMPT = 512
"""Tokens of a prompt where nothing limits it."""
SMALLER = ("max_completion_length", "groups_per_step")
"""Settings that are halved until it fits."""


@dataclass(frozen=True)
class Plan:
    """A step as it will be done on a GPU."""

    setup: Setup
    gpu: GPU
    limit: int
    """Bytes that may be taken of it."""
    way: Way

    @property
    def sampling(self) -> dict[str, int]:
        """By part, while completions are sampled."""
        return cost.fixed_memory(self.setup) | cost.sampling_memory(self.setup)

    @property
    def gradients(self) -> dict[str, int]:
        """By part, while gradients are computed."""
        return cost.fixed_memory(self.setup) | cost.gradient_memory(self.setup, self.way)

    @cached_property
    def peak(self) -> int:
        """Bytes that torch hands out at most."""
        return max(sum(self.sampling.values()), sum(self.gradients.values()))

    @property
    def total(self) -> int:
        """Bytes of the device that are in use then: with the allocator's slack, and CUDA itself."""
        return with_slack(self.peak)

    @property
    def fits(self) -> bool:
        """Whether that is within the limit."""
        return self.total <= self.limit

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Of a step by part; rewards are not known."""
        return cost.step_seconds(self.setup, self.way, self.gpu)


def with_slack(allocated: int) -> int:
    """What of the device is in use where torch hands out so many bytes."""
    return math.ceil(allocated * (1 + cost.SLACK)) + memory.CONTEXT


def plan_step(setup: Setup, gpu: GPU, limit: int | None = None) -> Plan:
    """The least memory that costs no time, the fastest that fits, or the leanest there is where none does."""
    limit = gpu.memory if limit is None else limit
    taken = cost.gradients_bytes(setup) + cost.head_memory(setup) + sum(cost.fixed_memory(setup).values())
    sampling = cost.sampling_memory(setup)
    kept = sampling["keys and values"]
    taken += sampling[cost.GRAPHS] + (kept if setup.sampler == "copy" else min(kept, memory.GIVEN_BACK))
    free = (limit - memory.CONTEXT) / (1 + cost.SLACK) - taken
    slower = memory.SLOWER if setup.set_tokens is None else 0.0  # what is set is done as fast as it can be
    way = memory.choose(cost.ways_of(setup, gpu), free, slower, ample=memory.AMPLE * gpu.memory)
    plan = Plan(setup, gpu, limit, way)
    rows = setup.slots
    while with_slack(sum(plan.sampling.values())) > limit and rows > 1:
        rows //= 2  # fewer at a time
        plan = replace(plan, setup=replace(setup, at_once=rows))
    return plan


# --- from settings --------------------------------------------------------------------------------------------------


def setup_of(
    config: LanguageConfig, shape: ModelShape, adapted: bool = False, teacher: ModelShape | None = None
) -> Setup:
    """What of the settings counts; adapted: an adapter is handed over beside them. teacher: the model it names."""
    low = 4 if config.dtype == "float32" else 2
    trained = bool(config.lora_rank or config.adapter or adapted)
    adapter = shape.lora(*_adapter(config)) if trained else 0
    wide = low if trained or config.weights == "bfloat16" else 4
    recipe, rows = config.recipe, _rows(config, shape)
    refers = bool(recipe.beta) and recipe.kl_to != "old"
    follows = config.ref_sync_steps is not None or bool(config.warm_start_steps)
    own = "copy" if not adapter else "adapter" if follows or config.adapter else "base"
    at_once = min(config.rows_per_generation or cost.SLOTS, config.engine_kwargs.get("rows_at_a_time") or cost.SLOTS)
    taught = "none" if not recipe.teacher_coef else "self" if config.teacher is None else "model"
    taught = "server" if taught == "model" and teacher is None else taught
    taught = "average" if taught == "self" and config.teacher_decay else taught
    spans = recipe.top_entropy < 1.0 or bool(recipe.clip_cov or recipe.kl_cov) or recipe.m2_limit is not None
    # What was sampled some steps ago, or by another program, is scored by the policy before it learns.
    again = config.old_logp == "recomputed" or bool(config.staleness) or config.engine == "vllm" or bool(config.servers)
    return Setup(
        shape=shape,
        rows=rows,
        select=config.select,
        teacher=teacher,
        taught=taught,
        choices=recipe.teacher_top_k if taught != "none" and recipe.teacher_over == "top_k" else 0,
        wide=wide,
        low=low,
        quantize=config.quantize,
        adapter=adapter,
        reference=own if refers else "none",
        iterations=config.num_iterations,
        minibatches=_minibatches(config),
        scored=int(refers) + int(again) + int(spans),
        graphs=config.engine in ("auto", "inline"),
        sampler=_sampler(config),
        at_once=at_once,
        set_tokens=config.tokens_per_microbatch,
        keep=HOSTED[0] if config.activation_offloading else KEEP[-1] if config.gradient_checkpointing else None,
    )


def _sampler(config: LanguageConfig) -> str:
    """Who samples, as `Setup` has it."""
    if config.servers:
        return "servers"
    if config.staleness and config.engine_kwargs.get("sampler_device"):
        return "elsewhere"
    return "copy" if config.staleness else "policy"


def _adapter(config: LanguageConfig) -> tuple[int, tuple[str, ...] | str]:
    """Its rank and what it is on: as set, as a trained one says, or as is usual."""
    said = Path(config.adapter or "") / "adapter_config.json"
    if config.adapter and said.is_file():
        found = read_json(said)
        targets = found.get("target_modules") or "all-linear"
        return int(found.get("r") or 16), targets if isinstance(targets, str) else tuple(sorted(targets))
    return config.lora_rank or 16, config.lora_targets


def _rows(config: LanguageConfig, shape: ModelShape) -> Rows:
    prompt = min(config.max_prompt_length or PROMPT, shape.context)
    completion = min(config.max_completion_length, max(shape.context - 1, 1))
    return Rows(config.groups_per_step, config.group_size, prompt, completion)


def _minibatches(config: LanguageConfig) -> int:
    rows = config.groups_per_step * config.group_size
    if config.minibatches:
        return config.minibatches
    if config.groups_per_minibatch:
        return math.ceil(config.groups_per_step / config.groups_per_minibatch)
    return math.ceil(rows / config.rows_per_minibatch) if config.rows_per_minibatch else 1


# --- what would fit -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """Other settings, and what a step would take with them."""

    settings: dict[str, Any]
    plan: Plan

    @property
    def said(self) -> str:
        """As flags."""
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.settings.items())


def changes(
    config: LanguageConfig, shape: ModelShape, gpu: GPU, limit: int, teacher: ModelShape | None = None
) -> list[Change]:
    """Those that fit, the ones first that change the least of what is learned."""
    asked: list[dict[str, Any]] = []
    trained = bool(config.lora_rank or config.adapter)
    if not trained and config.weights != "bfloat16":
        asked.append({"weights": "bfloat16"})
    if not trained and setup_of(config, shape).reference == "copy":
        asked += [{"beta": 0.0}, {"beta": 0.0, "weights": "bfloat16"}]
    lora: dict[str, Any] = {} if trained else {"lora_rank": 16, "weights": "float32"}
    if lora:
        asked.append(lora)
    for kind in ("8bit", "4bit"):
        if config.quantize == "none":
            asked.append({**lora, "quantize": kind})
    half = {} if config.max_completion_length < 128 else _halved(config, "max_completion_length", 64)
    groups = _halved(config, "groups_per_step", 1)
    least = lora | ({"quantize": "4bit"} if config.quantize == "none" else {})
    asked += [change for more in ({}, lora, least) for change in (more | groups, more | half) if change]
    found: list[Change] = []
    before = config.model_dump() | {"beta": config.recipe.beta}
    for settings in asked:
        last = settings
        for _ in range(12):
            plan = plan_step(setup_of(config.but(**last), shape, teacher=teacher), gpu, limit)
            again = {name: value for name, value in last.items() if name in SMALLER}
            if plan.fits or not again or min(again.values()) <= 1:
                break
            last = last | {name: max(value // 2, 1) for name, value in again.items()}
        shown = {name: value for name, value in last.items() if before.get(name) != value}
        more = any(other.settings.items() <= shown.items() for other in found)  # than is needed
        if plan.fits and shown and not more:
            found.append(Change(shown, plan))
    return found


def _halved(config: LanguageConfig, name: str, least: int) -> dict[str, Any]:
    value: int = config.model_dump()[name]
    return {name: value // 2} if value // 2 >= least else {}


def larger(setup: Setup, limit: int) -> str | None:
    """The smallest GPU of the table that it fits, by its name."""
    able = {name: gpu for name, gpu in GPUS.items() if gpu.memory > limit and plan_step(setup, gpu).fits}
    return min(able, key=lambda name: able[name].memory) if able else None
