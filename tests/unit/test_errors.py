"""What went wrong, in words."""

from grpo.errors import line, nearest


def test_an_exception_is_one_short_line() -> None:
    assert line(ValueError("a\n  b")) == "ValueError: a b"
    assert line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(line(ValueError("x" * 1000))) == len("ValueError: ") + 300


def test_the_closest_word_is_offered_or_none() -> None:
    assert nearest("learnig_rate", ["learning_rate", "seed"]) == '; did you mean "learning_rate"?'
    assert nearest("zzz", ["learning_rate", "seed"]) == ""


def test_a_failed_first_step_is_still_found_where_a_run_lives() -> None:
    from grpo.errors import SamplesFailed
    from grpo.run.loop import SamplesFailed as of_the_loop

    assert of_the_loop is SamplesFailed
