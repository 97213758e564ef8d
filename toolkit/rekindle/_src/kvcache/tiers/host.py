"""Host memory: payloads of pages that left the device, by digest; the least recently used is dropped first.

Payloads arrive from the thread that fetches steps and from the one that reads the disk. They leave in the scheduler's
thread alone, in `trim`, so that a page which a plan counts on is still there when the step is dispatched.

They lie in slots of one size in large pieces. Fresh memory makes transfers slow: the system maps and zeroes it at first
touch, 4 KiB at a time for an array of a page's size. Reading 63 MB of pages took 15,400 such faults, 17 ms to 190 ms;
from large pieces, which numpy asks huge pages for, it takes 30, and from slots that were used before none.

Where several processes share a model, each keeps its own part of a page, and one of them leads (`DividedHostTier`). The
budget applies to each process. From the devices each process gets its own part of a page. Whole pages, from disk or
other sessions, are divided on their way in, and joined again for saving and sharing.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.drawable import Record

Payload = tuple[Any, ...]  # arrays with a leading page axis of 1
PIECE, LINE = 16 << 20, 64


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class HostStatistics(Record):
    """Sizes now, and counts since the session was opened."""

    pages: int
    bytes: int
    budget: int
    held: int  # payloads that may not be dropped: pinned, or about to be restored
    stored: int
    read: int
    dropped: int


class _Slab:
    def __init__(self, slot: int, count: int) -> None:
        memory = np.empty(slot * count + LINE, np.uint8)
        self.memory = memory[-memory.ctypes.data % LINE :][: slot * count]
        self.count = count
        self.free = list(range(count - 1, -1, -1))


class Slots:
    """Memory for payloads. Any thread may take a slot; it comes back by itself when the last array in it is gone.

    Slots begin on cache lines, so that XLA:CPU reads payloads in place instead of copying them first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._size = 0  # bytes of a slot, set by the first payload
        self._pieces: list[_Slab] = []
        # Filled when arrays are collected, which may happen at any time, also while this thread has the lock.
        self._returned: deque[tuple[_Slab, int]] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces, whether used or not."""
        return sum(piece.memory.nbytes for piece in self._pieces)

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return memory for `size` bytes: a slot if they fill one, as a session's payloads do, else fresh memory."""
        with self._lock:
            self._size = self._size or -(-size // LINE) * LINE
            if not 0 <= self._size - size < LINE:
                return np.empty(size, np.uint8)
            self._reclaim()
            piece = next((piece for piece in self._pieces if piece.free), None)
            if piece is None:
                piece = _Slab(self._size, max(1, PIECE // self._size))
                self._pieces.append(piece)
            index = piece.free.pop()
        start = index * self._size
        # Not a slice of the array: numpy lets views of a slice refer to the whole, and the slot would seem unused.
        slot = np.frombuffer(memoryview(piece.memory)[start : start + size], np.uint8)  # type: ignore[arg-type]
        weakref.finalize(slot, self._returned.append, (piece, index)).atexit = False
        return slot

    def reclaim(self) -> None:
        """Give unused pieces back to the system."""
        with self._lock:
            self._reclaim()
            self._pieces = [piece for piece in self._pieces if len(piece.free) < piece.count]

    def _reclaim(self) -> None:
        while self._returned:
            piece, index = self._returned.popleft()
            piece.free.append(index)


class HostTier:
    """A bounded map from digest to payload. `hold` keeps one beyond the budget until as many `release`s."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.slots = Slots()
        self.memory: Callable[[int], NDArray[np.uint8]] = self.slots.take  # for payloads that are put as `owned`
        self._lock = threading.Lock()
        self._payloads: OrderedDict[bytes, Payload] = OrderedDict()
        self._holds: Counter[bytes] = Counter()
        self._bytes = 0
        self._stored = self._read = self._dropped = 0
        self.generation = 0  # counts clears: holds from before one are gone

    def __len__(self) -> int:
        return len(self._payloads)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._payloads

    @property
    def nbytes(self) -> int:
        return self._bytes

    def put(self, digest: bytes, payload: Payload, *, owned: bool = False, cold: bool = False) -> None:
        """Keep a payload, copied unless its memory is `owned` by it. A `cold` one counts as least recently used."""
        if self.touch(digest):
            return
        payload = payload if owned else self._copy(payload)
        with self._lock:
            if digest in self._payloads:
                return
            self._payloads[digest] = payload
            if cold:
                self._payloads.move_to_end(digest, last=False)
            self._bytes += size(payload)
            self._stored += 1

    def put_part(self, digest: bytes, part: Payload) -> None:
        """Keep a copy of a payload that left this process's devices."""
        self.put(digest, part)

    def announce(self, digests: Sequence[bytes]) -> None:
        """Announce payloads that are being read from disk and will be put."""

    def get(self, digest: bytes) -> Payload:
        """Return a payload; KeyError if it is gone. A read is not a use: the tree reports uses with `touch`."""
        with self._lock:
            payload = self._payloads[digest]
            self._read += 1
            return payload

    def peek(self, digest: bytes) -> Payload | None:
        """Return a payload or None, for saving it; changes neither statistics nor order."""
        return self._payloads.get(digest)

    def touch(self, digest: bytes) -> bool:
        """Record that a payload is used now; False if it is not here."""
        with self._lock:
            if digest not in self._payloads:
                return False
            self._payloads.move_to_end(digest)
            return True

    def hold(self, digest: bytes) -> None:
        """Keep a payload, beyond the budget too, until as many calls of `release`."""
        with self._lock:
            self._holds[digest] += 1

    def release(self, digest: bytes) -> None:
        """Undo one call of `hold`; after the last, the budget counts for the payload again."""
        with self._lock:
            self._holds[digest] -= 1
            if self._holds[digest] <= 0:
                del self._holds[digest]

    def discard(self, digest: bytes) -> None:
        """Drop one payload, which turned out to be unusable."""
        with self._lock:
            payload = self._payloads.pop(digest, None)
            if payload is not None:
                self._bytes -= size(payload)
                self._dropped += 1
        if payload is not None:
            self._on_drop([digest])

    def trim(self, to: int | None = None) -> int:
        """Drop the least recently used payloads without a hold until `to` bytes are left; returns how many."""
        limit = self.budget if to is None else to
        if self._bytes <= limit:
            return 0
        with self._lock:
            dropped: list[bytes] = []
            left = self._bytes
            for digest, payload in self._payloads.items():
                if left <= limit:
                    break
                if digest not in self._holds:
                    dropped.append(digest)
                    left -= size(payload)
            for digest in dropped:
                del self._payloads[digest]
            self._bytes = left
            self._dropped += len(dropped)
        self._on_drop(dropped)
        if to is not None:
            self.slots.reclaim()
        return len(dropped)

    def clear(self) -> None:
        """Forget everything, holds included."""
        with self._lock:
            dropped = list(self._payloads)
            self._payloads.clear()
            self._holds.clear()
            self._bytes = 0
            self.generation += 1
        self._on_drop(dropped)
        self.slots.reclaim()

    def statistics(self) -> HostStatistics:
        with self._lock:
            held = sum(digest in self._payloads for digest in self._holds)
            return HostStatistics(
                len(self._payloads), self._bytes, self.budget, held, self._stored, self._read, self._dropped
            )

    def _on_drop(self, digests: Sequence[bytes]) -> None:
        """Handle payloads that were just dropped; for subclasses."""

    def _copy(self, payload: Payload) -> Payload:
        slot, at = self.slots.take(size(payload)), 0
        leaves = []
        for leaf in payload:
            leaves.append(slot[at : at + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape))
            np.copyto(leaves[-1], leaf)
            at += leaf.nbytes
        return tuple(leaves)


class HostHold:
    """Payloads that stay in host memory until `release`, whether they are there already or come later."""

    def __init__(self, host: HostTier, digests: Sequence[bytes]) -> None:
        self.digests = tuple(digests)
        self._host, self._generation = host, host.generation
        for digest in self.digests:
            host.hold(digest)

    def release(self) -> None:
        """Undo the holds once; a clear has removed those from before it."""
        digests, self.digests = self.digests, ()
        if self._generation == self._host.generation:
            for digest in digests:
                self._host.release(digest)


def size(payload: Payload) -> int:
    """Return the bytes of a payload."""
    return sum(leaf.nbytes for leaf in payload)


class OtherHosts(Protocol):
    """The other processes, which keep their parts of this one's pages."""

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
    """A host tier that stores parts of pages; `put` takes whole pages and `peek` returns whole pages."""

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
