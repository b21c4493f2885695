"""A teacher with another tokenizer: it reads what the student wrote as text, and is asked for the student's tokens.

The completion becomes bytes and text, stands behind the prompt as the teacher's own template writes it, and is read in
its tokens; the student's end-of-sequence token is the teacher's. What it says of its own tokens becomes what it says of
the student's by the text that both write (`alignment`).

What the teacher cannot write is charged too, or the student would flee to it: a control token in the midst of an
answer is read by its name, bytes that are no text as U+FFFD, and the token from which on the teacher's tokens are still
another text pays for all the rest. No opinion (NaN) is there behind such a token, on rows that are too long for the
teacher, and on a character that the length limit cut in two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo.errors import ConfigError, warn
from grpo.language.data.chat import Chat
from grpo.language.data.pieces import Pieces, spelled, whole
from grpo.language.model.alignment import said_of
from grpo.language.samples import Prompt, Sample
from grpo.rollouts import Taught

if TYPE_CHECKING:
    from grpo.language.config import LanguageConfig
    from grpo.language.model.teacher import Reader

END, UNREAD = b"\xff", b"\xfe"
"""Stand for the end of an answer, and for a token of the teacher's that is no known text: bytes that no text has."""
LIKELIEST = 64
"""Tokens of the teacher's at each place, among which those are looked for that go on beyond a boundary."""


class TranslatedReader:
    """What a teacher with tokens of its own says of the student's."""

    context = float("inf")
    """Counted here, in the teacher's tokens."""

    def __init__(self, reader: Reader, student: Chat, teacher: Chat, end: int) -> None:
        """end: the token with which the teacher ends an answer."""
        self._reader, self._student, self._chat, self._end = reader, student, teacher, end
        self._mine = Pieces(student.tokenizer, "the student's")
        self._theirs = Pieces(teacher.tokenizer, "the teacher's", named=False)
        self.vocabulary = reader.vocabulary
        self._told = False

    def read(self, samples: Sequence[Sample], steps: int, count: int) -> Taught:
        """(N, T) of the sampled tokens."""
        logp_NT = torch.full((len(samples), steps), float("nan"))
        prompts: dict[int, Prompt] = {}
        asked: list[tuple[int, Sample, list[bytes], list[bytes]]] = []
        for row, sample in enumerate(samples):
            prompts[id(sample.prompt)] = prompts.get(id(sample.prompt)) or self._prompt(sample.prompt)
            theirs, said, read = self._translated(sample, prompts[id(sample.prompt)])
            if len(theirs.prompt.ids) + theirs.length > self._reader.context:
                self._tell()
            elif said and read:
                asked.append((row, theirs, said, read))
        if not asked:
            return Taught(logp_NT)
        longest = max(theirs.length for _, theirs, _, _ in asked)
        found = self._reader.read([theirs for _, theirs, _, _ in asked], longest, LIKELIEST)
        assert found.choice_NTK is not None and found.choice_logp_NTK is not None
        for number, (row, _, said, read) in enumerate(asked):
            told = found.logp_NT[number, : len(read)].tolist()
            others = self._others(found.choice_NTK[number, : len(read)], found.choice_logp_NTK[number, : len(read)])
            logp_NT[row, : len(said)] = torch.tensor(said_of(said, read, told, others))
        return Taught(logp_NT)

    def _translated(self, sample: Sample, prompt: Prompt) -> tuple[Sample, list[bytes], list[bytes]]:
        """The sample as the teacher reads it, and the bytes of the student's tokens and of the teacher's."""
        ended, cut = sample.stop == "eos", sample.stop == "length"
        pieces = self._mine(sample.ids.tolist())
        said = spelled(pieces[:-1] if ended else pieces[: whole(pieces)] if cut else pieces)
        ids = self._chat.said(b"".join(said).decode())
        read = [UNREAD if piece is None else piece for piece in self._theirs(ids)]
        if ended:
            ids, said, read = [*ids, self._end], [*said, END], [*read, END]
        made = torch.ones(len(ids), dtype=torch.bool)
        theirs = replace(sample, prompt=prompt, ids=torch.tensor(ids, dtype=torch.int64), made=made, logp=None)
        return theirs, said, read

    def _others(self, choice_TK: Tensor, logp_TK: Tensor) -> list[dict[bytes, float]]:
        """Texts that might have stood at each place."""
        rows = zip(choice_TK.tolist(), logp_TK.tolist(), strict=True)
        return [{piece: logp for piece, logp in zip(self._theirs(ids), chances, strict=True) if piece}
                for ids, chances in rows]  # fmt: skip

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            warn(f"some rows are longer than the teacher's context ({self._reader.context:g} tokens) and have none")

    def _prompt(self, prompt: Prompt) -> Prompt:
        """As the teacher's template has it."""
        if prompt.messages is None and self._student.templated:
            raise ConfigError(
                f"row {prompt.row}: its prompt holds the student's chat template already, which the teacher's tokens "
                "have not; give prompts as text or messages, or take a teacher with the student's tokenizer"
            )
        ids, text, messages = self._chat.render(prompt.text if prompt.messages is None else prompt.messages)
        return replace(prompt, ids=ids, text=text, messages=messages)


def difference(mine: Any, theirs: Any) -> str | None:
    """The first token in which two vocabularies differ, in words; None: in none."""
    own, other = mine.get_vocab(), theirs.get_vocab()
    if own == other:
        return None
    return next((f"token {i} is {token!r} to the student and {theirs.convert_ids_to_tokens(i)!r} to the teacher"
                 for token, i in sorted(own.items(), key=lambda item: item[1]) if other.get(token) != i),
                f"{len(own):,} tokens and {len(other):,}")  # fmt: skip


def expect_translatable(config: LanguageConfig, differs: str, answers: bool) -> None:
    """Refuse what needs the student's own tokens. answers: every row is one answer to a prompt."""
    recipe, whose = config.recipe, f"teacher={config.teacher} has another vocabulary ({differs})"
    if recipe.teacher_over == "top_k":
        raise ConfigError(
            f'{whose}: recipe "{recipe.name}" compares distributions over tokens (teacher_over=top_k), and these have '
            "none in common; take recipe opd, which compares the text that was sampled, or a teacher of the same family"
        )
    if not answers:
        raise ConfigError(
            f"{whose}, and is aligned by the text of one answer; leave out tools, environment and rollout_func, or "
            "take a teacher of the same family, with the same tokenizer"
        )
    warn(f"{whose}: what it says is aligned with the student's tokens by the text that both write")


def chat_of(config: LanguageConfig, tokenizer: Any) -> Chat:
    """How the teacher is asked: by its own template; bare where it has none, or the student's is left out."""
    bare = config.skip_apply_chat_template or not getattr(tokenizer, "chat_template", None)
    if bare and not config.skip_apply_chat_template:
        warn(f"teacher={config.teacher} has no chat template: it reads prompts as bare text")
    return Chat(tokenizer, skip=bare, kwargs=config.chat_template_kwargs)
