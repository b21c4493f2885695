"""A policy as an ONNX file, for places without this library: observation in, greedy action out.

The file gets its name only after onnxruntime has given the same numbers.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from grpo.envs.fleet import Tree
from grpo.envs.spaces import leaf
from grpo.errors import install
from grpo.run.files import write_atomic

ROWS = 32
"""Observations on which the file must agree with the module."""
_RTOL, _ATOL = 1e-4, 1e-5


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
def export_onnx(
    policy_module: nn.Module,
    example: Tree,
    path: str | Path,
    hidden: Tensor | None = None,
    about: Mapping[str, int] | None = None,
) -> Path:
    """Write a module like `grpo.control.export.Greedy` for batches of any size, in a folder that is made if need be.

    `example` (and `hidden`) are rows of what it takes; `about` goes into the file beside the graph.

    Inputs are named after the observation's keys ("observation" where it has none), and "hidden"; outputs "action",
    "out", and "next_hidden".
    """
    try:
        onnxruntime = [importlib.import_module(name) for name in ("onnx", "onnxscript", "onnxruntime")][-1]
    except ImportError as error:
        raise ImportError(f"exporting a policy needs {error.name}: {install('export')}") from error
    paths = paths_of(example)
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
    made = program.model_proto  # type: ignore[union-attr]
    for name, value in (about or {}).items():
        made.metadata_props.add(key=name, value=str(value))
    content = made.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    rows = _random_like(inputs)
    found = session.run(outputs, {name: row.numpy() for name, row in zip(names, rows, strict=True)})
    for name, mine, theirs in zip(outputs, module(*rows), found, strict=True):
        if not np.allclose(mine.numpy(), theirs, rtol=_RTOL, atol=_ATOL):
            gap = np.abs(mine.numpy() - theirs).max()
            raise RuntimeError(f"{path} is not written: onnxruntime's {name} differs from the policy's by {gap:g}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(Path(path), lambda file: file.write(content))
    return Path(path)


def paths_of(tree: Tree, ahead: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Where the leaves of a tree are."""
    if not isinstance(tree, dict):
        return [ahead]
    return [path for key, part in tree.items() for path in paths_of(part, (*ahead, key))]


def _random_like(leaves: tuple[Tensor, ...]) -> list[Tensor]:
    """Random floats and pixels; other whole numbers are codes, so they are drawn from those of the example."""
    generator, rows = torch.Generator().manual_seed(0), []
    for tensor in leaves:
        shape = (ROWS, *tensor.shape[1:])
        if tensor.is_floating_point():
            rows.append(torch.randn(shape, generator=generator, dtype=tensor.dtype))
        elif tensor.dtype == torch.uint8:
            rows.append(torch.randint(256, shape, generator=generator, dtype=torch.uint8))
        else:
            rows.append(tensor[torch.randint(len(tensor), (ROWS,), generator=generator)])
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
