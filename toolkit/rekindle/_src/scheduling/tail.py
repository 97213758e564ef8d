"""The pages of one running sequence in layers with a window, which gives back those behind it."""

from __future__ import annotations

import numpy as np

from rekindle._src.core.records import IntArray
from rekindle._src.kvcache.pool import pages_for


class Tail:
    """The pages of one running sequence, from place `first` on."""

    __slots__ = ("_array", "_page_size", "_window", "again", "attached", "first", "pages", "source", "stops")

    def __init__(self, window: int, page_size: int) -> None:
        self._window, self._page_size = window, page_size
        self.first = 0
        self.pages: list[int] = []
        self._array: IntArray | None = None  # the pages, once a row has read them
        self.attached = 0  # places that the tree knows
        self.stops: set[int] = set()  # pages before which others are likely to continue
        self.source = ""  # where the pages came from that it continued
        self.again = 0  # cached tokens that it computes again, since these pages were not there

    @property
    def end(self) -> int:
        """The place behind the last page."""
        return self.first + len(self.pages)

    def changed(self) -> None:
        """Note that pages were added, replaced or given back."""
        self._array = None

    def of(self, start: int, stop: int) -> tuple[IntArray, int]:
        """Return the pages that a row of positions [start, stop) reads and writes, and the place of the first."""
        if self._array is None:
            self._array = np.array(self.pages, np.int32)
        first = max(0, start - self._window + 1) // self._page_size
        return self._array[first - self.first : pages_for(stop, self._page_size) - self.first], first
