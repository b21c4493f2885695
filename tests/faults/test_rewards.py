"""Whatever a reward function does costs at most the samples it was asked about, and is said."""

import math
import os
import random
import sys

import numpy as np
import pytest
import torch

from grpo.config import ConfigError
from grpo.language.rewards import Rewards
from grpo.language.samples import Prompt, Sample
from tests.faults import reward_functions as functions

TIMEOUT = 1.5


def sample(text, row=0, messages=None, **columns):
    ids = torch.arange(max(1, len(text)) % 7 + 1)
    prompt = Prompt(row, [1], "Why?", None, columns)
    said = [{"role": "assistant", "content": text}] if messages is None else messages
    return Sample(prompt, ids, torch.ones_like(ids, dtype=torch.bool), None, "eos", text, said)


@pytest.fixture(scope="module")
def one_by_one():
    with Rewards([functions.behaves], timeout=TIMEOUT, workers=2) as made:
        yield made


@pytest.fixture(scope="module")
def batched():
    with Rewards([functions.batch], timeout=TIMEOUT, workers=1) as made:
        yield made


def judge(rewards, *texts, step=0, **columns):
    return rewards.judge([sample(text, row, **columns) for row, text in enumerate(texts)], step)


@pytest.mark.parametrize(
    "what, error",
    [
        ("raises", "behaves: ValueError: no such reward (reward_functions.py:"),
        ("exits", "behaves: SystemExit: 0"),
        ("interrupts", "behaves: KeyboardInterrupt"),
        ("dies", "behaves: its process died (exit code 3)"),
        ("unheard of", "behaves: KeyError: 'unheard of'"),
        ("str", "behaves: gave '1.0' (str), which is not a number"),
        ("numpy str", "behaves: gave '1.0' (str), which is not a number"),
        ("nan", "behaves: gave nan; return None where"),
        ("inf", "behaves: gave -inf"),
        ("large", "behaves: gave 1e+39, which float32 cannot hold; scale it"),
        ("long", "behaves: gave a number too large for a float; scale it"),
        ("large parts", "behaves: gave 6e+38, which float32 cannot hold"),
        ("list", "behaves: gave list, which is not a number"),
        ("vector", "behaves: gave ndarray, which is not one number"),
        ("complex", "behaves: gave complex"),
        ("bad parts", "behaves: gave 'yes' (str)"),
    ],
)
def test_a_bad_answer_costs_its_sample_and_names_the_function(what, error, one_by_one):
    judgement = judge(one_by_one, "int", what, "bool")
    assert judgement.errors.keys() == {1} and judgement.errors[1].startswith(error)
    assert "\n" not in judgement.errors[1]
    np.testing.assert_array_equal(judgement.parts_NK[:, 0], [2.0, np.nan, 1.0])


def test_the_traceback_is_kept_and_starts_in_the_users_code(one_by_one):
    trace = judge(one_by_one, "raises").tracebacks[0]
    assert trace.rstrip().endswith("such reward") and "in raises" in trace
    assert "calling.py" not in trace


def test_hangs_are_killed_and_cost_only_themselves(one_by_one):
    """Asleep, busy, a catastrophic regular expression inside C, deaf to SIGTERM."""
    judgement = judge(one_by_one, "sleeps", "int", "spins", "regex", "deaf", "bool")
    assert judgement.errors == dict.fromkeys((0, 2, 3, 4), f"behaves: no answer in {TIMEOUT:g} s, killed")
    assert judgement.parts_NK[[1, 5], 0].tolist() == [2.0, 1.0]


def test_scalars_of_every_kind_are_rewards(one_by_one):
    judgement = judge(one_by_one, "bool", "int", "numpy", "array")
    assert judgement.errors == {}
    assert judgement.parts_NK[:, 0].tolist() == [1.0, 2.0, 0.5, 0.25]


def test_tensors_are_rewards():
    with pytest.warns(UserWarning, match="runs in this process"):
        rewards = Rewards([lambda completion: torch.tensor(0.75), lambda completions: torch.tensor([0.5, 0.25])])
    with rewards:
        assert judge(rewards, "a", "b").parts_NK.tolist() == [[0.75, 0.5], [0.75, 0.25]]


def test_parts_are_summed_and_logged_one_by_one(one_by_one):
    judgement = judge(one_by_one, "parts", "parts", "int")
    assert judgement.parts_NK[:, 0].tolist() == [1.5, 1.5, 2.0]
    assert judgement.metrics["rewards/behaves/right"] == 1.0
    assert judgement.metrics["rewards/behaves/form"] == 0.5
    assert "rewards/behaves/style" not in judgement.metrics


def test_no_opinion_from_anybody_is_told_by_its_row_and_fails_nothing(one_by_one):
    samples = [sample("none", row=17), sample("int", row=18)]
    with pytest.warns(UserWarning, match="all reward functions returned None for some completions"):
        judgement = one_by_one.judge(samples, 0)
    assert judgement.errors == {} and np.isnan(judgement.parts_NK[0]).all()


def test_what_a_call_changes_stays_in_its_process(one_by_one):
    before = os.getcwd(), dict(os.environ), random.getstate()
    judgement = judge(one_by_one, *["moves", "where"] * 4)
    assert judgement.parts_NK[:, 0].tolist() == [1.0] * 8
    assert (os.getcwd(), dict(os.environ), random.getstate()) == before


def test_draws_depend_on_seed_step_and_sample_only(one_by_one):
    first, again, later = (judge(one_by_one, *["draws"] * 5, step=step).parts_NK[:, 0].tolist() for step in (1, 1, 2))
    assert first == again
    assert len({*first, *later}) == 10


def test_big_and_odd_text_passes_through():
    texts = ["x" * 1_000_000, "a\0b", "\x1b[31mred\x1b[0m", "\ud800", ""]
    with Rewards([functions.length], timeout=60, workers=1) as rewards:
        assert judge(rewards, *texts).parts_NK[:, 0].tolist() == [1e6, 3.0, 12.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "kind, error",
    [
        ("short", "batch: gave 2 rewards for 3 completions"),
        ("long", "batch: gave 4 rewards for 3 completions"),
        ("endless", "batch: gave more than 3 rewards for 3 completions"),
        ("number", "batch: gave float for 3 completions"),
        ("none", "batch: gave NoneType for 3 completions"),
        ("str", "batch: gave '111' (str) for 3 completions"),
        ("dict", "batch: gave dict for 3 completions"),
        ("raises", "batch: ValueError: no such reward"),
        ("raising generator", "batch: ZeroDivisionError"),
        ("sleeps", "batch: no answer in 1.5 s, killed"),
    ],
)
def test_a_batch_that_cannot_be_read_fails_as_a_whole(kind, error, batched):
    judgement = judge(batched, "a", "b", "c", kind=kind)
    assert judgement.errors.keys() == {0, 1, 2}
    assert all(found.startswith(error) for found in judgement.errors.values())
    assert np.isnan(judgement.parts_NK).all()


@pytest.mark.parametrize("kind", ["generator", "array", "tuple"])
def test_a_batch_may_be_any_sequence(kind, batched):
    judgement = judge(batched, "a", "b", "c", kind=kind)
    assert judgement.errors == {} and judgement.parts_NK[:, 0].tolist() == [0.0, 1.0, 2.0]


def test_bad_items_of_a_batch_cost_their_own_sample():
    with Rewards([functions.batch, functions.length], timeout=30, workers=1) as rewards:
        rubbish = judge(rewards, "a", "b", "c", kind="with rubbish")
        partly = judge(rewards, "a", "b", "c", kind="with None")
    assert rubbish.errors.keys() == {0, 1}
    np.testing.assert_array_equal(rubbish.parts_NK, [[np.nan] * 2, [np.nan] * 2, [2.0, 1.0]])
    assert partly.errors == {}
    np.testing.assert_array_equal(partly.parts_NK, [[np.nan, 1.0], [1.0, 1.0], [2.0, 1.0]])


@pytest.mark.parametrize("here", [False, True])
def test_functions_get_copies(here):
    def mine(completions, answer, completion_messages):
        return functions.mutates(completions, answer, completion_messages)

    samples = [sample(text, answer=[text]) for text in ("a", "b")]
    if here:
        with pytest.warns(UserWarning, match="mine runs in this process, without a time limit"):
            rewards = Rewards([mine])
    else:
        rewards = Rewards([functions.mutates], workers=1)
    with rewards:
        assert rewards.judge(samples, 0).errors == {}
    assert [(s.text, s.prompt.columns["answer"], s.messages[0]["content"]) for s in samples] == [
        ("a", ["a"], "a"),
        ("b", ["b"], "b"),
    ]


def test_a_function_that_cannot_be_sent_runs_here_and_its_failures_are_still_data():
    with pytest.warns(UserWarning, match="runs in this process.*define it at the top of a module"):
        rewards = Rewards([lambda completion: 1 / len(completion), lambda completions: sys.exit(1)])
    with rewards:
        judgement = judge(rewards, "ab", "")
    assert rewards.names == ("lambda", "lambda_2")
    assert judgement.errors[0].startswith("lambda_2: SystemExit: 1 (test_rewards.py:")
    assert "lambda: ZeroDivisionError" in judgement.errors[1] and "lambda_2: SystemExit" in judgement.errors[1]


@pytest.mark.parametrize("here", [False, True])
def test_one_failure_among_awaited_calls_costs_one_sample(here):
    async def mine(completion):
        return await functions.awaited(completion)

    texts = ("ab", "raises", "sleeps", "exits", "cancels", "abc")
    if here:
        with pytest.warns(UserWarning, match="mine runs in this process"):
            rewards = Rewards([mine], timeout=TIMEOUT)
    else:
        rewards = Rewards([functions.awaited], timeout=TIMEOUT)
    with rewards:
        judgement = judge(rewards, *texts)
    name = rewards.names[0]
    assert judgement.parts_NK[[0, 5], 0].tolist() == [2.0, 3.0]
    assert judgement.errors.keys() == {1, 2, 3, 4}
    assert judgement.errors[1].startswith(f"{name}: ValueError: no such reward")
    assert judgement.errors[2] == f"{name}: no answer in 1.5 s, cancelled"
    assert judgement.errors[3].startswith(f"{name}: SystemExit")
    assert judgement.errors[4].startswith(f"{name}: CancelledError")


def test_a_failure_of_one_function_fails_the_sample_but_not_the_others():
    with Rewards([functions.right, functions.behaves], timeout=30, workers=1) as rewards:
        judgement = judge(rewards, "int", "raises", answer="int")
    np.testing.assert_array_equal(judgement.parts_NK, [[1.0, 2.0], [np.nan, np.nan]])
    assert judgement.metrics["rewards/right/mean"] == 1.0


def test_a_file_that_breaks_or_lacks_the_function_is_a_setting_error(tmp_path):
    (tmp_path / "mine.py").write_text("def correctness(completion):\n    return 1.0\n")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    for word, error in {
        f"{tmp_path}/mine.py:corectness": "no function 'corectness'; did you mean \"correctness\"",
        f"{tmp_path}/mien.py:correctness": 'does not exist; did you mean "mine.py"',
        f"{tmp_path}/broken.py:x": "cannot be loaded: ModuleNotFoundError",
        f"{tmp_path}/mine.py": "which function.*it has correctness",
        "no_module_here:x": "reward module no_module_here",
        "corectness": "unknown reward 'corectness'; did you mean \"correctness\"",
    }.items():
        with pytest.raises(ConfigError, match=error):
            Rewards([word])


def test_a_reward_that_patches_python_is_told_and_later_calls_do_not_see_it():
    told = pytest.warns(UserWarning, match=r"reward patches changed math\.pi: its process is replaced")
    with Rewards([functions.patches], timeout=30.0, workers=1) as rewards, told:
        judgement = judge(rewards, "a", "b")
    assert judgement.parts_NK.tolist() == [[math.pi - 3], [math.pi - 3]]
    assert judgement.metrics["rewards/patches/changed_python"] == 1.0
