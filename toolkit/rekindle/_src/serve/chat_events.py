"""A reply as consecutive parts, for APIs with blocks: reasoning, text, calls."""

from __future__ import annotations

from collections.abc import Sequence

from rekindle._src.core.records import TextDelta
from rekindle._src.core.reply import ContentDelta, ReplyEvent, ToolCallArguments, ToolCallDropped, ToolCallStarted


def events_of(delta: TextDelta, *, parallel: bool = True) -> Sequence[ReplyEvent]:
    """Return the events of a delta. Without `parallel`, leave out those of calls after the first."""
    if delta.events is None:
        return (ContentDelta(delta.text),) if delta.text else ()
    if parallel:
        return delta.events
    calls = ToolCallStarted | ToolCallArguments | ToolCallDropped
    return [event for event in delta.events if not (isinstance(event, calls) and event.index)]
