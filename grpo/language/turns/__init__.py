"""Several turns: conversations with an environment, and tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo.lazy import lazily

if TYPE_CHECKING:
    from grpo.language.turns.conversation import Conversation, Environment, make_conversation
    from grpo.language.turns.tools import Call, Toolbox, parse_calls

__all__ = ["Call", "Conversation", "Environment", "Toolbox", "make_conversation", "parse_calls"]

_HOME = dict.fromkeys(("Conversation", "Environment", "make_conversation"), "grpo.language.turns.conversation")
_HOME |= dict.fromkeys(("Call", "Toolbox", "parse_calls"), "grpo.language.turns.tools")

__getattr__, __dir__ = lazily(__name__, _HOME)
