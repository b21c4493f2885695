"""Several turns: the model speaks, tools or an environment answer, the model goes on.

    prompt ─► engine ─► "<tool_call>…" ─► tool ─► its answer as tokens ─► engine ─► … ─► one Sample

Conversations of a step are played side by side. Plain environments and tools, which answer at once, are asked a turn at
a time. Those that take their time (`async def`, or `workers=ray`; see `hosts`) are all asked at once, and one goes on
when it has been answered: a step lasts as long as its longest conversation. Who is sampled with whom does not
depend on who answers first: the conversations of a prompt wait for each other. Where an engine promises no equal bits
anyway (a GPU, a server) whoever is ready is sampled together. What the model said is kept as it was sampled and
what others said is put behind it as ids of its own, masked out of the loss: nothing is tokenised twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from grpo.capabilities import Closes
from grpo.errors import ConfigError
from grpo.language.config import LanguageConfig
from grpo.language.data.chat import Chat, check_prefixes, unquoted
from grpo.language.engines import Engine, Sampling, Tokens
from grpo.language.pictures.ids import PicturedIds, then
from grpo.language.players import Groups
from grpo.language.rewards.lookup import find
from grpo.language.samples import Message, Prompt, Sample
from grpo.language.turns.driving import Course, Draw, drive
from grpo.language.turns.hosts import Actors, Here, Host, digest
from grpo.language.turns.loops import asynchronous
from grpo.language.turns.talk import Talk, messages_of
from grpo.language.turns.tools import Answer, Call, Toolbox, parse_calls
from grpo.seeding import mixed

__all__ = ["Call", "Conversation", "Environment", "Toolbox", "make_conversation", "parse_calls"]


class Environment(Protocol):
    """Answers what the model says. One object a conversation; `close` is called at its end where there is one.

    What it draws should follow from the row, so that the members of a group begin alike and a run can be repeated.
    """

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        """Begin, with the columns of the row (and its `prompt`); messages that are put behind the prompt."""
        ...

    def step(self, completion: str) -> tuple[Sequence[Message] | None, float | None, bool]:
        """Hear what the model said: messages in answer, a reward (None: no opinion yet), and whether it is over."""
        ...


class Conversation:
    """Plays conversations with tools or an environment.

    environment: makes one for every conversation (a class, or a function without arguments). max_turns: completions in
    a conversation at most; a call in the last one is refused, for nobody would hear the answer. max_tokens: prompt and
    conversation together, None: the model's context. All turns together are limited by `Sampling.max_new_tokens`; a
    conversation that runs out of it ends with `length`. timeout: seconds for an answer of an `async def` environment,
    or of one that runs elsewhere. workers: `ray` or `ray:N`, actors of a Ray cluster that environments live in.
    """

    def __init__(
        self,
        chat: Chat,
        tokens: Tokens,
        *,
        tools: Toolbox | Sequence[Callable[..., Any]] | None = None,
        environment: Callable[[], Environment] | None = None,
        max_turns: int = 8,
        max_tokens: int | None = None,
        timeout: float = 30.0,
        workers: str | None = None,
    ) -> None:
        if bool(tools) == bool(environment):
            raise ConfigError("a conversation needs tools or an environment, one of them")
        if environment is not None and not callable(environment):
            kind = type(environment).__name__
            raise ConfigError(f"environment is a {kind} object; give the class, every conversation gets its own")
        self._chat, self._tokens, self._environment = chat, tokens, environment
        self.tools = tools if isinstance(tools, Toolbox) else Toolbox(tools) if tools else None
        self._max_turns, self._max_tokens = max_turns, max_tokens
        self._name = getattr(environment, "__name__", type(environment).__name__)
        self._timeout, self._played = timeout, 0
        self._host: Host | None = None
        """Of environments that take their time; None: they live in this thread."""
        if environment is not None and workers is not None:
            self._host = Actors(environment, workers, timeout)

    def __call__(
        self, engine: Engine, prompts: Sequence[Prompt], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> Groups:
        """`count` conversations from each prompt; a group as soon as it and those before it have ended."""
        talks = [Talk(prompts[number // count], seed, key=number) for number, seed in enumerate(seeds)]
        if self.tools is not None:
            sampling = replace(sampling, stop=(*sampling.stop, *self.tools.stop))
        if not talks or not self._waits(talks[0]):
            parties, apart = [talks], False
        else:
            size = count if engine.repeatable else 1
            parties, apart = [talks[at : at + size] for at in range(0, len(talks), size)], engine.repeatable
            for talk in talks:  # no two of one host, ever
                talk.key += self._played
            self._played += len(talks)
        courses = [self._course(party, count, self._max_tokens or engine.context, sampling) for party in parties]
        told = 0
        try:
            with engine.conversing():
                for _ in drive(engine, courses, apart, self._host or self.tools):
                    while told < len(prompts) and all(t.over for t in talks[told * count : (told + 1) * count]):
                        yield told, self._told(talks[told * count : (told + 1) * count])
                        told += 1
        finally:
            for talk in talks:
                talk.over = True
            self._told(talks[told * count :])

    def _waits(self, first: Talk) -> bool:
        """Whether answers take their time; found out with the first conversation's environment where need be."""
        if self._host is not None or self.tools is not None:
            return self._host is not None or (self.tools is not None and self.tools.waits)
        assert self._environment is not None
        given: Any = self._environment
        if not inspect.isclass(inspect.unwrap(given)):
            with first.blaming(f"{self._name}.reset"):
                given = first.environment = self._environment()
        if asynchronous(given, "reset", "step"):
            self._host, first.environment = Here(self._environment, self._timeout), None
        return self._host is not None

    def _told(self, talks: Sequence[Talk]) -> list[Sample]:
        """Conversations that are over, as samples; their environments are closed."""
        if self._host is not None and talks:
            problems = self._host.end([talk.key for talk in talks])
            for talk in talks:
                if talk.key in problems:
                    talk.fail(f"{self._name}.close", problems[talk.key])
        for talk in talks:
            if isinstance(talk.environment, Closes):
                with talk.blaming(f"{self._name}.close"):
                    talk.environment.close()
            talk.environment = None
        return [talk.sample() for talk in talks]

    def _course(self, party: Sequence[Talk], count: int, context: float, sampling: Sampling) -> Course:
        """These conversations, a turn at a time; yields whom it waits for, and what is to be sampled."""
        given = [talk.prompt for talk in party]
        if self._environment is not None:
            yield from self._begin(party, context)
        for turn in range(self._max_turns):
            live = [talk for talk in party if not talk.over]
            if not live:
                break
            asked_alike = turn == 0 and all(talk.prompt is prompt for talk, prompt in zip(party, given, strict=True))
            shared = count if asked_alike and len(live) == len(party) and len(party) % count == 0 else 1
            rooms = [int(min(sampling.max_new_tokens - len(t.ids), context - _length(t))) for t in live]
            # One limit for all of them: who has less room is cut below, as if it had been the limit.
            drawn = replace(sampling, max_new_tokens=max(1, *rooms))
            asked = [then(talk.prompt.ids, talk.ids) for talk in live[::shared]]
            turn_seeds = [mixed(talk.seed, turn) if turn else talk.seed for talk in live]
            made = yield Draw(asked, shared, drawn, turn_seeds)
            for talk, completion, room in zip(live, made, rooms, strict=True):
                talk.say(completion, max(room, 1), self._text)
            last = turn + 1 == self._max_turns
            answers = yield from self._answers(live, last, seed=str(turn_seeds[0]))
            for talk, new in zip(live, answers, strict=True):
                if not talk.over:
                    self._go_on(talk, new, min(sampling.max_new_tokens, context - len(talk.prompt.ids)))
        for talk in party:
            talk.end()

    def close(self) -> None:
        """Let go of the processes that run tools."""
        if self.tools is not None:
            self.tools.close()
        if self._host is not None:
            self._host.close()

    def _text(self, ids: list[int]) -> str:
        return str(self._tokens.tokenizer.decode(ids, skip_special_tokens=True))

    def _begin(self, party: Sequence[Talk], context: float) -> Course:
        """An environment for each, and what it says behind the prompt."""
        if self._host is None:
            for talk in party:
                with talk.blaming(f"{self._name}.reset"):
                    if talk.environment is None:
                        talk.environment = self._environment()  # type: ignore[misc]
                    self._introduce(talk, talk.environment.reset(talk.row), context)
            return
        replies = yield [self._host.ask(talk.question()) for talk in party]
        for talk, reply in zip(party, replies, strict=True):
            if reply.problem is not None:
                talk.fail(f"{self._name}.reset", reply.problem)
                continue
            with talk.blaming(f"{self._name}.reset"):
                talk.heard.append(digest(reply.value))
                self._introduce(talk, reply.value, context)

    def _introduce(self, talk: Talk, said: Any, context: float) -> None:
        """Put what an environment says first behind the prompt."""
        if talk.over:  # it could not be made
            return
        prompt, new = talk.prompt, messages_of(said)
        if not new:
            return
        if prompt.messages is not None:
            messages = [*prompt.messages, *new]
            text = self._chat.apply(messages, answer=True)
            shown = prompt.ids.shown if isinstance(prompt.ids, PicturedIds) else ()
            talk.prompt = replace(prompt, ids=self._chat.read(text, shown), text=unquoted(text), messages=messages)
        elif not self._chat.templated:
            text = "\n".join([prompt.text, *(str(message["content"]) for message in new)])
            talk.prompt = replace(prompt, ids=self._chat.encode(text), text=text)
        else:
            raise ConfigError("the prompt holds the chat template's tokens already; give it as messages")
        if len(talk.prompt.ids) >= context:
            raise ConfigError(f"{len(talk.prompt.ids)} tokens leave no room in a context of {context:g}")

    def _answers(self, live: Sequence[Talk], last: bool, seed: str) -> Course:
        """What tools or environment say to each; conversations that are over are marked so."""
        if self.tools is None:
            return (yield from self._steps(live))
        calls = [[] if talk.stop == "length" else self.tools.parse(talk.text) for talk in live]
        for talk, asked in zip(live, calls, strict=True):
            talk.calls += len(asked)
            if last:
                talk.failed_calls += len(asked)
            if last or not asked:
                talk.end()
        todo = [] if last else [call for asked in calls for call in asked]
        if self.tools.waits:
            answers = iter((yield [self.tools.begin(call) for call in todo]))
        else:
            answers = iter(self.tools.run(todo, seed))
        found: list[list[Message]] = []
        for talk, asked in zip(live, calls, strict=True):
            given = [] if last else [_answer(next(answers), call) for call in asked]
            talk.failed_calls += sum(not answer.ok for answer in given)
            found.append([{"role": "tool", "name": answer.name, "content": answer.text} for answer in given])
        return found

    def _steps(self, live: Sequence[Talk]) -> Course:
        """What the environments say. Also to an answer that was cut: the environment judges what it heard."""
        if self._host is None:
            found = []
            for talk in live:
                new: list[Message] = []
                with talk.blaming(f"{self._name}.step"):
                    new = talk.judge(talk.environment.step(talk.text))
                found.append(new)
            return found
        replies = yield [self._host.ask(talk.question()) for talk in live]
        found = []
        for talk, reply in zip(live, replies, strict=True):
            new = []
            if reply.problem is not None:
                talk.fail(f"{self._name}.step", reply.problem)
            else:
                with talk.blaming(f"{self._name}.step"):
                    talk.heard.append(digest(reply.value))
                    new = talk.judge(reply.value)
            found.append(new)
        return found

    def _go_on(self, talk: Talk, new: list[Message], limit: float) -> None:
        """Put the answer behind what was said, if that leaves room to reply."""
        before = talk.prompt.messages or [{"role": "user", "content": talk.prompt.text}]
        with talk.blaming("the chat template"):
            ids = self._chat.extend(talk.said, [*before, *talk.messages[:-1]], new)
            if len(talk.ids) + len(ids) < limit:
                talk.hear(ids, new)
            else:
                talk.end("length")


def make_conversation(
    config: LanguageConfig, chat: Chat, tokens: Tokens, tools: Any = None, environment: Any = None
) -> Conversation:
    """The player of these tools (functions, `file.py:name`, a `Toolbox`) or environment (a class, `file.py:Class`).

    Tools are made known to the model through `chat`: by its template, or in the system message where the template does
    not speak of tools. So call it before prompts are rendered.
    """
    box = toolbox_of(config, tools) if tools else None
    if box is not None:
        introduce(box, chat)
    expect_growing(chat, "tool" if box is not None else "user")
    made = _found(environment, "environment") if environment else None
    how: dict[str, Any] = {"timeout": config.turn_timeout, "workers": config.workers if made else None}
    return Conversation(chat, tokens, tools=box, environment=made, max_turns=config.max_turns, **how)


def toolbox_of(config: LanguageConfig, tools: Any) -> Toolbox:
    """Functions, `file.py:name` or a `Toolbox`, as a toolbox."""
    named = tools if isinstance(tools, Toolbox | list | tuple) else [tools]
    if isinstance(named, Toolbox):
        return named
    functions = [_found(tool, "tool") for tool in named]
    return Toolbox(functions, timeout=config.turn_timeout, workers=config.workers)


def expect_growing(chat: Chat, role: str) -> None:
    """Refuse a chat template that writes earlier turns anew."""
    problem = check_prefixes(chat, role)
    if problem is not None:
        raise ConfigError(
            f"{problem}. Several turns need a template under which a conversation only grows, so that what is learned "
            "is what was sampled: set tokenizer.chat_template to one that leaves earlier turns as they were, or "
            "chat_template_kwargs (enable_thinking: false)"
        )


def introduce(box: Toolbox, chat: Chat) -> None:
    """Tell the model what it may call."""
    without = chat.tools
    chat.tools = box.schemas
    try:
        text = chat.apply([{"role": "user", "content": "?"}], answer=True) if chat.templated else ""
    except ConfigError:  # a template that refuses tools
        text = ""
    if not all(name in text for name in box.names):
        chat.tools = without
        chat.system_prompt = "\n\n".join(part for part in (chat.system_prompt, box.description) if part)


def _found(given: Any, what: str) -> Any:
    """An object, or the one a text names."""
    if not isinstance(given, str):
        return given
    try:
        found = find(given, {}) if ":" in given or given.endswith(".py") else None
    except ConfigError as error:
        raise ConfigError(f"{what} {given}: {error}") from error
    if found is None:
        raise ConfigError(f"{what} {given!r}: write file.py:NAME or module:NAME")
    return found


def _answer(given: Any, call: Call) -> Answer:
    """Of a tool, or what became of it instead."""
    return given if isinstance(given, Answer) else Answer(call.name, f"error: {given.problem}", False)


def _length(talk: Talk) -> int:
    return len(talk.prompt.ids) + len(talk.ids)
