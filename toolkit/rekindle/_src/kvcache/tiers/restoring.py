"""`open(..., restore=...)`: pages of earlier sessions become known at once, and the likeliest are read ahead.

Pages that were read ahead go to the device before a request needs them (`promote`).
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Sequence

from rekindle._src.core.records import LostPage, PageMove
from rekindle._src.kvcache.caches import AnyCache
from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.persist import snapshot
from rekindle._src.kvcache.persist.segment import Page
from rekindle._src.kvcache.persist.snapshot import RestoredPages
from rekindle._src.kvcache.tiers.tiers import Tiers
from rekindle._src.kvcache.tree import PrefixCache, PrefixMatch
from rekindle.errors import ConfigError

log = logging.getLogger("rekindle.cache")
MIN_BYTES, MAX_BYTES = 1 << 20, 64 << 20  # copied at 5 GB/s while a session opens; less costs a request nothing either
SHARE = 4  # one of so many free pages at most: the others are for computed pages


def restore(cache: AnyCache | None, tiers: Tiers | None, name: str) -> RestoredPages:
    """Make the pages of snapshot `name` known; "auto": all pages kept for this model, however their sessions ended.

    A snapshot that is missing raises StoreError, one for something else SnapshotRefused; "auto" starts fresh instead.
    """
    if cache is None or tiers is None or tiers.disk is None:
        raise ConfigError("restore", name, "needs prefix_cache=True and disk_memory above 0", "Set both, or leave it")
    disk = tiers.disk
    snapshot.fetch_shared(disk.folder, name, disk.identity, disk.budget)
    if name != "auto":
        pages = snapshot.pages_of_snapshot(disk.folder, disk.identity, name)
        disk.scan()
        stored = [page for page in pages if page.digest in disk]
    else:
        disk.scan()
        pages = stored = disk.pages()
        other_models = disk.other_models()
        if not stored and other_models:
            log.info(
                "restore='auto': nothing is kept for this model; pages of %d others (weights, kv_dtype, page_size or "
                "version) are left alone",
                len(other_models),
            )
    grafted = snapshot.graft_all(cache, stored)
    if grafted < len(pages):
        lost, level = len(pages) - grafted, logging.WARNING if 2 * grafted < len(pages) else logging.INFO
        log.log(
            level, "snapshot %r: %d of its %d pages are no longer kept, and are computed again", name, lost, len(pages)
        )
    tiers.read_ahead(likeliest(stored))
    return RestoredPages(name, grafted, len(pages) - grafted)


def restore_side(tiers: Tiers, name: str) -> None:
    """Make a side cache's entries of earlier sessions known, for `restore`, and read the latest ahead.

    An entry without its page stays on disk.
    """
    disk = tiers.disk
    if disk is None:
        return
    snapshot.fetch_shared(disk.folder, name, disk.identity, disk.budget)
    snapshot.touch(disk.folder, name, disk.identity)
    disk.scan()
    tiers.read_ahead(page.digest for page in sorted(disk.pages(), key=lambda page: -page.last_use))


def likeliest(pages: Sequence[Page], limit: int = 4096) -> list[bytes]:
    """Return the digests of the likeliest pages: most visits first, then latest use; parents come before children."""
    known = {page.digest: page for page in pages}
    order: dict[bytes, None] = {}
    for page in heapq.nsmallest(limit, pages, key=lambda page: (-page.visits, -page.last_use)):
        path = []
        step: Page | None = page
        while step is not None and step.digest not in order:
            path.append(step.digest)
            step = known.get(step.parent)
        order |= dict.fromkeys(reversed(path))
    return list(order)


def promote(cache: PrefixCache, fill: Callable[[Sequence[PageMove]], Sequence[LostPage]], *, page_bytes: int) -> int:
    """Bring pages from host memory to free pages of the device, parents before children; returns how many.

    `fill` copies them, and returns the failed ones. From then on they are cached like any others, and leave the device
    when pages are short. No step may be in flight, and no other thread use the tree.
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
