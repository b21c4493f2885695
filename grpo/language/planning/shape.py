"""A causal decoder by its sizes, from its config.json alone; the files' headers say whether that is all of it.

Letters of sizes: D width, V vocabulary.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.config import ConfigError

BY_HAND = ("llama", "mistral", "qwen2", "qwen3")
"""Kinds of models whose layers are written by hand for the update (`scoring.decoder_layout`)."""
HEADER = 100 * 2**20
"""Bytes of a header at most, as safetensors itself has it."""


class Unknown(ConfigError):
    """A model of which nothing can be said by its configuration."""


@dataclass(frozen=True)
class ModelShape:
    """What memory and time follow from."""

    kind: str
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """The head is the embedding table."""
    small: int = 0
    """Weights of norms and biases, all layers."""
    context: float = math.inf

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Of a transformers configuration; a mixture of experts or another layout is refused."""
        said: dict[str, Any] = config.get_text_config(decoder=True).to_dict()
        kind, biased = str(said["model_type"]), bool(said.get("attention_bias"))
        missing = [name for name in NEEDED if not isinstance(said.get(name), int)]
        if missing:
            raise Unknown(f"a {kind} model says no {missing[0]} in its config.json: only dense decoders are known")
        if any(said.get(name) for name in EXPERTS):
            raise Unknown(f"a {kind} model is a mixture of experts; only dense decoders are known")
        width, layers, inner, heads, vocabulary = (said[name] for name in NEEDED)
        kv_heads, head_dim = said.get("num_key_value_heads") or heads, said.get("head_dim") or width // heads
        norms = 2 * width + (2 * head_dim if kind in ("qwen3", "gemma3_text", "gemma3") else 0)
        norms += 2 * width if kind.startswith("gemma") and kind != "gemma" else 0
        biases = (heads + 2 * kv_heads) * head_dim if kind == "qwen2" or biased else 0
        biases += width if biased and kind != "qwen2" else 0
        biases += 2 * inner + width if said.get("mlp_bias") else 0
        return cls(
            kind, layers, width, inner, heads, kv_heads, head_dim, vocabulary, bool(said["tie_word_embeddings"]),
            layers * (norms + biases) + width, said.get("max_position_embeddings") or math.inf,
        )  # fmt: skip

    @property
    def by_hand(self) -> bool:
        """Whether the update goes through layers of our own."""
        return self.kind in BY_HAND

    @property
    def layer(self) -> int:
        """Weights of a layer's products."""
        return sum(a * b for a, b in self.projections)

    @property
    def projections(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of q, k, v, o, gate, up, down."""
        q, kv, d, i = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.width, self.inner
        return (q, d), (kv, d), (kv, d), (d, q), (i, d), (i, d), (d, i)

    @property
    def body(self) -> int:
        """Weights of all layers' products."""
        return self.layers * self.layer

    @property
    def table(self) -> int:
        """Weights of the head, and of the embedding: V·D."""
        return self.vocabulary * self.width

    @property
    def weights(self) -> int:
        """All of them."""
        return self.body + self.small + (1 if self.tied else 2) * self.table

    @property
    def position(self) -> int:
        """Numbers of keys and values of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def lora(self, rank: int, targets: tuple[str, ...] | str) -> int:
        """Weights of an adapter; targets: names of projections, or all of them."""
        chosen = [n for n in range(7) if isinstance(targets, str) or any(NAMES[n].endswith(t) for t in targets)]
        return self.layers * sum(rank * sum(self.projections[n]) for n in chosen)


NEEDED = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def weights_in(folder: Path) -> int | None:
    """Weights that a folder's safetensors files hold, by their headers; None where there are none, or one is odd."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > HEADER:
                    return None
                header = json.loads(file.read(size))
            total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    return total or None
