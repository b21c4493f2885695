"""Several turns: conversations with an environment, and tools."""

from grpo.language.turns.conversation import Conversation, Environment, make_conversation
from grpo.language.turns.tools import Call, Toolbox, parse_calls

__all__ = ["Call", "Conversation", "Environment", "Toolbox", "make_conversation", "parse_calls"]
