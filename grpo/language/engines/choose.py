"""The engine that a name stands for."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from grpo.config import ConfigError
from grpo.errors import warn
from grpo.language.engines import Engine, Tokens
from grpo.language.engines.copied import CopyEngine
from grpo.language.engines.hf import HFEngine
from grpo.language.engines.inline import InlineEngine

FORMER = {"pages": "blocks"}
"""What settings of engines were called, as run folders may still have them."""


def make_engine(name: str, model: nn.Module, tokens: Tokens, ahead: bool = False, **engine_kwargs: Any) -> Engine:
    """auto: our own loop where the model allows it, else transformers' generate, with a notice.

    ahead: it must sample while the model learns, with weights of its own.
    """
    if name == "auto":
        reason = InlineEngine.supports(model)
        if reason and ahead:
            raise ConfigError(f"staleness > 0 needs engine=vllm with servers here; our own loop cannot: {reason}")
        if reason:
            warn(f"sampling with transformers' generate, our own loop cannot: {reason}")
        name = "transformers" if reason else "inline"
    kind = CopyEngine if ahead and name == "inline" else _kind(name)
    known = inspect.signature(kind).parameters
    for old, new in FORMER.items():
        if old in engine_kwargs and new in known:
            engine_kwargs.setdefault(new, engine_kwargs.pop(old))
    wrong = set(engine_kwargs) - set(known)
    if wrong and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        takes = ", ".join(name for name in known if name not in ("model", "tokens"))
        raise ConfigError(f"engine_kwargs: {name} does not take {', '.join(sorted(wrong))}; it takes {takes}")
    if kind is CopyEngine and next(model.parameters()).device.type == "cpu":
        warn("on a CPU staleness pays where rewards take long, and hardly else; see docs/servers.md")
    if name == "vllm":
        engine_kwargs["ahead"] = ahead
    engine: Engine = kind(model, tokens, **engine_kwargs)
    return engine


def _kind(name: str) -> Any:
    if name == "inline":
        return InlineEngine
    if name == "transformers":
        return HFEngine
    if name == "vllm":
        from grpo.language.engines.vllm import VLLMEngine

        return VLLMEngine
    raise ConfigError(f"engine={name}: use auto, inline, transformers or vllm")
