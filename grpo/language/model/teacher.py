"""Who teaches a language model: another one, or itself with more in its prompt.

Another one reads the same tokens; `translated` has those that read the same text in other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo.capabilities import Teaches
from grpo.config import ConfigError
from grpo.credit import trajectory_reward
from grpo.language.config import LanguageConfig
from grpo.language.data.chat import Chat, prepare_tokenizer
from grpo.language.data.columns import FIELD, named_in
from grpo.language.data.prompts import Prompts
from grpo.language.model import earlier, loading, translated
from grpo.language.model.reference import FrozenAdapter, FrozenCopy
from grpo.language.model.served import ServedReader
from grpo.language.samples import Prompt, Sample
from grpo.language.scoring.modes import mode_of
from grpo.language.scoring.policy import LanguagePolicy
from grpo.language.scoring.probe import make_scorer
from grpo.language.scoring.scorer import Scorer
from grpo.models import device_of
from grpo.rollouts import Rollouts, Taught

GIB = 2**30
MOST_CHOICES = 4096
"""Of each token, and so much memory: a vocabulary is compared whole only where it is no larger."""


class Reader(Protocol):
    """Says of tokens how likely they would have been: a module that is here, or a server."""

    context: float
    """Tokens that it can read."""
    vocabulary: int
    """Tokens that it knows."""

    def read(self, samples: Sequence[Sample], steps: int, count: int) -> Taught:
        """(N, T) of the sampled tokens, and of the `count` likeliest at each place; 0: of none."""
        ...


class ModelReader:
    """A module, in passes of a limited number of tokens."""

    def __init__(self, scorer: Scorer) -> None:
        """scorer: of the teacher; the policy's own where it teaches itself."""
        self._scorer, self.vocabulary = scorer, scorer.vocabulary or int(scorer.head.weight.shape[0])
        self.context = float(getattr(scorer.causal.config.get_text_config(), "max_position_embeddings", None) or "inf")

    def read(self, samples: Sequence[Sample], steps: int, count: int) -> Taught:
        """As the scorer has it."""
        with mode_of(self._scorer.model, False), self._scorer.precision():
            if count:
                return self._scorer.likeliest(samples, steps, count)
            return Taught(self._scorer.in_parts(samples, steps).logp_NT)


class LanguageTeacher:
    """Says of what the student sampled how likely it would have been to it, once a step."""

    def __init__(self, reader: Reader, chat: Chat, config: LanguageConfig) -> None:
        self._reader, self._chat, self._config = reader, chat, config

    @torch.no_grad()
    def teach(self, rows: Rollouts) -> Taught:
        """Its log-probs of the sampled tokens, NaN where it has nothing to say; its likeliest ones where asked for."""
        recipe, steps = self._config.recipe, int(rows.mask_NT.shape[1])
        prompts = self._prompts(rows)
        told = [row for row, prompt in enumerate(prompts) if prompt is not None]
        samples = [replace(rows.inputs[row], prompt=prompts[row]) for row in told]
        logp_NT = torch.full(tuple(rows.mask_NT.shape), float("nan"), device=rows.mask_NT.device)
        count = recipe.teacher_top_k if recipe.teacher_over == "top_k" else 0
        choices: list[Tensor] = []
        if samples:
            found = self._reader.read(samples, steps, count)
            choices = [x for x in (found.choice_NTK, found.choice_logp_NTK) if x is not None]
            logp_NT[told] = found.logp_NT.to(logp_NT)
        if not count:
            return Taught(logp_NT)
        width = min(count, self._reader.vocabulary)
        placed = [torch.zeros(*rows.mask_NT.shape, width, dtype=kind, device=logp_NT.device)
                  for kind in (torch.int64, torch.float32)]  # fmt: skip
        for array, some in zip(placed, choices, strict=False):
            array[told] = some.to(array)
        return Taught(logp_NT, *placed)

    def _prompts(self, rows: Rollouts) -> list[Prompt | None]:
        """What the teacher reads before each completion; None: there is nothing to show it, or no room for that."""
        samples: Sequence[Sample] = rows.inputs
        sees = self._config.recipe.teacher_sees
        if sees == "prompt":
            return [sample.prompt for sample in samples]
        hints: list[str | None] = [""] * len(samples) if sees == "answer" else self._successes(rows)
        made: dict[tuple[int, str], Prompt] = {}
        found: list[Prompt | None] = []
        for sample, hint in zip(samples, hints, strict=True):
            if hint is None:
                found.append(None)
                continue
            key = (id(sample.prompt), hint)
            more = {} if sees == "answer" else {"answer": hint}
            made[key] = made.get(key) or self._hinted(sample.prompt, {**sample.prompt.columns, **more})
            fits = len(made[key].ids) + sample.length <= self._reader.context
            found.append(made[key] if fits else None)
        return found

    def _successes(self, rows: Rollouts) -> list[str | None]:
        """For each row the first other try of its group whose reward is high enough."""
        reward_N, weight_N = trajectory_reward(rows, self._config.recipe)
        good = ((reward_N >= self._config.teacher_success) & (weight_N > 0)).tolist()
        groups = rows.group_N.tolist()
        best: dict[int, list[int]] = {}
        for row, group in enumerate(groups):
            if good[row]:
                best.setdefault(group, []).append(row)
        others = [
            next((other for other in best.get(group, ()) if other != row), None) for row, group in enumerate(groups)
        ]
        return [None if other is None else rows.inputs[other].text for other in others]

    def _hinted(self, prompt: Prompt, told: Mapping[str, Any]) -> Prompt:
        """The same prompt with what is told in what the user says last."""
        for name in shown_columns(self._config):
            if told.get(name) in (None, ""):
                raise ConfigError(_untold(f"row {prompt.row}", name))

        def with_hint(text: str) -> str:
            known = {**told, "prompt": text}
            return FIELD.sub(lambda at: str(known[at[1]]) if at[1] else at[0][0], self._config.teacher_template)

        if prompt.messages is None:
            ids, text, messages = self._chat.render(with_hint(prompt.text))
            return replace(prompt, ids=ids, text=text, messages=messages)
        said = [dict(message) for message in prompt.messages]
        last = next((m for m in reversed(said) if m.get("role") == "user" and isinstance(m.get("content"), str)), None)
        if last is None:
            raise ConfigError(
                f"row {prompt.row}: its prompt has no user message in which the teacher could be told more"
            )
        last["content"] = with_hint(last["content"])
        text = self._chat.apply(said, answer=True)
        return replace(prompt, ids=self._chat.encode(text, bare=False), text=text, messages=said)


class AveragedReader(ModelReader):
    """The policy's module, or a copy of it, with weights that are kept beside it."""

    def __init__(self, kept: FrozenCopy | FrozenAdapter) -> None:
        super().__init__(kept.scorer)
        self._kept = kept

    def read(self, samples: Sequence[Sample], steps: int, count: int) -> Taught:
        """As it says with those weights."""
        with self._kept.active():
            return super().read(samples, steps, count)


class SelfAverage:
    """The model as an average of what it was: after each step it keeps `decay` of itself, the rest is new."""

    def __init__(self, kept: FrozenCopy | FrozenAdapter, decay: float) -> None:
        self._kept, self._decay = kept, decay

    def keep_up(self, policy: Mapping[str, Tensor]) -> None:
        """τ ← decay·τ + (1 − decay)·π."""
        self._kept.sync(policy, 1.0 - self._decay)

    def begin(self, policy: Mapping[str, Tensor]) -> None:
        """Be the policy as it is now."""
        self._kept.sync(policy, 1.0)

    def parameters(self) -> Mapping[str, Tensor]:
        """What a checkpoint keeps of it."""
        return self._kept.parameters()


class AveragedTeacher(LanguageTeacher):
    """Teaches with an average of the policy's weights."""

    def __init__(self, policy: LanguagePolicy, chat: Chat, config: LanguageConfig) -> None:
        adapted = hasattr(policy.model, "disable_adapter")
        kept = FrozenAdapter(policy, "teacher") if adapted else FrozenCopy(policy)
        super().__init__(AveragedReader(kept), chat, config)
        self.average = SelfAverage(kept, config.teacher_decay)


def make_teacher(
    config: LanguageConfig, given: Any, policy: LanguagePolicy, chat: Chat, prompts: Prompts, answers: bool = True
) -> Teaches | None:
    """The teacher that settings and recipe ask for; `given`: a loaded model, or whoever teaches, in its place.

    answers: every row is one answer to a prompt, not a conversation.
    """
    recipe = config.recipe
    if recipe.teacher_sees == "success" and recipe.teacher_coef and config.select is not None:
        raise ConfigError("teacher_sees=success shows tries of the whole group, and select leaves some out; drop one")
    if not recipe.teacher_coef:
        if given is not None:
            raise ConfigError("teacher_model has no effect here: it needs teacher_coef > 0, or a recipe such as opd")
        return None
    if isinstance(given, Teaches):
        return given
    if given is not None and config.teacher_decay:
        raise ConfigError("teacher_decay needs a model that teaches itself; leave teacher_model out")
    expect_told(config, prompts)
    vocabulary = policy.scorer.head.weight.shape[0]
    if recipe.teacher_over == "top_k" and min(recipe.teacher_top_k, vocabulary) > MOST_CHOICES:
        raise ConfigError(
            f"teacher_top_k={recipe.teacher_top_k} of every token takes too much memory; 64 is usual, "
            f"{MOST_CHOICES} the most"
        )
    if given is None and config.teacher is None:
        if recipe.teacher_sees == "prompt":
            raise ConfigError(
                f'recipe "{recipe.name}" needs a teacher: give --teacher PATH (a folder, a hub id or a run, or '
                "http://host:8000 of a vLLM server), or have the model teach itself: teacher_sees=answer"
            )
        if config.teacher_decay:
            return AveragedTeacher(policy, chat, config)
        return LanguageTeacher(ModelReader(policy.scorer), chat, config)
    if given is None and str(config.teacher).startswith(("http://", "https://")):
        return LanguageTeacher(ServedReader(config, chat.tokenizer, vocabulary), chat, config)
    if given is not None:
        return LanguageTeacher(_same_tokens(given, policy), chat, config)
    named, saved = model_of(config)
    theirs = _of_the_teacher(lambda: earlier.tokenizer_of(named))
    differs = translated.difference(chat.tokenizer, theirs)
    if differs is None:
        return LanguageTeacher(_same_tokens(_loaded(config, named, saved), policy), chat, config)
    translated.expect_translatable(config, differs, answers)
    asked, model = translated.chat_of(config, theirs), _loaded(config, named, saved)
    tokens = prepare_tokenizer(theirs, model.config, getattr(model, "generation_config", None))
    reader = ModelReader(_scorer(model, policy, tokens.pad))
    return LanguageTeacher(translated.TranslatedReader(reader, chat, asked, tokens.end), chat, config)


def _same_tokens(model: Any, policy: LanguagePolicy) -> ModelReader:
    """A teacher that reads the student's tokens."""
    _expect_room(model, policy)
    scorer, vocabulary = _scorer(model, policy, policy.scorer.pad), policy.scorer.head.weight.shape[0]
    scorer.vocabulary = vocabulary if scorer.head.weight.shape[0] > vocabulary else None
    return ModelReader(scorer)


def _scorer(model: Any, policy: LanguagePolicy, pad: int) -> Scorer:
    model.requires_grad_(False).eval()
    mine = policy.scorer
    return make_scorer(model, mine.temperature, "auto", mine.set_budget, pad, mine.autocast)


def shown_columns(config: LanguageConfig) -> set[str]:
    """Columns of a row that the teacher is told; where it is shown a try that succeeded, that is the answer."""
    named = named_in(config.teacher_template) - {"prompt"}
    return {"prompt": set(), "answer": named, "success": named - {"answer"}}[config.recipe.teacher_sees]


def expect_told(config: LanguageConfig, prompts: Prompts) -> None:
    """Refuse a template for which rows have no column, and a row in which that is empty; a stream's as they come."""
    names = shown_columns(config)
    known = prompts.told
    if unknown := sorted(names - {*known}):
        raise ConfigError(
            f"teacher_template: no column {unknown[0]}; found {', '.join(known) or 'none'} — name one of them"
            + (" in answer_column" if unknown[0] == "answer" else ", or double the braces that are meant as text")
        )
    if (found := prompts.without(names)) is not None:
        raise ConfigError(_untold(*found))


def _untold(place: str, name: str) -> str:
    remedy = "set answer_column" if name == "answer" else "fill it in, or leave the row out"
    return f"{place} has no {name} that the teacher could be shown (teacher_template); {remedy}"


def model_of(config: LanguageConfig) -> tuple[LanguageConfig, Path | None]:
    """Settings whose model is the teacher's, and a checkpoint where its weights are in one.

    What is named, or what the named run left; one that left no whole model teaches with its newest checkpoint.
    """
    place = str(config.teacher)
    left = Path(place) / "model"
    place = str(left if (left / "config.json").is_file() else place)
    if (saved := earlier.checkpoint_at(place)) is not None:
        return earlier.settings_of(saved, config), saved
    _expect_model(place, str(config.teacher))
    return config.but(model=place, revision=None, tokenizer=None), None


def _loaded(config: LanguageConfig, named: LanguageConfig, saved: Path | None) -> Any:
    """The model that `teacher` names, as `model_of` found it."""
    size = _stored(named)
    if device_of(config.device) == "cuda" and size > torch.cuda.mem_get_info()[0]:
        free = f"{torch.cuda.mem_get_info()[0] / GIB:.1f} GiB of the GPU are free"
        raise ConfigError(f"{_too_large(config, size)} and {free}; {_SMALLER}")
    try:
        if saved is not None:
            return earlier.load(named, saved)
        return _of_the_teacher(lambda: loading.load_model(named, trained_whole=False))
    except torch.OutOfMemoryError:
        raise ConfigError(f"{_too_large(config, _stored(named))}; {_SMALLER}") from None  # by now it was fetched


def _stored(named: LanguageConfig) -> int:
    """Bytes of the model's weights on this machine, in a folder or in the hub's cache; 0: none are known."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    folder = Path(named.model)
    if not folder.is_dir():
        try:
            found = try_to_load_from_cache(named.model, "config.json", revision=named.revision)
        except HFValidationError:  # a .gguf file, or a model from scratch
            return 0
        if not isinstance(found, str):
            return 0
        folder = Path(found).parent
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _too_large(config: LanguageConfig, size: int) -> str:
    return f"teacher={config.teacher} does not fit" + (f": its weights take {size / GIB:.1f} GiB" if size else "")


def _of_the_teacher(load: Callable[[], Any]) -> Any:
    """What is loaded; where that fails, with whose model or tokenizer it is."""
    try:
        return load()
    except ConfigError as error:
        raise ConfigError(f"the teacher's {error}") from None


def _expect_model(place: str, name: str) -> None:
    """Refuse what is no model by itself: nothing, a run without one, an adapter alone."""
    if not Path(place).exists():
        if place.startswith((".", "/", "~")) or place.count("/") > 1:  # a hub id is owner/name
            raise ConfigError(f"teacher={name}: there is no such folder")
        return
    found = [folder for folder in (Path(place), Path(place) / "model") if (folder / "adapter_config.json").is_file()]
    if found and not (Path(place) / "config.json").is_file():
        raise ConfigError(
            f"teacher={name} has an adapter without its model ({found[0]}); write the whole model with "
            "`grpo export RUN --merge --to FOLDER` and name that folder"
        )
    if Path(place).is_dir() and not (Path(place) / "config.json").is_file():
        raise ConfigError(
            f"teacher={name} has no model in it (config.json); name a model's folder, or a run that ended"
        )


_SMALLER = "take a smaller one, a LoRA adapter for the student (lora_rank), or quantize"


class NoTeacher:
    """In the place of a teacher that a run has and somebody who only talks to its model does not need."""

    def teach(self, rows: Rollouts) -> Taught:
        """Nothing is learned here."""
        raise ConfigError("this model was opened to be talked to, without its teacher; train it with grpo train")


def _expect_room(model: Any, policy: LanguagePolicy) -> None:
    """A teacher whose head is narrower than the student's has no number for some of its tokens."""
    mine, theirs = policy.scorer.head.weight.shape[0], model.get_output_embeddings().weight.shape[0]
    if theirs < mine:
        raise ConfigError(
            f"the teacher has {theirs:,} tokens in its head, the student {mine:,}; take one with as many, or name its "
            "folder in `teacher`, so that its own tokenizer is found"
        )
