"""The slots of states that a step reads and writes, two integers in each row, of models whose layers have states.

A row may read its sequence's state from one slot and write it to another. So a state that the prefix tree keeps is used
without copying it, and left for the tree without copying it. Slot 0 is scratch: empty rows read and write it.
"""

from __future__ import annotations

from jax import Array

from rekindle._src.core.records import IntArray, Row
from rekindle._src.programs.feature import Columns, Feature


class StateSlots(Feature):
    """The two slots of each row."""

    row_ints = 2

    def write_row(self, row: Row, out: IntArray) -> None:
        out[:] = row.reads, row.writes

    def unpack(self, columns: Columns) -> tuple[Array, Array]:
        return columns.row_ints[:, 0], columns.row_ints[:, 1]
