"""Memory and time of one step by part, from a model's sizes and the settings: closed forms, few constants.

    fixed      weights, what is rounded of them, gradients, the optimizer's moments, an adapter, a reference
    sampling   keys and values of all rows that are written at once, the graphs' own memory
    gradients  what layers keep of a pass, what passes through one of them, a tile of logits with the head's gradient

Sampling and gradients come one after the other: the peak is the larger of both. Constants are of an H200
(`bench/plan.py` holds them against what is measured); rates are the GPU's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from grpo.language.planning.gpus import GPU
from grpo.language.planning.shape import ModelShape
from grpo.language.scoring import memory
from grpo.language.scoring.decoder_layout import HOSTED, KEEP
from grpo.language.scoring.host import AT_ONCE
from grpo.language.scoring.memory import LayerSizes, Rows, Way

PAGE = 32
"""Tokens of a block of keys and values."""
SLOTS = 1024
"""Rows that are decoded at a time, at most."""
MODULE_TOKENS = 32_768
"""Of a pass through a module that is not known here, unless the settings say otherwise."""
SLACK = 0.08
"""Of what is allocated, what torch's allocator holds besides."""
GRAPHS = "graphs and buffers"
LOGITS = 2
"""Times that a row's logits lie in the memory of the graphs."""
CHOICE_BYTES = 12
"""Of a token's number and its log-prob."""
QUANTISED = {"4bit": 0.5625, "8bit": 1.0156}
"""Bytes of a weight with its scales (bitsandbytes)."""

THIN = 16
"""Bytes that an adapter's products move of each number that its projections read and give, forward and back."""
DECODE = 0.83
"""Share of the rates that products reach with the few rows of decoding; keys and values are read at the full rate."""
DECODE_LAYER = 35e-6
"""Seconds of a layer's kernels in a graph where there is hardly anything to compute."""
HOST = 0.03
"""Seconds of a step on the host: prompts, rewards that cost nothing, the report."""
OPTIMIZER_BYTES = 36
"""That AdamW moves for each trained weight: the gradient's norm, then weight, gradient and moments."""


@dataclass(frozen=True)
class Setup:
    """What of the settings memory and time depend on."""

    shape: ModelShape
    rows: Rows
    """All completions to their limit: the most that a step can take."""
    select: int | None = None
    """Tries of a group that learn; None: all."""
    teacher: ModelShape | None = None
    """Another model that says of each token how likely it would have been."""
    taught: str = "none"
    """Who teaches: none · self (the model once more) · average (of its weights, kept beside them) · model · server."""
    choices: int = 0
    """Likeliest tokens that a teacher names at each place."""
    wide: int = 4
    """Bytes of a weight as it is kept."""
    low: int = 2
    """Bytes of a number that is computed with."""
    quantize: str = "none"
    rank: int = 0
    adapter: int = 0
    """Weights of an adapter, which alone is trained; 0: all weights are."""
    reference: str = "none"
    """none · base (without the adapter, no memory of its own) · adapter · copy."""
    iterations: int = 1
    minibatches: int = 1
    """Optimizer steps of each pass over the rows."""
    scored: int = 0
    """Times that all rows are scored without gradient: by a reference, or before the first pass."""
    graphs: bool = True
    """Sampled by our own engine with CUDA graphs."""
    sampler: str = "policy"
    """Who samples: policy · copy (of the model, beside it, while it learns) · elsewhere (another GPU) · servers."""
    at_once: int = SLOTS
    """Rows that are decoded at a time."""
    set_tokens: int | None = None
    """Tokens of a pass as the settings have it."""
    keep: str | None = None
    """What layers keep as the settings have it."""

    @property
    def trained(self) -> int:
        """Weights that have gradients."""
        return self.adapter or self.shape.weights

    def kept_bytes(self, keep: str) -> int:
        """As `memory.Costs` has it."""
        sizes = self._sizes
        if not self.shape.by_hand and keep == KEEP[0]:  # what autograd keeps of a module's own operations
            qkv = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
            wide = sizes.width * (2 * sizes.wide + 2 * sizes.low + 8)
            return self.shape.layers * (wide + (2 * qkv + 3 * sizes.inner) * sizes.low)
        return AT_ONCE * sizes.hosted(keep) if keep in HOSTED else self.shape.layers * sizes.kept(keep)

    def hosted_bytes(self) -> int:
        """As `memory.Costs` has it."""
        return self.shape.layers * self._sizes.hosted(HOSTED[0])

    def passing_bytes(self, tokens: float, keep: str) -> int:
        """As `memory.Costs` has it."""
        return self._sizes.passing(tokens, keep)

    @property
    def _sizes(self) -> LayerSizes:
        s = self.shape
        return LayerSizes(s.width, s.inner, s.heads, s.kv_heads, s.head_dim, self.wide, self.low)

    @property
    def learning(self) -> Rows:
        """The rows that are learned from."""
        return self.rows if self.select is None else replace(self.rows, group=self.select)

    @property
    def minibatch(self) -> Rows:
        """The rows of one optimizer step."""
        return replace(self.learning, groups=math.ceil(self.rows.groups / self.minibatches))

    @property
    def slots(self) -> int:
        """Rows that are decoded at a time."""
        return min(round(self.rows.groups * self.rows.group), self.at_once, SLOTS)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all rows that are decoded at once, by pages: prompts once for their group."""
        prompts = min(math.ceil(self.slots / self.rows.group) + 1, self.rows.groups)
        pages = self.slots * math.ceil((self.rows.completion + 1) / PAGE)
        pages += prompts * math.ceil(max(self.rows.prompt - 1, 1) / PAGE)
        step = max(1 << max(pages.bit_length() - 3, 0), 8)
        return math.ceil(pages / step) * step * PAGE * self.shape.position * self.low


def ways_of(setup: Setup, gpu: GPU) -> list[Way]:
    """How one minibatch can be cut into passes; those that the settings leave."""
    shape = setup.shape
    pace = memory.Pace.of(shape.weights, setup.trained, shape.layers, shape.width, shape.heads * shape.head_dim, gpu)
    every = memory.ways(setup, setup.minibatch, pace)
    keep = setup.keep or (None if shape.by_hand else KEEP[0])
    every = [way for way in every if keep in (None, way.keep)]
    tokens = setup.set_tokens or (None if setup.shape.by_hand else MODULE_TOKENS)
    if tokens is None:
        return every
    fitting = [way for way in every if way.tokens <= tokens]
    return [way for way in every if way.tokens == max((way.tokens for way in fitting), default=every[-1].tokens)]


def fixed_memory(setup: Setup) -> dict[str, int]:
    """Parts that are there from the first step on, whatever is computed."""
    shape = setup.shape
    weights = shape.weights * setup.wide
    if setup.quantize != "none":
        weights = int(shape.body * QUANTISED[setup.quantize]) + (shape.weights - shape.body) * setup.low
    rounded = setup.wide != setup.low and setup.quantize == "none"
    copies = shape.body * setup.low if rounded and shape.by_hand else 0
    head = shape.table * setup.low if rounded and setup.graphs else 0
    adapter = setup.adapter * (4 + 2 * setup.low)
    here = head if setup.sampler == "policy" else 0
    found = {"weights": weights, "weights, rounded": copies + here, "adapter": adapter}
    if setup.sampler == "copy":
        found["the sampler's copy"] = weights + copies + head + adapter
    copy = setup.adapter * 4 if setup.adapter else shape.weights * setup.wide + copies
    if setup.reference in ("copy", "adapter"):
        found["reference"] = copy
    if setup.taught == "average":
        found["teacher"] = copy
    if setup.teacher is not None:
        found["teacher"] = setup.teacher.weights * setup.low
    if setup.choices:
        made = setup.learning.groups * setup.learning.group * setup.rows.completion
        found["the teacher's choices"] = int(made * setup.choices * CHOICE_BYTES)
    found["moments"] = 8 * setup.trained
    return {name: size for name, size in found.items() if size}


def sampling_memory(setup: Setup) -> dict[str, int]:
    """While completions are sampled, beside what is fixed."""
    slots, steps = setup.slots, setup.rows.completion
    if setup.sampler in ("elsewhere", "servers"):
        return {"keys and values": 0, GRAPHS: 0}
    graphs = LOGITS * slots * setup.shape.vocabulary * 4 if setup.graphs else slots * setup.shape.vocabulary * 8
    return {"keys and values": setup.cache_bytes, GRAPHS: int(graphs + 20 * slots * steps)}


def head_memory(setup: Setup) -> int:
    """A tile of logits, the head's rounded weights, its gradient before it is added up."""
    rounded = setup.shape.table * setup.low if setup.wide != setup.low else 0
    return memory.TILE_BYTES["cuda"] + rounded + (0 if setup.adapter else 4 * setup.shape.table)


def gradients_bytes(setup: Setup) -> int:
    """Of all gradients, in the type of their weights."""
    return setup.trained * (4 if setup.adapter else setup.wide)


def gradient_memory(setup: Setup, way: Way) -> dict[str, int]:
    """While gradients are computed, beside what is fixed; those of a single pass come as what it keeps goes.

    Keys and values have been given back then, where they are large, unless a copy samples meanwhile; the graphs' own
    memory has not.
    """
    sampling = sampling_memory(setup) if setup.graphs or setup.sampler == "copy" else {}
    stays = setup.sampler == "copy"
    held = {name: size for name, size in sampling.items() if stays or name == GRAPHS or size < memory.GIVEN_BACK}
    kept = math.ceil(way.tokens * setup.kept_bytes(way.keep))
    hidden = way.tokens * setup.shape.width * (2 * setup.wide + setup.low)
    tied = 4 * setup.shape.table if setup.shape.tied and not setup.adapter else 0
    passing = math.ceil(way.tokens * setup.passing_bytes(way.tokens, way.keep)) + tied
    gradients = gradients_bytes(setup)
    return held | {
        "gradients": max(gradients - kept, 0) if way.passes == 1 else gradients,
        f"kept of a pass ({way.tokens:,} tokens)": kept,
        "logits, or a layer's own": max(head_memory(setup) + hidden, passing),
    }


# --- time -----------------------------------------------------------------------------------------------------------


def flops(setup: Setup) -> tuple[float, float]:
    """Of one token's gradients: in the body, and in the head."""
    body, table = setup.shape.body, setup.shape.table
    if setup.adapter:
        return 4.0 * body + 6.0 * setup.adapter, 6.0 * table
    return 6.0 * body, 8.0 * table


def attention_flops(setup: Setup) -> float:
    """Of the attention of all rows that learn, one way: a product with keys, one with values, below the diagonal."""
    shape = setup.shape
    return 4.0 * shape.layers * shape.heads * shape.head_dim * setup.learning.pairs


def gradient_seconds(setup: Setup, way: Way, gpu: GPU) -> float:
    """Forward and backward of all passes of the rows that learn, once."""
    rows, shape = setup.learning, setup.shape
    body, head = flops(setup)
    made = rows.groups * rows.group * rows.completion
    rate = memory.products_share(shape.width) * gpu.flops_per_s
    products = (rows.tokens * body + made * head) / rate
    attention = 3.5 * attention_flops(setup) / (rows.attention_share * gpu.flops_per_s)
    again = products * memory.AGAIN[way.keep] + attention * (1 + memory.ATTENDED_AGAIN.get(way.keep, 0.0))
    moved = rows.tokens * shape.layers * (30 * shape.width + 15 * shape.inner) + 20 * made * shape.vocabulary
    moved += THIN * rows.tokens * shape.layers * sum(map(sum, shape.projections)) if setup.adapter else 0
    passes = setup.minibatches * way.passes
    hosted = 3 * rows.tokens * setup.hosted_bytes() / memory.HOST_BYTES if way.keep in HOSTED else 0.0
    computed = max(products + again, hosted) + (moved + passes * memory.PASS_BYTES * setup.trained) / gpu.bytes_per_s
    return max(computed, passes * memory.PASS_LAYER * shape.layers)


def scoring_seconds(setup: Setup, gpu: GPU) -> float:
    """All rows that learn once, without gradient."""
    rows = setup.learning
    made = rows.groups * rows.group * rows.completion
    one_way = 2.0 * (rows.tokens * setup.shape.body + made * setup.shape.table)
    passes = math.ceil(rows.tokens / memory.FORWARD)
    moved = rows.tokens * setup.shape.layers * (12 * setup.shape.width + 6 * setup.shape.inner)
    moved += 8 * made * setup.shape.vocabulary
    rate = memory.products_share(setup.shape.width) * gpu.flops_per_s
    attention = attention_flops(setup) / (rows.attention_share * gpu.flops_per_s)
    return max(
        one_way / rate + attention + moved / gpu.bytes_per_s, passes * memory.PASS_LAYER * setup.shape.layers / 3
    )


def decode_seconds(setup: Setup, gpu: GPU) -> float:
    """All completions, a token a step: weights and live keys and values are read, or products take longer."""
    shape, rows, slots = setup.shape, setup.rows, setup.slots
    count = rows.groups * rows.group
    weights = shape.body + shape.table
    read = weights * setup.low / gpu.bytes_per_s
    computed = 2.0 * weights * slots / gpu.flops_per_s
    live = slots * rows.completion / 2 + slots / rows.group * rows.prompt
    cached = live * shape.position * setup.low / gpu.bytes_per_s
    drawn = 16.0 * slots * shape.vocabulary / gpu.bytes_per_s
    launched = (
        DECODE_LAYER * shape.layers * (2 if setup.adapter else 1)
    )  # an adapter's products are kernels of their own
    step = launched + (max(read, computed) + drawn) / DECODE + cached
    return step * rows.completion * math.ceil(count / slots)


def prefill_seconds(setup: Setup, gpu: GPU) -> float:
    """Prompts, each once for its group."""
    tokens = setup.rows.groups * setup.rows.prompt
    rate = memory.products_share(setup.shape.width) * gpu.flops_per_s
    return 2.0 * setup.shape.body * tokens / rate + 0.02


def step_seconds(setup: Setup, way: Way, gpu: GPU) -> dict[str, float]:
    """A step by part; rewards are not known."""
    found = {"prompts": prefill_seconds(setup, gpu), "decoding": decode_seconds(setup, gpu)}
    if setup.sampler == "servers":  # on GPUs that nobody knows
        found = {}
    if setup.scored:
        found["scoring without gradient"] = setup.scored * scoring_seconds(setup, gpu)
    if setup.taught in ("self", "average", "model"):
        found["teacher"] = scoring_seconds(replace(setup, shape=setup.teacher or setup.shape), gpu)
    found["gradients"] = setup.iterations * gradient_seconds(setup, way, gpu)
    found["optimizer"] = setup.iterations * setup.minibatches * OPTIMIZER_BYTES * setup.trained / gpu.bytes_per_s
    found["host"] = HOST
    return found
