"""The disk tier: pages by digest in segments below one folder, shared by processes and by models.

Everything is content-addressed and nothing is changed in place, so processes that share the folder at worst write a
page twice. Only removing needs order: one process at a time collects, whoever reads a removed page computes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rekindle._src.core import html
from rekindle._src.core.atomic_checkpoint import PARTIAL
from rekindle._src.kvcache.persist.segment import Memory, Page, Payload, Segment, fresh, pages_of, write_segment
from rekindle._src.kvcache.persist.snapshot import Identity, protected
from rekindle.errors import StoreError

log = logging.getLogger("rekindle.cache")
SMALL = 4 << 20  # segments below this are merged when there are MANY of them
MANY = 16
RUN_BYTES, MOST_PAGES = 4 << 20, 256  # of one read, so that several threads share what a request needs
STALE_PARTIAL_SECONDS = 3600.0
FRESH_SECONDS = 600.0
_TOUCH_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class DiskStatistics(html.Record):
    """Sizes now, and counts since the session was opened."""

    pages: int  # that this session knows
    bytes: int  # of the whole folder, other models included
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
        """Whether that page can be part of it."""
        count = len(self.digests)
        small = count < MOST_PAGES and (count + 1) * segment.page_bytes <= RUN_BYTES
        return segment is self.segment and index == self.first + count and small


class DiskTier:
    """Thread-safe: some threads read for requests while another one saves."""

    def __init__(self, folder: Path, budget: int, identity: Identity) -> None:
        self.folder, self.budget = folder, budget
        # Segments used more recently make no room for others: a tree larger than the budget would be written for ever.
        self.fresh_seconds = FRESH_SECONDS
        self.identity = identity  # whose pages are written from now on; changes with the weights
        self.written = self.read = self.damaged = 0
        self._lock = threading.Lock()
        self._index: dict[bytes, tuple[Segment, int]] = {}
        self._segments: dict[str, Segment] = {}
        self._touched: dict[str, float] = {}
        self._said: set[str] = set()

    @property
    def pages_folder(self) -> Path:
        return self.folder / "pages"

    @property
    def page_bytes(self) -> int:
        """Of a page of this identity; 0 if none is known."""
        root = self.identity.root.hex()
        return next((s.page_bytes for name, s in tuple(self._segments.items()) if name.startswith(root)), 0)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._index

    # -- reading

    def scan(self) -> int:
        """Take in the segments of this identity that are new, from whichever process; how many pages are known."""
        prefix = self.identity.root.hex()
        for path in self._paths():
            if not path.name.startswith(prefix) or path.name in self._segments:
                continue
            try:
                self._add(Segment.open(path))
            except FileNotFoundError:
                continue  # removed meanwhile
            except Exception as error:
                self.damaged += 1
                self.say(path.name, f"pages in {path} can't be used ({error}); they are dropped and computed again")
                shutil.rmtree(path, ignore_errors=True)
        return len(self)

    def pages(self) -> list[Page]:
        """What is known of this identity; of a page in two segments, the newer."""
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

    def load(self, digest: bytes) -> Payload:
        """Raises KeyError if it is not there, StoreError if it is damaged; either way it is then forgotten."""
        with self._lock:
            segment, index = self._index[digest]
        found = self._read(Run(segment, index, [digest]))
        if not found:
            raise KeyError(digest)
        if isinstance(found[0], StoreError):
            raise found[0]
        return found[0]

    def runs(self, digests: Iterable[bytes]) -> list[Run]:
        """Where those that are there lie, each run to be read at once; different ones may be by different threads."""
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
        """As `load`, but what is gone or damaged is left out."""
        found = zip(run.digests, self._read(run, memory), strict=False)
        return [(digest, payload) for digest, payload in found if not isinstance(payload, StoreError)]

    def _read(self, run: Run, memory: Memory = fresh) -> list[Payload | StoreError]:
        """Nothing if the segment is gone. What can't be used is forgotten."""
        segment = run.segment
        try:
            found = segment.read_run(run.first, len(run.digests), memory)
        except FileNotFoundError:
            self._drop(segment)
            return []
        except OSError as error:
            found = [StoreError(str(error))] * len(run.digests)
        bad = {digest: one for digest, one in zip(run.digests, found, strict=True) if isinstance(one, StoreError)}
        for damage in bad.values():
            self.say(segment.path.name, f"{damage}; damaged pages are computed again")
        with self._lock:
            for digest in bad:
                self._index.pop(digest, None)
            self.damaged += len(bad)
            self.read += len(found) - len(bad)
        if len(bad) < len(found):
            self._touch(segment)
        return found

    # -- writing

    def write(self, pages: Iterable[tuple[Page, Payload]]) -> int:
        """Keep pages as one new segment; how many. Raises OSError, or StoreError if the disk is too full."""
        fresh = [(page, payload) for page, payload in pages if page.digest not in self._index]
        if not fresh:
            return 0
        size = len(fresh) * sum(leaf.nbytes for leaf in fresh[0][1])
        self.pages_folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.pages_folder).free
        if free < 2 * size:
            raise StoreError(f"{size >> 20} MiB of pages were not saved: {free >> 20} MiB are free. Free some space")
        path = self.pages_folder / f"{self.identity.root.hex()}-{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
        write_segment(path, self.identity.fields(), fresh)
        self._add(Segment.open(path))
        self.written += len(fresh)
        return len(fresh)

    def room(self, size: int) -> int:
        """How many of `size` more bytes may be written after what is least recently used was removed."""
        return max(0, min(size, self.budget - self.collect(reserve=min(size, self.budget))))

    def collect(self, *, reserve: int = 0) -> int:
        """Remove what is beyond the budget and what killed writers left; returns how many bytes are still there.

        For a `reserve` only what was not used for a while goes, and nothing of a snapshot. Does nothing while another
        process collects.
        """
        with self._exclusively() as alone:
            sizes = {path: _size(path) for path in self._paths()}
            total = sum(size for size, _ in sizes.values())
            if not alone:
                return total
            self._remove_partials()
            if total + reserve > self.budget:
                kept = protected(self.folder)
                order = sorted((self._protects(path, kept), used, path) for path, (_, used) in sizes.items())
                fresh = time.time() - self.fresh_seconds
                for listed, used, path in order:
                    if total + reserve <= self.budget or (total <= self.budget and (listed or used > fresh)):
                        break
                    total -= sizes[path][0]
                    self._remove(path)
            self._merge(sizes)
            return total

    def clear(self) -> int:
        """Remove every page of this identity; how many bytes that were."""
        freed = 0
        for path in self._paths():
            if path.name.startswith(self.identity.root.hex()):
                freed += _size(path)[0]
                self._remove(path)
        return freed

    def statistics(self) -> DiskStatistics:
        total = sum(_size(path)[0] for path in self._paths())
        return DiskStatistics(len(self), total, self.budget, len(self._segments), self.written, self.read, self.damaged)

    def others(self) -> set[str]:
        """Roots of pages that belong to other identities."""
        return {path.name.split("-")[0] for path in self._paths()} - {self.identity.root.hex()}

    def say(self, what: str, text: str) -> None:
        """Log it once."""
        if what not in self._said:
            self._said.add(what)
            log.warning(text)

    def close(self) -> None:
        with self._lock:
            self._index.clear()
            self._segments.clear()

    # -- inside

    def _paths(self) -> list[Path]:
        """Segments by age."""
        with contextlib.suppress(OSError):
            names = sorted(entry.name for entry in os.scandir(self.pages_folder) if entry.is_dir())
            ordered = sorted((name for name in names if not name.startswith(PARTIAL)), key=_age)
            return [self.pages_folder / name for name in ordered]
        return []

    def _add(self, segment: Segment) -> None:
        with self._lock:
            self._segments[segment.path.name] = segment
            self._index.update((digest, (segment, index)) for index, digest in enumerate(segment.digests()))

    def _drop(self, segment: Segment) -> None:
        with self._lock:
            self._segments.pop(segment.path.name, None)
            for digest in segment.digests():
                if self._index.get(digest, (None,))[0] is segment:
                    del self._index[digest]

    def _remove(self, path: Path) -> None:
        segment = self._segments.get(path.name)
        if segment is not None:
            self._drop(segment)
        # Renamed first: a removal that is killed half way leaves no half segment.
        with contextlib.suppress(OSError):
            gone = path.rename(path.with_name(f"{PARTIAL}{uuid.uuid4().hex}"))
            shutil.rmtree(gone, ignore_errors=True)

    def _protects(self, path: Path, kept: dict[str, set[bytes]]) -> bool:
        digests = kept.get(path.name.split("-")[0])
        segment = self._segments.get(path.name)
        return digests is not None and (segment is None or not digests.isdisjoint(segment.digests()))

    def _merge(self, sizes: dict[Path, tuple[int, float]]) -> None:
        """Many small segments of this identity become one."""
        small = [self._segments[path.name] for path in sizes if path.name in self._segments and sizes[path][0] < SMALL]
        small = [segment for segment in small if segment.path.name.startswith(self.identity.root.hex())]
        if len(small) < MANY:
            return
        pages: list[tuple[Page, Payload]] = []
        for segment in small:
            for index, page in enumerate(pages_of(segment.records)):
                if self._index.get(page.digest) == (segment, index):
                    with contextlib.suppress(StoreError, OSError):
                        pages.append((page, segment.read(index)))
        if pages:
            path = self.pages_folder / f"{self.identity.root.hex()}-{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
            write_segment(path, self.identity.fields(), pages)
            self._add(Segment.open(path))
        for segment in small:
            self._remove(segment.path)

    def _touch(self, segment: Segment) -> None:
        now = time.time()
        if now - self._touched.get(segment.path.name, 0.0) > _TOUCH_SECONDS:
            self._touched[segment.path.name] = now
            with contextlib.suppress(OSError):
                os.utime(segment.path)

    def _remove_partials(self) -> None:
        for folder in (self.pages_folder, self.folder / "snapshots"):
            for partial in folder.glob(f"{PARTIAL}*") if folder.is_dir() else ():
                with contextlib.suppress(OSError):
                    if time.time() - partial.stat().st_mtime > STALE_PARTIAL_SECONDS:
                        shutil.rmtree(partial, ignore_errors=True)

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[bool]:
        """Whether this process alone may remove now."""
        try:
            self.pages_folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / ".pages.lock").open("w")
        except OSError:
            yield False
            return
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True


def _age(name: str) -> str:
    return name.split("-")[1] if name.count("-") == 2 else ""


def _size(path: Path) -> tuple[int, float]:
    """Bytes and time of last use."""
    total = 0
    try:
        for folder, _, files in os.walk(path):
            total += sum(os.stat(os.path.join(folder, file)).st_size for file in files)
        return total, path.stat().st_mtime
    except OSError:
        return total, 0.0
