"""The kernel that makes the calls of a chain, one after another, as `chain.Plan` writes them down.

Every call gets a frame of its own, as XLA would make it, and runs in the kernel's own handler. XLA's threads are asked
for help once: they form a team that goes from call to call and spins in between, which takes less than waking them
for each. A member that comes late finds the chain over and leaves; the last one frees the team's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cfunc, types

from rekindle_kernels.native import memory
from rekindle_kernels.native.memory import (
    acquire,
    call,
    give_way,
    i32,
    malloc,
    publish,
    set_i32,
    set_word,
    this_thread,
    word,
)
from rekindle_kernels.native.plan import (
    CALLS,
    DIMS,
    ENDS,
    ENTRIES,
    GAP,
    HEADER,
    LENGTHS,
    MOST,
    OPERAND,
    OTHERS,
    PROMPTS,
    RECORDS,
    RESULT,
    SCRATCH_RESULT,
    STEP,
)
from rekindle_kernels.native.target import (
    API,
    ARENA,
    CALLER,
    CONTEXT,
    FRAME_WORDS,
    JIT,
    JOB,
    JOB_WORDS,
    RECORD_WORDS,
    TASK,
    TEAM_WORDS,
    THREADS,
    USERS,
    ask_for_help,
    asks_version,
    inline,
    leave,
    operand,
    result,
    set_frame,
    set_record,
    threads,
)

OVER = -1  # instead of a job
SPINS = 2000  # before another program may have the core


@inline
def lay_out(plan: int, frame: int, dims: int, records: int, gap: int) -> None:
    """Fill the plan's dimensions and buffers in, and the gap: how many rows come before and how many are in it."""
    count, at, others, lengths = i32(plan, DIMS), HEADER, i32(plan, OTHERS), i32(plan, LENGTHS)
    rows, own = others, others
    if i32(plan, ENDS) > 0:
        rows += i32(operand(frame, i32(plan, ENDS)), i32(operand(frame, i32(plan, PROMPTS)), 0))
    while own > 0 and i32(operand(frame, lengths), own - 1) <= 0:
        own -= 1
    set_i32(gap, 0, own)
    set_i32(gap, 1, others - own)
    for index in range(count):
        size = i32(plan, at + index)
        set_word(dims, index, size if size >= 0 else rows)
    at += count
    scratch = result(frame, i32(plan, SCRATCH_RESULT))
    for index in range(i32(plan, RECORDS)):
        where, number = i32(plan, at), i32(plan, at + 1)
        if where == OPERAND:
            data = operand(frame, number)
        elif where == RESULT:
            data = result(frame, number)
        elif where == GAP:
            data = gap
        else:
            data = scratch + number * STEP
        set_record(records + index * RECORD_WORDS * 8, data, dims + 8 * i32(plan, at + 2))
        at += 3


@inline
def make_calls(plan: int, entries: int, team: int, own: int, pointers: int, records: int) -> None:
    """All of them; `own` is memory for the frame, `pointers` for its operands and results."""
    at = HEADER + i32(plan, DIMS) + 3 * i32(plan, RECORDS)
    for _ in range(i32(plan, CALLS)):
        entry, operands, results = i32(plan, at), i32(plan, at + 1), i32(plan, at + 2)
        at += 3
        for index in range(operands + results):
            set_word(pointers, index, records + i32(plan, at + index) * RECORD_WORDS * 8)
        at += operands + results
        set_frame(own, team, pointers, pointers + 8 * operands)
        call(word(entries, entry), own)


@dataclass(frozen=True)
class Chain:
    """`(plan int32 [n], operands …) -> results …, scratch`."""

    name: str

    @property
    def symbol(self) -> str:
        return f"rekindle_{self.name}_task"

    def functions(self) -> tuple[Any, Callable[[], Any]]:
        task_address, entries_address = memory.address_of(self.symbol), memory.address_of(ENTRIES)
        options = {key: JIT[key] for key in ("error_model", "boundscheck", "fastmath")}

        @cfunc(types.void(types.int64), **options)
        def task(team: int) -> None:
            """A member: whatever job is on, until the chain is over."""
            seen, spins = 0, 0
            while this_thread(0) != word(team, CALLER):  # XLA may make a request right where it is asked
                job = acquire(team + 8 * JOB)
                if job == OVER:
                    break
                if job != seen:
                    seen, spins = job, 0
                    call(word(job, TASK), job)
                else:
                    spins += 1
                    if spins > SPINS:
                        give_way(0)
            leave(team)

        def handler() -> Any:
            @cfunc(types.int64(types.int64), **options)
            def handle(frame: int) -> int:
                if asks_version(frame):
                    return 0
                plan, pool = operand(frame, 0), threads(frame)
                members = pool - 1
                calls, sizes, buffers = i32(plan, CALLS), i32(plan, DIMS), i32(plan, RECORDS)
                size = TEAM_WORDS + FRAME_WORDS + MOST + 5 * pool + 1 + sizes
                team = malloc(8 * (size + RECORD_WORDS * buffers + JOB_WORDS * calls))
                own = team + 8 * TEAM_WORDS
                pointers = own + 8 * FRAME_WORDS
                requests = pointers + 8 * MOST
                gap = requests + 8 * 5 * pool
                dims = gap + 8
                records = dims + 8 * sizes
                set_word(team, JOB, 0)
                set_word(team, ARENA, records + 8 * RECORD_WORDS * buffers)
                set_word(team, THREADS, pool)
                set_word(team, CALLER, this_thread(0))
                set_word(team, USERS, members + 1)
                set_word(own, API, word(frame, API))
                set_word(own, CONTEXT, word(frame, CONTEXT))
                lay_out(plan, frame, dims, records, gap)
                ask_for_help(frame, task_address(), team, requests, members)
                make_calls(plan, entries_address(), team, own, pointers, records)
                publish(team + 8 * JOB, OVER)
                leave(team)
                return 0

            return handle

        return task, handler
