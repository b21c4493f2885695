"""Ranks over torch.distributed: what one gives, all get."""

import numpy as np
import pytest
import torch

from grpo.distributed.wire import packed, unpacked
from grpo.protocols import State
from tests.distributed import cases


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_one_gives_all_get(pool, size):
    for gathered, told, summed in pool.run(cases.calls, size):
        assert [state.values["rank"] for state in gathered] == list(range(size))
        assert all(np.isnan(state.values["nan"]) and state.values["text"] == "ä" for state in gathered)
        for rank, state in enumerate(gathered):
            assert state.arrays["ids"].tolist() == list(range(rank)) and state.arrays["ids"].dtype == torch.int32
            assert state.arrays["half"].dtype == torch.bfloat16 and bool((state.arrays["half"] == rank).all())
            assert isinstance(state.arrays["mask"], np.ndarray) and state.arrays["mask"].tolist() == [[True, False]]
            assert state.arrays["number"].shape == () and float(state.arrays["number"]) == 3.5
        assert told.values == {"chief": 0} and told.arrays["x"].tolist() == [0, 1, 2, 3, 4]
        assert summed[0].tolist() == [sum(range(1, size + 1))] * 3 and bool((summed[1] == size).all())


def test_a_record_takes_as_many_bytes_as_its_arrays_and_a_header():
    rows, tokens = 64, 256
    arrays = {"ids": torch.zeros(rows * tokens, dtype=torch.int32), "logp": torch.zeros(rows * tokens)}
    arrays["mask"] = torch.ones(rows * tokens, dtype=torch.bool)
    sent = packed(State({"step": 3}, arrays))
    assert len(sent) / (rows * tokens) < 9.1
    assert unpacked(sent).values == {"step": 3}
