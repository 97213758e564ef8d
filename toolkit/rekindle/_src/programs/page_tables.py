"""Page tables that stay on the device: a step brings the changed entries, not the tables of all its rows.

Axes: L slots (the last is scratch), W pages of a sequence, C changes of a step, n tables of a call.

256 rows of 8,192 tokens have 512 KiB of tables, of 128k tokens 8 MiB, that would travel in every step to change 16
entries. On CPU whole tables are passed: a program reads the host's buffers in place.
"""

from __future__ import annotations

from jax import Array

from rekindle._src.programs.packing import Layout, sections
from rekindle._src.programs.partitioning import Partitioning
from rekindle._src.programs.request_state import RequestState
from rekindle_kernels import current_platform

PUT = 4  # whole tables that one call writes


def stay(parts: Partitioning) -> bool:
    """True if page tables stay on the device: there is one device, and it is no CPU."""
    return current_platform() != "cpu" and not parts.divided


def changed(layout: Layout, ints: Array, tables: Array | None) -> Array | None:
    """Return the tables [L, W] with the changes of a step; None where each step brings its own."""
    if tables is None:
        return None
    slots, places, pages = sections(layout, ints).table
    return tables.at[slots, places].set(pages, mode="promise_in_bounds")


def with_changes(layout: Layout, ints: Array, state: RequestState) -> RequestState:
    """Return the state with the changes of a step in its tables."""
    return state if state.tables is None else state._replace(tables=changed(layout, ints, state.tables))


def put(tables: Array, ints: Array) -> Array:
    """Return the tables with n whole ones [n * (1 + W)] written, each of which follows its slot."""
    rows = ints.reshape(-1, 1 + tables.shape[1])
    return tables.at[rows[:, 0]].set(rows[:, 1:], mode="promise_in_bounds")
