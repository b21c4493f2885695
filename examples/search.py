"""A transformer made from scratch learns to look things up before it answers: minutes on one core, no download.

    python examples/search.py --seeds 0 1 2 --json runs/search.json

A library is written into a folder: files of facts such as `k3c is 7`, drawn anew for every seed. A question names a
fact (`k3c?`). What the model says in return is either its answer, a digit, which ends the conversation, or `find` and
words: then the environment searches the files and tells it the lines that hold them, three at most, and the model goes
on. The digits are drawn, so that guessing is right one time in ten, and questions that are held out are about facts
that no training question was about: nothing can be known by heart. A supervised warm start shows both ways, one time
in five with a search; GRPO finds out what pays: a right answer is worth 1, and each search costs 0.05. A search takes a
moment, and all conversations search at once. Told for held-out questions: conversations as they are sampled while
training, and with the likeliest token each time, which is a search from the start, for there are ten digits to guess.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import string
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AddedToken

from grpo.language import GRPOConfig, GRPOTrainer
from grpo.language.samples import Prompt, Sample
from grpo.language.tasks import tiny_model, tiny_tokenizer

WITH_SEARCH = 0.2
"""Share of the demonstrations that search."""
HELD_OUT = 100
DELAY = 0.002
"""Seconds that a search takes."""
LINES = 3
"""That are found, at most."""
CHARACTERS = string.digits + string.ascii_lowercase + " ?.-\n"
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# --- the library and who searches it ---------------------------------------------------------------------------------


def write_library(folder: Path, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Files of facts; questions to learn from and held-out ones, none about the same fact."""
    draw = random.Random(seed)
    rows = []
    for name in "kmpt":
        names = [f"{name}{digit}{letter}" for digit in string.digits for letter in string.ascii_lowercase]
        facts = {key: draw.choice(string.digits) for key in names}
        (folder / f"{name}.txt").write_text("".join(f"{key} is {value}\n" for key, value in facts.items()))
        rows += [{"prompt": f"{key}?", "answer": value, "library": str(folder)} for key, value in facts.items()]
    draw.shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def search(library: str, words: str) -> str:
    """The lines of a folder's files that hold these words."""
    found = []
    for file in sorted(Path(library).glob("*.txt")):
        found += [line for line in file.read_text().splitlines() if words in line]
    return "\n".join(found[:LINES]) or "-"


class Library:
    """Answers `find WORDS` with what stands in the files; anything else is the model's answer."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.row = row

    async def step(self, completion: str) -> tuple[str | None, float, bool]:
        command, _, words = completion.partition(" ")
        if command != "find":
            return None, float(completion == self.row["answer"]), True
        await asyncio.sleep(DELAY)
        return search(self.row["library"], words) if len(words) > 1 else "-", -0.05, False


# --- the model -------------------------------------------------------------------------------------------------------


def make_trainer(seed: int, folder: Path) -> GRPOTrainer:
    """A fresh model, and all that teaches it."""
    train, held_out = write_library(folder, seed)
    words = tiny_tokenizer(CHARACTERS)
    words.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    words.add_tokens([AddedToken("find ", normalized=False)])
    words.chat_template = TEMPLATE
    return GRPOTrainer(
        model=tiny_model(len(words), seed, width=64, layers=3),
        processing_class=words,
        environment=Library,
        train_dataset=train,
        eval_dataset=held_out,
        args=GRPOConfig(
            seed=seed, num_generations=8, groups_per_step=16, learning_rate=1e-3, max_completion_length=80,
            max_turns=4, turn_timeout=30.0, preflight=False,
        ),
    )  # fmt: skip


def demonstration(trainer: GRPOTrainer, prompt: Prompt, searches: bool, guess: str) -> Sample:
    """A conversation as if it had been sampled; what the environment says in it is not learned."""
    encode, columns = trainer.chat.encode, prompt.columns
    ids: list[int] = []
    made: list[bool] = []
    answer = str(columns["answer"]) if searches else guess
    if searches:
        assert prompt.messages is not None
        words = str(prompt.messages[-1]["content"])[:-1]
        said = encode(f"find {words}<eos>", bare=False)
        told = {"role": "user", "content": search(str(columns["library"]), words)}
        heard = trainer.chat.extend(said, prompt.messages, [told])
        ids, made = said + heard, [True] * len(said) + [False] * len(heard)
    last = encode(f"{answer}<eos>", bare=False)
    ids, made = ids + last, made + [True] * len(last)
    return Sample(prompt, torch.tensor(ids), torch.tensor(made), logp=None, stop="eos", text=answer)


def warm_start(trainer: GRPOTrainer, steps: int, batch: int = 64, rate: float = 3e-3) -> None:
    """Learn to imitate: mostly guesses, and some searches."""
    policy, draw = trainer.policy, random.Random(trainer.config.seed)
    weights = list(policy.parameters().values())
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    policy.train()
    prompts = trainer.source.prompts.first()
    for _ in range(steps):
        samples = [
            demonstration(trainer, prompt, draw.random() < WITH_SEARCH, draw.choice(string.digits))
            for prompt in draw.sample(prompts, batch)
        ]
        logp_NT = policy.scorer(samples, max(sample.length for sample in samples)).logp_NT
        loss = -logp_NT.sum() / sum(int(sample.made.sum()) for sample in samples)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
    optimizer.zero_grad()
    policy.version += 1


# --- what came of it -------------------------------------------------------------------------------------------------


def score(trainer: GRPOTrainer) -> dict[str, float]:
    """Conversations about held-out facts: sampled, and greedy."""
    sampled, greedy = (trainer.evaluate(samples=count).samples for count in (4, None))
    said = [[m["content"] for m in sample.messages if m["role"] == "assistant"] for sample in sampled]
    return {
        "accuracy": _accuracy(sampled),
        "searched": statistics.mean(any(str(text).startswith("find ") for text in some) for some in said),
        "greedy_accuracy": _accuracy(greedy),
    }


def _accuracy(samples: Sequence[Sample]) -> float:
    return statistics.mean(float(sample.text == sample.prompt.columns["answer"]) for sample in samples)


def learn(seed: int, warm: int, steps: int, folder: Path) -> dict[str, Any]:
    """Scores after the warm start and after GRPO, and the curve between them."""
    began = time.process_time()
    trainer = make_trainer(seed, folder)
    warm_start(trainer, warm)
    found: dict[str, Any] = {"seed": seed, "warm_start": score(trainer)}
    reports = [trainer.step() for _ in range(steps)]
    found["trained"] = score(trainer)
    trainer.source.close()
    found["cpu_seconds"] = round(time.process_time() - began, 1)
    return found | {"reward": [round(report["reward"] or 0.0, 3) for report in reports]}


def spread(values: list[float]) -> dict[str, float]:
    """Over seeds."""
    return {"mean": round(statistics.mean(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def main() -> None:
    """Train and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="which (0)")
    parser.add_argument("--warm", type=int, default=600, help="supervised steps (600)")
    parser.add_argument("--steps", type=int, default=80, help="GRPO steps (80)")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    given = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny: threads only cost
    runs = []
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(learn(seed, given.warm, given.steps, Path(folder)))
        before, after = runs[-1]["warm_start"], runs[-1]["trained"]
        print(
            f"seed {seed}: searched in {before['searched']:.0%} → {after['searched']:.0%} of the conversations; "
            f"right {before['accuracy']:.0%} → {after['accuracy']:.0%}; {runs[-1]['cpu_seconds']:.0f} s",
            flush=True,
        )
    if given.json:
        told: dict[str, Any] = {
            name: {key: spread([run[name][key] for run in runs]) for key in ("accuracy", "searched", "greedy_accuracy")}
            for name in ("warm_start", "trained")
        }
        told |= {"warm_steps": given.warm, "grpo_steps": given.steps, "runs": runs}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
