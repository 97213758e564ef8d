"""What a chain does, as numbers: where its buffers lie and which kernel takes which, in one int32 array.

    header      how many dimensions, buffers and calls follow, the place of the scratch memory among the results, and
                where the number of rows is found, and which are nobody's
    dimensions  of all buffers, one shape after another; ROWS stands for the number of rows
    buffers     three numbers each: where it lies, which one or how far in, where its shape begins
    calls       the kernel's entry, how many operands and results it takes, and the numbers of their buffers

The number of rows is known when the chain runs: those before the prompts' and all tokens of the prompts. What is behind
them is padding, and no kernel computes it. Some of those before the prompts' may be nobody's, too: products step over
this gap, whose place is a buffer of the chain's own.

The kernel in chaining.py reads all this. Entries are places in a table of this process, which a name determines: a
program that was stored finds its kernels again.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

ENTRIES = "rekindle_entries"  # the table's symbol
SLOTS = 4096
DIMS, RECORDS, CALLS, SCRATCH_RESULT, OTHERS, LENGTHS, ENDS, PROMPTS, HEADER = range(9)
ROWS = -1
OPERAND, RESULT, SCRATCH, GAP = range(4)  # where a buffer lies
STEP = 64  # bytes: what scratch memory is counted in
MOST = 64  # operands and results of one call


def slot(name: str) -> int:
    """A kernel's place in the table of entries."""
    return zlib.crc32(name.encode()) % SLOTS


@dataclass(eq=False)
class Buffer:
    """Memory that one or several values have one after another, from the first call that has it to the last."""

    size: int  # bytes
    first: int
    last: int
    where: int = SCRATCH
    number: int = 0


@dataclass(frozen=True)
class Step:
    """One call: a kernel, and the buffers that it takes in which shapes."""

    kernel: str
    operands: Sequence[tuple[Buffer, tuple[int, ...]]]
    results: Sequence[tuple[Buffer, tuple[int, ...]]]


def place(buffers: Collection[Buffer]) -> int:
    """Give scratch memory to those that want it, each below whatever is in use at the same time; how much it takes."""
    placed: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda buffer: (-buffer.size, buffer.first)):
        start, steps = 0, -(-buffer.size // STEP)
        beside = [other for other in placed if other.first <= buffer.last and buffer.first <= other.last]
        for other in sorted(beside, key=lambda other: other.number):
            if other.number >= start + steps:
                break
            start = max(start, other.number - (-other.size // STEP))
        buffer.number = start
        placed.append(buffer)
    return STEP * max((buffer.number - (-buffer.size // STEP) for buffer in placed), default=0)


@dataclass(frozen=True)
class Rows:
    """Where the number of rows is found: `others` and, if there are prompts, of operand `ends` the number that operand
    `prompts` says. The others behind the last one whose length in operand `lengths` is not 0 are nobody's."""

    others: int
    lengths: int
    ends: int = 0
    prompts: int = 0


def written(steps: Sequence[Step], scratch: int, rows: Rows | None) -> np.ndarray:
    """The array; `scratch` is the place of the scratch memory among the results."""
    dims: list[int] = []
    shapes: dict[tuple[int, ...], int] = {}
    records: dict[tuple[Buffer, tuple[int, ...]], int] = {}
    calls: list[int] = []
    for step in steps:
        assert len(step.operands) + len(step.results) <= MOST, f"{step.kernel} takes too much for a chain"
        calls += [slot(step.kernel), len(step.operands), len(step.results)]
        for buffer, shape in (*step.operands, *step.results):
            if shape not in shapes:
                shapes[shape] = len(dims)
                dims += shape
            calls.append(records.setdefault((buffer, shape), len(records)))
    places = [number for buffer, shape in records for number in (buffer.where, buffer.number, shapes[shape])]
    where = (0, 0, 0, 0) if rows is None else (rows.others, rows.lengths, rows.ends, rows.prompts)
    return np.array([len(dims), len(records), len(steps), scratch, *where, *dims, *places, *calls], np.int32)
