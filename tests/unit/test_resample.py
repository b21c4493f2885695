"""Starts that are asked for again."""

import numpy as np
import torch

from grpo.protocols import Collected, CollectRequest
from grpo.resample import resample
from grpo.rollouts import Rollouts


def tries(starts, value):
    count = len(starts)
    rollouts = Rollouts(
        group_N=torch.arange(count).repeat_interleave(2),
        mask_NT=torch.ones(2 * count, 1, dtype=torch.bool),
        old_logp_NT=torch.zeros(2 * count, 1),
        reward_N=torch.full((2 * count,), float(value)),
        inputs=[start for start in starts for _ in range(2)],
    )
    return Collected(rollouts, starts)


def play(good, most, step=5, attempt=2):
    """Tries from a, b and c; attempt n is worth it for the starts of good[n]."""
    asked = []

    def collect(request):
        asked.append(request)
        return tries(request.starts, request.attempt)

    def worth(rollouts):
        number = len(asked)
        groups = zip(rollouts.group_N.tolist(), rollouts.inputs, strict=True)
        return {group for group, start in groups if start in good[number]}

    request = CollectRequest(step, attempt)
    return resample(tries(["a", "b", "c"], attempt), request, worth, collect, most), asked


def test_groups_keep_the_place_of_their_start():
    found, asked = play(["b", "", "ac"], most=9)
    assert [(request.step, request.attempt, request.starts) for request in asked] == [
        (5, 3, ["a", "c"]),
        (5, 4, ["a", "c"]),
    ]
    assert found.rollouts.group_N.tolist() == [1, 1, 0, 0, 2, 2] and found.rollouts.inputs == list("bbaacc")
    assert (found.attempts, found.missing, found.none_kept) == (3, 0, False)


def test_attempts_run_out():
    found, asked = play(["", "c", "", ""], most=3)
    assert len(asked) == 2 and found.rollouts.inputs == list("cc") and found.rollouts.group_N.tolist() == [2, 2]
    assert (found.attempts, found.missing, found.none_kept) == (3, 2, False)


def test_where_nothing_is_worth_it_the_last_tries_stay():
    found, _ = play(["", "", ""], most=2)
    assert found.none_kept and found.missing == 3
    assert found.rollouts.group_N.tolist() == [0, 0, 1, 1, 2, 2] and set(found.rollouts.reward_N.tolist()) == {3.0}


def test_other_arrays_do_as_well():
    first = tries(["a", "b"], 0)
    arrays = {
        name: np.asarray(getattr(first.rollouts, name)) for name in ("group_N", "mask_NT", "old_logp_NT", "reward_N")
    }
    found = resample(
        Collected(Rollouts(**arrays), first.starts), CollectRequest(0), lambda _: {1}, lambda request: first, 1
    )
    assert found.rollouts.group_N.tolist() == [1, 1]
