"""The prefix cache: page pool, radix tree, the tiers that pages move through, to disk and to other sessions."""

from rekindle._src.kvcache.caches import AnyCache, PrefixCaches, distinct
from rekindle._src.kvcache.digest import page_digest, page_keys, root_digest
from rekindle._src.kvcache.node import Node, TierLike
from rekindle._src.kvcache.pool import PagePool, pages_for
from rekindle._src.kvcache.side import Keying, SideCache, SidePages, SidePlan
from rekindle._src.kvcache.tiers.host import HostTier
from rekindle._src.kvcache.tiers.tiers import CostModel, Tiers
from rekindle._src.kvcache.tree import CacheStatistics, PrefixCache, PrefixMatch, Publication

__all__ = [
    "AnyCache",
    "CacheStatistics",
    "CostModel",
    "HostTier",
    "Keying",
    "Node",
    "PagePool",
    "PrefixCache",
    "PrefixCaches",
    "PrefixMatch",
    "Publication",
    "SideCache",
    "SidePages",
    "SidePlan",
    "TierLike",
    "Tiers",
    "distinct",
    "page_digest",
    "page_keys",
    "pages_for",
    "root_digest",
]
