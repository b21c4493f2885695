"""docs/recipes.md: which recipe to choose, what was measured of them, and the table itself.

`docs/make_pages.py` asks for the text; `python docs/recipes_page.py` draws figures/recipes.png, which is committed.
"""

import json
from pathlib import Path
from typing import Any

from grpo.recipes import RECIPES, table_markdown

RESULTS = Path(__file__).parents[1] / "bench" / "results"

CHOOSE: dict[str, tuple[str, str, str]] = {
    "plain": (
        "no standard deviation, KL to the reference",
        "as a control; small steps near the start model",
        "a reference",
    ),
    "grpo": ("advantages in units of the group's deviation", "the default, verifiable rewards", "–"),
    "bnpo": ("every token counts alike", "long and short answers in one batch", "–"),
    "dr_grpo": ("no deviation, a constant length", "answers that grow longer without reason", "you name `length`"),
    "dapo": (
        "clips higher upwards, drops groups without signal",
        "many groups all right or all wrong",
        "refilling samples more",
    ),
    "gspo": (
        "one ratio a sequence",
        "mixture-of-experts models, several passes a batch",
        "tiny clip range: little moves a step",
    ),
    "gmpo": ("geometric mean of the clipped ratios", "outlier tokens", "–"),
    "cispo": ("clips the weight, never the gradient", "rare tokens that matter, several passes", "–"),
    "sapo": ("a soft gate in place of the clip", "off-policy minibatches", "two temperatures to set"),
    "luspo": ("GSPO that does not favour short answers", "GSPO whose answers shrink", "–"),
    "vespo": ("weights by the whole sequence, in closed form", "stale samples", "four numbers to set"),
    "dppo": ("a trust region by total variation", "large vocabularies, several passes", "–"),
    "gpg": ("plain policy gradient, scaled up for lost groups", "one pass a batch", "no protection off-policy"),
    "rloo": (
        "each try against the others; KL in the reward",
        "few tries a prompt, a reference that matters",
        "a reference",
    ),
    "reinforce++": ("no groups; whitened over the batch", "one try a prompt", "noisier than a group"),
    "reinforce++_baseline": (
        "group mean, then whitened over the batch",
        "rewards of very different prompts",
        "groups without signal move, too",
    ),
    "maxrl": (
        "divides by the group's mean: towards log of the success rate",
        "hard prompts with rare successes",
        "rewards must not be negative",
    ),
    "gdpo": ("each reward is compared by itself", "several rewards of different sizes", "–"),
    "opo": ("a baseline weighted by length", "lengths that differ much, one pass", "–"),
    "lite_ppo": ("the batch's deviation in place of the group's", "groups that are nearly all right or wrong", "–"),
    "pass_at_k": ("only a unique best try is reinforced", "pass@k counts, not pass@1", "little signal a group"),
    "clip_cov": ("cuts the gradient of a few high-covariance tokens", "entropy that collapses", "–"),
    "kl_cov": ("charges them a penalty instead", "entropy that collapses", "–"),
    "dro": ("a quadratic leash to the sampler", "off-policy data", "one number to set"),
    "m2po": ("masks the tokens farthest from the sampler", "samples many steps old", "–"),
    "topr": ("no ratio for the good, tapered for the bad", "off-policy data, many wrong answers", "–"),
    "scalerl": ("CISPO, batch deviation, groups without signal dropped", "long runs", "refilling samples more"),
    "discover": ("towards the best try, not the mean", "one problem whose best answer is wanted", "forgets the rest"),
    "otb": (
        "a baseline for each token, by energy",
        "long answers, noisy gradients",
        "one scoring pass more; language models",
    ),
    "remax": ("a greedy answer is the baseline", "few tries a prompt", "one answer more a prompt; language models"),
    "rae": (
        "the running mean of a role is the baseline",
        "games and rows with roles whose rewards differ by role; one try a prompt",
        "a baseline that lags behind",
    ),
    "a_star_po": (
        "the best reachable value, from the start's answers, is the baseline",
        "prompts that are known beforehand; few tries a prompt",
        "8 answers to every prompt before the first step; a reference; language models",
    ),
    "gigpo": ("turns that were told the same are compared, too", "conversations with tools or an environment", "–"),
    "opd": (
        "a teacher judges each sampled token",
        "there is a better model; no reward needed",
        "the teacher's weights and a pass",
    ),
    "iw_opd": ("… with more weight before they part", "long answers that go astray", "as `opd`"),
    "gkd": (
        "divergence over the teacher's likeliest tokens",
        "less noise than `opd`: see below",
        "as `opd`, 12 bytes × 64 a token",
    ),
    "opsd": ("the model teaches itself, shown the answer", "rows with answers, no better model", "a pass"),
    "sdpo": ("… shown a try that succeeded", "rewards that are seldom 1", "a pass"),
    "control": ("reward-to-go against the group at the same step", "environments with rewards on the way", "–"),
    "window": ("a window of steps is the group", "one environment, no resets to a start", "–"),
}
"""What each row changes, when it helps, what it costs beside `grpo`."""

PAGE = """\
# Recipes

Every row is one published variant, written as a choice on each axis of the algorithm: `--recipe dapo`, or any column by
name. Begin with `grpo` (language) or `control` (environments); change one thing at a time, for a reason you can see in
the metrics.

## Which one

| recipe | what it changes | when it helps | what it costs |
|---|---|---|---|
{choose}

## Measured

{measured}

## All columns

The table is made from `grpo/recipes.py` by `docs/make_pages.py`; `grpo presets --recipes` prints the same rows.

{table}
{rest}"""

REST = """\
## A teacher

A teacher says of every decision how likely it would have been to it: a denser signal than a reward at the end. It is a
column of every recipe (`--recipe dapo --teacher-coef 0.5`), or stands alone, without any reward (`opd`, `iw_opd`,
`gkd`, `opsd`, `sdpo`). Beside it groups of equal rewards stay, also where the row alone would drop them (`dapo`,
`scalerl`): it teaches them, too. With τ the teacher, π the student, β = `teacher_mix`:

| `teacher_in` | `teacher_kl` | what is minimised |
|---|---|---|
| `advantage` | `reverse` | a policy gradient on KL(π‖τ): log τ − log π_old of each decision is added to its advantage |
| `loss` | `reverse` | KL(π‖τ), in which the student leaves what the teacher would not do |
| `loss` | `forward` | KL(τ‖π), in which it takes up everything the teacher might do |
| `loss` | `js` | β·KL(τ‖m) + (1−β)·KL(π‖m), m = β·τ + (1−β)·π |

`teacher_over=sampled` looks at the sampled decision alone: value and expected gradient are right, the noise is larger.
`top_k` looks at the teacher's `teacher_top_k` likeliest choices and all others as one, exactly; as many as there are
choices is the whole distribution. A student that equals its teacher has loss 0 and no gradient in all of them. Numbers
and gradients are those of TRL's, verl's and prime-rl's own functions (`tests/golden`). In Python every trainer takes
`teacher=`, any policy that can `score`; models as teachers: [Language models](language.md#teachers).

## Baselines that remember

Most rows compare a try with its group. Two compare it with what was learned before, and keep that in checkpoints:

- `rae` has a running mean of rewards for each role, b ← 0.95·b + 0.05·r (`baseline_decay`). `role_column` names the
  column that says whose part a row has the model play (`white` or `black`, or the game and the side); without it all
  rows are one role. Sources of other rooms give `role_N`. A group in which all tries are alike teaches, too.
- `a_star_po` samples `value_samples` answers to every prompt before the first step and takes their soft maximum,
  V* = β₁·log mean exp(r/β₁) with β₁ = `value_beta`, as what the best policy near the start would be given. A
  prompt all of whose answers failed is compared within its group. Rows must be countable, and the answers are paid for
  once: for 7,473 prompts as much sampling as 934 steps of 8 prompts × 8 tries.

## Which tries learn

Beside every recipe: `--generate 64 --select 16` (`group_size=64, select=16`) samples 64 tries from each start and
learns from 16 of them. All 64 are rewarded and all are compared with, so that mean and deviation are theirs; only the
16 are scored by the reference and pass through the update, which costs a quarter. In every room.

| `select_by` | which of a group | paper |
|---|---|---|
| `variance` | those whose rewards vary most among all choices of as many | PODS, arXiv:2504.13818 |
| `extremes` | as many of the best as of the worst | PODS, arXiv:2504.13818 |
| `length` | the shortest | GFPO, arXiv:2508.09726 |
| `random` | any: right on average, to compare the others with | |

Both papers take mean and deviation of the chosen tries; here they are of all that were sampled. Where a teacher alone
teaches and nothing is rewarded, `length` and `random` choose.

## What is not a row, and why

- `sgrpo`, pass@k of sets: none of the systems whose numbers are in `tests/golden` has it. `pass_at_k` rewards the best
  try's lead, `discover` pulls towards the best.
"""


def page() -> str:
    """The whole page."""
    rows = [f"| `{name}` | {' | '.join(CHOOSE[name])} |" for name in RECIPES]
    parts = (bandit(), sums(), teacher(), smollm(), another(), select())
    measured = "\n\n".join(part for part in parts if part)
    return PAGE.format(choose="\n".join(rows), measured=measured, table=table_markdown().strip(), rest=REST)


def _known(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def bandit() -> str:
    """Regret of every row that can play."""
    found = _known("recipes").get("bandit")
    if not found:
        return ""
    equal: dict[tuple[float, float], list[str]] = {}
    for name, row in sorted(found["regret"].items(), key=lambda item: item[1]["mean"]):
        equal.setdefault((row["mean"], row["error"]), []).append(f"`{name}`")
    told = [f"{mean:.2f} ± {error:.2f} {', '.join(names)}" for (mean, error), names in equal.items()]
    return (
        f"**Regret on the bandit** (`grpo train bandit`, {found['steps']} steps, {found['seeds']} seeds, CPU; the "
        "payoff missed, mean ± standard error; less is better; `python bench/recipes.py`): "
        f"{'; '.join(told)}. A batch is learned from once, so that rows which differ in ratio, clip or reduction "
        "are the same here; those without a deviation take smaller steps at the same learning rate, which was chosen "
        "for `grpo`. Rows that a teacher alone teaches, `gigpo` and `a_star_po` need what a bandit does not have."
    )


def sums() -> str:
    """Minutes to the same accuracy, where somebody has measured them."""
    found = _known("recipes").get("sums")
    if not found:
        return (
            "**Minutes to the same accuracy** with a real model for eight recipes: not measured yet; `python "
            "bench/recipes.py --sums --model MODEL --seeds 0,1` on a machine with a GPU fills in this table."
        )
    seeds = list(next(iter(found["recipes"].values())))
    beside = "both seeds at the same time on it; " if found["processes"] > 1 else ""
    lines = [
        f"**Minutes to {found['accuracy']:.0%}** of 300 held-out sums by SmolLM2-135M-Instruct with LoRA (`grpo train "
        f"smollm-arithmetic`, 16 prompts × 8 answers a step in two minibatches, one {found['machine']['gpu']}; wall "
        f"time of the steps after the first, steps in brackets; looks every three steps; {beside}the settings are the "
        "preset's, chosen for `grpo`; `python bench/recipes.py --sums`), from "
        f"{_begin(found)}:",
        "",
        "| recipe | " + " | ".join(f"seed {seed}" for seed in seeds) + " |",
        "|---|" + "---|" * len(seeds),
    ]
    for name, runs in found["recipes"].items():
        told = [_minutes(runs.get(seed), found["most"]) for seed in seeds]
        lines.append(f"| `{name}` | {' | '.join(told)} |")
    if found.get("later"):
        lines += ["", f"In a later run on another GPU of that kind, with other jobs on the CPU: {found['later']}."]
    return "\n".join(lines)


def _begin(found: dict[str, Any]) -> str:
    return f"{next(iter(next(iter(found['recipes'].values())).values()))['curve'][0][2]:.0%}"


def _minutes(run: dict[str, Any] | None, most: int) -> str:
    if run is None:
        return "–"
    step, _, right = run["curve"][-1]
    return f"{run['minutes']:.2f} ({step})" if run["minutes"] else f"not in {most} steps ({right:.0%})"


def teacher() -> str:
    """Tokens until a student is as good as its teacher."""
    known = _known("teacher")
    found = known.get("seeds")
    if not found:
        return ""
    lines = [
        "**A teacher or a reward**: tokens until a tiny student answers as many of 1,000 held-out sums (`addition`) as "
        f"its teacher, less 0.01, from the same start; at most {known['steps']} steps of 64 answers, a learning rate "
        f"that falls to 0 from {_rates(known['ways'])} (CPU; `python bench/teacher.py`; in brackets its accuracy at "
        "the end):",
        "",
        "| | " + " | ".join(_start(seed, row) for seed, row in found.items()) + " |",
        "|---|" + "---|" * len(found),
    ]
    for way in known["ways"]:
        lines.append(f"| {way} | {' | '.join(_tokens(row.get(way)) for row in found.values())} |")
    sooner = [f"{way} {_as_right(found, way)}" for way in known["ways"] if way != "reward"]
    reached = any(row[way]["tokens"] for row in found.values() for way in known["ways"])
    lines += [
        "",
        ("" if reached else "None of them reaches its teacher in these steps. ")
        + f"As right as the reward alone was at its end, of its tokens, a value a seed: {'; '.join(sooner)}. "
        "`opd` judges the sampled token alone: right on average, and noisy, because a wrong token that the teacher "
        "finds a thousand times less likely has an advantage of −7, and its place has no baseline. The same KL over "
        "the whole distribution (`teacher_in=loss teacher_over=top_k`, or `gkd`) has no such noise.",
    ]
    return "\n".join(lines)


def _rates(ways: dict[str, dict[str, Any]]) -> str:
    """Learning rates, and whose each is."""
    whose: dict[float, list[str]] = {}
    for way, settings in ways.items():
        whose.setdefault(settings["learning_rate"], []).append(way)
    return ", ".join(f"{rate:g} ({'; '.join(names)})" for rate, names in whose.items())


def _as_right(found: dict[str, Any], way: str) -> str:
    """Share of the reward's tokens after which this way is as right as the reward was at its end, and stays so."""
    told = []
    for row in found.values():
        seen, right = row["reward"]["curve"][-1]
        late = [at for at, found_right in row[way]["curve"] if found_right < right]
        later = [at for at, _ in row[way]["curve"] if not late or at > late[-1]]
        told.append(f"{later[0] / seen:.0%}" if later else "never")
    return ", ".join(told)


def _start(seed: str, row: dict[str, Any]) -> str:
    return f"seed {seed}: {row['student']:.3f} → {row['teacher']:.3f}"


def _tokens(run: dict[str, Any] | None) -> str:
    if run is None:
        return "–"
    last = run["curve"][-1][1]
    return f"**{run['tokens']:,}** ({last:.3f})" if run["tokens"] else f"not in {run['seen']:,} ({last:.3f})"


def smollm() -> str:
    """What a teacher taught a real model."""
    known = _known("teacher_smollm")
    found = known.get("seeds")
    if not found:
        return ""
    names = {"teacher": "the teacher itself", "opd": "`opd`", "opsd": "`opsd`"}
    names["opsd, held"] = "`opsd` with `teacher` = the start"
    names = {way: name for way, name in names.items() if any(way in row for row in found.values())}
    held = ", or from the untouched one, held as it was" if "opsd, held" in names else ""
    lines = [
        "**A real model and its teacher**: SmolLM2-135M-Instruct, 300 held-out sums, greedy, before and after "
        f"{known['steps']} steps; the gain paired by sum with a 95 % interval. The teacher is the same model after "
        "`grpo train smollm-arithmetic`; `opd` learns from its word alone, `opsd` from the model as it is in that "
        f"step, shown the answer (`{known['template']}`){held} "
        f"(one {known['machine'].get('gpu', 'CPU')}; `python bench/smollm.py`):",
        "",
        "| | " + " | ".join(f"seed {seed}" for seed in found) + " |",
        "|---|" + "---|" * len(found),
    ]
    for way, name in names.items():
        lines.append(f"| {name} | {' | '.join(_gain(row.get(way)) for row in found.values())} |")
    lines += [
        "",
        f"After five steps the reward had {_fifth(found, 'teacher')}, `opd` {_fifth(found, 'opd')}, of as many tokens: "
        "where a third is right to begin with, a teacher is hardly sooner than the reward; it needs none. "
        "`opsd` was right on six of ten after five steps and fell from there: who teaches changes with who is taught.",
    ]
    return "\n".join(lines)


def another() -> str:
    """What a teacher of another family taught it."""
    known = _known("teacher_coder")
    found = known.get("seeds")
    if not found:
        return ""
    gains = "; ".join(f"seed {seed} {_gain(row['opd'])}" for seed, row in found.items())
    seconds = ", ".join(f"{row['opd']['seconds']:.0f}" for row in found.values())
    return (
        f"**A teacher with another tokenizer**: {known['teacher']}, which has {known['teacher_right']:.0%} of these "
        f"sums right, teaches the same untouched model by `opd` alone, {known['steps']} steps without a reward; its "
        f"log-probs are aligned by the bytes of the text: {gains}; {seconds} seconds of steps (one "
        f"{known['machine'].get('gpu', 'CPU')}; `python bench/smollm.py --teacher TEACHER`). After five steps it had "
        f"{_fifth(found, 'opd')}. The student stays far from its teacher in so few steps."
    )


def _fifth(found: dict[str, Any], way: str) -> str:
    """Accuracy at the first look, a value a seed."""
    return ", ".join(f"{row[way]['curve'][1][2]:.2f}" for row in found.values())


def _gain(run: dict[str, Any] | None) -> str:
    if run is None:
        return "–"
    interval = f"{run['gain']:+.3f}, {run['low']:+.3f} to {run['high']:+.3f}"
    return f"{run['before']:.3f} → {run['after']:.3f} ({interval})"


def select() -> str:
    """What selection saves and costs."""
    known = _known("selection")
    found, cost = known.get("seeds", {}), known.get("profile", {})
    if not found and not cost:
        return ""
    lines = [
        "**64 tries, 16 learn** (`--generate 64 --select 16`): `tiny-language` with 8 prompts a step, one CPU core. "
        "CPU seconds of a step, all ways taking turns in one process; then, for three seeds, CPU seconds of training "
        "until 60 % of 1,000 held-out rows are right (below 50 % before), and what is right at the looks after 75 s: "
        "mean, least and most. The learning rate does not fall, and accuracy goes up and down from there on in all of "
        "them, and the others pass it (`python bench/selection.py`):",
        "",
        "| learns | update, s | of all | rows scored | seconds to 60 % | after 75 s |",
        "|---|---|---|---|---|---|",
    ]
    for way, told in cost.items():
        curves = [row[way]["curve"] for row in found.values() if way in row]
        soon = ", ".join(f"{next((at for at, right in curve if right >= 0.6), float('inf')):.0f}" for curve in curves)
        late = [right for curve in curves for at, right in curve if at >= 75.0]
        spread = f"{sum(late) / len(late):.2f} ({min(late):.2f}–{max(late):.2f})" if late else "–"
        update, ratio = told["seconds_a_step"]["update"], told["update_ratio"]
        lines.append(f"| {way} | {update:.2f} | {ratio:.2f} | {told['rows_scored_a_step']} | {soon} | {spread} |")
    lines += [
        "",
        "![accuracy by tokens, taught or rewarded, and by seconds, with and without selection; a line a "
        "seed](figures/recipes.png)",
    ]
    return "\n".join(lines)


def draw() -> None:
    """Two panels a seed and a line each: accuracy by tokens (a teacher or the reward), and by seconds (select)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    taught, selected = _known("teacher"), _known("selection")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    shown = (
        (left, taught["seeds"], list(taught["ways"]), 1e6, "millions of tokens", "addition: a teacher or the reward"),
        (right, selected["seeds"], list(selected["profile"]), 1, "CPU seconds", "sort-digits: all tries or 16 of 64"),
    )
    for panel, seeds, ways, unit, axis, title in shown:
        for number, way in enumerate(ways):
            for row in seeds.values():
                if way in row:
                    at, accuracy = zip(*row[way]["curve"], strict=True)
                    panel.plot([x / unit for x in at], accuracy, color=f"C{number}", lw=1.1, alpha=0.8)
            panel.plot([], [], color=f"C{number}", label=way)
        panel.set(xlabel=axis, title=title)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=8, frameon=False, loc="lower right")
    left.set_ylabel("right, of 1,000 held-out rows")
    figure.savefig(RESULTS.parents[1] / "docs" / "figures" / "recipes.png", dpi=90)


if __name__ == "__main__":
    draw()
