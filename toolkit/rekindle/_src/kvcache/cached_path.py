"""Finds the cached pages of a prompt in every tier, and how far a request would use them; nothing is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rekindle._src.core.prefix import Prefix
from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.tiers.tiers import Tiers
from rekindle._src.kvcache.tree import PrefixCache


class CachedPath(NamedTuple):
    """Cached pages from the beginning of a prompt on, in any tier."""

    nodes: Sequence[Node]
    places: tuple[str, ...]  # the tier of each
    used: int  # pages that a request would use; it would compute the others again
    reached: int  # pages that are cached; beyond `nodes` without the entries of side caches that they need
    fetch_seconds: float  # expected, for the pages below the device
    compute_seconds: float | None  # expected for the same pages; None until it is measured


def cached_path(cache: PrefixCache, keys: Sequence[int], prefix: Prefix) -> CachedPath:
    """Return the cached pages of a prompt, found by the `keys` of its pages.

    As at its admission, pages on disk are read if that is quicker than computing them, and so are copies from host
    memory made.
    """
    nodes: list[Node] = []
    for node in cache.find(prefix)[: len(keys)]:
        if cache.tier_of(node) == "gone":
            break
        nodes.append(node)
    reached = len(nodes)
    nodes = cache.continuable(nodes)
    places = tuple(cache.tier_of(node) for node in nodes)
    counts = Counter(places)
    on_device, on_disk = counts["device"], counts["disk"]
    below = len(nodes) - on_device
    if not isinstance(cache.host_tier, Tiers):
        return CachedPath(nodes, places, len(nodes), reached, 0.0, None)
    costs, used = cache.host_tier.costs, len(nodes)
    if on_disk and not (cache.host_tier.fillable() and costs.quicker(below, from_disk=on_disk)):
        used = places.index("disk")
    if not costs.quicker(used - on_device):
        used = on_device
    seconds = costs.fetch_seconds(below, from_disk=on_disk), costs.compute_seconds(below)
    return CachedPath(nodes, places, len(cache.continuable(nodes[:used])), reached, *seconds)
