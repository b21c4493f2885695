"""Hostile answers end as wrong: they never hang and are never run. (A hang inside C is killed: see test_workers.)"""

import gc
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo.language.preflight import check
from grpo.language.rewards import Rewards, algebra, maths
from grpo.language.rewards.maths import Correctness, correctness, extract, same
from grpo.workers import Pool
from tests.faults.hostile_answers import everything, roots
from tests.unit.language.test_preflight import completion, prompts
from tests.unit.language.tiny import tiny_tokenizer

HOSTILE = {
    "a tower of powers": r"\boxed{9^{9^{9}}}",
    "a tower as Python": "The answer is 9**9**9",
    "a tower without braces": r"\boxed{9^9^9^9}",
    "powers of powers": r"\boxed{((9^{9999})^{9999})^{9999}}",
    "a product as exponent": r"\boxed{9^{(99999)(99999)}}",
    "a huge exponent": "The answer is 1e999999999",
    "a huge negative exponent": r"\boxed{10^{-99999999999}}",
    "a huge factorial": r"\boxed{99999999!}",
    "factorials of factorials": r"\boxed{((10!)!)!}",
    "a huge binomial": r"\boxed{\binom{999999999}{499999999}}",
    "a power of a sum": r"\boxed{(x+y+z)^{9999}}",
    "a sum left undone": r"\boxed{\sum_{k=1}^{10^9} \sin(k^k)}",
    "an integral left undone": r"\boxed{\int_0^1 e^{-x^x} \sin(x^{17}) dx}",
    "deep braces": r"\boxed{" + "{" * 200 + "5" + "}" * 200 + "}",
    "deep brackets": r"\boxed{" + "(" * 200 + "5" + ")" * 200 + "}",
    "deep fractions": r"\boxed{" + r"\frac{" * 60 + "1" + "}{2}" * 60 + "}",
    "braces that never close": r"\boxed{" * 100_000,
    "tags that never close": "<answer>" * 100_000,
    "a million characters": "9" * 1_000_000,
    "a million characters of LaTeX": r"\boxed{" + r"\frac{1}{" * 100_000 + "2" + "}" * 100_000 + "}",
    "a million answers": "The answer is " * 80_000,
    "Python": r"\boxed{__import__('os').system('touch pwned')}",
    "sympy": r"\boxed{Integer(5).__class__.__init__.__globals__}",
    "odd text": "\0\x1b[m\ud800" * 1000,
}


def grade(completion):
    """Its reward, and the CPU time it took."""
    began = time.process_time()
    return Correctness()(completion, answer="5"), time.process_time() - began


@pytest.fixture(scope="module")
def outcomes():
    with Pool(grade, workers=1, timeout=120) as pool:
        return dict(zip(HOSTILE, pool.map(HOSTILE.values()), strict=True))


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_answers_are_wrong_at_once(what, outcomes):
    """None of them gets as far as the algebra, whose own limit is `PATIENCE`."""
    reward, seconds = outcomes[what].value
    assert reward == 0.0
    assert seconds < 5.0


def in_a_hurry(completion):
    """The verdict with little patience, and whether it was given up: by its size, or by its time."""
    algebra.PATIENCE = 0.02
    logged = []
    return Correctness()(completion, "5", log_metric=lambda *metric: logged.append(metric)), logged


def test_no_answer_costs_a_process():
    """What is left once sizes are bounded runs in Python, which the time limit reaches: nothing has to be killed."""
    assert len(everything()) >= 200
    completions = everything()[::4]
    with Pool(in_a_hurry, workers=1, timeout=60) as pool:
        outcomes = pool.map(completions)
    assert [completion for completion, outcome in zip(completions, outcomes, strict=True) if not outcome.ok] == []
    given_up = [logged == [("rewards/correctness/too_large", 1.0)] for _, logged in (o.value for o in outcomes)]
    assert sum(given_up) > 50
    assert all(outcome.value[0] == 0.0 for outcome, lost in zip(outcomes, given_up, strict=True) if lost)


@pytest.mark.parametrize("text", [r"9^{9999999}", r"\left(\frac{9}{7}\right)^{999999}", r"e^{3^{999}^9}", "(99999)!"])
def test_numbers_that_are_too_large_are_never_worked_out(text, monkeypatch):
    monkeypatch.setattr("math_verify.verify", None)
    with pytest.raises(algebra.TooLarge, match="bits"):
        algebra.equal(text, "5")


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        (r"\frac{\binom{5}{2}}{2^5}", r"\frac{5}{16}"),
        (r"\binom{10}{5}\cdot 2^{5}", "8064"),
        (r"\binom{n}{2}^2", r"\left(\frac{n(n-1)}{2}\right)^2"),
        (r"2^{3} {5 \choose 2}", "80"),
        (r"\Gamma(5)^{2}", "576"),
        (r"\gcd(123456, 7890) \cdot 2^2", "24"),
        (r"3^{2^{5}}", "1853020188851841"),
        (r"2^{2^{10}}", r"4^{2^{9}}"),
    ],
)
def test_the_bounds_leave_honest_answers_right(answer, reference):
    assert maths.compare(answer, reference)


@pytest.mark.parametrize(
    "text",
    [
        r"\binom{2^{99}}{2}",
        r"\binom{99999}{2}",
        r"{9^9 \choose 5}",
        r"2^{\gcd(99999!, 7)}",
        r"\Gamma(9999 \cdot 9999)",
        r"\Gamma(\Gamma(99))",
        r"\Gamma(\lfloor eeeeeeeeeeee \rfloor)",
    ],
)
def test_arguments_that_count_too_far_are_never_worked_out(text):
    assert algebra.refused(text) == "it counts too far"


@pytest.mark.parametrize("text", list(roots()))
def test_large_numbers_under_roots_are_never_factored(text, monkeypatch):
    monkeypatch.setattr("math_verify.verify", None)
    with pytest.raises(algebra.TooLarge, match="root"):
        algebra.equal(text, "5")


def test_the_time_limit_says_nothing_where_it_ends_a_generator(capsys, monkeypatch, looked_at):
    """What is raised while an object is put away goes nowhere but to standard error."""
    monkeypatch.setattr("sys.unraisablehook", sys.__unraisablehook__)

    def numbers():
        try:
            yield 1
        finally:
            for _ in range(100_000):
                len("")

    with pytest.raises(algebra.OutOfTime), algebra.cpu_limit(0.001):
        next(numbers())
        while True:
            len("")
    assert capsys.readouterr().err == ""


@pytest.fixture(params=["timer", "calls"])
def looked_at(request, monkeypatch):
    """Both ways to look at the time."""
    assert algebra._timer_is_free()
    if request.param == "calls":
        monkeypatch.setattr(algebra, "_timer_is_free", lambda: False)
    return request.param


def test_the_time_limit_leaves_signals_timers_and_profilers_as_they_were(looked_at):
    def late():
        with algebra.cpu_limit(0.001):
            while True:
                len("")

    for _ in range(3):
        with algebra.cpu_limit(30.0):
            len("")
        with pytest.raises(algebra.OutOfTime):
            late()
        gc.collect()
        assert signal.getsignal(signal.SIGPROF) == signal.SIG_DFL
        assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
        assert sys.getprofile() is None


def test_a_signal_that_somebody_has_use_for_is_not_taken(monkeypatch):
    before = signal.signal(signal.SIGPROF, mine := lambda number, frame: None)
    try:
        with pytest.raises(algebra.OutOfTime), algebra.cpu_limit(0.001):
            while True:
                len("")
        assert signal.getsignal(signal.SIGPROF) is mine
    finally:
        signal.signal(signal.SIGPROF, before)


def test_the_time_limit_holds_in_threads_too():
    def work():
        with algebra.cpu_limit(0.01):
            while True:
                len("")

    with ThreadPoolExecutor(1) as thread, pytest.raises(algebra.OutOfTime):
        thread.submit(work).result(30)


def test_the_time_limit_outlives_whoever_catches_it(looked_at):
    def stubborn():
        for _ in range(3):
            try:
                while True:
                    len("")
            except BaseException:
                continue

    with pytest.raises(algebra.OutOfTime), algebra.cpu_limit(0.01):
        stubborn()
        while True:
            len("")


def test_what_was_too_large_is_counted_and_shown_before_the_first_step():
    rows = prompts("5", r"9^{9999999}")
    texts = [completion(rows[0], r"\boxed{9^{9999998}}"), completion(rows[0], r"\boxed{5}")]
    with Rewards([correctness], workers=1) as rewards:
        assert rewards.judge(texts, step=0).metrics["rewards/correctness/too_large"] == 0.5
        findings = check(rewards, rows, texts, max_completion_length=64, tokenizer=tiny_tokenizer())
    told = [finding.what for finding in findings if "gives up" in finding.what]
    assert "1 of 2 references; the first: row 1" in told[0] and "1 of 2 completions" in told[1]


def test_algebra_that_takes_too_long_is_wrong(monkeypatch):
    """An equation of degree 17 against one in two unknowns: sympy tries to solve both."""
    monkeypatch.setattr("grpo.language.rewards.algebra.PATIENCE", 0.2)
    assert not same("x^{17}+3x^5+x+1=0", "x^{19}+y^7+3xy+x=0")
    monkeypatch.setattr("grpo.language.rewards.algebra.PATIENCE", 30.0)
    assert same("x+1", "1+x")


def test_looking_for_an_answer_takes_time_in_proportion():
    """A million characters of anything: CPU time, with room to spare."""
    for text in (r"\boxed{", "<answer>", "#### ", "The answer is ", "1,", "$", "-", "{}", "9" * 50):
        began = time.process_time()
        extract(text * (1_000_000 // len(text)))
        assert time.process_time() - began < 5.0
