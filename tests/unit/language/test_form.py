"""Rewards for form, the names of all built-in rewards, and how programs are judged (without running any)."""

import copy
from multiprocessing.reduction import ForkingPickler

import pytest

from grpo.config import ConfigError
from grpo.language.rewards import form
from grpo.language.rewards.builtin import BUILTIN, make
from grpo.language.rewards.code import Code, _read, extract

WHOLE = "<think>2 + 2</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    "completion, tags",
    [
        (WHOLE, 4),
        (WHOLE.replace("think>", "reasoning>"), 4),
        (WHOLE + "\n\n", 4),
        ("<think>2 + 2</think> 4", 2),
        ("<answer>4</answer>", 2),
        ("<think>2 + 2 <answer>4", 2),
        (WHOLE.replace("</think>", "</think></think>"), 3),
        ("4", 0),
        ("", 0),
    ],
)
def test_each_tag_in_its_place_counts(completion, tags):
    assert form.xml(completion) == pytest.approx(0.125 * tags)
    assert form.Xml(1.0)(completion) == pytest.approx(tags)


def test_text_after_the_last_tag_costs_a_little_and_not_without_end():
    assert form.xml(WHOLE + " I hope") == pytest.approx(0.5 - 0.006)
    assert form.xml(WHOLE + "!" * 10**6) == pytest.approx(0.25)
    assert form.xml("<answer>4</answer><think>2 + 2</think>") == pytest.approx(0.25 - 0.02)


@pytest.mark.parametrize(
    "completion, reward",
    [
        (WHOLE, 1.0),
        ("\n" + WHOLE + "\n", 1.0),
        ("<think>a\nb</think><answer>c\nd</answer>", 1.0),
        ("well: " + WHOLE, 0.0),
        (WHOLE + " done", 0.0),
        (WHOLE * 2, 0.0),
        ("<think></think><answer>4</answer>", 0.0),
        ("<think>2 + 2</think><answer> </answer>", 0.0),
        ("<answer>4</answer><think>2 + 2</think>", 0.0),
        ("<think>2 + 2<answer>4</answer></think>", 0.0),
        ("<think>" * 100_000, 0.0),
    ],
)
def test_the_strict_form_is_all_or_nothing(completion, reward):
    assert form.think(completion) == reward


def test_a_pattern_is_searched_over_lines():
    assert [form.regex("^a.c$")(text) for text in ("abc", "a\nc", "abcd", "")] == [1.0, 1.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match=r"regex:\(: missing \)"):
        form.regex("(")


def test_length_is_counted_in_tokens():
    at = [form.length(target=10)("", completion_ids=[0] * n) for n in (10, 5, 15, 0, 50)]
    assert at == [0.0, -0.5, -0.5, -1.0, -1.0]
    over = [form.length(limit=10)("", completion_ids=[0] * n) for n in (0, 10, 15, 20, 50)]
    assert over == [0.0, 0.0, -0.5, -1.0, -1.0]
    for wrong in ({}, {"target": 1, "limit": 2}, {"target": 0}):
        with pytest.raises(ConfigError, match="target or limit"):
            form.length(**wrong)


def test_soft_overlong_is_dapos():
    penalty = form.soft_overlong(limit=100, buffer=20)
    assert [penalty("", [0] * n) for n in (0, 80, 85, 90, 100, 120)] == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    with pytest.raises(ConfigError, match="buffer"):
        form.soft_overlong(10, 11)


def test_repetition_is_the_share_of_ngrams_said_before():
    twice = form.repetition(n=2)
    assert [twice(text) for text in ("", "one", "a b c d", "a b A B")] == [0.0, 0.0, 0.0, pytest.approx(-1 / 3)]
    assert twice("na " * 1000) == pytest.approx(-1 + 1 / 999)


# --- names ----------------------------------------------------------------------------------------------------------

SETTINGS = {"correctness_reward": 2.0, "xml_reward": 0.25, "max_completion_length": 100, "reward_timeout": 8.0}


@pytest.fixture
def open_sandbox(monkeypatch):
    monkeypatch.setattr("grpo.language.rewards.sandbox.self_test", lambda: None)


def test_settings_reach_the_rewards(open_sandbox):
    made = {name: make(name + ":x" * (name == "regex"), SETTINGS) for name in BUILTIN}
    assert made["correctness"]("4", answer="4") == 2.0
    assert made["xml"](WHOLE) == 1.0
    assert made["length"]("", [0] * 75) == -0.5
    assert made["overlong"]("", [0] * 90) == -0.5
    assert made["code"] == Code(4.0)
    for name, reward in made.items():
        assert reward.__name__ == name
        assert ForkingPickler.dumps(reward)
        assert copy.deepcopy(reward) == reward


def test_a_name_may_carry_an_argument(open_sandbox):
    assert make("regex:a:b", {}) == form.Regex("a:b")
    assert make("length:30", {}) == form.Length(limit=30)
    assert make("repetition:2", {}) == form.Repetition(2)
    assert make("overlong:5", SETTINGS) == form.SoftOverlong(100, 5)
    assert make("correctness:3", SETTINGS)("1", "1") == 3.0
    assert make("code:2.5", SETTINGS) == Code(2.5)


@pytest.mark.parametrize(
    "name, message",
    [
        ("corectness", "did you mean correctness"),
        ("nothing like it", "there are correctness, xml"),
        ("regex", "regex:PATTERN"),
        ("length:long", "length:long: 'long' is not a number"),
        ("length:0", "at least 1"),
        ("think:1", "takes no argument"),
    ],
)
def test_wrong_names_and_arguments_are_named(name, message):
    with pytest.raises(ConfigError, match=message):
        make(name, SETTINGS)


def test_a_missing_sandbox_is_found_before_the_first_step(monkeypatch):
    monkeypatch.setattr("grpo.language.rewards.sandbox.self_test", lambda: "not here: apt install bubblewrap")
    with pytest.raises(ConfigError, match="apt install bubblewrap"):
        make("code", SETTINGS)
    with pytest.raises(ConfigError, match="apt install bubblewrap"):
        Code()("```python\n```", tests=["assert True"])


# --- programs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "completion, program",
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\nbetter:\n```py\nb\n```\n", "b\n"),
        ("```\na\n```\nit prints\n```text\n3\n```", "a\n"),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("```python\na", None),
        ("x = 1", "x = 1"),
        (" ", None),
    ],
)
def test_the_program_is_the_last_closed_block(completion, program):
    assert extract(completion) == program


@pytest.mark.parametrize("tests", [None, [], ""])
def test_a_row_without_tests_gets_no_opinion(tests):
    assert Code()("```python\n```", tests=tests) is None


@pytest.mark.parametrize(
    "given, entry_point, count",
    [
        (["assert f(1) == 2", "x = 1\nassert f(x) == 2"], None, 2),
        ("import math\nassert f(1) == 2\nassert f(2) == 3\n", None, 2),
        ("def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 3", "f", 2),
        ("def check(candidate):\n    assert candidate(1) == 2\ncheck(f)", None, 1),
        ([{"input": "1", "output": "2"}], None, 1),
        ('[{"input": "1", "output": "2"}, {"input": ["1", "2"], "output": 3}]', None, 2),
        ({"inputs": ["1", "2"], "outputs": ["2", "3"]}, None, 2),
        ("['assert f(1) == 2']", None, 1),
    ],
)
def test_tests_are_read_in_their_usual_forms(given, entry_point, count):
    assert len(_read(given, entry_point)) == count


@pytest.mark.parametrize(
    "given, message",
    [
        (["assert f(1) ==", "assert True"], r"tests\[0\]: not Python"),
        (["assert True", 7], r"tests\[1\]: neither"),
        ("def check(candidate):\n    pass", "entry_point"),
        ("# nothing", "no statement"),
    ],
)
def test_tests_that_cannot_be_read_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        _read(given, None)
