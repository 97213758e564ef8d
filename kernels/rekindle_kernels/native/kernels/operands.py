"""Reading the operands of products: their rows, and where a matrix begins in a stack of them."""

from __future__ import annotations

from typing import Any

from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import free, i32
from rekindle_kernels.native.language.records import dim, take

ROW_FIELDS = {  # of jobs that `describe_rows` fills
    "x": "[tokens, width]",
    "rows": "that are multiplied: the first `before`, and those after the gap",
    "gap": "rows that are stepped over",
    "norm": "[width] of the rows, or 0",
    "residual": "[tokens, results], or 0",
    "out": "[tokens, results]",
    "results": "of a row",
    "before": "",
}
ROW_NUMBERS = {"eps": "added to the mean square"}


@inline
def describe_rows(frame: Any, job: Any) -> None:
    """Note in the job the rows and their norm, the rows to skip, and the results."""
    take(frame, job)
    rows = dim(frame.x, 0)
    before, gap = rows, 0
    if frame.has_rows:
        before, gap = max(0, min(frame.rows.before, rows)), max(0, frame.rows.gap)
    job.before = before
    job.gap = gap
    job.rows = before + max(0, rows - before - gap)
    job.results = dim(frame.out, 1)


@inline
def row_of(job: Any, r: int) -> int:
    """Return where the r-th row that is multiplied is among all rows."""
    return r if r < job.before else r + job.gap


@inline
def first_row(frame: Any, rows: int) -> int:
    """Return the row of the arrays at which the matrix of `expert` begins, which has so many; 0 without a stack.

    An index is taken as `jax.lax.dynamic_index_in_dim` takes it: from the end if it is negative, and clamped.
    """
    first = 0
    if frame.has_expert:
        count, expert = dim(frame.weight, 0) // max(1, rows), i32(frame.expert.data, 0)
        if expert < 0:
            expert += count
        first = max(0, min(expert, count - 1)) * rows
    return first


@jit
def free_packed(job: Any) -> None:
    """Free the rows as they were packed, at the end of a product."""
    free(job.packed)
