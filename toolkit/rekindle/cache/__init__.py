"""The prefix cache: page pool, radix tree, and the tiers that pages move through."""

from rekindle.cache.absent import TierLike
from rekindle.cache.costs import CostModel
from rekindle.cache.digest import page_digest, page_keys, root_digest
from rekindle.cache.host import HostTier
from rekindle.cache.node import Node
from rekindle.cache.pool import PagePool, pages_for
from rekindle.cache.statistics import CacheStatistics
from rekindle.cache.tiers import Tiers
from rekindle.cache.tree import PrefixCache, PrefixMatch, Published

__all__ = [
    "CacheStatistics",
    "CostModel",
    "HostTier",
    "Node",
    "PagePool",
    "PrefixCache",
    "PrefixMatch",
    "Published",
    "TierLike",
    "Tiers",
    "page_digest",
    "page_keys",
    "pages_for",
    "root_digest",
]
