"""The choice of the page that leaves the device next: among the leaves without a holder the one with the lowest score.

The score of a page is set when it is used: the square root of its number of uses, plus the score of the page that left
last. So popularity counts but ages: once enough other pages have come and gone, a page that used to be popular leaves
too. Pages with equal scores leave in the order of their last use. Among the policies in workshop/eviction.py this one
stays closest to the best possible choice, over all loads.
"""

from __future__ import annotations

import heapq
import itertools
import math

from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.pool import PagePool


class EvictionQueue:
    """A heap of leaves, O(log n) for each page.

    Entries are never searched for: one that no longer describes its node (it was used again, grew a child, or left) is
    dropped when it comes up. A node is offered when it may have become a leaf: its last holder let go, or its last
    child on the device left.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._heap: list[tuple[float, float, int, Node]] = []
        self._order = itertools.count()
        self._floor = 0.0  # the score of the page that left last

    def __len__(self) -> int:
        return len(self._heap)

    def record_use(self, node: Node, now: float) -> None:
        """Record that `node` is used now: set its time and its score."""
        node.last_use = now
        node.score = self._floor + math.sqrt(1 + node.visits)

    def offer(self, node: Node) -> None:
        """Add `node` to the heap if its page can be evicted."""
        if not self._evictable(node):
            return
        heapq.heappush(self._heap, (node.score, node.last_use, next(self._order), node))
        # Stale entries are bounded by the pages that can be evicted, at an amortised constant cost for each offer.
        if len(self._heap) > 2 * self._pool.cached + 64:
            self._compact()

    def pop(self) -> Node | None:
        """Return the node to evict next, or None if every cached page is held."""
        while self._heap:
            score, last_use, _, node = heapq.heappop(self._heap)
            if self._evictable(node) and (node.score, node.last_use) == (score, last_use):
                self._floor = max(self._floor, score)
                return node
        return None

    def clear(self) -> None:
        """Forget all entries and scores."""
        self._heap.clear()
        self._floor = 0.0

    def _evictable(self, node: Node) -> bool:
        return bool(node.page) and not node.device_children and self._pool.references(node.page) == 1

    def _compact(self) -> None:
        current: dict[Node, tuple[float, float, int, Node]] = {}
        for entry in self._heap:
            node = entry[3]
            if self._evictable(node) and (node.score, node.last_use) == entry[:2]:
                current[node] = entry
        self._heap = list(current.values())
        heapq.heapify(self._heap)
