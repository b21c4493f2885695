"""TRL's environments: objects whose public methods are tools, with `reset(**row)` and, if they like, `get_reward()`.

    GRPOTrainer(…, environment_factory=Sudoku)                         one kind; `reset` may give the prompt
    GRPOTrainer(…, environment_factory={"code": Code, "game": Game})   each row's column `environment` says which

Every conversation has an object of its own, made in this process and called from it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from grpo.errors import ConfigError, line, nearest
from grpo.language.data.chat import Chat, unquoted
from grpo.language.engines import Engine, Sampling, Tokens
from grpo.language.pictures.ids import PicturedIds
from grpo.language.players import Groups
from grpo.language.samples import Message, Prompt, Sample
from grpo.language.turns.conversation import Conversation, introduce
from grpo.language.turns.driving import Course
from grpo.language.turns.talk import Talk
from grpo.language.turns.tools import Answer, Call, Toolbox, as_text

OWN = ("reset", "get_reward")
"""Methods that are no tools."""
EMPTY: list[Message] = [{"role": "user", "content": ""}]
"""The prompt of a row that has none: `reset` says it."""
COLUMN = "environment"
"""Of a row, where there are several kinds."""

Factory = Callable[[], Any]


@dataclass(frozen=True)
class Held:
    """An environment of one conversation, and the tools that it offers there."""

    kind: str
    instance: Any


class EnvironmentReward:
    """What environments of one class say of their conversations; None of others."""

    runs_here = True

    def __init__(self, kind: Any) -> None:
        self.kind, self.__name__ = kind, kind.__name__

    def check(self, samples: Sequence[Any]) -> None:
        """Nothing can be wrong with them beforehand."""

    def __call__(self, environments: Sequence[Any]) -> list[Any]:
        return [finished(e.get_reward()) if type(e) is self.kind else None for e in environments]


class EnvironmentConversation(Conversation):
    """Conversations in which a model calls the methods of an environment, and tools that stand alone."""

    def __init__(
        self, chat: Chat, tokens: Tokens, given: Factory | Mapping[str, Factory], tools: Toolbox | None, max_turns: int
    ) -> None:
        self.factories: Mapping[str, Factory] = dict(given) if isinstance(given, Mapping) else {"": given}
        self._alone = tools
        _expect_factories(self.factories)
        probes = {name: factory() for name, factory in self.factories.items()}
        for name, probe in probes.items():
            if "reset" not in dir(probe):
                raise ConfigError(f"environment {name or type(probe).__name__} has no method reset(**row); give it one")
        self.kinds = list(dict.fromkeys(type(probe) for probe in probes.values()))
        """Their classes."""
        self.boxes = {name: _box(probe, tools) for name, probe in probes.items()}
        """By name, the tools that are offered in its prompts."""
        self.environments: list[Any] = []
        """Of the last conversations, in their order."""
        made: Any = next(iter(self.factories.values()))
        super().__init__(chat, tokens, environment=made, max_turns=max_turns)
        self.tools = next((box for box in self.boxes.values() if box.names), None)
        self._name = ", ".join(kind.__name__ for kind in self.kinds)
        if len(self.boxes) == 1 and self.tools is not None:
            introduce(self.tools, chat)

    @property
    def rewards(self) -> list[EnvironmentReward]:
        """One for each class that judges its conversations."""
        return [EnvironmentReward(kind) for kind in self.kinds if "get_reward" in dir(kind)]

    def __call__(
        self, engine: Engine, prompts: Sequence[Prompt], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> Groups:
        """`count` conversations from each prompt, a turn of all at a time."""
        self.environments = []
        yield from super().__call__(engine, prompts, count, sampling, seeds)

    def _waits(self, first: Talk) -> bool:
        """They live in this thread; what is asynchronous is waited for."""
        return False

    def _begin(self, party: Sequence[Talk], context: float) -> Course:
        yield from ()
        for talk in party:
            self._reset(talk, context)

    def _reset(self, talk: Talk, context: float) -> None:
        """An environment of its own; what it says is put behind the last message of the prompt."""
        prompt = talk.prompt
        with talk.blaming(f"{self._name}.reset"):
            name = prompt.columns.get(COLUMN, "") if len(self.factories) > 1 or "" not in self.factories else ""
            talk.environment = Held(name, self.factories[name]())
            self.environments.append(talk.environment.instance)
            row = {key: value for key, value in prompt.columns.items() if key != COLUMN or "" in self.factories}
            messages = list(prompt.messages or EMPTY)
            if messages != EMPTY:
                row["prompt"] = messages
            said = talk.environment.instance.reset(**row)
            if said is None and name == "":
                return
            messages = [*messages[:-1], _with_text(messages[-1], as_text(said or ""))]
            text = self._offering(name, messages)
            shown = prompt.ids.shown if isinstance(prompt.ids, PicturedIds) else ()
            talk.prompt = replace(prompt, ids=self._chat.read(text, shown), text=unquoted(text), messages=messages)
            if len(talk.prompt.ids) >= context:
                raise ConfigError(f"{len(talk.prompt.ids)} tokens leave no room in a context of {context:g}")

    def _offering(self, name: str, messages: Sequence[Message]) -> str:
        """The conversation as the template writes it, with the tools of this environment alone."""
        if len(self.boxes) == 1:
            return self._chat.apply(messages, answer=True)
        before, box = self._chat.tools, self.boxes[name]
        self._chat.tools = box.schemas or None
        try:
            text = self._chat.apply(messages, answer=True)
        finally:
            self._chat.tools = before
        if all(tool in text for tool in box.names):
            return text
        return self._chat.apply([{"role": "system", "content": box.description}, *messages], answer=True)

    def _answers(self, live: Sequence[Talk], last: bool, seed: str) -> Course:
        """What the methods that were called return; a conversation without a call is over."""
        yield from ()
        found: list[list[Message]] = []
        for talk in live:
            box = self.boxes[talk.environment.kind] if talk.environment is not None else None
            calls = [] if box is None or talk.stop == "length" else box.parse(talk.text)
            talk.calls += len(calls)
            if last or not calls:
                talk.failed_calls += len(calls)
                talk.end()
                found.append([])
                continue
            answers = [self._called(talk.environment, call, seed) for call in calls]
            talk.failed_calls += sum(not answer.ok for answer in answers)
            found.append([{"role": "tool", "name": answer.name, "content": answer.text} for answer in answers])
        return found

    def _called(self, held: Held, call: Call, seed: str) -> Answer:
        """A method of the environment, or a tool that stands alone."""
        if self._alone is not None and call.name in self._alone.names:
            return self._alone.run([call], seed)[0]
        names = self.boxes[held.kind].names
        problem = call.problem or (None if call.name in names else f"there is no tool {call.name!r}; there are: "
                                   f"{', '.join(names) or '(none)'}")  # fmt: skip
        if problem is not None:
            return Answer(call.name, f"error: {problem}", False)
        try:
            return Answer(call.name, as_text(finished(getattr(held.instance, call.name)(**call.arguments))), True)
        except ConfigError as error:
            raise ConfigError(f"{self._name}.{call.name}: {error}") from None
        except Exception as error:  # anyone's code: the model is told, and can try again
            return Answer(call.name, f"error: {line(error)}", False)

    def _told(self, talks: Sequence[Talk]) -> list[Sample]:
        """Environments go along with the samples, to whoever judges these."""
        for talk in talks:
            talk.judged_by = None if talk.environment is None else talk.environment.instance
        return super()._told(talks)

    def close(self) -> None:
        """Let go of the processes that run tools."""
        if self._alone is not None:
            self._alone.close()


def _expect_factories(factories: Mapping[str, Factory]) -> None:
    if not factories:
        raise ConfigError("environment_factory is empty; give a class, or several by name")
    for name, factory in factories.items():
        if not callable(factory):
            at = f"environment_factory[{name!r}]" if name else "environment_factory"
            raise ConfigError(
                f"{at} is an object of {type(factory).__name__}; give the class, or a function that makes one for "
                "every conversation"
            )


def _with_text(message: Message, more: str) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + more}
    return {**message, "content": [*content, {"type": "text", "text": more}]}


def finished(value: Any) -> Any:
    """The value, awaited where it is not there yet; in a thread, since a notebook's own has a loop already."""
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, wait()).result()


def _box(probe: Any, tools: Toolbox | None) -> Toolbox:
    """The tools of one environment: its public methods, and those that stand alone."""
    names = [name for name, _ in inspect.getmembers(type(probe), inspect.isfunction)]
    methods = [getattr(probe, name) for name in names if name not in OWN and not name.startswith("_")]
    return Toolbox([*(tools.functions if tools is not None else ()), *methods])


def rows_for(given: Factory | Mapping[str, Factory], rows: Any, count: int, max_steps: int | None) -> Any:
    """Rows with a prompt each, which an environment may leave to `reset`; `count` of them where there is no data."""
    several = isinstance(given, Mapping)
    if rows is None and several:
        raise ConfigError(
            f"several environments need train_dataset, with a column {COLUMN!r} that says which: {', '.join(given)}"  # type: ignore[arg-type]
        )
    if rows is None:
        if max_steps is None:
            raise ConfigError("an environment without train_dataset needs max_steps: how long to train")
        return [{"prompt": list(EMPTY)} for _ in range(count)]
    if isinstance(rows, str):
        return rows
    if several and hasattr(rows, "__len__"):
        _expect_known(given, rows)  # type: ignore[arg-type]
    first: Mapping[str, Any] = next(islice(iter(rows), 1), {})
    if "prompt" in first or COLUMN not in first:
        return rows
    return rows.map(_with_prompt) if hasattr(rows, "map") else [_with_prompt(row) for row in rows]


def _with_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": list(EMPTY), **row}


def _expect_known(given: Mapping[str, Factory], rows: Any) -> None:
    for number, row in enumerate(rows):
        name = row.get(COLUMN)
        if name not in given:
            raise ConfigError(
                f"row {number}: environment={name!r} is not among the environments of environment_factory: "
                f"{', '.join(given)}{nearest(str(name), list(given))}"
            )
