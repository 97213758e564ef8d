"""Drafts of a request's own text: what followed its latest tokens when they occurred before."""

from __future__ import annotations

import dataclasses

import numpy as np

from rekindle._src.core.records import IntArray
from rekindle._src.drafts.kind import DraftKind
from rekindle._src.drafts.repeats import (
    BITS,
    MASK,
    SIZE,
    FollowedText,
    RepeatChances,
    RepeatDrafter,
    are_texts,
    keys_of,
    last_key,
)
from rekindle._src.scheduling.drafting.drafter import Drafter
from rekindle._src.scheduling.drafting.proposal import RequestDrafts
from rekindle._src.scheduling.sequence import Limits, Sequence


class PromptLookup(FollowedText):
    """Follows what came after a request's latest tokens at their last occurrence in its own text.

    It keeps the position after the last occurrence of each run of `SIZE` tokens.
    """

    __slots__ = ("_followers", "_key", "_own_tokens")

    def __init__(self, chances: RepeatChances, tokens: IntArray) -> None:
        ids = tokens.astype(np.int64)
        self._own_tokens: list[int] = ids.tolist()
        super().__init__(chances, self._own_tokens)
        keys, places = keys_of(ids)[:-1], np.arange(SIZE, len(ids))
        if len(ids) and ids.min() < 0:
            texts = are_texts(ids)[:-1]
            keys, places = keys[texts], places[texts]
        self._followers: dict[int, int] = dict(zip(keys.tolist(), places.tolist(), strict=True))
        self._key = last_key(self._own_tokens)
        self._follow(self._followers.get(self._key, 0))
        self._followers[self._key] = len(ids)

    def _append(self, token: int) -> int:
        self._key = key = (self._key << BITS | token) & MASK
        tokens, followers = self._own_tokens, self._followers
        place = followers.get(key, 0)
        tokens.append(token)
        followers[key] = len(tokens)
        return place

    def _follow(self, place: int) -> None:
        self.ready = place > 0
        self._earlier = self._own_tokens if place else None
        self._at, self._first, self._length = place, 0, 0


class LookupDrafter(RepeatDrafter):
    """Proposes what followed a request's latest tokens earlier in its own text."""

    name = "lookup"

    def begin(self, sequence: Sequence) -> RequestDrafts:
        return PromptLookup(self.chances, sequence.tokens.text())


@dataclasses.dataclass(frozen=True)
class LookupKind(DraftKind):
    """The drafter of `prompt_lookup`."""

    most: int

    def drafter(self, limits: Limits) -> Drafter:
        return LookupDrafter(self.most)
