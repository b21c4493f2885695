"""Write the pages that are made from the code. Run by `make docs`; the result is committed."""

import argparse
import json
import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any

from grpo import cli
from grpo.app.coming_from import SYSTEMS, markdown
from grpo.app.explain import settings_text
from grpo.app.settings import preset_names
from grpo.language.compat import trl

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PRESETS = ROOT / "grpo" / "app" / "presets"

SETTINGS = """\
# {title}

What `grpo train{task} --settings` prints: every setting, its default and its meaning.{more}

```text
{text}
```
"""

ROOMS = {
    "shared": ("Settings of every room", None, " They are all that a policy of your own and the bandit have."),
    "control": ("Control settings", "control", ""),
    "language": ("Language settings", "language", " TRL's words for them: [TRL's settings](trl.md)."),
    "worldmodel": ("World-model settings", "worldmodel", ""),
}
"""Page, title, task and what else is to be said of each list of settings."""

CLI = """\
# The command

Made by `docs/make_pages.py` from the command itself; `grpo COMMAND --help` prints the same. Exit codes: 0 done, 1
failed, 2 a mistake in what was asked for, 75 preempted, 130 interrupted.

{commands}"""

CONTROL = """\
# Control presets

Made by `docs/make_pages.py` from `bench/results/control.json`, which `make bench-control` writes. A cell is one
process, one thread, one seed: CPU seconds and environment steps until the mean greedy return on starts that nobody
trained on has reached the threshold at two looks in a row. Imports and evaluations are not counted. Medians, with the
smallest and the largest of the seeds; ratios are of medians. `sb3` is Stable-Baselines3's PPO with rl-zoo's settings
(its defaults for FrozenLake and Taxi, which rl-zoo does not have), `cleanrl` CleanRL's `ppo.py` as it is, `tutorial`
the tutorial's loop. On CartPole, `ours-64` is our preset with hidden layers as wide as SB3's. Tasks with ten
seeds are of one run; those with three are of an earlier one, on another machine: compare within a table.

Our presets were tuned for this and the peers' settings were not, which favours ours. Apart from a few early trials on
seeds 0 to 2, no seed or start below was used to choose a setting. On CartPole, where some 90 settings were tried, that
matters: on the seeds and starts it was tuned on, the preset took 0.10 of SB3's CPU time (median of 5), on fresh ones
what the table says.

{rollout}
{tasks}
"""

TRL = """\
# TRL's settings

What became of every field of TRL {version}'s `GRPOConfig`, its own and those it inherits, when it is given to
`grpo.language.GRPOConfig`, in a YAML file or as a flag. The page is made from `grpo/language/compat/trl.py` by
`docs/make_pages.py`; `grpo config --dialects` prints the words of every system.

An accepted field is told of in one line when a run starts (`note: accepted, and not needed here: …`), and scripts can
read it back. A refused field is an error with its reason, unless the value is TRL's own default, which asks for
nothing. A setting that cannot change anything where it is given (`ref_model_mixup_alpha` without a reference that
follows) is an error too.

A field that nobody gave answers all the same (`trainer.args`, the `args` of callbacks): with what the run does, where
there is something to tell, else with TRL's default; so do transformers' own words (`world_size`, `should_save`,
`device`, `to_dict()`). Fields are assigned until a trainer is built (`args.learning_rate = 1e-5`), as if they had been
given at first; a trainer keeps a copy. `HfArgumentParser` and `TrlParser` read dataclasses, which these settings are
not: use `grpo train FILE.yaml --learning-rate 1e-5`, or `GRPOConfig(**yaml.safe_load(text))`.

## The same scripts

Ten scripts as TRL's documentation writes them (`tests/compat/published`: quick start, custom rewards, async rewards,
several tasks with None, tools, environments, PEFT, images, evaluation, resumption) run changed in the import alone:

```text
from trl import GRPOConfig, GRPOTrainer           →  from grpo.language.trl import GRPOConfig, GRPOTrainer   (exact)
from trl import GRPOConfig, GRPOTrainer           →  from grpo.language import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward           →  from grpo.language.rewards import accuracy_reward
```

The first is the exact drop-in: what a script does not say is TRL's. The second takes the same words with defaults of
our own. Beside TRL {version} itself (`make cross-check`), through the first, on the same completions in float32, the
first row of `log_history` has all of its keys with the same values (1e-4): loss, gradient norm, KL, entropy, clip
ratios, rewards, lengths, calls of tools. The defaults that it changes:
`seed=42`, `loss_type="dapo"`, `max_completion_length=512`, `per_device_train_batch_size=8`,
`lr_scheduler_type="linear"`, `use_bias_correction_kl=True` beside `beta`, `max_prompt_length=None`,
`report_entropy=True`, `logging_steps=10`, `save_steps=500`, `save_total_limit=None`,
`output_dir="trainer_output"`, as many completions of held-out prompts as `num_generations`, and
`skip_apply_chat_template=True` where prompts are bare text, which becomes a user's message in the second if the
tokenizer has a chat template. What differs all the same:

| | TRL | here |
|---|---|---|
| a step | one update | one sampling with all of its updates (`num_iterations`, `steps_per_generation`) |
| `train()` where `output_dir` holds a run | trains again | refused: see below |
| `output_dir/checkpoint-N` | model and optimizer | a sign of `checkpoints/step-N`: see below |
| order of the rows | its sampler's | another permutation of the same seed |
| `frac_reward_zero_std`, `scale_rewards="batch"` | whether the batch has one reward | the share of groups that have |
| `num_tokens` with tools | without what tools answered | with it, for the model reads it |
| several held-out sets | a row each; loss and times carry the set's name | one row; every metric carries it |
| vision tower, without an adapter | trained | trained with `train_vision=True` |
| held-out prompts | entropy and clip ratios too | rewards, lengths, accuracy, pass@k |
| `accuracy_reward` | math_verify: answers in LaTeX | a last number or "the answer is …" counts too |

Where a step has several updates, `grpo.language.trl` divides `max_steps`, `save_steps`, `eval_steps`, `logging_steps`
and `warmup_steps` by their number; `grpo.language` takes them as they are, and warns.

A run is not overwritten: `train()` into a folder that holds one, also by the same trainer for a second time, is refused
in a line. `train(resume_from_checkpoint=True)` goes on, `train(overwrite=True)` begins anew. In the place of TRL's
checkpoints there are folders `checkpoint-N` with `trainer_state.json` alone, so that
`get_last_checkpoint(output_dir)` finds one for `train(resume_from_checkpoint=…)`; the model is in `output_dir/model`,
the best one where checkpoints are compared, and `grpo export RUN --checkpoint N` writes that of a checkpoint.

{cases}

{table}"""

SPEED = """\
# Speed

Made by `docs/make_pages.py` from the files that the benches write; how each is measured stands in its script.

## One GPU

`make bench-gpu` writes `bench/results/gpu.json` (`bench/gpu.py`). bfloat16, β = 0, log-probs on, one GPU. A rollout is
prompts × completions of each × tokens; every row runs to its limit or, where rows end, until one of V/160 tokens is
drawn. SmolLM2-135M has its real weights, the other shapes random ones. vLLM keeps its prefix cache within a rollout and
loses it before the next, as it must when weights change; ours is compared with the best of its configurations. The
floor is the time that decoding would take if it only read the weights and the live keys and values once a step, or only
multiplied, at the rates that a copy and a matrix product reach on the same GPU (`bench/floor.py`); reading the prompts
is not in it. Floor ÷ ours is of seconds: 1 would be as fast as the floor.

{gpu}
### Which peers, and which not

These were measured with torch 2.11 and CUDA 13. vLLM 0.26.0 is the
newest that takes this torch (0.27 to 0.32 ask for 2.13), as its wheel has it but for the kernels of older cards;
FlashInfer, whose sampler it would use for top-p alone, is left out. It is asked with multiprocessing and asynchronous
scheduling (its defaults), with graphs for the batches that occur, and with log-probs on and off; the other rows of vLLM
are 0.24.0's. Not run:

- **SGLang**: 0.5.12 is the newest that takes torch 2.11 (0.5.23 asks for 2.14.1). Its kernels alone are a wheel of
  322 MB, next to FlashInfer with its own: more than could be carried.
- **Unsloth** 2026.10.9 takes torch 2.11 and transformers 5.17, but with it bitsandbytes, xformers, TRL 1.15 and
  datasets below 5, and it refuses to be imported without a GPU, so that nothing could be tried beforehand.
- **verl** 0.9.1 asks for transformers below 5.11 (5.17 is there), and for Ray, tensordict and torchdata.
- **TRL with vLLM 0.26**: TRL 1.16 was measured with vLLM 0.24, above.

### Where it falls short of its aims

- 1.7B, 8 × 8 × 4,096: 28 s a step, 15 were aimed at. Reading keys and values in bfloat16 once a token takes 17.7 s at
  the rate of a copy; the rollout takes 21.2, the update 6.7. Only coarser keys and values would be faster.
- 8B with an adapter, 16 × 8 × 512: 9.6 s a step, 8 were aimed at: 4.7 s of sampling, whose floor is 2.4, and 4.9 s of
  the update.
- Rows of 65,536 tokens: 1.7 (0.6B) and 1.4 times (4B) the tokens a second that prime-rl publishes, 2 were aimed at,
  in 0.74 and 0.38 of its memory; theirs is an H100, whose products are as fast.
- A rollout of the 1.7B shape: 1.5 and 1.8 times (256 and 1,024 rows) what vLLM 0.26 makes without log-probs, which
  nobody can train on then; 3 was aimed at. With log-probs it is 3.2 times 0.26 and 2.2 times 0.24. Files were copied
  to the machine while these rows of 0.26 were measured; 16 cores were there.
- 32B with an adapter, 8 rows of 8,192 tokens: the update runs out of memory, where `grpo plan` says 94 GiB. What is
  kept beyond that is not known yet.
- The share of the floor: 0.19 at 256 rows of the 135M and 0.47 of the 1.7B; 0.35 and 0.6 were aimed at.

### What `grpo plan` said before

`bench/plan.py` holds what was planned for a cell beside what was measured: memory that torch hands out at most, seconds
of a rollout, an update or a step. Its constants were fitted to the cells marked so, and to the runs that
[decisions](decisions.md#passes-as-small-as-they-can-be-without-costing-time) has. Where it says seen, an earlier time
of that cell or of its update was used for one of them; only cells without a mark were not looked at before.

{planned}

## Two CPU cores

`make bench` writes `bench/results/rollout_cpu.json` (`bench/generation.py`) and `cpu_step.json` (`bench/cpu_step.py`).
SmolLM2-135M, float32.

{cpu}
## World models

`bench/worldmodel_speed.py` on two CPU cores, each implementation in turns in one run, same shapes: what differs stands
in its docstring. Times as fast as the peer, medians of the rounds with quartiles.

{dreams}

The same on one H200 (`--device cuda`), with nine other processes on the machine's other cores. Ours computes in TF32,
or with `precision=bfloat16`; the JAX peer in its own bfloat16; dreamerv3-torch as torch's defaults have it. By CPU
seconds ours loses to JAX: it keeps a core busy for as long as the GPU works. What the settings bring:
[World models](worldmodel.md#on-a-gpu).

{dreams_gpu}

Since then a step of imagination has formulas of its own. Vectors once more, on another H200 with nothing else on it, in
turns with JAX (`bench/results/worldmodel_jax_gpu.json`). The code was that of its day but for one thing that was tried
and not kept, because it made no difference: fewer small operations before and after the graph (`bench/dream.py` before
and with it: 3.07 and 2.99 ms, with `precision=bfloat16` 2.55 and 2.68).

{dreams_jax}

{dream}
"""

GSM8K = """\
# A real model that gets better in minutes

Made by `docs/make_pages.py` from `bench/results/gsm8k.json`, which `bench/gsm8k.py` writes: `grpo train gsm8k` on one
GPU with the settings below. The first 500 test questions are answered greedily before the first step and after the
last, and read leniently (a box, a tag, what it says the answer is, else the last number). The gain is paired by
question, its 95 % interval from 10,000 resamples of the questions. Both seeds begin with the same weights, so "before"
is one measurement. Look at the samples before you read too much into a gain: an instruction-tuned coder first writes
programs that nobody runs, or is cut off at the limit, and part of what it learns is to answer the question itself.

{told}"""

RELIABILITY = """\
# Reliability

What goes wrong, what happens then, and the tests that inject it. Made by `docs/make_pages.py` from
`tests/faults/promises.toml`.

{tables}
`make soak` trains for very many steps in one process (`bench/soak.py`, `bench/results/soak.json`):

{soak}
What grows with a run is thinned: `run.keep_samples` and `run.keep_metrics` say how much stays (None: all).

## Do the tests bite?

A test that passes without the protection it is about holds nothing. `make mutations` takes each of these out in a
copy of the package; the test beside it must then fail.

{mutations}
## What we do not promise

- **Bit-exact resume** is promised on the same versions and the same machine type on a CPU. On a GPU, or after an
  update of torch, a run resumes correctly, with other last digits.
- **Reward functions, environments and policies of your own are trusted code.** Their failures are contained (a worker
  that hangs is killed, one that raises costs its sample); malice is not. Only generated programs run in a sandbox.
- **Simulators are as deterministic as they are.** An environment whose reset ignores its seed is remarked and never
  branched, not mended.
- **What the disk acknowledges and does not keep** is lost: files are synced before they are renamed, and a disk that
  lies about that cannot be found out.
- **The viewer is for you.** It binds to this machine, asks for a token elsewhere, and is no server for the open
  internet.
- **Another user with your rights** can read and change your run folders. They hold no secrets that the redactor knows
  by name or shape; what you print inside a prompt or a reward stays in the samples.
"""


WORDS = """\
Made by `docs/make_pages.py`; `grpo config --dialects {name}` prints the same. A word that is not here is an error that
names the nearest; a refused one says why, unless its value is that system's own default, which asks for nothing."""


def settings(room: str) -> str:
    """Every setting of a room."""
    title, task, more = ROOMS[room]
    told = {"title": title, "task": f" {task}" if task else "", "more": more}
    return SETTINGS.format(**told, text=settings_text(task).rstrip())


def commands() -> str:
    """Every command with its usage and options."""
    parser = cli._parser()
    made = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return CLI.format(commands="\n".join(_command(name, command) for name, command in made.items()))


def _command(name: str, command: argparse.ArgumentParser) -> str:
    """One command; its options are laid out here, because argparse does so differently in every version of Python."""
    lines = [f"## grpo {name}", "", f"{' '.join((command.description or '').split()).capitalize()}.", ""]
    lines += [f"~~~text\n{(command.usage or f'grpo {name} [options]').strip()}\n~~~", ""]
    lines += ["| option | does |", "|---|---|"]
    for action in command._actions:
        if action.help == argparse.SUPPRESS:
            continue
        value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
        words = action.option_strings or [str(value)]
        shown = ", ".join(f"`{word}`" for word in words)
        if action.option_strings and action.nargs != 0:
            shown += f" `{' '.join(value) if isinstance(value, tuple) else value}`"
        does = (action.help or "").replace("%%", "%").replace("%(default)s", str(action.default))
        lines.append("| {} | {} |".format(*(cell.replace("|", "\\|") for cell in (shown, does))))
    if command.epilog:
        lines += ["", f"~~~text\n{command.epilog.strip()}\n~~~"]
    return "\n".join([*lines, ""])


def reliability() -> str:
    """The promises, their tests, and what happens when a protection is taken out."""
    script = runpy.run_path(str(ROOT / "scripts" / "mutations.py"))
    entries = script["promises"]()
    soak = runpy.run_path(str(ROOT / "bench" / "soak.py"))["table"](_results("soak"))
    told = {"tables": script["tables"](entries), "soak": soak, "mutations": script["mutation_table"](entries)}
    return RELIABILITY.format(**told)


def coming_from(name: str) -> str:
    """A system's words beside ours, and its own examples as they are written here."""
    told = (DOCS / "coming_from" / f"{name}.in").read_text(encoding="utf-8")
    return f"{told.rstrip()}\n\n## Every word\n\n{WORDS.format(name=name)}\n\n{markdown(name)}\n"


def gsm8k() -> str:
    """What minutes on one GPU taught a real model."""
    found = _results("gsm8k")
    if not found.get("runs"):
        return GSM8K.format(told="Not measured.\n")
    lines = [
        "| seed | before | after | gain | 95 % interval | steps | minutes | tokens of an answer |",
        "|" + "---|" * 8,
    ]
    for run in found["runs"]:
        lines.append(
            f"| {run['seed']} | {run['before']:.1%} | {run['after']:.1%} | {100 * run['gain']:+.1f} points | "
            f"{100 * run['low']:+.1f} to {100 * run['high']:+.1f} | {run['steps']} | {run['seconds'] / 60:.1f} | "
            f"{run['length_before']:.0f} → {run['length_after']:.0f} |"
        )
    split = found["runs"][0]["time_split"]
    shares = ", ".join(f"{name} {share:.0%}" for name, share in split.items() if share >= 0.005)
    words = " ".join(f"--{name} {value}" for name, value in found["flags"].items())
    lines += ["", f"{found['model']}; one {found['machine'].get('gpu', 'GPU')}. Where the time went: {shares}.", ""]
    lines += [f"~~~text\ngrpo train gsm8k --model PATH_OR_ID {words}\n~~~"]
    theirs = found.get("trl", {})
    if "steps" in theirs:
        ours = found["runs"][0]
        within = min(theirs["within"], ours["seconds"])
        count = sum(row["seconds"] <= within for row in ours["rows"])
        lines += ["", f"TRL {theirs['versions']['trl']} made {theirs['steps']} steps in {theirs['within'] / 60:.1f} "]
        lines[-1] += f"minutes, ours {count} in {within / 60:.1f}, with the same model, questions, rows and lengths."
    if (DOCS / "figures" / "gsm8k.png").exists():
        lines += ["", "![reward while training; accuracy before and after](figures/gsm8k.png)"]
    lines += [
        "",
        "## Before and after",
        "",
        f"The first {len(found['runs'][0]['samples'])} test questions, first seed.",
    ]
    for sample in found["runs"][0]["samples"]:
        lines += ["", f"**{sample['question'].strip()}** (the answer is {sample['answer']})"]
        for when in ("before", "after"):
            lines += ["", f"{when.capitalize()}:", "", f"~~~text\n{sample[when].strip()}\n~~~"]
    return GSM8K.format(told="\n".join(lines) + "\n")


def speedrun() -> str:
    """Seconds until a model has learned, by the clock of the command."""
    sys.path.insert(0, str(ROOT / "bench"))  # its scripts import each other as scripts do
    return str(runpy.run_path(str(ROOT / "bench" / "speedrun.py"))["page"]())


def control() -> str:
    """The control presets with what was measured of each."""
    bench = runpy.run_path(str(ROOT / "bench" / "control.py"))
    results = ROOT / "bench" / "results" / "control.json"
    rows = json.loads(results.read_text(encoding="utf-8"))["cells"] if results.exists() else []
    parts = []
    for task in [name for name in bench["ORDER"] if name in preset_names()]:
        preset = (PRESETS / f"{task}.yaml").read_text(encoding="utf-8")
        measured = [row for row in rows if row["task"] == task]
        parts += [f"## {task}", "", f"```yaml\n{preset.strip()}\n```", ""]
        parts += [bench["table"](measured), *bench["remarks"](measured)] if measured else ["Not measured.", ""]
        if (DOCS / "figures" / f"control-{task}.png").exists():
            parts += [f"![greedy return of {task}](figures/control-{task}.png)", ""]
    rollout = bench["table"]([row for row in rows if row["task"] == bench["ROLLOUT"]])
    return CONTROL.format(rollout=rollout, tasks="\n".join(parts)).rstrip() + "\n"


def fields() -> str:
    """TRL's fields and what became of each."""
    told = json.loads((ROOT / "grpo" / "language" / "compat" / "trl_1_16_fields.json").read_text("utf-8"))
    return TRL.format(version=told["trl"], cases=trl_cases(), table=trl.table_markdown(told["fields"]))


def trl_cases() -> str:
    """How many of TRL's own test cases are represented here, and why the others are not."""
    told = tomllib.loads((ROOT / "tests" / "compat" / "cases.toml").read_text("utf-8"))
    listed = told["cases"]
    total, done = (sum(case.get(what, case["count"]) for case in listed.values()) for what in ("count", "passes"))
    lines = [
        "## TRL's own tests",
        "",
        f"Of the {total} cases of its `tests/test_grpo_trainer.py` (TRL {told['version']}, commit {told['commit']}), "
        f"{done} are",
        "represented in `tests/compat`, one by one, written anew from the behaviour. The others:",
        "",
        "| test there | cases | why not |",
        "|---|---|---|",
    ]
    left = {name: case for name, case in listed.items() if case.get("passes", case["count"]) < case["count"]}
    lines += [f"| `{name}` | {case['count'] - case['passes']} | {case['reason']} |" for name, case in left.items()]
    return "\n".join(lines)


def speed() -> str:
    """What the benches of sampling and of whole steps have measured."""
    report = runpy.run_path(str(ROOT / "bench" / "gpu_report.py"))
    parts = [report["tables"](_results("gpu").get("cells", {}))]
    if (DOCS / "figures" / "gpu.png").exists():
        parts.append("![tokens a second, seconds a step](figures/gpu.png)\n")
    if (DOCS / "figures" / "scaling.png").exists():
        parts.append("![seconds of a step against group size, length and model size](figures/scaling.png)\n")
    cpu = report["cpu_tables"](_results("rollout_cpu"), _results("cpu_step"))
    table = runpy.run_path(str(ROOT / "bench" / "worldmodel_speed.py"))["table"]
    dreams, on_gpu, beside_jax = (
        table(_results(name)) for name in ("worldmodel_speed", "worldmodel_speed_gpu", "worldmodel_jax_gpu")
    )
    sys.path.insert(0, str(ROOT / "bench"))  # its scripts import each other as scripts do
    planned = runpy.run_path(str(ROOT / "bench" / "plan.py"))["table"](_results("plan"))
    return (
        SPEED.format(
            gpu="\n".join(parts),
            planned=planned,
            cpu=cpu,
            dreams=dreams,
            dreams_gpu=on_gpu,
            dreams_jax=beside_jax,
            dream=_dream(),
        ).rstrip()
        + "\n"
    )


def _dream() -> str:
    """Imagination by itself: what each setting brings."""
    found = _results("worldmodel_dream_gpu")
    if not found:
        return "Not measured."
    steps, rows = found["futures"] * found["steps"], found["rows"]
    lines = [
        f"What each setting brings, in milliseconds of a call of {found['futures']:,} futures × {found['steps']} "
        "steps: a third H200, read off a longer form of `bench/dream.py` while other jobs had most of the machine's "
        "cores (calls that are not captured are medians of 15, the others of 50).",
        "",
        "| | by the clock | the graph alone | imagined steps a second |",
        "|---|--:|--:|--:|",
    ]
    for name, row in rows.items():
        graph = f"{row['graph_ms']:.2f}" if "graph_ms" in row else "–"
        lines.append(f"| {name} | {row['wall_ms']:.2f} | {graph} | {1e3 * steps / row['wall_ms']:,.0f} |")
    return "\n".join(lines)


def _results(name: str) -> dict[str, Any]:
    path = ROOT / "bench" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def pages() -> dict[Path, str]:
    """Every generated page and its current text."""
    return {
        DOCS / "recipes.md": runpy.run_path(str(DOCS / "recipes_page.py"))["page"](),
        DOCS / "control_presets.md": control(),
        **{DOCS / f"{room}_settings.md": settings(room) for room in ROOMS},
        DOCS / "reference" / "cli.md": commands(),
        DOCS / "trl.md": fields(),
        DOCS / "speed.md": speed(),
        DOCS / "reaches.md": runpy.run_path(str(DOCS / "reaching.py"))["page"](),
        DOCS / "gsm8k.md": gsm8k(),
        DOCS / "speedrun.md": speedrun(),
        DOCS / "reliability.md": reliability(),
        **{DOCS / f"coming_from_{name}.md": coming_from(name) for name in SYSTEMS},
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
