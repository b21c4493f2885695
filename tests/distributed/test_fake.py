"""Groups of 8, 64 and 1,024 ranks in one process: as many calls a step whatever their number, no more bytes a rank."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from grpo import together
from grpo.distributed.group import Group
from tests.distributed import cases


@pytest.fixture(params=[8, 64, 1024])
def ranks(request, monkeypatch):
    """Rank 0 of so many, who all say what it says."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    made = Group(dist.group.WORLD, dist.group.WORLD)
    monkeypatch.setattr(together, "here", lambda: made)
    yield made
    dist.destroy_process_group()


@pytest.fixture
def sent(monkeypatch):
    """Bytes that this rank gives to each collective, by its kind."""
    found = {"all_gather": [], "all_reduce": []}
    gather, reduce = dist.all_gather, dist.all_reduce

    def gathered(into, mine, **kwargs):
        found["all_gather"].append(mine.numel() * mine.element_size())
        return gather(into, mine, **kwargs)

    def reduced(mine, **kwargs):
        found["all_reduce"].append(mine.numel() * mine.element_size())
        return reduce(mine, **kwargs)

    monkeypatch.setattr(dist, "all_gather", gathered)
    monkeypatch.setattr(dist, "all_reduce", reduced)
    return found


def test_a_step_of_many_ranks(ranks, sent):
    trainer = cases.bandit_trainer(ranks, groups_per_step=2 * ranks.size, group_size=4)
    for kind in sent.values():
        kind.clear()
    trainer.step()
    assert sent["all_reduce"] == [trainer.policy.logits_V.numel() * 4]  # gradients once, in one flat sum
    lengths, records = sent["all_gather"][::2], sent["all_gather"][1::2]
    assert lengths == [8] * 3  # of collecting, comparing and the passes
    rows = 2 * 4  # of this rank
    assert records[0] < 1500 + 60 * rows and records[1] < 300
