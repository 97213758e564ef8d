"""Snapshots in a cache that machines share: one machine saves, and any other with the same model restores."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rekindle._src.kvcache.persist.identity import Identity
from rekindle._src.kvcache.persist.snapshot import tagged
from rekindle._src.kvcache.tiers.disk_usage import size_of
from rekindle_kernels import read_through


def fetch(folder: Path, name: str, identity: Identity, limit: int) -> None:
    """Fetch snapshot `name` from behind the cache folder before a restore, and up to `limit` bytes of its pages.

    Both are verified as those of this machine are.
    """
    behind = read_through.behind(folder)
    if behind is None:
        return
    if name != "auto":
        version = tagged(behind.names("snapshots"), name, identity)
        if version is not None:
            _fetch(folder / "snapshots" / version)
    root, total = identity.root.hex(), 0
    for segment in reversed(behind.names("pages")):
        if segment.startswith(root) and total < limit:
            _fetch(folder / "pages" / segment)
            total += size_of(folder / "pages" / segment)[0]


def keep(snapshot: Path, segments: Iterable[Path]) -> None:
    """Copy a saved snapshot, and the segments with its pages, behind the cache folder as well."""
    for segment in segments:
        read_through.keep(segment)
    read_through.keep(snapshot)


def _fetch(path: Path) -> None:
    if not path.exists():
        read_through.fetch(path)
