"""Python functions that a model may call: how a call is written, who runs it, and what comes back.

    <tool_call>{"name": "calculator", "arguments": {"expression": "12*34"}}</tool_call>

is the one format known here (Qwen's and Hermes'; several calls may follow each other). Models that were taught another
one bring their own `parse`. Calls run in killable processes with a time limit. Whatever goes wrong with one (no JSON,
no such function, an exception, a hang) is told to the model as the answer: it can try again. Where all functions
are `async def` they are awaited together, on an event loop in this process, each with the same time limit. Loads no
array library, so that workers start fast.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from grpo.errors import ConfigError, line
from grpo.language.turns.loops import GRACE, Loop, asynchronous
from grpo.processors import processors
from grpo.workers import Pool

LONGEST = 2_000
"""Characters of an answer; the rest is cut."""
HOW = 'To call one, write <tool_call>{"name": NAME, "arguments": {…}}</tool_call> and wait for its answer.'
"""Told to models whose chat template does not speak of tools."""

PICTURED = "it answered with an image; what tools and environments say is text here: show images in the row's prompt"

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """A call that a completion asks for."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None
    """Why it cannot be made, told to the model instead of an answer."""


@dataclass(frozen=True)
class Answer:
    """What a call came to."""

    name: str
    text: str
    ok: bool


def parse_calls(text: str) -> list[Call]:
    """The calls in a completion, in their order; one that cannot be read is a call with a problem."""
    return [_read(found) for found in _CALL.findall(text)]


def _read(text: str) -> Call:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Call("", problem=f"the call is not valid JSON ({line(error)})")
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return Call("", problem='a call is {"name": NAME, "arguments": {…}}')
    arguments = said.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(said["name"], problem=f"arguments must be an object, not {json.dumps(arguments)[:100]}")
    return Call(said["name"], arguments)


class Toolbox:
    """The functions a model may call, each with type hints and a docstring that describes its arguments.

    parse: reads calls in another format than the usual one; then `stop` is the text that ends a call, and `how` tells
    the model how to write one. timeout: seconds for a call.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        *,
        parse: Callable[[str], list[Call]] = parse_calls,
        stop: Sequence[str] = ("</tool_call>",),
        how: str = HOW,
        timeout: float = 30.0,
        workers: int | str | None = None,
    ) -> None:
        """workers: processes; `ray` or `ray:N`: actors of a Ray cluster."""
        self.parse, self.stop, self.how = parse, tuple(stop), how
        self._functions = {_name(function): function for function in functions}
        if len(self._functions) < len(functions):
            raise ConfigError(f"two tools have the same name: {', '.join(map(_name, functions))}; rename one")
        self._timeout, self._workers = timeout, workers or min(processors(), 4)
        self._pool: Pool | None = None
        self._loop: Loop | None = None
        kinds = {asynchronous(function) for function in functions}
        self.waits = not isinstance(workers, str) and kinds == {True}
        """Whether all functions are awaited; then `begin` makes calls, else `run`, for a plain one must be killable."""
        self.patience = timeout + GRACE
        """Seconds after which no answer is to be expected any more."""

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """Themselves."""
        return list(self._functions.values())

    @property
    def names(self) -> list[str]:
        """What the model calls them by."""
        return list(self._functions)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Their JSON schemas, as chat templates take them."""
        from transformers.utils.chat_template_utils import get_json_schema

        found = []
        for name, function in self._functions.items():
            try:
                found.append(get_json_schema(inspect.unwrap(function)))
            except Exception as error:  # transformers has an exception of its own for each thing that is missing
                raise ConfigError(
                    f"tool {name}: {line(error)}; give it type hints and a docstring with a line for each argument "
                    "under `Args:`"
                ) from None
        return found

    @property
    def description(self) -> str:
        """The same in words: a line of JSON for each function, and how to call one."""
        listed = [json.dumps(schema["function"]) for schema in self.schemas]
        return "\n".join(["You can call these functions:", *listed, self.how])

    def run(self, calls: Sequence[Call], seed: str = "0") -> list[Answer]:
        """Make the calls; an answer each, in their order."""
        calls = [self._checked(call) for call in calls]
        todo = [(call.name, dict(call.arguments)) for call in calls if call.problem is None]
        if todo and self._pool is None:
            self._pool = self._opened()
        outcomes = iter(self._pool.map(todo, seed) if todo and self._pool is not None else ())
        answers = []
        for call in calls:
            problem, text = call.problem, ""
            if problem is None:
                outcome = next(outcomes)
                text, problem = outcome.value if outcome.ok else ("", outcome.error)
            _expect_no_image(call.name, problem)
            told = text if problem is None else f"error: {problem}"
            answers.append(Answer(call.name, told, problem is None))
        return answers

    def _opened(self) -> Pool:
        desk = _Desk(self._functions)
        if isinstance(self._workers, str):
            from grpo.cluster import RayPool

            return RayPool(desk, self._workers, self._timeout)
        return Pool(desk, self._workers, self._timeout)

    def begin(self, call: Call) -> Future[Answer]:
        """Make one call; its answer, later."""
        self._loop = self._loop or Loop("tools")
        return self._loop.begin(self._awaited(self._checked(call)))

    async def _awaited(self, call: Call) -> Answer:
        problem, text = call.problem, ""
        if problem is None:
            try:
                given = self._functions[call.name](**call.arguments)
                text = _shown(await asyncio.wait_for(given, self._timeout) if inspect.isawaitable(given) else given)
            except TimeoutError:
                problem = f"{call.name}: no answer in {self._timeout:g} s"
            except BaseException as error:  # also sys.exit: a tool has no say in when training ends
                problem = line(error)
        _expect_no_image(call.name, problem)
        return Answer(call.name, text if problem is None else f"error: {problem}", problem is None)

    def give_up(self) -> None:
        """One of the functions holds the loop: go on with another."""
        if self._loop is not None:
            self._loop.renew()

    def _checked(self, call: Call) -> Call:
        if call.problem is None and call.name not in self._functions:
            return Call(call.name, problem=f"there is no tool {call.name!r}; there are: {', '.join(self.names)}")
        return call

    def close(self) -> None:
        """Leave no process behind."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._loop is not None:
            self._loop.close()
            self._loop = None


class _Desk:
    """Makes calls, in a worker."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._functions = dict(functions)
        self.__qualname__ = ", ".join(functions)  # what a time-out is said to be of

    def __call__(self, item: tuple[str, dict[str, Any]]) -> tuple[str, str | None]:
        """The answer as text, or what went wrong."""
        name, arguments = item
        try:
            value = self._functions[name](**arguments)
            return _shown(asyncio.run(value) if inspect.iscoroutine(value) else value), None
        except Exception as error:  # a tool is anyone's code
            return "", line(error)


def as_text(value: Any) -> str:
    """What a tool or an environment says; parts of a message are put together, and images refused."""
    parts = value if isinstance(value, list | tuple) else [value]
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
    if any(hasattr(given, "convert") for given in parts) or any(kind in ("image", "image_url") for kind in kinds):
        raise ConfigError(PICTURED)
    if parts and all(kind == "text" and "text" in part for kind, part in zip(kinds, parts, strict=True)):
        return "".join(str(part["text"]) for part in parts)
    return str(value)  # data of its own, whatever it calls its "type"


def _expect_no_image(name: str, problem: str | None) -> None:
    if problem is not None and PICTURED in problem:
        raise ConfigError(f"tool {name}: {PICTURED}")


def _shown(value: Any) -> str:
    """As text, of which the model hears the beginning."""
    text = as_text(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text)} characters)"


def _name(function: Callable[..., Any]) -> str:
    found = getattr(function, "__name__", None)
    if found is None:
        raise ConfigError(f"a tool is a function with a name, not {function!r}")
    return str(found)
