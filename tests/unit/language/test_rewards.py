"""How reward functions are found, called and read."""

import functools
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from grpo.config import ConfigError
from grpo.language.rewards import FromFile, Rewards, messages
from grpo.language.rewards.calling import Call, Task, answer
from grpo.language.samples import Prompt, Sample
from tests.faults import reward_functions as functions


def sample(text, row=0, chat=False, **columns):
    asked = [{"role": "user", "content": "Why?"}] if chat else None
    ids = torch.tensor([3, 1, 4])
    prompt = Prompt(row, [1], "Why?", asked, columns)
    said = [{"role": "assistant", "content": text}]
    return Sample(prompt, ids, torch.ones_like(ids, dtype=torch.bool), None, "eos", text, said)


def arguments(function, samples: Sequence[Sample], state=None) -> list[dict]:
    """What the calls would be made with."""
    columns = sorted({name for s in samples for name in s.prompt.columns})
    call = Call.of(function, "f")
    call.check(columns)
    return [named for task in call.tasks(samples, columns, state or {}) for named in task.calls]


def given(function, *samples):
    """What the function receives, when it returns nothing."""
    return arguments(function, list(samples))


# --- calling --------------------------------------------------------------------------------------------------------


def test_a_function_of_one_completion_is_called_for_each_sample():
    def f(completion, prompt, answer, completion_ids, completion_messages): ...

    first, second = given(f, sample("a", answer="1"), sample("b", chat=True, answer="2"))
    assert first == {
        "completion": "a",
        "prompt": "Why?",
        "answer": "1",
        "completion_ids": [3, 1, 4],
        "completion_messages": [{"role": "assistant", "content": "a"}],
    }
    assert second["prompt"] == [{"role": "user", "content": "Why?"}] and second["completion"] == "b"


def test_a_function_of_completions_is_called_once_with_lists():
    def f(prompts, completions, difficulty): ...

    (named,) = given(f, sample("a", difficulty=1), sample("b", difficulty=2))
    assert named == {"prompts": ["Why?", "Why?"], "completions": ["a", "b"], "difficulty": [1, 2]}


def test_the_rest_gets_everything_there_is():
    def f(prompts, completions, **kwargs): ...

    (named,) = given(f, sample("a", answer="1", level=3))
    assert named.keys() == {
        *("prompts", "completions", "completion_ids", "completion_messages"),
        *("answer", "level", "trainer_state", "log_metric", "log_extra"),
    }
    assert named["level"] == [3]


def test_a_function_with_nothing_but_keywords_is_called_as_trl_does():
    def f(**kwargs): ...

    (named,) = given(f, sample("a"), sample("b"))
    assert named["completions"] == ["a", "b"]


@pytest.mark.parametrize("name", ["reference", "reference_answer", "answer", "solution"])
def test_the_answer_arrives_under_its_usual_names(name):
    by_name = {
        "reference": lambda completion, reference: None,
        "reference_answer": lambda completion, reference_answer: None,
        "answer": lambda completion, answer: None,
        "solution": lambda completion, solution: None,
    }
    assert given(by_name[name], sample("a", answer="18"))[0][name] == "18"
    own = sample("a", **{"answer": "18", name: "own"})
    assert given(by_name[name], own)[0][name] == "own"


def test_rows_that_lack_a_column_get_none():
    def f(completions, level): ...

    assert given(f, sample("a", level=1), sample("b"))[0]["level"] == [1, None]


def test_a_default_stands_where_nothing_is_offered():
    def f(completion, threshold=0.5): ...

    assert given(f, sample("a"))[0] == {"completion": "a"}
    assert given(f, sample("a", threshold=0.1))[0]["threshold"] == 0.1


def test_a_function_without_completions_is_refused_with_what_is_offered():
    for f in (lambda text: 0, lambda completion, completions: 0, lambda: 0):
        with pytest.raises(ConfigError, match=r"`completion` .*`completions`.*completion_ids.*the data's columns"):
            Call.of(f, "f")


def test_a_parameter_that_nothing_provides_is_refused_with_the_columns():
    def f(completion, dificulty): ...

    with pytest.raises(ConfigError, match=r"f needs 'dificulty'.*columns difficulty; did you mean \"difficulty\""):
        given(f, sample("a", difficulty=1))
    with pytest.raises(ConfigError, match=r"'solution'.*columns \(none\).*set answer_column"):
        given(lambda completion, solution: 0, sample("a"))


def test_partials_and_objects_are_functions_too():
    class Longer:
        def __init__(self, than):
            self.than = than

        def __call__(self, completion):
            return len(completion) > self.than

    part = functools.partial(lambda completion, than: len(completion) > than, than=1)
    with pytest.warns(UserWarning):
        rewards = Rewards([Longer(1), part])
    with rewards:
        assert rewards.names == ("Longer", "lambda")
        assert rewards.judge([sample("abc"), sample("a")], 0).parts_NK.tolist() == [[1.0, 1.0], [0.0, 0.0]]


# --- the adapter for TRL's chats ------------------------------------------------------------------------------------


def test_messages_passes_each_completion_as_messages():
    task = Task((0,), tuple(given(messages(functions.trl_style), sample("four"))))
    assert answer(Call.of(messages(functions.trl_style), "f"), task, 1.0).verdicts[0].value == 4.0
    bare = Task((0,), tuple(given(functions.trl_style, sample("four"))))
    assert "TypeError" in answer(Call.of(functions.trl_style, "f"), bare, 1.0).verdicts[0].error


# --- in processes of their own --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def several():
    chosen = [functions.notes, functions.batch_notes, functions.adapted, messages(functions.trl_style)]
    with Rewards([*chosen, functions.awaited_batch], timeout=60, workers=1) as made:
        yield made


def test_what_is_logged_comes_back_from_the_workers(several):
    samples = [sample("one two"), sample("three")]
    judgement = several.judge(samples, 7, {"max_steps": 10, "epoch": 0.5})
    assert judgement.errors == {}
    assert judgement.parts_NK.tolist() == [[7.0, 0.0, 7.0, 7.0, 7.0], [7.0, 0.0, 5.0, 5.0, 5.0]]
    assert judgement.metrics["words"] == 1.5
    assert judgement.metrics["batch"] == 2.0
    assert judgement.extras == {"first": ["o", "t"], "upper": ["ONE TWO", "THREE"]}


def test_metrics_are_named_as_trl_names_them(several):
    metrics = several.judge([sample("ab"), sample("abcd")], 0).metrics
    assert several.names == ("notes", "batch_notes", "adapted", "trl_style", "awaited_batch")
    assert metrics["rewards/trl_style/mean"] == 3.0
    assert metrics["rewards/trl_style/std"] == pytest.approx(np.std([2, 4], ddof=1))


def test_judging_overlaps_what_is_done_meanwhile(several):
    pending = [several.begin([sample("a" * n)], step=n) for n in (1, 2, 3)]
    assert [several.finish(one).parts_NK[0, 2] for one in pending] == [1.0, 2.0, 3.0]


def test_nothing_to_judge_is_no_trouble(several):
    judgement = several.judge([], 0)
    assert judgement.parts_NK.shape == (0, 5) and judgement.errors == {}


def test_log_extra_of_the_wrong_length_is_an_error():
    named = given(functions.bad_notes, sample("a"), sample("b"))
    verdicts = answer(Call.of(functions.bad_notes, "f"), Task((0, 1), tuple(named)), 1.0).verdicts
    assert "log_extra('upper') got 1 values for 2 completions" in verdicts[0].error


def test_a_word_names_a_function_of_a_file_a_module_or_the_library(tmp_path):
    (tmp_path / "beside.py").write_text("FACTOR = 2.0\n")
    file = tmp_path / "my_rewards.py"
    file.write_text(
        "import beside\nfrom grpo.language.rewards import messages\n\n"
        "def correctness(completion, answer):\n    return beside.FACTOR if answer in completion else 0.0\n\n"
        "@messages\nasync def chat(completion):\n    return float(len(completion[0]['content']))\n"
    )
    words = [f"{file}:correctness", "tests.faults.reward_functions:right", "correctness", f"{file}:chat"]
    with Rewards(words, workers=1, timeout=60, settings={"correctness_reward": 4.0}) as rewards:
        judgement = rewards.judge([sample("The answer is 42", answer="42")], 0)
    assert rewards.names == ("correctness", "right", "correctness_2", "chat")
    assert judgement.errors == {}
    assert judgement.parts_NK.tolist() == [[2.0, 1.0, 4.0, 16.0]]
    sys.path.remove(str(tmp_path))


def test_a_function_of_a_file_is_sent_as_its_place():
    assert FromFile(functions.__file__, "length").__reduce__() == (FromFile, (functions.__file__, "length"))


def test_what_cannot_be_a_reward_is_refused():
    with pytest.raises(ConfigError, match="a reward is a function, a model or a word that names one, got int"):
        Rewards([3])
    with pytest.raises(ConfigError, match="2 names for 1 reward"):
        Rewards([functions.length], names=["a", "b"])
    with pytest.raises(ConfigError, match="2 reward_processing_classes for 1 rewards"):
        Rewards([functions.length], processing_classes=[None, None])


def test_a_script_without_the_usual_guard_is_not_run_again(tmp_path, monkeypatch):
    main = type(sys)("__main__")
    main.__file__ = str(tmp_path / "script.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    (tmp_path / "script.py").write_text("train()\n")
    with pytest.warns(UserWarning, match=r"would run all of script\.py.*if __name__ == '__main__'"):
        rewards = Rewards([functions.length])
    with rewards:
        assert rewards.judge([sample("abc")], 0).parts_NK.tolist() == [[3.0]]


def test_a_function_of_a_notebook_stays_in_it(monkeypatch):
    def mine(completion):
        return len(completion)

    mine.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "__main__", type(sys)("__main__"))
    with pytest.warns(UserWarning, match="cannot load it from a notebook"):
        rewards = Rewards([mine])
    with rewards:
        assert rewards.judge([sample("abc")], 0).parts_NK.tolist() == [[3.0]]
