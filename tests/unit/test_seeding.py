"""Seeds: the numbers that runs were begun with, and that streams do not meet."""

import pytest
import torch

from grpo.seeding import derive, generator, mixed, rounding_seed, start_seeds, update_generator


def test_each_way_keeps_the_numbers_that_older_runs_began_with():
    assert derive(0, 0, "train") == 344891775994632878
    assert update_generator(3, 4, -1).initial_seed() == 9113132700282638415
    assert start_seeds([3, 4, 0], 3, held_out=False) == [1373224434, 1895773922, 1527087902]
    assert start_seeds([3, 4, 3], 3, held_out=True) == [513635487, 1960379481, 1927530039]
    assert mixed(1, 2, 3) == 6498626229777268288
    assert generator(3, 4, 0).integers(0, 1000, 3).tolist() == [8, 898, 584]
    assert rounding_seed(2, 5, 0) == 2_000_011


@pytest.mark.parametrize("key", [[0], [0, 1, 2], [2**40, 7, 1_000_003]])
def test_no_start_is_both_trained_on_and_held_out(key):
    assert all(seed % 2 == 0 for seed in start_seeds(key, 50, held_out=False))
    assert all(seed % 2 == 1 for seed in start_seeds(key, 50, held_out=True))


def test_passes_and_minibatches_draw_apart():
    drawn = [
        torch.rand(1, generator=update_generator(0, step, stream)).item()
        for step in (0, 1)
        for stream in (-2, -1, 0, 1)
    ]
    assert len(set(drawn)) == len(drawn)
