"""Is the answer right? Mathematics out of free text: one lenient extractor, one comparison, the same for everyone.

    extract("… so \\boxed{\\frac12}")  →  "\\frac12"          same("1,234", "#### 1234")  →  True

Plain numbers (integers, decimals, fractions, percentages, scientific notation, with units and currency) are compared
exactly, without any library. The rest is compared as expressions (`algebra`); one that is too large for that is wrong,
and counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from grpo.language.rewards.algebra import LONGEST, TooLarge, equal

TAIL = 20_000
"""Characters at the end of a text in which the answer is looked for."""

# --- what the answer is ---------------------------------------------------------------------------------------------

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_SAYS = re.compile(r"\banswers?(?:\s+(?:is|are|was|would\s+be)\b\s*:?|\s*[:=])\**", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.!?;](?=\s|$)|\s(?:because|since|which|so|as|when|if)\s", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?<![\w.])(?:(?<![)\]}])[-−+])?[$€£]?"
    r"(?:\\[dt]?frac\{-?\d+\}\{-?\d+\}|(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/\d+)?|\.\d+)"
    r"(?:\s?\\?%)?"
)


def extract(text: str) -> str | None:
    """The answer a text gives: its last \\boxed{}, else its last <answer>, else what follows its last ####, else what
    it says the answer is, else its last number. None: none of these."""
    text = text[-TAIL:]
    found = _marked(text)
    if found is None:
        numbers = _NUMBER.findall(text)
        return numbers[-1].strip() if numbers else None
    return found


def _marked(text: str, depth: int = 3) -> str | None:
    """The answer a text points at; marks inside marks are followed."""
    for found in (_boxed(text), _tagged(text), _after_hashes(text), _said(text)):
        if found:
            inner = _marked(found, depth - 1) if depth else None
            return inner or _without_prose(found)
    return None


def _boxed(text: str) -> str | None:
    """The last \\boxed{…} that has both braces and something between them."""
    last = None
    open_braces: list[tuple[bool, int]] = []
    for brace in _BRACES.finditer(text):
        if brace[0] == "}":
            if open_braces:
                box, begin = open_braces.pop()
                if box and text[begin : brace.start()].strip():
                    last = text[begin : brace.start()].strip()
        elif brace[0].endswith("{") and brace[0] != "\\{":
            open_braces.append((brace[0] != "{", brace.end()))
    return last


def _tagged(text: str) -> str | None:
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return text[begin + len("<answer>") : end].strip() if begin >= 0 else None


def _after_hashes(text: str) -> str | None:
    lines = text.rpartition("####")[2].strip().splitlines() if "####" in text else []
    return lines[0].strip() if lines else None


def _said(text: str) -> str | None:
    ends = [match.end() for match in _SAYS.finditer(text)]
    for end in reversed(ends[-3:]):
        phrase = _SENTENCE_END.split(text[end:].lstrip(" *"), maxsplit=1)[0].strip().rstrip("*., ")
        prose = "\\" not in phrase and len(re.findall(r"[^\W\d_]{2,}", phrase)) >= 3
        if phrase and not (prose and len(_NUMBER.findall(phrase)) != 1):  # not "to find the answer: first we …"
            return phrase
    return None


def _without_prose(found: str) -> str:
    """A sentence with a single number in it is that number; anything else stays."""
    if not re.search(r"[\\_^*\[\]{}]", found) and len(re.findall(r"[^\W\d_]{2,}", found)) >= 2:
        numbers = _NUMBER.findall(found)
        if len(numbers) == 1:
            return str(numbers[0]).strip()
    return found


# --- whether it is right --------------------------------------------------------------------------------------------

_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_UNITS = (
    r"(?:mm|cm|dm|km|m|mg|kg|g|lbs?|oz|ft|in|yd|mph|kph|kmh|ms|s|sec|min|hr?s?|mL|ml|L|l|am|pm|AM|PM|USD|EUR|cents?)"
)
_NO_UNITS = {"and", "or", "pi", "times", "plus", "minus", "over", "mod", "sqrt", "log", "sin", "cos", "tan", "exp"}
_PLAIN = re.compile(
    r"(?P<sign>[-+]?)(?:"
    r"(?:(?P<whole>\d{1,9})(?:\s+|\s*(?=\\)))?(?:\\frac\{(?P<p>-?\d+)\}\{(?P<q>-?\d+)\}|(?P<p2>\d+)\s*/\s*(?P<q2>\d+))"
    r"|(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)"
    r"(?:[eE](?P<e>[-+]?\d{1,3})|\s*(?:\\times|\\cdot|[*x×·])\s*10\s*\^\s*(?:\{(?P<e2>[-+]?\d{1,3})\}|(?P<e3>[-+]?\d{1,3})))?"
    r")\s*(?P<percent>%|percent\b)?"
    rf"(?P<unit>\s*{_UNITS}(?:\s*\^?\{{?[23]\}}?|[²³])?|(?:\s+[^\W\d_]{{2,}}){{1,6}})?"
)


@dataclass(frozen=True)
class _Number:
    value: Fraction
    percent: bool


def same(answer: str, reference: str) -> bool:
    """Whether an answer says the same as the reference, which may be a whole solution that marks its own answer."""
    try:
        return compare(answer, reference)
    except TooLarge:
        return False


def agrees(pair: tuple[str, str]) -> float:
    """1 where a text's answer is the reference. It stands here, where a process that compares loads nothing else."""
    answer = extract(pair[0])
    return float(answer is not None and same(answer, pair[1]))


def too_large(text: str) -> str:
    """Why the answer that a text gives cannot be compared with anything but itself; empty where it can."""
    try:
        compare(_marked(text[-TAIL:]) or text.strip(), "x_{0}")
    except TooLarge as error:
        return str(error)
    return ""


def compare(answer: str, reference: str) -> bool:
    """The same; raises TooLarge where it would take too long to find out."""
    reference = _marked(reference[-TAIL:]) or reference.strip()
    answer = answer.strip()
    if not answer or not reference:
        return False
    if answer == reference:
        return True
    if max(len(answer), len(reference)) > LONGEST:
        raise TooLarge(f"it is longer than {LONGEST} characters")
    mine, theirs = _tidy(answer), _tidy(reference)
    if mine.casefold() == theirs.casefold():
        return bool(mine)
    number, other = _plain(mine), _plain(theirs)
    if number is not None and other is not None:
        return _equal(number, other)
    return (_mathematical(mine) or _mathematical(theirs)) and equal(mine, theirs)


_SPACING = re.compile(r"(?<!\\)\\(?:left|right|displaystyle|,|;|!|:| |quad|qquad)(?![a-zA-Z])")
_DRESS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_DEGREES = re.compile(r"\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|°|\\degree\b)")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)")


def _tidy(text: str) -> str:
    """Without what changes nothing: dollar signs, spacing, \\text{}, degrees, a full stop, (A) for A."""
    text = text.replace("−", "-").replace("{,}", ",").replace("\\%", "%").replace("**", "")
    text = re.sub(r"\\\$|\\[()\[\]]|[$€£¥]", "", text)
    text = _DEGREES.sub("", _DRESS.sub(r" \1 ", _SPACING.sub(" ", text)))
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", re.sub(r"\\[dtc]frac", r"\\frac", text))
    text = re.sub(r"\s+", " ", text).strip().rstrip(".,;:").strip()
    text = re.sub(r"(?<=\d),\s(?=\d{3}\b)", ",", text) if "\\" in text else text
    return re.sub(r"^\(([A-Za-z])\)$", r"\1", text)


def _plain(text: str) -> _Number | None:
    """A number that needs no algebra; None: something else."""
    match = _PLAIN.fullmatch(text)
    if match is None:
        return None
    words = (match["unit"] or "").casefold().split()
    if _NO_UNITS & set(words):
        return None
    bottom = match["q"] or match["q2"]
    if bottom:
        if int(bottom) == 0:
            return None
        value = int(match["whole"] or 0) + Fraction(int(match["p"] or match["p2"]), int(bottom))
    else:
        power = int(match["e"] or match["e2"] or match["e3"] or 0)
        value = Fraction(Decimal(match["number"].replace(",", ""))) * Fraction(10) ** power
    scale = math.prod(_SCALES.get(word, 1) for word in words)
    return _Number(-value * scale if match["sign"] == "-" else value * scale, bool(match["percent"]))


def _equal(one: _Number, other: _Number) -> bool:
    """Exactly; 50% is also 50 and 0.5; a fraction without a finite decimal form may be given to six digits."""
    if one.percent != other.percent:
        share, bare = (one.value, other.value) if one.percent else (other.value, one.value)
        return bare in (share, share / 100)
    if one.value == other.value:
        return True
    if _finite(one.value) == _finite(other.value):
        return False
    return abs(one.value - other.value) <= Fraction(1, 10**6) * max(abs(one.value), abs(other.value))


def _finite(value: Fraction) -> bool:
    """Whether it has a finite decimal form: no prime but 2 and 5 below the line."""
    below = value.denominator
    return 10 ** below.bit_length() % below == 0


def _mathematical(text: str) -> bool:
    """Whether algebra could change the verdict: more than words and a number."""
    return bool(re.search(r"[\\^_=<>|(){}\[\]+*/,!≤≥√π∞-]|\d\s*[A-Za-z]|^[A-Za-z]$", text))


# --- the reward -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Correctness:
    """`value` for a completion whose answer is the row's, 0 for any other; no opinion where the row has no answer."""

    value: float = 1.0
    __name__ = "correctness"

    def __call__(
        self, completion: str, answer: Any = None, log_metric: Callable[[str, float], None] | None = None
    ) -> float | None:
        """One sample."""
        if answer is None or not str(answer).strip():
            return None
        found = extract(completion)
        try:
            right, too_large = found is not None and compare(found, str(answer)), False
        except TooLarge:
            right, too_large = False, True
        if log_metric is not None:
            log_metric("rewards/correctness/too_large", float(too_large))
        return self.value if right else 0.0


def make_correctness(value: float = 1.0) -> Correctness:
    """The reward for right answers, worth `value`."""
    return Correctness(value)


correctness = Correctness()
