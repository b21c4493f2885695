"""The rewards that have a name: what `rewards: [correctness, xml]` stands for, with the settings each takes.

A name may carry an argument after a colon:

| name | argument | without it |
|---|---|---|
| correctness | what a right answer is worth | `correctness_reward` |
| xml | what a tag is worth | `xml_reward` |
| think | | |
| regex | the pattern | needed |
| length | the limit in tokens | half of `max_completion_length` |
| repetition | n of its n-grams | 3 |
| overlong | the buffer in tokens | a fifth of `max_completion_length` |
| code | seconds for all tests of a completion | 10, at most half of `reward_timeout` |
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from grpo.errors import ConfigError
from grpo.language.rewards import sandbox
from grpo.language.rewards.code import Code
from grpo.language.rewards.form import Length, Regex, Repetition, SoftOverlong, Think, Xml
from grpo.language.rewards.maths import Correctness

Reward = Callable[..., Any]
Factory = Callable[[Mapping[str, Any]], Reward]
"""From the settings of a run (`correctness_reward`, …) and, as `argument`, what stands after the colon."""


def _correctness(settings: Mapping[str, Any]) -> Reward:
    return Correctness(_number("correctness", settings, float, settings.get("correctness_reward", 1.0)))


def _xml(settings: Mapping[str, Any]) -> Reward:
    return Xml(_number("xml", settings, float, settings.get("xml_reward", 0.125)))


def _think(settings: Mapping[str, Any]) -> Reward:
    return Think()


def _regex(settings: Mapping[str, Any]) -> Reward:
    if not settings.get("argument"):
        raise ConfigError("the reward regex needs a pattern: regex:PATTERN")
    return Regex(settings["argument"])


def _length(settings: Mapping[str, Any]) -> Reward:
    return Length(limit=_number("length", settings, int, max(1, settings.get("max_completion_length", 256) // 2)))


def _repetition(settings: Mapping[str, Any]) -> Reward:
    return Repetition(_number("repetition", settings, int, 3))


def _overlong(settings: Mapping[str, Any]) -> Reward:
    limit = settings.get("max_completion_length", 256)
    return SoftOverlong(limit, _number("overlong", settings, int, max(1, limit // 5)))


def _code(settings: Mapping[str, Any]) -> Reward:
    sandbox.require()
    return Code(_number("code", settings, float, min(10.0, settings.get("reward_timeout", 30.0) / 2)))


BUILTIN: dict[str, Factory] = {
    "correctness": _correctness,
    "xml": _xml,
    "think": _think,
    "regex": _regex,
    "length": _length,
    "repetition": _repetition,
    "overlong": _overlong,
    "code": _code,
}


def make(name: str, settings: Mapping[str, Any]) -> Reward:
    """The reward of that name, `name` or `name:argument`; it has a `__name__` and can be sent to other processes."""
    name, colon, argument = name.partition(":")
    if name not in BUILTIN:
        near = difflib.get_close_matches(name, BUILTIN, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(BUILTIN)}"
        raise ConfigError(f"no built-in reward is called {name}; {hint}")
    if colon and name == "think":
        raise ConfigError(f"think:{argument}: the reward think takes no argument")
    return BUILTIN[name]({**settings, "argument": argument if colon else None})


def _number(name: str, settings: Mapping[str, Any], kind: type, otherwise: Any) -> Any:
    """The argument as a number, or what stands in for it."""
    argument = settings.get("argument")
    if argument is None:
        return otherwise
    try:
        return kind(argument)
    except ValueError:
        raise ConfigError(f"{name}:{argument}: {argument!r} is not a number of type {kind.__name__}") from None
