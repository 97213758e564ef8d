"""`open(..., restore=...)`: pages of earlier sessions become known at once, and the likeliest are read ahead."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence

from rekindle._src.kvcache.caches import AnyCache
from rekindle._src.kvcache.persist import shared_snapshots, snapshot
from rekindle._src.kvcache.persist.segment import Page
from rekindle._src.kvcache.persist.snapshot import Restored
from rekindle._src.kvcache.tiers.tiers import Tiers
from rekindle.errors import ConfigError

log = logging.getLogger("rekindle.cache")


def restore(cache: AnyCache | None, tiers: Tiers | None, name: str) -> Restored:
    """Make the pages of snapshot `name` known; "auto": all pages kept for this model, however their sessions ended.

    A snapshot that is missing raises StoreError, one for something else SnapshotRefused; "auto" starts fresh instead.
    """
    if cache is None or tiers is None or tiers.disk is None:
        raise ConfigError("restore", name, "needs prefix_cache=True and disk_memory above 0", "Set both, or leave it")
    disk = tiers.disk
    shared_snapshots.fetch(disk.folder, name, disk.identity, disk.budget)
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
        log.info("snapshot %r: %d of its %d pages are no longer kept", name, len(pages) - grafted, len(pages))
    tiers.read_ahead(likeliest(stored))
    return Restored(name, grafted, len(pages) - grafted)


def likeliest(pages: Sequence[Page], limit: int = 4096) -> list[bytes]:
    """Return the digests of the likeliest pages: most visits first, then latest use; none before its parent."""
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
