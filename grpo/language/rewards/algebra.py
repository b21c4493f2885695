"""Are two expressions the same? Through `math-verify`, whose LaTeX grammar builds a tree without working anything out.

    equal(r"2\\sqrt{3}", r"\\sqrt{12}")  →  True          equal("9^{9999999}", "5")  →  TooLarge

Nothing here evaluates text as code. A policy that is paid for its answers may learn to give ones that stall whoever
grades them, so what a comparison may cost is bounded before it begins: the text by its length, depth and what it leaves
undone, the tree by the size of its numbers and the number of its terms. What remains runs in Python for `PATIENCE`
seconds at most. math-verify's own time limits are signals, which work in main threads only, so they are off.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from grpo.errors import install

LONGEST = 500
"""Characters of an answer."""
DEEPEST = 10
"""Levels of braces and brackets in an answer, and pairs of bars."""
LARGEST_NUMBER = 2**15
"""Bits of a number once it is worked out: about 10,000 digits."""
LARGEST_ROOT = 1_000
"""Bits of a number under a root or a fractional power, which sympy factors."""
MOST_DIGITS = 4
"""Digits in an argument of a binomial or gamma function: it is at most 9,999."""
LARGEST_SUM = 100_000
"""Terms of an expression once it is multiplied out."""
PATIENCE = 2.0
"""Seconds of CPU for one comparison."""
TICK = 0.01
"""Seconds of CPU between two looks at it."""


class TooLarge(Exception):
    """An expression that would take too long to compare; its message says why."""


def equal(answer: str, reference: str) -> bool:
    """Whether two expressions are the same."""
    for text in (answer, reference):
        if reason := refused(text):
            raise TooLarge(reason)
    try:
        from math_verify import verify
    except ImportError:
        raise ImportError(
            f"comparing {answer[:40]!r} with {reference[:40]!r} needs math-verify: {install('language')}"
        ) from None
    _learn_grammar()
    try:
        with cpu_limit(PATIENCE):
            trees = [_read(text) for text in (reference, answer)]
            for tree in (tree for found in trees for tree in found):
                _check_size(tree)
            return all(trees) and bool(verify(*trees, allow_set_relation_comp=True, timeout_seconds=None))
    except OutOfTime:
        raise TooLarge(f"it takes more than {PATIENCE:g} s to compare") from None
    except (RecursionError, MemoryError) as error:
        raise TooLarge(f"comparing it ends in {type(error).__name__}") from None


def _read(text: str) -> list[Any]:
    """The tree of an expression, in a list; empty where there is none."""
    from math_verify import LatexExtractionConfig, parse

    config = [LatexExtractionConfig(boxed_match_priority=0)]  # that for plain expressions evaluates Python
    return list(parse(f"\\boxed{{{_latex(text)}}}", config, fallback_mode="no_fallback", parsing_timeout=None))


@functools.cache
def _learn_grammar() -> None:
    """The parser learns its grammar from the first texts it reads, which no answer has to pay for."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    for text in (r"\left(\frac{2x^{2}+1}{\sqrt{3}}\right)^{2}=-{5}", r"\{(1, 2), [3, x)\}", r"\sin(2(x+1)) > |y|!"):
        _read(text)


def _latex(text: str) -> str:
    """Calculator spelling as LaTeX."""
    text = re.sub(r"(?<!\\)\bsqrt\s*\(([^()]*)\)|√\s*\(([^()]*)\)|√(\w+)", r"\\sqrt{\1\2\3}", text)
    text = re.sub(r"(?<![\\A-Za-z])pi\b|π", r"\\pi ", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text) if not re.search(r"[(\[{]\s*-?\d+\s*,", text) else text
    return text.replace("**", "^").replace("*", "\\cdot ").replace("×", "\\times ").replace("%", "\\%")


# --- how large it is ------------------------------------------------------------------------------------------------

_UNDONE = re.compile(r"\\(?:i+nt|oint|sum|prod|lim|underbrace|bigcup|bigcap)(?![a-zA-Z])|[∑∏∫]")
_AT_ONCE = re.compile(r"\\(?:(?P<pair>[dt]?binom)|(?P<amid>choose)|(?P<one>[gG]amma)|gcd|lcm)(?![a-zA-Z])")
"""What is worked out while the tree is built."""
_GROWS = re.compile(r"[\^!]|\*\*")
_ROUNDS = re.compile(r"\\[lr]?(?:floor|ceil)|[⌊⌈]")
_NO_GROWTH = re.compile(r"\\(?:[lr]?(?:floor|ceil)|[dtc]?frac|left|right|cdot|times)(?![a-zA-Z])")


def refused(text: str) -> str:
    """Why a text is not read: it is too long, too deep, or leaves work undone; empty where it is read."""
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    if len(text) > LONGEST:
        return f"it is longer than {LONGEST} characters"
    if max(deepest, text.count("|") // 2) > DEEPEST:
        return f"it is nested more than {DEEPEST} deep"
    if _UNDONE.search(text):
        return "it leaves a sum, product, limit or integral undone"
    if any(_far(found, text) for found in _AT_ONCE.finditer(text)):
        return "it counts too far"
    return ""


def _far(found: re.Match[str], text: str) -> bool:
    """Whether a function that is worked out at once may have too much to do, judged by its arguments alone."""
    if found["amid"]:
        arguments = _around(text, found.start(), found.end())
    else:
        arguments = _behind(text, found.end(), 2 if found["pair"] else 1)
    if any(_GROWS.search(argument) for argument in arguments):
        return True
    return bool(found["pair"] or found["amid"] or found["one"]) and any(map(_unbounded, arguments))


def _unbounded(argument: str) -> bool:
    """Whether it may be over `MOST_DIGITS` digits; no product of numbers has more than they have together."""
    counts = any(found["pair"] or found["amid"] or found["one"] for found in _AT_ONCE.finditer(argument))
    digits = sum(character.isdigit() for character in argument)
    rounds = _ROUNDS.search(argument) and re.search(r"[\\eπ]|pi", _NO_GROWTH.sub("", argument))
    return counts or digits > MOST_DIGITS or bool(rounds)


def _behind(text: str, begin: int, number: int) -> list[str]:
    """The groups in braces or brackets that follow; where they do not, all that does."""
    groups: list[str] = []
    for _ in range(number):
        opened = re.compile(r"(?:\s|\\left(?![a-zA-Z]))*[{(]").match(text, begin)
        if opened is None:
            return [*groups, text[begin:]]
        end = opened.end() + _length(text[opened.end() :])
        groups.append(text[opened.end() : end])
        begin = end + 1
    return groups


def _around(text: str, begin: int, end: int) -> list[str]:
    """What stands before and behind, up to the braces around both."""
    mirrored = text[:begin][::-1].translate(str.maketrans("{}()[]", "}{)(]["))
    return [text[begin - _length(mirrored) : begin], text[end : end + _length(text[end:])]]


def _length(text: str) -> int:
    """Characters up to where a group that is open ends."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character in "{([") - (character in "})]")
        if depth == 0:
            return i
    return len(text)


def _check_size(tree: Any) -> None:
    bits, terms = _size(tree)
    if bits > LARGEST_NUMBER:
        raise TooLarge(f"it holds a number of more than {LARGEST_NUMBER} bits")
    if terms > LARGEST_SUM:
        raise TooLarge(f"it has more than {LARGEST_SUM} terms when it is multiplied out")


def _size(tree: Any) -> tuple[float, float]:
    """At most so many bits, were its numbers worked out, and so many terms, were it multiplied out."""
    import sympy

    if (whole := _whole(tree)) is not None:
        return max(whole.bit_length(), 1), 1
    if isinstance(tree, sympy.Rational):
        return tree.p.bit_length() + tree.q.bit_length(), 1
    if isinstance(tree, sympy.MatrixBase):
        sizes = [_size(entry) for entry in tree]
    else:
        sizes = [_size(argument) for argument in getattr(tree, "args", ())]
    bits, terms = sum(bits for bits, _ in sizes), sum(terms for _, terms in sizes)
    if not sizes:
        return getattr(tree, "_prec", 1), 1
    if isinstance(tree, sympy.Pow):
        times = _value(tree.exp)
        if sizes[0][0] > LARGEST_ROOT and tree.exp.is_integer is not True:
            raise TooLarge(f"it takes a root of a number of more than {LARGEST_ROOT} bits")
        return sizes[0][0] * times, _choices(times, sizes[0][1])
    if isinstance(tree, (sympy.factorial, sympy.factorial2, sympy.subfactorial)):
        return bits * _value(tree.args[0]), 1
    if isinstance(tree, (sympy.exp, sympy.sinh, sympy.cosh)):
        return _value(tree.args[0]), 1
    if isinstance(tree, sympy.Mul):
        return bits, math.prod(terms for _, terms in sizes)
    return bits, terms if isinstance(tree, sympy.Add) else max(terms for _, terms in sizes)


def _whole(tree: Any) -> int | None:
    """The integer that powers of small integers come to; None: something else, or too large to work out."""
    import sympy

    if isinstance(tree, sympy.Integer):
        return int(tree)
    if not isinstance(tree, sympy.Pow):
        return None
    base, times = _whole(tree.base), _whole(tree.exp)
    if base is None or times is None or times < 0 or base.bit_length() * times > LARGEST_ROOT:
        return None
    return int(base**times)


def _value(tree: Any) -> float:
    """At most so large, and at least 1."""
    import sympy

    if (whole := _whole(tree)) is not None:
        return float(min(max(abs(whole), 1), 10**300))
    if isinstance(tree, sympy.Rational):
        return float(min(max(-(-abs(tree.p) // tree.q), 1), 10**300))
    return 2.0 ** min(_size(tree)[0], 1000)


def _choices(times: float, terms: float) -> float:
    """Ways to pick one of the terms so many times: the terms of their sum's power."""
    if terms <= 1:
        return 1.0
    if max(times, terms) > LARGEST_SUM:
        return math.inf
    return math.exp(min(math.lgamma(times + terms) - math.lgamma(times + 1) - math.lgamma(terms), 700))


# --- how long it takes ----------------------------------------------------------------------------------------------


class OutOfTime(BaseException):
    """Not an Exception: sympy catches those and goes on."""

    def __init__(self, again: Callable[[], None]) -> None:
        super().__init__()
        self._again = again

    def __del__(self) -> None:
        self._again()


class _Quiet:
    """What is raised while Python puts a generator away is lost, and raised again at the next look: no word on it."""

    def __init__(self, tell: Callable[[Any], Any]) -> None:
        self._tell = tell

    def __call__(self, what: Any) -> None:
        if what.exc_type is not OutOfTime:
            self._tell(what)


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime once this thread has used so much CPU, and again where somebody has caught that and gone on.

    In a main thread a timer's signal looks; elsewhere, or where that signal is somebody's, every twentieth call does,
    which takes three times as long.
    """
    if not isinstance(sys.unraisablehook, _Quiet):
        sys.unraisablehook = _Quiet(sys.unraisablehook)
    end, inside = time.thread_time() + seconds, True

    def watch() -> None:
        """Also told once what was raised is gone: whoever caught it and went on is looked at again."""
        if inside:
            start(late)

    def late() -> None:
        if inside and time.thread_time() > end:
            stop()
            raise OutOfTime(watch)

    start, stop = (_by_timer if _timer_is_free() else _by_calls)()
    watch()
    try:
        yield
    finally:
        inside = False
        stop()


Look = Callable[[], None]


def _timer_is_free() -> bool:
    """Whether signals are handled in this thread, and nobody else has use for this one."""
    main = threading.current_thread() is threading.main_thread()
    return main and hasattr(signal, "SIGPROF") and signal.getsignal(signal.SIGPROF) == signal.SIG_DFL


def _by_timer() -> tuple[Callable[[Look], None], Callable[[], None]]:
    """What has a look taken after every TICK of CPU time, and what ends that."""

    def start(look: Look) -> None:
        signal.signal(signal.SIGPROF, lambda number, frame: look())
        signal.setitimer(signal.ITIMER_PROF, TICK, TICK)

    def stop() -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)  # one may be on its way: the default would end the process
        signal.signal(signal.SIGPROF, signal.SIG_DFL)

    return start, stop


def _by_calls() -> tuple[Callable[[Look], None], Callable[[], None]]:
    """The same after every twentieth call; Python itself stops once something was raised."""
    before, calls = sys.getprofile(), 0

    def start(look: Look) -> None:
        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += 1
            if calls % 20 == 0:
                look()

        sys.setprofile(count)

    return start, lambda: sys.setprofile(before)
