"""Page tables that stay on the device: a step brings the changed entries, not the tables of all its rows.

The host keeps a copy, from which a step's changes are derived.

Axes: L slots (the last is scratch), W pages of a sequence, C changes of a step, n tables of a call.

256 rows of 8,192 tokens have 512 KiB of tables, of 128k tokens 8 MiB, that would travel in every step to change 16
entries. On CPU whole tables are passed: a program reads the host's buffers in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax import Array

from rekindle._src.core.records import IntArray, Row
from rekindle._src.programs.partitioning import Partitioning
from rekindle_kernels import current_platform

PUT = 4  # whole tables that one call writes
_NOTHING: IntArray = np.empty(0, np.int32)


def stay(parts: Partitioning) -> bool:
    """True if page tables stay on the device: there is one device, and it is no CPU."""
    return current_platform() != "cpu" and not parts.divided


def put(tables: Array, ints: Array) -> Array:
    """Return the tables with n whole ones [n * (1 + W)] written, each of which follows its slot."""
    rows = ints.reshape(-1, 1 + tables.shape[1])
    return tables.at[rows[:, 0]].set(rows[:, 1:], mode="promise_in_bounds")


class SentTables:
    """The tables by slot, after the steps that were dispatched.

    A sequence gets a page about every 16 tokens, and its rows share one array as long as none is added. So most rows
    are known to be unchanged without looking at their pages.
    """

    def __init__(self, slots: int, width: int) -> None:
        """Make tables for `slots`, without the scratch slot. `width` is how many pages a sequence may have."""
        self._scratch, self._width = slots, width
        self._sent: list[IntArray] = [_NOTHING] * slots
        self._new: dict[int, IntArray] = {}
        self.whole: list[tuple[int, IntArray]] = []  # slots, and tables with too many changes: written before the step

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
        """Return the whole tables in the form that `put` takes, `rows` at a time."""
        batches = []
        for first in range(0, len(self.whole), rows):
            packed = np.zeros((rows, 1 + self._width), np.int32)
            packed[:, 0] = self._scratch
            for index, (slot, pages) in enumerate(self.whole[first : first + rows]):
                packed[index, 0], packed[index, 1 : 1 + len(pages)] = slot, pages
            batches.append(packed.reshape(-1))
        return batches

    def dispatched(self) -> None:
        """Record that the step written last was dispatched: the next one brings only the changes after it."""
        for slot, pages in self._new.items():
            self._sent[slot] = pages

    def forget(self) -> None:
        """Forget all tables: they were made anew, or the changes of a step are unknown."""
        self._sent = [_NOTHING] * self._scratch


def _changed(old: IntArray, new: IntArray) -> IntArray:
    """Return the places where `new` has another page than `old`, or where `old` has none."""
    common = min(len(old), len(new))
    places: IntArray = np.flatnonzero(new[:common] != old[:common]).astype(np.int32)
    if len(new) > common:
        places = np.concatenate([places, np.arange(common, len(new), dtype=np.int32)])
    return places
