"""What a decision's return is compared with, where the room knows more than the group."""

from grpo.control.baselines.linear import Baseline, choose, explained, features, linear, returns_to_go

__all__ = ["Baseline", "choose", "explained", "features", "linear", "returns_to_go"]
