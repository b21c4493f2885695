"""Comparing where two trainings went."""

import torch


def weights(parameters):
    """All of them in one vector."""
    return torch.cat([p.detach().double().flatten() for p in parameters])


def same_way(first, one, two, most=0.1):
    """From `first` they went the same way.

    Single weights do not tell: Adam makes a whole step of a gradient that is nothing but rounding, either way.
    """
    ways = one - first, two - first
    assert (ways[0] - ways[1]).norm() < most * ways[0].norm() > 0
