"""A reply as the parts that the APIs of blocks have: thoughts, text, calls, one after another."""

from __future__ import annotations

from collections.abc import Sequence

from rekindle._src.core.records import TextDelta
from rekindle._src.core.reply import ContentDelta, ReplyEvent, ToolCallArguments, ToolCallDropped, ToolCallStarted


def events_of(delta: TextDelta, *, parallel: bool = True) -> Sequence[ReplyEvent]:
    """The events of a delta; without `parallel`, those of calls after the first are left out."""
    if delta.events is None:
        return (ContentDelta(delta.text),) if delta.text else ()
    if parallel:
        return delta.events
    calls = ToolCallStarted | ToolCallArguments | ToolCallDropped
    return [event for event in delta.events if not (isinstance(event, calls) and event.index)]
