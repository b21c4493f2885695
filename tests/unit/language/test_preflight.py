"""What is said before the first step."""

import dataclasses
import random

import pytest
import torch

from grpo.language.config import LanguageConfig
from grpo.language.preflight import Finding, check, report
from grpo.language.rewards import Rewards
from grpo.language.samples import Prompt, Sample
from tests.faults import reward_functions as functions
from tests.unit.language.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def prompts(*answers, **columns):
    return [Prompt(row, [1], "Why?", None, {"answer": answer, **columns}) for row, answer in enumerate(answers)]


def completion(prompt, text, stop="eos"):
    ids = torch.ones(len(text), dtype=torch.int64)
    return Sample(prompt, ids, ids.bool(), None, stop, text, [{"role": "assistant", "content": text}])


@pytest.fixture(scope="module")
def pool():
    """All rewards of these tests in one pool; each test looks at its own."""
    chosen = [functions.right, functions.constant, functions.zero, functions.prefers_nonsense]
    with Rewards([*chosen, functions.compares_numbers, functions.trl_style, functions.brevity], workers=1) as made:
        yield made


@pytest.fixture(scope="module")
def findings(pool):
    rows = prompts("18", "7", "42")
    return check(pool, rows, [completion(rows[0], "I do not know")], max_completion_length=64, tokenizer=TOKENIZER)


def about(findings, name):
    return [finding for finding in findings if finding.what.startswith(name)]


def test_a_good_reward_gets_its_range_printed_and_nothing_else(findings):
    (only,) = (finding for finding in about(findings, "right") if "spans" not in finding.what)
    assert only == Finding("note", "right gave 0 to 1 over 28 texts")


def test_a_constant_reward_is_named(findings):
    first, _ = about(findings, "constant")
    assert first.level == "warning" and "is always 0.5 on all it was shown" in first.what


def test_a_reward_that_is_always_zero_is_named(findings):
    first, _ = about(findings, "zero")
    assert first.level == "warning" and "is always zero on all it was shown" in first.what


def test_a_reward_that_disagrees_with_its_reference_is_named_with_a_row(findings):
    first, _ = about(findings, "prefers_nonsense")
    assert first.level == "warning"
    assert "disagrees with its own reference in 3 of 3 rows: row 0 has the answer '18', which gets 0.2" in first.what


def test_an_answer_of_another_type_is_named(findings):
    first, _ = about(findings, "compares_numbers")
    assert first.level == "problem"
    assert "gets the answer as str ('18') and treats it as a number" in first.what
    assert "float(reference_answer)" in first.remedy


def test_a_function_written_for_trls_chats_is_recognised_with_the_remedy(findings):
    (only,) = about(findings, "trl_style")
    assert only.level == "problem" and "reads completions as messages" in only.what and "TypeError" in only.what
    assert "grpo.language.rewards.messages(trl_style)" in only.remedy


def test_a_reward_that_asks_for_no_answer_may_like_nothing_best(findings):
    (only,) = about(findings, "brevity")
    assert only.level == "note"


def test_problems_come_first_and_the_report_has_every_line(findings):
    levels = [finding.level for finding in findings]
    assert levels == sorted(levels, key=("problem", "warning", "note").index)
    text = report(findings)
    assert all(finding.what in text and finding.remedy in text for finding in findings)


def test_numbers_as_answers_that_are_searched_as_text_are_named():
    with Rewards([functions.right], workers=1) as rewards:
        found = check(rewards, prompts(18, 7), max_completion_length=64, tokenizer=TOKENIZER)
    assert found[0].level == "problem"
    assert "right fails on" in found[0].what and "gets the answer as int (18) and treats it as text" in found[0].what


def test_references_longer_than_a_completion_may_be_are_counted():
    rows = [*prompts("1"), *prompts("2", answer_full="because " * 20 + "#### 2")]
    cut = [completion(rows[0], "hmm", stop="length")]
    with pytest.warns(UserWarning), Rewards([lambda completion, answer: answer in completion]) as rewards:
        found = check(rewards, rows, cut, max_completion_length=100, tokenizer=TOKENIZER)
    whats = [finding.what for finding in found if finding.level == "warning"]
    assert "1 of 2 references are longer than max_completion_length=100 tokens" in whats
    assert "1 of 1 completions were cut off at max_completion_length=100 tokens" in whats
    with pytest.warns(UserWarning), Rewards([lambda completion, answer: answer in completion]) as rewards:
        found = check(rewards, rows, cut, max_completion_length=1, tokenizer=TOKENIZER)
    assert not any("cut off" in finding.what for finding in found)  # one token is all that was asked for


def test_a_reward_that_fails_on_nothing_but_empty_text_is_a_warning():
    with pytest.warns(UserWarning), Rewards([lambda completion: float(completion[0] == "4")]) as rewards:
        found = check(rewards, prompts("4"), max_completion_length=9, tokenizer=TOKENIZER)
    assert found[0].level == "warning"
    assert "lambda fails on 1 of 9 texts; the first: row 0, an empty completion: IndexError" in found[0].what


def test_a_parameter_that_nothing_provides_is_a_problem():
    with pytest.warns(UserWarning), Rewards([lambda completion, level: 1.0]) as rewards:
        found = check(rewards, prompts("4"), max_completion_length=9, tokenizer=TOKENIZER)
    assert found[0].level == "problem" and "needs 'level'" in found[0].what


def test_settings_and_scales_get_advice():
    def advice(**settings):
        config = LanguageConfig(**settings)
        found = check(rewards, prompts("4"), max_completion_length=99, tokenizer=TOKENIZER, config=config)
        return [finding.what for finding in found if finding.level == "note"]

    with Rewards([functions.right, functions.brevity], workers=1) as rewards:
        odd = advice(temperature=1.5, beta=0.2, group_size=2)
        usual = advice(temperature=0.8, beta=0.04, group_size=8, reward_weights=(0.1, 1.0))
    assert {"temperature=1.5", "beta=0.2", "group_size=2 (num_generations)"} <= set(odd)
    assert any(what.startswith("right spans 1 and brevity only") for what in odd)
    assert len(usual) == 2 and all(" gave " in what for what in usual)


def test_the_randomness_of_training_is_left_alone():
    def draws(completion):
        random.random()
        return torch.rand(()).item()

    random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), torch.rand(()).item()
    random.seed(1)
    torch.manual_seed(1)
    with pytest.warns(UserWarning), Rewards([draws]) as rewards:
        check(rewards, prompts("4"), max_completion_length=9, tokenizer=TOKENIZER)
    assert (random.random(), torch.rand(()).item()) == expected


def test_a_reward_that_asks_environments_is_shown_only_what_went_through_one():
    asked = []

    def reached(completions, environments, **rest):
        asked.extend(environments)
        return [float(room.open) for room in environments]

    class Room:
        open = True

    rows = prompts("3", "4")
    played = [dataclasses.replace(completion(row, "4"), environment=Room()) for row in rows]
    with Rewards([reached, functions.right], workers=1) as rewards:
        found = check(rewards, rows, played, max_completion_length=64, tokenizer=TOKENIZER)
    assert asked and all(type(room) is Room for room in asked), "no made-up text comes with None in its place"
    assert about(found, "right"), "the others are tried on those, too"


def test_a_reward_that_forgets_its_return_is_asked_for_it():
    rows = prompts("18", "7", "42")
    with (
        Rewards([functions.forgets], workers=1) as alone,
        Rewards([functions.forgets, functions.brevity], workers=1) as beside,
    ):
        for pool, level in ((alone, "problem"), (beside, "warning")):
            (found,) = (one for one in check(pool, rows, max_completion_length=64, tokenizer=TOKENIZER)
                        if "missing return" in one.what)  # fmt: skip
            assert found.level == level and found.what == "forgets returned None for 24 of 27 texts: a missing return?"
