"""Every policy, source and reference keeps every promise; a state goes on in a fresh room, too."""

import copy

import pytest
import torch

from grpo.checking import check
from grpo.promises import PROMISES
from grpo.protocols import CollectRequest, Reference, RolloutSource, SequencePolicy, State
from grpo.seeding import seed_all
from tests.conformance.rooms import ROOMS


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_keeps_its_promises(name):
    policy, source, reference = ROOMS[name]()
    assert isinstance(policy, SequencePolicy)
    assert isinstance(source, RolloutSource)
    assert isinstance(reference, Reference)
    before = {name: p.detach().clone() for name, p in policy.parameters().items()}
    report = check(policy, source, reference, raises=False)
    assert report.flaws == ()
    assert report.promises == tuple(promise.__name__ for promise in PROMISES)
    assert all(torch.equal(p, before[name]) for name, p in policy.parameters().items())


@pytest.mark.parametrize("name", ROOMS)
def test_a_fresh_source_goes_on_from_a_state(name):
    """What the source of another process would do, bit for bit; weights are the trainer's affair."""
    policy, source, _ = ROOMS[name]()
    _collect(policy, source, 0)
    taken = source.state()
    state = State(copy.deepcopy(dict(taken.values)), copy.deepcopy(dict(taken.arrays)))
    one = _collect(policy, source, 1)
    source.close()

    policy, source, _ = ROOMS[name]()
    source.load_state(state)
    other = _collect(policy, source, 1)
    source.close()
    assert torch.equal(one.group_N, other.group_N) and torch.equal(one.mask_NT, other.mask_NT)
    assert torch.equal(one.old_logp_NT[one.mask_NT], other.old_logp_NT[other.mask_NT])
    assert torch.equal(torch.as_tensor(one.scored_N), torch.as_tensor(other.scored_N))


def _collect(policy, source, step):
    seed_all(0, step, "train")
    policy.eval()
    return source.collect(CollectRequest(step)).rollouts
