"""The scheduler's state of one live request: its tokens, its pages, and how far it has been computed.

Two counts are positions, the first at most the second: `computed` were committed, `planned` will be in the pages once
every step in flight has run. Two are tokens: `generated` have values that the host knows, `sampled` adds those that
steps in flight will bring. A decode step is planned while the token that it reads is still on the device.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from rekindle._src.core.records import FinishReason, IntArray, Request, Row, Status
from rekindle._src.kvcache.digest import page_keys, salt_key
from rekindle._src.kvcache.kept import KeptCaptures
from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.scheduling.followers import ForcedTokens, followers_of
from rekindle._src.scheduling.prompt_lookup import PromptLookup

_GROWTH = 64  # tokens or pages by which a buffer grows, at least


class Tail:
    """The pages of one running sequence in layers with a window, from place `first` on: it gave others back."""

    __slots__ = ("_array", "_page_size", "_window", "again", "attached", "first", "pages", "source", "stops")

    def __init__(self, window: int, page_size: int) -> None:
        self._window, self._page_size = window, page_size
        self.first = 0
        self.pages: list[int] = []
        self._array: IntArray | None = None  # the pages, once a row has read them
        self.attached = 0  # places that the tree knows
        self.stops: set[int] = set()  # pages before which others are likely to continue
        self.source = ""  # where the pages came from that it continued
        self.again = 0  # cached tokens that it computes again, since these pages were not there

    @property
    def end(self) -> int:
        """The place behind the last page."""
        return self.first + len(self.pages)

    def changed(self) -> None:
        """Note that pages were added, replaced or given back."""
        self._array = None

    def of(self, start: int, stop: int) -> tuple[IntArray, int]:
        """Return the pages that a row of positions [start, stop) reads and writes, and the place of the first."""
        if self._array is None:
            self._array = np.array(self.pages, np.int32)
        first = max(0, start - self._window + 1) // self._page_size
        return self._array[first - self.first : pages_for(stop, self._page_size) - self.first], first


class StateTrail:
    """The states of one running sequence: the slots that it reads, and where it leaves some for the tree."""

    __slots__ = ("again", "held", "left", "pending", "reads", "source", "stops")

    def __init__(self) -> None:
        self.reads = 0  # the slot of its state, once a row was planned
        self.held = 0  # the tree's slot that its next row reads
        self.stops: list[int] = []  # positions of the prompt at which to leave a state, ascending
        self.pending: deque[tuple[int, int]] = deque()  # positions and slots of states left by steps in flight
        self.left: tuple[Node, int] | None = None  # the node of the last state of its own text, and that node's visits
        self.source = ""  # where the state came from that it continued
        self.again = 0  # cached tokens that it computes again, since no state was there


class Sequence:
    """Mutable state of one request; the scheduler is its only owner."""

    __slots__ = (
        "_keys", "_pages", "_table", "_tokens", "arrived", "cached_tokens", "claimed", "computed", "drafter", "epoch",
        "followers", "forced", "fresh", "generated", "generation", "in_flight", "known", "limit", "limit_reason",
        "lookup", "node", "num_pages", "overtaken", "page_size", "planned", "preemptions", "published", "queued_at",
        "reason", "request", "root", "sampled", "slot", "status", "tail", "target", "trail", "waits_for",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        arrived: int,
        limit: int,
        limit_reason: FinishReason,
        page_size: int,
        kept: KeptCaptures | None = None,
    ) -> None:
        self.request = request
        self.root = request.root  # the name of its root in the prefix tree
        self.arrived = arrived  # order of submission
        self.limit = limit  # tokens it may generate, known before the first one is
        self.limit_reason = limit_reason
        self.page_size = page_size
        self.status = Status.QUEUED
        self.reason = "has not had its turn"  # why it waits, for explain()
        self.waits_for: Sequence | None = None  # the one that computes the prefix which this one needs
        self.overtaken = 0  # requests admitted before it while it was the oldest
        self.preemptions = 0
        self.queued_at: int | None = None  # tokens admitted before it was queued; kept under the policy sjf
        # State of this epoch, which begins with an admission:
        self.epoch = 0
        self.slot = -1
        self.fresh = True  # no row was planned in this epoch
        self.in_flight = 0  # steps that contain it and were neither committed nor failed
        self.target = 0  # positions to prefill: the prompt, and what was generated before a preemption
        self.planned = 0
        self.computed = 0
        # Tokens:
        resumed = request.resumed
        self._tokens = request.token_ids if resumed is None else np.concatenate([request.token_ids, resumed.token_ids])
        self.known = len(self._tokens)  # tokens whose values the host has
        self.generated = self.known - request.prompt_length  # known tokens that are not the prompt's
        self.sampled = self.generated  # generated, plus those that steps in flight will add
        self.cached_tokens = 0  # prompt tokens that the first admission found in the cache
        self.followers = followers_of(request, kept)
        self.forced = next((one for one in self.followers if isinstance(one, ForcedTokens)), None)
        self.drafter: PromptLookup | ForcedTokens | None = None  # proposed the drafts that are in flight
        self.lookup: PromptLookup | None = None  # proposes draft tokens; made at first use
        self._keys: list[int] = []
        # Pages:
        self.num_pages = 0
        self._pages: IntArray = np.empty(0, np.int32)
        self._table: IntArray | None = None
        self.node: Node | None = None  # the deepest node of the prefix tree that the sequence holds
        self.generation = 0  # of the prefix cache that `node` belongs to
        self.published = 0  # leading pages that are in the tree
        self.claimed = 0  # leading pages that are claimed in PrefixClaims
        self.trail: StateTrail | None = None  # its states since the latest admission, in models that have some
        self.tail: Tail | None = None  # its pages of layers with a window, in models that give such back

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def prefilling(self) -> bool:
        return self.planned < self.target

    @property
    def decodes(self) -> bool:
        """True if one token is left to prefill, which a decode row computes. False for one that generates nothing."""
        return self.planned + 1 == self.target and self.request.generates

    @property
    def ended(self) -> bool:
        return self.status in _ENDED

    @property
    def reusable(self) -> int:
        """Leading tokens whose pages may come from the cache."""
        return min((one.reusable(self.known) for one in self.followers), default=self.known)

    @property
    def remaining(self) -> int:
        """Tokens that the sequence may still sample."""
        return self.limit - self.sampled

    @property
    def outputs(self) -> IntArray:
        """The generated tokens that the host knows."""
        return self._tokens[self.request.prompt_length : self.known]

    @property
    def pages(self) -> IntArray:
        return self._pages[: self.num_pages]

    def tokens(self, start: int, stop: int) -> IntArray:
        """Return the values of the tokens [start, stop), all of which must be known."""
        assert stop <= self.known, f"{self.id}: token {stop - 1} is not known yet, {self.known} are"
        return self._tokens[start:stop]

    def keys(self, count: int) -> list[int]:
        """Return the lookup keys of the first `count` pages; each is computed once."""
        keys = self._keys
        if len(keys) < count:
            first, size = len(keys), self.page_size
            keys += page_keys(
                self.tokens(first * size, count * size),
                size,
                first=first,
                previous=keys[-1] if keys else salt_key(self.root),
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
        """Replace pages by others of the same content; tables of steps in flight are copies and do not change."""
        self._pages[first : first + len(pages)] = pages
        self._table = None

    def begin(self, slot: int, start: int) -> None:
        """Begin an epoch in `slot`; the pages hold the positions [0, start) already."""
        assert not self.in_flight, f"{self.id} is admitted with steps in flight"
        assert self.sampled == self.generated, f"{self.id} is admitted with tokens in flight"
        self.epoch += 1
        self.slot = slot
        self.fresh = True
        self.computed = self.planned = start
        self.target = self.known
        self.status = Status.PREFILL
        for follower in self.followers:
            follower.begin(start)
        if self.epoch == 1:
            self.cached_tokens = min(start, self.request.prompt_length)

    def leave(self) -> None:
        """Forget slot and pages, which were returned."""
        self.slot = -1
        self.num_pages = self.published = self.claimed = 0
        self._table = None
        self.node = None
        self.sampled = self.generated

    def row(self, length: int, reads: int = 0, writes: int = 0) -> Row:
        """Make the sequence's row of `length` tokens in the next step, and count that step as in flight.

        It reads the state in one slot and writes that in another, if the model has states.
        """
        start = self.planned
        end = start + length
        assert end <= self.num_pages * self.page_size, f"{self.id}: no page for position {end - 1}"
        samples = end >= self.target and self.request.generates
        if self._table is None:
            self._table = self._pages[: self.num_pages].copy()
        tails, first = (None, 0) if self.tail is None else self.tail.of(start, end)
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
            reads=reads,
            writes=writes,
            tails=tails,
            first=first,
        )
        self.fresh = False
        self.planned = end
        self.sampled += samples
        self.in_flight += 1
        return row

    def drafts(self, tokens: IntArray) -> list[Row]:
        """Make rows for draft tokens behind the latest row; they add nothing to the counts until accepted."""
        start = self.planned
        assert start + len(tokens) <= self.num_pages * self.page_size, f"{self.id}: no page for its last draft"
        if self._table is None:
            self._table = self._pages[: self.num_pages].copy()
        self.in_flight += len(tokens)
        rows = []
        for index in range(len(tokens)):
            at = start + index
            tails, first = (None, 0) if self.tail is None else self.tail.of(at, at + 1)
            rows.append(
                Row(
                    self.request,
                    self.epoch,
                    self.slot,
                    at,
                    1,
                    self._table,
                    tokens[index : index + 1],
                    True,
                    generated=self.sampled + index,
                    draft=True,
                    tails=tails,
                    first=first,
                )
            )
        return rows

    def drafts_checked(self) -> None:
        """Continue after the last accepted token, now that the drafts were checked."""
        self.planned, self.sampled = self.computed, self.generated

    def growth(self, fraction: float) -> int:
        """Return how many more pages the sequence will need if it samples `fraction` of its remaining tokens."""
        length = self.request.prompt_length + self.sampled + int(fraction * self.remaining)
        return max(0, pages_for(length, self.page_size) - max(self.num_pages, pages_for(self.known, self.page_size)))


def _grown(array: IntArray, size: int) -> IntArray:
    grown = np.empty(size + max(_GROWTH, size // 4), np.int32)
    grown[: len(array)] = array
    return grown


_ENDED = frozenset({Status.FINISHED, Status.FAILED, Status.ABORTED})
