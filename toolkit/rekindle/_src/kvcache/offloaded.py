"""Nodes without a device page: which of them the lower tiers can bring back, and which are forgotten."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from rekindle._src.core.records import PageMove, StepResult
from rekindle._src.kvcache.node import Node, NodeTable


class TierLike(Protocol):
    """Where payloads of pages live that left the device; the runner moves them. All of it is called by one thread.

    What was there when a match asked stays there at least until the next `trim`, and while it is held.
    """

    def __contains__(self, digest: bytes, /) -> bool:
        """It can be restored now."""

    def knows(self, digest: bytes, /) -> bool:
        """It can be restored now, or after a while."""

    def wants(self, digest: bytes, /) -> bool:
        """Its page is about to leave the device: should it be read out? It counts as used now."""

    def touch(self, digest: bytes, /) -> None: ...

    def hold(self, digest: bytes, /) -> None: ...

    def release(self, digest: bytes, /) -> None: ...

    def discard(self, digest: bytes, /) -> None:
        """Its payload can't be used: it is never offered again, so that the page is computed."""

    def trim(self) -> None:
        """Drop what is beyond the budget."""

    def clear(self) -> None: ...

    def worth(self, pages: int, /) -> bool:
        """Copying that many pages is expected to be quicker than computing them."""

    def observe(self, result: StepResult, /) -> None:
        """A step was committed: measure."""


class OffloadedNodes:
    """A node stays known while its payload is in the host tier or on its way there, or while a child is known.

    The tier prunes by its own rules and tells nobody, so nodes are asked about when a match reaches them, and two at a
    time whenever a page leaves the device: what the tier dropped does not pile up, at a constant cost.
    """

    def __init__(self, table: NodeTable, host_tier: TierLike | None) -> None:
        self._table, self._tier = table, host_tier
        self._nodes: OrderedDict[Node, None] = OrderedDict()
        self._departing: set[bytes] = set()  # read out by a step that was not committed yet
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, node: Node) -> None:
        self._nodes[node] = None

    def depart(self, node: Node) -> PageMove | None:
        """The move that brings the page of `node` to the host tier, unless it is there or there is no tier."""
        if self._tier is None:
            return None
        digest = self._table.digest_of(node)
        if not self._tier.wants(digest):
            return None
        self._departing.add(digest)
        return PageMove(node.page, digest)

    def offload_done(self, moves: Sequence[PageMove]) -> None:
        self._departing.difference_update(move.digest for move in moves)

    def on_disk(self, node: Node) -> bool:
        """Its payload can be read after a while: it has to be fetched first."""
        return self._tier is not None and self._tier.knows(self._table.digest_of(node))

    def restorable(self, node: Node) -> bool:
        """Its payload can be read now."""
        return self._tier is not None and self._table.digest_of(node) in self._tier

    def forget(self, node: Node) -> None:
        """Remove nodes whose payload is nowhere, from a leaf upwards."""
        while node in self._table and not (node.page or node.children or node.pins or self._kept(node)):
            assert node.parent is not None, "the root is not in the table"
            self._table.remove(node)
            self._nodes.pop(node, None)
            self.forgotten += 1
            node = node.parent

    def sweep(self) -> None:
        for _ in range(min(2, len(self._nodes))):
            node, _none = self._nodes.popitem(last=False)
            if node in self._table and not node.page:
                self.forget(node)
                if node in self._table:
                    self._nodes[node] = None

    def _kept(self, node: Node) -> bool:
        if self._tier is None:
            return False
        digest = self._table.digest_of(node)
        return digest in self._departing or self._tier.knows(digest)
