"""Nodes of the prefix tree, one full page of tokens each, and the tables of them that the tree is made of.

`NodeTable` finds nodes by the key of their prefix, `Beginnings` by the first tokens of a page, and `OffloadedNodes` has
those without a device page. Finding a prefix costs one dictionary access per page and one comparison of all tokens at
once, whatever the size of the tree. Iterating gives parents before children.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import numpy as np

from rekindle._src.core.prefix import key_of
from rekindle._src.core.records import IntArray, PageMove, StepResult
from rekindle._src.kvcache.digest import page_digest


class Node:
    """One page of tokens after its parent's. Nodes are compared by object; only the tree changes them.

    A node has its page on the device, or its payload in a lower tier under its digest, or both. If a node has a device
    page, so has its parent. A root has depth 0, no parent and no page.
    """

    __slots__ = (
        "__weakref__", "children", "depth", "device_children", "digest", "key", "last_use", "page", "parent", "pins",
        "requested", "row", "score", "visits",
    )  # fmt: skip

    def __init__(self, key: int, parent: Node | None, row: int, last_use: float) -> None:
        self.key = key
        self.parent = parent
        self.row = row  # where the table keeps its tokens
        self.depth: int = 0 if parent is None else parent.depth + 1  # pages up to and including this one
        self.page = 0  # on the device; 0 is none
        self.children = 0
        self.device_children = 0  # children that have a device page
        self.visits = 0  # admissions that hit it
        self.requested = False  # a request of this session had it; else it is known from disk or another session alone
        self.last_use = last_use
        self.score = 0.0  # the eviction policy's: grows with use
        self.pins = 0  # how many pins cover it
        self.digest: bytes | None = None  # computed at first use

    def __repr__(self) -> str:
        return f"Node(depth={self.depth}, page={self.page}, visits={self.visits}, children={self.children})"


class NodeTable:
    """Holds all nodes below the root and the roots of namespaces, with their tokens in one array."""

    def __init__(self, page_size: int, root_key: bytes) -> None:
        self.page_size = page_size
        self.root = Node(0, None, -1, 0.0)
        self.root.digest = root_key
        self._namespaces: WeakValueDictionary[bytes, Node] = WeakValueDictionary()  # those with nodes below, or in use
        self._nodes: dict[int, Node] = {}
        self._tokens: IntArray = np.zeros((64, page_size), np.int32)
        self._rows = list(range(63, -1, -1))

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __contains__(self, node: Node) -> bool:
        return self._nodes.get(node.key) is node

    def get(self, key: int) -> Node | None:
        """Return the node of this key, if there is one. Tokens are not compared."""
        return self._nodes.get(key)

    def namespace(self, digest: bytes) -> Node:
        """Return the root of the namespace with this digest."""
        if digest == self.root.digest:
            return self.root
        root = self._namespaces.get(digest)
        if root is None:
            root = self._namespaces[digest] = Node(key_of(digest), None, -1, 0.0)
            root.digest = digest
        return root

    def roots(self) -> list[Node]:
        """Return every root in use, the root of the shared namespace first."""
        return [self.root, *self._namespaces.values()]

    def find(self, parent: Node, keys: Sequence[int], tokens: IntArray) -> list[Node]:
        """Return the known nodes for `tokens` after `parent`, by their pages' `keys`. Tokens are compared exactly."""
        nodes: list[Node] = []
        get = self._nodes.get
        for key in keys:
            node = get(key)
            if node is None or node.parent is not parent:
                break
            nodes.append(node)
            parent = node
        if not nodes:
            return nodes
        rows = np.fromiter((node.row for node in nodes), np.int64, len(nodes))
        expected = tokens[: len(nodes) * self.page_size].reshape(len(nodes), self.page_size)
        equal = (self._tokens[rows] == expected).all(1)
        return nodes if equal.all() else nodes[: int(equal.argmin())]

    def depth(self, keys: Sequence[int], *, on_device: bool) -> int:
        """Return how many leading pages are known, or are on the device. Bisects, without comparing tokens."""
        low, high, get = 0, len(keys), self._nodes.get
        while low < high:
            middle = (low + high) // 2
            node = get(keys[middle])
            if node is not None and (node.page or not on_device):
                low = middle + 1
            else:
                high = middle
        return low

    def add(
        self, parent: Node, keys: Sequence[int], tokens: IntArray, now: float, pages: Sequence[int] = ()
    ) -> list[Node] | None:
        """Add nodes that continue `parent`, on the device if `pages` are given.

        None if a key is taken by another prefix, which then keeps its place.
        """
        if not self._nodes.keys().isdisjoint(keys):
            return None
        rows = self._take_rows(len(keys))
        self._tokens[rows] = tokens.reshape(len(keys), self.page_size)
        nodes = []
        for index, (key, row) in enumerate(zip(keys, rows, strict=True)):
            node = Node(key, parent, row, now)
            parent.children += 1
            if pages:
                node.page = pages[index]
                parent.device_children += 1
            nodes.append(node)
            parent = node
        self._nodes.update(zip(keys, nodes, strict=True))
        return nodes

    def remove(self, node: Node) -> None:
        """Take a node without children and without a device page out of the tree."""
        assert node.parent is not None, "the root stays"
        assert not node.children + node.page, f"{node} is in use"
        del self._nodes[node.key]
        self._rows.append(node.row)
        node.parent.children -= 1

    def tokens_of(self, node: Node) -> IntArray:
        """Return the tokens of this page alone."""
        return self._tokens[node.row]

    def digest_of(self, node: Node) -> bytes:
        """Return the page's name in every process; computed once."""
        missing = []
        while node.digest is None:
            missing.append(node)
            assert node.parent is not None, "the root has its digest"
            node = node.parent
        digest = node.digest
        for node in reversed(missing):
            digest = node.digest = page_digest(digest, self._tokens[node.row])
        return digest

    def check_integrity(self) -> None:
        """Raise AssertionError unless keys and counts are right and parents of device pages have one; walks it all."""
        below: dict[Node, list[Node]] = {}
        roots = self.roots()
        for key, node in self._nodes.items():
            parent = node.parent
            assert node.key == key, "a node is filed under another key"
            assert parent is not None, "the root is not listed"
            assert parent in (self if parent.depth else roots), "a node lost its parent"
            assert not node.page or not parent.depth or parent.page, "a device page below an absent one"
            below.setdefault(parent, []).append(node)
        for node in (*roots, *self):
            children = below.get(node, [])
            assert node.children == len(children), f"{node} has {len(children)} children"
            on_device = sum(bool(child.page) for child in children)
            assert node.device_children == on_device, f"{node} has {on_device} children on the device"
        assert len(self._rows) + len(self._nodes) == len(self._tokens), "token rows leaked"

    def _take_rows(self, count: int) -> list[int]:
        while len(self._rows) < count:
            size = len(self._tokens)
            grown = np.zeros((2 * size, self.page_size), np.int32)
            grown[:size] = self._tokens
            self._tokens = grown
            self._rows = list(range(2 * size - 1, size - 1, -1)) + self._rows
        rows = self._rows[len(self._rows) - count :]
        del self._rows[len(self._rows) - count :]
        rows.reverse()
        return rows


def is_below(node: Node, pages: set[int]) -> bool:
    """True if one of the device pages before `node` is among `pages`."""
    above = node.parent
    while above is not None and above.page:
        if above.page in pages:
            return True
        above = above.parent
    return False


SMALLEST_PAGE = 16  # tokens; of smaller pages no copy is worth its call


def least_copied(page_size: int) -> int:
    """Return how many tokens at the beginning of a page are worth a copy of it; 0 if none are."""
    return max(4, page_size // 8) if page_size >= SMALLEST_PAGE else 0


def common(one: IntArray, other: IntArray) -> int:
    """Return how many tokens at the beginning of both are the same. Names, which are negative, hold for whole pages."""
    length = min(len(one), len(other))
    differs = np.flatnonzero((one[:length] != other[:length]) | (one[:length] < 0))
    return int(differs[0]) if len(differs) else length


class Beginnings:
    """The page that was computed last, for each page before it and each `least` tokens at its beginning."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._nodes: dict[tuple[int, bytes], Node] = {}

    def add(self, node: Node, tokens: IntArray) -> None:
        """Note that the page of `node`, which has `tokens`, is on the device, and computed."""
        if self._least and node.parent is not None:
            self._nodes[node.parent.key, tokens[: self._least].tobytes()] = node

    def remove(self, node: Node, tokens: IntArray) -> None:
        """Forget a page that leaves the device."""
        if self._least and node.parent is not None:
            place = node.parent.key, tokens[: self._least].tobytes()
            if self._nodes.get(place) is node:
                del self._nodes[place]

    def find(self, key: int, tokens: IntArray) -> Node | None:
        """Return a page that follows the one with this key and begins with the first of `tokens`."""
        return self._nodes.get((key, tokens[: self._least].tobytes())) if 0 < self._least <= len(tokens) else None

    def check_integrity(self) -> None:
        assert all(node.page for node in self._nodes.values()), "a page that left the device is offered for copies"


class TierLike(Protocol):
    """The tiers for payloads of pages that left the device; the runner moves them. One thread calls all of it.

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
        """Undo one call of `hold`; after the last, the payload may leave like any other."""

    def discard(self, digest: bytes, /) -> None:
        """Never offer a payload again, because it can't be used; its page is computed."""

    def trim(self) -> None:
        """Drop payloads beyond the budget."""

    def clear(self) -> None:
        """Forget every payload, as when the weights change."""

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
        """End the departure of pages once their step was committed or has failed. From then on the tier decides."""
        self._departing.difference_update(move.digest for move in moves)

    def on_disk(self, node: Node) -> bool:
        """True if its payload can be fetched from disk."""
        return self._tier is not None and self._tier.has(self._table.digest_of(node))

    def restorable(self, node: Node) -> bool:
        """True if its payload is in host memory, so that a step can restore it."""
        return self._tier is not None and self._table.digest_of(node) in self._tier

    def forget(self, node: Node) -> None:
        """Remove `node` if it is a leaf and no tier has its payload, then its parent likewise, and so on upwards."""
        while node in self._table and not (node.page or node.children or node.pins or self._has_payload(node)):
            assert node.parent is not None, "the root is not in the table"
            self._table.remove(node)
            self._nodes.pop(node, None)
            self.forgotten += 1
            node = node.parent

    def sweep(self) -> None:
        """Look up the next two nodes in the tier, and remove them if their payloads are gone."""
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
