"""Groups of 8, 64 and 1,024 ranks in one process: as many calls a step whatever their number, no more bytes a rank."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from grpo import together
from grpo.distributed.group import Group
from grpo.language.samples import Prompt, Sample
from grpo.language.travel import pack
from grpo.protocols import Part
from grpo.rollouts import Rollouts
from tests.distributed import cases

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from ranks import RECORD, RECORDS, predicted

SIZES = [8, 64, 1024]
PROMPTS, GROUP, TOKENS, PROMPT = 128, 8, 256, 16
"""A step of the cost model's."""


@pytest.fixture(params=SIZES)
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
    found = {name: [] for name in ("all_gather", "all_reduce", "reduce", "broadcast")}

    def noted(name, mine):
        collective = getattr(dist, name)

        def called(*given, **kwargs):
            found[name].append(given[mine].numel() * given[mine].element_size())
            return collective(*given, **kwargs)

        monkeypatch.setattr(dist, name, called)

    for name in found:
        noted(name, 1 if name == "all_gather" else 0)
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


def ragged():
    """A step's rows with answers of all lengths."""
    rows = PROMPTS * GROUP
    length_N = torch.randint(1, TOKENS + 1, (rows,), generator=torch.Generator().manual_seed(0))
    mask_NT = torch.arange(TOKENS) < length_N[:, None]
    group_N = torch.arange(PROMPTS).repeat_interleave(GROUP)
    return Rollouts(group_N, mask_NT, -mask_NT.float(), reward_N=torch.zeros(rows)), length_N


@pytest.mark.parametrize("size", SIZES)
def test_shares_of_many_ranks_are_about_as_large(size):
    rollouts, length_N = ragged()
    shared = together.shares(rollouts, size)
    assert sorted(row for rows in shared for row in rows) == list(range(PROMPTS * GROUP))
    loads = [sum(int(length_N[row]) + 1 for row in rows) for rows in shared]
    piece = min(GROUP * (TOKENS + 1), max(sum(loads) / size, TOKENS + 1))  # what is not cut any further
    assert max(loads) <= sum(loads) / size + piece
    if size <= PROMPTS / GROUP:  # whole groups, as none is more than an even share
        owner = {row: rank for rank, rows in enumerate(shared) for row in rows}
        assert all(owner[row] == owner[row - row % GROUP] for row in owner)
        assert max(loads) <= 1.05 * sum(loads) / size


def own_part(rows):
    """Of the model's step what one rank has sampled: answers to their limit, four characters a token."""
    text = "word" * TOKENS
    logp, made = torch.linspace(-1, 0, TOKENS), torch.ones(TOKENS, dtype=torch.bool)
    prompts = [Prompt(row // GROUP, list(range(PROMPT)), "word" * PROMPT, None) for row in range(rows)]
    said = [{"role": "assistant", "content": text}]
    samples = [Sample(prompt, torch.arange(TOKENS), made, logp, "length", text, said) for prompt in prompts]
    rollouts = Rollouts(
        torch.arange(rows) // GROUP, made.repeat(rows, 1), logp.repeat(rows, 1), reward_N=torch.zeros(rows),
        reward_parts_NK=torch.zeros(rows, 1), reward_names=["variety"], status_N=torch.zeros(rows, dtype=torch.int8),
    )  # fmt: skip
    return Part(rollouts, range(PROMPTS), pack(samples))


def test_bytes_of_a_language_model_s_records_are_those_of_the_cost_model(ranks, sent):
    mine = own_part(PROMPTS * GROUP // ranks.size)
    told = together.attempted(ranks, "collecting", lambda: together.packed(mine))
    (length, record) = sent["all_gather"]
    every = PROMPTS * GROUP * (TOKENS + PROMPT)  # tokens of the step, as the model counts them
    assert length == 8 and len(told) == ranks.size
    header = 2000  # names and shapes of arrays, once a rank
    assert 0.8 * RECORD * every < ranks.size * record < RECORD * every + ranks.size * header
    seconds = predicted(ranks.size, PROMPTS, GROUP, TOKENS)["gather"]
    assert seconds * RECORDS == pytest.approx(RECORD * every)  # all records reach everybody, whatever their number


@pytest.mark.filterwarnings("ignore:7 prompts for")
@pytest.mark.parametrize("shard", ["none", "states", "gradients"])
def test_a_language_model_s_step_makes_as_many_calls_whatever_the_number_of_ranks(ranks, sent, shard):
    trainer = cases.language_trainer(ranks, double=False, prompts_per_step=ranks.size, num_generations=2, shard=shard)
    parameters = [p for p in trainer.policy.parameters().values() if p.requires_grad]
    weights = 4 * sum(p.numel() for p in parameters)  # float32
    calls, call = Counter(), ranks._call
    ranks._call = lambda what, *given, **how: calls.update([what]) or call(what, *given, **how)
    for kind in sent.values():
        kind.clear()
    try:
        trainer.step()
    finally:
        trainer.source.close()
    usual = {"collecting": 2, "comparing the step": 2, "the passes": 2}
    if shard == "gradients":
        # Everybody is told of the pass, and that there is no other; a gradient goes to its owner, a norm to all.
        each = {"the next pass": 2, "a gradient": len(parameters), "the weights": len(parameters), "the norm": 2}
        assert calls == usual | each
        assert sum(sent["reduce"]) == weights
    else:
        assert calls == usual | {"the gradients": 1} | ({"the weights": len(parameters)} if shard == "states" else {})
        assert sum(sent["all_reduce"]) == weights
    assert sum(sent["broadcast"]) == (0 if shard == "none" else weights)
