"""Kept captures on disk: segments beside those of pages, with an identity for each site and layer.

They are written with a snapshot, and read when a request of a later session captures the same of restored pages. Only
pages all of whose tokens were captured are stored.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from rekindle._src.core.taps import Key
from rekindle._src.kvcache.persist import snapshot
from rekindle._src.kvcache.persist.identity import CAPTURES
from rekindle._src.kvcache.persist.segment import Page
from rekindle._src.kvcache.tiers.disk import DiskTier
from rekindle._src.kvcache.tiers.host import size
from rekindle.errors import StoreError


class StoredCaptures:
    """Captures in the folder and the budget of a session's pages; any thread may call it."""

    def __init__(self, pages: DiskTier) -> None:
        self._pages = pages
        self._disks: dict[tuple[bytes, Key], DiskTier] = {}
        self._lock = threading.Lock()

    def read(self, key: Key, digest: bytes) -> NDArray[Any] | None:
        """Return what was captured at all tokens of a page; None if that is not stored, or can't be read."""
        disk = self._disk(key)
        if digest not in disk:
            return None
        try:
            array: NDArray[Any] = disk.load(digest)[0][0]
        except (KeyError, StoreError):
            return None
        return array if len(array) == disk.identity.page_size else None

    def save(self, name: str, pages: Sequence[Page], lines: Mapping[Key, Mapping[bytes, NDArray[Any]]]) -> int:
        """Write lines of a site and layer by page, and list those of `pages` under `name`. Return how many are new.

        Raises StoreError. Those that find no room are left out: they can be computed again.
        """
        written = 0
        for key, by_page in lines.items():
            disk = self._disk(key)
            pairs = [(page, (by_page[page.digest][None],)) for page in pages if page.digest in by_page]
            new = [pair for pair in pairs if pair[0].digest not in disk]
            if new:
                each = size(new[0][1])
                written += disk.write(new[: disk.room(len(new) * each) // each])
        for (root, _), disk in tuple(self._disks.items()):
            listed = [page for page in pages if page.digest in disk]
            if listed and root == self._pages.identity.root:
                snapshot.save(disk.folder, name, disk.identity, listed)
        return written

    def _disk(self, key: Key) -> DiskTier:
        pages = self._pages.identity
        with self._lock:
            disk = self._disks.get((pages.root, key))
            if disk is None:
                site = key if isinstance(key, str) else f"{key[0]} {key[1]}"
                identity = dataclasses.replace(pages, layout=f"{pages.layout}{CAPTURES}{site}", leaves=())
                disk = self._disks[pages.root, key] = DiskTier(self._pages.folder, self._pages.budget, identity)
                disk.scan()
        return disk
