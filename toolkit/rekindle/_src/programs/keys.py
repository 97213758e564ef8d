"""The names of a session's programs: a step is named by its bucket, every other program is a helper."""

from __future__ import annotations

import dataclasses

from rekindle._src.programs.buckets import Bucket

MOVED_PAGES = 4  # pages of one gather or scatter; where XLA fills pages, it compiles an operation for each and layer


@dataclasses.dataclass(frozen=True, slots=True)
class Helper:
    """A program that is not a step.

    "memory" makes pages and state, "admit" writes a request's history into its slot, "gather" and "scatter" move pages.
    """

    name: str


MEMORY, ADMIT, GATHER, SCATTER = Helper("memory"), Helper("admit"), Helper("gather"), Helper("scatter")
Key = Bucket | Helper
