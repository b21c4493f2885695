"""What a row's columns mean: which one is the prompt, which one the answer, and what else reward functions get."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from grpo.errors import ConfigError, warn
from grpo.language.data.rows import Row
from grpo.language.pictures.pairing import is_image

if TYPE_CHECKING:  # a process that judges gets an Answer, and must not load PyTorch for it
    from grpo.language.samples import Message

PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query", "input", "text")
ANSWER_COLUMNS = ("answer", "solution", "reference_answer", "reference", "ground_truth")
AUTO = "auto"
"""answer_after where nobody says: the mark is found in the rows, or there is none."""
FIELD = re.compile(r"\{\{|\}\}|\{(\w+)\}")
"""{column}, or a doubled brace; braces that hold anything else (\\boxed{}) are text."""
GSM8K = "####"
"""The mark before the answer in that data set, and in many made like it."""
ENDING = re.compile(r"####[ \t]*[^\s#][^\n#]*\s*\Z")
ENOUGH = 64
"""Rows whose answers say what shape they have."""
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def named_in(template: str) -> set[str]:
    """Columns that a template asks for."""
    return {name for name in FIELD.findall(template) if name}


class Answer(str):
    """What follows the mark: a text that also equals the number it spells, as reward functions compare it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int | float) and not isinstance(other, bool):
            try:
                return float(self) == other
            except ValueError:
                return False
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def marked(rows: Sequence[Row], answer: str | None) -> bool:
    """Whether answers have GSM8K's shape: a solution, then #### and the answer."""
    texts = [] if answer is None else [row.get(answer) for row in rows]
    return bool(texts) and all(isinstance(text, str) and ENDING.search(text) for text in texts)


@dataclass(frozen=True)
class Columns:
    """The chosen columns of a data set."""

    names: tuple[str, ...]
    prompt: str = "prompt"
    answer: str | None = None
    after: str | None = None
    """The answer is what follows this mark; auto: not known yet."""
    template: str | None = None
    """The prompt is made of several columns."""
    found: bool = False
    """The mark was found in the rows, nobody named it: an answer without it is taken whole."""
    images: str | None = None
    """The column with the row's images."""
    pictured: bool = False
    """Whether messages may hold images: the model reads them."""
    folder: str | None = None
    """Of the data file, beside which images that are named by a path are looked for."""

    @classmethod
    def choose(
        cls,
        names: Sequence[str],
        place: str,
        prompt: str | None = None,
        answer: str | None = None,
        after: str | None = None,
        template: str | None = None,
    ) -> Columns:
        """Those that were asked for, else the known ones."""
        there = ", ".join(names)
        for column, setting in ((prompt, "prompt_column"), (answer, "answer_column")):
            if column is not None and column not in names:
                raise ConfigError(f"{place}: no column {column}; found {there} — set {setting} to one of them")
        chosen = prompt or next((name for name in PROMPT_COLUMNS if name in names), "prompt")
        if chosen not in ("prompt", prompt) and template is None:
            warn(f"{place}: {chosen} is taken as the prompt; set prompt_column for another")
        answer = answer or next((name for name in ANSWER_COLUMNS if name in names), None)
        if after not in (None, AUTO) and answer is None:
            raise ConfigError(f"{place}: answer_after needs an answer; found {there} — set answer_column")
        columns = cls(tuple(names), chosen, answer, after, template)
        if template is not None and (unknown := sorted(columns.wanted - set(names))):
            raise ConfigError(
                f"prompt_template: no column {unknown[0]}; found {there} — double the braces that are meant as text"
            )
        return columns

    def seen(self, rows: Sequence[Row], place: str) -> Columns:
        """The same once some rows are known: whether the answer follows a mark, where nobody said."""
        if self.after != AUTO:
            return self
        if not marked(rows, self.answer):
            return replace(self, after=None)
        warn(
            f"{place}: {self.answer} ends in '{GSM8K} …'; rewards get what follows as the answer, the whole text as "
            "answer_full; answer_after=None gives them all of it",
        )
        return replace(self, after=GSM8K, found=True)

    @property
    def whole(self) -> Columns:
        """The same with all of the text as the answer."""
        return replace(self, after=None, found=False)

    @property
    def meaning(self) -> dict[str, Any]:
        """What decides what a row's columns mean, for its fingerprint."""
        left_out = {"found", "pictured", "folder", *(() if self.images else ("images",))}
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    @property
    def told(self) -> list[str]:
        """The names under which `rest_of` gives them."""
        return [*self.rest_of({}, ""), *(["answer_full"] if self.after is not None else [])]

    @property
    def wanted(self) -> set[str]:
        """Columns that a prompt is made of."""
        return {self.prompt} if self.template is None else named_in(self.template)

    def prompt_of(self, row: Row, place: str) -> str | list[Message]:
        """The prompt, checked: text, or messages."""
        if self.template is not None:
            return _readable(FIELD.sub(lambda field: self._filled(row, field, place), self.template), place)
        prompt = row.get(self.prompt)
        if prompt is None:
            found = [name for name, value in row.items() if value is not None]
            remedy = next((name for name in PROMPT_COLUMNS if name in found), "…")
            told = f"missing {self.prompt}; found {', '.join(found) or 'nothing'}"
            raise ConfigError(f"{place}: {told} — set prompt_column={remedy}, or give the row a {self.prompt}")
        if isinstance(prompt, str):
            return _readable(prompt, place)
        if not isinstance(prompt, Sequence) or not all(isinstance(message, Mapping) for message in prompt):
            kind = type(prompt).__name__
            raise ConfigError(f"{place}: {self.prompt} is of type {kind}; a prompt is text or a list of messages")
        if not prompt:
            raise ConfigError(f"{place}: {self.prompt} holds no messages")
        places = [f"{place}: {self.prompt}[{i}]" for i in range(len(prompt))]
        return [_message(message, at, self.pictured) for message, at in zip(prompt, places, strict=True)]

    def rest_of(self, row: Row, place: str) -> dict[str, Any]:
        """What reward functions get by name: every column but `prompt`, and the answer as `answer`."""
        rest = {name: row.get(name) for name in self.names if name != "prompt"}
        if self.answer is None:
            return rest
        answer = row.get(self.answer)
        if self.after is not None and answer is not None:
            rest["answer_full"] = answer
            _, mark, end = str(answer).rpartition(self.after)
            if not mark and not self.found:
                told = f"{place}: {self.answer} holds no {self.after!r}"
                raise ConfigError(f"{told}; set answer_after to its own mark, or to None for all of the text")
            answer = Answer(THOUSANDS.sub("", end.strip())) if mark else answer
        return rest | {"answer": answer}

    def _filled(self, row: Row, field: re.Match[str], place: str) -> str:
        if not field[1]:
            return field[0][0]
        if row.get(field[1]) is None:
            raise ConfigError(f"{place}: missing {field[1]}, which prompt_template asks for")
        return str(row[field[1]])


def _message(message: Mapping[str, Any], place: str, pictured: bool) -> Message:
    """A message with its content as one text, or parts where it holds images, without the empty keys of Arrow."""
    message = {key: value for key, value in message.items() if value is not None}
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(part, str) for part in parts):
            content = "".join(map(str, parts))
        elif any(is_image(part) for part in content):
            return message | {"content": _with_images(content, place, pictured)}
    if not isinstance(content, str):
        kind = "missing" if content is None else f"of type {type(content).__name__}"
        raise ConfigError(f"{place}: content is {kind}; it must be text")
    if not isinstance(message.get("role"), str):
        raise ConfigError(f"{place}: no role; a message is {{'role': 'user', 'content': …}}")
    return message | {"content": _readable(content, place)}


def _with_images(content: Sequence[Any], place: str, pictured: bool) -> list[Any]:
    if not pictured:
        raise ConfigError(
            f"{place}: content holds an image and the model reads text alone; name an image-text model. Of one that "
            "does both (Gemma 3) set image_column, or pass its processor as processing_class"
        )
    for part in content:
        if not is_image(part) and not isinstance(part.get("text") if isinstance(part, Mapping) else None, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ConfigError(f"{place}: content holds a part of type {kind}; parts are texts and images")
    return [part if is_image(part) else {"type": "text", "text": _readable(part["text"], place)} for part in content]


def _readable(text: str, place: str) -> str:
    """Refuse what no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{place}: a lone surrogate at character {error.start}; repair the text") from None
    return text
