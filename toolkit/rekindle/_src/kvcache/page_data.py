"""Data of capabilities that belongs to pages: it is named by their digests, and saved and restored with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rekindle._src.kvcache.persist.identity import Identity
from rekindle._src.kvcache.persist.segment import Page

Ask = Callable[[Callable[[], Any]], Any]  # runs a function on the loop, and returns its result


class PagesOnDisk(Protocol):
    """The place on disk where a session keeps its pages."""

    folder: Path
    budget: int  # bytes, which the data of pages shares with them

    @property
    def identity(self) -> Identity:
        """The identity of the pages."""
        ...


class PageData:
    """A capability's data of pages. This one keeps none; it is the base of all others.

    A capability finds its own in `PrefixCache.data`, by its class.
    """

    def clear(self, root_key: bytes) -> None:
        """Forget everything. Pages are named from `root_key` on."""

    def restore(self, disk: PagesOnDisk) -> None:
        """Take over data that earlier sessions saved with pages there."""

    def save(self, name: str, pages: Sequence[Page], disk: PagesOnDisk, ask: Ask) -> None:
        """Save the data of `pages`, which snapshot `name` lists. Called in another thread. Raises StoreError."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless its counts agree."""
