"""Prompt lookup: draft tokens of a request, copied from what followed its latest tokens at their last occurrence.

A draft costs nothing to propose and is checked beside the token that is computed anyway. So drafts are proposed only
where they pay: as many as are likely to be accepted, and none for a while after rejections.
"""

from __future__ import annotations

import numpy as np

from rekindle._src.core.records import IntArray

SIZE = 3  # latest tokens that have to have occurred before, in this order
_BITS = 20  # of a token id in a key; larger ids collide, which costs a rejected draft
_MASK = (1 << (SIZE * _BITS)) - 1
_LONGEST_PAUSE = 64  # tokens without drafts after rejections


class PromptLookup:
    """The index of one request: the position after the last occurrence of each run of `SIZE` tokens. O(1) per token.

    While the text continues as it did at an earlier place, that place is kept, even if the latest tokens occurred again
    since: in edits of source files, replayed with 7 drafts, a step adds 5 to 8 tokens that way and 2 to 3 otherwise.
    """

    __slots__ = ("_failures", "_followers", "_key", "_resume", "_source", "_tokens", "accepted", "drafted", "run")

    def __init__(self, tokens: IntArray) -> None:
        ids = tokens.astype(np.int64)
        runs = np.zeros(max(0, len(ids) - SIZE + 1), np.int64)
        for place in range(SIZE):
            runs = runs << _BITS | ids[place : place + len(runs)]
        keys = (runs & _MASK).tolist()
        self._followers: dict[int, int] = dict(zip(keys[:-1], range(SIZE, len(ids)), strict=True))
        self._tokens: list[int] = ids.tolist()
        self._key = _MASK
        for token in self._tokens[-SIZE:]:
            self._key = (self._key << _BITS | token) & _MASK
        self._source = self._followers.get(self._key, 0)  # position of the proposed continuation; 0 if there is none
        self._followers[self._key] = len(ids)
        self._failures = self._resume = 0
        self.run = 0  # tokens by which the text has repeated the earlier continuation
        self.drafted = self.accepted = 0

    def push(self, token: int) -> None:
        """Add the request's next token."""
        source, tokens = self._source, self._tokens
        self._key = key = (self._key << _BITS | token) & _MASK
        if source and tokens[source] == token:
            self._source, self.run = source + 1, self.run + 1
        else:
            self._source, self.run = self._followers.get(key, 0), 0
        tokens.append(token)
        self._followers[key] = len(tokens)

    @property
    def ready(self) -> bool:
        """True if the latest tokens occurred before, and the pause after rejected drafts is over."""
        return self._source > 0 and len(self._tokens) >= self._resume

    @property
    def expected(self) -> float:
        """Number of drafts that are likely to be accepted: a long repetition tends to continue."""
        return 1.0 + self.run / 2

    def propose(self, skip: int, count: int) -> IntArray:
        """Return `count` draft tokens, from `skip` positions past the known tokens on.

        Where the earlier continuation ends at the known tokens' end, it is taken to repeat itself.
        """
        tokens, source = self._tokens, self._source
        period = len(tokens) - source
        return np.array([tokens[source + ahead % period] for ahead in range(skip, skip + count)], np.int32)

    def learn(self, drafted: int, accepted: int) -> None:
        """Count the drafts that a step checked; where none was accepted, the next ones pause, longer each time."""
        self.drafted += drafted
        self.accepted += accepted
        self._failures = 0 if accepted else self._failures + 1
        if self._failures:
            self._resume = len(self._tokens) + min(_LONGEST_PAUSE, 1 << self._failures)
