"""Old names of modules still work: scripts and run folders say them."""

import importlib
import sys
import warnings

import pytest

from grpo.moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_gives_the_module_itself(old):
    pytest.importorskip("triton") if "kernels" in old or "graphed" in old else None
    new = importlib.import_module(f"grpo.{MOVED[old]}")
    spec = new.__spec__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert importlib.import_module(f"grpo.{old}") is new
    assert new.__spec__ is spec and new.__name__ == f"grpo.{MOVED[old]}"


def test_it_says_where_the_module_is_now(monkeypatch):
    monkeypatch.setattr("grpo.language.tools", None, raising=False)  # put back as it was
    monkeypatch.delitem(sys.modules, "grpo.language.tools", raising=False)
    with pytest.warns(DeprecationWarning, match=r"grpo\.language\.tools is grpo\.language\.turns\.tools now"):
        importlib.import_module("grpo.language.tools")


def test_names_that_never_were_are_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"grpo\.language\.nothing"):
        importlib.import_module("grpo.language.nothing")


def test_a_room_whose_libraries_are_missing_says_what_brings_them(monkeypatch):
    import sys

    import grpo.control

    for name in [name for name in sys.modules if name.startswith("grpo.control.trainer")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ModuleNotFoundError, match=r"grpo\.control needs gymnasium: pip install 'anygrpo\[control\]'"):
        _ = grpo.control.GRPOTrainer
