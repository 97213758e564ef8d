"""The programs of a session other than steps: they make its memory, fill slots and tables, and move pages."""

from __future__ import annotations

import dataclasses

import jax

from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.partitioning import Partitioning
from rekindle_kernels import current_platform

FEW = 4  # pages of one gather or scatter; where XLA fills pages on CPU, it compiles an operation for each and layer
MANY = 64, 32, 16, 8
FILLED = 32  # pages that one native call fills on CPU: starting it once takes 2 ms less than eight times (135M)
TRANSFER = 32 << 20  # bytes; beyond, starting a transfer takes little beside the copying


@dataclasses.dataclass(frozen=True, slots=True)
class Helper:
    """A program that is not a step.

    "memory" makes pages and state, "admit" writes a request's history into its slot, "tables" writes whole page tables,
    "gather" and "scatter" move pages; "collect" is a gather that gives each process of several the whole pages.
    "copy" copies pages on the device. "lens" computes logits of rows of the residual stream.
    "state_out" and "state_in" move the states of one sequence, "tails_out" and "tails_in" pages of layers that give
    pages back.
    """

    kind: str
    pages: int = 0  # pages that it moves, or rows

    @property
    def name(self) -> str:
        return f"{self.kind}{self.pages}" if self.pages > FEW else self.kind


Key = Bucket | Helper  # the name of a program: a step is named by its bucket
STATE_OUT, STATE_IN = Helper("state_out", 1), Helper("state_in", 1)
MEMORY, ADMIT, TABLES = Helper("memory"), Helper("admit"), Helper("tables")
GATHER, SCATTER, COLLECT = Helper("gather", FEW), Helper("scatter", FEW), Helper("collect", FEW)
COPY = Helper("copy", FEW)
TAILS_OUT, TAILS_IN = Helper("tails_out", FEW), Helper("tails_in", FEW)


LENS = Helper("lens", 32)


def moved_pages(parts: Partitioning, kv: paged.KV) -> tuple[int, ...]:
    """Return the numbers of pages that a transfer may have, the largest first.

    On CPU that is a copy within memory. A GPU or TPU starts a transfer of 64 pages as quickly as one of a single page.
    Followers of a session repeat transfers of FEW pages.
    """
    if current_platform() == "cpu" or parts.multi_process:
        return (FEW,)
    layers = paged.pages_of(kv)
    page = sum(leaf.size // leaf.shape[0] * leaf.dtype.itemsize for leaf in jax.tree.leaves(layers))
    return (*[pages for pages in MANY if pages * page <= TRANSFER][:1], FEW)


def fills(moved: tuple[int, ...], *, at_once: bool) -> tuple[Helper, ...]:
    """Return the programs that fill pages, the fewest first, where transfers have the numbers of pages in `moved`.

    Where one native call fills all pages `at_once`, its program compiles as quickly for many of them.
    """
    sizes = (FILLED, FEW) if at_once and moved == (FEW,) else moved
    return tuple(Helper(SCATTER.kind, pages) for pages in sizes[::-1])
