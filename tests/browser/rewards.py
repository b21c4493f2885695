"""Rewards of the language run that the browser tests look at; loaded by path, so they import nothing of ours."""

import re


def right(completions, total, **_):
    """1 where the last number is the sum."""
    return [float(re.findall(r"\d+", text)[-1:] == [str(n)]) for text, n in zip(completions, total, strict=True)]


def thought(completions, **_):
    """A tenth for thinking to an end."""
    return [0.1 * ("</think>" in text) for text in completions]
