"""The record of turns that a chat's prompt leaves out, because the context has no room for them."""

from __future__ import annotations

import dataclasses

from rekindle._src.core import words
from rekindle._src.core.drawable import Record
from rekindle._src.core.extension import Extension


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class LeftOut(Extension, Record):
    """The part of a chat that is not in a request's prompt, since the whole chat is longer than the context."""

    turns: int  # whole turns that are left out, the oldest first
    messages: int  # messages that are left out
    first: int  # index of the first one among the chat's messages
    context: int  # tokens that the context has

    @property
    def words(self) -> str:
        """A short note for the line below an answer."""
        return f"without the oldest {words.count(self.turns, 'turn')}: the context is full"

    def __str__(self) -> str:
        said = f"{words.count(self.turns, 'turn')} ({words.count(self.messages, 'message')})"
        return f"The prompt leaves out {said}: the context of {self.context:,} tokens has no room for the whole chat."
