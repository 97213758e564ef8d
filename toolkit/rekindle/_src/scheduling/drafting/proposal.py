"""Proposals of drafters, and the base of what these keep of a request."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple


class Proposal(NamedTuple):
    """Tokens that may come next, and how likely each is accepted, provided that those before it are."""

    tokens: Items[int]
    chances: Items[float]


class RequestDrafts:
    """A drafter's part of one request, and how its drafts fared."""

    __slots__ = ("accepted", "drafted", "ready")
    words = "draft tokens"  # of its drafts, in explanations

    def __init__(self) -> None:
        self.drafted = self.accepted = 0
        self.ready = True  # False: its drafter has no proposal, and is not asked for one

    @property
    def asks(self) -> bool:
        """True if the next step shall be planned with the result of the request's next row: the model's own head drafts
        in that row, or a small model needs its token."""
        return False

    def declined(self) -> None:
        """Note that a proposal was not taken, since it does not gain what it costs."""

    def push(self, token: int) -> None:
        """Take the request's next token, which is known now."""

    def learn(self, drafted: int, accepted: int) -> None:
        """Count the drafts that a committed step checked."""
        self.drafted += drafted
        self.accepted += accepted

    def describe(self) -> str:
        """Describe how its drafts fared."""
        return f"{self.accepted} of {self.drafted} {self.words} were accepted"
