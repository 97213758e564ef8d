"""Drafts of text that occurred before: how a request follows an earlier text, and how long it is likely to.

While a request's text continues as it did at an earlier place, that place is kept, even if the latest tokens occurred
again since: in edits of source files, replayed with 7 drafts, a step adds 5 to 8 tokens that way and 2 to 3 otherwise.

Numbers below 0 are no text: they stand for a picture, or name pages with one. Pictures that differ have the same
tokens, so no run with such a number is looked up, and none is proposed.

Whether the earlier text continues is seen for each token, drafted or not. So it costs no draft to learn how likely it
is, and a text that repeats nothing has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

import numpy as np

from rekindle._src.scheduling.drafting.drafter import DraftableRow, Drafter
from rekindle._src.scheduling.drafting.proposal import Proposal, RequestDrafts

SIZE = 3  # latest tokens that have to have occurred before, in this order
BITS = 20  # of a token id in a key; larger ids collide, which costs a rejected draft
MASK = (1 << (SIZE * BITS)) - 1

_LENGTHS = 64  # longer repetitions are alike
_SLOPE = 0.6  # of the log-odds of one more token in log2(1 + length), before anything was observed
_PRIOR = 4.0  # observations that this counts for
_REMEMBERED = 256.0  # observations of a length, after which they count half
_RATE, _FARTHEST = 0.25, 3.0  # of a request's own part: its steps, and its bound in log-odds
_STEP = 0.5  # to which it is rounded, so that chances are computed once
_STALE = 32  # repetitions that ended, after which chances are computed anew


class RepeatChances:
    """How likely one more token of a repetition is, by its length: a logistic estimate with a part for each request.

    It is fitted to all requests of a session, whose repetitions say with each token whether they went on.
    """

    def __init__(self) -> None:
        odds = [_SLOPE * math.log2(1 + length) for length in range(_LENGTHS)]
        self._went_on = [_PRIOR * _share(one) for one in odds]
        self._seen = [_PRIOR] * _LENGTHS
        self._known: dict[tuple[int, float, int], tuple[float, ...]] = {}
        self._ended = 0

    def of(self, length: int, own: float, count: int) -> tuple[float, ...]:
        """Return the chances of the next `count` tokens of a repetition of `length`; `own` is the request's part."""
        key = min(length, _LENGTHS), _STEP * round(own / _STEP), count
        known = self._known.get(key)
        if known is None:
            known = tuple(self._chance(key[0] + ahead, key[1]) for ahead in range(count))
            self._known[key] = known
        return known

    def learn(self, first: int, length: int, own: float) -> float:
        """Add a repetition that was found with the length `first` and ended with `length`. Return the new own part."""
        surprise = 0.0
        for at in range(first, length + 1):
            place, went_on = min(at, _LENGTHS - 1), at < length
            surprise += went_on - self._chance(place, own)
            self._seen[place] += 1.0
            self._went_on[place] += went_on
            if self._seen[place] > _REMEMBERED:
                self._seen[place] *= 0.5
                self._went_on[place] *= 0.5
        self._ended += 1
        if self._ended >= _STALE:
            self._ended = 0
            self._known.clear()
        return max(-_FARTHEST, min(_FARTHEST, own + _RATE * max(-1.0, min(1.0, surprise))))

    def _chance(self, length: int, own: float) -> float:
        place = min(length, _LENGTHS - 1)
        share = (self._went_on[place] + 0.01) / (self._seen[place] + 0.02)
        return _share(math.log(share / (1.0 - share)) + own)


def _share(odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-odds))


class FollowedText(RequestDrafts):
    """Follows an earlier text while the request's own continues as it did. O(1) for each token."""

    __slots__ = ("_at", "_chances", "_earlier", "_first", "_length", "_own", "_tokens")

    def __init__(self, chances: RepeatChances, tokens: Items[int]) -> None:
        super().__init__()
        self._chances, self._tokens = chances, tokens
        self.ready = False
        self._earlier: Items[int] | None = None  # the text that is followed
        self._at = 0  # the place of the next token there
        self._first = self._length = 0  # tokens beyond SIZE that were the same, when it was found and now
        self._own = 0.0  # of the request in the log-odds of one more

    @property
    def length(self) -> int:
        """Tokens beyond `SIZE` that repeat the earlier text; -1 if there is none."""
        return -1 if self._earlier is None else self._length

    def push(self, token: int) -> None:
        earlier, at = self._earlier, self._at
        if earlier is not None and at < len(earlier):
            if earlier[at] == token:
                self._at, self._length = at + 1, self._length + 1
                self._append(token)
                return
            self._own = self._chances.learn(self._first, self._length, self._own)
        self._follow(self._append(token))

    def propose(self, skip: int, most: int) -> Proposal | None:
        """Return up to `most` tokens, from `skip` positions past the known tokens on.

        Where the request's own text ends, it is taken to repeat itself.
        """
        earlier, at = self._earlier, self._at
        if earlier is None:
            return None
        if earlier is self._tokens:
            period = len(earlier) - at
            tokens = [earlier[at + ahead % period] for ahead in range(skip, skip + most)]
        else:
            tokens = list(earlier[at + skip : at + skip + most])
        if tokens and min(tokens) < 0:
            tokens = tokens[: next(place for place, token in enumerate(tokens) if token < 0)]
        if not tokens:
            return None
        return Proposal(tokens, self._chances.of(self._length + skip, self._own, len(tokens)))

    def _append(self, token: int) -> int:
        """Add a token to the request's text. Return where its latest tokens occurred last, for `_follow`."""
        raise NotImplementedError

    def _follow(self, place: int) -> None:
        """Follow the earlier text from a place on, if there is one."""
        raise NotImplementedError


class RepeatDrafter(Drafter):
    """The base of drafters that keep a `FollowedText` for each request."""

    def __init__(self, most: int = 0) -> None:
        """`most` is the option that says how many drafts a request has in a step; 0: it says nothing."""
        self.chances, self.most = RepeatChances(), most

    def propose(self, rows: Items[DraftableRow]) -> list[Proposal | None]:
        proposals: list[Proposal | None] = []
        for row in rows:
            drafts = row.sequence.drafting.by_name[self.name]
            assert isinstance(drafts, FollowedText), f"{row.sequence.id} has drafts of another kind"
            proposals.append(drafts.propose(row.skip, row.most))
        return proposals


def keys_of(ids: np.ndarray) -> np.ndarray:
    """Return a key [N - SIZE + 1] of each run of `SIZE` tokens among `ids` int64 [N]."""
    runs = np.zeros(max(0, len(ids) - SIZE + 1), np.int64)
    for place in range(SIZE):
        runs = runs << BITS | ids[place : place + len(runs)]
    return runs & MASK


def are_texts(ids: np.ndarray) -> np.ndarray:
    """Return for each run of `SIZE` tokens among `ids` [N] if it has text alone, bool [N - SIZE + 1]."""
    texts = np.ones(max(0, len(ids) - SIZE + 1), bool)
    for place in range(SIZE):
        texts &= ids[place : place + len(texts)] >= 0
    return texts


def last_key(tokens: Items[int]) -> int:
    """Return the key of the last `SIZE` tokens. The key of fewer tokens matches no run."""
    key = MASK
    for token in tokens[-SIZE:]:
        key = (key << BITS | token) & MASK
    return key
