"""Several turns are learned from: an environment is listened to, and a calculator is used where it pays."""

import json
import math
import runpy
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo.language import GRPOConfig, GRPOTrainer
from grpo.language.tasks import tiny_model, tiny_tokenizer
from grpo.language.turns.tools import Toolbox, parse_calls

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "calculator.json"

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*cannot run in another process", "ignore:.*runs in this process", "ignore:.*prompts for .* in a step"
)


class Echo:
    """Says a letter, and wants to hear it."""

    def reset(self, row):
        self.letter, self.said = row["answer"], False

    def step(self, completion):
        if self.said:
            return None, float(completion.strip().startswith(self.letter)), True
        self.said = True
        return [{"role": "user", "content": self.letter}], 0.0, False


def test_an_environment_teaches_a_model_from_scratch_to_listen():
    """Whoever always says the same letter is right half of the time at most."""
    torch.set_num_threads(1)
    words = tiny_tokenizer("ab?\n")
    settings = {"num_generations": 16, "groups_per_step": 4, "learning_rate": 3e-3, "max_completion_length": 16}
    trainer = GRPOTrainer(
        model=tiny_model(len(words), seed=1, width=32, layers=2),
        processing_class=words,
        reward_funcs=lambda completion: 0.0,
        environment=Echo,
        train_dataset=[{"prompt": "?", "answer": letter} for letter in "ab"],
        args=GRPOConfig(preflight=False, **settings),
    )
    rewards = [trainer.step()["reward"] for _ in range(32)]
    assert rewards[0] < 0.4
    assert sum(rewards[-5:]) / 5 > 0.75


@pytest.fixture(scope="module")
def example():
    """The script's own names; its functions cannot be sent elsewhere and run here, which is quick."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "calculator.py")))


@pytest.mark.parametrize(
    "expression", ["2**999999", "__import__('os')", "a", "1.5*2", "(1).real", "1 if 1 else 2", "["]
)
def test_the_calculator_knows_arithmetic_only(example, expression):
    with pytest.raises((ValueError, SyntaxError)):
        example.calculator(expression)


def test_the_calculator_is_right(example):
    assert example.calculator("123*456") == 56088
    assert example.calculator("-(7+2*3)//2") == -7


def test_held_out_prompts_are_no_training_prompts(example):
    train, held_out = example.rows(0)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert len({row["prompt"] for row in held_out}) == len(held_out) == 300
    assert sum(row["needs_tool"] for row in held_out) == 200


def test_a_demonstration_is_what_the_conversation_would_be(example):
    """Played by an engine that says what the demonstration says, the very same tokens and mask come out."""
    tools = Toolbox([example.calculator])
    trainer = example.make_trainer(0, tools)
    prompt = trainer.source.prompts[0]
    shown = example.demonstration(trainer, prompt, True)
    turns = trainer.tokens.tokenizer.decode(shown.ids).split("<|assistant|>")
    turns[0] = turns[0].split("<eos>")[0]

    def generate(prompts, count, sampling, seeds):
        ids = torch.tensor(trainer.chat.encode(turns.pop(0), bare=False))
        return [SimpleNamespace(ids=ids, logp=None, stop="stop", kept=None, version=None)]

    engine = SimpleNamespace(generate=generate, context=math.inf, conversing=nullcontext)
    [(_, [played])] = trainer.source.player(engine, [prompt], 1, trainer.config.sampling, [0])
    assert played.ids.tolist() == shown.ids.tolist() and played.made.tolist() == shown.made.tolist()
    assert played.text == prompt.columns["answer"] and (played.calls, played.failed_calls) == (1, 0)
    assert len(parse_calls(played.messages[0]["content"])) == 1
    trainer.source.close()


def test_the_results_that_are_kept_are_as_promised():
    found = json.loads(RESULTS.read_text())
    assert len(found["runs"]) >= 3
    assert found["called_where_needed"]["min"] >= 0.8
    assert found["points_over_no_tool"]["min"] >= 30
    for run in found["runs"]:
        assert run["with_tool"]["trained"]["called_needs_none"] <= 0.2


@pytest.mark.slow
def test_the_tool_is_learned(example):
    tools = Toolbox([example.calculator])
    run = {"with_tool": example.learn(3, tools, 600, 100), "without_tool": example.learn(3, None, 600, 20)}
    assert run["with_tool"]["trained"]["called_needs_tool"] >= 0.8
    assert example.gain(run) >= 30
