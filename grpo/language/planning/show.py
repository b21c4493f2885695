"""A plan as a person reads it: memory and time by part, what fits, and what to change where it does not."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from grpo.config import ConfigError
from grpo.language.config import LanguageConfig
from grpo.language.model import loading
from grpo.language.model.teacher import model_of
from grpo.language.planning.gpus import GIB, GPU, GPUS, gpu_called, gpu_named
from grpo.language.planning.plan import Change, Plan, changes, larger, plan_step, setup_of, with_slack
from grpo.language.planning.shape import ModelShape, weights_in
from grpo.language.planning.sizes import limit_bytes
from grpo.language.tasks import TINY, built_in

WORDS = {
    "everything": "layers keep all that their products give",
    "attention": "layers compute the MLP's products again",
    "input": "layers keep what they read and compute the rest again",
    "host": "what layers read lies in the host's memory",
}


def planned(config: LanguageConfig, gpu: str | None, as_json: bool) -> tuple[bool, str]:
    """Whether a step fits, and its plan; nothing is loaded but the model's configuration."""
    if config.engine == "vllm" and not config.servers:
        raise ConfigError(
            "engine=vllm: vLLM takes the share of the GPU that engine_kwargs gpu_memory_utilization says, and for how "
            "long is not known; leave engine out to plan for our own"
        )
    shape, where = shape_of(config), device_of(gpu, config)
    limit = where.memory if config.memory is None else limit_bytes(config.memory, where.memory)
    if limit > where.memory:
        raise ConfigError(
            f"memory={config.memory} is more than {where.name} has, {where.memory / GIB:.1f} GiB; leave it out"
        )
    teacher = teacher_of(config)
    plan = plan_step(setup_of(config, shape, teacher=teacher), where, limit)
    others = [] if plan.fits else changes(config, shape, where, limit, teacher)
    if as_json:
        return plan.fits, json.dumps(document(config, plan, others), indent=2)
    return plan.fits, "\n".join([text(config, plan), *left_out(config), verdict(config, plan, others)])


def left_out(config: LanguageConfig) -> list[str]:
    """What of the settings the plan does not know."""
    found = [
        ("the time that the teacher's server takes", bool(config.recipe.teacher_coef) and served(config)),
        ("the time that servers take to sample, and what there is on them", bool(config.servers)),
        (
            f"what is on {config.engine_kwargs.get('sampler_device')}: the copy of the model, keys and values",
            bool(config.staleness and config.engine_kwargs.get("sampler_device")),
        ),
        ("that sampling and learning go on at the same time", bool(config.staleness)),
        ("the greedy answer of each prompt", config.recipe.baseline == "greedy"),
        (
            f"shard={config.shard}: what several ranks divide (the figures are of one rank alone)",
            config.shard != "none",
        ),
    ]
    said = "; ".join(what for what, there in found if there)
    return [f"not in it: {said}"] if said else []


def served(config: LanguageConfig) -> bool:
    """Whether the teacher is on a server."""
    return str(config.teacher).startswith(("http://", "https://"))


def teacher_of(config: LanguageConfig) -> ModelShape | None:
    """The sizes of another model that teaches and is loaded here."""
    if not config.recipe.teacher_coef or config.teacher is None or served(config):
        return None
    return shape_of(model_of(config)[0].but(quantize="none"))


def shape_of(config: LanguageConfig) -> ModelShape:
    """The model's sizes, from its configuration; its files, where they are here, must hold as many weights."""
    if config.model == TINY:
        return ModelShape.of(built_in(config.dataset).tiny(config.seed)[0].config)
    shape = ModelShape.of(loading.load_config(config))
    folder = loading.weights_folder(config)
    stored = None if folder is None else weights_in(folder)
    if stored is None or stored in (shape.weights, shape.weights + shape.table):  # a tied head may be saved twice
        return shape
    return replace(shape, small=max(shape.small + stored - shape.weights, 0))


def device_of(word: str | None, config: LanguageConfig) -> GPU:
    """The GPU that is named, else the one that is here."""
    if word is not None:
        return gpu_named(word)
    if not torch.cuda.is_available():
        raise ConfigError(f"there is no GPU here to plan for; name one: --gpu {'|'.join(GPUS)}")
    about = torch.cuda.get_device_properties(0)
    found = gpu_called(about.name, about.total_memory)
    if found is None:
        raise ConfigError(
            f"nobody has looked up how fast a {about.name} is; name a GPU like it: --gpu {'|'.join(GPUS)}"
        )
    return found


# --- for a person ---------------------------------------------------------------------------------------------------


def text(config: LanguageConfig, plan: Plan) -> str:
    """The tables, with a line about what they are of."""
    setup, rows = plan.setup, plan.setup.rows
    kept = {4: "float32", 2: "bfloat16"}[setup.wide] if setup.quantize == "none" else setup.quantize
    what = f"an adapter of {setup.adapter / 1e6:.1f} million is trained" if setup.adapter else "all are trained"
    size = setup.shape.weights
    count = f"{size / 1e9:.2f} billion" if size >= 1e9 else f"{size / 1e6:.1f} million"
    lines = [
        f"{config.model}: {count} weights, kept in {kept}; {what}",
        f"a step: {rows.groups} prompts of {rows.prompt:g} tokens × {rows.group:g} completions of "
        f"{rows.completion:g}, the most they may have" + f"; {setup.select} of each group learn" * bool(setup.select),
        f"on {plan.gpu.name}, {plan.gpu.memory / GIB:.1f} GiB" + ("" if plan.gpu.measured else " (by its data sheet)"),
    ]
    console = Console(file=io.StringIO(), width=100, color_system=None, highlight=False)
    console.print(_memory_table(plan))
    console.print(_time_table(plan))
    tables: Any = console.file
    return "\n".join([*lines, tables.getvalue().rstrip(), _passes(plan)])


def _memory_table(plan: Plan) -> Table:
    table = Table("GiB", box=box.SIMPLE, show_footer=False)
    for name in ("while sampling", "while learning"):
        table.add_column(name, justify="right")
    columns = plan.sampling, plan.gradients
    for name in dict.fromkeys([*columns[0], *columns[1]]):
        table.add_row(name, *(f"{column[name] / GIB:.2f}" if name in column else "–" for column in columns))
    table.add_section()
    table.add_row("in all", *(f"{sum(column.values()) / GIB:.1f}" for column in columns))
    table.add_row("with the allocator's slack and CUDA", *(f"{with_slack(sum(c.values())) / GIB:.1f}" for c in columns))
    return table


def _time_table(plan: Plan) -> Table:
    table = Table("seconds", box=box.SIMPLE)
    table.add_column("of a step", justify="right")
    for name, seconds in plan.seconds.items():
        table.add_row(name, f"{seconds:.2f}")
    table.add_row("rewards", "not known")
    table.add_section()
    table.add_row("in all", f"{sum(plan.seconds.values()):.2f}")
    return table


def _passes(plan: Plan) -> str:
    way, setup = plan.way, plan.setup
    count = way.passes * setup.minibatches * setup.iterations
    line = f"{count} pass{'es' if count > 1 else ''} of up to {way.tokens:,} tokens, {WORDS[way.keep]}"
    return f"{line}; {setup.slots} rows are sampled at a time"


def verdict(config: LanguageConfig, plan: Plan, others: list[Change]) -> str:
    """Whether it fits, and what to change."""
    limit = f"{plan.limit / GIB:.1f} GiB"
    if plan.fits:
        room = _room(config, plan)
        return f"fits: {plan.total / GIB:.1f} of {limit}" + (f"; so would {room}" if room else "")
    lines = [f"does not fit: {plan.total / GIB:.1f} GiB at least, of {limit}", *remedies(plan, others)]
    return "\n".join(lines)


def remedies(plan: Plan, others: list[Change]) -> list[str]:
    """What would fit, the change first that leaves most of what is learned as it is."""
    lines = [
        f"  {change.said}: {change.plan.total / GIB:.1f} GiB, {sum(change.plan.seconds.values()):.1f} s a step"
        for change in others
    ]
    bigger = larger(plan.setup, plan.limit)
    lines += [f"  a larger GPU: {GPUS[bigger].name}"] if bigger else []
    return ["what would fit:", *lines] if lines else ["no change of one setting makes it fit; use a smaller model"]


def _room(config: LanguageConfig, plan: Plan) -> str:
    """How far the settings that cost most could go, each by itself."""
    found, settings = [], config.model_dump()
    for name, most in (("group_size", 512), ("max_completion_length", int(min(plan.setup.shape.context, 1 << 20)))):
        value, fits = settings[name], 0
        while 2 * value <= most:
            value *= 2
            setup = setup_of(config.but(**{name: value}), plan.setup.shape, teacher=plan.setup.teacher)
            if not plan_step(setup, plan.gpu, plan.limit).fits:
                break
            fits = value
        found += [f"--{name.replace('_', '-')} {fits}"] if fits else []
    return ", or ".join(found)


# --- for a program --------------------------------------------------------------------------------------------------


def document(config: LanguageConfig, plan: Plan, others: list[Change]) -> Mapping[str, Any]:
    """All numbers, in bytes and seconds."""
    setup, rows, way = plan.setup, plan.setup.rows, plan.way
    return {
        "model": config.model,
        "weights": setup.shape.weights,
        "trained": setup.trained,
        "teacher": None if setup.teacher is None else setup.teacher.weights,
        "gpu": plan.gpu.name,
        "limit": plan.limit,
        "fits": plan.fits,
        "step": {
            "prompts": rows.groups,
            "completions_each": rows.group,
            "learn": setup.learning.group,
            "prompt_tokens": rows.prompt,
            "completion_tokens": rows.completion,
        },
        "passes": {"tokens": way.tokens, "count": way.passes, "keep": way.keep},
        "memory": {"sampling": plan.sampling, "learning": plan.gradients, "peak": plan.peak, "in_use": plan.total},
        "seconds": {**plan.seconds, "in_all": sum(plan.seconds.values())},
        "changes": [
            {"settings": dict(c.settings), "in_use": c.plan.total, "seconds": sum(c.plan.seconds.values())}
            for c in others
        ],
    }


def expect_fits(config: LanguageConfig, shape: ModelShape, gpu: GPU, limit: int, adapted: bool = False) -> None:
    """Refuse a limit that cannot be kept, with the change that would cost the least."""
    teacher = teacher_of(config)
    plan = plan_step(setup_of(config, shape, adapted, teacher), gpu, limit)
    if not plan.fits:
        others = changes(config, shape, gpu, limit, teacher)
        first = remedies(plan, others[:1])
        raise ConfigError(
            f"memory={config.memory}: a step needs {plan.total / GIB:.1f} GiB at least; "
            + " ".join(line.strip() for line in first)
        )
