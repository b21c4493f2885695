"""A trained policy as an ONNX file, for places without this library: observation in, greedy action out.

Scaling, network and head become one graph. The file gets its name only after onnxruntime has given the same numbers.

Letters: B observations, F numbers of the network.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from grpo.control.policy import ActorPolicy
from grpo.control.scaling import LIMIT, Scaling
from grpo.envs.fleet import Tree
from grpo.envs.heads import Head
from grpo.envs.spaces import leaf, stack
from grpo.run.files import write_atomic

_ROWS = 32
"""Observations on which the file must agree with the module."""
_RTOL, _ATOL = 1e-4, 1e-5


def export_policy(policy: ActorPolicy, scaling: Scaling, space: gym.Space[Any], path: Path) -> Path:
    """The greedy policy, scaling included, checked on observations of this space."""
    mean, std = scaling.tree()
    greedy = Greedy(policy.network, policy.head, mean, std, LIMIT, policy.columns.size)
    space = copy.deepcopy(space)
    space.seed(0)
    example = policy.tensors(stack([space.sample() for _ in range(_ROWS)], space))
    return export_onnx(greedy, example, path, policy.begin(_ROWS))


class Greedy(nn.Module):
    """Observation → (action in the environment's units, the network's numbers); with a memory, that goes in and out.

    `mean` and `std` are trees like the observation, of arrays that broadcast with its leaves; a leaf they leave out is
    not scaled, and None scales nothing. `clip` limits scaled values on both sides. The action of a policy with chunks
    is (B, chunk, …).
    """

    def __init__(
        self,
        network: nn.Module,
        head: Head,
        mean: Tree = None,
        std: Tree = None,
        clip: float | None = None,
        chunk: int = 1,
    ) -> None:
        super().__init__()
        self.network, self.head, self._clip, self._chunk = network, head, clip, chunk
        self._paths = [] if mean is None else _paths(mean)
        for at, path in enumerate(self._paths):
            self.register_buffer(f"mean_{at}", torch.tensor(np.asarray(leaf(mean, path)), dtype=torch.float32))
            self.register_buffer(f"std_{at}", torch.tensor(np.asarray(leaf(std, path)), dtype=torch.float32))

    def forward(self, observation: Tree, hidden: Tensor | None = None) -> tuple[Tensor, ...]:
        """Of B observations: (action, out), or (action, out, hidden) where `hidden` (B, memory) is given."""
        scaled = self._scaled(observation, ())
        if hidden is None:
            out = self.network(scaled)
            return self._greedy(out), out
        out_B1F, hidden = self.network(_one_decision(scaled), hidden)
        return self._greedy(out_B1F[:, 0]), out_B1F[:, 0], hidden

    def _greedy(self, out_BF: Tensor) -> Tensor:
        if self._chunk == 1:
            return self.head.greedy(out_BF)
        action = self.head.greedy(out_BF.reshape(-1, self.head.size))
        return action.reshape(-1, self._chunk, *action.shape[1:])

    def _scaled(self, observation: Tree, path: tuple[str, ...]) -> Tree:
        if isinstance(observation, dict):
            return {key: self._scaled(part, (*path, key)) for key, part in observation.items()}
        if path not in self._paths:
            return observation
        at = self._paths.index(path)
        scaled = (observation - self.get_buffer(f"mean_{at}")) / self.get_buffer(f"std_{at}")
        return scaled if self._clip is None else scaled.clamp(-self._clip, self._clip)


class _ByLeaf(nn.Module):
    """A module that takes a tree, called with the tree's leaves and then its other inputs: ONNX knows no dicts."""

    def __init__(self, module: nn.Module, paths: list[tuple[str, ...]]) -> None:
        super().__init__()
        self.module, self._paths = module, paths

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        count = len(self._paths)
        tree: Tree = inputs[0] if self._paths == [()] else {}
        for path, tensor in zip(self._paths, inputs[:count], strict=True):
            at = tree
            for key in path[:-1]:
                at = at.setdefault(key, {})
            if path:
                at[path[-1]] = tensor
        return self.module(tree, *inputs[count:])


@torch.no_grad()
def export_onnx(policy_module: nn.Module, example: Tree, path: str | Path, hidden: Tensor | None = None) -> Path:
    """Write a module like `Greedy` for batches of any size; `example` (and `hidden`) are two rows of what it takes.

    Inputs are named after the observation's keys ("observation" where it has none), and "hidden"; outputs "action",
    "out", and "next_hidden".
    """
    try:
        onnxruntime = [importlib.import_module(name) for name in ("onnx", "onnxscript", "onnxruntime")][-1]
    except ImportError as error:
        raise ImportError(f"exporting a policy needs {error.name}: pip install 'anygrpo[export]'") from error
    paths = _paths(example)
    memory = [] if hidden is None else [("hidden", hidden)]
    named = [("/".join(keys) or "observation", leaf(example, keys)) for keys in paths] + memory
    names, inputs = [name for name, _ in named], tuple(torch.as_tensor(value).cpu() for _, value in named)
    outputs = ["action", "out"] + [f"next_{name}" for name, _ in memory]
    module = _ByLeaf(copy.deepcopy(policy_module), paths).cpu().eval()
    batch = {0: torch.export.Dim("batch")}
    with _quiet():
        program = torch.onnx.export(
            module,
            inputs,
            input_names=names,
            output_names=outputs,
            dynamic_shapes=((batch,) * len(inputs),),
            dynamo=True,
            verbose=False,
        )
    content = program.model_proto.SerializeToString()  # type: ignore[union-attr]
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    rows = _random_like(inputs)
    found = session.run(outputs, {name: row.numpy() for name, row in zip(names, rows, strict=True)})
    for name, mine, theirs in zip(outputs, module(*rows), found, strict=True):
        if not np.allclose(mine.numpy(), theirs, rtol=_RTOL, atol=_ATOL):
            gap = np.abs(mine.numpy() - theirs).max()
            raise RuntimeError(f"{path} is not written: onnxruntime's {name} differs from the policy's by {gap:g}")
    write_atomic(Path(path), lambda file: file.write(content))
    return Path(path)


def _one_decision(tree: Tree) -> Tree:
    """(B, …) as (B, 1, …): episodes of one decision."""
    return {key: _one_decision(part) for key, part in tree.items()} if isinstance(tree, dict) else tree[:, None]


def _paths(tree: Tree, ahead: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Where the leaves of a tree are."""
    if not isinstance(tree, dict):
        return [ahead]
    return [path for key, part in tree.items() for path in _paths(part, (*ahead, key))]


def _random_like(leaves: tuple[Tensor, ...]) -> list[Tensor]:
    """Random floats and pixels; other whole numbers are codes, so they are drawn from those of the example."""
    generator, rows = torch.Generator().manual_seed(0), []
    for tensor in leaves:
        shape = (_ROWS, *tensor.shape[1:])
        if tensor.is_floating_point():
            rows.append(torch.randn(shape, generator=generator, dtype=tensor.dtype))
        elif tensor.dtype == torch.uint8:
            rows.append(torch.randint(256, shape, generator=generator, dtype=torch.uint8))
        else:
            rows.append(tensor[torch.randint(len(tensor), (_ROWS,), generator=generator)])
    return rows


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks on torchvision and on itself; errors still come through."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
