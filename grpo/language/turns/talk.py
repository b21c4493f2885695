"""One conversation while it is played: who said what, and what is learned of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo.errors import line
from grpo.language.engines import Completion
from grpo.language.samples import Message, Prompt, Sample
from grpo.language.turns.hosts import Question
from grpo.rollouts import LARGEST_REWARD
from grpo.run.signals import from_a_person


@dataclass
class Talk:
    """One conversation while it is played."""

    prompt: Prompt
    seed: int
    environment: Any = None
    """Where it lives in this thread."""
    ids: list[int] = field(default_factory=list)
    made: list[bool] = field(default_factory=list)
    logp: list[float] | None = field(default_factory=list)
    version: list[int] | None = field(default_factory=list)
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
    key: int = 0
    """Of its environment, where that lives elsewhere."""
    heard: list[str] = field(default_factory=list)
    """Digests of what that said."""
    judged_by: Any = None
    """An environment that reward functions may ask; it goes along with the sample."""

    @property
    def row(self) -> dict[str, Any]:
        """What an environment begins with."""
        return {**self.prompt.columns, "prompt": self.prompt.shown}

    def question(self) -> Question:
        """To its environment: to begin, or to hear the last answer."""
        said = tuple(str(message["content"]) for message in self.messages if message["role"] == "assistant")
        return Question(self.key, self.row, said, tuple(self.heard))

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
        if self.version is not None:
            self.version = None if completion.version is None else self.version + completion.version[:room].tolist()
        if completion.kept is not None:
            self.kept.append((completion.kept, len(self.said)))
        self.messages.append({"role": "assistant", "content": text(self.said)})

    def hear(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Someone else's turn: part of the conversation, no part of what is learned."""
        self.ids += ids
        self.made += [False] * len(ids)
        if self.logp is not None:
            self.logp += [0.0] * len(ids)
        if self.version is not None:
            self.version += [0] * len(ids)
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
            version=None if self.version is None else torch.tensor(self.version, dtype=torch.int64),
            environment=self.judged_by,
        )

    def judge(self, answer: Any) -> list[Message]:
        """An environment's answer: messages, a reward, whether it is over."""
        said, reward, done = answer
        if reward is not None:
            total = float((self.reward or 0.0) + reward)
            if not abs(total) <= LARGEST_REWARD:  # NaN is not, either
                raise ValueError(f"the reward is {total}")
            self.reward = total
        new = messages_of(said)
        if done or self.stop == "length":
            self.end()
        elif not new:
            raise ValueError("it is not done, but has nothing to say either")
        return new

    def fail(self, what: str, problem: str) -> None:
        """End it for a reason."""
        self.error = self.error or f"{what}, row {self.prompt.row}: {problem}"
        self.end()

    @contextmanager
    def blaming(self, what: str) -> Iterator[None]:
        """A failure inside ends this conversation, and no other."""
        try:
            yield
        except BaseException as error:  # anyone's code: it has no say in when training ends
            if from_a_person(error):
                raise
            self.fail(what, line(error))


def messages_of(given: Any) -> list[Message]:
    """What an environment said, checked; a text is a user's."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    messages = [dict(message) for message in given or ()]
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"a message is {{'role': …, 'content': text}}, not {message!r:.100}")
    return messages
