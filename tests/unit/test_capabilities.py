"""The worked examples of the seams are true, and there is one for each."""

import doctest
import inspect

import pytest

from grpo import capabilities, protocols, rollouts


def declared(module):
    return [
        thing
        for _, thing in inspect.getmembers(module, inspect.isclass)
        if thing.__module__ == module.__name__ and getattr(thing, "_is_runtime_protocol", False)
    ]


@pytest.mark.parametrize("module", [protocols, capabilities, rollouts], ids=lambda module: module.__name__)
def test_the_examples_are_true(module):
    found = doctest.testmod(module)
    assert found.failed == 0
    assert found.attempted > len(declared(module))


@pytest.mark.parametrize("capability", declared(capabilities), ids=lambda thing: thing.__name__)
def test_a_capability_is_one_name_with_an_example(capability):
    assert len(members(capability)) == 1
    assert ">>>" in capability.__doc__


def members(protocol):
    own = {name for name in vars(protocol) if not name.startswith("_")}
    return own | set(inspect.get_annotations(protocol))


def test_those_of_a_source_have_a_name_each():
    names = [name for capability in capabilities.OF_A_SOURCE for name in members(capability)]
    assert len(names) == len(set(names)) == 15


def test_an_object_without_the_method_has_no_capability():
    assert not any(isinstance(object(), capability) for capability in declared(capabilities))
