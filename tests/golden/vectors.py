"""Reading golden vectors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Vector:
    """One recorded call of a peer: options and inputs in, outputs out."""

    file: str
    id: str
    what: str
    dtype: str
    options: dict[str, Any]
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    first_of_kind: bool
    """The first vector of its file, kind, loss and level: together they are the representative set for JAX."""

    @property
    def tolerance(self) -> dict[str, float]:
        """As the peer computed: float64 to 1e-9, verl's 1e-8 in its denominators to 1e-7, single precision to 1e-5."""
        if "float32" in self.dtype and not self.dtype.startswith("float64 (rewards"):
            return {"rtol": 1e-5, "atol": 1e-6}
        if self.file.startswith("verl"):
            return {"rtol": 1e-7, "atol": 1e-8}
        return {"rtol": 1e-9, "atol": 1e-12}


def load(folder: Path) -> list[Vector]:
    """Every vector of a folder of JSON files."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"no golden vectors (*.json) in {folder}")
    vectors, kinds = [], set()
    for path in files:
        for row in json.loads(path.read_text(encoding="utf-8"))["vectors"]:
            options = row["options"]
            names = (
                "kl_penalty",
                "adv_type",
                "scale_rewards",
                "multi_objective_aggregation",
                "loss",
                "loss_type",
                "loss_algo",
                "importance_sampling_level",
                "loss_agg",
                "loss_agg_mode",
            )
            kind = (path.stem, row["what"], *(str(options.get(name)) for name in names))
            vectors.append(
                Vector(
                    path.stem,
                    row["id"],
                    row["what"],
                    row["dtype"],
                    options,
                    row["inputs"],
                    row["outputs"],
                    kind not in kinds,
                )
            )
            kinds.add(kind)
    return vectors
