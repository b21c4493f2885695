"""Bad data: every fault is named by file, line and row, before training, with what to do about it."""

import json

import pytest
from datasets import Dataset, DatasetDict
from tokenizers import pre_tokenizers

from grpo.config import ConfigError
from grpo.language.data.chat import Chat
from grpo.language.data.prompts import Prompts, load, read_rows
from tests.unit.language.tiny import tiny_tokenizer


def prompts(rows, chat=None, **settings):
    return Prompts(rows, chat or Chat(tiny_tokenizer()), **settings)


def data(tmp_path, *lines, name="data.jsonl"):
    path = tmp_path / name
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def fault(function, *arguments, **settings):
    with pytest.raises(ConfigError) as caught:
        function(*arguments, **settings)
    return str(caught.value)


def test_a_row_without_a_prompt_is_named_by_its_line(tmp_path):
    rows = [{"prompt": "hi", "answer": "1"}] * 6 + [{"question": "2+2", "answer": "4"}]
    path = data(tmp_path, *rows)
    told = fault(prompts, read_rows(path))
    assert told.startswith(f"{path}:7: missing prompt; found question, answer — set prompt_column=question")


def test_a_row_of_a_data_set_without_a_prompt_is_named_by_its_number():
    rows = Dataset.from_list([{"prompt": "hi"}, {"prompt": None}])
    assert "row 1: missing prompt; found nothing" in fault(prompts, rows)
    assert "train.parquet row 1: missing prompt" in fault(prompts, rows, origin="train.parquet")
    assert "data row 1: missing prompt" in fault(prompts, rows, origin="data", num_proc=2)


def test_rows_without_any_known_column_list_what_they_have():
    told = fault(prompts, [{"frage": "2+2", "antwort": "4"}])
    assert told.startswith("row 0: missing prompt; found frage, antwort — set prompt_column=…")
    assert "no column fragen; found frage — set prompt_column" in fault(
        prompts, [{"frage": "2+2"}], prompt_column="fragen"
    )


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("", "row 0: the prompt is empty"),
        ([], "row 0: prompt holds no messages"),
        (7, "row 0: prompt is of type int; a prompt is text or a list of messages"),
        (["hi"], "row 0: prompt is of type list; a prompt is text or a list of messages"),
        ([{"role": "user", "content": 7}], "row 0: prompt[0]: content is of type int; it must be text"),
        ([{"role": "user"}], "row 0: prompt[0]: content is missing"),
        ([{"content": "hi"}], "row 0: prompt[0]: no role"),
        ("a\ud800b", "row 0: a lone surrogate at character 1"),
    ],
)
def test_a_prompt_that_is_none_is_named(prompt, told):
    assert fault(prompts, [{"prompt": prompt}]).startswith(told)


def test_malformed_lines_are_listed_by_line_and_column_up_to_twenty(tmp_path):
    path = data(tmp_path, {"prompt": "hi"}, b'{"prompt": "hi" "answer"}', b"[1]", b'{"prompt": ')
    listed = fault(read_rows, path).splitlines()
    assert listed[0] == f"{path}:2:17: Expecting ',' delimiter"
    assert listed[1].startswith(f"{path}:3: a list, not an object")
    assert listed[2].startswith(f"{path}:4:12: Expecting value")
    many = fault(read_rows, data(tmp_path, *[b"{"] * 25)).splitlines()
    assert (len(many), many[-1]) == (21, "… and 5 more lines")


def test_lines_that_overwhelm_the_parser_are_malformed_too(tmp_path):
    path = data(tmp_path, {"prompt": "hi"}, b'{"a": ' * 100_000, b'{"a": ' + b"9" * 5_000 + b"}")
    listed = fault(read_rows, path).splitlines()
    assert [line.split(": ")[0] for line in listed] == [f"{path}:2", f"{path}:3"]


def test_a_malformed_json_file_is_named_by_line_and_column(tmp_path):
    path = data(tmp_path, b'[{"prompt": "hi"},', b' {"prompt": }]', name="data.json")
    assert fault(read_rows, path) == f"{path}:2:13: Expecting value"
    assert "data.json row 1: text, not an object" in fault(read_rows, data(tmp_path, [{}, "hi"], name="data.json"))
    assert "a number, not a list of rows" in fault(read_rows, data(tmp_path, 7, name="data.json"))


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_empty_files_say_what_they_should_hold(tmp_path, name):
    assert 'empty; it takes one row a line, such as {"prompt"' in fault(read_rows, data(tmp_path, b"", name=name))
    assert "the list is empty" in fault(read_rows, data(tmp_path, [], name="data.json"))


def test_no_rows_at_all_are_refused():
    assert fault(prompts, []) == "the data set has no rows"
    assert fault(prompts, Dataset.from_list([]), origin="nothing.csv") == "nothing.csv has no rows"


def test_bad_utf8_is_named_by_line_and_byte(tmp_path):
    path = data(tmp_path, {"prompt": "hi"}, b'{"prompt": "caf\xe9"}')
    assert fault(read_rows, path) == f"{path}:2: not UTF-8 at byte 32 of the file; save it as UTF-8"


def test_lone_surrogates_are_named_and_whole_pairs_are_fine(tmp_path):
    path = data(tmp_path, rb'{"prompt": "\ud83d\ude00"}', rb'{"prompt": "hi", "answer": ["\ud83d"]}')
    told = fault(read_rows, path)
    assert told.startswith(f"{path}:2: 'answer' holds a lone surrogate")
    assert read_rows(data(tmp_path, rb'{"prompt": "\ud83d\ude00"}'))[0]["prompt"] == "😀"


def test_a_column_of_two_types_is_named_with_both_places(tmp_path):
    path = data(tmp_path, {"prompt": "a", "answer": "4"}, {"prompt": "b"}, {"prompt": "c", "answer": 4})
    assert fault(read_rows, path) == (f"{path}:3: answer is a number, but text in {path}:1; give the column one type")
    mixed = [{"prompt": "a", "x": 1}, {"prompt": [{"role": "user", "content": "a"}], "x": 1.5}]
    assert len(read_rows(data(tmp_path, *mixed))) == 2


def test_long_prompts_can_be_an_error_with_row_and_length():
    rows = [{"prompt": "a"}, {"prompt": "x" * 20}]
    told = fault(prompts, rows, max_length=10, overlong="error")
    assert told.startswith("row 1: the prompt has 23 tokens, over max_prompt_length=10")


def test_a_data_set_of_long_prompts_only_is_refused_with_the_longest(tmp_path):
    path = data(tmp_path, {"prompt": "x" * 20}, {"prompt": "x" * 30})
    told = fault(prompts, read_rows(path), max_length=10)
    assert "all 2 prompts are over max_prompt_length=10: 33 tokens in the longest" in told
    assert f"({path}:2), the shortest 23" in told
    stream = prompts(Dataset.from_list(read_rows(path)).to_iterable_dataset(), max_length=10)
    assert "no prompt in a whole epoch" in fault(stream.batch, 0, 1)


def test_duplicate_prompts_stay_apart():
    found = prompts([{"prompt": "hi", "answer": "1"}, {"prompt": "hi", "answer": "2"}], shuffle=False).batch(0, 2)
    assert [(prompt.row, prompt.columns["answer"]) for prompt in found] == [(0, "1"), (1, "2")]


def test_nul_ansi_and_a_megabyte_pass_through(tmp_path):
    texts = ["a\x00b", "\x1b[31mred\x1b[0m", "x" * 1_000_000]
    rows = read_rows(data(tmp_path, *({"prompt": text, "answer": text} for text in texts)))
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # a token a word: a second, not ten
    found = prompts(rows, Chat(tokenizer), shuffle=False).batch(0, 3)
    assert [prompt.columns["answer"] for prompt in found] == texts
    assert [prompt.messages[0]["content"] for prompt in found] == texts


def test_what_the_template_refuses_is_named_by_row():
    told = fault(
        prompts, [{"prompt": "hi"}, {"prompt": [{"role": "user", "content": "hi"}]}], Chat(tiny_tokenizer(None))
    )
    assert told.startswith("row 1: the prompt is a conversation but the tokenizer has no chat template; set")


def test_rows_of_the_wrong_kind_are_refused():
    assert "row 1 is of type str; a row is a dict of columns" in fault(prompts, [{"prompt": "hi"}, "hi"])
    one = Dataset.from_list([{"prompt": "hi"}])
    assert "has the splits train, test; pass one of them" in fault(prompts, DatasetDict(train=one, test=one))
    assert "not of type generator" in fault(prompts, (row for row in [{"prompt": "hi"}]))
    assert "not of type str" in fault(prompts, "data.jsonl")


def test_an_unreachable_hub_is_told_with_the_way_out(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    told = fault(load, "nobody/such-data-set")
    assert told.startswith("nobody/such-data-set: the hub cannot be reached")
    assert "give a local file" in told


def test_missing_files_and_folders_without_data_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert fault(load, str(tmp_path / "none.jsonl")) == f"{tmp_path}/none.jsonl: No such file or directory"
    assert fault(load, str(tmp_path / "none.csv")) == f"{tmp_path}/none.csv: No such file or directory"
    (tmp_path / "folder").mkdir()
    assert fault(load, str(tmp_path / "folder")).startswith(f"{tmp_path}/folder: ")
    assert "a file has no configurations" in fault(load, str(tmp_path / "none.jsonl"), "main")


def test_a_table_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = data(tmp_path, b"this is no table", name="data.parquet")
    assert fault(load, str(path)).startswith(f"{path}: ")
    assert "\n" not in fault(load, str(path))


def test_slices_that_make_no_sense_are_named(tmp_path):
    path = data(tmp_path, {"prompt": "hi"})
    assert fault(load, str(path), split="train[:x]") == f"{path}: Unrecognized instruction format: train[:x]"
