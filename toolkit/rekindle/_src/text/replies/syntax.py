"""How a family of models writes calls: what opens one, and the reader of what follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from rekindle._src.text.replies.call import Call, Known
from rekindle._src.text.replies.source import Reading, Source


class Calls(Protocol):
    """What a reader works with: the text, the tools, and where its calls go."""

    @property
    def source(self) -> Source: ...
    @property
    def known(self) -> Known: ...
    def streams(self, name: str) -> bool:
        """Whether a call of `name` is told while it arrives."""
        ...

    def begin(self, name: str) -> Callable[[str], None] | None:
        """Start a call of `name`, and get a function that takes its arguments' JSON text in pieces.

        None if the call is told once it is complete. `found` ends it either way.
        """
        ...

    def found(self, *calls: Call) -> None:
        """Calls that are complete. What was read until now is theirs; what follows may still be malformed."""


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
