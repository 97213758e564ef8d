"""Which page leaves the device next: the least recently used leaf that nobody holds; of equals, the least visited."""

from __future__ import annotations

import heapq
import itertools

from rekindle.cache.node import Node
from rekindle.cache.pool import PagePool


class EvictionQueue:
    """A heap of leaves, O(log n) for each page.

    Entries are never searched for: one that no longer describes its node (it was used again, grew a child, or left) is
    dropped when it comes up. A node is offered when it may have become a leaf: its last holder let go, or its last
    child on the device left.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._heap: list[tuple[float, int, int, Node]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, node: Node) -> None:
        if not self._evictable(node):
            return
        heapq.heappush(self._heap, (node.last_use, node.visits, next(self._order), node))
        # Stale entries are bounded by the pages that can be evicted, at an amortised constant cost for each offer.
        if len(self._heap) > 2 * self._pool.cached + 64:
            self._compact()

    def pop(self) -> Node | None:
        """The next page to evict, or None if every cached page is held."""
        while self._heap:
            last_use, visits, _, node = heapq.heappop(self._heap)
            if self._evictable(node) and (node.last_use, node.visits) == (last_use, visits):
                return node
        return None

    def clear(self) -> None:
        self._heap.clear()

    def _evictable(self, node: Node) -> bool:
        return bool(node.page) and not node.device_children and self._pool.references(node.page) == 1

    def _compact(self) -> None:
        current: dict[Node, tuple[float, int, int, Node]] = {}
        for entry in self._heap:
            node = entry[3]
            if self._evictable(node) and (node.last_use, node.visits) == entry[:2]:
                current[node] = entry
        self._heap = list(current.values())
        heapq.heapify(self._heap)
