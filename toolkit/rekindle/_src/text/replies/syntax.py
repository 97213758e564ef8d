"""A family's syntax for calls: the texts that open one, and the readers behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from rekindle._src.text.replies.call import Call, Known
from rekindle._src.text.replies.source import Reading, Source


class Calls(Protocol):
    """The context of a reader: the text, the tools, and the receiver of its calls."""

    @property
    def source(self) -> Source: ...
    @property
    def known(self) -> Known: ...
    def streams(self, name: str) -> bool:
        """True if a call of `name` is emitted while it arrives."""
        ...

    def begin(self, name: str) -> Callable[[str], None] | None:
        """Start a call of `name`, and return a function that takes its arguments' JSON text in pieces.

        None if the call is emitted once it is complete. `emit` ends it either way.
        """
        ...

    def emit(self, *calls: Call) -> None:
        """Emit complete calls. Text read until now belongs to them; the text that follows may still be malformed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Opener:
    """A text at which calls may begin."""

    text: str
    read: Callable[[Calls], Reading[None]]
    bare: bool = False  # it is part of the call already, and counts at the beginning of a line only


@dataclasses.dataclass(frozen=True, slots=True)
class CallSyntax:
    """A family's way to write calls."""

    name: str
    openers: tuple[Opener, ...]
    markers: tuple[str, ...] = ()  # texts that may be special tokens, which detokenizing leaves out by default
    id_length: int = 0  # of a call's id, where the family's template insists on one
