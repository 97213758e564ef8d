"""Entries that are pages: a sequence takes them row by row, and gives them back as its window moves past them.

A running sequence has the pages of its tokens that are not committed, and before these as many as its next page's end
may need: another prompt that continues there finds the whole window. Returned pages stay in the tree until the room is
needed. Pages are likely to be used again, and go to the tiers below,

- before the end of the prompt, and where its cached pages ended: there prompts branch
- where a request that waits for this one's pages will branch off
- at the end of the text

All others are the next to leave, and are dropped then.

There are enough pages for all slots, however long their sequences are (`SidePlan.reserved`), or as many as there are
pages of all other layers. So admission does not ask for them: a sequence that has its pages there has them here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

import numpy as np

from rekindle._src.core.records import IntArray, PageRun
from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.kvcache.side import EntryWords, SideCache
from rekindle._src.kvcache.tree import PrefixMatch
from rekindle._src.scheduling.sequence import Holding, Limits, Sequence
from rekindle._src.scheduling.side_rules import SideRule


class SequencePages(Holding):
    """The pages of one running sequence, from place `first` on: it gave others back."""

    __slots__ = ("_array", "_page_size", "_window", "attached", "first", "pages", "stops")

    def __init__(self, words: EntryWords, window: int, page_size: int) -> None:
        super().__init__(words)
        self._window, self._page_size = window, page_size
        self.first = 0
        self.pages: list[int] = []
        self._array: IntArray | None = None  # the pages, once a row has read them
        self.attached = 0  # places that the tree knows
        self.stops: set[int] = set()  # pages before which others are likely to continue

    @property
    def end(self) -> int:
        """The place after the last page."""
        return self.first + len(self.pages)

    def changed(self) -> None:
        """Note that pages were added, replaced or given back."""
        self._array = None

    def run(self, start: int, stop: int) -> PageRun:
        """Return the pages that a row of positions [start, stop) reads and writes."""
        if self._array is None:
            self._array = np.array(self.pages, np.int32)
        first = max(0, start - self._window + 1) // self._page_size
        return PageRun(first, self._array[first - self.first : pages_for(stop, self._page_size) - self.first])


class PageRuns(SideRule[SequencePages]):
    """The pages of all sequences, on top of the tree's."""

    def __init__(self, limits: Limits, cache: SideCache) -> None:
        super().__init__(cache)
        self._page_size, self._window = limits.page_size, cache.plan.window
        self._retired: deque[tuple[int, list[int]]] = deque()  # merged duplicates, as in `PageLedger`

    def cut(self, sequence: Sequence, length: int) -> int:
        room = (self.holding(sequence).end + self.cache.available) * self._page_size - sequence.epoch.planned
        return max(0, min(length, room))

    def row(self, sequence: Sequence, length: int) -> PageRun:
        held: SequencePages = sequence.sides[self.number]
        start = sequence.epoch.planned
        end = start + length
        if end > (held.first + len(held.pages)) * self._page_size:
            self.cover(sequence, end)
        return held.run(start, end)

    def draft(self, sequence: Sequence, position: int) -> PageRun:
        return self.holding(sequence).run(position, position + 1)

    def cover(self, sequence: Sequence, end: int) -> None:
        held = self.holding(sequence)
        for _ in range(pages_for(end, self._page_size) - held.end):
            page = self.cache.take()
            assert page, f"{sequence.id} has no page after a window"
            held.pages.append(page)
            held.changed()

    def admit(self, sequence: Sequence, match: PrefixMatch, *, fetched: bool) -> SequencePages:
        cache, depth = self.cache, len(match.nodes)
        held = SequencePages(cache.plan.words, self._window, self._page_size)
        held.first, held.attached = max(0, depth - cache.span), depth
        needed = match.nodes[held.first :]
        slots = [cache.slot(node) for node in needed]
        for slot in filter(None, slots):  # before others are brought back, which may take the place of some
            cache.hold(slot)
        if depth:
            held.source = "on the device" if all(slots) else "on disk" if fetched else "in host memory"
        held.pages = [slot or cache.restore(node) for slot, node in zip(slots, needed, strict=True)]
        held.again = (match.reached - depth) * self._page_size
        held.stops = {sequence.tokens.known // self._page_size, match.reached}
        return held

    def shared(self, owner: Sequence | None, pages: int) -> int:
        if owner is not None and owner.sides:
            self.holding(owner).stops.add(pages)
        return pages

    def publish(self, sequence: Sequence, node: Node | None, last_step: int) -> None:
        held: SequencePages = sequence.sides[self.number]
        if node is None or held.attached >= sequence.tree.published:
            return
        cache = self.cache
        duplicates = []
        for place in range(sequence.tree.published - 1, max(held.attached, held.first) - 1, -1):
            at = place - held.first
            slot = cache.slot(node)
            if not slot:
                cache.attach(node, held.pages[at])
            elif slot != held.pages[at]:
                cache.hold(slot)
                duplicates.append(held.pages[at])
                held.pages[at] = slot
                held.changed()
            assert node.parent is not None, "the root has no page"
            node = node.parent
        held.attached = sequence.tree.published
        if duplicates:
            self._retired.append((last_step, duplicates))

    def recede(self, sequence: Sequence) -> None:
        held: SequencePages = sequence.sides[self.number]
        count = sequence.epoch.computed // self._page_size - self.cache.span - held.first
        if count <= 0:
            return
        for place, page in enumerate(held.pages[:count], start=held.first):
            warm = any(stop - self.cache.span <= place < stop for stop in held.stops)
            self.cache.release(page, cold=not warm)
        del held.pages[:count]
        held.first += count
        held.changed()

    def release(self, sequence: Sequence) -> None:
        held = self.holding(sequence)
        for page in held.pages:
            self.cache.release(page)
        held.pages = []

    def collect(self, oldest_step: int | None) -> None:
        while self._retired and (oldest_step is None or self._retired[0][0] < oldest_step):
            for page in self._retired.popleft()[1]:
                self.cache.release(page)

    def held(self, sequence: Sequence) -> Iterable[int]:
        return self.holding(sequence).pages

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        holds = Counter(page for _, pages in self._retired for page in pages)
        for sequence in sequences:
            held = self.holding(sequence)
            holds.update(held.pages)
            assert held.end * self._page_size >= sequence.epoch.planned, f"{sequence.id} lacks pages"
        self.cache.check_integrity(holds)
