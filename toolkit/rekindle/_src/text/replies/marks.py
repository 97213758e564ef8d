"""The marks of a family's replies other than calls': around reasoning, and around the answer."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

Tags = tuple[str, str]


class Thoughts(NamedTuple):
    """The texts around a reply's reasoning."""

    opening: str
    closing: str
    bridge: str = ""  # between reasoning and whatever follows it
    again: bool = False  # it may also come later


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyMarks:
    """Texts of a reply that are no part of its content."""

    noise: tuple[str, ...] = ()  # left out wherever they stand
    text_begins: tuple[str, ...] = ()  # left out, and they end reasoning
    wraps: tuple[Tags, ...] = ()  # plain tags that may stand around a whole answer; either may be missing
    header: str = ""  # the first word of reasoning
    anywhere: bool = False  # reasoning may also follow text
    ended_by_calls: bool = False  # a call ends reasoning at once, whatever follows it
    prefixes: tuple[str, ...] = ()  # a prompt may end with them, and the reply goes on from there
    bridge: str = ""  # between reasoning and whatever follows it
    tokens: tuple[str, ...] = ()  # more special tokens that these and the calls consist of

    @property
    def is_empty(self) -> bool:
        """True if a reply has no such marks."""
        return self == NO_MARKS

    def texts(self) -> frozenset[str]:
        """Return all marks, and the tokens that they consist of."""
        wraps = [tag for tags in self.wraps for tag in tags]
        return frozenset((*self.noise, *self.text_begins, *wraps, *self.tokens))


NO_MARKS = ReplyMarks()
