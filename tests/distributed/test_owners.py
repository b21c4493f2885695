"""Optimizer states and gradients with one owner each: the same updates, less of them kept."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from grpo.distributed.group import Group
from grpo.distributed.owners import GradientOwners, owned
from tests.distributed import cases as ranks_cases
from tests.distributed import owner_cases as cases


@pytest.fixture(scope="module")
def alone(pool):
    return {tied: pool.run(cases.updated, 1, kind="none", tied=tied)[0] for tied in (True, False)}


@pytest.mark.parametrize("kind", ["states", "gradients"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_the_same_updates_as_one_process(pool, alone, kind, tied, size):
    weights, norms, state, _ = alone[tied]
    found = pool.run(cases.updated, size, kind=kind, tied=tied)
    for others, measured, _, _ in found:
        assert measured == pytest.approx(norms, rel=1e-12)
        for name, p in weights.items():
            torch.testing.assert_close(others[name], p, rtol=1e-12, atol=1e-14)
            assert torch.equal(others[name], found[0][0][name])
    whole = found[0][2]
    assert whole["param_groups"] == state["param_groups"] and list(whole["state"]) == list(state["state"])
    for number, entry in state["state"].items():
        assert list(whole["state"][number]) == list(entry)
        for name, value in entry.items():
            torch.testing.assert_close(whole["state"][number][name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["states", "gradients"])
def test_less_is_kept(pool, alone, kind):
    everything = alone[False][3]
    each = [kept for *_, kept in pool.run(cases.updated, 3, kind=kind, tied=False)]
    assert sum(states for _, states, _ in each) == everything[1]
    gradients = [gradient for gradient, _, _ in each]
    assert sum(gradients) == everything[0] if kind == "gradients" else gradients == [everything[0]] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_out_of_memory_in_the_middle_of_an_update(pool, alone, rank):
    found = pool.run(cases.updated, 3, kind="gradients", tied=True, fails=(1, rank))
    assert [again for *_, (_, _, again) in found] == [0 if other == rank else 1 for other in range(3)]
    for name, p in alone[True][0].items():
        torch.testing.assert_close(found[rank][0][name], p, rtol=1e-12, atol=1e-14)


def test_a_rank_that_fails_in_a_pass_is_not_waited_for(pool):
    said = pool.run(cases.failed, 3, kind="gradients")
    assert said[1] == "failed" and all("RankFailed" in said[rank] for rank in (0, 2))


@pytest.mark.parametrize("kind", ["states", "gradients"])
def test_everybody_raises_at_once_where_one_rank_s_pass_fails(pool, kind):
    said = pool.run(cases.failed_update, 3, kind=kind)
    assert said[1] == "ValueError: on purpose" and all("RankFailed" in said[rank] for rank in (0, 2))


@pytest.mark.parametrize("kind", ["states", "gradients"])
def test_a_checkpoint_of_one_process_is_taken_up_by_three(pool, alone, kind):
    state = alone[True][2]
    found = pool.run(cases.resumed, 3, kind=kind, state=state)
    assert sum(kept for _, kept in found) == len(state["state"])
    for number, entry in state["state"].items():
        for name, value in entry.items():
            assert torch.equal(found[0][0]["state"][number][name], value)


def test_owners_have_about_as_much_each():
    sizes = [1000, 10, 10, 10, 500, 500, 3]
    owners = owned(sizes, 2)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(2)]
    assert max(loads) - min(loads) <= 30
    assert owned([5], 3) == [0] and owned([], 3) == []


@pytest.mark.slow
def test_steps_of_a_language_model(pool):
    """In several passes of a few tokens; a rank may have none in a minibatch. Against ranks that divide nothing."""
    how = {"tied": True, "tokens_per_microbatch": 40, "groups_per_minibatch": 1, "evaluate": False}
    reports, _, weights, completions = pool.run(ranks_cases.language, 3, **how)[0]
    for kind in ("states", "gradients"):
        for others, _, moved, texts in pool.run(ranks_cases.language, 3, shard=kind, **how):
            assert texts == completions and len(others) == len(reports)
            assert others[-1]["grad_norm"] == pytest.approx(reports[-1]["grad_norm"], rel=1e-12)
            for name, weight in weights.items():
                torch.testing.assert_close(moved[name], weight, rtol=1e-12, atol=1e-12)


@pytest.fixture
def fake():
    """Several ranks of which this process is any: PyTorch's own group without a network."""

    def made(rank, size):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        return Group(dist.group.WORLD, dist.group.WORLD)

    yield made
    dist.destroy_process_group()


SEVEN_BILLION = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                 "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False}  # fmt: skip


def test_a_model_of_7_billion_fits_25_gb_of_each_of_8_gpus(fake):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen2Config(**SEVEN_BILLION), dtype=torch.bfloat16
        )
    parameters = dict(model.named_parameters())
    weights = 2 * sum(p.numel() for p in parameters.values())
    assert 15.2e9 < weights < 15.3e9
    most = 0
    for rank in range(8):
        owners = GradientOwners(fake(rank, 8), parameters)
        own = sum(p.numel() for p in parameters.values() if owners.mine(p))
        most = max(most, weights + own * (2 + 4 + 4))  # bfloat16 gradients, two float32 moments
    assert most <= 25e9


def test_messages_are_the_same_whatever_the_order_of_gradients(fake):
    class Told(Group):
        def _call(self, what, *given, **how):
            self.calls = [*getattr(self, "calls", []), what]
            super()._call(what, *given, **how)

    sent = []
    for rank in (0, 1):
        fake(rank, 8)
        group = Told(dist.group.WORLD, dist.group.WORLD)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        owners = GradientOwners(group, dict(model.named_parameters()))
        owners.backward(model(torch.ones(1, 3)).sum() if rank else model[1](torch.ones(1, 4)).sum())
        sent.append(group.calls)
    assert sent[0] == sent[1] == ["the next pass", *["a gradient"] * 4]
