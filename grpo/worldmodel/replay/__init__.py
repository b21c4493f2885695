"""The replay buffer: records, chunks on disk, sequences."""

from grpo.worldmodel.replay.buffer import Replay

__all__ = ["Replay"]
