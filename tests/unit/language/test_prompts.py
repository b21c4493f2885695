"""Rows become prompts: where they come from, what their columns mean, in which order they are handed out."""

import json
import sys
import warnings

import pytest
from datasets import Dataset, DatasetDict

from grpo.config import ConfigError
from grpo.language.data import prompts as module
from grpo.language.data.chat import Chat
from grpo.language.data.prompts import Prompts, load, read_rows
from grpo.language.samples import Prompt
from tests.unit.language.tiny import tiny_tokenizer
from tests.unit.language.tokenizers_of_kinds import of_bytes, of_sentencepiece

ROWS = [{"prompt": f"{i}+1", "answer": str(i + 1), "level": i % 3} for i in range(10)]


def chat(**settings):
    return Chat(tiny_tokenizer(), **settings)


def prompts(rows=ROWS, **settings):
    return Prompts(rows, settings.pop("chat", None) or chat(), **settings)


def numbers(batch):
    return [prompt.row for prompt in batch]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# --- columns ---


def test_a_prompt_carries_every_other_column():
    found = prompts()[3]
    assert found.text == "<|user|>3+1<eos><|assistant|>"
    assert found.shown == [{"role": "user", "content": "3+1"}]
    assert found.columns == {"answer": "4", "level": 0}
    assert (found.row, found.truncated) == (3, False)


def test_a_known_column_is_taken_with_a_notice_that_names_it():
    rows = [{"question": "2+2", "answer": "4"}]
    with pytest.warns(UserWarning, match="question is taken as the prompt; set prompt_column"):
        found = prompts(rows)[0]
    assert "2+2" in found.text
    assert found.columns == {"question": "2+2", "answer": "4"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prompts(rows, prompt_column="question")


@pytest.mark.parametrize("name", ["solution", "reference_answer", "reference", "ground_truth"])
def test_the_answer_is_offered_as_answer_and_under_its_own_name(name):
    assert prompts([{"prompt": "q", name: "4"}])[0].columns == {name: "4", "answer": "4"}


def test_the_named_answer_column_wins_and_a_wrong_name_lists_the_columns():
    rows = [{"prompt": "q", "answer": "no", "final": "4"}]
    assert prompts(rows, answer_column="final")[0].columns == {"answer": "4", "final": "4"}
    with pytest.raises(ConfigError, match="no column finale; found prompt, answer, final — set answer_column"):
        prompts(rows, answer_column="finale")


def test_the_answer_follows_its_mark_without_thousands_commas():
    rows = [{"prompt": "q", "answer": "5 * 250 = 1,250 #### no\n#### 1,250,000 "}]
    columns = prompts(rows, answer_after="####")[0].columns
    assert columns == {"answer": "1250000", "answer_full": rows[0]["answer"]}
    assert prompts([{"prompt": "q", "answer": "#### 1,2"}], answer_after="####")[0].columns["answer"] == "1,2"
    with pytest.raises(ConfigError, match="row 0: answer holds no '####'"):
        prompts([{"prompt": "q", "answer": "4"}], answer_after="####")


def test_an_answer_without_a_mark_that_nobody_named_is_taken_whole():
    rows = [{"prompt": "q", "answer": "2 + 2\n#### 4"}] * 64 + [{"prompt": "q", "answer": "1,000 of them"}]
    with pytest.warns(UserWarning, match="answer ends in"):
        found = prompts(rows, answer_after="auto")
    assert (found[0].columns["answer"], found[64].columns["answer"]) == ("4", "1,000 of them")


def test_a_template_is_filled_from_the_columns_and_other_braces_are_text():
    rows = [{"question": "2+2", "level": 3}]
    template = r"{question} ({level}) in \boxed{} or {{x}}"
    assert prompts(rows, prompt_template=template)[0].messages[0]["content"] == r"2+2 (3) in \boxed{} or {x}"
    with pytest.raises(ConfigError, match="prompt_template: no column quest; found question, level"):
        prompts(rows, prompt_template="{quest}")


def test_text_and_messages_may_be_mixed_and_each_row_is_handled_on_its_own():
    rows = [{"prompt": "hi"}, {"prompt": [{"role": "user", "content": "hi", "name": None}]}]
    first, second = prompts(rows).first()
    assert first.ids == second.ids
    assert second.messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("held", ["a/b.PNG", b"x", [{"bytes": b"x", "path": None}], "data:image/png;base64,xx"])
def test_images_that_a_model_of_text_does_not_see_are_told_of(held):
    with pytest.warns(UserWarning, match="the column image holds images and the model reads text alone"):
        prompts([{"prompt": "q", "image": None}, {"prompt": "q", "image": held}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prompts([{"prompt": "q", "image": "a word", "images": []}])


def test_content_in_parts_of_text_is_joined():
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2"}]
    assert "2+2" in prompts([{"prompt": [{"role": "user", "content": parts}]}])[0].text


def test_columns_that_a_row_lacks_are_none():
    assert prompts([{"prompt": "a", "answer": "1"}, {"prompt": "b"}])[1].columns == {"answer": None}


# --- lengths ---


def test_long_prompts_are_dropped_and_counted():
    rows = [{"prompt": "x" * n} for n in (1, 50, 2)]
    found = prompts(rows, max_length=10, shuffle=False)
    assert numbers(found.first()) == [0, 2]
    assert found.counts == {"dropped": 1, "truncated": 0}


def test_truncation_keeps_the_end_and_the_text_says_so():
    rows = [{"prompt": "abcdefgh"}, {"prompt": "a"}]
    found = prompts(rows, max_length=5, overlong="truncate")
    assert (found[0].text, len(found[0].ids), found[0].truncated) == ("fgh<eos><|assistant|>", 5, True)
    assert not found[1].truncated
    assert found.counts == {"dropped": 0, "truncated": 1}


@pytest.mark.parametrize("settings", [{}, {"max_length": 8}, {"max_length": 8, "overlong": "truncate"}])
def test_several_processes_find_the_same(settings):
    data = Dataset.from_list([{"prompt": "x" * n, "answer": str(n)} for n in range(1, 9)])
    one, two = prompts(data, **settings), prompts(data, num_proc=2, **settings)
    assert (one.fingerprint, one.counts) == (two.fingerprint, two.counts)
    assert one.first() == two.first()


MIXED = [
    "6 + 7",
    "say <|im_end|> twice",
    "<|im_start|>user\n1<|im_end|>\n",
    "größer 🙂",
    [{"role": "user", "content": "2"}],
]


@pytest.mark.parametrize(("made", "texts"), [(of_bytes, MIXED), (of_sentencepiece, [*MIXED[:2], MIXED[3]])])
def test_rows_whose_tokens_are_made_together_are_measured_as_each_alone(made, texts, monkeypatch):
    rows = [{"prompt": text, "answer": str(i)} for i, text in enumerate(texts * 2)]
    monkeypatch.setattr(module, "TOGETHER", 3)  # so that rows fall into several calls, and one is not full
    found = prompts(rows, chat=Chat(made()), shuffle=False)
    alone = [module._measured(row, chat=Chat(made()), columns=found._columns, place="")["length"] for row in rows]
    assert alone == [len(prompt.ids) for prompt in found.first()]
    for limit in sorted({*alone}):  # who takes part, and with it the fingerprint, follows from these lengths
        some = prompts(rows, chat=Chat(made()), max_length=limit)
        assert len(some) == sum(length <= limit for length in alone)


def test_a_row_among_those_whose_tokens_are_made_together_is_named():
    tokenizer = of_bytes()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ConfigError, match="rows row 5: the prompt is empty"):
        prompts([{"prompt": "" if i == 5 else "a"} for i in range(9)], chat=Chat(tokenizer), origin="rows")


# --- order ---


def test_batches_walk_through_a_new_permutation_each_epoch():
    found = prompts(seed=3)
    rows = [row for step in range(6) for row in numbers(found.batch(step, 5))]
    epochs = [rows[:10], rows[10:20], rows[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(10))


def test_a_step_has_the_same_prompts_whenever_it_is_asked_for():
    walked, fresh = prompts(seed=3), prompts(seed=3)
    rows = [numbers(walked.batch(step, 4)) for step in range(8)]
    assert numbers(fresh.batch(6, 4)) == rows[6]
    assert numbers(walked.batch(1, 4)) == rows[1]
    assert numbers(prompts(seed=4).batch(6, 4)) != rows[6]
    assert (walked.state(), walked.epoch_steps(4)) == ({}, 2.5)


def test_unshuffled_rows_come_as_they_stand_over_the_end_of_an_epoch():
    assert numbers(prompts(shuffle=False).batch(2, 4)) == [8, 9, 0, 1]


def test_a_data_set_smaller_than_a_batch_repeats_with_one_notice():
    found = prompts(ROWS[:3], shuffle=False)
    with pytest.warns(UserWarning, match="3 prompts for 8 in a step"):
        assert numbers(found.batch(0, 8)) == [0, 1, 2, 0, 1, 2, 0, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.batch(1, 8)


def test_the_fingerprint_follows_content_columns_and_limit_and_nothing_else():
    one = prompts().fingerprint
    assert one == prompts(Dataset.from_list(ROWS), seed=7, shuffle=False).fingerprint
    changed = [*ROWS[:-1], ROWS[-1] | {"level": 7}]
    others = [prompts(changed), prompts(ROWS[::-1]), prompts(answer_column="level"), prompts(ROWS[:9])]
    assert len({one, *(other.fingerprint for other in others)}) == 5
    assert (
        prompts([*ROWS, {"prompt": "x" * 99}]).fingerprint
        != prompts([*ROWS, {"prompt": "x" * 99}], max_length=20).fingerprint
    )


def test_a_prompt_is_made_of_whatever_a_caller_has():
    found = prompts([{"question": "2+2"}], prompt_column="question")
    text = "<|user|>2+2<eos><|assistant|>"
    given = ["2+2", [{"role": "user", "content": "2+2"}], {"question": "2+2"}, {"prompt": "2+2"}, 0, found[0]]
    assert {found.prompt(start).text for start in given} == {text}
    assert isinstance(found.prompt("2+2"), Prompt)
    assert found.prompt({"prompt": "2+2", "answer": "4"}).columns == {"answer": "4"}


# --- streams ---


def stream(rows=ROWS, **settings):
    return prompts(Dataset.from_list(rows).to_iterable_dataset(), **settings)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream_gives_the_same_rows_for_the_same_step_after_a_resume(shuffle):
    rows = [{"prompt": "x" * (40 if i % 4 == 1 else 1 + i % 3), "answer": str(i)} for i in range(11)]
    settings = {"max_length": 8, "shuffle": shuffle, "seed": 5}

    def answers(found, step):
        return [prompt.columns["answer"] for prompt in found.batch(step, 3)]

    walked, states, expected = stream(rows, **settings), [], []
    for step in range(7):
        states.append(json.loads(json.dumps(walked.state())))
        expected.append(answers(walked, step))
    assert walked.counts["dropped"] > 3
    for step in (0, 2, 5):
        resumed = stream(rows, **settings)
        resumed.load_state(states[step])
        assert [answers(resumed, later) for later in range(step, 7)] == expected[step:]
        assert resumed.counts == walked.counts
    assert answers(walked, 6) == expected[6]  # again
    assert answers(walked, 1) == expected[1]  # back
    assert answers(stream(rows, **settings), 4) == expected[4]  # ahead, without a state
    epoch = sorted([answer for batch in expected for answer in batch][:8], key=int)
    assert epoch == [str(i) for i in range(11) if i % 4 != 1]


def test_looking_at_the_first_prompts_does_not_move_a_stream():
    found = stream(shuffle=False)
    assert numbers(found.batch(0, 2)) == [0, 1]
    assert numbers(found.first(3)) == [0, 1, 2]
    assert len(found.first()) == 10
    assert numbers(found.batch(1, 2)) == [2, 3]


def test_a_stream_truncates_and_counts_as_it_goes():
    found = stream([{"prompt": "x" * 20}, {"prompt": "x"}], max_length=5, overlong="truncate", shuffle=False)
    assert [prompt.truncated for prompt in found.batch(0, 2)] == [True, False]
    assert found.counts == {"dropped": 0, "truncated": 1}


def test_a_stream_has_no_length():
    found = stream()
    with pytest.raises(TypeError):
        len(found)
    with pytest.raises(ConfigError, match=r"say how long to train with max_steps"):
        found.epoch_steps(4)
    assert found.fingerprint != stream(ROWS[1:]).fingerprint


# --- files ---


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "csv"])
def test_local_files_are_read_with_their_slices(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / f"data.{suffix}"
    if suffix == "jsonl":
        write(path, ROWS)
    elif suffix == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif suffix == "parquet":
        Dataset.from_list(ROWS).to_parquet(path)
    else:
        Dataset.from_list(ROWS).to_csv(path)
    assert [row["prompt"] for row in load(str(path))] == [row["prompt"] for row in ROWS]
    assert [row["prompt"] for row in load(str(path), split="train[20%:40%]")] == ["2+1", "3+1"]
    assert len(read_rows(path)) == 10
    with pytest.raises(ConfigError, match=r'Unknown split "test".*train'):
        load(str(path), split="test")


def test_the_places_of_rows_survive_a_slice(tmp_path):
    path = write(tmp_path / "data.jsonl", ROWS)
    rows = load(path, split="train[-2:]+train[:1]")
    assert [rows.place(i) for i in range(3)] == [f"{path}:9", f"{path}:10", f"{path}:1"]


def test_json_may_hold_its_rows_under_a_key_or_be_lines_after_all(tmp_path):
    under, lines, one = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"
    under.write_text(json.dumps({"version": 1, "data": ROWS}))
    write(lines, ROWS)
    one.write_text(json.dumps({"prompt": [{"role": "user", "content": "hi"}]}))
    assert read_rows(under) == read_rows(lines) == ROWS
    assert len(read_rows(one)) == 1


def test_line_separators_inside_of_text_end_no_row(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a\u2028b\x85c"}\r\n\r\n{"prompt": "d"}', encoding="utf-8-sig")
    rows = read_rows(path)
    assert [row["prompt"] for row in rows] == ["a\u2028b\x85c", "d"]
    assert rows.place(1).endswith(":3")


def test_folders_of_save_to_disk_are_read_by_split(tmp_path):
    data = Dataset.from_list(ROWS)
    DatasetDict(train=data, test=data.select(range(4))).save_to_disk(tmp_path / "two")
    data.save_to_disk(tmp_path / "one")
    assert len(load(str(tmp_path / "two"), split="test")) == 4
    assert len(load(str(tmp_path / "one"), split="train[:30%]")) == 3
    assert len(load(str(tmp_path / "two"), split="train[:1]+test[:1]")) == 2
    with pytest.raises(ConfigError, match=r"""Unknown split "valid".*\['train', 'test'\]"""):
        load(str(tmp_path / "two"), split="valid")


def test_reading_lines_needs_no_other_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    path = write(tmp_path / "data.jsonl", ROWS)
    assert len(Prompts(load(path), chat())) == 10
    with pytest.raises(ConfigError, match=r"pip install 'anygrpo\[language\]'"):
        load(path, split="train[:1]")
