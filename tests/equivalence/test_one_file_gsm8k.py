"""`examples/one_file_gsm8k.py` imports nothing of ours and takes the steps of `grpo train gsm8k`."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest
import torch

from grpo.app.builders import TASKS, configs
from grpo.app.settings import flag_layer, preset_layer, resolve
from grpo.language.engines import Completion, Engine, in_groups
from grpo.language.rewards.form import Xml
from grpo.language.rewards.maths import Correctness
from tests.unit.language.tiny import tiny_model, tiny_tokenizer

FILE = Path(__file__).parents[2] / "examples" / "one_file_gsm8k.py"
FORMS = ("<think>so</think><answer>{}</answer>", "<answer>{}</answer> I think", "It is {}", "<think>{}", "#### {}", "?")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("one_file_gsm8k", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def resolved(**flags):
    words = [(name.replace("_", "-"), str(value)) for name, value in flags.items()]
    return resolve([preset_layer("gsm8k"), flag_layer(words)], configs())


def test_imports_only_torch_and_transformers_and_is_short():
    text = FILE.read_text(encoding="utf-8")
    tree = ast.parse(text)
    names = [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    foreign = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert foreign == {"torch", "transformers"}
    assert len(text.splitlines()) <= 200


def test_its_settings_are_the_presets(script):
    got = resolved(model="x")
    mine = dataclasses.asdict(script.Settings())
    mine.pop("rows_per_pass")
    assert mine.pop("epochs") == got.run.num_train_epochs
    for name, value in mine.items():
        assert getattr(got.config, name) == value, name
    assert got.config.system_prompt == script.SYSTEM
    assert got.config.rewards == ("correctness", "xml") and got.config.weight_decay == 0 and got.config.one_update


class Fixed(Engine):
    """An engine that has only given completions to offer, and no log-probs of its own."""

    name, exact = "fixed", False

    def __init__(self, completions) -> None:
        self.completions, self.asked = completions, []

    def stream(self, prompts, count, sampling, seeds):
        self.asked.append([list(prompt) for prompt in prompts])
        made = [Completion(ids, None, "eos" if int(ids[-1]) == 2 else "length") for ids in self.completions]
        return in_groups(made, count)

    def refresh(self, version: int = 0) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model in a folder, questions in a file, and completions of every kind: right, wrong, well-formed, cut off."""
    folder = tmp_path_factory.mktemp("gsm8k")
    tokenizer, model = tiny_tokenizer(), tiny_model()
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    rows = [{"question": f"What is {n}+{n * n}?", "answer": f"Add them.\n#### {n + n * n:,}"} for n in range(30, 46)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw, completions = random.Random(0), []
    for n in range(30, 46):
        for _ in range(4):
            text = draw.choice(FORMS).format(n + n * n + draw.choice((0, 0, 1)))
            ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [2] * draw.choice((0, 1, 1))
            completions.append(torch.tensor(ids))
    return folder, completions


def library_steps(folder, completions, steps, learning_rate):
    """What `grpo train gsm8k --model … --dataset …` does, but for the order of the rows and who samples."""
    got = resolved(
        model=folder / "model", dataset=folder / "train.jsonl", shuffle="false", preflight="false", device="cpu",
        learning_rate=learning_rate,
    )  # fmt: skip
    trainer = TASKS[got.task].trainer(got.config)
    trainer.source.engine = Fixed(completions)
    gradients = watched(trainer.optimizer)
    try:
        reports = [trainer.step() for _ in range(steps)]
    finally:
        trainer.source.close()
    weights = {name: weight.detach().clone() for name, weight in trainer.policy.parameters().items()}
    return reports, gradients, weights, trainer.source.engine.asked


def watched(optimizer):
    """The gradient of each update, once it is clipped."""
    found = []
    group = optimizer.param_groups[0]["params"]
    optimizer.register_step_pre_hook(lambda *_: found.append(torch.cat([p.grad.flatten() for p in group])))
    return found


def script_steps(script, folder, completions, steps, learning_rate, monkeypatch):
    asked = []

    def given(model, tokenizer, prompts, settings):
        asked.append(prompts)
        return completions

    monkeypatch.setattr(script, "sample", given)
    settings = dataclasses.replace(script.Settings(), learning_rate=learning_rate)
    tokenizer = script.AutoTokenizer.from_pretrained(folder / "model")
    model = script.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    gradients = watched(optimizer)
    rows = script.load_rows(folder / "train.jsonl")
    told = [script.step(model, reference, optimizer, tokenizer, rows, settings) for _ in range(steps)]
    return told, gradients, dict(model.named_parameters()), asked


@pytest.mark.parametrize(("steps", "learning_rate"), [(1, 1e-6), (3, 1e-3)])
def test_same_steps_as_the_command(script, world, steps, learning_rate, monkeypatch):
    """The first step as the preset has it; then three with a learning rate at which the KL is no longer zero."""
    folder, completions = world
    reports, gradients, weights, prompts = library_steps(folder, completions, steps, learning_rate)
    told, own_gradients, own_weights, asked = script_steps(
        script, folder, completions, steps, learning_rate, monkeypatch
    )
    assert asked == prompts and len(asked[0]) == 16
    for report, mine in zip(reports, told, strict=True):
        assert report["rewards/correctness/mean"] == pytest.approx(mine["right"], abs=1e-7) and 0 < mine["right"] < 1
        assert report["reward"] == pytest.approx(mine["reward"], abs=1e-6)
        assert report["completions/mean_length"] == mine["length"]
        assert report["loss"] == pytest.approx(mine["loss"], abs=1e-6)
        assert report["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-5)
    for ours, mine in zip(gradients, own_gradients, strict=True):
        assert (ours - mine).norm() < 1e-5 * mine.norm()
    before = script.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    moved = 0.0
    for name, weight in before.named_parameters():
        ours, mine = weights[name], own_weights[name]
        torch.testing.assert_close(ours, mine, rtol=0, atol=0.1 * learning_rate if steps == 1 else 1e-6)
        moved = max(moved, float((mine - weight).detach().abs().max()))
    assert moved > 0.9 * learning_rate
    if steps > 1:
        assert reports[-1]["kl"] > 1e-3


def test_same_advantages_as_the_library(script):
    from grpo import Experience, Rollouts, recipe

    reward_N = torch.rand(64, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    reward_N[4:8] = 0.3
    rollouts = Rollouts(
        group_N=torch.arange(64) // 4,
        mask_NT=torch.ones(64, 1, dtype=torch.bool),
        old_logp_NT=torch.zeros(64, 1),
        reward_N=reward_N,
    )
    ours_N = Experience.build(rollouts, recipe("grpo")).advantage_NT[:, 0].float()
    torch.testing.assert_close(script.advantages(reward_N, 4), ours_N, rtol=1e-6, atol=1e-6)
    assert not script.advantages(reward_N, 4)[4:8].any()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>6·7</think><answer>42</answer>", "42"),
        ("<think>6·7</think><answer>$42.00</answer> and that is all", "42"),
        ("<answer>41</answer> or 42", "42"),
        ("so\n#### 1,234", "1234"),
        ("#### 12345", "12,345"),
        ("first 3, then 5-3", "3"),
        ("it is -7", "-7"),
        ("it is 7", "-7"),
        ("<think>1</think><think>2</think><answer>2.5</answer>", "2.5"),
        ("</think><think></answer><answer>", "1"),
        ("nothing", "1"),
        ("", "1"),
    ],
)
def test_same_rewards_as_the_library(script, text, answer):
    assert script.correctness(text, answer) == Correctness()(text, answer)
    assert script.form(text) == pytest.approx(Xml()(text), abs=1e-9)


def test_it_samples_groups_that_end_where_they_should(script):
    torch.manual_seed(0)
    tokenizer, model = tiny_tokenizer(), tiny_model()
    settings = dataclasses.replace(script.Settings(), max_completion_length=40, temperature=1.5, top_p=1.0)
    prompts = [script.render(tokenizer, question) for question in ("1?", "longer, 2?")]
    made = script.sample(model, tokenizer, prompts, settings)
    assert len(made) == 2 * settings.group_size and len({tuple(row.tolist()) for row in made}) > 1
    for row in made:
        assert 2 not in row[:-1] and (row[-1] == 2 or len(row) == 40)
    assert min(map(len, made)) < 40


def test_batches_pass_over_every_row_in_an_order_of_their_own(script):
    rows = list(range(10))
    drawn = [row for step in range(5) for row in script.batch_of(rows, step, 4, seed=1)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == rows and drawn[:10] != drawn[10:]
    assert script.batch_of(rows, 3, 4, seed=1) == drawn[12:16] != script.batch_of(rows, 3, 4, seed=2)


def test_the_command_prints_a_line_a_step_and_leaves_the_model(script, world, tmp_path, monkeypatch, capsys):
    folder, completions = world
    monkeypatch.setattr(script, "sample", lambda *_: completions)
    words = ["--model", folder / "model", "--data", folder / "train.jsonl", "--steps", 2, "--output", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["one_file_gsm8k.py", *map(str, words)])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[1].startswith("step    2  reward ")
    script.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
