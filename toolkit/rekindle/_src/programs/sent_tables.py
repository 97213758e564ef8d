"""What the host knows of page tables that stay on the device: what a step has to change in them.

A sequence gets a page every 16 tokens or so, and its rows share one array as long as none is added. So most rows are
known to be unchanged without looking at their pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rekindle._src.core.records import IntArray, Row

_NOTHING: IntArray = np.empty(0, np.int32)


class SentTables:
    """The tables by slot, as the steps that were dispatched have left them."""

    def __init__(self, slots: int, width: int) -> None:
        """`slots` without the scratch slot; `width` is how many pages a sequence may have."""
        self._scratch, self._width = slots, width
        self._sent: list[IntArray] = [_NOTHING] * slots
        self._new: dict[int, IntArray] = {}
        self.whole: list[tuple[int, IntArray]] = []  # slots, and tables to be written before the step: too many changes

    def write(self, rows: Sequence[Row], changes: IntArray) -> None:
        """Fill the `changes` [3, C] of a step with those of its rows: slots, places and pages."""
        sent, most = self._sent, changes.shape[1]
        self._new = {row.slot: row.pages for row in rows if row.pages is not sent[row.slot]}
        self.whole = []
        end = 0
        for slot, pages in self._new.items():
            places = _changed(sent[slot][: self._width], pages[: self._width])
            start, end = end, end + len(places)
            if end > most:
                self.whole.append((slot, pages[: self._width]))
                end = start
                continue
            changes[0, start:end], changes[1, start:end], changes[2, start:end] = slot, places, pages[places]
        changes[0, end:], changes[1:, end:] = self._scratch, 0  # the scratch slot reads page 0

    def packed_whole(self, rows: int) -> list[IntArray]:
        """The whole tables as `page_tables.put` takes them, `rows` at a time."""
        found = []
        for first in range(0, len(self.whole), rows):
            packed = np.zeros((rows, 1 + self._width), np.int32)
            packed[:, 0] = self._scratch
            for index, (slot, pages) in enumerate(self.whole[first : first + rows]):
                packed[index, 0], packed[index, 1 : 1 + len(pages)] = slot, pages
            found.append(packed.reshape(-1))
        return found

    def dispatched(self) -> None:
        """The step that was written last is on its way: the next one is told what changes behind it."""
        for slot, pages in self._new.items():
            self._sent[slot] = pages

    def forget(self) -> None:
        """The tables were made anew, or it is not known what a step has changed."""
        self._sent = [_NOTHING] * self._scratch


def _changed(old: IntArray, new: IntArray) -> IntArray:
    """Places where `new` has another page than `old`, or where `old` has none."""
    common = min(len(old), len(new))
    places: IntArray = np.flatnonzero(new[:common] != old[:common]).astype(np.int32)
    if len(new) > common:
        places = np.concatenate([places, np.arange(common, len(new), dtype=np.int32)])
    return places
