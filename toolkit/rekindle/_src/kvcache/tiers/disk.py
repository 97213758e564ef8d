"""The disk tier: pages by digest in segments below one folder, shared by this user's processes and by models.

Everything is content-addressed and nothing is changed in place, so processes that share the folder at worst write a
page twice. Only removing needs order: one process at a time collects, and a process that reads a removed page
computes it. In a folder that other users could have written to, nothing is read or written.

Where several processes share a model, the leader's disk has whole pages (`DividedDiskTier`), and the others' have their
own parts. So a snapshot serves any other mesh, and one device. Where the parts are on disk as well, pages come back
without travelling between processes. A part that is missing, damaged or of another division is sent by the leader.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from rekindle._src.core import words
from rekindle._src.core.atomic_checkpoint import PARTIAL, is_finished, is_stale, order_of_use, remove, set_aside
from rekindle._src.core.drawable import Record
from rekindle._src.kvcache.persist.identity import Identity, verify
from rekindle._src.kvcache.persist.segment import (
    LeafSpec,
    Memory,
    Page,
    Payload,
    Segment,
    age_of,
    exclusively,
    fresh,
    pages_of,
    size_of,
    write_segment,
)
from rekindle._src.kvcache.persist.snapshot import protected
from rekindle.errors import StoreError
from rekindle_kernels import private_files

log = logging.getLogger("rekindle.cache")
SMALL = 4 << 20  # segments below this are merged when there are MANY of them
MANY = 16
RUN_BYTES, MOST_PAGES = 4 << 20, 256  # in one read, so that several threads share a request's pages
FRESH_SECONDS = 600.0
_TOUCH_SECONDS = 60.0
_MOST_FAILURES = 3  # failed reads of one segment after which this session reads it no more


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class DiskStatistics(Record):
    """Sizes now, and counts since the session was opened."""

    pages: int  # that this session knows
    bytes: int  # in the whole folder, other models included
    budget: int
    segments: int
    written: int
    read: int
    damaged: int


class Run(NamedTuple):
    """Pages that lie one after another in a segment."""

    segment: Segment
    first: int
    digests: list[bytes]

    def continues(self, segment: Segment, index: int) -> bool:
        """True if the page at `index` of `segment` can be added to the run."""
        count = len(self.digests)
        small = count < MOST_PAGES and (count + 1) * segment.page_bytes <= RUN_BYTES
        return segment is self.segment and index == self.first + count and small


class DiskTier:
    """Pages on disk. Thread-safe: some threads read for requests while another one saves."""

    def __init__(self, folder: Path, budget: int, identity: Identity) -> None:
        self.folder, self.budget = folder, budget
        # Segments used more recently make no room for others: a tree larger than the budget would be written for ever.
        self.fresh_seconds = FRESH_SECONDS
        self.identity = identity  # of the pages written from now on; changes with the weights
        self.written = self.read = self.damaged = 0
        self._lock = threading.Lock()
        self._index: dict[bytes, tuple[Segment, int]] = {}
        self._segments: dict[str, Segment] = {}
        self._touched: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        self._logged: set[str] = set()
        self.distrusted = private_files.distrust_reason(self.pages_folder)  # why nothing is read or written here
        if self.distrusted is not None:
            private_files.tell_once(self.distrusted)

    @property
    def pages_folder(self) -> Path:
        return self.folder / "pages"

    @property
    def page_bytes(self) -> int:
        """The size of a page of this identity; 0 if none is known."""
        root = self.identity.root.hex()
        return next((s.page_bytes for name, s in tuple(self._segments.items()) if name.startswith(root)), 0)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._index

    # -- reading

    def scan(self) -> int:
        """Take in new segments of this identity, written by any process, and forget removed ones.

        Return how many pages are known.
        """
        for segment in tuple(self._segments.values()):
            if segment.is_gone():
                self._drop(segment)
        identity = self.identity  # other weights may take its place meanwhile
        prefix = identity.root.hex()
        for path in self._paths():
            if not path.name.startswith(prefix) or path.name in self._segments:
                continue
            try:
                self._add(self._verified(path, identity))
            except FileNotFoundError:
                continue  # removed meanwhile, or its folder has no index
            except StoreError as error:
                self.damaged += 1
                self.log_once(
                    path.name, f"pages in {path} can't be used ({error}); they are set aside and computed again"
                )
                set_aside(path)
            except (OSError, MemoryError) as error:
                self.log_once(path.name, f"pages in {path} can't be read now ({error}); they stay")
        return len(self)

    def pages(self) -> list[Page]:
        """Return the known pages of this identity; of a page that is in two segments, the newer one."""
        root = self.identity.root.hex()
        with self._lock:
            newest = dict(self._index)
        return [
            page
            for name, segment in tuple(self._segments.items())
            if name.startswith(root)
            for index, page in enumerate(pages_of(segment.records))
            if newest.get(page.digest) == (segment, index)
        ]

    def segments_of(self, digests: Iterable[bytes]) -> set[Path]:
        """Return the segments that contain the known ones of `digests`."""
        with self._lock:
            return {self._index[digest][0].path for digest in digests if digest in self._index}

    def load(self, digest: bytes) -> Payload:
        """Read a payload. Raises KeyError if it is missing, StoreError if it is damaged; both forget the page.

        An error that passes is a StoreError too, and the page stays known.
        """
        with self._lock:
            segment, index = self._index[digest]
        payloads = self._read(Run(segment, index, [digest]))
        if not payloads:
            raise KeyError(digest)
        if isinstance(payloads[0], StoreError):
            raise payloads[0]
        return payloads[0]

    def runs(self, digests: Iterable[bytes]) -> list[Run]:
        """Return the known ones of `digests` as runs. Each run is read at once; threads may read different runs."""
        with self._lock:
            places = sorted(
                ((*self._index[digest], digest) for digest in digests if digest in self._index),
                key=lambda place: (place[0].path.name, place[1]),
            )
        runs: list[Run] = []
        for segment, index, digest in places:
            if runs and runs[-1].continues(segment, index):
                runs[-1].digests.append(digest)
            else:
                runs.append(Run(segment, index, [digest]))
        return runs

    def load_run(self, run: Run, memory: Memory) -> list[tuple[bytes, Payload]]:
        """Read a run of pages as `load` does, skipping missing, damaged and currently unreadable pages."""
        pairs = zip(run.digests, self._read(run, memory), strict=False)
        return [(digest, payload) for digest, payload in pairs if not isinstance(payload, StoreError)]

    def _read(self, run: Run, memory: Memory = fresh) -> list[Payload | StoreError]:
        """Read a run; empty if the segment is gone. Forgets damaged pages, but keeps pages that can't be read now."""
        segment = run.segment
        try:
            payloads = segment.read_run(run.first, len(run.digests), memory)
        except (FileNotFoundError, NotADirectoryError):
            self._drop(segment)
            return []
        except (OSError, MemoryError) as error:
            self._failures[segment.path.name] += 1
            if self._failures[segment.path.name] >= _MOST_FAILURES:
                self._drop(segment, known=True)
            self.log_once(segment.path.name, f"pages in {segment.path} can't be read now ({error}); they stay")
            return [StoreError(f"{segment.path} can't be read now: {error}")] * len(run.digests)
        damaged = {
            digest: payload
            for digest, payload in zip(run.digests, payloads, strict=True)
            if isinstance(payload, StoreError)
        }
        for damage in damaged.values():
            self.log_once(segment.path.name, f"{damage}; damaged pages are computed again")
        with self._lock:
            for digest in damaged:
                self._index.pop(digest, None)
            self.damaged += len(damaged)
            self.read += len(payloads) - len(damaged)
        if len(damaged) < len(payloads):
            self._touch(segment)
        return payloads

    # -- writing

    def write(self, pages: Iterable[tuple[Page, Payload]]) -> int:
        """Write pages as one new segment. Return how many. Raises StoreError if the disk is full or unwritable."""
        new = [(page, payload) for page, payload in pages if page.digest not in self._index]
        if not new:
            return 0
        if self.distrusted is not None:
            raise StoreError(f"pages were not saved: {self.distrusted}")
        size = len(new) * sum(leaf.nbytes for leaf in new[0][1])
        try:
            private_files.make_folder(self.pages_folder)
            free = shutil.disk_usage(self.pages_folder).free
            if free < 2 * size:
                raise StoreError(
                    f"{words.mebibytes(size)} of pages were not saved: they need twice that, and "
                    f"{words.mebibytes(free)} are free in {self.pages_folder}. Free some space"
                )
            self._write(new)
        except OSError as error:
            raise StoreError(
                f"{words.mebibytes(size)} of pages were not saved: {error}. Free some space, or check the disk"
            ) from error
        self.written += len(new)
        return len(new)

    def room(self, size: int) -> int:
        """Return how many of `size` more bytes may be written. Removes least recently used segments to make room."""
        return max(0, min(size, self.budget - self.collect(reserve=min(size, self.budget))))

    def collect(self, *, reserve: int = 0) -> int:
        """Remove segments beyond the budget and remains of killed writers; returns how many bytes are left.

        For a `reserve` only segments that were not used for a while go, unless a snapshot lists them. Nothing is
        removed while another process collects, nor while a snapshot can't be read.
        """
        if self.distrusted is not None:
            return 0
        with exclusively(self.pages_folder) as alone:
            sizes = {path: size_of(path) for path in self._paths()}
            total = sum(size for size, _ in sizes.values())
            if not alone:
                return total
            self._remove_partials()
            if total + reserve > self.budget:
                try:
                    listed_digests = protected(self.folder)
                except OSError as error:
                    self.log_once("snapshots", f"no pages are removed while a snapshot can't be read: {error}")
                    return total
                order = sorted(
                    (self._protects(path, listed_digests), order_of_use(used), path)
                    for path, (_, used) in sizes.items()
                )
                fresh = time.time() - self.fresh_seconds
                for listed, used, path in order:
                    if total + reserve <= self.budget or (total <= self.budget and (listed or used > fresh)):
                        break
                    total -= sizes[path][0]
                    self._remove(path)
            self._merge(sizes)
            return total

    def clear(self) -> int:
        """Remove every page of this identity; returns how many bytes they took."""
        freed = 0
        for path in self._paths():
            if path.name.startswith(self.identity.root.hex()):
                freed += size_of(path)[0]
                self._remove(path)
        return freed

    def statistics(self) -> DiskStatistics:
        total = sum(size_of(path)[0] for path in self._paths())
        return DiskStatistics(len(self), total, self.budget, len(self._segments), self.written, self.read, self.damaged)

    def other_models(self) -> set[str]:
        """Return the root keys, in hex, of the other models with pages here."""
        return {path.name.split("-")[0] for path in self._paths()} - {self.identity.root.hex()}

    def log_once(self, topic: str, text: str) -> None:
        """Log `text`, once for each `topic`."""
        if topic not in self._logged:
            self._logged.add(topic)
            log.warning(text)

    def close(self) -> None:
        with self._lock:
            self._index.clear()
            self._segments.clear()

    # -- inside

    def _paths(self) -> list[Path]:
        """Return the finished segments, the oldest first."""
        if self.distrusted is not None:
            return []
        with contextlib.suppress(OSError):
            names = sorted(entry.name for entry in os.scandir(self.pages_folder) if entry.is_dir())
            ordered = sorted(filter(is_finished, names), key=age_of)
            return [self.pages_folder / name for name in ordered]
        return []

    def _write(self, pages: Sequence[tuple[Page, Payload]]) -> None:
        path = self.pages_folder / f"{self.identity.root.hex()}-{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
        write_segment(path, self.identity.fields(), pages)
        self._add(Segment.open(path))

    def _add(self, segment: Segment) -> None:
        with self._lock:
            self._segments[segment.path.name] = segment
            self._index.update((digest, (segment, index)) for index, digest in enumerate(segment.digests()))

    def _verified(self, path: Path, identity: Identity) -> Segment:
        """Open a segment. Raises StoreError if its pages do not belong to an identity."""
        segment = Segment.open(path)
        reason = identity.mismatch(Identity.stored_in(segment.header))
        if reason is not None:
            raise StoreError(reason)
        verify(identity, segment.records, segment.leaves)
        return segment

    def _drop(self, segment: Segment, *, known: bool = False) -> None:
        """Forget a segment's pages. If it stays `known`, the next scan does not take it in again."""
        with self._lock:
            if not known:
                self._segments.pop(segment.path.name, None)
            for digest in segment.digests():
                if self._index.get(digest, (None,))[0] is segment:
                    del self._index[digest]

    def _remove(self, path: Path) -> None:
        segment = self._segments.get(path.name)
        if segment is not None:
            self._drop(segment)
        remove(path)

    def _protects(self, path: Path, listed_digests: dict[str, set[bytes]]) -> bool:
        digests = listed_digests.get(path.name.split("-")[0])
        segment = self._segments.get(path.name)
        return digests is not None and (segment is None or not digests.isdisjoint(segment.digests()))

    def _merge(self, sizes: dict[Path, tuple[int, float]]) -> None:
        """Merge small segments of this identity into one. A segment that can't be read now stays as it is."""
        small = [self._segments[path.name] for path in sizes if path.name in self._segments and sizes[path][0] < SMALL]
        small = [segment for segment in small if segment.path.name.startswith(self.identity.root.hex())]
        if len(small) < MANY:
            return
        pages: list[tuple[Page, Payload]] = []
        merged: list[Segment] = []
        for segment in small:
            try:
                pages += self._pages_in(segment)
            except (OSError, MemoryError):
                continue
            merged.append(segment)
        if pages:
            try:
                self._write(pages)
            except OSError as error:
                self.log_once("merge", f"small segments of pages stay as they are: {error}")
                return
        for segment in merged:
            self._remove(segment.path)

    def _pages_in(self, segment: Segment) -> list[tuple[Page, Payload]]:
        """Return the pages that this tier would read from the segment, without damaged ones. Raises OSError."""
        pairs = []
        for index, page in enumerate(pages_of(segment.records)):
            if self._index.get(page.digest) == (segment, index):
                with contextlib.suppress(StoreError):
                    pairs.append((page, segment.read(index)))
        return pairs

    def _touch(self, segment: Segment) -> None:
        now = time.monotonic()
        if now - self._touched.get(segment.path.name, -math.inf) > _TOUCH_SECONDS:
            self._touched[segment.path.name] = now
            private_files.touch(segment.path)

    def _remove_partials(self) -> None:
        for folder in (self.pages_folder, self.folder / "snapshots"):
            with contextlib.suppress(OSError):  # the next call finds them again
                for partial in folder.glob(f"{PARTIAL}*") if folder.is_dir() else ():
                    if is_stale(partial):
                        shutil.rmtree(partial, ignore_errors=True)


class OtherDisks(Protocol):
    """The other processes, which keep their parts of this one's written pages."""

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


def part_identity(identity: Identity, heads: Sequence[Sequence[int]], leaves: Sequence[LeafSpec]) -> Identity:
    """Return the identity of the parts of pages with these kv heads, which are never taken for whole pages.

    `heads` lists the heads in each array of a page.
    """
    different = ", ".join(dict.fromkeys(str(list(own)) for own in heads))
    return dataclasses.replace(identity, layout=f"{identity.layout} heads {different}", leaves=tuple(leaves))
