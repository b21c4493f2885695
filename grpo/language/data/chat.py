"""Conversations as token ids: a prompt through the chat template, and what is put behind an answer in the next turn.

A text prompt becomes one user message where the tokenizer has a chat template, so that a chat model is asked the way it
was taught. What the model said is never tokenised again: `extend` gives only the ids that come after it.

Only the template writes control tokens. Where a message holds the text of one (`<|im_end|>` in what a user says),
`apply` puts it between two `QUOTE`s, and `encode` reads what stands there as the characters it is made of.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.errors import ConfigError, warn
from grpo.language.engines import Tokens
from grpo.language.pictures.ids import PicturedIds
from grpo.language.pictures.pairing import MARK as IMAGE
from grpo.language.pictures.pairing import as_parts, is_image
from grpo.language.pictures.processor import Pictures
from grpo.language.pictures.reading import Picture
from grpo.language.samples import Message

MARK = "0MARK0"
"""Stands for an answer when only what the template puts around it is wanted."""
QUOTE = "\ufdd0"
"""Around what is text and no control token; not a character, so that no text has it."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles that templates know; a tokenizer may have one as a token."""
LONGEST_END = 8
"""Tokens that the end of a turn has at most."""
EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*$")
TEMPLATE_REMEDY = "set tokenizer.chat_template, take an instruct model's tokenizer, or set skip_apply_chat_template"


class Chat:
    """A tokenizer with the way prompts are put to it."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_prompt: str | None = None,
        skip: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Any] | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        self.tokenizer, self.system_prompt, self.tools = tokenizer, system_prompt, list(tools or ()) or None
        self.pictures = pictures
        """How images are written, where the model reads them."""
        self.kwargs = dict(kwargs or {})
        self.templated = not skip and bool(getattr(tokenizer, "chat_template", None))
        """Whether prompts go through a chat template; else the model gets bare text."""
        self._skip = skip
        self._parts = False
        """Whether every message is written as parts: templates of image-text models may know nothing else."""
        self._told: set[str] = set()
        self._control, self._control_ids = re.compile("(?!)"), frozenset[int]()
        self._parts = pictures is not None and self.templated and not self._reads_text()
        self._control, self._control_ids = self._control_tokens()
        """The text of every control token, the longest first, and their ids."""
        self._marks, self._end = self._template_tokens() if self.templated else ((), "")

    @property
    def processing(self) -> Any:
        """What a saved model needs beside it: the tokenizer, or the processor that holds it."""
        return self.tokenizer if self.pictures is None else self.pictures.processor

    def render(
        self, prompt: str | Sequence[Message], shown: Sequence[Picture] = ()
    ) -> tuple[Sequence[int], str, list[Message] | None]:
        """The prompt's ids, its text, and the conversation it became (None: bare text); `shown`: its images."""
        text, messages = self.written(prompt, shown)
        bare = messages is None
        return self.read(text, shown, bare), text if bare else unquoted(text), messages

    def written(
        self, prompt: str | Sequence[Message], shown: Sequence[Picture] = ()
    ) -> tuple[str, list[Message] | None]:
        """The prompt as it is to be read, control tokens in quotes, and the conversation it became (None: bare)."""
        if isinstance(prompt, str):
            if self._looks_templated(prompt):
                self._notice("prompts hold the chat template's own tokens already: they are left as they are")
                return prompt, None
            messages = [{"role": "user", "content": self._with_marks(prompt, len(shown)) if shown else prompt}]
        else:
            messages = [dict(message) for message in prompt]
            if not (self.templated or self._skip):
                raise ConfigError(
                    f"the prompt is a conversation but the tokenizer has no chat template; {TEMPLATE_REMEDY}"
                )
        if self.system_prompt is not None:
            if messages and messages[0].get("role") == "system":
                self._notice("system_prompt is left out of prompts that begin with a system message of their own")
            else:
                messages = [{"role": "system", "content": self.system_prompt}, *messages]
        if not self.templated:
            text = "\n".join(self._bare(message["content"]) for message in messages)
            own = text if self.pictures is None else text.replace(self.pictures.mark, "")
            if found := self._control.search(own.removeprefix(self.tokenizer.bos_token or "")):
                self._notice(f"bare prompts hold control tokens ({found[0]}), and are read with them")
            return text, None
        return self.apply(messages, answer=True), messages

    def read_together(self, written: Sequence[tuple[str, bool]]) -> list[list[int] | None]:
        """What `encode` makes of texts, bare or not, in one call; None where something stands in quotes.

        A fast tokenizer reads many texts on all cores, and a call costs more than the text of a prompt.
        """
        found: list[list[int] | None] = [None] * len(written)
        begun = [bare and not self._begun(text) for text, bare in written]
        for bare in (False, True):
            plain = [i for i, (text, _) in enumerate(written) if begun[i] == bare and QUOTE not in text]
            texts = [written[i][0] for i in plain]
            read = self.tokenizer(texts, add_special_tokens=bare, verbose=False)["input_ids"] if texts else []
            for i, ids in zip(plain, read, strict=True):
                found[i] = list(ids)
        return found

    def _begun(self, text: str) -> bool:
        """Whether what the tokenizer puts before a text is there already."""
        bos = self.tokenizer.bos_token
        return bool(bos) and text.startswith(bos)

    def read(self, text: str, shown: Sequence[Picture], bare: bool = False) -> Sequence[int]:
        """Text as ids, its images in as many as each takes; marks of images that stand in quotes are text."""
        if not shown or self.pictures is None:
            return self.encode(text, bare)
        pieces = text.split(QUOTE)
        outside = self.pictures.expanded(QUOTE.join(pieces[::2]), shown).split(QUOTE)
        pieces[::2] = outside
        return PicturedIds(self.encode(QUOTE.join(pieces), bare), shown, self.pictures)

    def _with_marks(self, prompt: str, count: int) -> list[Any]:
        """A text and its images as parts: where the text marks them, else before it."""
        pieces = prompt.split(self.pictures.mark) if self.pictures is not None else [prompt]
        if len(pieces) - 1 != count:
            return [*[dict(IMAGE) for _ in range(count)], {"type": "text", "text": prompt}]
        parts: list[Any] = [{"type": "text", "text": pieces[0]}] if pieces[0] else []
        for piece in pieces[1:]:
            parts += [dict(IMAGE), {"type": "text", "text": piece}] if piece else [dict(IMAGE)]
        return parts

    def _bare(self, content: Any) -> str:
        """What a message says without a template."""
        if isinstance(content, str) or self.pictures is None:
            return str(content)
        return "".join(self.pictures.mark if is_image(part) else str(part["text"]) for part in content)

    def quotes(self, prompt: str | Sequence[Message]) -> bool:
        """Whether a prompt holds the text of control tokens, which is read as text."""
        if not self.templated or (isinstance(prompt, str) and self._looks_templated(prompt)):
            return False
        if isinstance(prompt, str):
            return self._control.search(prompt) is not None
        return any(self._quoted(message) != message for message in prompt)

    def apply(self, messages: Sequence[Message], answer: bool) -> str:
        """The conversation as the template writes it; `answer`: up to where the assistant is to go on."""
        quoted = [self._quoted(message) for message in messages]
        if self._parts or any(isinstance(message.get("content"), list) for message in quoted):
            quoted = [as_parts(message) for message in quoted]
        try:
            goes_on = answer and messages[-1].get("role") == "assistant"
            return self.tokenizer.apply_chat_template(
                quoted,
                tools=self.tools,
                tokenize=False,
                add_generation_prompt=answer and not goes_on,
                continue_final_message=goes_on,
                **self.kwargs,
            )
        except Exception as error:  # a template is a program: it may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ConfigError(
                f"the chat template does not take this conversation ({roles}): {_first(error)}"
            ) from error

    def encode(self, text: str, bare: bool = True) -> list[int]:
        """Text as ids; `bare`: with what the tokenizer puts around a text by itself, unless it is there already."""
        bare = bare and not self._begun(text)
        first, *rest = text.split(QUOTE)
        ids = list(self.tokenizer(first, add_special_tokens=bare, verbose=False)["input_ids"])
        for number, piece in enumerate(rest):
            ids += self._behind(piece) if number % 2 else self._as_text(piece)
        return ids

    def _as_text(self, piece: str) -> list[int]:
        """What spells a control token, as its characters."""
        head, whole = (
            list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"])
            for text in (MARK, MARK + piece)
        )
        ids = whole[len(head) :]
        if not ids or whole[: len(head)] != head or not self._control_ids.isdisjoint(ids):
            raise ConfigError(
                f"a message holds {piece}, which this tokenizer can only read as a control token; take it out, or put "
                "prompts to the model as you template them yourself (skip_apply_chat_template)"
            )
        return ids

    def _quoted(self, message: Message) -> Message:
        """The message with the text of control tokens marked as text, wherever it stands."""
        role = message.get("role")
        if role not in ROLES and (found := self._control.search(str(role))):
            raise ConfigError(
                f"a message has the role {role!r}, which holds the control token {found[0]}; take a role such as user"
            )
        return {name: value if name == "role" else self._marked(value) for name, value in message.items()}

    def _marked(self, value: Any) -> Any:
        """What a message holds, with every text in it marked."""
        if isinstance(value, str):
            return self._control.sub(lambda found: f"{QUOTE}{found[0]}{QUOTE}", unquoted(value))
        if isinstance(value, Mapping):
            return {self._marked(name): self._marked(part) for name, part in value.items()}
        return type(value)(self._marked(part) for part in value) if type(value) in (list, tuple) else value

    def extend(self, ids: Sequence[int], messages: Sequence[Message], new: Sequence[Message]) -> list[int]:
        """What comes after a sampled answer `ids` to `messages`: the end of its turn, `new`, the assistant's header.

        An end-of-turn token that was sampled is not repeated; where none was (length limit, stop text) it is added.
        """
        if not self.templated:
            return self._behind("\n".join(["", *(str(message["content"]) for message in new), ""]))
        rest_ids = self._behind(self._after([*messages, {"role": "assistant", "content": MARK}, *new], answer=True))
        said = [int(i) for i in ids[-LONGEST_END:]]
        shared = next((n for n in range(len(said), 0, -1) if said[-n:] == rest_ids[:n]), 0)
        return rest_ids[shared:]

    def said(self, text: str) -> list[int]:
        """An answer as ids behind its prompt; where it spells a control token, as its characters, or without it."""
        try:
            return self._behind(self._marked(text))
        except ConfigError:  # this tokenizer knows it as a control token only
            return self._behind(self._control.sub("", text))

    def turn_end(self) -> str:
        """What the template writes behind an answer; empty where it writes nothing."""
        question = {"role": "user", "content": "?"}
        return self._after([question, {"role": "assistant", "content": MARK}], answer=False) if self.templated else ""

    def _after(self, messages: Sequence[Message], answer: bool) -> str:
        """What the template writes behind the mark."""
        _, mark, after = self.apply(messages, answer).rpartition(MARK)
        if not mark:
            raise ConfigError("the chat template leaves out earlier answers: it cannot be used for several turns")
        return after

    def _behind(self, text: str) -> list[int]:
        """Text as ids behind other text: some tokenizers put a space before what begins a text."""
        head, whole = self.encode(MARK, bare=False), self.encode(MARK + text, bare=False)
        return whole[len(head) :] if whole[: len(head)] == head else self.encode(text, bare=False)

    def _control_tokens(self) -> tuple[re.Pattern[str], frozenset[int]]:
        """Special tokens that were added to the vocabulary, and those that the template writes.

        Any other one may be a character that people write, as where `pad_token` is set to "!".
        """
        added = {str(token): i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        own = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        written = self._written() if self.templated else ""
        ids = {token: i for token, i in {**own, **added}.items() if token in written or (token in added and token[1:])}
        words = sorted(ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, words)) or "(?!)"), frozenset(ids.values())

    def _reads_text(self) -> bool:
        """Whether the template writes what a message says where it is one text, not a list of parts."""
        try:
            return MARK in self.apply([{"role": "user", "content": MARK}], answer=True)
        except ConfigError:
            return False

    def _written(self) -> str:
        """What the template writes around a question and its answer."""
        question, answer = ({"role": role, "content": MARK} for role in ("user", "assistant"))
        written = ""
        for messages, goes_on in (([question], True), ([question, answer], False)):
            with contextlib.suppress(ConfigError):  # a template that wants something else; the prompts will tell
                written += self.apply(messages, goes_on).replace(MARK, " ")
        return written

    def _template_tokens(self) -> tuple[tuple[str, ...], str]:
        """Special tokens that the template writes around a question, but for the one that begins a text (often <s>);
        and what it writes behind it."""
        try:
            text = self.apply([{"role": "user", "content": MARK}], answer=True)
        except ConfigError:  # a template that wants more than a question; the prompts will tell
            return (), ""
        if MARK not in text:
            raise ConfigError(f"the chat template leaves out what the user says in plain text; {TEMPLATE_REMEDY}")
        bos = self.tokenizer.bos_token
        marks = tuple(token for token in self.tokenizer.all_special_tokens if token != bos and token in text)
        return marks, text.rpartition(MARK)[2].strip()

    def _looks_templated(self, text: str) -> bool:
        """Whether it begins as templates do, or ends as this one does; a control token inside a question is none."""
        if not self.templated:
            return False
        begins = text.lstrip().startswith((self.tokenizer.bos_token or MARK, *self._marks))
        return begins or (any(token in self._end for token in self._marks) and text.rstrip().endswith(self._end))

    def _notice(self, text: str) -> None:
        """Say it once."""
        if text not in self._told:
            self._told.add(text)
            warn(text)


def unquoted(text: str) -> str:
    """The text without our marks."""
    return text.replace(QUOTE, "")


def check_prefixes(chat: Chat, role: str = "user") -> str | None:
    """None if a conversation only grows when a message of `role` follows an answer; else where the template breaks it.

    In training the conversation grows by what was sampled. A template that writes earlier turns differently later on
    (thinking left out) would show the trained model another conversation than the one it learned from.
    """
    if not chat.templated:
        return None
    question, new = {"role": "user", "content": "question"}, {"role": role, "content": "further"}
    for said in ("plain answer", "<think>\nthoughts\n</think>\n\nanswer"):
        answer = {"role": "assistant", "content": said}
        try:
            asked = chat.apply([question], answer=True)
            answered = chat.apply([question, answer], answer=False)
            later = chat.apply([question, answer, new], answer=True)
        except ConfigError as error:
            return str(error)
        if "further" not in later:
            return f"the chat template leaves out {role} messages"
        # What is written around a last answer only (an empty thought) does not count, nor is one that stands in its
        # header alone (Qwen3 with enable_thinking: false) missed behind it: nobody thought there.
        if later.startswith((asked + said, EMPTY_THOUGHT.sub("", asked) + said)):
            continue
        for earlier, what in ((asked, "the question and the assistant's header"), (answered, "an answer")):
            ids, later_ids = chat.encode(earlier, bare=False), chat.encode(later, bare=False)
            if later_ids[: len(ids)] != ids:
                same = next((i for i, (a, b) in enumerate(zip(earlier, later, strict=False)) if a != b), len(later))
                return (
                    f"the chat template writes {what} differently once a {role} message follows: "
                    f"{earlier[same : same + 40]!r} becomes {later[same : same + 40]!r}"
                )
    return None


def prepare_tokenizer(
    tokenizer: Any, model_config: Any = None, generation_config: Any = None, pictures: Pictures | None = None
) -> Tokens:
    """Every id that ends a completion, and one to pad with (never a new one: embeddings keep their size)."""
    eos: set[int] = set()
    for holder in (tokenizer, model_config, generation_config):
        found = getattr(holder, "eos_token_id", None)
        eos.update(found if isinstance(found, list | tuple) else () if found is None else (found,))
    turn_end = _turn_end_ids(tokenizer, pictures)
    eos.update(turn_end)
    if not eos:
        raise ConfigError(
            "the tokenizer has no end-of-sequence token, so that no completion could end; set tokenizer.eos_token"
        )
    pad, own, size = tokenizer.pad_token_id, tokenizer.eos_token_id, getattr(model_config, "vocab_size", None)
    if pad is None or (size and pad >= size):  # a pad token without a row in the embeddings cannot be looked up
        pad = min(eos) if own is None else own
    end = turn_end[0] if turn_end else min(eos) if own is None else own
    return Tokens(tokenizer, frozenset(eos), pad, end, frozenset() if pictures is None else pictures.unsaid)


def _turn_end_ids(tokenizer: Any, pictures: Pictures | None) -> list[int]:
    """The special token that the template ends an answer with, if it does."""
    try:
        chat = Chat(tokenizer, pictures=pictures)
        first_ids = chat.encode(chat.turn_end().lstrip(), bare=False)[:1]
    except ConfigError:  # a template that wants something else than question and answer
        return []
    return [i for i in first_ids if i in tokenizer.added_tokens_decoder]


def _first(error: Exception) -> str:
    """The first line of an error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
