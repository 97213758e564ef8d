"""The page pool: tracks which KV pages are free, held by sequences, or kept by the prefix cache alone.

Every page is in exactly one of three states, so `free + held + cached == total` at all times. A page carries one
reference per sequence that reads it, and one more while the prefix cache keeps it.

A page with miscounted references is put in quarantine: it counts as held, and is never handed out again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.records import IntArray

Pages = Sequence[int] | IntArray
QUARANTINE = 1 << 24  # references of a page in quarantine: more than it can lose


def pages_for(length: int, page_size: int) -> int:
    """Return how many pages `length` tokens need."""
    return -(-length // page_size)


class PagePool:
    """Reference counts over `pages` device pages, which are numbered from `first` on.

    The first one is scratch for padding and never handed out.
    """

    def __init__(self, pages: int, first: int = 0) -> None:
        assert pages >= 2, f"a pool needs the scratch page and one more, got {pages}"
        self._first = first
        self.num_pages = first + pages  # every number is below; arrays by page have as many entries
        self._refs: NDArray[np.int32] = np.zeros(self.num_pages, np.int32)
        self._kept: NDArray[np.bool_] = np.zeros(self.num_pages, np.bool_)
        self._free = list(range(self.num_pages - 1, first, -1))  # a stack, lowest page on top
        self._cached = 0
        self.cache_refs = 0  # pages that the prefix cache references, held or not
        self.quarantined = 0  # pages that are never handed out again

    @property
    def total(self) -> int:
        """Pages that can be handed out: all but the scratch page."""
        return self.num_pages - 1 - self._first

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that only the prefix cache references: each of them can be evicted."""
        return self._cached

    @property
    def held(self) -> int:
        """Pages that at least one sequence references."""
        return self.total - len(self._free) - self._cached

    def references(self, page: int) -> int:
        return int(self._refs[page])

    def is_kept(self, page: int) -> bool:
        return bool(self._kept[page])

    def unheld(self, pages: Pages) -> int:
        """Return how many of `pages` only the prefix cache references."""
        return int(np.count_nonzero(self._refs[np.asarray(pages, np.int32)] == 1)) if len(pages) else 0

    def held_alone(self, pages: IntArray, counts: NDArray[np.intp]) -> int:
        """Return how many of `pages`, which differ, have `counts` holders each, apart from the prefix cache."""
        return int(np.count_nonzero(self._refs[pages] - self._kept[pages] == counts))

    def take(self, count: int) -> list[int]:
        """Take `count` free pages, with one reference each. Look at `free` before."""
        assert 0 <= count <= len(self._free), f"{count} pages asked for, {len(self._free)} free"
        if not count:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        pages.reverse()
        self._refs[pages] = 1
        return pages

    def share(self, pages: Pages) -> None:
        """Add a reference to each of `pages`, which must be in use and differ from each other."""
        if not len(pages):
            return
        index = np.asarray(pages, np.int32)
        refs = self._refs[index]
        assert refs.min() > 0, f"sharing free pages {index[refs <= 0].tolist()}"
        self._cached -= int(np.count_nonzero(self._kept[index] & (refs == 1)))
        self._refs[index] = refs + 1

    def release(self, pages: Pages) -> None:
        """Remove a reference from each of `pages`; pages without references are free again."""
        if not len(pages):
            return
        index = np.asarray(pages, np.int32)
        refs = self._refs[index] - 1
        kept = self._kept[index]
        # The cache gives its own reference up through `drop` only: a kept page must keep one here.
        assert (refs >= kept).all(), f"released too often: {index[refs < kept].tolist()}"
        self._refs[index] = refs
        self._cached += int(np.count_nonzero(kept & (refs == 1)))
        self._free.extend(index[refs == 0].tolist())

    def keep(self, pages: Pages) -> None:
        """Add the prefix cache's reference to pages that sequences hold."""
        if not len(pages):
            return
        self.check_held(pages)
        index = np.asarray(pages, np.int32)
        self._kept[index] = True
        self._refs[index] += 1
        self.cache_refs += len(index)

    def check_held(self, pages: Pages) -> None:
        """Raise AssertionError unless sequences hold all of `pages`, and the prefix cache none."""
        if len(pages):
            index = np.asarray(pages, np.int32)
            assert not self._kept[index].any(), "a page is kept twice"
            assert self._refs[index].min() > 0, "a free page is kept"

    def drop(self, page: int) -> None:
        """Remove the prefix cache's reference to `page`."""
        assert self._kept[page], f"page {page} is not in the cache"
        self._kept[page] = False
        self._refs[page] -= 1
        self.cache_refs -= 1
        if self._refs[page] == 0:
            self._cached -= 1
            self._free.append(page)

    def miscounted(self, pages: Pages) -> list[int]:
        """Return the pages among `pages` with fewer references than their holders; a sequence holds each of them."""
        index = np.unique(np.asarray(pages, np.int32))
        return [int(page) for page in index[self._refs[index] - 1 < self._kept[index]]]

    def quarantine(self, pages: Pages) -> None:
        """Never hand out, share or evict these pages again, whatever their references are."""
        for page in np.unique(np.asarray(pages, np.int32)).tolist():
            if self._refs[page] >= QUARANTINE // 2:
                continue
            if page in self._free:
                self._free.remove(page)
            elif self._kept[page] and self._refs[page] == 1:
                self._cached -= 1
            self._refs[page] += QUARANTINE
            self.quarantined += 1

    def check_integrity(self, expected: NDArray[np.int32] | None = None) -> None:
        """Raise AssertionError unless each page is free, held or cached, and referenced as `expected`."""
        free = np.zeros(self.num_pages, np.bool_)
        free[self._free] = True
        assert len(self._free) == int(free.sum()), "a page is free twice"
        usable = slice(self._first + 1, None)
        assert not free[: self._first + 1].any(), "the scratch page is on the free list"
        assert not self._refs[: self._first + 1].any(), "the scratch page was handed out"
        assert (self._refs[usable] >= 0).all(), "a page has a negative count"
        assert ((self._refs[usable] == 0) == free[usable]).all(), "a page is both free and referenced, or neither"
        assert not (self._kept & free).any(), "a cached page is free"
        assert self._cached == int(np.count_nonzero(self._kept & (self._refs == 1))), "the cached count drifted"
        assert self.cache_refs == int(np.count_nonzero(self._kept)), "the kept count drifted"
        if expected is not None:
            wrong = np.flatnonzero((self._refs != expected) & (self._refs < QUARANTINE // 2))
            assert not len(wrong), (
                f"pages {wrong[:8].tolist()} have {self._refs[wrong[:8]].tolist()} references, "
                f"expected {expected[wrong[:8]].tolist()}"
            )
