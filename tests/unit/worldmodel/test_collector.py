"""Playing and remembering, without anybody who learns from it."""

import pytest

from tests.unit.worldmodel.worlds import make


@pytest.fixture(params=["lockstep", "beside"])
def collector(request):
    trainer = make(prefill=50, steps_per_collect=20, train_ratio=32, pretrain=3, acting=request.param)
    yield trainer.source.collector
    trainer.source.close()


def test_a_round_says_what_was_played_and_which_updates_are_due(collector):
    first, second = collector.advance(0), collector.advance(1)
    assert first.metrics["env_steps"] == first.metrics["samples"] >= 50 and first.updates == 3 + 1
    assert second.metrics["samples"] in (20, 21) and second.updates == second.metrics["samples"]
    assert second.replay is first.replay is collector.replay


def test_nothing_is_awake_until_a_round_is_played(collector):
    assert collector.peek(4) is None
    state = collector.state()
    assert state.values["lanes"] is None and state.values["replay"] is None and not state.arrays
    collector.advance(0)
    assert collector.peek(4).ids_BT.shape == (4, 8)


def test_what_was_woken_before_a_round_is_gone_on_with(collector):
    assert not collector.replay.sequences
    collector.load_state(collector.state())
    assert collector.advance(0).metrics["env_steps"] >= 50


def test_a_state_that_nobody_needed_yet_is_kept_as_it_was(collector):
    collector.advance(0)
    played = collector.state()
    collector.load_state(played)
    again = collector.state()
    assert dict(again.values) == dict(played.values) and again.arrays.keys() == played.arrays.keys()
    assert {name.partition("/")[0] for name in again.arrays} == {"lanes", "replay"}


def test_parts_of_a_state_are_called_as_they_were():
    trainer = make(actor="critic")
    trainer.step()
    names = ["range", "ratio", "ahead", "counted", "lanes", "study", "critic", "replay"]
    assert list(trainer.source.state().values) == names
    trainer.source.close()
