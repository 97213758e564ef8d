"""The state of a live request, in parts: its place in the queue, its epoch, its tokens, its pages, and its drafts.

Each part is changed by its own methods and by the scheduler, the only owner of a `Sequence`.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np

from rekindle._src.core.prefix import Prefix
from rekindle._src.core.records import IntArray, Request
from rekindle._src.kvcache.digest import page_keys
from rekindle._src.kvcache.node import Node
from rekindle._src.scheduling.drafting.proposal import RequestDrafts

_GROWTH = 64  # tokens or pages that a buffer grows by, at least


def grown(array: IntArray, size: int) -> IntArray:
    """Return a copy of an array that has room for `size` values and more."""
    larger = np.empty(size + max(_GROWTH, size // 4), np.int32)
    larger[: len(array)] = array
    return larger


Other = TypeVar("Other")  # a request


class QueuePlace(Generic[Other]):
    """A request's place among the requests that wait."""

    __slots__ = ("arrived", "before", "overtaken", "preemptions", "turn", "waits_for")

    def __init__(self, arrived: int) -> None:
        self.arrived = arrived  # order of submission
        self.overtaken = 0  # requests admitted before it while it was the oldest
        self.before: int | None = None  # tokens admitted before it was queued; kept under the policy sjf
        self.turn = -1  # the round of callers' turns in which it is admitted; -1 until it is queued
        self.waits_for: Other | None = None  # the one that computes the prefix which this one needs
        self.preemptions = 0


class Epoch:
    """The time from an admission until the request leaves its slot. Steps in flight say which one their rows belong to.

    Positions before `computed` were committed; those before `planned` will be in the pages once every step in flight
    has run.
    """

    __slots__ = ("cached", "computed", "fresh", "in_flight", "number", "planned", "slot", "target")

    def __init__(self, number: int = 0, slot: int = -1, start: int = 0, target: int = 0) -> None:
        """Begin in `slot`; the pages hold the positions [0, start) already."""
        self.number = number
        self.slot = slot
        self.fresh = True  # no row was planned yet
        self.in_flight = 0  # steps that contain it and were neither committed nor failed
        self.target = target  # positions to prefill: the prompt, and tokens generated before a preemption
        self.planned = self.computed = start
        self.cached = start  # leading positions with cached pages when it began


class SequenceTokens:
    """The tokens of a request: their values, their names in the prefix tree, and the keys of their pages."""

    __slots__ = ("_keys", "_names", "_namespace", "_page_size", "_values", "generated", "known", "sampled")

    def __init__(self, request: Request, page_size: int) -> None:
        self._values = request.begun
        self._names = request.extensions.naming  # None: the values are the names
        self._namespace, self._page_size = request.namespace, page_size
        self._keys: list[int] = []
        self.known = len(self._values)  # tokens with values on the host
        self.generated = self.known - request.prompt_length  # known tokens that are not the prompt's
        self.sampled = self.generated  # generated, plus tokens that steps in flight will add

    def values(self, start: int, stop: int) -> IntArray:
        """Return the values of the tokens [start, stop); all of them must be known."""
        assert stop <= self.known, f"token {stop - 1} is not known yet, {self.known} are"
        return self._values[start:stop]

    @property
    def outputs(self) -> IntArray:
        """The generated tokens that the host knows."""
        return self._values[self.known - self.generated : self.known]

    def names(self, start: int, stop: int) -> IntArray:
        """Return the names of the tokens [start, stop) in the prefix tree; `start` begins a page."""
        values = self.values(start, stop)
        return values if self._names is None else self._names.names(values, start, self._page_size)

    def prefix(self) -> Prefix:
        """Return all known tokens as the prefix tree knows them."""
        return Prefix(self.names(0, self.known), self._namespace)

    def text(self) -> IntArray:
        """Return all known tokens, with numbers below 0 for tokens without text, such as a picture's."""
        values = self.values(0, self.known)
        return values if self._names is None else self._names.masked(values, 0)

    def keys(self, count: int) -> list[int]:
        """Return the lookup keys of the first `count` pages; each is computed once."""
        keys = self._keys
        if len(keys) < count:
            first, size = len(keys), self._page_size
            keys += page_keys(
                self.names(first * size, count * size),
                size,
                first=first,
                previous=keys[-1] if keys else self._namespace.key,
            )
        return keys if len(keys) == count else keys[:count]

    def append(self, token: int) -> None:
        """Add a generated token."""
        if self.known == len(self._values):
            # Rows of steps in flight may still read the old buffer, so it is left as it is.
            self._values = grown(self._values, self.known + 1)
        self._values[self.known] = token
        self.known += 1
        self.generated += 1


class PageList:
    """The pages of a request on the device, in the order of their tokens."""

    __slots__ = ("_ids", "_table", "count", "size")

    def __init__(self, size: int) -> None:
        self.size = size  # tokens of a page
        self.count = 0
        self._ids: IntArray = np.empty(0, np.int32)
        self._table: IntArray | None = None

    @property
    def ids(self) -> IntArray:
        """The number of each page."""
        return self._ids[: self.count]

    def table(self) -> IntArray:
        """Return a copy for rows, which all share until the pages change."""
        table = self._table
        if table is None:
            table = self._table = self._ids[: self.count].copy()
        return table

    def add(self, pages: list[int]) -> None:
        """Add pages at the end."""
        end = self.count + len(pages)
        if end > len(self._ids):
            self._ids = grown(self._ids[: self.count], end)
        self._ids[self.count : end] = pages
        self.count = end
        self._table = None

    def replace(self, first: int, pages: list[int]) -> None:
        """Replace pages by others of the same content; tables of steps in flight are copies and do not change."""
        self._ids[first : first + len(pages)] = pages
        self._table = None

    def clear(self) -> None:
        """Forget all pages, which were returned."""
        self.count = 0
        self._table = None


class TreePlace:
    """The part of a request's pages that the prefix tree has, or is to get from it."""

    __slots__ = ("claimed", "generation", "node", "published")

    def __init__(self) -> None:
        self.node: Node | None = None  # the deepest node of the prefix tree that the sequence holds
        self.generation = 0  # of the prefix cache that `node` belongs to
        self.published = 0  # leading pages that are in the tree
        self.claimed = 0  # leading pages that are claimed in PrefixClaims

    def leave(self) -> None:
        """Let go of the tree. The generation stays until the next admission."""
        self.node = None
        self.published = self.claimed = 0


class Drafting:
    """The state of drafters for one request."""

    __slots__ = ("begun", "by_name", "proposer")

    def __init__(self) -> None:
        self.begun = False  # drafters have seen it
        self.by_name: dict[str, RequestDrafts] = {}  # what each drafter keeps of it
        self.proposer = ""  # the drafter that proposed the drafts in flight

    def push(self, token: int) -> None:
        """Tell drafters the next token."""
        for drafts in self.by_name.values():
            drafts.push(token)

    @property
    def awaited(self) -> bool:
        """True if a drafter needs the next token before the step after that is planned."""
        return bool(self.by_name) and any(drafts.asks for drafts in self.by_name.values())
