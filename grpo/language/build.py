"""The parts of a language run, made from its settings and from what was handed over beside them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo import together
from grpo.capabilities import Teaches
from grpo.config import ConfigError
from grpo.errors import warn
from grpo.language.checks import ONLY_WHOLE, expect_choice
from grpo.language.comparing import expect_comparable
from grpo.language.compat.environments import EnvironmentConversation, rows_for
from grpo.language.compat.rollouts import RolloutFunction
from grpo.language.config import LanguageConfig
from grpo.language.data.chat import Chat, prepare_tokenizer
from grpo.language.data.columns import AUTO
from grpo.language.data.prompts import Prompts, load
from grpo.language.engines import Engine, Tokens
from grpo.language.engines.choose import make_engine
from grpo.language.engines.inline import context_of
from grpo.language.model import loading, reference, vision
from grpo.language.model.adapters import is_adapted, with_adapter
from grpo.language.model.optimizer import RoundedAdamW, small_adam
from grpo.language.model.teacher import make_teacher
from grpo.language.pictures.processor import Pictures
from grpo.language.planning import show as planning
from grpo.language.planning.shape import ModelShape, Unknown
from grpo.language.planning.sizes import limit_bytes
from grpo.language.players import OneAnswer, Player
from grpo.language.rewards import Rewards
from grpo.language.scoring import memory
from grpo.language.scoring.policy import LanguagePolicy
from grpo.language.scoring.probe import make_scorer
from grpo.language.scoring.scorer import Scorer, ScoringPlan
from grpo.language.source import LanguageSource
from grpo.language.tasks import TASKS, TINY, built_in
from grpo.language.turns.conversation import expect_growing, make_conversation, toolbox_of
from grpo.models import device_of
from grpo.optimizers import AdamW
from grpo.protocols import Ranks, Reference

WHOLE = ScoringPlan(whole_logits=True, divided=True)
"""Through the module alone, as whoever divides its weights needs it."""


@dataclass(frozen=True)
class Given:
    """What a script hands over as objects, where settings alone cannot say it."""

    model: Any = None
    reward_funcs: Any = None
    train_dataset: Any = None
    eval_dataset: Any = None
    processing_class: Any = None
    reward_processing_classes: Any = None
    optimizers: tuple[Any, Any] = (None, None)
    quantization_config: Any = None
    peft_config: Any = None
    tools: Any = None
    environment: Any = None
    ref_model: Any = None
    teacher_model: Any = None
    rollout_func: Any = None
    environment_factory: Any = None


@dataclass(frozen=True)
class Parts:
    """What the shared trainer and the front door need."""

    config: LanguageConfig
    tokens: Tokens
    chat: Chat
    policy: LanguagePolicy
    source: LanguageSource
    reference: Reference | None
    teacher: Teaches | None
    optimizer: torch.optim.Optimizer
    ranks: Ranks


def build(config: LanguageConfig, given: Given) -> Parts:
    """Model, adapter, policy, data, rewards, engine, source: in this order, the cheap refusals first."""
    config = named(config, given)
    ranks = together.here()  # first: several ranks have a GPU each
    if config.weights == "bfloat16" and (given.peft_config is not None or is_adapted(given.model)):
        raise ConfigError(ONLY_WHOLE)
    if config.memory is not None:
        keep_limit(config, given)
    cut = config.shard == "weights" and ranks.size > 1
    if cut:
        expect_plain(config, given)
    set_torch(config)
    torch.manual_seed(config.seed)  # an adapter's first weights are drawn
    at_first = config.but(device="cpu") if cut else config  # moved on layer by layer, never there whole
    base, processing = model_of(at_first, given.model, given.processing_class, given.peft_config is not None)
    pictures, tokenizer = pictures_of(config, processing, given)
    kept = [] if pictures is None or config.train_vision or is_adapted(base) else vision.freeze(base)
    handed_over = given.model is not None and not isinstance(given.model, str)
    before = loading.keep_as_asked(base, config) if handed_over and given.peft_config is None else None
    adapted, fresh = with_adapter(base, config, given.peft_config, kept)
    low = autocast_of(config, handed_over, before)
    if cut:
        ranks = together.divided(ranks, adapted, torch.device(device_of(config.device)))
        scorer = Scorer(adapted, config.temperature, WHOLE, config.tokens_per_microbatch, autocast=low)
    else:
        packing = "padded" if pictures is not None and config.packing == "auto" else config.packing
        scorer = make_scorer(adapted, config.temperature, packing, config.tokens_per_microbatch, autocast=low)
    tokens = prepare_tokenizer(tokenizer, base.config, getattr(base, "generation_config", None), pictures)
    chat = Chat(
        tokenizer,
        system_prompt=config.system_prompt,
        skip=config.skip_apply_chat_template,
        kwargs=config.chat_template_kwargs,
        pictures=pictures,
    )
    scorer.pad = tokens.pad
    policy = LanguagePolicy(
        adapted, scorer, config.gradient_checkpointing, config.torch_compile, config.activation_offloading
    )
    player = player_of(config, chat, tokens, given)  # first: tools are part of every prompt
    prompts, held_out = data_of(config, chat, rows_of(config, player, given), given.eval_dataset, context_of(base))
    judging = player.rewards if isinstance(player, EnvironmentConversation) else []
    rewards = rewards_of(config, given.reward_funcs, given.reward_processing_classes, judging)
    config = weighed(config, len(rewards.names), len(judging))
    expect_judged(config, rewards, player, given.teacher_model)
    own = "transformers" if cut or (pictures is not None and config.engine == "auto") else config.engine
    engine = engine_of(config.but(engine=own) if own != config.engine else config, adapted, tokens, ranks)
    return Parts(
        config=config,
        tokens=tokens,
        chat=chat,
        policy=policy,
        source=LanguageSource(policy, engine, player, tokens, prompts, held_out, rewards, config),
        reference=reference_of(config, policy, fresh, given.ref_model),
        teacher=make_teacher(config, given.teacher_model, policy, chat, prompts, isinstance(player, OneAnswer)),
        optimizer=optimizer_of(config, policy, given.optimizers[0]),
        ranks=ranks,
    )


def engine_of(config: LanguageConfig, model: Any, tokens: Tokens, ranks: Ranks) -> Engine:
    """What samples; every rank has servers of its own, whose addresses may be one word with commas."""
    addresses = [word.strip() for words in config.servers for word in words.split(",") if word.strip()]
    own: dict[str, Any] = {"servers": addresses[ranks.rank :: ranks.size]} if config.servers else {}
    return make_engine(config.engine, model, tokens, bool(config.staleness), **config.engine_kwargs, **own)


def expect_judged(config: LanguageConfig, rewards: Rewards, player: Player, teacher: Any) -> None:
    """Refuse what nobody would judge; `teacher`: one that was handed over knows what it is shown."""
    unjudged = not rewards.names and isinstance(player, OneAnswer)
    if config.recipe.turn_coef and isinstance(player, OneAnswer):
        raise ConfigError(
            f'recipe "{config.recipe.name}" compares turns of conversations (turn_coef); give tools or an environment'
        )
    if unjudged and config.recipe.outcome_coef:
        raise ConfigError(
            "there is no reward: give reward_funcs, or set rewards to a built-in name (correctness, xml, …) or "
            "file.py:function"
        )
    if unjudged and config.recipe.teacher_sees == "success" and not isinstance(teacher, Teaches):
        raise ConfigError(
            f'recipe "{config.recipe.name}" shows the teacher tries that succeeded (teacher_sees=success), and no '
            "reward says which did: give reward_funcs, or set rewards to a built-in name or file.py:function"
        )
    expect_choice(config, not unjudged)
    expect_names(config, rewards.names)


def keep_limit(config: LanguageConfig, given: Given) -> None:
    """Take no more of the GPU than `memory` says; refused before anything is loaded where no step is that small."""
    device = torch.device(device_of(config.device))
    if device.type != "cuda":
        raise ConfigError(
            f"memory={config.memory} limits what is taken of a GPU, and this runs on {device}; leave it out"
        )
    if config.engine == "vllm" and not config.servers and "base_url" not in config.engine_kwargs:
        raise ConfigError("memory: vLLM takes a share of its own; set engine_kwargs gpu_memory_utilization instead")
    gpu = memory.gpu_here(device)
    limit = limit_bytes(config.memory or 1.0, gpu.memory)
    memory.set_limit(device, limit)
    loaded = given.model is not None and not isinstance(given.model, str)
    try:
        shape = ModelShape.of(given.model.config) if loaded else planning.shape_of(config)
    except Unknown:
        return  # of a model whose sizes say too little, passes are halved until they fit
    planning.expect_fits(config, shape, gpu, limit, given.peft_config is not None or is_adapted(given.model))


def expect_plain(config: LanguageConfig, given: Given) -> None:
    """Refuse with shard=weights what needs weights that lie in one piece, or a second model."""
    engine = config.engine if config.engine not in ("auto", "transformers") else ""
    wrong = {
        "an adapter": bool(given.peft_config or config.lora_rank or config.adapter or is_adapted(given.model)),
        "quantize": config.quantize != "none",
        f"engine={engine}": bool(engine),
        "packing": config.packing not in ("auto", "padded"),
        "torch_compile": config.torch_compile,
        "activation_offloading": config.activation_offloading,
        "warm_start_steps above 0": bool(config.warm_start_steps),
        "a KL to a reference (beta above 0)": bool(config.recipe.beta) and config.recipe.kl_to != "old",
        "staleness": bool(config.staleness),
        "a teacher": config.teacher is not None or given.teacher_model is not None,
        "teacher_decay": bool(config.teacher_decay),
        "an optimizer of your own": given.optimizers[0] is not None,
    }
    for name in (name for name, given_too in wrong.items() if given_too):
        raise ConfigError(f"shard=weights cannot be used with {name}; leave it out, or use shard=gradients")


def set_torch(config: LanguageConfig) -> None:
    """What is PyTorch's own to say, for this process."""
    if config.tf32 is not None:
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    if config.full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a GPU is first used
        torch.use_deterministic_algorithms(True)


def named(config: LanguageConfig, given: Given) -> LanguageConfig:
    """Settings that also know what was given by name beside them."""
    beside = {"model": given.model, "dataset": given.train_dataset, "eval_dataset": given.eval_dataset}
    said: dict[str, Any] = {name: value for name, value in beside.items() if isinstance(value, str)}
    for name, value in said.items():
        if getattr(config, name) not in ("", None, value):
            raise ConfigError(f"{name} is given twice: {value!r} and, in the settings, {getattr(config, name)!r}")
    if given.quantization_config is not None:
        said["model_kwargs"] = config.model_kwargs | {"quantization_config": given.quantization_config}
    if config.use_adaptive_entropy:
        said["report_entropy"] = True
    return config.but(**said) if said else config


def name_of(config: LanguageConfig) -> str:
    """What a person would call the run."""
    word = Path(config.model or "model").name or "model"
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in word)


def model_of(config: LanguageConfig, model: Any, tokenizer: Any, adapter: bool) -> tuple[Any, Any]:
    """The module and its tokenizer, loaded or as given."""
    if config.model == TINY and (model is None or model == TINY):
        made, own = built_in(config.dataset).tiny(config.seed)
        return made.to(device_of(config.device)), tokenizer or own
    if model is None or isinstance(model, str):
        whole = not (adapter or config.lora_rank or config.adapter)
        return loading.load_model(config, whole), tokenizer or loading.load_tokenizer(config)
    if not hasattr(model, "get_output_embeddings") or getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{type(model).__name__} is not a causal language model; load one with AutoModelForCausalLM")
    if config.device != "auto":
        model.to(config.device)
    if tokenizer is None:
        named = getattr(model.config, "_name_or_path", "")
        if not named:
            raise ConfigError("a loaded model needs its tokenizer: pass processing_class=")
        tokenizer = loading.load_tokenizer(config.but(model=named))
    return model, tokenizer


def pictures_of(config: LanguageConfig, processing: Any, given: Given) -> tuple[Pictures | None, Any]:
    """How images are read, where `processing` is the processor of an image-text model, and the tokenizer."""
    if not hasattr(processing, "image_processor"):
        if config.train_vision:
            raise ConfigError("train_vision: the model reads text alone; leave it out")
        return None, processing
    wrong = {
        f"engine={config.engine}": config.engine not in ("auto", "transformers", "inline"),
        "shard=weights": config.shard == "weights",
        "speculate": bool(config.speculate),
        "staleness": bool(config.staleness),
        "a teacher": config.teacher is not None or given.teacher_model is not None or bool(config.recipe.teacher_coef),
    }
    for name in (name for name, given_too in wrong.items() if given_too):
        raise ConfigError(f"{name} reads text alone so far; leave it out where prompts may hold images")
    return Pictures(processing, config.max_pixels), vision.tokenizer_of(processing)


def autocast_of(config: LanguageConfig, handed_over: bool, before: torch.dtype | None) -> torch.dtype | None:
    """Lower precision for products, where float32 weights are trained and it was asked for.

    before: what a model that was handed over had for weights that are float32 now; products stay in it.
    """
    if handed_over and "dtype" not in config.model_fields_set:
        return before
    wanted = loading.arithmetic(config)
    return None if wanted == torch.float32 or config.weights == "bfloat16" else wanted


def prompts_of(config: LanguageConfig, chat: Chat, rows: Any, split: str, context: float) -> Prompts:
    """A data set in any of its forms; `context`: tokens that the model can read."""
    origin = rows if isinstance(rows, str) else ""
    subset = config.dataset_config if origin == config.dataset else None
    if isinstance(rows, str) and rows in TASKS:
        rows = TASKS[rows].rows(split, config.seed)
    elif isinstance(rows, str):
        rows = load(rows, subset, split)
    return Prompts(
        rows,
        chat,
        prompt_column=config.prompt_column,
        answer_column=config.answer_column,
        answer_after=config.answer_after if "answer_after" in config.model_fields_set else AUTO,
        prompt_template=config.prompt_template,
        max_length=config.max_prompt_length,
        context=min(context, config.engine_kwargs.get("max_model_len") or math.inf),
        overlong=config.overlong_prompts,
        shuffle=config.shuffle,
        seed=config.seed if config.data_seed is None else config.data_seed,
        num_proc=config.dataset_num_proc,
        origin=origin,
        image_column=config.image_column,
    )


def data_of(
    config: LanguageConfig, chat: Chat, train: Any, held_out: Any, context: float
) -> tuple[Prompts, dict[str, Prompts]]:
    """Prompts to learn from, and those that are held out: one set without a name, or several by theirs."""
    train = config.dataset if train is None else train
    if isinstance(train, str) and not train:
        raise ConfigError("there are no prompts: give train_dataset, or set dataset to a file, hub id or built-in task")
    prompts = prompts_of(config, chat, train, config.dataset_split, context)
    expect_comparable(config, prompts)
    held_out = config.eval_dataset if held_out is None else held_out
    split = config.eval_split or ("test" if held_out is None else "train")
    if held_out is None and config.eval_split and not config.dataset:
        raise ConfigError("eval_split needs dataset or eval_dataset, by name")
    if held_out is None and (config.dataset in TASKS or config.eval_split):
        held_out = config.dataset
    if held_out is None:
        return prompts, {}
    several = held_out if isinstance(held_out, Mapping) else {"": held_out}
    return prompts, {str(name): prompts_of(config, chat, rows, split, context) for name, rows in several.items()}


def rows_of(config: LanguageConfig, player: Player, given: Given) -> Any:
    """The rows to learn from; an environment may have them all, or their prompts."""
    if not isinstance(player, EnvironmentConversation):
        return given.train_dataset
    return rows_for(given.environment_factory, given.train_dataset, config.groups_per_step, config.run.steps)


def weighed(config: LanguageConfig, names: int, own: int) -> LanguageConfig:
    """Weights that were given for reward functions alone: what environments give counts fully."""
    weights = config.recipe.reward_weights
    if not own or weights is None or len(weights) != names - own:
        return config
    return config.but(reward_weights=[*weights, *[1.0] * own])


def rewards_of(config: LanguageConfig, functions: Any, processing_classes: Any, own: Sequence[Any] = ()) -> Rewards:
    """The reward functions, in workers; `own`: those of environments, after them."""
    given = functions if isinstance(functions, list | tuple) else [] if functions is None else [functions]
    if own and isinstance(processing_classes, list | tuple):
        processing_classes = [*processing_classes, *[None] * len(own)]
    if given and config.rewards:
        raise ConfigError("reward_funcs and the setting rewards say the same thing; give one of them")
    return Rewards(
        [*(list(given) or list(config.rewards)), *own],
        processing_classes=processing_classes,
        timeout=config.reward_timeout,
        workers=config.reward_workers,
        cluster=config.workers,
        model_device=device_of(config.device),
        trust_remote_code=config.trust_remote_code,
        settings=config.model_dump(),
        seed=config.seed,
    )


def expect_names(config: LanguageConfig, names: Sequence[str]) -> None:
    """Settings that speak of rewards, before anything is computed."""
    if config.eval_by is not None and config.eval_by not in (*names, "environment"):
        known = ", ".join(names)
        raise ConfigError(f"eval_by={config.eval_by} is none of the rewards: {known}; set eval_by to one of them")
    weights, own = config.recipe.reward_weights, len(names)
    if weights is not None and len(weights) not in (own, own + 1):  # an environment's own comes last
        raise ConfigError(f"reward_weights has {len(weights)} numbers for {own} rewards: {', '.join(names)}")


def player_of(config: LanguageConfig, chat: Chat, tokens: Tokens, given: Given) -> Player:
    """How a group of answers is made: in one go, in turns, or by a function of the script's own."""
    tools, environment = given.tools or config.tools, given.environment or config.environment
    if given.rollout_func is not None:
        if tools or environment or given.environment_factory:
            raise ConfigError("rollout_func makes whole conversations; leave out tools and environments beside it")
        if config.staleness:  # in a thread, it would use a model that is being learned
            raise ConfigError("rollout_func is given the trainer, whose model learns meanwhile; leave out staleness")
        return RolloutFunction(given.rollout_func, tokens)
    if given.environment_factory is not None:
        if environment:
            raise ConfigError("environment and environment_factory are two kinds of environment; give one of them")
        box = toolbox_of(config, tools) if tools else None
        made = EnvironmentConversation(chat, tokens, given.environment_factory, box, config.max_turns)
        expect_growing(chat, "tool")
        return made
    if not (tools or environment):
        if "max_turns" in config.model_fields_set:
            raise ConfigError("max_turns has no effect here: it needs tools or an environment")
        if "turn_timeout" in config.model_fields_set:
            raise ConfigError("turn_timeout has no effect here: it needs tools or an environment")
        return OneAnswer(tokens)
    return make_conversation(config, chat, tokens, tools, environment)


def reference_of(config: LanguageConfig, policy: LanguagePolicy, fresh: bool, given: Any) -> Reference | None:
    """What the KL is measured to, where there is one; `fresh`: an adapter was made that does nothing yet."""
    recipe = config.recipe
    if not recipe.beta or recipe.kl_to == "old":
        if given is not None:
            raise ConfigError("ref_model is not used: beta is 0, or the KL is not to a reference")
        return None
    if given is not None:
        return reference.FrozenCopy(policy, given)
    follows = config.ref_sync_steps is not None or bool(config.warm_start_steps)
    return reference.make(policy, follows, fresh)


def optimizer_of(config: LanguageConfig, policy: LanguagePolicy, given: Any) -> torch.optim.Optimizer:
    """AdamW, or the one that was given; one that rounds at random where trained weights are bfloat16."""
    tensors = list(policy.parameters().values())
    narrow = any(p.dtype == torch.bfloat16 for p in tensors)
    if given is not None:
        if narrow:
            warn(
                f"the model's trained weights are bfloat16, where small steps of {type(given).__name__} are rounded "
                "away; leave it out, or set weights=float32",
            )
        return given
    if not tensors:
        raise ConfigError("the model has no weights that can be trained; set requires_grad, or give peft_config")
    how: dict[str, Any] = {
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
    }
    if config.adam_states != "float32" and (made := small_adam(config, tensors)) is not None:
        return made(tensors, **how)
    if narrow:
        return RoundedAdamW(tensors, seed=config.seed, **how)
    return AdamW(tensors, fused=True if all(p.is_cuda for p in tensors) else None, **how)
