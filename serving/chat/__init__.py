"""Chat: messages to prompt ids, and sampled ids back to an assistant message."""

from serving.chat.encoding import ChatError, ChatPrompt, encode_chat
from serving.chat.parsing import Delta, OutputParser, ToolCallDelta
from serving.chat.tool_grammar import tool_grammar

__all__ = [
    "ChatError",
    "ChatPrompt",
    "Delta",
    "OutputParser",
    "ToolCallDelta",
    "encode_chat",
    "tool_grammar",
]
