"""Rewards run while other groups are sampled: begun early, in parts of whole groups, and otherwise without a trace."""

import json
import multiprocessing
import os
import random
import time
from contextlib import closing, contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from grpo.config import ConfigError
from grpo.language import GRPOConfig, GRPOTrainer
from grpo.language.config import LanguageConfig
from grpo.language.data.chat import prepare_tokenizer
from grpo.language.engines import Completion, Engine, Sampling, in_groups
from grpo.language.engines.hf import HFEngine
from grpo.language.players import OneAnswer
from grpo.language.rewards import Rewards
from grpo.language.samples import Prompt
from grpo.language.source import LanguageSource
from grpo.run.folder import RunFolder
from tests.unit.language import overlap_functions as functions
from tests.unit.language.functions import digits
from tests.unit.language.tiny import tiny_model, tiny_tokenizer

TOKENS = prepare_tokenizer(tiny_tokenizer())
LONG = 120
"""Seconds after which a test that hangs has failed."""


class Paced(Engine):
    """An engine whose prompts end in the order given; `before` is called with each number before it is handed over."""

    name, exact = "paced", True

    def __init__(self, order=None, before=lambda number: None):
        self.order, self.before, self.ended = order, before, 0

    def stream(self, prompts, count, sampling, seeds):
        for number in self.order or range(len(prompts)):
            self.before(number)
            self.ended += 1
            yield number, [self._made(prompts[number], seed) for seed in seeds[number * count : (number + 1) * count]]

    def _made(self, prompt, seed):
        ids = torch.tensor([*prompt, *TOKENS.tokenizer("x" * (seed % 5))["input_ids"]])
        return Completion(ids, torch.zeros(len(ids)), "eos", 1.0)

    def refresh(self, version=0): ...
    def close(self): ...


def prompts(count, **columns):
    """Number n says n: every completion begins with its prompt."""
    return [
        Prompt(n, TOKENS.tokenizer(str(n))["input_ids"], str(n), None, {"name": str(n), **columns})
        for n in range(count)
    ]


def source_of(rewards, engine, **settings):
    """A source with a stand-in for everything but rewards and player."""
    policy = SimpleNamespace(version=0, eval=lambda: None, precision=nullcontext)
    data = SimpleNamespace(epoch_steps=lambda groups: 1.0)
    return LanguageSource(policy, engine, OneAnswer(TOKENS), TOKENS, data, None, rewards, LanguageConfig(**settings))


@contextmanager
def made(functions, engine, workers=2, timeout=LONG, **settings):
    """The same with processes of its own."""
    with closing(source_of(Rewards(functions, workers=workers, timeout=timeout), engine, **settings)) as source:
        yield source


def judge(source, asked, count=2, step=3):
    return source.judged(asked, count, Sampling(), 0, (step, 0))


def batches(folder):
    """What `remembers_its_batches` was called with, call by call."""
    return [
        json.loads(path.read_text()) for path in sorted(folder.glob("*.json"), key=lambda p: int(p.name.split("-")[0]))
    ]


def drawn(place):
    """What the call of this number in step 3 draws first: the pool's own word for it, kept from run to run."""
    draw = random.Random(f"0/3/{place}")
    draw.getrandbits(32)  # for the generators of other libraries
    return draw.random()


def children():
    return {child.pid for child in multiprocessing.active_children()}


def wait_for(path):
    end = time.monotonic() + LONG
    while not path.exists():
        assert time.monotonic() < end, f"{path.name}: no reward was called while the engine was sampling"
        time.sleep(0.01)


# --- begun early ----------------------------------------------------------------------------------------------------


def test_rewards_begin_before_sampling_has_ended(tmp_path):
    """The last prompt does not end before the first has been judged."""
    engine = Paced(before=lambda number: wait_for(tmp_path / "called") if number == 7 else None)
    with made(functions.leaves_a_mark, engine) as source:
        samples, judged = judge(source, prompts(8, folder=str(tmp_path)))
    assert [row for row, sample in enumerate(samples) if judged.parts_NK[row, 0] != len(sample.text)] == []


class Enough(Exception):
    """All that was to be seen has been seen."""


def test_a_call_that_hangs_does_not_hold_up_the_parts_behind_it(tmp_path):
    """One of two workers never answers; the other judges what comes later, while it comes."""

    def before(number):
        if number >= 2:
            wait_for(tmp_path / str(number - 1))
        if number == 7:
            raise Enough

    with made(functions.hangs_at_zero, Paced(before=before)) as source, pytest.raises(Enough):
        judge(source, prompts(8, folder=str(tmp_path)), count=1)


# --- without a trace ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_by_one():
    with Rewards([functions.draws, functions.notes, functions.refuses_sevens], workers=2, timeout=LONG) as rewards:
        yield rewards


@pytest.fixture(scope="module")
def at_once(one_by_one):
    return judge(source_of(one_by_one, Paced(), overlap_rewards=False), prompts(16))


@pytest.mark.parametrize("settings", [{}, {"rows_per_generation": 6}, {"overlap_rewards": False}])
@pytest.mark.parametrize("order", [None, "backwards", "shuffled"])
def test_order_seeds_and_results_do_not_depend_on_who_ends_first(order, settings, one_by_one, at_once):
    size = 3 if "rows_per_generation" in settings else 16
    numbers = list(range(size)) if order is None else list(range(size))[::-1]
    if order == "shuffled":
        random.Random(1).shuffle(numbers)

    class Ordered(Paced):
        def stream(self, prompts, count, sampling, seeds):
            self.order = [number for number in numbers if number < len(prompts)]
            return super().stream(prompts, count, sampling, seeds)

    samples, judged = judge(source_of(one_by_one, Ordered(), **settings), prompts(16))
    before, expected = at_once
    assert [(s.prompt.row, s.text, s.error, s.rewards, s.extras) for s in samples] == [
        (s.prompt.row, s.text, s.error, s.rewards, s.extras) for s in before
    ]
    assert judged.parts_NK.tobytes() == expected.parts_NK.tobytes()
    assert (judged.errors, judged.metrics, judged.extras) == (expected.errors, expected.metrics, expected.extras)


def test_a_call_draws_from_its_row_in_the_step():
    with made([functions.draws_for_all, functions.draws], Paced([5, 1, 0, 7, 2, 3, 6, 4])) as source:
        _, judged = judge(source, prompts(8))
    assert judged.parts_NK[:, 1].tolist() == [drawn(1 + row) for row in range(16)]
    assert len(set(judged.parts_NK[:, 0])) == 16  # no two parts draw alike


def test_functions_of_this_process_see_the_whole_step_in_order(recwarn):
    seen = []

    def here(completions):
        seen.append(list(completions))
        return [random.random() for _ in completions]

    random.seed(5)
    with made(here, Paced([3, 1, 0, 2])) as source:
        samples, judged = judge(source, prompts(4))
    assert seen == [[sample.text for sample in samples]]
    draw = random.Random(5)
    assert judged.parts_NK[:, 0].tolist() == [draw.random() for _ in samples]


def test_a_failure_names_its_rows_and_no_others():
    order = [7, 0, 6, 1, 5, 2, 4, 3]
    with made([functions.refuses_sevens, functions.refuses_batches_of_seven], Paced(order)) as source:
        samples, judged = judge(source, prompts(8))
    assert list(judged.errors) == [14, 15] and list(judged.tracebacks) == [14, 15]
    assert "refuses_sevens: ValueError: a seven" in judged.errors[14]
    assert "refuses_batches_of_seven: ValueError: a seven" in samples[15].error
    assert [sample.error for sample in samples[:14]] == [None] * 14


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_batches():
    with Rewards(functions.remembers_its_batches, workers=1, timeout=LONG) as rewards:
        yield rewards


@pytest.mark.parametrize(
    ("groups", "count", "settings", "sizes"),
    [
        (16, 2, {}, [4] * 8),
        (10, 3, {}, [6] * 5),
        (9, 2, {}, [4, 4, 4, 4, 2]),
        (4, 2, {}, [2] * 4),
        (10, 3, {"overlap_rewards": False}, [30]),
        (10, 3, {"rows_per_generation": 3}, [6] * 5),
    ],
)
def test_batches_are_whole_groups_and_at_least_an_eighth(groups, count, settings, sizes, in_batches, tmp_path):
    order = None if "rows_per_generation" in settings else list(range(groups))[::-1]
    asked = prompts(groups, folder=str(tmp_path))
    _, judged = judge(source_of(in_batches, Paced(order), **settings), asked, count)
    called = batches(tmp_path)
    assert [len(batch) for batch in called] == sizes
    for batch in called:
        names = [name for name, _ in batch]
        assert all(names.count(name) == count for name in names)
        assert all(text.startswith(name) for name, text in batch)
    assert not judged.errors


def test_what_is_awaited_is_awaited_together(tmp_path):
    """It takes as long for many as for one, and its own limits (a semaphore) hold for the whole step."""
    with made(functions.awaits_its_batch, Paced([3, 2, 1, 0])) as source:
        _, judged = judge(source, prompts(4, folder=str(tmp_path)))
    assert [[name for name, _ in batch] for batch in batches(tmp_path)] == [["0", "0", "1", "1", "2", "2", "3", "3"]]
    assert not judged.errors


def test_a_column_of_one_part_is_known_in_all():
    asked = [*prompts(7), Prompt(7, [9], "7", None, {"name": "7", "level": 5})]
    with made(functions.levels, Paced()) as source:
        _, judged = judge(source, asked, count=1)
    assert judged.parts_NK[:, 0].tolist() == [0.0] * 7 + [5.0]


def test_what_nothing_provides_is_refused_before_it_costs_anything():
    engine = Paced()
    with made(functions.levels, engine) as source, pytest.raises(ConfigError, match="levels needs 'level'"):
        judge(source, prompts(16), count=1)
    assert engine.ended < 16


# --- cut off --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_sampling_that_breaks_leaves_nothing_behind(error, tmp_path):
    """Rewards that would take for ever are under way when the engine fails: nobody waits for them."""

    def fails(number):
        if number == 5:
            end = time.monotonic() + LONG
            while not list(tmp_path.glob("pid-*")):
                assert time.monotonic() < end
                time.sleep(0.01)
            raise error("the engine is gone")

    before = children()
    with made(functions.never_returns, Paced(before=fails), timeout=10 * LONG) as source:
        with pytest.raises(error, match="the engine is gone"):
            judge(source, prompts(8, folder=str(tmp_path)))
        assert torch.is_grad_enabled()
    assert children() == before
    for path in tmp_path.glob("pid-*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name.removeprefix("pid-")), 0)


def test_the_next_step_is_judged_after_one_that_broke(tmp_path):
    def fails(number):
        if number == 5:
            raise RuntimeError("once")

    with made([functions.draws, functions.leaves_a_mark], Paced(before=fails)) as source:
        asked = prompts(8, folder=str(tmp_path))
        with pytest.raises(RuntimeError, match="once"):
            judge(source, asked)
        source.engine = Paced()
        _, judged = judge(source, asked)
    assert judged.parts_NK[:, 0].tolist() == [drawn(row) for row in range(16)]


def test_closing_does_not_wait_for_what_was_never_finished(tmp_path):
    before = children()
    rewards = Rewards(functions.never_returns, workers=1, timeout=10 * LONG)
    rewards.open(["folder"], 4, 0)
    rewards.close()
    assert children() == before


# --- in a run -------------------------------------------------------------------------------------------------------


def test_a_run_says_how_long_it_waited_and_is_the_same_twice(tmp_path):
    def train(name):
        config = GRPOConfig(
            output_dir=str(tmp_path / name), max_steps=2, num_generations=4, prompts_per_step=4, preflight=False,
            max_completion_length=6, reward_workers=1,
        )  # fmt: skip
        rows = [{"prompt": f"{n}+{n}="} for n in range(6)]
        trainer = GRPOTrainer(
            model=tiny_model(), processing_class=tiny_tokenizer(), reward_funcs=digits, args=config, train_dataset=rows
        )
        trainer.train(progress=None)
        return RunFolder.open(tmp_path / name)

    first, second = train("first"), train("second")
    for row in first.timing():
        assert row["rewards_wait"] >= 0 and row["generate"] + row["rewards_wait"] <= row["collect"] <= row["total"]
    assert (first.path / "metrics.jsonl").read_bytes() == (second.path / "metrics.jsonl").read_bytes()
    assert b"wait" not in (first.path / "metrics.jsonl").read_bytes()


def test_groups_are_cut_from_what_comes_in_order():
    drawn = iter("aabbcc")
    groups = in_groups(drawn, 2)
    assert next(groups) == (0, ["a", "a"])
    assert next(drawn) == "b"  # nothing is taken before it is asked for
    assert list(in_groups([], 2)) == []


def test_transformers_hands_over_a_batch_at_a_time():
    model = tiny_model()
    calls, generate = [], model.generate
    model.generate = lambda **named: calls.append(len(named["input_ids"])) or generate(**named)
    engine, asked = HFEngine(model, TOKENS, rows_at_a_time=4), [[5, 6], [7, 8], [9, 10]]
    greedy = Sampling(max_new_tokens=5, temperature=0.0)
    groups = engine.stream(asked, 2, greedy, range(6))
    first = next(groups)
    assert calls == [4] and first[0] == 0 and torch.is_grad_enabled()
    streamed = dict([first, *groups])
    whole = engine.generate(asked, 2, greedy, range(6))
    assert [c.ids.tolist() for n in range(3) for c in streamed[n]] == [c.ids.tolist() for c in whole]
