"""A transformer made from scratch learns when to reach for a calculator: a few minutes on one core, no download.

    python examples/calculator.py --seeds 0 1 2 --json runs/calculator.json

Asked for products of three-digit numbers, which it cannot work out in its head, and for those with 1, 10 and 100,
which it can. A supervised warm start shows it both ways of answering: mostly out of its head, one time in five with
the tool. GRPO then finds out which pays where: a right answer is worth 1, and 0.9 if it took a call. Told for held-out
prompts: with the tool, with the tool taken away afterwards, and for a model trained the same way without one.
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from grpo.language import GRPOConfig, GRPOTrainer
from grpo.language.samples import Prompt, Sample
from grpo.language.source import OneAnswer
from grpo.language.tasks import tiny_model
from grpo.language.turns.tools import Toolbox

WITH_TOOL = 0.2
"""Share of the demonstrations that use the tool."""
PIECES = ("<tool_call>", '{"name": "calculator", "arguments": {"expression": "', '"}}', "</tool_call>")
MARKS = ("<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>")
TEMPLATE = (
    "{% if tools %}{{ '<|tools|>' }}{% for t in tools %}{{ t.function.name }}{% endfor %}{{ '<eos>' }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# --- the tool and the task ------------------------------------------------------------------------------------------

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}


def calculator(expression: str) -> int:
    """Work out an expression of whole numbers.

    Args:
        expression: numbers with + - * // and brackets between them
    """
    if len(expression) > 100:
        raise ValueError("the expression is too long")

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return int(OPERATIONS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        raise ValueError("only whole numbers and + - * // are known")

    return value(ast.parse(expression, mode="eval").body)


def worth(completion: str, answer: str, completion_messages: list[dict[str, Any]]) -> float:
    """1 for the right answer, 0.1 less where it took a call; nothing for a wrong one."""
    called = any(message["role"] == "tool" for message in completion_messages)
    return (0.9 if called else 1.0) if completion == answer else 0.0


def rows(seed: int, held_out: int = 200) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Prompts to learn from and held-out ones, none in both; two of three need the tool."""
    draw = random.Random(seed)
    hard = [f"{100 + n // 900}*{100 + n % 900}" for n in draw.sample(range(900 * 900), 4000)]
    easy = [f"{n}*{power}" for n in range(100, 1000) for power in (1, 10, 100)]
    draw.shuffle(easy)
    products = {True: [p for p in hard if p not in easy], False: easy}
    half = held_out // 2
    every = {
        needs: [{"prompt": p, "answer": str(calculator(p)), "needs_tool": needs} for p in some]
        for needs, some in products.items()
    }
    train = every[True][held_out:] + every[False][half : len(every[True]) // 2]
    draw.shuffle(train)
    return train, every[True][:held_out] + every[False][:half]


# --- the model ------------------------------------------------------------------------------------------------------


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a character, and one for each fixed piece of a call."""
    words = [*MARKS, *"0123456789+*-", *"abcdefghijklmnopqrstuvwxyz :()',"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=512
    )
    found.add_special_tokens({"additional_special_tokens": list(MARKS[3:])})
    found.add_tokens([AddedToken(piece, normalized=False) for piece in (*PIECES, "calculator")])
    found.chat_template = TEMPLATE
    return found


def make_trainer(seed: int, tools: Toolbox | None) -> GRPOTrainer:
    """A fresh model, and all that teaches it."""
    words = tokenizer()
    train, held_out = rows(seed)
    return GRPOTrainer(
        model=tiny_model(len(words), seed, width=64, layers=2),
        processing_class=words,
        reward_funcs=worth,
        train_dataset=train,
        eval_dataset=held_out,
        tools=tools,
        args=GRPOConfig(
            seed=seed,
            num_generations=8,
            groups_per_step=16,
            learning_rate=1e-3,
            max_completion_length=48,
            reward_workers=1,
            preflight=False,
        ),
    )


def demonstration(trainer: GRPOTrainer, prompt: Prompt, with_tool: bool) -> Sample:
    """A way to answer, as if it had been sampled; what the tool says in it is not learned."""
    encode, answer = trainer.chat.encode, str(prompt.columns["answer"])
    ids: list[int] = []
    made: list[bool] = []
    if with_tool:
        call, head, tail, end = PIECES
        assert prompt.messages is not None
        said = encode(f"{call}{head}{prompt.messages[-1]['content']}{tail}{end}", bare=False)
        heard = trainer.chat.extend(said, prompt.messages, [{"role": "tool", "content": answer}])
        ids, made = said + heard, [True] * len(said) + [False] * len(heard)
    told = encode(answer + "<eos>", bare=False)
    ids, made = ids + told, made + [True] * len(told)
    return Sample(prompt, torch.tensor(ids), torch.tensor(made), logp=None, stop="eos", text=answer)


def warm_start(trainer: GRPOTrainer, steps: int, share: float, batch: int = 64, rate: float = 5e-3) -> None:
    """Learn to imitate: from demonstrations of which this share uses the tool."""
    policy, draw = trainer.policy, random.Random(trainer.config.seed)
    weights = list(policy.parameters().values())
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    policy.train()
    shown = [
        [demonstration(trainer, prompt, tool) for tool in (False, True)] for prompt in trainer.source.prompts.first()
    ]
    for _ in range(steps):
        samples = [both[draw.random() < share] for both in draw.sample(shown, batch)]
        logp_NT = policy.scorer(samples, max(sample.length for sample in samples)).logp_NT
        loss = -logp_NT.sum() / sum(int(sample.made.sum()) for sample in samples)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
    optimizer.zero_grad()
    policy.version += 1


# --- what came of it ------------------------------------------------------------------------------------------------


def score(trainer: GRPOTrainer) -> dict[str, float]:
    """Greedy answers to held-out prompts."""
    samples = trainer.evaluate().samples
    found = {}
    for name, some in (
        ("all", samples),
        ("needs_tool", [s for s in samples if s.prompt.columns["needs_tool"]]),
        ("needs_none", [s for s in samples if not s.prompt.columns["needs_tool"]]),
    ):
        found[f"accuracy_{name}"] = statistics.mean(s.text == s.prompt.columns["answer"] for s in some)
        found[f"called_{name}"] = statistics.mean(s.calls > 0 for s in some)
    return found


def learn(seed: int, tools: Toolbox | None, warm: int, steps: int) -> dict[str, Any]:
    """Scores after the warm start and after GRPO, and the curve between them."""
    began = time.process_time()
    trainer = make_trainer(seed, tools)
    warm_start(trainer, warm, WITH_TOOL if tools else 0.0)
    found: dict[str, Any] = {"warm_start": score(trainer)}
    reports = [trainer.step() for _ in range(steps)]
    found["trained"] = score(trainer)
    if tools:
        trainer.source.player = OneAnswer(trainer.tokens)  # the prompts stay as they are, but nobody answers a call
        found["tool_taken_away"] = score(trainer)
        tools.close()
    trainer.source.close()
    found["cpu_seconds"] = round(time.process_time() - began, 1)
    wanted = ("reward", "tools/call_frequency") if tools else ("reward",)
    return found | {"curve": {name: [round(report[name] or 0.0, 4) for report in reports] for name in wanted}}


def gain(run: dict[str, Any]) -> float:
    """Points of accuracy over all held-out prompts, above the better of the two without a tool."""
    others = (run["with_tool"]["tool_taken_away"], run["without_tool"]["trained"])
    return 100 * float(run["with_tool"]["trained"]["accuracy_all"] - max(o["accuracy_all"] for o in others))


def spread(values: list[float]) -> dict[str, float]:
    """Over seeds."""
    return {"mean": round(statistics.mean(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def main() -> None:
    """Train and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="which (0)")
    parser.add_argument("--warm", type=int, default=600, help="supervised steps (600)")
    parser.add_argument("--steps", type=int, default=100, help="GRPO steps (100)")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    given = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny: threads only cost
    runs = []
    for seed in given.seeds:
        tool = learn(seed, Toolbox([calculator], workers=1), given.warm, given.steps)
        runs.append({"seed": seed, "with_tool": tool, "without_tool": learn(seed, None, given.warm, given.steps)})
        before, after = tool["warm_start"], tool["trained"]
        print(
            f"seed {seed}: called in {before['called_needs_tool']:.0%} → {after['called_needs_tool']:.0%} of the "
            f"prompts that need it and in {after['called_needs_none']:.0%} of the others; "
            f"right {before['accuracy_all']:.0%} → {after['accuracy_all']:.0%}, "
            f"{gain(runs[-1]):+.0f} points over no tool; {tool['cpu_seconds']:.0f} s",
            flush=True,
        )
    if given.json:
        trained = [run["with_tool"]["trained"] for run in runs]
        told = {
            "called_where_needed": spread([found["called_needs_tool"] for found in trained]),
            "called_elsewhere": spread([found["called_needs_none"] for found in trained]),
            "accuracy_where_needed": spread([found["accuracy_needs_tool"] for found in trained]),
            "points_over_no_tool": spread([gain(run) for run in runs]),
            "warm_steps": given.warm,
            "grpo_steps": given.steps,
            "runs": runs,
        }
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
