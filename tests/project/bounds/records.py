"""The rows of the table of bounds, and how one is measured.

A bound is a constant with MOST, MAX, LONGEST, LARGEST, DEEPEST or LIMIT in its name. Its row says what it counts; which
of all units costs the most; and what all of them may cost together. `measure.py` feeds a bound some of its dearest
units and multiplies: a bound that counts the wrong thing shows by a product above its promise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

Feed = Callable[[int], Callable[[], object]]


class Bound(NamedTuple):
    """A bound, and the promise that it keeps."""

    constants: str  # module: their names, with commas
    writer: Literal["a stranger", "an author", "a peer", "a server"]  # of what is counted, as `page.WHO` says
    counts: str
    most: float  # units that the bound lets in
    unit: str  # the dearest one
    feed: Feed  # prepares so many units; the result takes them in, and returns what holds memory afterwards
    count: int  # units that are fed
    seconds: float  # of a processor, for all units
    mib: float  # for all units, at the highest

    @property
    def name(self) -> str:
        """What the row is called."""
        return f"{self.constants}, {self.counts}"


class Other(NamedTuple):
    """A constant whose name says that it is a bound, and that has no row of its own."""

    why: str


def within(row: str) -> Other:
    """A bound whose units are fed with those of another, which is named by a part of its `counts`."""
    return Other(f"its units are fed with {row}")


SMALL = Other("all of its units together cost less than a millisecond and a megabyte")
PACE = Other("how much of our own work is done at once")
SHOWN = Other("how much is shown to a person")
OURS = Other("of what we or the user's code write")
TIME = Other("a time, or a number of attempts: what is bounded is the waiting itself")
MACHINE = Other("of a model's size: what it costs is compared with the machine's memory before")

STRANGER, AUTHOR, PEER, SERVER = (
    partial(Bound, writer="a stranger"),
    partial(Bound, writer="an author"),
    partial(Bound, writer="a peer"),
    partial(Bound, writer="a server"),
)
