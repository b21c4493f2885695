"""GPUs by name: memory, and the rates that a copy and a product of matrices reach on them.

The H200's are measured (`bench/peers/ours.py: ceilings`); the others' follow from their data sheets, with the shares of
the sheet that the H200 reaches. A name is looked for in what the driver calls the device, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo.config import ConfigError
from grpo.errors import nearest

GIB = 2**30
COPY_SHARE, PRODUCT_SHARE = 0.87, 0.70
"""Of the bandwidth and the dense bfloat16 rate that a data sheet promises: 4.17 of 4.8 TB/s, 690 of 989 TFLOP/s."""


@dataclass(frozen=True)
class GPU:
    """What of a device counts here."""

    name: str
    memory: int
    """Bytes that the driver offers."""
    bytes_per_s: float
    """Of a copy, read and written."""
    flops_per_s: float
    """Of a large product in bfloat16."""
    measured: bool = False


def _sheet(name: str, gib: float, terabytes: float, teraflops: float) -> GPU:
    return GPU(name, int(gib * GIB), COPY_SHARE * terabytes * 1e12, PRODUCT_SHARE * teraflops * 1e12)


GPUS = {
    "h200": GPU("NVIDIA H200", int(139.8 * GIB), 4.17e12, 690e12, measured=True),
    "h100": _sheet("NVIDIA H100 80GB HBM3", 79.1, 3.35, 989),
    "h100-pcie": _sheet("NVIDIA H100 PCIe", 79.1, 2.0, 756),
    "gh200": _sheet("NVIDIA GH200", 94.5, 4.0, 989),
    "b200": _sheet("NVIDIA B200", 178.4, 8.0, 2250),
    "a100": _sheet("NVIDIA A100-SXM4-80GB", 79.2, 2.04, 312),
    "a100-40": _sheet("NVIDIA A100-SXM4-40GB", 39.4, 1.56, 312),
    "a6000": _sheet("NVIDIA RTX A6000", 47.4, 0.77, 155),
    "6000-ada": _sheet("NVIDIA RTX 6000 Ada", 47.4, 0.96, 364),
    "l40s": _sheet("NVIDIA L40S", 44.4, 0.86, 362),
    "a10": _sheet("NVIDIA A10", 22.1, 0.60, 125),
    "l4": _sheet("NVIDIA L4", 22.0, 0.30, 121),
    "5090": _sheet("NVIDIA GeForce RTX 5090", 31.4, 1.79, 210),
    "4090": _sheet("NVIDIA GeForce RTX 4090", 23.5, 1.01, 165),
    "3090": _sheet("NVIDIA GeForce RTX 3090", 23.5, 0.94, 71),
}

MEMORY = {"40gb", "80gb", "hbm3", "sxm4"}
"""Words of a name that say how a card is built, not which."""


def gpu_named(word: str) -> GPU:
    """One of the table."""
    key = word.lower().replace("_", "-").replace(" ", "-")
    if key not in GPUS:
        raise ConfigError(f"--gpu {word} is not known{nearest(key, list(GPUS))}; known: {', '.join(GPUS)}")
    return GPUS[key]


def gpu_called(name: str, memory: int) -> GPU | None:
    """That of a device which its driver calls so; its own memory counts. None: nobody has looked up its rates."""
    words, found = _words(name), []
    for known in GPUS.values():
        asked = _words(known.name) - MEMORY
        if asked <= words:  # the more words, the nearer; of two with as many the one with as much memory
            found.append((len(asked & words), -abs(known.memory - memory), known))
    if not found:
        return None
    best = max(found, key=lambda one: one[:2])[2]
    return GPU(name, memory, best.bytes_per_s, best.flops_per_s, best.measured)


def _words(name: str) -> set[str]:
    return set(name.lower().replace("-", " ").split())
