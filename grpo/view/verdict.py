"""Is it learning, is something wrong: the score at first and now against its scatter, and what else was looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from grpo.run.folder import Row
from grpo.view.advice import LEVELS, WINDOW
from grpo.view.files import shown
from grpo.view.series import Series

LEAST = 4
"""Values before which nothing is said of a curve."""
FEW = 10
"""Values up to which going the same way each time is enough, and which cannot rule out what a longer curve shows."""
FULL = 0.9
"""Of a share, where little is left to gain."""
EPISODES = 30
"""Played before which their mean return says nothing: that of a few is carried on from step to step."""
SURE = 3.0
"""Standard errors that a change must exceed to be one."""
RUNNING = {
    "up": "Learning",
    "down": "Getting worse",
    "lost": "Losing what it had learned",
    "flat": "Not learning so far",
    "early": "Too early to tell",
}
ENDED = {
    "up": "It learned",
    "down": "It got worse",
    "lost": "It lost what it had learned",
    "flat": "It did not learn",
    "early": "Too short to tell",
}


def verdict(metrics: Series, names: Sequence[str], running: bool, reached: bool = False) -> Row | None:
    """Of the first of these metrics that tells, `-name` where less is better; None: none was measured.

    One that was measured often enough tells where it went somewhere, or was measured more than a few times.
    reached: the run has ended because its score is what was asked for.
    """
    measured = [name for name in names if len(metrics.values(name.removeprefix("-")))]
    if not measured:
        return None
    often = [name for name in measured if len(metrics.values(name.removeprefix("-"))) >= LEAST]
    chosen = next((name for name in often if reached or _tells(metrics, name)), (often or measured)[0])
    metric, sign = chosen.removeprefix("-"), -1.0 if chosen.startswith("-") else 1.0
    column = np.array(metrics.columns[metric])
    known = np.isfinite(column)
    values, steps = column[known], np.array(metrics.steps)[known]
    way, first, peak, last, top = _way(sign * values)
    after, unit = len(values), "step"
    if reached:
        way, first, last = "up", float(sign * values[0]), float(sign * values[-1])
    elif metric == "return" and len(played := metrics.values("episodes", 1)) and played[-1] < EPISODES:
        way, last, after, unit = "early", float(sign * values[-1]), int(played[-1]), "episode"
    told = {
        "metric": metric,
        "way": way,
        "count": len(values),
        "first": shown(sign * first),
        "last": shown(sign * last),
    }
    says = f"{metric} {_number(sign * first)} at first, {_number(sign * last)} now"
    if way == "early":
        says = f"{metric} {_number(sign * last)} after {after} {unit}{'s' * (after > 1)}"
    elif way == "lost":
        says = f"{metric} {_number(sign * peak)} by step {steps[top]:.0f}, {_number(sign * last)} now"
    if not running:
        says = says.removesuffix(" now") + " at the end" * says.endswith(" now")
    return told | {"title": (RUNNING if running else ENDED)[way], "says": says}


def _tells(metrics: Series, name: str) -> bool:
    """A few looks that are all near 1, and went nowhere from there, leave it to a longer curve."""
    values = (-1.0 if name.startswith("-") else 1.0) * metrics.values(name.removeprefix("-"))
    full = bool(values.min() >= FULL and values.max() <= 1.0)
    return len(values) > FEW or not full or _way(values)[0] != "flat"


def _way(values: np.ndarray) -> tuple[str, float, float, float, int]:
    """Where values went, the more the better: how, their means at first, at their height and at last, and its place.

    How far they scatter is told by the steps from one to the next, which a slow rise hardly widens.
    """
    count = len(values)
    if count < LEAST:
        return "early", float(values[0]), float(values.max()), float(values[-1]), int(values.argmax())
    width = min(max(count // 4, 2), 10)
    means = np.convolve(values, np.ones(width) / width, "valid")
    first, last, top = float(means[0]), float(means[-1]), int(means.argmax())
    scatter = 1.4826 * float(np.median(np.abs(np.diff(values)))) / np.sqrt(2.0)
    sure = max(SURE * scatter * np.sqrt(2.0 / width), 0.01 * float(np.ptp(values)))
    peak = float(means[top])
    if peak - last > max(sure, 0.5 * (peak - first)) and peak - first > sure:
        way = "lost"
    else:
        # A few values that rise each time, steeply, look as if they scattered.
        sure = 0.0 if count <= FEW and (np.all(np.diff(values) > 0) or np.all(np.diff(values) < 0)) else sure
        way = "up" if last - first > sure else "down" if first - last > sure else "flat"
    return way, first, peak, last, min(top + width - 1, count - 1)


def looked_at(metrics: Series, task: str, warnings: Sequence[Row]) -> list[Row]:
    """What was checked of the last steps, each with what was found and the level of the worst warning about it."""
    found = []
    for name, about, text in _checks(metrics, task):
        levels = [warning["level"] for warning in warnings if warning["metric"] in about]
        found.append(
            {"name": name, "metric": about[0], "text": text, "level": min(levels, key=LEVELS.index, default="ok")}
        )
    return found


def _checks(m: Series, task: str) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Name, metrics and finding of each."""
    if len(silent := m.values("frac_reward_zero_std", WINDOW)):
        text = f"rewards differ in {100 * (1 - silent.mean()):.0f} % of the groups"
        yield "signal", ("frac_reward_zero_std", "reward"), text
    if len(entropy := m.values("entropy")):
        text = f"entropy {_number(entropy[:5].mean())} at first, {_number(entropy[-5:].mean())} now"
        yield "choices", ("entropy",), text
    distance = next((name for name in ("kl", "approx_kl") if len(m.values(name, WINDOW))), None)
    if distance is not None:
        text = f"{distance} {_number(m.values(distance, WINDOW).mean())}"
        yield "distance", (distance, "kl", "approx_kl", "ratio", "clip_ratio/region_mean"), text
    if len(norm := m.values("grad_norm", WINDOW)):
        yield "gradient", ("grad_norm", "updates_skipped"), f"norm {_number(norm.mean())}"
    if task == "language" and len(cut := m.values("completions/clipped_ratio", WINDOW)):
        yield "endings", ("completions/clipped_ratio",), f"{100 * cut.mean():.0f} % of the completions were cut off"
    if len(failed := m.values("failed", WINDOW)):
        text = "no try failed" if not failed.any() else f"{failed.sum():.0f} tries failed"
        yield "tries", ("failed",), text


def _number(value: float) -> str:
    value += 0.0  # no minus before a zero
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
