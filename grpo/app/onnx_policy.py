"""A policy from the ONNX file that `grpo export` wrote: it plays without torch, and without the environment."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from grpo.config import ConfigError
from grpo.errors import install

_TYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
}


class OnnxPlayer:
    """The file, as `grpo.load` asks a policy."""

    def __init__(self, path: Path) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise ConfigError(f"{path} needs onnxruntime: {install('export')}") from None
        if not path.exists():
            raise ConfigError(f"{path}: there is no such file; `grpo export RUN` writes one")
        try:
            self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's own, one class for each thing that can be wrong
            raise ConfigError(f"{path} is no ONNX file that can be read: {error}") from None
        self.inputs = {given.name: given for given in self.session.get_inputs() if given.name != "hidden"}
        self.hidden = next((given for given in self.session.get_inputs() if given.name == "hidden"), None)

    def rows(self, observation: Any) -> tuple[dict[str, np.ndarray], bool]:
        """By input, as the file wants it."""
        found = {name: self._row(_part(observation, name), given) for name, given in self.inputs.items()}
        return {name: row for name, (row, _) in found.items()}, all(single for _, single in found.values())

    def _row(self, value: Any, given: Any) -> tuple[np.ndarray, bool]:
        array, shape = np.asarray(value, dtype=_TYPES.get(given.type)), tuple(given.shape[1:])
        if array.shape == shape:
            return array[None], True
        if array.shape[1:] != shape:
            raise ConfigError(f"{given.name}: an observation of shape {array.shape} does not fit {shape} of the file")
        return array, False

    def players(self, rows: int, seed: int = 0) -> OnnxPlayers:
        """In so many episodes."""
        return OnnxPlayers(self, rows)


class OnnxPlayers:
    """The file in several episodes: what it remembers of each, and actions ahead where it decides on several."""

    def __init__(self, player: OnnxPlayer, rows: int) -> None:
        self._player = player
        hidden = player.hidden
        self._hidden = None if hidden is None else np.zeros((rows, *hidden.shape[1:]), np.float32)
        about = player.session.get_modelmeta().custom_metadata_map
        self._chunk, self._times = int(about.get("chunk", 1)), int(about.get("action_repeat", 1))
        self._ahead: list[deque[Any]] = [deque() for _ in range(rows)]

    @property
    def remembers(self) -> bool:
        """A memory, or actions that were decided on ahead."""
        return self._hidden is not None or any(self._ahead)

    def __repr__(self) -> str:
        return f"<what the policy remembers of {len(self._ahead)} episode(s)>"

    def decide(self, rows: dict[str, np.ndarray], greedy: bool = True) -> np.ndarray:
        """Actions for what all of them see."""
        if not greedy:
            raise ConfigError("an ONNX file has the likeliest actions alone; load the run folder to draw them")
        free = [row for row, ahead in enumerate(self._ahead) if not ahead]
        if free:
            memory = {} if self._hidden is None else {"hidden": self._hidden[free]}
            names = [output.name for output in self._player.session.get_outputs()]
            given = {name: row[free] for name, row in rows.items()} | memory
            found = dict(zip(names, self._player.session.run(None, given), strict=True))
            if self._hidden is not None:
                self._hidden = self._hidden.copy()
                self._hidden[free] = found.get("next_hidden", memory["hidden"])
            for row, action in zip(free, np.asarray(found["action"]), strict=True):
                some = action if self._chunk > 1 else [action]
                self._ahead[row].extend(one for one in some for _ in range(self._times))
        return np.stack([ahead.popleft() for ahead in self._ahead])

    def forget(self, first_M: np.ndarray) -> None:
        """Where True, another episode begins."""
        if self._hidden is not None:
            begins = first_M.reshape(-1, *[1] * (self._hidden.ndim - 1))
            self._hidden = np.where(begins, np.float32(0), self._hidden)
        for row in np.flatnonzero(first_M):
            self._ahead[row].clear()


def _part(observation: Any, name: str) -> Any:
    """The part of an observation that an input is called after."""
    if name == "observation" or not isinstance(observation, dict):
        return observation
    for key in name.split("/"):
        if key not in observation:
            raise ConfigError(f"the observation has no part {name!r}, which the file wants")
        observation = observation[key]
    return observation
