"""An exported policy gives the same actions elsewhere, and a file that does not is never there."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from torch import nn

from grpo.control import export
from grpo.control.export import Greedy, export_onnx
from grpo.control.networks import make_network, tensors
from grpo.envs import spaces
from grpo.envs.heads import make_head

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

VECTOR = gs.Box(-1, 1, (4,))
MIXED = gs.Dict(
    {
        "direction": gs.Discrete(4),
        "image": gs.Box(0, 255, (7, 7, 3), np.uint8),
        "inner": gs.Dict({"x": gs.Box(-9, 9, (2,))}),
    }
)


def policy(space, action_space, kind="auto", memory=0, **scaling):
    head = make_head(action_space, kind)
    network = make_network(space, head.size, hidden=(16,), memory=memory)
    last = network.out if memory else network.layers[-1]
    nn.init.orthogonal_(last.weight, 2.0, generator=torch.Generator().manual_seed(0))
    return Greedy(network, head, **scaling)


def rows(space, count):
    space.seed(count)
    return spaces.stack([space.sample() for _ in range(count)], space)


def run(path, **inputs):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, inputs)


@pytest.mark.parametrize(
    ("action_space", "kind"),
    [
        (gs.Discrete(3, start=5), "auto"),
        (gs.Box(-1, 3, (2,)), "beta"),
    ],
)
def test_the_greedy_action_is_the_same_for_any_batch_and_the_policy_as_it_was(tmp_path, action_space, kind):
    module = policy(VECTOR, action_space, kind)
    weight = module.network.layers[0].weight
    path = export_onnx(module, tensors(rows(VECTOR, 2)), tmp_path / "policy.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["policy.onnx"]
    assert module.training and module.network.layers[0].weight is weight and weight.requires_grad
    for count in (1, 2, 9):
        observation = rows(VECTOR, count)
        action, out = run(path, observation=observation)
        with torch.no_grad():
            expected = module.network(torch.from_numpy(observation)).numpy()
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
        played = module.head.to_env(module.head.mode(expected))
        assert action.dtype == played.dtype
        np.testing.assert_allclose(action, played, rtol=1e-4, atol=1e-5)
        assert all(action_space.contains(one) for one in action)


def test_a_dict_goes_in_by_name_and_is_scaled_where_it_should(tmp_path):
    scaling = {
        "mean": {"inner": {"x": np.array([1.0, 2.0])}},
        "std": {"inner": {"x": np.array([0.5, 4.0])}},
        "clip": 2.0,
    }
    module = policy(MIXED, gs.Discrete(3), **scaling)
    path = export_onnx(module, tensors(rows(MIXED, 2)), str(tmp_path / "policy.onnx"))
    seen = rows(MIXED, 6)
    flat = {"direction": seen["direction"], "image": seen["image"], "inner/x": seen["inner"]["x"]}
    action, out = run(path, **flat)
    scaled = np.clip((seen["inner"]["x"] - [1.0, 2.0]) / [0.5, 4.0], -2, 2).astype(np.float32)
    with torch.no_grad():
        expected = module.network(tensors(seen | {"inner": {"x": scaled}}))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    assert action.tolist() == expected.argmax(-1).tolist()


def test_a_memory_goes_in_and_out(tmp_path):
    module = policy(VECTOR, gs.Discrete(3), memory=5)
    path = export_onnx(module, tensors(rows(VECTOR, 2)), tmp_path / "policy.onnx", hidden=module.network.initial(2))
    episode = rows(VECTOR, 4)
    with torch.no_grad():
        expected, _ = module.network(torch.from_numpy(episode)[None])
    hidden = np.zeros((1, 5), np.float32)
    for t in range(4):
        _, out, hidden = run(path, observation=episode[t : t + 1], hidden=hidden)
        np.testing.assert_allclose(out[0], expected[0, t], rtol=1e-4, atol=1e-5)


def test_a_file_that_disagrees_is_never_written(tmp_path, monkeypatch):
    class Wrong:
        def __init__(self, *_, **__):
            pass

        def run(self, names, inputs):
            return [np.zeros(32, np.int64), np.full((32, 3), 9.0, np.float32)]

    written = SimpleNamespace(model_proto=SimpleNamespace(SerializeToString=lambda: b"a graph"))
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: written)
    monkeypatch.setattr(onnxruntime, "InferenceSession", Wrong)
    (tmp_path / "policy.onnx").write_text("the last good one")
    with pytest.raises(
        RuntimeError, match=r"policy.onnx is not written: onnxruntime's \w+ differs from the policy's by"
    ):
        export_onnx(policy(VECTOR, gs.Discrete(3)), tensors(rows(VECTOR, 2)), tmp_path / "policy.onnx")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["the last good one"]


@pytest.mark.parametrize("name", ["onnxruntime", "onnxscript"])
def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"needs {name}: pip install 'anygrpo\[export\]'"):
        export.export_onnx(policy(VECTOR, gs.Discrete(3)), tensors(rows(VECTOR, 2)), tmp_path / "policy.onnx")
