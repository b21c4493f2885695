"""Our core gives the numbers other people's code gave. Adapters rename, reshape and choose options; see README.md."""

from __future__ import annotations

import numpy as np
import pytest

from tests.golden.backends import plain
from tests.golden.peers import ADAPTERS, DEVIATIONS


def test_reproduces(vector, backend):
    if vector.id[2:] in DEVIATIONS.get(vector.file, {}):
        pytest.xfail(DEVIATIONS[vector.file][vector.id[2:]])
    case = ADAPTERS[vector.file](vector, backend)
    compared = 0
    for name, expected in vector.outputs.items():
        if name not in case:
            continue
        expected = case.expect(name, expected)
        if isinstance(expected, dict):
            got, want = case[name], {key: value for key, value in expected.items() if key in case[name]}
            for key in want:  # float32 averages in most peers
                np.testing.assert_allclose(_numpy(got[key]), plain(want[key]), rtol=2e-6, atol=1e-6, err_msg=key)
        else:
            np.testing.assert_allclose(_numpy(case[name]), plain(expected), **vector.tolerance, err_msg=name)
            compared += 1
    assert compared, f"nothing of {list(vector.outputs)} was compared"
    missing = [name for name in vector.outputs if name not in case and not name.endswith("metrics")]
    if backend.differentiates:
        assert not missing, f"not computed: {missing}"
    else:
        assert all(name.startswith("grad") for name in missing), f"not computed: {missing}"


def _numpy(x):
    return x.detach().numpy() if hasattr(x, "detach") else np.asarray(x)
