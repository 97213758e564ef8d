"""A place behind a cache folder: what the folder lacks is fetched from there, and what is new in it is kept there, too.

The toolkit attaches one (`rekindle._src.core.shared_cache`); without it these functions do nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Behind(Protocol):
    """Such a place. `kind` is a folder of the cache, `name` an entry of it: a file, or a folder of files."""

    def fetch(self, kind: str, name: str) -> bool:
        """Whether the entry is in the cache folder now, complete and verified."""

    def keep(self, kind: str, name: str) -> None:
        """Keep the entry soon, unless it is there."""

    def names(self, kind: str) -> list[str]:
        """The entries of a kind, the newest last."""


_behind: dict[Path, Behind] = {}


def attach(cache_folder: Path, behind: Behind | None) -> None:
    """From now on `behind` is behind this cache folder in this process; None: nothing is."""
    if behind is None:
        _behind.pop(cache_folder, None)
    else:
        _behind[cache_folder] = behind


def behind(cache_folder: Path) -> Behind | None:
    """What is behind this cache folder."""
    return _behind.get(cache_folder)


def fetch(path: Path) -> bool:
    """Whether this entry of a cache, which was not there, is there now."""
    found = _behind.get(path.parent.parent)
    return found is not None and found.fetch(path.parent.name, path.name)


def keep(path: Path) -> None:
    """This entry of a cache is whole: keep it behind the cache, too."""
    found = _behind.get(path.parent.parent)
    if found is not None:
        found.keep(path.parent.name, path.name)
