"""What stands beside the seams."""

from grpo.protocols import as_part, part


def test_a_part_of_a_state_comes_back_by_its_own_names():
    arrays = as_part("source", as_part("lanes", {"a": 1, "b/c": 2})) | as_part("sources", {"a": 3})
    assert arrays == {"source/lanes/a": 1, "source/lanes/b/c": 2, "sources/a": 3}
    assert part(arrays, "source") == {"lanes/a": 1, "lanes/b/c": 2}
    assert part(arrays, "source/lanes") == {"a": 1, "b/c": 2}
    assert part(arrays, "nothing") == {}
