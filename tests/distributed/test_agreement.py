"""Every decision follows from what all ranks know; who knows something else is named."""

import itertools

import pytest
import torch

from grpo.errors import ConfigError, PassUnfinished, RankFailed, RanksLost
from grpo.protocols import Alone
from grpo.rollouts import Rollouts
from grpo.run.files import FolderError
from grpo.together import attempted, shares
from tests.distributed import cases


@pytest.mark.parametrize("who", [1, 2])
def test_a_planted_difference_is_caught_in_its_step_and_named(pool, who):
    for message, untouched in pool.run(cases.planted, 3, who=who):
        assert f"rank {who} has other decisions and advantages" in message and untouched


def test_draws_that_differ_are_named(pool):
    assert all("rank 1 has other states or actions" in message for message in pool.run(cases.other_draws, 2))


@pytest.mark.parametrize("column", ["prompt", "answer"])
def test_rows_that_differ_are_named_before_anything_is_learned_from_them(pool, column):
    assert all(
        "rank 1 has other prompts or answers" in said for said in pool.run(cases.other_rows, 2, who=1, column=column)
    )


def test_a_rank_that_fails_is_named_by_the_others(pool):
    mine, theirs = pool.run(cases.failing, 2, who=1)[::-1]
    assert mine == ("KeyError", "'no such judge'")
    assert theirs[0] == "RankFailed" and "rank 1 failed at collecting: KeyError: 'no such judge'" in theirs[1]


@pytest.mark.parametrize(
    ("kind", "others"), [(FolderError, ConfigError), (ConfigError, ConfigError), (OSError, RankFailed)]
)
def test_what_the_chief_refuses_every_rank_refuses(pool, kind, others):
    """Else the exit code of a run would be that of whichever rank ends first."""
    (own, words), *rest = pool.run(cases.chief_fails, 3, kind=kind)
    assert own is kind and words == "there is no such folder"
    for found, words in rest:
        assert found is others and words.startswith("rank 0 failed at opening it: ")
        assert words.endswith("there is no such folder") and "FolderError" not in words


@pytest.mark.parametrize("settings", [{}, {"groups_per_minibatch": 1, "num_iterations": 2, "rows_per_microbatch": 2}])
def test_all_ranks_make_the_same_calls_and_none_between_passes(pool, settings):
    found = pool.run(cases.recorded, 3, **settings)
    calls = [[call for call in one if call != "pass"] for one in found]
    assert calls[0] == calls[1] == calls[2]
    for one in found:
        runs = [(name, len(list(same))) for name, same in itertools.groupby(one)]
        after = [runs[i + 1][0] for i, (name, _) in enumerate(runs) if name == "pass"]
        assert set(after) == {"gather the passes"}
    updates = sum("sum" in call for call in calls[0])
    # Once: the policies are compared. A step: collecting and comparing. An update: one gather, one sum.
    assert len(calls[0]) == 2 + 2 * 2 + 2 * updates


@pytest.mark.parametrize("who", [0, 1])
def test_memory_that_ends_on_one_rank(pool, who):
    alone = pool.run(cases.bandit, 1, double=True, steps=2)[0]
    for reports, gradients, weights in pool.run(cases.out_of_memory, 2, who=who):
        assert reports[0]["microbatch_halvings"] == 1.0
        torch.testing.assert_close(gradients, alone[1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(weights, alone[2], rtol=1e-12, atol=1e-12)


def test_what_is_not_finite_on_one_rank_moves_nobody(pool):
    for reports, gradients, _ in pool.run(cases.not_a_number, 2, who=1):
        assert [report["updates"] for report in reports] == [1.0, 0.0, 1.0] and len(gradients) == 2


def ragged(groups, most=300):
    """Groups of four rows of one to so many decisions."""
    length_N = torch.randint(1, most, (4 * groups,), generator=torch.Generator().manual_seed(0))
    mask_NT = torch.arange(most) < length_N[:, None]
    return Rollouts(torch.arange(groups).repeat_interleave(4), mask_NT, -mask_NT.float(), reward_N=length_N.float())


@pytest.mark.parametrize(("size", "groups"), [(1, 5), (2, 5), (3, 1), (8, 128), (64, 512), (1024, 512), (1024, 4096)])
def test_shares_have_every_row_once_and_about_as_many_decisions(size, groups):
    rows = ragged(groups)
    found = shares(rows, size)
    assert sorted(row for share in found for row in share) == list(range(len(rows)))
    cost_N = (rows.mask_NT.sum(1) + 1).tolist()
    loads = [sum(cost_N[row] for row in share) for share in found]
    piece = max(sum(cost_N[4 * g : 4 * g + 4]) for g in range(groups))
    assert max(loads) <= sum(loads) / size + min(piece, max(sum(loads) / size, max(cost_N)))
    whole = [shares(rows, size, cut=False)]  # as a teacher is asked, which may show a try to its group
    for shared in whole + ([found] if piece <= sum(loads) / size else []):  # nobody has to be cut
        owner = {row: rank for rank, share in enumerate(shared) for row in share}
        assert all(owner[row] == owner[row - row % 4] for row in range(len(rows)))


OTHERS = RanksLost("rank 0 lost the others: rank 1 is gone")


@pytest.mark.parametrize(
    ("lost", "wrong", "kind", "said"),
    [
        (OTHERS, torch.OutOfMemoryError("no more"), torch.OutOfMemoryError, "^no more$"),
        (OTHERS, RuntimeError("gloo: closed"), RanksLost, "rank 1 is gone"),
        (
            PassUnfinished("x", "less", OTHERS),
            torch.OutOfMemoryError("no more"),
            RanksLost,
            "^out of memory at x,.*less",
        ),
        (PassUnfinished("x", "less", OTHERS), RuntimeError("gloo: closed"), RanksLost, "rank 1 is gone"),
        (PassUnfinished("x", "less", OTHERS), ValueError("a bug"), ValueError, "^a bug$"),
    ],
)
def test_a_pass_that_others_wait_in_is_spoken_of_only_where_there_is_one(lost, wrong, kind, said):
    """The others are gone, and something went wrong here, too: what is told is the reason."""

    class Leaving(Alone):
        def gather(self, mine, what):
            raise lost

    def work():
        raise wrong

    with pytest.raises(kind, match=said):
        attempted(Leaving(), "x", work)
