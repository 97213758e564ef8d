"""Host memory where several processes share a model: each keeps its own part of a page, and this one leads.

The budget is that of each process. From the devices each process gets its own part of a page. Whole pages,
from disk or other sessions, are divided on their way in, and joined again for saving and sharing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from rekindle._src.kvcache.tiers.host import HostTier, Payload
from rekindle._src.kvcache.tiers.host_slots import Slots


class OtherHosts(Protocol):
    """The other processes, which keep their parts of the pages that this one keeps."""

    def note_arrival(self, digest: bytes) -> bool:
        """Note that a part came from the devices. True if it is still to be kept."""
        ...

    def own_part(self, whole: Payload) -> Payload: ...
    def keep(self, digest: bytes, whole: Payload) -> None: ...
    def drop(self, digests: Sequence[bytes]) -> None: ...
    def whole(self, digest: bytes, own_part: Payload) -> Payload | None: ...
    def forget_read(self) -> None: ...
    def read(self, digests: Sequence[bytes]) -> None:
        """Let each process read its parts of these pages from its own disk; `keep` then sends the missing ones."""


class DividedHostTier(HostTier):
    """A host tier of parts, whose `put` takes and whose `peek` returns whole pages."""

    def __init__(self, budget: int, others: OtherHosts) -> None:
        super().__init__(budget)
        self._others = others
        # All processes keep and drop pages in one order: a change here is sent before anything else changes.
        self._telling = threading.RLock()
        self.memory = Slots().take  # whole pages are of another size than the parts that stay

    def put(self, digest: bytes, payload: Payload, *, owned: bool = False, cold: bool = False) -> None:
        with self._telling:
            if not self.touch(digest):
                self._others.keep(digest, payload)
                super().put(digest, self._others.own_part(payload), cold=cold)

    def put_part(self, digest: bytes, part: Payload) -> None:
        with self._telling:
            if self._others.note_arrival(digest):
                super().put(digest, part)

    def announce(self, digests: Sequence[bytes]) -> None:
        with self._telling:  # pages that were read before and not put yet are forgotten
            self._others.forget_read()
        if digests:
            self._others.read(digests)

    def peek(self, digest: bytes) -> Payload | None:
        part = super().peek(digest)
        return None if part is None else self._others.whole(digest, part)

    def discard(self, digest: bytes) -> None:
        with self._telling:
            super().discard(digest)

    def trim(self, to: int | None = None) -> int:
        if self.nbytes <= (self.budget if to is None else to):
            return 0
        with self._telling:
            return super().trim(to)

    def clear(self) -> None:
        with self._telling:
            super().clear()

    def _on_drop(self, digests: Sequence[bytes]) -> None:
        self._others.drop(digests)
