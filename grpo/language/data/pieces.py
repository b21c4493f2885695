"""Token ids as the bytes that they stand for, one by one: a token alone may be no text, only a part of a character."""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from grpo.errors import ConfigError

SPACE = "\u2581"
"""What SentencePiece writes for a space."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""How it writes a byte that is in no token."""
UNKNOWN = "\ufffd".encode()
NOTHING = b"\xff"
"""No text has this byte."""


class Pieces:
    """The bytes of a tokenizer's tokens, wherever in a text they stand."""

    def __init__(self, tokenizer: Any, whose: str, named: bool = True) -> None:
        """whose: for the error, where it cannot be told. named: control tokens are read by their names."""
        self._tokenizer, self._named, self._found = tokenizer, named, dict[int, bytes | None]()
        self._added = dict(tokenizer.added_tokens_decoder)
        self._read = _reader(tokenizer, whose)

    def __call__(self, ids: Iterable[int]) -> list[bytes | None]:
        """Of each token; None: it is none, or stands for no text that is known."""
        return [self._of(i) for i in ids]

    def _of(self, i: int) -> bytes | None:
        if i not in self._found:
            self._found[i] = self._make(i)
        return self._found[i]

    def _make(self, i: int) -> bytes | None:
        if i == self._tokenizer.unk_token_id:
            return None
        if i in self._added:
            return str(self._added[i]).encode() if self._named or not self._added[i].special else None
        token = self._tokenizer.convert_ids_to_tokens(i) if 0 <= i < len(self._tokenizer) else None
        return None if token is None else self._read(token)


def spelled(pieces: Sequence[bytes | None]) -> list[bytes]:
    """Bytes that are text: where they are none, or not known, one U+FFFD is in their place."""
    known = [NOTHING if piece is None else piece for piece in pieces]
    raw, at = b"".join(known), 0
    each = [raw[i : i + 1] for i in range(len(raw))]
    while at < len(raw):
        try:
            raw[at:].decode()
            break
        except UnicodeDecodeError as error:
            each[at + error.start : at + error.end] = [UNKNOWN, *[b""] * (error.end - error.start - 1)]
            at += error.end
    ends = [0, *accumulate(map(len, known))]
    return [b"".join(each[a:b]) for a, b in pairwise(ends)]


def whole(pieces: Sequence[bytes | None]) -> int:
    """Tokens up to the last that does not end within a character."""
    for count in range(len(pieces), 0, -1):
        decoder = getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(NOTHING if piece is None else piece for piece in pieces[max(count - 4, 0) : count]))
        if not decoder.getstate()[0]:
            return count
    return 0


def _reader(tokenizer: Any, whose: str) -> Callable[[str], bytes]:
    """How a token of the vocabulary is spelled: as its decoder says."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    told = {} if backend is None or backend.decoder is None else json.loads(backend.decoder.__getstate__())
    parts = told.get("decoders", [told])
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return _of_alphabet
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and kinds & {"Fuse", "Metaspace"}:
        return _of_text if kinds == {"Fuse"} else _of_sentencepiece
    known = ", ".join(sorted(map(str, kinds))) if told else "none"
    raise ConfigError(
        f"{whose} tokenizer does not say which bytes its tokens are (decoder: {known}); where teacher and student have "
        "other tokens both must be fast tokenizers of bytes or SentencePiece; take a teacher of the same family"
    )


def _of_text(token: str) -> bytes:
    return token.encode()


def _of_sentencepiece(token: str) -> bytes:
    if found := BYTE.fullmatch(token):
        return bytes([int(found[1], 16)])
    return token.replace(SPACE, " ").encode()


def _of_alphabet(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[letter] for letter in token)
    except KeyError:  # added to the vocabulary as it stands
        return token.encode()


def _alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: those that can be printed for themselves, the others from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_ALPHABET = _alphabet()
