"""The prefix caches of several data shards, seen as one: for looking at them, saving and clearing.

Each shard has a tree of its own, over its own pages, and all share the tiers below: a payload is found by its digest,
whichever shard it came from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from rekindle._src.core.records import IntArray, PageMove
from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.offloaded import TierLike
from rekindle._src.kvcache.statistics import CacheStatistics
from rekindle._src.kvcache.tree import PrefixCache


class PrefixCaches:
    """What `PrefixCache` answers about one tree, about all of them. A node belongs to one of the trees."""

    def __init__(self, shards: Sequence[PrefixCache]) -> None:
        self.shards = tuple(shards)

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def __iter__(self) -> Iterator[Node]:
        for one in self.shards:
            yield from one

    @property
    def page_size(self) -> int:
        return self.shards[0].page_size

    @property
    def root_key(self) -> bytes:
        return self.shards[0].root_key

    @property
    def host_tier(self) -> TierLike | None:
        return self.shards[0].host_tier

    @property
    def clock(self) -> Callable[[], float]:
        return self.shards[0].clock

    @property
    def version(self) -> int:
        """Changes whenever a match in one of the trees may turn out differently."""
        return sum(one.version for one in self.shards)

    @property
    def roots(self) -> list[Node]:
        """The roots of all trees, those of salts included."""
        return [root for one in self.shards for root in one.roots]

    def has(self, node: Node) -> bool:
        """Whether `node` is still part of its tree."""
        return any(one.has(node) for one in self.shards)

    def digest_of(self, node: Node) -> bytes:
        """The page's name in every process; computed once."""
        return node.digest if node.digest is not None else self._owner(node).digest_of(node)

    def tokens_of(self, node: Node) -> IntArray:
        """The tokens of this page alone."""
        return self._owner(node).tokens_of(node)

    def find(self, tokens: IntArray, salt: str | None = None) -> list[Node]:
        """The known nodes of a prompt, in the tree that knows most of it."""
        return max((one.find(tokens, salt) for one in self.shards), key=len)

    def evict(self, count: int, *, read_out: bool = True) -> list[PageMove]:
        """Free up to `count` device pages of each shard."""
        return [move for one in self.shards for move in one.evict(count, read_out=read_out)]

    def statistics(self) -> CacheStatistics:
        """The sums over all trees."""
        return summed([one.statistics() for one in self.shards])

    def _owner(self, node: Node) -> PrefixCache:
        return next(one for one in self.shards if one.has(node))


AnyCache = PrefixCache | PrefixCaches


def trees(cache: AnyCache) -> tuple[PrefixCache, ...]:
    """Those of all shards."""
    return cache.shards if isinstance(cache, PrefixCaches) else (cache,)


def distinct(cache: AnyCache) -> Iterator[Node]:
    """The nodes, parents first, none of which has the same prefix as another one.

    Of several the first is taken that has its payload somewhere, so that no page is missed which one shard has.
    """
    if isinstance(cache, PrefixCache):
        yield from cache
        return
    seen: set[int] = set()
    for one in cache.shards:
        tier = one.host_tier
        for node in one:
            if node.key not in seen and (node.page or (tier is not None and tier.knows(one.digest_of(node)))):
                seen.add(node.key)
                yield node


def summed(parts: Sequence[CacheStatistics]) -> CacheStatistics:
    """The statistics of several trees as those of one."""
    names = [field.name for field in dataclasses.fields(CacheStatistics)]
    return CacheStatistics(**{name: sum(getattr(one, name) for one in parts) for name in names})
