"""Nodes without a device page, which the lower tiers bring back or which are forgotten."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from rekindle._src.core.records import PageMove, StepResult
from rekindle._src.kvcache.node import Node, NodeTable


class TierLike(Protocol):
    """The tiers that hold payloads of pages that left the device; the runner moves them. One thread calls all of it.

    A payload that a match has seen stays there until the next `trim`, and for as long as it is held.
    """

    def __contains__(self, digest: bytes, /) -> bool:
        """True if the payload can be restored now."""

    def has(self, digest: bytes, /) -> bool:
        """True if the payload can be restored now or after it was fetched."""

    def should_offload(self, digest: bytes, /) -> bool:
        """True if a page that is about to leave the device should be read out. It counts as used now."""

    def touch(self, digest: bytes, /) -> None:
        """Record that the payload is used now."""

    def hold(self, digest: bytes, /) -> None:
        """Keep the payload until as many calls of `release`."""

    def release(self, digest: bytes, /) -> None:
        """Undo one `hold`."""

    def discard(self, digest: bytes, /) -> None:
        """Never offer a payload again, because it can't be used; its page is computed."""

    def trim(self) -> None:
        """Drop payloads beyond the budget."""

    def clear(self) -> None:
        """Forget every payload."""

    def worth(self, pages: int, /) -> bool:
        """True if copying that many pages is expected to be quicker than computing them."""

    def observe(self, result: StepResult, /) -> None:
        """Measure the cost of a committed step."""


class OffloadedNodes:
    """A node stays known while its payload is in the host tier or on its way there, or while a child is known.

    The tier drops payloads by its own rules and does not report it. So a node is looked up in the tier when a match
    reaches it, and two nodes whenever a page leaves the device: nodes without a payload do not pile up, and the cost of
    each eviction is constant.
    """

    def __init__(self, table: NodeTable, host_tier: TierLike | None) -> None:
        self._table, self._tier = table, host_tier
        self._nodes: OrderedDict[Node, None] = OrderedDict()
        self._departing: set[bytes] = set()  # read out by a step that was not committed yet
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, node: Node) -> None:
        """Take in a node that has no device page."""
        self._nodes[node] = None

    def depart(self, node: Node) -> PageMove | None:
        """Return the move of `node`'s page to the host tier; None if it is there already or there is no tier."""
        if self._tier is None:
            return None
        digest = self._table.digest_of(node)
        if not self._tier.should_offload(digest):
            return None
        self._departing.add(digest)
        return PageMove(node.page, digest)

    def offload_done(self, moves: Sequence[PageMove]) -> None:
        """End the departure of pages whose step was committed or has failed. From then on the tier decides."""
        self._departing.difference_update(move.digest for move in moves)

    def on_disk(self, node: Node) -> bool:
        """True if its payload can be fetched from disk."""
        return self._tier is not None and self._tier.has(self._table.digest_of(node))

    def restorable(self, node: Node) -> bool:
        """True if its payload is in host memory, so that a step can restore it."""
        return self._tier is not None and self._table.digest_of(node) in self._tier

    def forget(self, node: Node) -> None:
        """Remove `node` if it is a leaf whose payload is in no tier, then its parent likewise, and so on upwards."""
        while node in self._table and not (node.page or node.children or node.pins or self._has_payload(node)):
            assert node.parent is not None, "the root is not in the table"
            self._table.remove(node)
            self._nodes.pop(node, None)
            self.forgotten += 1
            node = node.parent

    def sweep(self) -> None:
        """Look up the next two nodes in the tier, and remove those whose payload is gone."""
        for _ in range(min(2, len(self._nodes))):
            node, _none = self._nodes.popitem(last=False)
            if node in self._table and not node.page:
                self.forget(node)
                if node in self._table:
                    self._nodes[node] = None

    def _has_payload(self, node: Node) -> bool:
        if self._tier is None:
            return False
        digest = self._table.digest_of(node)
        return digest in self._departing or self._tier.has(digest)
