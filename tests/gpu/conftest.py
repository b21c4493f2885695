"""Each test on a GPU begins alike: the same random numbers, nothing of its predecessors in memory, float32 as it is."""

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def alike():
    """A collection in the middle of a test that measures memory would free what others left, and look like its own."""
    torch.manual_seed(0)
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before  # a world model's trainer sets them
