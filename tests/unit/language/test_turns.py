"""Conversations with tools and environments: who said what, what is learned of it, and what happens when it breaks."""

import json
import warnings

import pytest
import torch

from grpo.config import ConfigError
from grpo.language.config import LanguageConfig
from grpo.language.data.chat import Chat, prepare_tokenizer
from grpo.language.engines import Completion, Engine, Sampling
from grpo.language.engines.inline import InlineEngine
from grpo.language.samples import Prompt
from grpo.language.scoring.probe import make_scorer
from grpo.language.turns.conversation import Conversation, make_conversation
from grpo.language.turns.tools import LONGEST, Call, Toolbox, as_text, parse_calls
from tests.unit.language.tiny import TEMPLATE, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TOKENS = prepare_tokenizer(TOKENIZER)
EOS = TOKENIZER.eos_token_id
SPEAKS_OF_TOOLS = "{% for t in tools or [] %}{{ '<|tool|>' + t.function.name + '<eos>' }}{% endfor %}" + TEMPLATE


def encode(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def prompt(text="2*3?", chat=None, row=7, **columns):
    ids, text, messages = (chat or Chat(TOKENIZER)).render(text)
    return Prompt(row, ids, text, messages, columns)


def call(name="add", **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Scripted(Engine):
    """An engine that says what it is told to, turn after turn; a text with a stop text in it ends there."""

    name, exact, repeatable = "scripted", True, True

    def __init__(self, *turns):
        self.turns, self.asked, self.limits = list(turns), [], []

    def generate(self, prompts, count, sampling, seeds):
        assert len(seeds) == len(prompts) * count
        texts = self.turns[len(self.asked)]
        texts = [texts] * len(seeds) if isinstance(texts, str) else texts
        self.asked.append((prompts, count, seeds))
        self.limits.append(sampling.max_new_tokens)
        return [self._made(text, sampling, i) for i, text in enumerate(texts)]

    def _made(self, text, sampling, i):
        stopped = any(stop in text for stop in sampling.stop)
        ids = encode(text) if stopped else [*encode(text), EOS]
        reason = "length" if len(ids) > sampling.max_new_tokens else "stop" if stopped else "eos"
        ids = torch.tensor(ids[: sampling.max_new_tokens])
        return Completion(ids, torch.full((len(ids),), -0.5 - i), reason, 1.0)

    def refresh(self, version=0): ...
    def close(self): ...


class Here(Toolbox):
    """The same without processes."""

    def run(self, calls, seed="0"):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*cannot run in another process.*")
            return super().run(calls, seed)


def box(**how):
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one
            b: another
        """
        return a + b

    async def slow_echo(text: str) -> str:
        """Say it again.

        Args:
            text: what to say
        """
        return text * 1000

    return Here([add, slow_echo], **how)


def samples_of(player, engine, prompts, count, sampling, seeds):
    """The samples of all groups, in the order of their prompts."""
    groups = list(player(engine, prompts, count, sampling, seeds))
    assert [number for number, _ in groups] == list(range(len(prompts)))
    return [sample for _, group in groups for sample in group]


def talk(*turns, tools=None, count=1, chat=None, environment=None, max_turns=8, limit=500, **how):
    """What a conversation of these turns becomes, and the engine that was asked."""
    tools = tools or (None if environment else box())
    player = Conversation(
        chat or Chat(TOKENIZER), TOKENS, tools=tools, environment=environment, max_turns=max_turns, **how
    )
    engine = Scripted(*turns)
    made = samples_of(player, engine, [prompt(chat=chat)], count, Sampling(max_new_tokens=limit), list(range(count)))
    return made[0] if count == 1 else made, engine


# --- tools ----------------------------------------------------------------------------------------------------------


def test_a_tool_is_called_and_its_answer_is_heard_but_not_learned():
    sample, engine = talk(call(a=2, b=3), "5")
    said, heard, answer = encode(call(a=2, b=3)), encode("<eos><|tool|>5<eos><|assistant|>"), [*encode("5"), EOS]
    assert sample.ids.tolist() == said + heard + answer
    assert sample.made.tolist() == [True] * len(said) + [False] * len(heard) + [True] * len(answer)
    assert sample.logp.tolist() == [-0.5] * len(said) + [0.0] * len(heard) + [-0.5] * len(answer)
    assert (sample.text, sample.stop, sample.calls, sample.failed_calls, sample.error) == ("5", "eos", 1, 0, None)
    assert [message["role"] for message in sample.messages] == ["assistant", "tool", "assistant"]
    assert sample.messages[1] == {"role": "tool", "name": "add", "content": "5"}
    assert engine.asked[1][0] == [[*sample.prompt.ids, *said, *heard]]


def test_an_answer_without_a_call_is_the_end():
    sample, engine = talk("6")
    assert (sample.text, sample.calls, len(engine.asked)) == ("6", 0, 1)
    assert bool(sample.made.all())


def test_what_was_said_is_never_tokenised_again():
    """Special tokens are not in the text that tools see; the ids that are learned from keep them."""
    odd = "<|system|>x<|user|>"
    sample, engine = talk(odd + call(a=1, b=1), "2")
    said = encode(odd + call(a=1, b=1))
    assert sample.messages[0]["content"] == "x" + call(a=1, b=1)
    assert sample.ids[: len(said)].tolist() == said
    assert engine.asked[1][0][0][len(sample.prompt.ids) :][: len(said)] == said


def test_an_end_that_was_sampled_is_not_repeated():
    sample, _ = talk(call(a=2, b=3).removesuffix("</tool_call>"), "5")
    assert TOKENIZER.decode(sample.ids).count("<eos><|tool|>5<eos>") == 1
    assert "<eos><eos>" not in TOKENIZER.decode(sample.ids)
    assert sample.made[: len(encode(call(a=2, b=3).removesuffix("</tool_call>"))) + 1].all()


@pytest.mark.parametrize(
    "said, told",
    [
        ("<tool_call>{nonsense</tool_call>", "not valid JSON"),
        ("<tool_call>[1]</tool_call>", "a call is"),
        ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', "arguments must be an object"),
        (call("subtract", a=1), "there is no tool 'subtract'; there are: add, slow_echo"),
        (call(a=1), "missing 1 required positional argument: 'b'"),
        (call(a=1, b="x"), "TypeError: unsupported operand"),
    ],
)
def test_a_call_that_cannot_be_made_is_told_to_the_model_and_counted(said, told):
    sample, _ = talk(said, "sorry")
    assert told in sample.messages[1]["content"]
    assert sample.messages[1]["content"].startswith("error: ")
    assert (sample.calls, sample.failed_calls, sample.error, sample.text) == (1, 1, None, "sorry")


def test_several_calls_of_a_completion_are_answered_in_their_order():
    sample, _ = talk(call(a=1, b=1) + call("nobody") + call(a=2, b=2), "done")
    assert [m["content"][:5] for m in sample.messages[1:4]] == ["2", "error", "4"]
    assert (sample.calls, sample.failed_calls) == (3, 1)


def test_a_coroutine_is_awaited_and_a_long_answer_is_cut():
    sample, _ = talk(call("slow_echo", text="12345"), "ok", limit=5000)
    assert sample.messages[1]["content"] == "12345" * (LONGEST // 5) + "… (5000 characters)"


@pytest.mark.parametrize(
    "value, told",
    [
        ({"type": "weather", "degrees": 3}, "{'type': 'weather', 'degrees': 3}"),
        ([{"type": "pdf", "title": "a"}], "[{'type': 'pdf', 'title': 'a'}]"),
        ([{"type": "text", "title": "a"}], "[{'type': 'text', 'title': 'a'}]"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([], "[]"),
    ],
    ids=str,
)
def test_data_of_a_tool_may_have_a_type_of_its_own(value, told):
    assert as_text(value) == told


def test_an_image_of_an_awaited_tool_is_refused_too():
    async def look() -> list:
        """Look."""
        return [{"type": "image", "image": None}]

    tools = Toolbox([look])
    with pytest.raises(ConfigError, match=r"tool look: it answered with an image; .* show images in the row's"):
        talk('<tool_call>{"name": "look", "arguments": {}}</tool_call>', "done", tools=tools)
    tools.close()


def test_conversations_are_played_side_by_side_and_only_the_live_ones_go_on():
    texts = [call(a=1, b=1), "6", call(a=2, b=2)]
    samples, engine = talk(texts, ["2", "4"], count=3)
    assert [sample.text for sample in samples] == ["2", "6", "4"]
    assert [(len(prompts), count) for prompts, count, _ in engine.asked] == [(1, 3), (2, 1)]
    first, second = engine.asked[0][2], engine.asked[1][2]
    assert first == [0, 1, 2] and not set(second) & set(first) and len(set(second)) == 2


def test_a_call_in_the_last_turn_is_refused():
    sample, engine = talk(call(a=1, b=1), call(a=2, b=2), max_turns=2)
    assert (sample.calls, sample.failed_calls, len(engine.asked)) == (2, 1, 2)
    assert sample.messages[-1]["role"] == "assistant" and bool(sample.made[-1])


def test_all_turns_together_are_limited():
    said = call(a=1, b=1)
    after = len(encode(said)) + len(encode("<eos><|tool|>2<eos><|assistant|>"))
    sample, engine = talk(said, "123456", limit=after + 3)
    assert (sample.stop, sample.text, sample.length) == ("length", "123", after + 3)
    assert engine.limits == [after + 3, 3]
    sample, engine = talk(said, "123456", limit=after)  # no room to reply: the answer is left out
    assert (sample.stop, sample.length, len(engine.asked)) == ("length", len(encode(said)), 1)
    assert bool(sample.made.all()) and len(sample.messages) == 1
    sample, _ = talk(said, limit=len(encode(said)) - 1)
    assert (sample.stop, sample.calls) == ("length", 0)


def test_one_with_less_room_is_cut_as_if_that_had_been_the_limit():
    long, short = call(a=1, b=1), call("add", a=1, b=1)[:-12]
    after = len(encode(long)) + len(encode("<eos><|tool|>2<eos><|assistant|>"))
    samples, engine = talk([long, short], ["9876543210", "9876543210"], count=2, limit=after + 3)
    assert engine.limits[1] > 3
    assert (samples[0].text, samples[0].stop, samples[0].length) == ("987", "length", after + 3)
    assert samples[1].length <= after + 3 and samples[1].text.startswith("987654")


def test_the_context_of_the_model_shortens_and_does_not_crash():
    said = call(a=1, b=1)
    limit = len(prompt().ids) + len(encode(said)) + 5
    sample, _ = talk(said, "5", max_tokens=limit)
    assert (sample.stop, sample.text, sample.error) == ("length", said, None)
    engine = Scripted(said, "5")
    engine.context = limit
    player = Conversation(Chat(TOKENIZER), TOKENS, tools=box())
    [sample] = samples_of(player, engine, [prompt()], 1, Sampling(), [0])
    assert (sample.stop, len(engine.asked)) == ("length", 1)


def test_another_format_is_a_function():
    def parse(text):
        return [Call("add", {"a": 40, "b": 2})] if "ADD!" in text else []

    sample, _ = talk("ADD!", "42", tools=box(parse=parse, stop=["!"]))
    assert (sample.messages[1]["content"], sample.stop) == ("42", "eos")


def test_calls_are_read_also_when_the_end_mark_is_missing_or_lines_are_broken():
    assert parse_calls('so <tool_call>\n{"name": "f",\n "arguments": {"x": 1}}\n') == [Call("f", {"x": 1})]
    assert parse_calls('<tool_call>{"name": "f"}</tool_call>') == [Call("f", {})]
    assert parse_calls("no call") == []
    assert parse_calls("<tool_call>" + "[" * 100_000)[0].problem is not None


def test_a_tool_that_hangs_or_dies_costs_one_call(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import os, time\n"
        "def hang(x: int) -> int:\n    '''Never.\n\n    Args:\n        x: any\n    '''\n    time.sleep(600)\n"
        "def die(x: int) -> int:\n    '''Ends.\n\n    Args:\n        x: any\n    '''\n    os._exit(3)\n"
        "def fine(x: int) -> int:\n    '''One more.\n\n    Args:\n        x: any\n    '''\n    return x + 1\n"
    )
    names = [f"{file}:{name}" for name in ("hang", "die", "fine")]
    player = make_conversation(LanguageConfig(), Chat(TOKENIZER), TOKENS, names, None)
    tools = player.tools
    tools._timeout, tools._workers = 3.0, 1
    answers = tools.run([Call("hang", {"x": 1}), Call("die", {"x": 1}), Call("fine", {"x": 1})])
    player.close()
    assert [answer.ok for answer in answers] == [False, False, True]
    assert "no answer in 3 s, killed" in answers[0].text and "died" in answers[1].text and answers[2].text == "2"


# --- an environment -------------------------------------------------------------------------------------------------


class Guess:
    """Higher, lower, right."""

    def reset(self, row):
        self.secret, self.tries = int(row["answer"]), 0

    def step(self, completion):
        self.tries += 1
        if int(completion) == self.secret:
            return None, 1.0, True
        return [{"role": "user", "content": "no"}], -0.25, False


class Greets(Guess):
    def reset(self, row):
        super().reset(row)
        return [{"role": "assistant", "content": "ready"}, {"role": "user", "content": "go"}]


def play(environment, *turns, answers=("3",), count=1, limit=500, max_turns=8, **how):
    player = Conversation(Chat(TOKENIZER), TOKENS, environment=environment, max_turns=max_turns, **how)
    engine = Scripted(*turns)
    prompts = [prompt(row=row, answer=answer) for row, answer in enumerate(answers)]
    seeds = list(range(len(prompts) * count))
    return samples_of(player, engine, prompts, count, Sampling(max_new_tokens=limit), seeds), engine


def test_an_environment_answers_until_it_is_done_and_its_rewards_add_up():
    [sample], _ = play(Guess, "1", "2", "3")
    assert TOKENIZER.decode(sample.ids) == "1<eos><|user|>no<eos><|assistant|>2<eos><|user|>no<eos><|assistant|>3<eos>"
    assert TOKENIZER.decode(sample.ids[sample.made]) == "1<eos>2<eos>3<eos>"
    assert (sample.reward, sample.text, sample.stop, sample.calls) == (0.5, "3", "eos", 0)


def test_every_conversation_has_an_environment_of_its_own():
    samples, engine = play(Guess, ["3", "1", "3", "4"], ["3", "5"], ["4"], answers=("3", "4"), count=2)
    assert [sample.reward for sample in samples] == [1.0, 0.75, 0.5, 1.0]
    assert [(len(prompts), count) for prompts, count, _ in engine.asked] == [(2, 2), (2, 1), (1, 1)]


def test_what_an_environment_says_first_belongs_to_the_prompt():
    [sample], engine = play(Greets, "3")
    assert sample.prompt.text == "<|user|>2*3?<eos><|assistant|>ready<eos><|user|>go<eos><|assistant|>"
    assert engine.asked[0][0] == [encode(sample.prompt.text)] == [sample.prompt.ids]
    assert sample.prompt.messages[1:] == [
        {"role": "assistant", "content": "ready"},
        {"role": "user", "content": "go"},
    ]
    assert TOKENIZER.decode(sample.ids) == "3<eos>"


def test_turns_and_length_end_it_too_and_a_cut_answer_is_judged():
    [sample], engine = play(Guess, "1", "2", "3", max_turns=2)
    assert (sample.reward, len(engine.asked)) == (-0.5, 2)
    [sample], _ = play(Guess, "123", limit=2)
    assert (sample.reward, sample.stop) == (-0.25, "length")


def test_an_environment_that_never_says_gives_no_reward():
    class Silent(Guess):
        def step(self, completion):
            return None, None, True

    [sample], _ = play(Silent, "1")
    assert sample.reward is None and sample.error is None


def breaking(method, problem):
    def broken(self, *_):
        if isinstance(problem, BaseException):
            raise problem
        return problem

    return type("Breaks", (Guess,), {method: broken})


@pytest.mark.parametrize(
    "method, problem, told",
    [
        ("__init__", OSError("no disk"), "Breaks.reset, row 0: OSError: no disk"),
        ("reset", KeyError("size"), "Breaks.reset, row 0: KeyError: 'size'"),
        ("reset", [{"content": "?"}], "Breaks.reset, row 0: ValueError: a message is"),
        ("step", SystemExit(3), "Breaks.step, row 0: SystemExit: 3"),
        ("step", (None, 1.0), "Breaks.step, row 0: ValueError: not enough values"),
        ("step", (None, float("nan"), True), "Breaks.step, row 0: ValueError: the reward is nan"),
        ("step", (None, 1e39, True), "Breaks.step, row 0: ValueError: the reward is 1e+39"),
        ("step", (None, 1.0, False), "Breaks.step, row 0: ValueError: it is not done"),
        ("step", ("hm", "many", False), "Breaks.step, row 0: TypeError"),
        ("close", RuntimeError("still busy"), "Breaks.close, row 0: RuntimeError: still busy"),
    ],
)
def test_an_environment_that_breaks_ends_its_conversation_and_says_why(method, problem, told):
    [sample], _ = play(breaking(method, problem), "3")
    assert sample.error.startswith(told)
    assert "\n" not in sample.error
    assert sample.ids.dtype == torch.int64 and sample.made.dtype == torch.bool


def test_others_go_on_when_one_breaks():
    samples, _ = play(Guess, ["x", "2"], ["3"], answers=("3", "3"))
    assert samples[0].error == "Guess.step, row 0: ValueError: invalid literal for int() with base 10: 'x'"
    assert (samples[1].error, samples[1].reward) == (None, 0.75)


def test_a_beginning_that_fills_the_context_is_that_rows_failure():
    [sample], engine = play(Greets, "3", max_tokens=10)
    assert "leave no room in a context of 10" in sample.error and not engine.asked and sample.length == 0


# --- what is learned ------------------------------------------------------------------------------------------------


class Chatty:
    """Says something of another length in every turn, three times."""

    def reset(self, row):
        self.turn = 0

    def step(self, completion):
        self.turn += 1
        return [{"role": "user", "content": "more" * self.turn}], 1.0, self.turn == 3


@pytest.fixture(scope="module")
def played():
    model = tiny_model()
    engine = InlineEngine(model, TOKENS)
    player = Conversation(Chat(TOKENIZER), TOKENS, environment=Chatty, max_turns=8)
    prompts = [prompt("one", row=0), prompt("another one", row=1)]
    sampling = Sampling(max_new_tokens=120, temperature=0.7)

    def again(rows):
        seeds = [seed for row in rows for seed in (10 * row, 10 * row + 1)]
        return samples_of(player, engine, [prompts[row] for row in rows], 2, sampling, seeds)

    return model, again


def test_log_probs_recorded_in_all_turns_are_those_of_the_scoring_pass(played):
    model, again = played
    samples = again([0, 1])
    steps = max(sample.length for sample in samples)
    assert any(len(sample.messages) > 2 for sample in samples)
    for packing in ("padded", "packed"):
        scored_NT = make_scorer(model, 0.7, packing).in_parts(samples, steps).logp_NT
        for sample, scored_T in zip(samples, scored_NT, strict=True):
            torch.testing.assert_close(scored_T[: sample.length], sample.logp, atol=1e-4, rtol=0)
            assert not sample.logp[~sample.made].any() and sample.logp[sample.made].all()


def test_a_conversation_depends_on_its_own_seed_alone(played):
    _, again = played
    together, alone = again([0, 1]), again([1])
    for one, other in zip(together[2:], alone, strict=True):
        assert one.ids.tolist() == other.ids.tolist() and one.messages == other.messages
    assert together[0].ids.tolist() != together[1].ids.tolist()


def test_the_models_own_context_is_the_limit(played):
    model = tiny_model(max_position_embeddings=40)
    player = Conversation(Chat(TOKENIZER), TOKENS, environment=Chatty, max_turns=8)
    engine = InlineEngine(model, TOKENS)
    made = samples_of(player, engine, [prompt("one")], 8, Sampling(max_new_tokens=120), list(range(8)))
    assert max(len(sample.prompt.ids) + sample.length for sample in made) <= 40
    assert {sample.stop for sample in made} >= {"length"} and all(sample.error is None for sample in made)


# --- how one is made ------------------------------------------------------------------------------------------------


def made(chat=None, tools=None, environment=None, **settings):
    return make_conversation(LanguageConfig(**settings), chat or Chat(TOKENIZER), TOKENS, tools, environment)


def test_a_template_that_speaks_of_tools_is_told_of_them():
    chat = Chat(tiny_tokenizer(SPEAKS_OF_TOOLS))
    made(chat, tools=box())
    assert chat.render("hi")[1] == "<|tool|>add<eos><|tool|>slow_echo<eos><|user|>hi<eos><|assistant|>"
    assert chat.system_prompt is None


def test_else_the_system_message_describes_them():
    chat = Chat(TOKENIZER, system_prompt="Be brief.")
    made(chat, tools=box())
    lines = chat.render("hi")[2][0]["content"].splitlines()
    assert lines[:3] == ["Be brief.", "", "You can call these functions:"]
    assert json.loads(lines[3])["parameters"]["required"] == ["a", "b"]
    assert lines[5].startswith("To call one, write <tool_call>")


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_remedy():
    forgetful = TEMPLATE.replace("m['content']", "(m['content'] if loop.last else '')")
    with pytest.raises(ConfigError, match=r"differently once a user message follows.*set tokenizer.chat_template"):
        made(Chat(tiny_tokenizer(forgetful)), environment=Guess)
    deaf = "{% for m in messages if m.role != 'tool' %}" + TEMPLATE.split("%}", 1)[1]
    with pytest.raises(ConfigError, match="leaves out tool messages"):
        made(Chat(tiny_tokenizer(deaf)), tools=box())


def test_files_and_modules_are_named(tmp_path):
    file = tmp_path / "game.py"
    file.write_text(
        "class Game:\n    def reset(self, row): ...\n    def step(self, said): return None, len(said), True\n"
    )
    player = made(environment=f"{file}:Game")
    [sample] = samples_of(player, Scripted("four"), [prompt()], 1, Sampling(), [0])
    assert sample.reward == 4.0
    assert made(tools=["tests.unit.language.test_turns:documented"]).tools.names == ["documented"]


def documented(x: int) -> int:
    """One more.

    Args:
        x: a number
    """
    return x + 1


@pytest.mark.parametrize(
    "given, told",
    [
        ({"tools": ["nowhere.py:f"]}, "nowhere.py"),
        ({"tools": ["calculator"]}, "tool 'calculator': write file.py:NAME or module:NAME"),
        ({"tools": [lambda x: x]}, "tool <lambda>: .*type hints and a docstring"),
        ({"tools": [documented, documented]}, "same name"),
        ({"environment": Guess()}, "environment is a Guess object; give the class"),
        ({"environment": "json:nothing"}, "json has no function 'nothing'"),
        ({"tools": [documented], "environment": Guess}, "one of them"),
        ({}, "needs tools or an environment"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(given, told):
    with pytest.raises(ConfigError, match=told) as found:
        made(**given)
    assert "\n" not in str(found.value)
