"""Prompt lookup: guesses of what a request says next, read off what followed the last time its latest tokens came.

A guess costs nothing to make and is checked beside the token that is computed anyway, so all that matters is to guess
where it pays: how far, and not again soon after a guess was wrong.
"""

from __future__ import annotations

import numpy as np

from rekindle._src.core.records import IntArray

SIZE = 3  # latest tokens that have to come again, all of them
_BITS = 20  # of a token id in a key; larger ids collide, which costs a wrong guess
_MASK = (1 << (SIZE * _BITS)) - 1
_LONGEST_REST = 64  # tokens


class PromptLookup:
    """The index of one request: where each run of `SIZE` tokens was last followed by what. O(1) for each new token.

    While its text goes on as at an earlier place, that place is kept, though the latest tokens may have come again
    since: in edits of source files, replayed with 7 guesses, a step brings 5 to 8 tokens then and 2 to 3 otherwise.
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
        self._source = self._followers.get(self._key, 0)  # where what is to come was seen; 0 if nowhere
        self._followers[self._key] = len(ids)
        self._failures = self._resume = 0
        self.run = 0  # tokens for which the text has gone on as at the place it follows
        self.drafted = self.accepted = 0

    def push(self, token: int) -> None:
        """The request's next token became known."""
        source, tokens = self._source, self._tokens
        self._key = key = (self._key << _BITS | token) & _MASK
        if source and tokens[source] == token:
            self._source, self.run = source + 1, self.run + 1
        else:
            self._source, self.run = self._followers.get(key, 0), 0
        tokens.append(token)
        self._followers[key] = len(tokens)

    @property
    def guesses(self) -> bool:
        """The latest tokens came before, and it is not too soon to guess again."""
        return self._source > 0 and len(self._tokens) >= self._resume

    @property
    def hope(self) -> float:
        """How many guesses are about to be right: what has gone on for long goes on for long."""
        return 1.0 + self.run / 2

    def guess(self, skip: int, count: int) -> IntArray:
        """`count` tokens from the position `skip` past all that is known.

        What followed last time may reach up to now: then it is taken to go round, as text that repeats itself does.
        """
        tokens, source = self._tokens, self._source
        period = len(tokens) - source
        return np.array([tokens[source + ahead % period] for ahead in range(skip, skip + count)], np.int32)

    def learn(self, drafted: int, accepted: int) -> None:
        """So many of the guesses that a step checked were right; where all are wrong, the next ones wait."""
        self.drafted += drafted
        self.accepted += accepted
        self._failures = 0 if accepted else self._failures + 1
        if self._failures:
            self._resume = len(self._tokens) + min(_LONGEST_REST, 1 << self._failures)
