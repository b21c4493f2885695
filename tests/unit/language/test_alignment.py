"""Log-probs of a text at the boundaries of other tokens, and the bytes of single tokens."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from grpo.config import ConfigError
from grpo.language.data.chat import Chat
from grpo.language.data.pieces import Pieces, spelled, whole
from grpo.language.model.alignment import said_of
from tests.unit.language.tiny import tiny_tokenizer
from tests.unit.language.tokenizers_of_kinds import TEXTS, of_bytes, of_pairs, of_sentencepiece


def told(mine, theirs, chances, others=None):
    """Probabilities, in and out; others: by place."""
    logs = [{token: math.log(p) for token, p in (others or {}).get(place, {}).items()} for place in range(len(theirs))]
    return [round(math.exp(x), 6) for x in said_of(mine, theirs, [math.log(p) for p in chances], logs)]


def test_by_hand():
    assert told([b"a", b"b"], [b"a", b"b"], [0.5, 0.25]) == [0.5, 0.25]  # the same tokens
    assert told([b"ab", b"c"], [b"a", b"bc"], [0.5, 0.25]) == [0.125, 1.0]  # c is what bc goes on with
    assert told([b"ab", b"c"], [b"a", b"bc"], [0.5, 0.25], {1: {b"bd": 0.25}}) == [0.25, 0.5]
    assert told([b"4", b"G"], [b"4", b"G"], [0.001, 0.5], {0: {b"49": 0.9}}) == [0.901, round(0.0005 / 0.901, 6)]
    assert told([b"a", b"b", b"c"], [b"ab", b"c"], [0.5, 0.5], {0: {b"abd": 0.25, b"x": 0.1}}) == [
        0.75,
        1.0,
        round(1 / 3, 6),
    ]
    assert told([b"a", b"b"], [b"ab"], [0.5], {0: {b"a": 0.25}}) == [0.5, 1.0]  # another way to cut the same text
    smile = "🙂".encode()
    assert told([smile[:2], smile[2:]], [smile[:1], smile[1:]], [0.5, 0.5], {1: {smile[1:2] + b"x": 0.5}}) == [0.5, 0.5]
    assert said_of([], [], [], []) == []


def test_what_differs_is_paid_by_the_token_that_leaves():
    found = said_of([b"a", b"b", b"c"], [b"a", b"x", b"c"], [-1.0, -2.0, -4.0], [{}] * 3)
    assert found[:2] == [-1.0, -6.0] and math.isnan(found[2])
    assert said_of([b"abc"], [b"abd"], [-3.0], [{}]) == [-3.0]


def test_a_teacher_of_pairs_is_one_of_characters():
    """Conditional probabilities of single characters, of every text of two, summed by hand."""
    rng = np.random.default_rng(1)
    joint = rng.dirichlet(np.ones(9)).reshape(3, 3)
    logs = {bytes([97 + a, 97 + b]): math.log(joint[a, b]) for a in range(3) for b in range(3)}
    for pair, logp in logs.items():
        a, b = (byte - 97 for byte in pair)
        want = [math.log(joint[a].sum()), math.log(joint[a, b] / joint[a].sum())]
        assert said_of([pair[:1], pair[1:]], [pair], [logp], [logs]) == pytest.approx(want)


@st.composite
def two_ways(draw):
    text = draw(st.text(min_size=1, max_size=12)).encode()
    cuts = st.sets(st.integers(1, max(len(text) - 1, 1)))

    def cut():
        ends = sorted({0, len(text), *(end for end in draw(cuts) if end < len(text))})
        return [text[a:b] for a, b in pairwise(ends)]

    return cut(), cut()


@settings(max_examples=100, deadline=None)
@given(two_ways(), st.data())
def test_of_equal_texts_all_that_is_said_is_shared_out(ways, data):
    """Whatever else might have stood there, tokens add up to what the text costs the teacher, and none is a gain."""
    mine, theirs = ways
    odds = st.floats(0.05, 1)
    weights = [
        (data.draw(odds), data.draw(st.dictionaries(st.binary(min_size=1, max_size=4), odds, max_size=4)))
        for _ in theirs
    ]
    totals = [own + sum(others.values()) for own, others in weights]
    logp = [math.log(own / total) for (own, _), total in zip(weights, totals, strict=True)]
    others = [{token: math.log(p / total) for token, p in rest.items() if token != own}
              for (_, rest), total, own in zip(weights, totals, theirs, strict=True)]  # fmt: skip
    found = said_of(mine, theirs, logp, others)
    assert len(found) == len(mine) and all(x <= 0 for x in found)
    ways_on = sum(math.exp(x) for x in (sum(logp), *_beyond(theirs, logp, others)))
    assert sum(found) == pytest.approx(math.log(ways_on), abs=1e-9)


def _beyond(theirs, logp, others):
    """Of tokens that write the whole rest of the text and more."""
    for place in range(len(theirs)):
        rest = b"".join(theirs[place:])
        for other, chance in others[place].items():
            if len(other) > len(rest) and other.startswith(rest):
                yield sum(logp[:place]) + chance


KINDS = {"bytes": of_bytes(), "sentencepiece": of_sentencepiece(), "characters": tiny_tokenizer(), "pairs": of_pairs()}


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_the_text(kind):
    """Joined, the bytes of an answer's tokens are the answer, whatever the tokens."""
    tokenizer = KINDS[kind]
    chat, pieces = Chat(tokenizer), Pieces(tokenizer, "the")
    for text in TEXTS if kind in ("bytes", "sentencepiece") else TEXTS[:2]:
        ids = chat.said(text)
        known = spelled(pieces(ids))
        assert len(known) == len(ids) and b"".join(known) == text.encode()


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_characters="\ufdd0", exclude_categories=["Cs"]), max_size=20))
def test_any_text_is_aligned_between_kinds(text):
    sides = [spelled(Pieces(KINDS[kind], "the")(Chat(KINDS[kind]).said(text))) for kind in ("bytes", "sentencepiece")]
    assert b"".join(sides[0]) == b"".join(sides[1]) == text.encode()
    found = said_of(*sides, [-1.0] * len(sides[1]), [{}] * len(sides[1]))
    assert sum(found) == pytest.approx(-len(sides[1])) and len(found) == len(sides[0])


def test_what_is_no_text_is_one_sign_of_it():
    tokenizer = KINDS["bytes"]
    pieces = Pieces(tokenizer, "the")
    ids = tokenizer("ok 日", add_special_tokens=False)["input_ids"]
    start, tool = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<tool>"])
    assert pieces([start, tool, len(tokenizer) + 5]) == [b"<|im_start|>", b"<tool>", None]
    cut = pieces(ids[:-1])
    assert (
        b"".join(spelled(cut)).decode() == "ok \ufffd" and b"".join(spelled([*cut, None])).decode() == "ok \ufffd\ufffd"
    )
    smile = "🙂".encode()
    assert spelled([smile[:1], smile[1:2], b"a"]) == ["\ufffd".encode(), b"", b"a"]
    assert whole(cut) == 2 and whole(pieces(ids)) == len(ids)
    assert whole([smile[:1]]) == 0 and whole([b"a", smile[:2], smile[2:]]) == 3 and whole([b"a", None]) == 2


def test_a_tokenizer_that_does_not_say_its_bytes_is_refused():
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match=r"the student's tokenizer does not say which bytes .*\(decoder: WordPiece\)"):
        Pieces(PreTrainedTokenizerFast(tokenizer_object=made), "the student's")
