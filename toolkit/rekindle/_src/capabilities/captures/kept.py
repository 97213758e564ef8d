"""Captures that are kept: what requests captured at the tokens of a page, by the page's digest.

A digest names model, weights and namespace, and all tokens up to the page's last one, so that what was
captured there once is what any other request would capture. It lies in host memory, under a budget of its own. A page
may leave the device, come back or be computed again meanwhile: its digest stays. A snapshot has the lines of its pages
on disk (`StoredCaptures`), from where a later session takes them.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.captured import CapturedPart, Key
from rekindle._src.core.drawable import Record
from rekindle._src.core.prefix import Prefix
from rekindle._src.kvcache import AnyCache, page_digest
from rekindle._src.kvcache.page_data import Ask, PageData, PagesOnDisk
from rekindle._src.kvcache.persist import snapshot
from rekindle._src.kvcache.persist.identity import mark
from rekindle._src.kvcache.persist.segment import Page
from rekindle._src.kvcache.tiers.disk import DiskTier
from rekindle._src.kvcache.tiers.host import size
from rekindle.errors import StoreError

_MARK = mark("captures")


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class KeptStatistics(Record):
    """Sizes now, and counts since the session was opened."""

    pages: int
    bytes: int
    budget: int
    reused: int  # positions that requests captured without computing them
    dropped: int  # pages, for others


class _Lines(NamedTuple):
    """The lines of a site and layer at some of a page's tokens, in their order."""

    mask: int  # a bit for each token
    array: NDArray[Any]


class CapturedPositions(Protocol):
    """The positions that a request captures."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """The sites and layers."""
        ...

    def next_wanted(self, position: int) -> int:
        """Return the first position from this one on that is captured, or END."""
        ...

    def wanted_in(self, start: int, stop: int) -> NDArray[np.int32]:
        """Return the captured positions in [start, stop)."""
        ...


class KeptCaptures(PageData):
    """Captured lines by page, site and layer; the least recently used pages are dropped first."""

    def __init__(self, budget: int, page_size: int, root_key: bytes) -> None:
        self.budget, self.page_size, self.root_key = budget, page_size, root_key
        self._stored: StoredCaptures | None = None  # by earlier sessions, for a session that restores their pages
        self.version = 0  # changes whenever an answer of `missing` may change
        self.nbytes = self._reused = self._dropped = 0
        self._pages: OrderedDict[bytes, dict[Key, _Lines]] = OrderedDict()

    @classmethod
    def of(cls, cache: AnyCache | None) -> KeptCaptures | None:
        """Return the captures of a cache's pages; None without them."""
        data = () if cache is None else cache.data
        return next((one for one in data if isinstance(one, cls)), None)

    def names(self, prefix: Prefix) -> list[bytes]:
        """Return the digests of the full pages of a prompt."""
        tokens, size, names = prefix.tokens, self.page_size, []
        digest = prefix.namespace.root(self.root_key)
        for start in range(0, len(tokens) - size + 1, size):
            digest = page_digest(digest, tokens[start : start + size])
            names.append(digest)
        return names

    def reach(self, names: Sequence[bytes], keys: Sequence[Key], tapped: CapturedPositions, position: int) -> int:
        """Return the first position from this one on that is wanted and not kept, of the pages `names` of a prompt."""
        room = 0 if self._stored is None else self.budget
        while (reached := self._walk(names, keys, tapped, position, room)) < 0:
            room = 0  # look again: lines just read may have replaced other lines of this prompt
        return reached

    def _walk(
        self, names: Sequence[bytes], keys: Sequence[Key], tapped: CapturedPositions, position: int, room: int
    ) -> int:
        """Do the same, and read missing lines from disk while the prompt's lines fill less than `room` bytes; return -1
        if any were read.
        """
        position, size, read = tapped.next_wanted(position), self.page_size, False
        while position < len(names) * size:
            page = position // size
            offsets = (tapped.wanted_in(position, (page + 1) * size) - page * size).tolist()
            missing = self.missing(names[page], keys, offsets)
            if missing is not None and room > 0:
                read |= self._read(names[page], keys)
                missing = self.missing(names[page], keys, offsets)
            if missing is not None:
                return -1 if read else page * size + missing
            if room > 0:
                room -= sum(line.array.nbytes for line in self._pages[names[page]].values())
                self.use([names[page]])
            position = tapped.next_wanted((page + 1) * size)
        return -1 if read else position

    def _read(self, name: bytes, keys: Iterable[Key]) -> bool:
        """Read lines of a page from disk. True if any were there."""
        assert self._stored is not None
        whole, there = (1 << self.page_size) - 1, self._pages.get(name, {})
        needed = [key for key in keys if key not in there or there[key].mask != whole]
        found = {key: array for key in needed if (array := self._stored.read(key, name)) is not None}
        if found:
            self.put(name, np.arange(self.page_size, dtype=np.int32), found)
            self.use([name])
        return bool(found)

    def whole(self, names: Iterable[bytes]) -> dict[Key, dict[bytes, NDArray[Any]]]:
        """Return the complete lines of these pages, by site and layer: lines with all tokens of their page."""
        found: dict[Key, dict[bytes, NDArray[Any]]] = {}
        for name in names:
            for key, (mask, array) in self._pages.get(name, {}).items():
                if mask == (1 << self.page_size) - 1:
                    found.setdefault(key, {})[name] = array
        return found

    def missing(self, name: bytes, keys: Iterable[Key], offsets: Sequence[int]) -> int | None:
        """Return the first token of a page among `offsets` with any of `keys` missing; None if all are kept."""
        lines, wanted = self._pages.get(name, {}), _mask(offsets)
        for key in keys:
            wanted &= lines[key].mask if key in lines else 0
        return next((offset for offset in offsets if not wanted >> offset & 1), None)

    def get(self, name: bytes, keys: Iterable[Key], offsets: NDArray[np.int32]) -> dict[Key, NDArray[Any]]:
        """Return lines of a page, which are not `missing`."""
        lines = self._pages[name]
        self._reused += len(offsets)
        return {key: lines[key].array[np.searchsorted(_offsets(lines[key].mask), offsets)] for key in keys}

    def put(self, name: bytes, offsets: NDArray[np.int32], arrays: dict[Key, NDArray[Any]]) -> None:
        """Keep lines of a page, which are the store's from now on."""
        page, mask = self._pages.setdefault(name, {}), _mask(offsets.tolist())
        for key, array in arrays.items():
            old = page.get(key)
            if old is not None and mask & ~old.mask == 0:
                continue
            page[key] = new = _Lines(mask, array) if old is None else _joined(old, _Lines(mask, array))
            self.nbytes += new.array.nbytes - (0 if old is None else old.array.nbytes)
        self.version += 1

    def use(self, path: Sequence[bytes]) -> None:
        """Record that pages of a prompt, from the first on, are used now, and drop those beyond the budget."""
        for name in reversed(path):  # a page is of no use without those before it, and leaves before them
            if name in self._pages:
                self._pages.move_to_end(name)
        while self.nbytes > self.budget:
            _, lines = self._pages.popitem(last=False)
            self.nbytes -= sum(line.array.nbytes for line in lines.values())
            self._dropped += 1
            self.version += 1

    def clear(self, root_key: bytes) -> None:
        """Forget everything. Pages are named from `root_key` on."""
        self._pages.clear()
        self.root_key = root_key
        self.nbytes = 0
        self.version += 1

    def restore(self, disk: PagesOnDisk) -> None:
        self._stored = StoredCaptures(disk)

    def save(self, name: str, pages: Sequence[Page], disk: PagesOnDisk, ask: Ask) -> None:
        lines = ask(lambda: self.whole(page.digest for page in pages))
        (self._stored or StoredCaptures(disk)).save(name, pages, lines)

    def statistics(self) -> KeptStatistics:
        return KeptStatistics(len(self._pages), self.nbytes, self.budget, self._reused, self._dropped)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the byte count matches the lines and is within the budget."""
        lines = [line for page in self._pages.values() for line in page.values()]
        assert self.nbytes == sum(line.array.nbytes for line in lines), "the bytes of kept captures drifted"
        assert self.nbytes <= self.budget, "kept captures are beyond their budget"
        assert all(line.mask.bit_count() == len(line.array) for line in lines), "a kept line is of no token"


class StoredCaptures:
    """Kept captures on disk, in the folder and the budget of a session's pages; any thread may call it.

    They are segments next to the segments of pages, with an identity for each site and layer. They are written with a
    snapshot, and read when a request of a later session captures the same of restored pages. A page is stored only if
    all of its tokens were captured.
    """

    def __init__(self, pages: PagesOnDisk) -> None:
        self._pages = pages
        self._disks: dict[tuple[bytes, Key], DiskTier] = {}
        self._lock = threading.Lock()

    def read(self, key: Key, digest: bytes) -> NDArray[Any] | None:
        """Return the captures of a page at all its tokens; None if they are not stored, or can't be read."""
        disk = self._disk(key)
        if digest not in disk:
            return None
        try:
            array: NDArray[Any] = disk.load(digest)[0][0]
        except (KeyError, StoreError):
            return None
        return array if len(array) == disk.identity.page_size else None

    def save(self, name: str, pages: Sequence[Page], lines: Mapping[Key, Mapping[bytes, NDArray[Any]]]) -> int:
        """Write lines of a site and layer by page, and list these `pages` under `name`. Return the number of new lines.

        Raises StoreError. Lines beyond the budget are left out: they can be computed again.
        """
        written = 0
        for key, by_page in lines.items():
            disk = self._disk(key)
            disk.scan()
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
                identity = dataclasses.replace(pages, layout=f"{pages.layout}{_MARK}{site}", leaves=())
                disk = self._disks[pages.root, key] = DiskTier(self._pages.folder, self._pages.budget, identity)
                disk.scan()
        return disk


def parts_by_page(part: CapturedPart, page_size: int) -> Iterable[tuple[int, CapturedPart]]:
    """Yield copies of the captured lines, by the page of their tokens."""
    pages = part.positions // page_size
    for page in np.unique(pages).tolist():
        first, last = np.searchsorted(pages, (page, page + 1))
        arrays = {key: array[first:last].copy() for key, array in part.arrays.items()}
        yield page, CapturedPart(part.positions[first:last], arrays)


def _mask(offsets: Iterable[int]) -> int:
    mask = 0
    for offset in offsets:
        mask |= 1 << offset
    return mask


def _offsets(mask: int) -> list[int]:
    return [offset for offset in range(mask.bit_length()) if mask >> offset & 1]


def _joined(first: _Lines, second: _Lines) -> _Lines:
    """Return the lines of both, in the order of their tokens. Of a token that both have, the first one's stay."""
    offsets = _offsets(first.mask) + _offsets(second.mask)
    _, order = np.unique(offsets, return_index=True)
    return _Lines(first.mask | second.mask, np.concatenate([first.array, second.array])[order])
