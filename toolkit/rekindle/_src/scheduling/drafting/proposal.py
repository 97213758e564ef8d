"""Proposals of drafters, the base of what these keep of a request, and how often drafts are right."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

_PRIOR = 4.0  # observations that the expected chance of a draft counts for
_REMEMBERED = 64.0  # observations after which they count half


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
        """True if the next step shall be planned with the result of the request's next row: what drafts needs its
        token."""
        return False

    def declined(self) -> None:
        """Note that a proposal was not taken because it would gain less than it costs."""

    def push(self, token: int) -> None:
        """Take the request's next token, which is known now."""

    def learn(self, drafted: int, accepted: int) -> None:
        """Count the drafts that a committed step checked."""
        self.drafted += drafted
        self.accepted += accepted

    def describe(self) -> str:
        """Describe how its drafts fared."""
        return f"{self.accepted} of {self.drafted} {self.words} were accepted"


class OwnDrafts(RequestDrafts):
    """Drafts that a follower of the request proposes."""

    __slots__ = ()

    def propose(self, skip: int, most: int) -> Proposal | None:
        """Return up to `most` tokens from `skip` positions past the known ones on; None if there is no proposal."""
        raise NotImplementedError


class Acceptance:
    """How often drafts match the model's next token, counted over all drafts seen, computed or not."""

    __slots__ = ("_right", "_seen")

    def __init__(self) -> None:
        self._right = self._seen = 0.0

    def add(self, right: bool) -> None:
        """Add a draft."""
        self._right += right
        self._seen += 1.0
        if self._seen > _REMEMBERED:
            self._right, self._seen = 0.5 * self._right, 0.5 * self._seen

    def doubt(self, most: float) -> None:
        """Let what was seen count for `most` drafts: it may not hold any more."""
        if self._seen > most:
            self._right, self._seen = self._right * most / self._seen, most

    def chance(self, expected: float) -> float:
        """Return the chance of the next draft, which is taken to be `expected` before any was seen."""
        return (self._right + _PRIOR * expected) / (self._seen + _PRIOR)
