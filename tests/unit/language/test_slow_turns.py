"""Environments and tools that take their time: asked together, and what comes of it does not depend on who is first."""

import asyncio
import os

import pytest

from grpo.config import ConfigError
from grpo.language.config import LanguageConfig
from grpo.language.data.chat import Chat
from grpo.language.engines import Sampling
from grpo.language.engines.inline import InlineEngine
from grpo.language.turns import hosts
from grpo.language.turns.conversation import Conversation, make_conversation
from grpo.language.turns.tools import Call, Toolbox
from tests.unit.language import slow_envs
from tests.unit.language.slow_envs import DELAYS, LET_GO, LIVE, Echo, Gate, Trouble
from tests.unit.language.test_turns import TOKENIZER, TOKENS, Scripted, call, prompt, samples_of
from tests.unit.language.tiny import tiny_model

SAID = "a"


class Anyone(Scripted):
    """Says the same to everybody, in batches of any size."""

    def generate(self, prompts, count, sampling, seeds):
        self.asked.append((prompts, count, seeds))
        return [self._made(SAID, sampling, 0) for _ in seeds]


def play(environment, answers=("x",), count=1, repeatable=True, **how):
    player = Conversation(Chat(TOKENIZER), TOKENS, environment=environment, **how)
    engine = Anyone()
    engine.repeatable = repeatable
    prompts = [prompt(row=row, answer=answer) for row, answer in enumerate(answers)]
    seeds = list(range(len(prompts) * count))
    try:
        return samples_of(player, engine, prompts, count, Sampling(max_new_tokens=500), seeds), engine
    finally:
        player.close()


@pytest.mark.parametrize("repeatable", [True, False])
def test_all_conversations_are_asked_at_once(repeatable):
    LIVE.update(now=0)
    samples, engine = play(Gate, ["x"] * 4, count=4, repeatable=repeatable)
    assert [sample.reward for sample in samples] == [3.0] * 16 and all(len(s.messages) == 5 for s in samples)
    if repeatable:  # the conversations of a prompt, and nobody else, are sampled together
        assert {tuple(seeds) for _, _, seeds in engine.asked[:4]} == {tuple(range(4 * i, 4 * i + 4)) for i in range(4)}


def test_what_comes_of_it_does_not_depend_on_who_answers_first():
    engine = InlineEngine(tiny_model(), TOKENS)
    prompts = [prompt("one", row=0, answer="a"), prompt("another", row=1, answer="b"), prompt("3", row=2, answer="c")]
    found = []
    for delays in ({"a": 0.0, "b": 0.02, "c": 0.04}, {"a": 0.04, "b": 0.02, "c": 0.0}):
        DELAYS.clear()
        DELAYS.update(delays)
        player = Conversation(Chat(TOKENIZER), TOKENS, environment=Echo)
        made = samples_of(player, engine, prompts, 2, Sampling(max_new_tokens=100, temperature=0.7), list(range(6)))
        found.append([(sample.ids.tolist(), sample.logp.numpy().tobytes(), sample.messages) for sample in made])
        player.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("texts, kept", [(("one", "another", "3"), 60_000), (("one", "one", "one"), 2**30)], ids=str)
def test_nor_does_what_is_kept_of_it(texts, kept):
    """Whose keys and values are let go of, and who finds those of the same words, would else be a matter of time."""
    engine, found = InlineEngine(tiny_model(), TOKENS, kept_bytes=kept), []
    prompts = [prompt(text, row=row, answer="abc"[row]) for row, text in enumerate(texts)]
    sampling = Sampling(max_new_tokens=60, temperature=0.7 * (kept < 2**30), stop=("a", "3", "7", "x", "e", "o"))
    for delays in ({"a": 0.0, "b": 0.02, "c": 0.04}, {"a": 0.04, "b": 0.02, "c": 0.0}):
        DELAYS.clear()
        DELAYS.update(delays)
        player = Conversation(Chat(TOKENIZER), TOKENS, environment=Echo)
        made = samples_of(player, engine, prompts, 2, sampling, list(range(6)))
        found.append([(sample.ids.tolist(), sample.logp.numpy().tobytes()) for sample in made])
        player.close()
        assert engine.metrics()["engine/prompt_kept"] > 0
    assert found[0] == found[1]


def test_one_that_hangs_or_raises_ends_its_own_conversation_in_its_time():
    samples, _ = play(Trouble, ["x", "hangs", "raises"], count=2, timeout=3)
    assert [sample.error for sample in samples[:2]] == [None, None] and samples[0].reward == 3.0
    assert all("Trouble.step, row 1: no answer in 3 s" in sample.error for sample in samples[2:4])
    assert all("Trouble.step, row 2: ValueError: no" in sample.error for sample in samples[4:])


def test_one_that_holds_the_loop_is_given_up_with_it(monkeypatch):
    monkeypatch.setattr(hosts, "GRACE", 0.1)
    LET_GO.clear()
    try:
        samples, _ = play(Trouble, ["holds"], timeout=1.0)
    finally:
        LET_GO.set()
    assert "held up the event loop" in samples[0].error
    player = Conversation(Chat(TOKENIZER), TOKENS, environment=lambda: Trouble())  # found out by making one
    assert samples_of(player, Anyone(), [prompt(answer="x")], 1, Sampling(), [0])[0].reward == 3.0


def test_tools_that_are_awaited_are_called_together_and_each_in_its_time():
    LIVE.update(now=0)

    async def fetch(what: str) -> str:
        """Fetch it.

        Args:
            what: its name
        """
        LIVE["now"] += 1
        while LIVE["now"] < 3 or what == "slow":
            await asyncio.sleep(0.005)
        return what.upper()

    engine = Scripted([call("fetch", what=what) for what in ("a", "slow", "b")], "done")
    player = Conversation(Chat(TOKENIZER), TOKENS, tools=Toolbox([fetch], timeout=3))
    made = samples_of(player, engine, [prompt()], 3, Sampling(max_new_tokens=500), [0, 1, 2])
    assert [sample.messages[1]["content"] for sample in made] == ["A", "error: fetch: no answer in 3 s", "B"]
    assert [sample.failed_calls for sample in made] == [0, 1, 0]
    player.close()


def test_plain_tools_beside_awaited_ones_stay_in_processes_of_their_own():
    assert Toolbox([slow_envs.loud]).waits
    box = Toolbox([slow_envs.where, slow_envs.loud], workers=1)
    there, loud = box.run([Call("where", {}), Call("loud", {"what": "a"})])
    assert not box.waits and there.ok and there.text != str(os.getpid()) and loud.text == "A"
    box.close()


def test_an_environment_that_was_lost_is_played_again_and_must_answer_as_before():
    async def asked():
        room = hosts.Room(Echo, 60.0)
        first = await room.answer(hosts.Question(0, {"answer": "x"}))
        one = await room.answer(hosts.Question(0, {"answer": "x"}, ("a",), (hosts.digest(first.value),)))
        heard = (hosts.digest(first.value), hosts.digest(one.value))
        two = await room.answer(hosts.Question(0, {"answer": "x"}, ("a", "b"), heard))
        elsewhere = hosts.Room(Echo, 60.0)
        again = await elsewhere.answer(hosts.Question(0, {"answer": "x"}, ("a", "b"), heard))
        other = await hosts.Room(Echo, 60.0).answer(hosts.Question(0, {"answer": "x"}, ("a", "b"), (heard[0], "other")))
        return two, again, other

    two, again, other = asyncio.run(asked())
    assert two == again and two.value[0][0]["content"] == "moremore"
    assert "played again, it answered otherwise" in other.problem


def test_settings_that_do_nothing_are_refused():
    config = LanguageConfig(environment=f"{slow_envs.__name__}:Echo", turn_timeout=3)
    player = make_conversation(config, Chat(TOKENIZER), TOKENS, environment=config.environment)
    assert player._timeout == 3 and player._host is None
    with pytest.raises(ConfigError, match="workers"):
        LanguageConfig(workers="rya")
