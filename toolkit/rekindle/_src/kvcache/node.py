"""Nodes of the prefix tree, one full page of tokens each, and the table that finds them by the key of their prefix.

Finding a prefix costs one dictionary access per page and one comparison of all tokens at once, whatever the size of
the tree. Iterating gives parents before children.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakValueDictionary

import numpy as np

from rekindle._src.core.records import IntArray
from rekindle._src.kvcache.digest import page_digest, root_lookup_key


class Node:
    """One page of tokens after its parent's. Nodes are compared by object; only the tree changes them.

    A node has its page on the device, or its payload in a lower tier under its digest, or both. If a node has a device
    page, so has its parent. A root has depth 0, no parent and no page.
    """

    __slots__ = (
        "__weakref__", "children", "depth", "device_children", "digest", "key", "last_use", "page", "parent", "pins",
        "requested", "row", "score", "state", "visits",
    )  # fmt: skip

    def __init__(self, key: int, parent: Node | None, row: int, last_use: float) -> None:
        self.key = key
        self.parent = parent
        self.row = row  # where the table keeps its tokens
        self.depth: int = 0 if parent is None else parent.depth + 1  # pages up to and including this one
        self.page = 0  # on the device; 0 is none
        self.state = 0  # the slot of what it has beside its page (`TreeStates`); 0 is none
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
    """All nodes below the root and the roots of salts, and their tokens in one array."""

    def __init__(self, page_size: int, root_key: bytes) -> None:
        self.page_size = page_size
        self.root = Node(0, None, -1, 0.0)
        self.root.digest = root_key
        self._salted: WeakValueDictionary[bytes, Node] = WeakValueDictionary()  # those with nodes below, or in use
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

    def salted(self, digest: bytes) -> Node:
        """Return the root with this digest, which is that of a salt."""
        root = self._salted.get(digest)
        if root is None:
            root = self._salted[digest] = Node(root_lookup_key(digest), None, -1, 0.0)
            root.digest = digest
        return root

    def roots(self) -> list[Node]:
        """Return every root that is in use, the one without a salt first."""
        return [self.root, *self._salted.values()]

    def find(self, parent: Node, keys: Sequence[int], tokens: IntArray) -> list[Node]:
        """Return the known nodes after `parent` for `tokens`, whose pages have `keys`. Tokens are compared exactly."""
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

    def prefix_of(self, node: Node) -> IntArray:
        """Return all tokens from the root up to and including this page."""
        return self._tokens[[step.row for step in path(node)]].reshape(-1)

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


def path(node: Node) -> list[Node]:
    """Return the nodes from the first page to `node`."""
    nodes = []
    while node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def is_below(node: Node, pages: set[int]) -> bool:
    """True if one of the device pages before `node` is among `pages`."""
    above = node.parent
    while above is not None and above.page:
        if above.page in pages:
            return True
        above = above.parent
    return False
