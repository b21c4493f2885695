"""The language room's front door: a model, reward functions and prompts, in the words TRL's and EasyDeL's users know.

    from grpo.language import GRPOConfig, GRPOTrainer
    trainer = GRPOTrainer(model="path", reward_funcs=correctness, args=GRPOConfig(…), train_dataset=rows)
    trainer.train()

It builds a policy and a source and hands them to the trainer that everyone shares.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from grpo.config import ConfigError
from grpo.errors import SamplesFailed
from grpo.language import preflight
from grpo.language.compat.callbacks import Callbacks
from grpo.language.compat.easydel import vInference
from grpo.language.config import LanguageConfig
from grpo.language.data.chat import Chat, prepare_tokenizer
from grpo.language.data.prompts import Prompts, load
from grpo.language.engines import Tokens
from grpo.language.engines.choose import make_engine
from grpo.language.evaluate import EVALUATION, Evaluation
from grpo.language.model import loading, output, reference
from grpo.language.model.adapters import with_adapter
from grpo.language.model.optimizer import RoundedAdamW
from grpo.language.model.warmup import warm_start
from grpo.language.rewards import Rewards
from grpo.language.samples import Message
from grpo.language.scoring.policy import LanguagePolicy, Scorer
from grpo.language.source import PREFLIGHT, LanguageSource, OneAnswer, Player
from grpo.language.tasks import TASKS, TINY, built_in
from grpo.models import device_of
from grpo.run.config import RunConfig
from grpo.run.folder import RunFolder
from grpo.run.session import Summary
from grpo.seeding import mixed
from grpo.trainer import GRPOTrainer as SharedTrainer
from grpo.trainer import StepReport

EPOCHS = 3
"""Passes over the data set unless the settings say otherwise; TRL and EasyDeL have the same."""
ENOUGH = 8
"""Prompts that pre-flight looks at."""


class GRPOTrainer(SharedTrainer):
    """Prompts in, better answers out.

    model: a hub id, a folder, a .gguf file, or a loaded model. reward_funcs: one or several functions, names of
    built-in ones, `file.py:name`, or reward models. args (or arguments): a `GRPOConfig`. train_dataset: rows, a
    `datasets` one, a file or a hub id. tools: Python functions, or a `Toolbox` that says how calls are written.
    """

    source: LanguageSource
    policy: LanguagePolicy
    config: LanguageConfig

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: LanguageConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] = (),
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        environment: Any = None,
        *,
        arguments: LanguageConfig | None = None,
        vinference: vInference | None = None,
        ref_model: Any = None,
    ) -> None:
        if args is not None and arguments is not None:
            raise TypeError("args and arguments are the same thing; give one of them")
        config = args or arguments or LanguageConfig()
        if not isinstance(config, LanguageConfig):
            raise TypeError(f"args must be a grpo.language.GRPOConfig, got {type(config).__name__}")
        if vinference is not None:
            config = vinference.applied(config)
            model = vinference.model if model is None else model
            processing_class = vinference.tokenizer if processing_class is None else processing_class
        config = _named(config, model, train_dataset, eval_dataset, quantization_config)
        torch.manual_seed(config.seed)  # an adapter's first weights are drawn
        base, tokenizer = _model(config, model, processing_class, peft_config is not None)
        adapted, fresh = with_adapter(base, config, peft_config)
        low = _autocast(config, adapted, model)
        scorer = Scorer(adapted, config.temperature, config.packing, config.tokens_per_microbatch, autocast=low)
        self.tokens = prepare_tokenizer(tokenizer, base.config, getattr(base, "generation_config", None))
        chat = Chat(
            tokenizer,
            system_prompt=config.system_prompt,
            skip=config.skip_apply_chat_template,
            kwargs=config.chat_template_kwargs,
        )
        self.chat = chat
        scorer.pad = self.tokens.pad
        policy = LanguagePolicy(adapted, scorer, config.gradient_checkpointing, config.torch_compile)
        player = _player(config, chat, self.tokens, tools, environment)  # first: tools are part of every prompt
        prompts, held_out = _data(config, chat, train_dataset, eval_dataset)
        rewards = _rewards(config, reward_funcs, reward_processing_classes)
        if not rewards.names and isinstance(player, OneAnswer):
            raise ConfigError(
                "there is no reward: give reward_funcs, or set rewards to a built-in name (correctness, xml, …) or "
                "file.py:function"
            )
        _expect_names(config, rewards.names)
        engine = make_engine(config.engine, adapted, self.tokens, **config.engine_kwargs)
        source = LanguageSource(policy, engine, player, self.tokens, prompts, held_out, rewards, config)
        source.output = self.save_model
        follows = config.ref_sync_steps is not None or bool(config.warm_start_steps)
        super().__init__(
            config,
            policy,
            _reference(config, policy, follows, fresh, ref_model),
            optimizer=_optimizer(config, policy, optimizers[0]),
            source=source,
        )
        self._callbacks = Callbacks(callbacks)
        self._lr = _schedule(config, optimizers[1])
        self._rates = [group["lr"] for group in self.optimizer.param_groups] if self.optimizer else []
        self._total: int | None = None
        self._told: dict[int, dict[str, float | None]] = {}
        """Metrics of each step, evaluations too, for the model's card."""
        self._place: Path | None = None
        self._looked = False

    # --- learning ---------------------------------------------------------------------------------------------------

    def step(self, states: Sequence[Any] | None = None) -> StepReport:
        """Sample, judge, compare, learn; see `grpo.GRPOTrainer.step`."""
        first: dict[str, float | None] = {}
        if self.steps_done == 0:
            first = self._begin()
        rate = self._set_rate()
        report = super().step(states)
        unnamed = [name for name in report.metrics if name.startswith("rewards/") and name.split("/")[1].isdigit()]
        for name in unnamed:
            del report.metrics[name]
        report.metrics |= {"learning_rate": rate, "epoch": self.source.epoch(report.step)} | first
        self._told[report.step] = report.metrics
        return report

    def _begin(self) -> dict[str, float | None]:
        """Before the first step: learn from references where that was asked for, and try the rewards."""
        found: dict[str, float | None] = {}
        if self.config.eval_on_start:
            found |= {f"before/{name}": value for name, value in self.source.evaluate(0).items()}
        if self.config.warm_start_steps:
            warm_start(self)
            if self.reference is not None:
                self.reference.sync(self.policy.parameters(), 1.0)
            for name, value in self.source.evaluate(0).items():
                found[f"warm_start/{name}"] = value
        if self.config.preflight and not self._looked:
            findings = self.preflight()
            text = preflight.report(findings)
            if any(finding.level == "problem" for finding in findings):
                raise ConfigError(
                    f"pre-flight found what would waste the run:\n{text}\n(preflight=false goes on anyway)"
                )
            for finding in findings:
                if finding.level == "warning":
                    warnings.warn(f"{finding.what}; {finding.remedy}", stacklevel=4)
        return found

    def preflight(self) -> list[preflight.Finding]:
        """Try the rewards on references and a few completions; nothing that training depends on is moved."""
        self._looked = True
        config, source = self.config, self.source
        rows = source.prompts.first(ENOUGH)
        seeds = [mixed(config.seed, PREFLIGHT, row) for row in range(len(rows))]
        made = source.sample(rows, 1, config.sampling, seeds)
        return preflight.check(
            source.rewards,
            rows,
            made,
            max_completion_length=config.max_completion_length,
            tokenizer=self.tokens.tokenizer,
            config=config,
        )

    def schedule(self, steps: int) -> None:
        """Tell how many steps the run will have: schedules and reward functions want to know."""
        self._total = self.source.max_steps = steps

    def _set_rate(self) -> float | None:
        """The learning rate of this step, from its number alone."""
        if self.optimizer is None:
            return None
        factor = self._lr(self.steps_done, self._total)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        return float(self.optimizer.param_groups[0]["lr"])

    def train(  # type: ignore[override]  # the field's words; prompts are the data set's own
        self,
        resume_from_checkpoint: bool | str | None = None,
        *,
        steps: int | None = None,
        callbacks: Sequence[Callable[[StepReport], Any]] = (),
        progress: str | None = "auto",
    ) -> list[StepReport]:
        """The whole run: as many steps as the settings say, everything it leaves in its folder.

        resume_from_checkpoint: True goes on from the newest checkpoint in output_dir; a path: that run's folder.
        """
        from grpo.run.loop import run  # here: only a run needs files, signals and locks

        how = self.config.run
        if how.evaluate_every is not None and self.source.held_out is None:
            raise ConfigError("run.evaluate_every (eval_steps): there are no held-out rows; give eval_dataset")
        total = steps or self.total_steps(how)
        self.schedule(total)
        place, resume = self._folder(how, resume_from_checkpoint)
        self._place = place.path
        reports: list[StepReport] = []
        told = Callbacks([*self._callbacks.all, *callbacks])

        def enough(report: StepReport) -> bool:
            if reports:
                reports[-1].forget()
            reports.append(report)
            return told.step_done(report, total) or how.reached(report)

        told.begin(total)
        summary = run(
            self,
            total,
            place,
            resume=resume,
            **how.plan(),
            progress=progress,
            evaluate=self.source.evaluate if how.evaluate_every else None,
            stop=enough,
        )
        told.end(total)
        self._finish(summary)
        return reports

    def total_steps(self, how: RunConfig) -> int:
        """Steps of the run: as given, or so many passes over the data; three where nothing is said."""
        if how.steps is not None:
            return how.steps
        return math.ceil((how.num_train_epochs or EPOCHS) * self.source.epoch_steps())

    def _finish(self, summary: Summary) -> None:
        if summary.reason in ("failures", "unsaved"):
            raise SamplesFailed(
                f"{summary.folder}: the run ended ({summary.reason}) at step {summary.step}; see events.jsonl"
            )
        if summary.reason in ("done", "stopped") and self.config.push_to_hub:
            self.push_to_hub(summary.folder / "model")

    def _folder(self, how: RunConfig, resume: bool | str | None) -> tuple[RunFolder, bool]:
        """Where the run's results go, and whether it goes on there."""
        now, path = datetime.now().astimezone(), self._path()
        if isinstance(resume, str):
            path = Path(resume)
            path = path.parent.parent if path.parent.name == "checkpoints" else path
        there = (path / "run.json").exists()
        if resume and not there:
            raise ConfigError(
                f"{path}: there is no run to resume; leave resume_from_checkpoint out, or name its folder"
            )
        if there and not resume:
            raise ConfigError(
                f"{path} already holds a run; call train(resume_from_checkpoint=True), or choose another output_dir"
            )
        if there:
            return RunFolder.open(path), True
        settings = self.config.model_dump(mode="json", exclude_unset=True)
        kept = {"task": "language", **settings.pop("recipe", {}), **settings}
        made = RunFolder.create(
            path,
            task="language",
            config=kept | {"run": how.model_dump(mode="json")},
            created=now.isoformat(timespec="seconds"),
            seed=self.config.seed,
            argv=[],
        )
        return made, False

    def _path(self) -> Path:
        """Where the run's folder is, or would be."""
        how, now = self.config.run, datetime.now().astimezone()
        return how.folder(how.name or _name(self.config), "language", self.config.seed, now)

    # --- what came of it --------------------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The trained module."""
        return self.policy.model

    def evaluate(self, dataset: Any = None, samples: int | None = None, limit: int | None = None) -> Evaluation:
        """Accuracy, pass@k and rewards on held-out rows: `eval_dataset`, or the ones given here."""
        prompts = self.source.held_out
        if dataset is not None:
            own = isinstance(dataset, str) and dataset == self.config.dataset
            split = self.config.eval_split if own and self.config.eval_split else "train"
            split = "test" if isinstance(dataset, str) and dataset in TASKS else split
            prompts = _prompts(self.config, self.chat, dataset, split)
        if prompts is None:
            raise ConfigError("there are no held-out rows; give eval_dataset, or a data set to evaluate on")
        return self.source.judge_rows(prompts, samples or self.config.eval_samples, limit)

    def reply(self, messages: Sequence[Message], **sampling: Any) -> str:
        """What the model answers to a conversation; one without a chat template answers the last message alone."""
        prompt = self.source.prompts.prompt(list(messages) if self.chat.templated else messages[-1]["content"])
        seed = mixed(self.config.seed, EVALUATION, len(messages))
        drawn = replace(self.config.sampling, **sampling)
        return self.source.sample([prompt], 1, drawn, [seed])[0].text

    def save_model(self, output_dir: str | Path | None = None, merge: bool = False) -> Path:
        """A folder that `AutoModelForCausalLM.from_pretrained` loads (or PEFT, unless merged), with its card."""
        path = Path(output_dir) if output_dir else (self._place or self._path()) / "model"
        return output.save_model(
            self.model,
            self.tokens.tokenizer,
            path,
            self.config,
            merge=merge,
            step=self.steps_done,
            metrics=self._told.get(self.steps_done),
            rewards=tuple(self.source.rewards.names),
            data=self.config.dataset,
        )

    def push_to_hub(self, folder: str | Path | None = None) -> str:
        """Upload a saved model (it is written first where no folder is given); returns where it is."""
        path = self.save_model() if folder is None else Path(folder)
        if not path.exists():
            raise ConfigError(f"{path}: the model was not written, so that it cannot be uploaded; see events.jsonl")
        repo = self.config.hub_model_id or self.config.run.name or _name(self.config)
        return output.push(path, repo, self.config.hub_private)


def make_trainer(config: LanguageConfig) -> GRPOTrainer:
    """The trainer of a configuration, as the command line makes it."""
    return GRPOTrainer(args=config)


# --- what is made where nothing is given ----------------------------------------------------------------------------


def _named(config: LanguageConfig, model: Any, train: Any, held_out: Any, quantization: Any) -> LanguageConfig:
    """Settings that also know what was given by name beside them."""
    given = {"model": model, "dataset": train, "eval_dataset": held_out}
    said: dict[str, Any] = {name: value for name, value in given.items() if isinstance(value, str)}
    for name, value in said.items():
        if getattr(config, name) not in ("", None, value):
            raise ConfigError(f"{name} is given twice: {value!r} and, in the settings, {getattr(config, name)!r}")
    if quantization is not None:
        said["model_kwargs"] = config.model_kwargs | {"quantization_config": quantization}
    return config.but(**said) if said else config


def _name(config: LanguageConfig) -> str:
    """What a person would call the run."""
    word = Path(config.model or "model").name or "model"
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in word)


def _model(config: LanguageConfig, model: Any, tokenizer: Any, adapter: bool) -> tuple[Any, Any]:
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


def _autocast(config: LanguageConfig, model: Any, given: Any) -> torch.dtype | None:
    """Lower precision for products, where float32 weights are trained and it was asked for."""
    if config.weights == "bfloat16" and any(p.requires_grad and p.dtype != torch.bfloat16 for p in model.parameters()):
        raise ConfigError("weights=bfloat16: the model that was given has others; load it with dtype=torch.bfloat16")
    if given is not None and not isinstance(given, str):
        low = [p for p in model.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
        if low and "dtype" not in config.model_fields_set and config.weights == "float32":
            warnings.warn(
                f"the model's trained weights are {low[0].dtype}, where small steps are rounded away; load it in "
                "float32, or train an adapter",
                stacklevel=4,
            )
        if "dtype" not in config.model_fields_set:
            return None
    wanted = loading.arithmetic(config)
    return None if wanted == torch.float32 or config.weights == "bfloat16" else wanted


def _prompts(config: LanguageConfig, chat: Chat, rows: Any, split: str) -> Prompts:
    """A data set in any of its forms."""
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
        answer_after=config.answer_after,
        prompt_template=config.prompt_template,
        max_length=config.max_prompt_length,
        overlong=config.overlong_prompts,
        shuffle=config.shuffle,
        seed=config.seed,
        num_proc=config.dataset_num_proc,
        origin=origin,
    )


def _data(config: LanguageConfig, chat: Chat, train: Any, held_out: Any) -> tuple[Prompts, Prompts | None]:
    train = config.dataset if train is None else train
    if isinstance(train, str) and not train:
        raise ConfigError("there are no prompts: give train_dataset, or set dataset to a file, hub id or built-in task")
    prompts = _prompts(config, chat, train, config.dataset_split)
    held_out = config.eval_dataset if held_out is None else held_out
    split = config.eval_split or ("test" if held_out is None else "train")
    if held_out is None and config.eval_split and not config.dataset:
        raise ConfigError("eval_split needs dataset or eval_dataset, by name")
    if held_out is None and (config.dataset in TASKS or config.eval_split):
        held_out = config.dataset
    return prompts, None if held_out is None else _prompts(config, chat, held_out, split)


def _rewards(config: LanguageConfig, functions: Any, processing_classes: Any) -> Rewards:
    given = functions if isinstance(functions, list | tuple) else [] if functions is None else [functions]
    if given and config.rewards:
        raise ConfigError("reward_funcs and the setting rewards say the same thing; give one of them")
    return Rewards(
        list(given) or list(config.rewards),
        processing_classes=processing_classes,
        timeout=config.reward_timeout,
        workers=config.reward_workers,
        model_device=device_of(config.device),
        trust_remote_code=config.trust_remote_code,
        settings=config.model_dump(),
        seed=config.seed,
    )


def _expect_names(config: LanguageConfig, names: Sequence[str]) -> None:
    """Settings that speak of rewards, before anything is computed."""
    if config.eval_by is not None and config.eval_by not in (*names, "environment"):
        raise ConfigError(f"eval_by={config.eval_by} is none of the rewards: {', '.join(names)}")
    weights, own = config.algorithm.reward_weights, len(names)
    if weights is not None and len(weights) not in (own, own + 1):  # an environment's own comes last
        raise ConfigError(f"reward_weights has {len(weights)} numbers for {own} rewards: {', '.join(names)}")


def _player(config: LanguageConfig, chat: Chat, tokens: Tokens, tools: Any, environment: Any) -> Player:
    if not (tools or environment or config.tools or config.environment):
        if "max_turns" in config.model_fields_set:
            raise ConfigError("max_turns has no effect here: it needs tools or an environment")
        return OneAnswer(tokens)
    from grpo.language.turns.conversation import make_conversation  # here: most runs have one answer

    return make_conversation(config, chat, tokens, tools or config.tools, environment or config.environment)


def _reference(config: LanguageConfig, policy: LanguagePolicy, follows: bool, fresh: bool, given: Any) -> Any:
    recipe = config.algorithm
    if not recipe.beta or recipe.kl_to == "old":
        if given is not None:
            raise ConfigError("ref_model is not used: beta is 0, or the KL is not to a reference")
        return None
    if given is not None:
        return reference.FrozenCopy(policy, given)
    return reference.make(policy, follows, fresh)


def _optimizer(config: LanguageConfig, policy: LanguagePolicy, given: Any) -> torch.optim.Optimizer:
    if given is not None:
        return given
    tensors = list(policy.parameters().values())
    if not tensors:
        raise ConfigError("the model has no weights that can be trained; set requires_grad, or give peft_config")
    how: dict[str, Any] = {
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
    }
    if config.weights == "bfloat16":
        return RoundedAdamW(tensors, seed=config.seed, **how)
    return torch.optim.AdamW(tensors, fused=True if all(p.is_cuda for p in tensors) else None, **how)


def _schedule(config: LanguageConfig, given: Any) -> Callable[[int, int | None], float]:
    """The factor on the learning rate at a step, given how many there will be."""
    if given is not None:
        lambdas = getattr(given, "lr_lambdas", None)
        if not lambdas:
            raise ConfigError("a scheduler must be a LambdaLR (transformers.get_scheduler), so that a run can resume")
        return lambda step, total: float(lambdas[0](step))
    if config.lr_schedule == "constant" and not config.warmup_steps and not config.warmup_ratio:
        return lambda step, total: 1.0
    from transformers import get_scheduler

    name = {"constant": "constant_with_warmup"}.get(config.lr_schedule, config.lr_schedule)
    dummy = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    def factor(step: int, total: int | None) -> float:
        needs = name != "constant_with_warmup"
        if total is None and (needs or config.warmup_ratio):
            raise ConfigError(f"lr_schedule={config.lr_schedule} needs to know the length of the run; call train()")
        warmup = config.warmup_steps or round(config.warmup_ratio * (total or 0))
        made = get_scheduler(name, dummy, num_warmup_steps=warmup, num_training_steps=total)
        return float(made.lr_lambdas[0](step))

    try:
        factor(0, 10)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"lr_schedule={config.lr_schedule}: {error}") from None
    return factor
