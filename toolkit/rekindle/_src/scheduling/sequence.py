"""What the scheduler knows about one request while it lives: its tokens, its pages, and how far each of them is.

Three counts follow a sequence, each at most the next: `computed` positions were committed, `planned` positions are in
the pages once every step in flight has run, `length` tokens exist once they have. A decode step is planned while the
token it reads is still on the device, so `length` counts tokens whose values the host does not know yet.
"""

from __future__ import annotations

import numpy as np

from rekindle._src.core.records import FinishReason, IntArray, Request, Row, Status
from rekindle._src.kvcache.digest import page_keys
from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.scheduling.prompt_lookup import PromptLookup

_ROOM = 64  # tokens or pages by which a buffer grows at least


class Sequence:
    """Mutable state of one request; the scheduler is its only owner."""

    __slots__ = (
        "_keys", "_pages", "_table", "_tokens", "arrived", "cached_tokens", "claimed", "computed", "epoch", "fresh",
        "generated", "generation", "in_flight", "known", "limit", "limit_reason", "lookup", "node", "num_pages",
        "overtaken", "page_size", "planned", "preemptions", "published", "reason", "request", "sampled", "scored",
        "slot", "status", "target", "waits_for",
    )  # fmt: skip

    def __init__(self, request: Request, arrived: int, limit: int, limit_reason: FinishReason, page_size: int) -> None:
        self.request = request
        self.arrived = arrived  # order of submission
        self.limit = limit  # tokens it may generate, known before the first one is
        self.limit_reason = limit_reason
        self.page_size = page_size
        self.status = Status.QUEUED
        self.reason = "has just arrived"  # why it waits, for explain()
        self.waits_for: Sequence | None = None  # computes the prefix that this one needs
        self.overtaken = 0
        self.preemptions = 0
        # In this epoch:
        self.epoch = 0
        self.slot = -1
        self.fresh = True  # no row was planned yet
        self.in_flight = 0  # steps that contain it and were neither committed nor failed
        self.target = 0  # positions to prefill: the prompt, and what was generated before a preemption
        self.planned = 0
        self.computed = 0
        # Its tokens:
        self.known = request.prompt_length  # tokens whose values the host has
        self.generated = 0  # of them, not the prompt's
        self.sampled = 0  # generated, plus those that steps in flight will add
        self.scored = 0  # prompt positions whose log-probabilities were delivered
        self.cached_tokens = 0  # of the prompt, found in the cache at the first admission
        self.lookup: PromptLookup | None = None  # guesses what comes next, once it was asked to
        self._tokens = request.token_ids
        self._keys: list[int] = []
        # Its pages:
        self.num_pages = 0
        self._pages: IntArray = np.empty(0, np.int32)
        self._table: IntArray | None = None
        self.node: Node | None = None  # the deepest one of the prefix tree that it holds
        self.generation = 0  # of the prefix cache that `node` belongs to
        self.published = 0  # leading pages that are in the tree
        self.claimed = 0  # leading pages that it has announced to compute

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def prefilling(self) -> bool:
        return self.planned < self.target

    @property
    def decodes(self) -> bool:
        """One token is all that is left to prefill, so that a decode row computes it."""
        return self.planned + 1 == self.target

    @property
    def ended(self) -> bool:
        return self.status in _ENDED

    @property
    def remaining(self) -> int:
        """Tokens that it may still sample."""
        return self.limit - self.sampled

    @property
    def outputs(self) -> IntArray:
        """The generated tokens that the host knows."""
        return self._tokens[self.request.prompt_length : self.known]

    @property
    def pages(self) -> IntArray:
        return self._pages[: self.num_pages]

    def tokens(self, start: int, stop: int) -> IntArray:
        """Values of the tokens [start, stop), all of which must be known."""
        assert stop <= self.known, f"{self.id}: token {stop - 1} is not known yet, {self.known} are"
        return self._tokens[start:stop]

    def keys(self, count: int) -> list[int]:
        """Lookup keys of its first `count` pages, computed once."""
        keys = self._keys
        if len(keys) < count:
            first, size = len(keys), self.page_size
            keys += page_keys(
                self.tokens(first * size, count * size), size, first=first, previous=keys[-1] if keys else 0
            )
        return keys if len(keys) == count else keys[:count]

    def append(self, token: int) -> None:
        if self.known == len(self._tokens):
            # Rows of steps in flight may still read the old buffer, so it is left as it is.
            self._tokens = _grown(self._tokens, self.known + 1)
        self._tokens[self.known] = token
        self.known += 1
        self.generated += 1
        if self.lookup is not None:
            self.lookup.push(token)

    def add_pages(self, pages: list[int]) -> None:
        end = self.num_pages + len(pages)
        if end > len(self._pages):
            self._pages = _grown(self._pages[: self.num_pages], end)
        self._pages[self.num_pages : end] = pages
        self.num_pages = end
        self._table = None

    def replace_pages(self, first: int, pages: list[int]) -> None:
        """Go on with other pages of the same content; tables of steps in flight are copies and stay."""
        self._pages[first : first + len(pages)] = pages
        self._table = None

    def begin(self, slot: int, start: int) -> None:
        """A new epoch in `slot`, with the positions [0, start) in its pages already."""
        assert not self.in_flight, f"{self.id} is admitted with steps in flight"
        assert self.sampled == self.generated, f"{self.id} is admitted with tokens in flight"
        self.epoch += 1
        self.slot = slot
        self.fresh = True
        self.computed = self.planned = start
        self.target = self.known
        self.status = Status.PREFILL
        if self.epoch == 1:
            self.cached_tokens = start

    def leave(self) -> None:
        """Forget slot and pages, which have been given back."""
        self.slot = -1
        self.num_pages = self.published = self.claimed = 0
        self._table = None
        self.node = None
        self.sampled = self.generated

    def row(self, length: int) -> Row:
        """Its part of the next step; from here on the step is in flight."""
        start = self.planned
        end = start + length
        assert end <= self.num_pages * self.page_size, f"{self.id}: no page for position {end - 1}"
        samples = end >= self.target
        if self._table is None:
            self._table = self._pages[: self.num_pages].copy()
        row = Row(
            self.request,
            self.epoch,
            self.slot,
            start,
            length,
            self._table,
            # A token that the host knows may be one that a draft sampled, which the slot has not seen.
            self.tokens(start, end) if end <= self.known else None,
            samples,
            self.fresh,
            self.sampled,
            self.outputs if self.fresh and self.generated else None,
            start < self.published * self.page_size,
        )
        self.fresh = False
        self.planned = end
        self.sampled += samples
        self.in_flight += 1
        return row

    def drafts(self, guess: IntArray) -> list[Row]:
        """Rows for guessed tokens after the row that was just made; they count for nothing before they are checked."""
        start = self.planned
        assert start + len(guess) <= self.num_pages * self.page_size, f"{self.id}: no page for its last draft"
        if self._table is None:
            self._table = self._pages[: self.num_pages].copy()
        self.in_flight += len(guess)
        return [
            Row(
                self.request,
                self.epoch,
                self.slot,
                start + index,
                1,
                self._table,
                guess[index : index + 1],
                True,
                generated=self.sampled + index,
                draft=True,
            )
            for index in range(len(guess))
        ]

    def drafts_checked(self) -> None:
        """What it guessed was checked: it goes on after the last token that was right."""
        self.planned, self.sampled = self.computed, self.generated

    def growth(self, fraction: float) -> int:
        """Pages that it is going to need if it samples `fraction` of the tokens it may still sample."""
        length = self.request.prompt_length + self.sampled + int(fraction * self.remaining)
        return max(0, pages_for(length, self.page_size) - max(self.num_pages, pages_for(self.known, self.page_size)))


def _grown(array: IntArray, size: int) -> IntArray:
    grown = np.empty(size + max(_ROOM, size // 4), np.int32)
    grown[: len(array)] = array
    return grown


_ENDED = frozenset({Status.FINISHED, Status.FAILED, Status.ABORTED})
