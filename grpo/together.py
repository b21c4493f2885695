"""A step that several ranks share: every rank knows everything, does its part, and the parts are put together again.

    rank r:  its starts ─► engine ─► rewards ─┐
                                              ├─ gather ─► the same Rollouts everywhere ─► advantages, minibatches
    rank s:  its starts ─► …                  ┘                                                      │
              my share of the rows ─► passes ─► gradients ─► sum ─► norm, clip, skip, stop ◄─────────┘

What spans rows is computed alike on every rank from the whole record, so that nothing has to divide evenly and a
denominator is never one rank's own. Nothing here imports torch.distributed: `grpo.protocols.Ranks` is three calls.
"""

from __future__ import annotations

import os
from importlib import import_module

from grpo.protocols import Alone, Ranks


def here() -> Ranks:
    """The ranks that this process is one of, as torchrun's variables say; alone where there are none."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        joined: Ranks = import_module("grpo.distributed.group").join()
        return joined
    return Alone()
