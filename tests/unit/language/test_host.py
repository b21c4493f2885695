"""What layers keep on the host: there and back, memory used again, and what a setting needs."""

import gc

import pytest
import torch

from grpo.config import ConfigError
from grpo.language.scoring import host
from grpo.language.scoring.host import HostMemory, Piece, free_bytes
from grpo.language.scoring.policy import LanguagePolicy
from grpo.language.scoring.probe import make_scorer
from tests.unit.language.tiny import tiny_model

CPU = torch.device("cpu")


def layer(number):
    random = torch.Generator().manual_seed(number)
    return [torch.randn(5, 3, generator=random).bfloat16(), torch.randn(7, generator=random)]


def test_what_was_put_is_taken_in_reverse_and_only_neighbours_are_here():
    memory = HostMemory(CPU)
    offload = memory.begin(4)
    for number in range(4):
        offload.put(number, layer(number))
        assert set(offload._here) <= {number - 1, number}
    for number in (3, 2, 1, 0):
        for found, expected in zip(offload.take(number), layer(number), strict=True):
            assert torch.equal(found, expected) and found.dtype == expected.dtype
        assert set(offload._here) <= {3, number - 1}


def test_memory_is_used_again_and_two_passes_at_once_have_their_own():
    memory = HostMemory(CPU)
    first, second = memory.begin(2), memory.begin(2)
    for offload, shift in ((first, 0), (second, 10)):
        for number in range(2):
            offload.put(number, layer(number + shift))
    assert torch.equal(first.take(0)[0], layer(0)[0]) and torch.equal(second.take(0)[0], layer(10)[0])
    del first, second, offload
    gc.collect()
    assert len(memory.free) == 2 and memory.held > 0
    where = {pieces[0].bytes.data_ptr() for pieces in memory.free}
    again = memory.begin(2)
    again.put(0, layer(0))
    assert again._pieces[0].bytes.data_ptr() in where
    again.put(0, [torch.zeros(1000)])  # more than there was room for
    assert len(again._pieces[0].bytes) >= 4000


def test_a_container_s_limit_counts(tmp_path, monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 100 kB\n",
        "memory.max": "50000",
        "memory.current": "20000",
    }

    class Path:
        def __init__(self, name):
            self.name = name if name.startswith("/proc") else name.rpartition("/")[2]

        def read_text(self, encoding):
            return files[self.name]

    monkeypatch.setattr(host, "Path", Path)
    assert free_bytes() == 30_000
    files["memory.max"] = "max\n"
    assert free_bytes() == 102_400


def test_offloading_is_refused_where_layers_are_not_by_hand():
    model = tiny_model()
    with pytest.raises(ConfigError, match="activation_offloading needs a GPU"):
        LanguagePolicy(model, make_scorer(model, 1.0), offloading=True)


def test_memory_that_cannot_be_pinned_is_used_as_it_is_and_said(monkeypatch):
    class Runtime:
        def cudaHostRegister(self, *_):
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    with pytest.warns(UserWarning, match="cannot be pinned"):
        piece = Piece(64, torch.device("cuda"))
    assert len(piece.bytes) == 64
