"""Several prefix caches as one, for inspecting, saving and clearing them.

Each tree has pages of its own, and all share the tiers below: a payload is found by its digest, whichever tree it came
from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from rekindle._src.core.prefix import Prefix
from rekindle._src.core.records import IntArray, PageMove
from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.tree import CacheStatistics, PrefixCache


class PrefixCaches:
    """The queries of `PrefixCache`, answered for several trees. A node belongs to one of the trees."""

    def __init__(self, trees: Sequence[PrefixCache]) -> None:
        self.trees = tuple(trees)
        first = self.trees[0]
        self.page_size, self.clock = first.page_size, first.clock
        self.host_tier, self.data = first.host_tier, first.data

    def __len__(self) -> int:
        return sum(map(len, self.trees))

    def __iter__(self) -> Iterator[Node]:
        for tree in self.trees:
            yield from tree

    @property
    def root_key(self) -> bytes:
        return self.trees[0].root_key

    @property
    def version(self) -> int:
        """Changes whenever a match in one of the trees may turn out differently."""
        return sum(tree.version for tree in self.trees)

    @property
    def roots(self) -> list[Node]:
        """The roots of all trees, including the roots of namespaces."""
        return [root for tree in self.trees for root in tree.roots]

    def has(self, node: Node) -> bool:
        """True if `node` is still part of its tree."""
        return any(tree.has(node) for tree in self.trees)

    def digest_of(self, node: Node) -> bytes:
        """Return the page's name in every process; computed once."""
        return node.digest if node.digest is not None else self._owner(node).digest_of(node)

    def tokens_of(self, node: Node) -> IntArray:
        """Return the tokens of this page alone."""
        return self._owner(node).tokens_of(node)

    def tier_of(self, node: Node) -> str:
        """Return the nearest tier that has a page: device, host, disk, or "gone"."""
        return "device" if node.page else self._owner(node).tier_of(node)

    def find(self, prefix: Prefix) -> list[Node]:
        """Return the known nodes of a prompt, in the tree that knows most of it."""
        return max((tree.find(prefix) for tree in self.trees), key=len)

    def evict(self, count: int, *, read_out: bool = True) -> list[PageMove]:
        """Free up to `count` device pages of each tree."""
        return [move for tree in self.trees for move in tree.evict(count, read_out=read_out)]

    def statistics(self) -> CacheStatistics:
        """Return the sums over all trees."""
        return summed([tree.statistics() for tree in self.trees])

    def _owner(self, node: Node) -> PrefixCache:
        return next(tree for tree in self.trees if tree.has(node))


AnyCache = PrefixCache | PrefixCaches


def distinct(cache: AnyCache) -> Iterator[Node]:
    """Yield the nodes, parents first, one for each distinct prefix.

    Of several nodes with the same prefix, the first one with a payload in some tier is taken, so that no page is missed
    that one tree has.
    """
    if isinstance(cache, PrefixCache):
        yield from cache
        return
    seen: set[int] = set()
    for tree in cache.trees:
        tier = tree.host_tier
        for node in tree:
            if node.key not in seen and (node.page or (tier is not None and tier.has(tree.digest_of(node)))):
                seen.add(node.key)
                yield node


def summed(parts: Sequence[CacheStatistics]) -> CacheStatistics:
    """Sum the statistics of several trees."""
    names = [field.name for field in dataclasses.fields(CacheStatistics)]
    return CacheStatistics(**{name: sum(getattr(part, name) for part in parts) for name in names})
