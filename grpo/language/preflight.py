"""Before the first step: try the rewards on texts whose worth is known, and say plainly what looks wrong.

Shown to every reward: each row's own answer in several forms (the best one counts), an empty completion, nonsense,
and a few completions of the model where there are some. Neither weights nor the randomness of training are touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from grpo.config import ConfigError
from grpo.language.config import LanguageConfig
from grpo.language.rewards import TAKEN_FOR_MESSAGES, Rewards, messages
from grpo.language.rewards.calling import ANSWER, Call, Verdict
from grpo.language.rewards.maths import Correctness, too_large
from grpo.language.samples import Prompt, Sample

MOST_PROMPTS = 8
FORMS = (
    "{}",
    "The answer is {}",
    "#### {}",
    "\\boxed{{{}}}",
    "<answer>{}</answer>",
    "<think>\nLet me see.\n</think>\n<answer>\n{}\n</answer>",
    "<reasoning>\nLet me see.\n</reasoning>\n<answer>\n{}\n</answer>",
)
"""Ways to give an answer."""
NONSENSE = "wug blicket dax, fep toma"
FAR_APART = 10.0
"""Ratio of two rewards' ranges from which the smaller one hardly counts."""
Level = Literal["note", "warning", "problem"]
Shown = list[tuple[str, Sample, Verdict]]
"""What one reward said: kind of text, sample, verdict."""


@dataclass(frozen=True)
class Finding:
    """Something to know before training."""

    level: Level
    what: str
    remedy: str = ""


def check(
    rewards: Rewards,
    prompts: Sequence[Prompt],
    completions: Sequence[Sample] | None = None,
    *,
    max_completion_length: int,
    tokenizer: Any,
    config: LanguageConfig | None = None,
) -> list[Finding]:
    """Try the rewards, worst findings first."""
    prompts = list(prompts)[:MOST_PROMPTS]
    completions = list(completions or ())[: MOST_PROMPTS * 8]
    trial = _Trial(rewards, prompts, completions, tokenizer)
    with _same_randomness():
        try:
            found = [finding for k in range(len(rewards)) for finding in trial.findings(k)]
        except ConfigError as error:  # a parameter that nothing provides, a chat without a template
            found = [Finding("problem", str(error))]
        else:
            found += _scales(trial, config)
    found += _lengths(prompts, completions, max_completion_length, tokenizer) + _settings(config)
    if any(isinstance(call.function, Correctness) for call in rewards.calls):
        found += _too_large(prompts, completions)
    return sorted(found, key=lambda finding: ("problem", "warning", "note").index(finding.level))


def report(findings: Sequence[Finding]) -> str:
    """The findings as text, a line each and its remedy below."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level}: {finding.what}")
        lines += [f"    {finding.remedy}"] if finding.remedy else []
    return "\n".join(lines)


COMPLETION = "a completion"
SLOW = "no answer in"
"""What the pool says of a call that ran out of time."""


class _Trial:
    """The texts, and what each reward said of them."""

    def __init__(
        self, rewards: Rewards, prompts: Sequence[Prompt], completions: Sequence[Sample], tokenizer: Any
    ) -> None:
        self.rewards, self.completions, self._tokenizer = rewards, completions, tokenizer
        self._prompts = prompts
        self._kinds = {
            "the reference": self.references(prompts),
            "an empty completion": [self._sample(prompt, "") for prompt in prompts],
            "nonsense": [self._sample(prompt, NONSENSE) for prompt in prompts],
            COMPLETION: list(completions),
        }
        self._shown: list[Shown] | None = None

    def _sample(self, prompt: Prompt, text: str) -> Sample:
        ids = torch.tensor(_ids(self._tokenizer, text), dtype=torch.int64)
        said = [{"role": "assistant", "content": text}]
        return Sample(prompt, ids, torch.ones_like(ids, dtype=torch.bool), None, "eos", text, said)

    def references(self, prompts: Sequence[Prompt]) -> list[Sample]:
        """Each row's answer in all forms, and in full where the data has that."""
        made = []
        for prompt in prompts:
            answer, full = prompt.columns.get("answer"), prompt.columns.get("answer_full")
            texts = [] if answer is None else [form.format(answer) for form in FORMS]
            made += [self._sample(prompt, text) for text in texts + ([] if full is None else [str(full)])]
        return made

    @property
    def shown(self) -> list[Shown]:
        """A list for each reward. Kinds are judged apart: a batch that fails on one says nothing of the others."""
        if self._shown is None:
            self._shown = [[] for _ in self.rewards.calls]
            probe = next(({kind: samples[:1]} for kind, samples in self._kinds.items() if samples), {})
            said = [
                one for kind, some in probe.items() for one in self.rewards.verdicts(some, played=kind == COMPLETION)
            ]
            tried = [verdicts[0].error or "" for verdicts in said]
            hangs = any(SLOW in error for error in tried)
            for kind, samples in (probe if hangs else self._kinds).items():  # one that hangs would do so on every text
                found = self.rewards.verdicts(samples, played=kind == COMPLETION)
                for call, mine, verdicts in zip(self.rewards.calls, self._shown, found, strict=True):
                    if not call.asks_environments or kind == COMPLETION:  # made-up texts went through none
                        mine += [(kind, sample, verdict) for sample, verdict in zip(samples, verdicts, strict=True)]
        return self._shown

    def values(self, k: int) -> list[float]:
        """Every reward it gave."""
        return [verdict.value for _, _, verdict in self.shown[k] if verdict.value is not None]

    # --- what looks wrong with one reward ---------------------------------------------------------------------------

    def findings(self, k: int) -> list[Finding]:
        """What there is to say about it."""
        call, shown, values = self.rewards.calls[k], self.shown[k], self.values(k)
        failed = [item for item in shown if item[2].error is not None]
        if not shown:
            found = []
        elif failed:
            found = [self._failure(call, failed, len(shown))]
        elif not values:
            found = [self._silence(call, len(shown), len(shown))]
        else:
            found = self._judged(k, call) + self._partly_silent(call, shown)
        if values:
            found.append(Finding("note", f"{call.name} gave {_range(values)} over {len(values)} texts"))
        return found

    def _partly_silent(self, call: Call, shown: Shown) -> list[Finding]:
        """None for some texts of a row and numbers for others: a row may be none of its business, half a row is not."""
        silent = {sample.prompt.row for _, sample, verdict in shown if verdict.value is None}
        judged = {sample.prompt.row for _, sample, verdict in shown if verdict.value is not None}
        count = sum(verdict.value is None for _, _, verdict in shown)
        return [self._silence(call, count, len(shown))] if silent & judged else []

    def _silence(self, call: Call, count: int, of: int) -> Finding:
        """A problem where it is the only one to judge, and mostly does not."""
        alone = len(self.rewards.calls) == 1 and all(sample.reward is None for sample in self.completions)
        what = f"{call.name} returned None for {count} of {of} texts: a missing return?"
        remedy = "return a number for every text; None is for rows that are none of its business"
        return Finding("problem" if alone and 2 * count > of else "warning", what, remedy)

    def _failure(self, call: Call, failed: Shown, count: int) -> Finding:
        kind, sample, verdict = failed[0]
        what = (
            f"{call.name} fails on {len(failed)} of {count} texts; the first: row {sample.prompt.row}, {kind}: "
            f"{verdict.error}"
        )
        samples = [item[1] for item in failed]
        as_messages = any(sign in str(item[2].error) for item in failed for sign in TAKEN_FOR_MESSAGES)
        if as_messages and not call.wants_messages and self._works_with_messages(call, samples):
            return Finding(
                "problem",
                f"{call.name} reads completions as messages, completion[0]['content'], but they are strings here: "
                f"row {sample.prompt.row}: {verdict.error}",
                f"write `completion` where it says `completion[0]['content']`, or pass "
                f"grpo.language.rewards.messages({call.name}), which also works as a decorator",
            )
        slow = SLOW in (failed[0][2].error or "")
        if not slow and (
            mismatch := self._mismatch(call, lambda verdicts: all(v.error is None for v in verdicts), samples)
        ):
            return Finding("problem", f"{what}; {mismatch}", _convert(call))
        serious = any(item[0] in ("the reference", COMPLETION) for item in failed)
        return Finding("problem" if serious else "warning", what, "each such sample would be left out and counted")

    def _works_with_messages(self, call: Call, samples: Sequence[Sample]) -> bool:
        with Rewards([messages(call.function)], timeout=self.rewards.timeout, workers=1) as adapted:
            return all(verdict.error is None for verdict in adapted.verdicts(samples)[0])

    def _judged(self, k: int, call: Call) -> list[Finding]:
        shown, values = self.shown[k], self.values(k)
        best: dict[int, float] = {}
        worst: dict[int, float] = {}
        for kind, sample, verdict in shown:
            side = best if kind == "the reference" else worst if kind in ("nonsense", "an empty completion") else None
            if side is not None and verdict.value is not None:
                row = sample.prompt.row
                side[row] = max(verdict.value, side.get(row, verdict.value))
        rows = [row for row in best if row in worst]
        wrong = [row for row in rows if best[row] <= worst[row]] if call.reads_answer else []
        if wrong and (mismatch := self._mismatch(call, lambda found: _top(found) > max(worst.values()))):
            return [
                Finding("problem", f"{call.name} gives no reference more than nonsense; {mismatch}", _convert(call))
            ]
        found = []
        if len(set(values)) == 1 and len(values) > 1:
            always = "always zero" if values[0] == 0 else f"always {values[0]:g}"
            tried = "the references in several forms, nonsense, an empty completion" if best else "nonsense and nothing"
            found.append(
                Finding(
                    "warning",
                    f"{call.name} is {always} on all it was shown ({tried}{', completions' * bool(self.completions)}): "
                    "a constant teaches nothing",
                    "check what it looks for in a completion, and what it compares that with",
                )
            )
        elif wrong:
            row = wrong[0]
            found.append(
                Finding(
                    "warning",
                    f"{call.name} disagrees with its own reference in {len(wrong)} of {len(rows)} rows: row {row} has "
                    f"the answer {_short(_answer_of(shown, row))}, which gets {best[row]:g}, and nonsense gets "
                    f"{worst[row]:g}",
                    "check answer_column and answer_after, and how the function takes the answer out of a completion",
                )
            )
        real = [v.value for kind, _, v in shown if kind == COMPLETION and v.value is not None]
        if len(real) > 1 and len(set(real)) == 1 < len(set(values)):
            what = f"{call.name} gave all {len(real)} completions {real[0]:g}: nothing to learn from it yet"
            found.append(Finding("note", what, "easier prompts, a warm start, or partial credit give a first signal"))
        return found

    def _mismatch(
        self, call: Call, better: Callable[[Sequence[Verdict]], bool], samples: Sequence[Sample] | None = None
    ) -> str:
        """Whether all is well when the answer has another type: a sentence, or nothing."""
        k = self.rewards.names.index(call.name)
        for to, convert in (("a number", _as_number), ("text", _as_text)):
            changed = {prompt.row: _changed(prompt, convert) for prompt in self._prompts}
            prompts = [prompt for prompt in changed.values() if prompt is not None]
            if not prompts:
                continue
            if samples is None:
                tried = self.references(prompts)
            else:
                tried = [dataclasses.replace(s, prompt=changed.get(s.prompt.row) or s.prompt) for s in samples]
            if better(self.rewards.verdicts(tried, played=call.asks_environments)[k]):
                value = self._prompts[0].columns["answer"]
                return f"it gets the answer as {type(value).__name__} ({_short(value)}) and treats it as {to}"
        return ""


# --- what looks wrong with the whole --------------------------------------------------------------------------------


def _lengths(prompts: Sequence[Prompt], completions: Sequence[Sample], limit: int, tokenizer: Any) -> list[Finding]:
    found = []
    texts = [str(p.columns.get("answer_full", p.columns.get("answer"))) for p in prompts if "answer" in p.columns]
    lengths = [len(_ids(tokenizer, text)) for text in texts]
    if over := sum(length > limit for length in lengths):
        what = f"{over} of {len(lengths)} references are longer than max_completion_length={limit} tokens"
        found.append(Finding("warning", what, f"raise it; the longest reference has {max(lengths)} tokens"))
    cut = sum(sample.stop == "length" for sample in completions)
    if limit > 1 and cut * 2 > len(completions) > 0:  # of one token there is nothing left to cut
        what = f"{cut} of {len(completions)} completions were cut off at max_completion_length={limit} tokens"
        found.append(
            Finding("warning", what, "raise it, or ask for shorter answers; what is cut off cannot be rewarded")
        )
    return found


def _too_large(prompts: Sequence[Prompt], completions: Sequence[Sample]) -> list[Finding]:
    """Answers that correctness does not compare."""
    found = []
    rows = {p.row: reason for p in prompts if (reason := too_large(str(p.columns.get("answer", ""))))}
    for row, reason in list(rows.items())[:1]:
        what = f"correctness gives up on {len(rows)} of {len(prompts)} references; the first: row {row}: {reason}"
        found.append(
            Finding("warning", what, "only the same text would be right there; give answers in a shorter form")
        )
    if over := sum(bool(too_large(sample.text)) for sample in completions):
        what = (
            f"correctness gives up on {over} of {len(completions)} completions: their answers are too large to compare"
        )
        found.append(Finding("note", what, "they count as wrong; watch rewards/correctness/too_large"))
    return found


def _scales(trial: _Trial, config: LanguageConfig | None) -> list[Finding]:
    given = None if config is None else config.recipe.reward_weights
    weights = given if given is not None and len(given) == len(trial.rewards) else [1.0] * len(trial.rewards)
    ranges = {
        name: abs(weight) * (max(values) - min(values))
        for k, (name, weight) in enumerate(zip(trial.rewards.names, weights, strict=True))
        if (values := trial.values(k))
    }
    ranges = {name: width for name, width in ranges.items() if width > 0}
    if len(ranges) < 2:
        return []
    small, large = min(ranges, key=ranges.__getitem__), max(ranges, key=ranges.__getitem__)
    if ranges[large] < FAR_APART * ranges[small]:
        return []
    what = f"{large} spans {ranges[large]:.3g} and {small} only {ranges[small]:.3g}, weights included"
    return [Finding("note", what, "rewards of comparable size all get a say; set reward_weights")]


def _settings(config: LanguageConfig | None) -> list[Finding]:
    """What experience says about the settings."""
    if config is None:
        return []
    advice = (
        (
            not 0.7 <= config.temperature <= 1.0,
            f"temperature={config.temperature:g}",
            "0.7 to 1.0 keeps answers varied and sensible",
        ),
        (config.beta > 0.1, f"beta={config.beta:g}", "above 0.1 the policy hardly leaves the reference; try 0.04 or 0"),
        (
            config.group_size < 4,
            f"group_size={config.group_size} (num_generations)",
            "two answers are the least that can be compared; with 4 or more, fewer groups are all alike",
        ),
    )
    return [Finding("note", what, remedy) for holds, what, remedy in advice if holds]


# --- small things ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _same_randomness() -> Iterator[None]:
    """Put the global generators back: rewards that run in this process may draw from them."""
    kept = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.random.set_rng_state(kept[2])


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _changed(prompt: Prompt, convert: Callable[[Any], Any]) -> Prompt | None:
    """The prompt with its answer converted, under all names it may have; None: it cannot be."""
    columns: Mapping[str, Any] = prompt.columns
    new = convert(columns.get("answer"))
    if new is None:
        return None
    return dataclasses.replace(prompt, columns={**columns, **{name: new for name in ANSWER if name in columns}})


def _as_number(value: Any) -> Any:
    if not isinstance(value, str):
        return None
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value.replace(",", ""))
    return None


def _as_text(value: Any) -> Any:
    return None if value is None or isinstance(value, str) else str(value)


def _convert(call: Call) -> str:
    name = next((word for word in call.parameters if word in ANSWER), "answer")
    return f"convert it in {call.name}: float({name}) or str({name}), whichever it compares with"


def _top(verdicts: Sequence[Verdict]) -> float:
    return max((verdict.value for verdict in verdicts if verdict.value is not None), default=-np.inf)


def _answer_of(shown: Shown, row: int) -> Any:
    return next(sample.prompt.columns.get("answer") for _, sample, _ in shown if sample.prompt.row == row)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _range(values: Sequence[float]) -> str:
    low, high = min(values) + 0.0, max(values) + 0.0  # no -0
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
