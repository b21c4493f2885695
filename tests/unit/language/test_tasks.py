"""Built-in tasks: their rows, their rewards, and the model made for them."""

import pytest

from grpo.config import ConfigError
from grpo.language.tasks import TASKS, built_in, exact, in_place

END, PAD = 1, 0


def judged(reward, text, answer, further=()):
    """What a reward says of a completion of one token a character, ended, with further tokens that leave no text."""
    return reward([text], [[*(ord(c) for c in text), *further, END]], [answer])[0]


@pytest.mark.parametrize("name", ["sort-digits", "addition"])
def test_rows_are_many_and_the_held_out_ones_apart(name):
    train, held_out = TASKS[name].rows("train"), TASKS[name].rows("test")
    answers = [row["answer"] for row in train + held_out]
    assert len(train) >= 2000 and len(held_out) == 1000
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert max(answers.count(answer) for answer in set(answers)) <= 0.1 * len(answers)


def test_an_answer_is_right_only_alone_and_ended():
    assert judged(exact, "0123", "0123") == 1
    assert judged(exact, "0132", "0123") == judged(exact, "01233", "0123") == judged(exact, "", "0123") == 0
    assert judged(exact, "0123", "0123", [PAD]) == 0  # the text is the same, the model did not end it


def test_characters_in_place_are_counted_and_a_wrong_length_costs():
    assert judged(in_place, "0123", "0123") == 1
    assert judged(in_place, "0132", "0123") == 0.5
    assert judged(in_place, "012", "0123") == judged(in_place, "012345", "0123") == 0.5
    assert judged(in_place, "0123", "0123", [PAD]) == 0.75
    assert judged(in_place, "", "0123") == -1


def test_an_unknown_task_names_the_nearest():
    with pytest.raises(ConfigError, match="sort-digits"):
        built_in("sort-digit")
