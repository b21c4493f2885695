"""Prompts through the chat template, several turns without tokenising again, and the tokens that end an answer."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from grpo.config import ConfigError
from grpo.language.data.chat import Chat, check_prefixes, prepare_tokenizer
from tests.unit.language.tiny import TEMPLATE, tiny_tokenizer

USER = {"role": "user", "content": "hi"}
THINKING_DROPPED = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{{ m['content'] if loop.last or '</think>' not in m['content'] else m['content'].split('</think>')[1] }}"
    "{{ '<eos>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def said(chat, ids):
    return chat.tokenizer.decode(ids)


def test_text_becomes_a_user_message_and_ids_are_those_of_the_text():
    ids, text, messages = Chat(tiny_tokenizer()).render("hi")
    assert text == "<|user|>hi<eos><|assistant|>"
    assert messages == [USER]
    assert ids == tiny_tokenizer().apply_chat_template([USER], add_generation_prompt=True)["input_ids"]


def test_skip_gives_the_bare_text_and_messages_line_by_line():
    chat = Chat(tiny_tokenizer(), skip=True)
    assert chat.render("hi")[1:] == ("hi", None)
    assert chat.render([{"role": "system", "content": "be brief"}, USER])[1:] == ("be brief\nhi", None)


def test_bare_text_gets_what_the_tokenizer_adds_by_itself_and_never_two_of_it():
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer(template=None)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    chat = Chat(tokenizer)
    assert chat.render("hi")[0] == chat.render("<bos>hi")[0]
    assert chat.render("hi")[0][0] == 1


def test_a_system_prompt_comes_first_unless_the_row_has_its_own():
    chat = Chat(tiny_tokenizer(), system_prompt="be brief")
    assert chat.render("hi")[1].startswith("<|system|>be brief<eos><|user|>hi")
    own = [{"role": "system", "content": "own"}, USER]
    with pytest.warns(UserWarning, match="system message of their own"):
        assert chat.render(own)[2] == own


def test_text_that_is_templated_already_is_left_as_it_is_with_one_notice():
    chat, text = Chat(tiny_tokenizer()), "<|user|>hi<eos><|assistant|>"
    with pytest.warns(UserWarning, match="left as they are"):
        ids, same, messages = chat.render(text)
    assert (ids, same, messages) == (chat.render("hi")[0], text, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chat.render(text)


def test_text_with_the_pad_token_or_html_in_it_is_still_a_question():
    assert Chat(tiny_tokenizer()).render("why <pad> and <s>?")[2] is not None


def test_an_assistant_message_at_the_end_is_gone_on_with():
    text = Chat(tiny_tokenizer()).render([USER, {"role": "assistant", "content": "The answer is"}])[1]
    assert text == "<|user|>hi<eos><|assistant|>The answer is"


def test_template_arguments_and_tools_reach_the_template():
    template = "{{ tools[0]['function']['name'] if tools }}{{ mood }}" + TEMPLATE

    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one
            b: other
        """
        return a + b

    assert (
        Chat(tiny_tokenizer(template), kwargs={"mood": "calm"}, tools=[add])
        .render("hi")[1]
        .startswith("addcalm<|user|>")
    )


def test_a_conversation_without_a_template_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"no chat template; set tokenizer\.chat_template.*skip_apply_chat_template"):
        Chat(tiny_tokenizer(template=None)).render([USER])


def test_what_the_template_refuses_is_told_in_one_line():
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    chat = Chat(tiny_tokenizer(template + TEMPLATE), system_prompt="be brief")
    with pytest.raises(ConfigError, match=r"\(system, user\): System role not supported"):
        chat.render("hi")


def test_a_template_that_loses_plain_text_is_refused():
    template = "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}<eos>"
    with pytest.raises(ConfigError, match="leaves out what the user says"):
        Chat(tiny_tokenizer(template))


# --- several turns ---


@pytest.mark.parametrize("role", ["user", "tool"])
def test_extending_gives_the_ids_of_the_whole_conversation(role):
    chat, new = Chat(tiny_tokenizer()), {"role": role, "content": "7"}
    before = chat.render([USER])[0]
    answer = chat.encode("3 + 4<eos>", bare=False)
    after = chat.extend(answer, [USER], [new])
    assert before + answer + after == chat.render([USER, {"role": "assistant", "content": "3 + 4"}, new])[0]


def test_an_answer_that_was_cut_off_gets_its_end_of_turn_and_a_sampled_one_is_not_repeated():
    chat, new = Chat(tiny_tokenizer()), [{"role": "user", "content": "go on"}]
    cut, whole = chat.encode("abc", bare=False), chat.encode("abc<eos>", bare=False)
    assert said(chat, chat.extend(cut, [USER], new)) == "<eos><|user|>go on<eos><|assistant|>"
    assert said(chat, chat.extend(torch.tensor(whole), [USER], new)) == "<|user|>go on<eos><|assistant|>"


def test_bare_text_is_extended_line_by_line():
    chat = Chat(tiny_tokenizer(), skip=True)
    assert said(chat, chat.extend([], [USER], [{"role": "user", "content": "higher"}])) == "\nhigher\n"


def test_prefixes_are_preserved_or_the_break_is_shown():
    assert check_prefixes(Chat(tiny_tokenizer())) is None
    assert check_prefixes(Chat(tiny_tokenizer(), skip=True)) is None
    broken = check_prefixes(Chat(tiny_tokenizer(THINKING_DROPPED)), "tool")
    assert "an answer differently once a tool message follows" in broken
    assert "'<think>" in broken


def test_what_is_written_around_the_last_answer_only_is_no_break():
    answer_last = "{{ '<think></think>' if loop.last and m['role'] == 'assistant' }}"
    template = TEMPLATE.replace("'|>' + m['content']", "'|>' }}" + answer_last + "{{ m['content']")
    assert check_prefixes(Chat(tiny_tokenizer(template))) is None


def test_a_header_that_is_not_part_of_the_later_conversation_is_a_break():
    template = TEMPLATE.replace("'<|assistant|>' }}{% endif", "'<|assistant|><think>' }}{% endif")
    assert "the assistant's header differently" in check_prefixes(Chat(tiny_tokenizer(template)))


def test_an_empty_thought_in_the_header_alone_is_no_break():
    """Qwen3 with enable_thinking: false begins an answer with one, and leaves it out once tools have answered."""
    template = TEMPLATE.replace("'<|assistant|>' }}{% endif", "'<|assistant|><think>\\n\\n</think>\\n\\n' }}{% endif")
    assert check_prefixes(Chat(tiny_tokenizer(template)), "tool") is None


def test_a_template_without_tool_messages_is_told():
    chosen = TEMPLATE.replace("in messages %}", "in messages if m['role'] != 'tool' %}")
    assert check_prefixes(Chat(tiny_tokenizer(chosen)), "tool") == "the chat template leaves out tool messages"
    refused = "{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}" + TEMPLATE
    assert "no tools here" in check_prefixes(Chat(tiny_tokenizer(refused)), "tool")


def test_a_token_that_closes_the_whole_conversation_is_no_break():
    template = TEMPLATE.replace("'<eos>' }}{% endfor %}", "'<|system|>' }}{% endfor %}")
    closed = template.replace("{% if add", "{% if not add_generation_prompt %}{{ '<eos>' }}{% endif %}{% if add")
    assert check_prefixes(Chat(tiny_tokenizer(closed))) is None


# --- tokens ---


def test_every_end_of_sequence_id_is_found():
    tokenizer = tiny_tokenizer(TEMPLATE.replace("<eos>", "<|tool|>"))
    found = prepare_tokenizer(tokenizer, SimpleNamespace(eos_token_id=5), SimpleNamespace(eos_token_id=[2, 7]))
    turn_end = tokenizer.convert_tokens_to_ids("<|tool|>")
    assert found.eos == {tokenizer.eos_token_id, 5, 7, turn_end}
    assert found.pad == tokenizer.pad_token_id


def test_a_turn_end_that_is_plain_text_ends_nothing():
    found = prepare_tokenizer(tiny_tokenizer(TEMPLATE.replace("<eos>", "!")))
    assert found.eos == {2}


def test_without_a_pad_token_the_end_of_sequence_serves_and_the_vocabulary_stays():
    tokenizer = tiny_tokenizer(pad=None)
    size = len(tokenizer)
    assert prepare_tokenizer(tokenizer).pad == tokenizer.eos_token_id
    assert len(tokenizer) == size


def test_a_pad_token_without_an_embedding_is_not_used():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert prepare_tokenizer(tokenizer, SimpleNamespace(vocab_size=len(tokenizer) - 1)).pad == tokenizer.eos_token_id


def test_a_tokenizer_without_an_end_is_refused():
    tokenizer = tiny_tokenizer(template=None)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=r"no end-of-sequence token.*set tokenizer\.eos_token"):
        prepare_tokenizer(tokenizer)
