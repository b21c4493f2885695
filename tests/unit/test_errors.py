"""What went wrong, in words."""

import json
import multiprocessing.spawn
import runpy
import threading
import warnings
from importlib import metadata

import pytest

from grpo.errors import NOBODY, line, located, nearest, origin, warn
from grpo.run import output


def test_an_exception_is_one_short_line() -> None:
    assert line(ValueError("a\n  b")) == "ValueError: a b"
    assert line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(line(ValueError("x" * 1000))) == len("ValueError: ") + 300


def test_an_exception_names_the_users_lines_that_led_to_it(tmp_path) -> None:
    physics, env = tmp_path / "physics.py", tmp_path / "env.py"
    physics.write_text("def fall(n=0):\n    return fall(n - 1) if n else {}['mass']\n", encoding="utf-8")
    env.write_text("def step(fall, n):\n    return run(fall, n)\n\n\ndef run(fall, n):\n    return fall(n)\n", "utf-8")
    fall, step = runpy.run_path(str(physics))["fall"], runpy.run_path(str(env))["step"]

    def said(n):
        try:
            step(fall, n)
        except KeyError as error:
            error.__traceback__ = error.__traceback__.tb_next  # caught where it was called: without this file
            return located(error)

    assert said(0) == f"KeyError: 'mass' ({env}:2 → :6 → {physics}:2)"
    assert said(5) == f"KeyError: 'mass' ({env}:2 → … → {physics}:2 → :2 → :2)"
    assert located(ValueError("no")) == "ValueError: no"


def test_the_closest_word_is_offered_or_none() -> None:
    assert nearest("learnig_rate", ["learning_rate", "seed"]) == '; did you mean "learning_rate"?'
    assert nearest("zzz", ["learning_rate", "seed"]) == ""


def test_a_failed_first_step_is_still_found_where_a_run_lives() -> None:
    from grpo.errors import SamplesFailed
    from grpo.run.loop import SamplesFailed as of_the_loop

    assert of_the_loop is SamplesFailed


SCRIPT = """
import grpo
from tests.toys import Match, Softmax

trainer = grpo.GRPOTrainer(grpo.GRPOConfig(group_size=2), Softmax().requires_grad_(False), reward_model=Match())
"""


def test_a_warning_names_the_users_line_whatever_lies_between(tmp_path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT, encoding="utf-8")
    with pytest.warns(UserWarning, match="no trainable parameters") as told:
        runpy.run_path(str(script))
    assert [(w.filename, w.lineno) for w in told] == [(str(script), 5)]


def test_a_warning_of_a_thread_or_a_command_is_one_plain_line(monkeypatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    output.plain_warnings()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        thread = threading.Thread(target=warn, args=("heard",))
        thread.start()
        thread.join()
    [it] = told
    assert warnings.formatwarning(it.message, it.category, it.filename, it.lineno) == "warning: heard\n"
    assert "mine.py:3: UserWarning: other" in warnings.formatwarning("other", UserWarning, "mine.py", 3)


def test_a_warning_of_a_process_that_was_started_is_nobodys_line() -> None:
    def worker() -> None:
        warn("heard from there")

    worker.__code__ = worker.__code__.replace(co_filename=multiprocessing.spawn.__file__, co_name="spawn_main")
    with pytest.warns(UserWarning, match="heard from there") as told:
        worker()  # called by `<string>`, line 1, over there
    assert [it.filename for it in told] == [NOBODY]


def test_a_warning_that_comes_again_is_said_once() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.resetwarnings()  # as in a program
        for text in ("every step", "every step", "another"):
            thread = threading.Thread(target=warn, args=(text,))
            thread.start()
            thread.join()
    assert [str(one.message) for one in told] == ["every step", "another"]


def test_a_warning_is_heard_where_the_program_has_no_file() -> None:
    """As of python -c, a shell, or a process that was forked from one: their loader has no source and says so."""
    from importlib.machinery import BuiltinImporter

    own = {"__name__": "__main__", "__loader__": BuiltinImporter, "warn": warn}
    with pytest.warns(UserWarning, match="heard"):
        exec(compile("warn('heard')", "<string>", "exec"), own)


def test_advice_names_the_checkout_that_was_installed(monkeypatch, tmp_path):
    class Installed:
        def __init__(self, told):
            self.told = told

        def read_text(self, name):
            return self.told if name == "direct_url.json" else None

    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "pyproject.toml").touch()
    here = (tmp_path / "a b").as_uri()
    for told, meant in (
        (json.dumps({"url": here, "dir_info": {}}), ("", str(tmp_path / "a b"))),
        (json.dumps({"url": here, "dir_info": {"editable": True}}), ("-e ", str(tmp_path / "a b"))),
        (json.dumps({"url": f"{here}/gone", "dir_info": {}}), ("", "anygrpo")),
        (None, ("", "anygrpo")),  # from an index
    ):
        monkeypatch.setattr(metadata, "distribution", lambda name, told=told: Installed(told))
        assert origin.__wrapped__() == meant
