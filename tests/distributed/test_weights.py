"""FSDP2: weights in parts, ranks with different numbers of passes, the same updates and the same checkpoint."""

import multiprocessing

import pytest
import torch

from tests.distributed import cases, weight_cases

HOW = {
    "engine": "transformers", "packing": "padded", "adam": True, "adam_epsilon": 1e-2, "tokens_per_microbatch": 40,
    "groups_per_minibatch": 2, "max_completion_length": 9,
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_the_same_steps_as_with_whole_weights(pool, tied):
    reports, _, weights, completions = pool.run(cases.language, 2, tied=tied, **HOW)[0]
    found = pool.run(weight_cases.divided, 2, tied=tied, **HOW)
    for others, moved, _, texts, local in found:
        assert texts == completions and len({len(text) for step in texts for text in step}) > 1
        for mine, theirs in zip(reports, others, strict=True):
            assert theirs["reward"] == mine["reward"] if "reward" in mine else True
            if "grad_norm" in mine:
                assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-7)
        assert local < 0.6 * sum(p.numel() for p in weights.values())
        for name, weight in moved.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-7, atol=1e-9)
    assert set(found[0][1]) == set(weights)
    moments = found[0][2]
    assert all(x.shape == weights[name].shape for name, x in zip(weights, moments, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_taken_up_by_parts(pool, dtype):
    whole, again = pool.run(weight_cases.resumed, 2, dtype=dtype, **HOW)[0]
    assert whole.keys() == again.keys()
    for name, array in whole.items():
        assert torch.equal(array, again[name]), name


def test_what_needs_whole_weights_is_refused(pool):
    for settings, said in (
        ({"lora_rank": 4}, "an adapter"),
        ({"beta": 0.1}, "a KL to a reference (beta above 0)"),  # presets have one, which cannot be left out
        ({"warm_start_steps": 2}, "warm_start_steps above 0"),
        ({"engine": "inline"}, "engine=inline"),
    ):
        (words, _) = pool.run(weight_cases.refused, 2, **settings)
        assert f"shard=weights cannot be used with {said}" in words and "shard=gradients" in words
    (words, _) = pool.run(weight_cases.refused_elsewhere, 2)
    assert "shard=weights divides language models" in words


@pytest.mark.parametrize(
    ("where", "at"),
    [("sampling", "collecting"), ("scoring", "collecting"), ("forward", "an update"), ("backward", "an update")],
)
def test_a_rank_without_memory_ends_all_of_them_with_its_name_and_the_remedy(tmp_path, pool, where, at):
    start = multiprocessing.get_context("forkserver")
    ranks = [start.Process(target=weight_cases.out_of_memory, args=(rank, str(tmp_path), where)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [3, 3]
    other, own = ((tmp_path / f"rank-{rank}").read_text() for rank in range(2))
    assert own.startswith("out of memory at ") and at in own and "lower tokens_per_microbatch" in own
    assert other.startswith("rank 0 lost the others") and f"rank 1: {own}" in other
