"""Several turns: conversations with an environment, and tools."""

from grpo.language.turns.conversation import Conversation, Environment

__all__ = ["Conversation", "Environment"]
