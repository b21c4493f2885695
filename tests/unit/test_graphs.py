"""Graphs on a device that is made up: where they are captured, when they are void, and what is left when one fails."""

from contextlib import contextmanager

import pytest
import torch

from grpo.graphs import PLAIN, GraphedCallable

DEVICE = torch.device("cuda", 1)
"""Not the current one."""


class Weight:
    """A tensor of one number on that device, as far as anybody looks."""

    is_cuda, device = True, DEVICE

    def __init__(self, number):
        self.x = torch.tensor(float(number))

    def data_ptr(self):
        return self.x.data_ptr()


class Stream:
    def __init__(self, device=None):
        self.device = device

    def wait_stream(self, other):
        assert other.device == self.device


@pytest.fixture
def device(monkeypatch):
    """What happened there, in order. A graph plays the work that ran between its ends, if that was on its stream."""
    told, current = [], []

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            told.append(("begin", current[-1].device))

        def capture_end(self):
            told.append(("end", current[-1].device))

        def replay(self):
            told.append("play")

    @contextmanager
    def stream(of):
        current.append(of)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("room"))
    return told


def tried(work, count, size=1):
    for _ in range(count):
        work({"x": torch.ones(size)})


def test_work_is_captured_on_its_own_device_with_room_made_before(device):
    weight = Weight(2)
    work = GraphedCallable(lambda given: {"y": given["x"] * weight.x}, lambda: [weight])
    tried(work, PLAIN)
    assert device == [] and len(work) == 0
    tried(work, 2)
    assert device == ["room", ("begin", DEVICE), ("end", DEVICE), "play", "play"] and len(work) == 1


def test_a_tensor_that_moved_makes_graphs_void(device):
    weights = [Weight(2)]
    work = GraphedCallable(lambda given: {"y": given["x"] * weights[0].x}, lambda: weights)
    tried(work, PLAIN + 1)
    weights[0].x.fill_(3)
    tried(work, 1)
    assert len(work) == 1
    weights[0] = Weight(4)
    assert work({"x": torch.ones(1)})["y"].tolist() == [4.0] and len(work) == 0


def test_a_capture_that_fails_leaves_none_that_hold_memory(device):
    weight, full = Weight(2), []

    def found(given):
        if full and device[-1][0] == "begin":
            raise torch.OutOfMemoryError("no room")
        return {"y": given["x"] * weight.x}

    work = GraphedCallable(found, lambda: [weight])
    tried(work, PLAIN + 1)
    assert len(work) == 1
    full.append(True)
    tried(work, PLAIN, size=2)
    with pytest.warns(UserWarning, match="without CUDA graphs, .*no room"):
        assert work({"x": torch.ones(2)})["y"].tolist() == [2.0, 2.0]
    assert len(work) == 0 and device[-1] == ("end", DEVICE)
    tried(work, PLAIN + 1)
    assert device[-1] == ("end", DEVICE)


def test_without_a_device_only_the_first_tensor_is_asked_for():
    asked = []

    def uses():
        for number in range(3):
            asked.append(number)
            yield torch.ones(1)

    work = GraphedCallable(lambda given: given, uses)
    tried(work, 5)
    assert asked == [0] * 5
    tried(GraphedCallable(lambda given: given, uses, wanted=False), 5)
    assert len(asked) == 5
