"""Plain-language warnings: what the numbers of the last steps say, and what to do about it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from grpo.run.folder import Row
from grpo.view.series import Series

WINDOW = 10
"""Steps that a verdict looks at."""
LEVELS = ("bad", "warn", "info")
LOUD = {
    "checkpoint_damaged": "warn",
    "checkpoint_failed": "bad",
    "diverged": "bad",
    "failure_budget_spent": "bad",
    "metrics_failed": "bad",
    "samples_off": "warn",
    "sink_failed": "warn",  # what older runs call it
    "tracker_failed": "warn",
    "versions_changed": "info",
}
"""Events that are worth a line of their own."""

Finding = tuple[str, str, str, str, str]
"""Level, code, metric, what it is, what to do."""


def warnings(
    metrics: Series,
    task: str,
    events: Sequence[Row] = (),
    recipe: Mapping[str, object] | None = None,
    learned: bool = False,
    reached: bool = False,
) -> list[Row]:
    """The most serious first. learned: its score has risen; reached: to what was asked for.

    A policy that has learned what there is gives right answers alone, and always the same: that is no fault.
    """
    names = ("level", "code", "metric", "message", "remedy")
    mastered = reached or (learned and _silent(metrics) >= 0.5 and _side(metrics.values("reward")) == RIGHT)
    checks = (
        _signal(metrics, task, mastered, (recipe or {}).get("credit") == "reward_to_go"),
        _ends(metrics, task),
        _entropy(metrics, mastered),
        _distance(metrics),
        _gradient(metrics),
        _counts(metrics),
    )
    found = [dict(zip(names, finding, strict=True)) | {"step": metrics.step} for check in checks for finding in check]
    return sorted([*found, *_of_events(events)], key=lambda item: LEVELS.index(item["level"]))


def endings(summary: Row, rate: float | None, error: str | None, resumable: bool) -> Iterator[Row]:
    """A run that is over without being done, or that says nothing; `error`: what it ended with, in a line."""
    told = {"metric": None, "step": summary["step"]}
    if summary["state"] == "crashed":
        why = f": {error}" if error else f" ({summary['reason']})" if summary["reason"] else ""
        goes_on = (
            f"grpo train --resume {summary['name']} goes on from its last checkpoint, with --trust if it names code of "
            "yours (rewards, an environment)"
        )
        remedy = goes_on if resumable else "it kept no checkpoint: start it anew once this is mended"
        message = f"the run ended before it was done{why}"
        yield told | {"level": "bad", "code": "crashed", "message": message, "remedy": remedy}
    silent = time.time() - (summary["updated"] or time.time())
    if summary["state"] == "running" and rate is not None and silent > max(60.0, 10 * rate):
        message = f"no step for {silent:.0f} s; one usually takes {rate:.3g} s"
        remedy = "an evaluation, a slow reward, or a process that hangs"
        yield told | {"level": "warn", "code": "stalled", "message": message, "remedy": remedy}


RIGHT, WRONG = " (mostly right)", " (mostly wrong)"


def _signal(m: Series, task: str, mastered: bool, to_go: bool) -> Iterator[Finding]:
    """Rewards that cannot tell tries apart; with rewards to go, tries of one return differ in when they got it."""
    reward, silent = m.values("reward"), _silent(m)
    if len(reward) >= WINDOW and np.ptp(reward) == 0 and not m.values("reward_std").any():
        what = f"every reward of every step so far is {reward[0]:.4g}: nothing can be learned"
        yield "bad", "flat", "reward", what, "read some samples: is the reward right, is the task too hard?"
    elif silent >= 0.5 and not to_go:
        what = f"{100 * silent:.0f} % of the groups have no signal{_side(reward)}: their tries all got the same reward"
        level = "info" if mastered else "bad" if silent >= 0.9 else "warn"
        if mastered:
            remedy = "little is left to be learned here: the run may end, or go on with a harder task"
        elif task == "language":
            remedy = "larger groups, a higher temperature, prompts of another difficulty, no_signal=resample"
        else:
            remedy = "larger groups, an entropy bonus (entropy_coef), a finer reward"
        yield level, "no_signal", "frac_reward_zero_std", what, remedy


def _silent(m: Series) -> float:
    """The share of the last groups whose tries all got the same."""
    recent = m.values("frac_reward_zero_std", WINDOW)
    return float(recent.mean()) if len(recent) else 0.0


def _side(reward: np.ndarray) -> str:
    """Whether silent groups are rather right or wrong, by where the mean reward is in its range so far."""
    if not len(reward) or np.ptp(reward) == 0:
        return ""
    high = reward[-WINDOW:].mean() > (reward.max() + reward.min()) / 2
    return RIGHT if high else WRONG


def _ends(m: Series, task: str) -> Iterator[Finding]:
    """Completions that the limit cut off; an episode that reaches its time limit is often the aim."""
    name = "completions/clipped_ratio"
    cut = m.values(name, WINDOW)
    one_token = len(lengths := m.values("completions/mean_length", WINDOW)) and lengths.max() <= 1  # all that was asked
    if task == "language" and len(cut) and (share := cut.mean()) >= 0.2 and not one_token:
        what = f"{100 * share:.0f} % of the completions are truncated: raise the limit"
        remedy = "max_completion_length sets it; mask_truncated_completions leaves such completions out"
        yield "bad" if share >= 0.5 else "warn", "truncated", name, what, remedy


def _entropy(m: Series, mastered: bool) -> Iterator[Finding]:
    """A policy that has no choice left, or no opinion."""
    entropy = m.values("entropy")
    if len(entropy) < WINDOW:
        return
    first, now = entropy[:5].mean(), entropy[-5:].mean()
    if first > 0.05 and now < 0.1 * first and mastered:
        what = f"entropy fell from {first:.3g} to {now:.3g}: it is sure of what it does"
        yield (
            "info",
            "entropy",
            "entropy",
            what,
            "right where nothing else is to be found; entropy_coef keeps it trying",
        )
    elif first > 0.05 and now < 0.1 * first:
        what = f"entropy collapsed: {first:.3g} at first, {now:.3g} now"
        yield "bad", "entropy", "entropy", what, "entropy_coef, a larger epsilon_high, clip_cov, a lower learning_rate"
    elif first > 0 and now > max(3 * first, first + 1):
        what = f"entropy explodes: {first:.3g} at first, {now:.3g} now"
        yield "warn", "entropy", "entropy", what, "a lower learning_rate or entropy_coef"


def _distance(m: Series) -> Iterator[Finding]:
    """A policy that runs away from the reference, or from the one that sampled."""
    for name, limit, remedy in (
        ("kl", 0.5, "lower learning_rate, raise beta"),
        ("approx_kl", 0.1, "fewer passes, a lower learning_rate, target_kl"),
        ("mismatch_kl", 0.2, "lower staleness or learning_rate; at once: the sampler does not run this model"),
    ):
        values = m.values(name)
        if len(values) > 1 and (now := values[-3:].mean()) > max(limit, 10 * float(np.median(values[:-1]))):
            yield "bad", "kl", name, f"{name} blows up: {now:.3g} in the last steps", remedy
    ratio, held = m.values("ratio", 3), m.values("clip_ratio/region_mean", WINDOW)
    ratio = ratio[ratio > 0]  # a step whose tries all failed has none
    if len(ratio) and abs(ratio.mean() - 1) > 0.5:
        what = f"the policy is far from the one that sampled: mean ratio {ratio.mean():.3g}"
        yield "warn", "ratio", "ratio", what, "fewer passes, max_ratio, target_kl"
    if len(held) and held.mean() > 0.3:
        what = f"{100 * held.mean():.0f} % of the decisions are clipped"
        yield "warn", "clipped", "clip_ratio/region_mean", what, "fewer passes, a lower learning_rate"


def _gradient(m: Series) -> Iterator[Finding]:
    """A gradient that is not there, or too large."""
    norm = m.values("grad_norm")
    if len(norm) >= WINDOW and not norm[-WINDOW:].any():
        what = f"the gradient was 0 for {WINDOW} steps: nothing is learned"
        yield "bad", "grad", "grad_norm", what, "look at frac_reward_zero_std and at the samples"
    elif len(norm) >= 2 * WINDOW and (usual := float(np.median(norm[:-3]))) * 10 < norm[-3:].mean() and usual:
        what = f"the gradient is {norm[-3:].mean() / usual:.0f} times its usual size"
        yield "warn", "grad", "grad_norm", what, "a lower learning_rate"


def _counts(m: Series) -> Iterator[Finding]:
    """What failed or was left out."""
    if failed := m.values("failed", WINDOW).sum():
        what = f"{failed:.0f} tries of the last {WINDOW} steps failed"
        yield "warn", "failed", "failed", what, "the events and the groups with the badge reward_error name them"
    if skipped := m.values("updates_skipped", WINDOW).sum():
        what = f"{skipped:.0f} updates of the last {WINDOW} steps were left out"
        remedy = "non-finite numbers, or a ratio above max_ratio: lower learning_rate"
        yield "bad", "skipped", "updates_skipped", what, remedy
    if m.values("microbatch_halvings", 1).any():
        what = "micro-batches were halved for want of memory; the gradient is the same"
        yield "info", "memory", "microbatch_halvings", what, "set tokens_per_microbatch or rows_per_microbatch"


def _of_events(events: Sequence[Row]) -> Iterator[Row]:
    """The last of each kind that matters."""
    last = {row["event"]: row for row in events if isinstance(row.get("event"), str) and row["event"] in LOUD}
    for name, row in last.items():
        told = {"level": LOUD[name], "code": name, "metric": None, "remedy": "", "step": row.get("step")}
        yield told | {"message": str(row.get("message"))}
