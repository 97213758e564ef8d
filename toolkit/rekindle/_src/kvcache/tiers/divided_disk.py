"""The disks of processes that share a model: the leader's has whole pages, the others' have their own parts.

So a snapshot serves any other mesh, and one device. Where the parts are on disk as well, pages come back without
travelling between processes. A part that is missing, damaged or of another division is sent by the leader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from rekindle._src.kvcache.persist.identity import Identity
from rekindle._src.kvcache.persist.segment import LeafSpec, Page, Payload
from rekindle._src.kvcache.tiers.disk import DiskTier


class OtherDisks(Protocol):
    """The other processes, which keep parts of the pages that this one writes."""

    def store(self, pages: Sequence[Page]) -> None: ...
    def forget(self) -> None: ...


class DividedDiskTier(DiskTier):
    """The leader's disk tier; the other processes write and clear along with it."""

    def __init__(self, folder: Path, budget: int, identity: Identity, others: OtherDisks) -> None:
        super().__init__(folder, budget, identity)
        self._others = others

    def write(self, pages: Iterable[tuple[Page, Payload]]) -> int:
        pairs = list(pages)
        fresh = [page for page, _ in pairs if page.digest not in self]
        written = super().write(pairs)
        if written:
            self._others.store(fresh)
        return written

    def clear(self) -> int:
        self._others.forget()
        return super().clear()


def part_identity(identity: Identity, heads: Sequence[int], leaves: Sequence[LeafSpec]) -> Identity:
    """Return the identity of the parts of pages with these kv heads, which are never taken for whole pages."""
    return dataclasses.replace(identity, layout=f"{identity.layout} heads {list(heads)}", leaves=tuple(leaves))
