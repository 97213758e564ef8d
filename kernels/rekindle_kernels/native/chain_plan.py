"""A chain as numbers: the places of its buffers, and each kernel's buffers, in one int32 array.

    header      HEADER: how much of the rest there is, and where the number of rows is found
    sizes       the sizes of all axes, one shape after another; ROWS stands for the number of rows
    buffers     BUFFER for each buffer and shape
    calls       CALL for each call, and after it the numbers of the buffers of its operands and results

The number of rows is known when the chain runs: the rows that decode, followed by all tokens of the prompts. The rest
is padding, and no kernel computes it. The last of the rows that decode may have no sequence: products step over
this gap, whose place is a record that the chain itself keeps. There are two such records. The second gap also contains
the first prompt's unread tokens; products after the attention call with the operand `unread` use it.

The kernel in kernels/chain_runner.py reads all this. A kernel's entry is its place in a table of this process, which
its name determines: a program that was stored finds its kernels again.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from rekindle_kernels.native.layout import consecutive

CHAIN = "chain"  # the kernel's name
ENTRIES = "rekindle_entries"  # the table's symbol
SLOTS = 1 << 16  # of 4096 two kernels of common head sizes had the same
ROWS = -1
OPERAND, RESULT, SCRATCH, GAP = range(4)  # where a buffer lies
GAPS = 2  # records: without the unread tokens, and with them
STEP = 64  # bytes: what scratch memory is counted in
MOST = 64  # operands and results of one call

# `sizes`, `buffers` and `calls` are how many there are, `scratch` is the place of the scratch memory among the results.
# `decode_rows` and the operands `lens`, `ends` and `prompts` say which rows are computed, of at most so many `tokens`
# and of `most_prompts`; `ends` is 0 without prompts. The operand `unread` says how many tokens at the start of the
# first prompt are skipped after the attention call that has it; 0 if there is no such operand.
HEADER = consecutive(
    "ChainHeader",
    dict.fromkeys(
        (
            *("sizes", "buffers", "calls", "scratch"),
            *("decode_rows", "lens", "ends", "prompts", "tokens", "most_prompts", "unread"),
        ),
        "int32",
    ),
)
# `where` it lies, `number` of the operand, result or gap, or steps into the scratch memory, where its `shape` begins.
BUFFER = consecutive("ChainBuffer", dict.fromkeys(("where", "number", "shape"), "int32"))
CALL = consecutive("ChainCall", dict.fromkeys(("entry", "operands", "results"), "int32"))


def slot(name: str) -> int:
    """Return a kernel's place in the table of entries."""
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
    """One call: a kernel, and its buffers with the shape that it sees each of them in."""

    kernel: str
    operands: Sequence[tuple[Buffer, tuple[int, ...]]]
    results: Sequence[tuple[Buffer, tuple[int, ...]]]


def place(buffers: Collection[Buffer]) -> int:
    """Give each buffer a place in scratch memory, below whatever is in use at the same time; the bytes they take."""
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
class RowCounts:
    """How to find the number of rows. `lens`, `ends` and `prompts` are numbers of the chain's operands. The element of
    `ends` at the index in `prompts` counts the prompts' tokens. Rows that decode have no sequence if they come after
    the last row with a nonzero length in `lens`. `unread` is the number of an operand, or 0.
    """

    decode_rows: int
    lens: int
    ends: int = 0
    prompts: int = 0
    tokens: int = 0
    most_prompts: int = 0
    unread: int = 0


def encode(steps: Sequence[Step], scratch: int, rows: RowCounts | None) -> np.ndarray:
    """Return the array; `scratch` is the place of the scratch memory among the results."""
    sizes: list[int] = []
    shapes: dict[tuple[int, ...], int] = {}
    buffers: dict[tuple[Buffer, tuple[int, ...]], int] = {}
    calls: list[np.ndarray | list[int]] = []
    for step in steps:
        assert len(step.operands) + len(step.results) <= MOST, f"{step.kernel} takes too much for a chain"
        calls.append(
            CALL.pack({"entry": slot(step.kernel), "operands": len(step.operands), "results": len(step.results)})
        )
        for buffer, shape in (*step.operands, *step.results):
            if shape not in shapes:
                shapes[shape] = len(sizes)
                sizes += shape
            calls.append([buffers.setdefault((buffer, shape), len(buffers))])
    rows = rows or RowCounts(0, 0)
    header = HEADER.pack(
        {"sizes": len(sizes), "buffers": len(buffers), "calls": len(steps), "scratch": scratch, **asdict(rows)}
    )
    places = [
        BUFFER.pack({"where": buffer.where, "number": buffer.number, "shape": shapes[shape]})
        for buffer, shape in buffers
    ]
    return np.concatenate([header, sizes, *places, *calls]).astype(np.int32)
