"""A store that backs a cache folder: missing entries are fetched from there, and new entries are kept there, too.

The toolkit attaches one (`rekindle._src.core.shared_cache`); without it these functions do nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class BackingStore(Protocol):
    """A store that backs a cache. `kind` is a folder of the cache, `name` an entry in it: a file or folder of files."""

    def fetch(self, kind: str, name: str) -> bool:
        """Fetch the entry. Return True if it is in the cache folder now, complete and verified."""

    def keep(self, kind: str, name: str) -> None:
        """Keep the entry soon, unless the store has it."""

    def names(self, kind: str) -> list[str]:
        """Return the entries of a kind, the newest last."""


_backing: dict[Path, BackingStore] = {}


def attach(cache_folder: Path, backing: BackingStore | None) -> None:
    """Let `backing` be the store that backs this cache folder in this process, from now on; None removes it."""
    if backing is None:
        _backing.pop(cache_folder, None)
    else:
        _backing[cache_folder] = backing


def backing_of(cache_folder: Path) -> BackingStore | None:
    """Return the store that backs this cache folder; None if there is none."""
    return _backing.get(cache_folder)


def fetch(path: Path) -> bool:
    """Fetch a missing entry of a cache. Return True if it is there now."""
    backing = backing_of(path.parent.parent)
    return backing is not None and backing.fetch(path.parent.name, path.name)


def keep(path: Path) -> None:
    """Keep a complete entry of a cache in the store that backs it, too."""
    backing = backing_of(path.parent.parent)
    if backing is not None:
        backing.keep(path.parent.name, path.name)
