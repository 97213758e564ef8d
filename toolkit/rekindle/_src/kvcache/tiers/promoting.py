"""Promotion: restored pages that were read ahead go to the device before a request needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rekindle._src.core.records import LostPage, PageMove
from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.tree import PrefixCache, PrefixMatch

MIN_BYTES, MAX_BYTES = 1 << 20, 64 << 20  # copied at 5 GB/s while a session opens; less costs a request nothing either
SHARE = 4  # one of so many free pages at most: the others are for computed pages


def promote(cache: PrefixCache, fill: Callable[[Sequence[PageMove]], Sequence[LostPage]], *, page_bytes: int) -> int:
    """Bring pages from host memory to free pages of the device, none before its parent; returns how many.

    `fill` copies them, and returns those that failed. From then on they are cached like any others, and leave the
    device when pages are short. No step may be in flight, and no other thread use the tree.
    """
    limit = min(cache.pool.free // SHARE, MAX_BYTES // max(1, page_bytes))
    nodes: dict[Node, None] = {}
    for node in cache:
        if len(nodes) >= limit:
            break
        parent = node.parent
        assert parent is not None, "the root is not in the tree"
        if not node.page and (parent.page or not parent.depth or parent in nodes) and cache.in_host_memory(node):
            nodes[node] = None
    if len(nodes) * page_bytes < MIN_BYTES:
        return 0
    moves = [move for node in nodes for move in cache.restore(PrefixMatch((node,), 0), cache.pool.take(1))]
    lost = fill(moves)
    cache.restore_done(moves)
    if lost:
        assert cache.host_tier is not None, "pages were in host memory"
        for page in lost:  # so that requests compute them
            cache.host_tier.discard(page.move.digest)
        cache.detach([page.move for page in lost])
    cache.pool.release([move.page for move in moves])
    for node in nodes:
        if node.page and not node.device_children:
            cache.unreference(node)
    return sum(bool(node.page) for node in nodes)
