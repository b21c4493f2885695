"""One extractor, one comparison: what counts as the answer and when it is right."""

import copy
import sys

import pytest

from grpo.language.rewards.maths import Correctness, correctness, extract, make_correctness, same

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = <<48+24=72>>72 clips.\n#### 72"
NUMINA = r"We have $x^2 = 2$, hence $x = \sqrt{2}$. The area is $\boxed{\frac{3\sqrt{2}}{2}}$ square units."


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"so \boxed{12}", "12"),
        (r"first \boxed{3}, no: \boxed{4}.", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{5} and then \boxed{", "5"),
        (r"\boxed{5} and then \boxed{ }", "5"),
        (r"\boxed{6}. The answer is 5", "6"),
        ("<think>18 or 19?</think><answer>18</answer>", "18"),
        ("<answer>1</answer> <answer> 2 </answer>", "2"),
        (r"<answer>\boxed{9}</answer>", "9"),
        ("<answer>She makes 18 dollars every day.</answer>", "18"),
        ("16 - 7 = 9\n#### 9\nDone, 10 out of 10.", "9"),
        (GSM8K, "72"),
        ("The answer is 42.", "42"),
        ("The final answer is: **42**", "42"),
        ("the answer is $\\frac{2}{3}$.", "$\\frac{2}{3}$"),
        ("The answer is 12 because 3 * 4 = 12.", "12"),
        ("The answer is 18 or 20", "18 or 20"),
        ("The answer is Tuesday", "Tuesday"),
        ("To find the answer: first we add 3 and 4. That makes 7", "7"),
        ("Answer: 3.5 km", "3.5 km"),
        ("answer = -7", "-7"),
        ("It costs $1,234.50 in all", "$1,234.50"),
        ("5 apples and 3 pears make 8", "8"),
        ("10-5", "5"),
        ("it fell to -5", "-5"),
        ("that is 3/4 of it", "3/4"),
        (r"hence \frac{3}{8}", r"\frac{3}{8}"),
        ("a rise of 25%", "25%"),
        ("I do not know", None),
        ("", None),
        ("\0\x1b[m\ud800", None),
    ],
)
def test_the_answer_a_text_gives(text, answer):
    assert extract(text) == answer


RIGHT = [
    ("18", "18"),
    ("18", "#### 18"),
    ("72", GSM8K),
    ("18.00", "18"),
    ("$18", "18"),
    (r"\$18.50", "18.5"),
    ("18 dollars", "18"),
    ("18 dollars per day", "$18"),
    ("1,234", "1234"),
    ("1234567", "1,234,567"),
    (r"1{,}234", "1234"),
    ("-5", "-5"),
    ("−5", "-5"),
    ("+5", "5"),
    ("007", "7"),
    ("0.50", ".5"),
    ("1/2", "0.5"),
    ("2/4", "1/2"),
    (r"\frac{1}{2}", "1/2"),
    (r"\dfrac12", "0.5"),
    (r"-\frac{3}{4}", "-0.75"),
    (r"2\frac{1}{2}", "2.5"),
    ("2 1/2", "5/2"),
    ("0.333333", "1/3"),
    ("0.666667", r"\frac{2}{3}"),
    ("50%", "50"),
    ("50%", "0.5"),
    (r"50\%", "50%"),
    ("12.5 percent", "12.5%"),
    ("1.5e3", "1500"),
    (r"1.5 \times 10^{3}", "1500"),
    ("2*10^-3", "0.002"),
    ("3 million", "3,000,000"),
    ("5 cm", "5"),
    ("5cm", "5"),
    (r"5\text{ cm}", "5"),
    (r"12\text{ m}^2", "12"),
    (r"45^\circ", "45"),
    ("45°", "45"),
    ("$12$", "12"),
    (r"\(12\)", "12"),
    ("12.", "12"),
    (r"\text{Tuesday}", "tuesday"),
    ("(B)", "B"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\frac{\sqrt2}{2}", "sqrt(2)/2"),
    (r"\frac{3\sqrt{2}}{2}", NUMINA),
    ("1.41421356", r"\sqrt{2}"),
    (r"\pi/2", r"\frac{\pi}{2}"),
    ("x+1", "1+x"),
    ("(x+1)^2", "x^2+2x+1"),
    ("x = 5", "5"),
    ("5", "x = 5"),
    ("(1, 2)", "(1,2)"),
    (r"\left(1, 2\right)", "(1,2)"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("3, 4", r"3\text{ or }4"),
    ("[0,1)", r"\left[0,1\right)"),
    (r"x > 3", r"(3,\infty)"),
    (r"2^{2023}", r"2\cdot 2^{2022}"),
    ("10!", "3628800"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("3+4i", "4i+3"),
]
WRONG = [
    ("19", "18"),
    ("-18", "18"),
    ("1,234", "1.234"),
    ("1234", "123"),
    ("18 or 19", "18"),
    ("18, 19, 20", "18"),
    ("0.33", "1/3"),
    ("1e-9", "2e-9"),
    ("1000000.5", "1000000"),
    (r"10^{-9}", r"2 \cdot 10^{-9}"),
    ("0.5%", "50%"),
    ("5 million", "5"),
    ("1/0", "5"),
    ("3x", "3"),
    ("2pi", "2"),
    ("3i", "3"),
    ("", "5"),
    ("5", ""),
    ("banana", "5"),
    ("A", "B"),
    ("Tuesday", "Monday"),
    (r"\frac{1}{3}", r"\frac{1}{2}"),
    (r"\sqrt{2}", r"\sqrt{3}"),
    ("x+1", "x-1"),
    ("(1,2)", "(2,1)"),
    ("[0,1]", "[0,1)"),
    (r"2^{2022}", r"2^{2023}"),
    (r"\frac{", "5"),
    (r"}}}{{{", "5"),
    ("__import__('os').getcwd()", "5"),
    ("9" * 501, "9" * 500 + "8"),
    (r"\sum_{k=1}^{10} k", "55"),
]


def test_the_same_text_is_right_however_long_it_is():
    assert same("9" * 501, "9" * 501)


@pytest.mark.parametrize("answer, reference", RIGHT)
def test_right_answers_are_right(answer, reference):
    assert same(answer, reference)


@pytest.mark.parametrize("answer, reference", WRONG)
def test_wrong_answers_are_wrong(answer, reference):
    assert not same(answer, reference)


@pytest.mark.parametrize(
    "completion, answer, reward",
    [
        ("so there are 72 of them", GSM8K, 1.0),
        (r"hence $\boxed{\tfrac{3}{2}\sqrt{2}}$", NUMINA, 1.0),
        ("The answer is 5.", 5, 1.0),
        ("The answer is 5.", 5.0, 1.0),
        ("The answer is 5.", "6", 0.0),
        ("no idea", "6", 0.0),
        ("", "6", 0.0),
        ("5", None, None),
        ("5", "  ", None),
    ],
)
def test_correctness_of_a_completion(completion, answer, reward):
    assert correctness(completion, answer) == reward


def test_what_a_right_answer_is_worth_can_be_set_and_travels():
    reward = make_correctness(2.0)
    assert copy.deepcopy(reward) == reward == Correctness(2.0)
    assert reward.__name__ == "correctness"
    assert (reward("5", "5"), reward("5", "6"), reward("5")) == (2.0, 0.0, None)


def test_plain_numbers_need_no_library_and_latex_says_which(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert same("1,234", "1234") and same("1/2", "0.5") and not same("banana", "5")
    with pytest.raises(ImportError, match=r"pip install 'anygrpo\[language\]'"):
        same(r"2\sqrt{3}", r"\sqrt{12}")


def test_the_answer_is_looked_for_at_the_end_of_long_texts():
    assert extract(r"\boxed{1}" + " word" * 10_000 + r" \boxed{2}") == "2"
    assert extract("1 " + "word " * 10_000) is None
