"""Replies of chat models as they arrive: content, reasoning and calls of tools, by the syntax of the model's family."""

from rekindle._src.core.reply import (
    ContentDelta,
    ReasoningDelta,
    Reply,
    ReplyEvent,
    ToolCall,
    ToolCallArguments,
    ToolCallDropped,
    ToolCallStarted,
    fold,
)
from rekindle._src.text.replies.format import ReplyFormat, ReplyPlan
from rekindle._src.text.replies.scanner import ReplyScanner

__all__ = [
    "ContentDelta",
    "ReasoningDelta",
    "Reply",
    "ReplyEvent",
    "ReplyFormat",
    "ReplyPlan",
    "ReplyScanner",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallDropped",
    "ToolCallStarted",
    "fold",
]
