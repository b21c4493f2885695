"""Several turns: the model speaks, tools or an environment answer, the model goes on.

    prompt ─► engine ─► "<tool_call>…" ─► tool ─► its answer as tokens ─► engine ─► … ─► one Sample

All conversations of a step are played side by side, a turn at a time. What the model said is kept as it was sampled and
what others said is put behind it as ids of its own, masked out of the loss: nothing is tokenised twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from grpo.capabilities import Closes
from grpo.errors import ConfigError, line
from grpo.language.config import LanguageConfig
from grpo.language.data.chat import Chat, check_prefixes, unquoted
from grpo.language.engines import Completion, Engine, Sampling, Tokens, in_groups
from grpo.language.rewards.lookup import find
from grpo.language.samples import Message, Prompt, Sample
from grpo.language.source import Groups
from grpo.language.turns.tools import Call, Toolbox, parse_calls
from grpo.rollouts import LARGEST_REWARD
from grpo.run.signals import from_a_person
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


@dataclass
class _Talk:
    """One conversation while it is played."""

    prompt: Prompt
    seed: int
    environment: Any = None
    ids: list[int] = field(default_factory=list)
    made: list[bool] = field(default_factory=list)
    logp: list[float] | None = field(default_factory=list)
    kept: list[tuple[float, int]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    said: list[int] = field(default_factory=list)
    """The last answer, as sampled."""
    stop: str = "stop"
    reward: float | None = None
    error: str | None = None
    calls: int = 0
    failed_calls: int = 0
    over: bool = False

    @property
    def text(self) -> str:
        """The last answer."""
        return next((str(m["content"]) for m in reversed(self.messages) if m["role"] == "assistant"), "")

    def say(self, completion: Completion, room: int, text: Callable[[list[int]], str]) -> None:
        """The model's turn: what was sampled, as far as there is room for it."""
        self.said = completion.ids[:room].tolist()
        self.stop = completion.stop if len(completion.ids) <= room else "length"
        self.ids += self.said
        self.made += [True] * len(self.said)
        if self.logp is not None:
            self.logp = None if completion.logp is None else self.logp + completion.logp[:room].tolist()
        if completion.kept is not None:
            self.kept.append((completion.kept, len(self.said)))
        self.messages.append({"role": "assistant", "content": text(self.said)})

    def hear(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Someone else's turn: part of the conversation, no part of what is learned."""
        self.ids += ids
        self.made += [False] * len(ids)
        if self.logp is not None:
            self.logp += [0.0] * len(ids)
        self.messages += messages

    def end(self, stop: str | None = None) -> None:
        """Nothing more is said."""
        self.over, self.stop = True, stop or self.stop

    def sample(self) -> Sample:
        """What is learned from."""
        tokens = sum(count for _, count in self.kept)
        return Sample(
            prompt=self.prompt,
            ids=torch.tensor(self.ids, dtype=torch.int64),
            made=torch.tensor(self.made, dtype=torch.bool),
            logp=None if self.logp is None else torch.tensor(self.logp, dtype=torch.float32),
            stop=self.stop,
            text=self.text,
            messages=tuple(self.messages),
            reward=self.reward,
            error=self.error,
            calls=self.calls,
            failed_calls=self.failed_calls,
            kept=sum(share * count for share, count in self.kept) / tokens if tokens else None,
        )

    @contextmanager
    def blaming(self, what: str) -> Iterator[None]:
        """A failure inside ends this conversation, and no other."""
        try:
            yield
        except BaseException as error:  # anyone's code: it has no say in when training ends
            if from_a_person(error):
                raise
            self.error = self.error or f"{what}, row {self.prompt.row}: {line(error)}"
            self.end()


class Conversation:
    """Plays conversations with tools or an environment.

    environment: makes one for every conversation (a class, or a function without arguments). max_turns: completions in
    a conversation at most; a call in the last one is refused, for nobody would hear the answer. max_tokens: prompt and
    conversation together, None: the model's context. All turns together are limited by `Sampling.max_new_tokens`; a
    conversation that runs out of it ends with `length`.
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

    def __call__(
        self, engine: Engine, prompts: Sequence[Prompt], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> Groups:
        """`count` conversations from each prompt; all end together, the last turn being everyone's."""
        talks = [_Talk(prompts[number // count], seed) for number, seed in enumerate(seeds)]
        context = self._max_tokens or engine.context
        if self._environment is not None:
            for talk in talks:
                self._begin(talk, context)
        if self.tools is not None:
            sampling = replace(sampling, stop=(*sampling.stop, *self.tools.stop))
        for turn in range(self._max_turns):
            live = [talk for talk in talks if not talk.over]
            if not live:
                break
            asked_alike = turn == 0 and all(talk.prompt is prompts[i // count] for i, talk in enumerate(talks))
            shared = count if asked_alike and len(live) == len(talks) else 1
            rooms = [int(min(sampling.max_new_tokens - len(t.ids), context - _length(t))) for t in live]
            # One limit for all of them: who has less room is cut below, as if it had been the limit.
            drawn = replace(sampling, max_new_tokens=max(1, *rooms))
            asked = [[*talk.prompt.ids, *talk.ids] for talk in live[::shared]]
            turn_seeds = [mixed(talk.seed, turn) if turn else talk.seed for talk in live]
            made = engine.generate(asked, shared, drawn, turn_seeds)
            for talk, completion, room in zip(live, made, rooms, strict=True):
                talk.say(completion, max(room, 1), self._text)
            answers = self._answers(live, last=turn + 1 == self._max_turns, seed=str(turn_seeds[0]))
            for talk, new in zip(live, answers, strict=True):
                if not talk.over:
                    self._go_on(talk, new, min(sampling.max_new_tokens, context - len(talk.prompt.ids)))
        for talk in talks:
            if isinstance(talk.environment, Closes):
                with talk.blaming(f"{self._name}.close"):
                    talk.environment.close()
        yield from in_groups((talk.sample() for talk in talks), count)

    def close(self) -> None:
        """Let go of the processes that run tools."""
        if self.tools is not None:
            self.tools.close()

    def _text(self, ids: list[int]) -> str:
        return str(self._tokens.tokenizer.decode(ids, skip_special_tokens=True))

    def _begin(self, talk: _Talk, context: float) -> None:
        """An environment of its own, and what it says behind the prompt."""
        prompt = talk.prompt
        with talk.blaming(f"{self._name}.reset"):
            talk.environment = self._environment()  # type: ignore[misc]
            new = _messages(talk.environment.reset({**prompt.columns, "prompt": prompt.shown}))
            if not new:
                return
            if prompt.messages is not None:
                messages = [*prompt.messages, *new]
                text = self._chat.apply(messages, answer=True)
                ids = self._chat.encode(text, bare=False)
                talk.prompt = replace(prompt, ids=ids, text=unquoted(text), messages=messages)
            elif not self._chat.templated:
                text = "\n".join([prompt.text, *(str(message["content"]) for message in new)])
                talk.prompt = replace(prompt, ids=self._chat.encode(text), text=text)
            else:
                raise ConfigError("the prompt holds the chat template's tokens already; give it as messages")
            if len(talk.prompt.ids) >= context:
                raise ConfigError(f"{len(talk.prompt.ids)} tokens leave no room in a context of {context:g}")

    def _answers(self, live: Sequence[_Talk], last: bool, seed: str) -> list[list[Message]]:
        """What tools or environment say to each; conversations that are over are marked so."""
        if self.tools is None:
            return [self._step(talk) for talk in live]
        calls = [[] if talk.stop == "length" else self.tools.parse(talk.text) for talk in live]
        for talk, asked in zip(live, calls, strict=True):
            talk.calls += len(asked)
            if last:
                talk.failed_calls += len(asked)
            if last or not asked:
                talk.end()
        answers = iter(self.tools.run([call for asked in calls for call in asked], seed) if not last else ())
        found: list[list[Message]] = []
        for talk, asked in zip(live, calls, strict=True):
            given = [] if last else [next(answers) for _ in asked]
            talk.failed_calls += sum(not answer.ok for answer in given)
            found.append([{"role": "tool", "name": answer.name, "content": answer.text} for answer in given])
        return found

    def _step(self, talk: _Talk) -> list[Message]:
        """Also for an answer that was cut: the environment judges what it heard."""
        with talk.blaming(f"{self._name}.step"):
            said, reward, done = talk.environment.step(talk.text)
            if reward is not None:
                total = float((talk.reward or 0.0) + reward)
                if not abs(total) <= LARGEST_REWARD:  # NaN is not, either
                    raise ValueError(f"the reward is {total}")
                talk.reward = total
            new = _messages(said)
            if done or talk.stop == "length":
                talk.end()
            elif not new:
                raise ValueError("it is not done, but has nothing to say either")
            return new
        return []

    def _go_on(self, talk: _Talk, new: list[Message], limit: float) -> None:
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
    box = None
    if tools:
        named = tools if isinstance(tools, Toolbox | list | tuple) else [tools]
        box = named if isinstance(named, Toolbox) else Toolbox([_found(tool, "tool") for tool in named])
        _introduce(box, chat)
    role = "tool" if box is not None else "user"
    problem = check_prefixes(chat, role)
    if problem is not None:
        raise ConfigError(
            f"{problem}. Several turns need a template under which a conversation only grows, so that what is learned "
            "is what was sampled: set tokenizer.chat_template to one that leaves earlier turns as they were, or "
            "chat_template_kwargs (enable_thinking: false)"
        )
    made = _found(environment, "environment") if environment else None
    return Conversation(chat, tokens, tools=box, environment=made, max_turns=config.max_turns)


def _introduce(box: Toolbox, chat: Chat) -> None:
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


def _messages(given: Any) -> list[Message]:
    """What an environment said, checked; a text is a user's."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    messages = [dict(message) for message in given or ()]
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"a message is {{'role': …, 'content': text}}, not {message!r:.100}")
    return messages


def _length(talk: _Talk) -> int:
    return len(talk.prompt.ids) + len(talk.ids)
