"""The text that a scanner reads while it arrives.

Readers are generators: they `yield` where they need more text, and go on once there is some or the text has ended.
Their results therefore depend on the characters alone, never on the pieces in which these came.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
SPACE = " \t\r\n"


class Malformed(Exception):
    """The text behind a marker is not a call."""


class Source:
    """Text with a position, and with a mark from which it may have to be returned unchanged."""

    def __init__(self) -> None:
        self.text: str = ""
        self.at: int = 0
        self.ended: bool = False
        self._marked = 0  # the mark's place in `text`; text read since then and no longer in `text` is in `_consumed`
        self._consumed: list[str] = []

    def push(self, text: str) -> None:
        """Add text, and forget text that was read before the mark."""
        self._consumed.append(self.text[self._marked : self.at])
        self.text = self.text[self.at :] + text
        self.at = self._marked = 0

    def mark(self) -> None:
        """Begin to remember the text that is read."""
        self._consumed.clear()
        self._marked = self.at

    def since_mark(self) -> str:
        """Return the text read since the mark."""
        return "".join(self._consumed) + self.text[self._marked : self.at]


def peek(source: Source) -> Reading[str]:
    """Return the next character, which stays unread; "" at the end."""
    while source.at == len(source.text):
        if source.ended:
            return ""
        yield
    return source.text[source.at]


def skip_space(source: Source) -> Reading[None]:
    """Read whitespace."""
    while (char := (yield from peek(source))) and char in SPACE:
        source.at += 1


def ahead(source: Source, *literals: str) -> Reading[int]:
    """Return the number of characters of these texts, each after whitespace, if they come next; else 0."""
    length = 0
    for literal in literals:
        while True:
            at = source.at + length
            while at < len(source.text) and source.text[at] in SPACE:
                at += 1
            length = at - source.at
            if source.text.startswith(literal, at):
                length += len(literal)
                break
            if source.ended or not literal.startswith(source.text[at : at + len(literal)]):
                return 0
            yield
    return length


def take(source: Source, *literals: str) -> Reading[bool]:
    """Read these texts if they come next, as in `ahead`; else read nothing."""
    length = yield from ahead(source, *literals)
    source.at += length
    return length > 0


def close(source: Source, literal: str) -> Reading[bool]:
    """Read a closing tag if it comes next, after whitespace, or as much of it as there is at the end of the text."""
    if (yield from take(source, literal)):
        return True
    rest = source.text[source.at :].lstrip(SPACE)
    cut = source.ended and len(rest) > 0 and literal.startswith(rest)
    if cut:
        source.at = len(source.text)
    return cut


def forward(source: Source, reading: Reading[T], tell: Callable[[str], object]) -> Reading[T]:
    """Run a reading, and pass on each piece of text that it has read as soon as it needs more."""
    start = source.at
    while True:
        try:
            next(reading)
        except StopIteration as done:
            tell(source.text[start : source.at])
            value: T = done.value
            return value
        tell(source.text[start : source.at])
        yield
        start = source.at  # text read before is forgotten by now, so that this is 0; or the text has ended


def capture(source: Source, reading: Reading[None]) -> Reading[str]:
    """Run a reading and return the text that it has read."""
    parts: list[str] = []
    yield from forward(source, reading, parts.append)
    return "".join(parts)
