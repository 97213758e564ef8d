"""The kernel that makes the calls of a chain, one after another, as `chain_plan` writes them down.

Every call gets a frame of its own, as XLA would make it, and runs in the kernel's own handler. XLA's threads are asked
for help once: they form a team that goes from call to call and spins in between, which takes less than waking them
for each. A member that comes late finds the chain over and leaves; the last one frees the team's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cfunc, types

from rekindle_kernels.native import chain_plan, layout
from rekindle_kernels.native.chain_plan import CHAIN, ENTRIES, GAP, GAPS, MOST, OPERAND, RESULT, STEP
from rekindle_kernels.native.language import memory
from rekindle_kernels.native.language.handler import (
    CHAINED,
    JOB_BYTES,
    JOB_HEADER,
    SCHEDULE_BYTES,
    TEAM,
    TEAM_JOB,
    ask_for_help,
    asks_version,
    leave,
    threads,
)
from rekindle_kernels.native.language.jit import HANDLER_JIT, inline
from rekindle_kernels.native.language.memory import (
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
from rekindle_kernels.native.language.records import record_at
from rekindle_kernels.native.layout import WORD

OVER = -1  # instead of a job
SPINS = 2000  # before another program may have the core
HEADER_BYTES, PLAN_BUFFER_BYTES, CALL_BYTES = (
    each.size for each in (chain_plan.HEADER, chain_plan.BUFFER, chain_plan.CALL)
)
FRAME_BYTES, RECORD_BYTES, TEAM_BYTES = layout.CALL_FRAME.size, layout.BUFFER.size, TEAM.size
_header, _plan_buffer, _plan_call = (
    record_at(each) for each in (chain_plan.HEADER, chain_plan.BUFFER, chain_plan.CALL)
)
_frame, _buffer, _team, _job = (record_at(each) for each in (layout.CALL_FRAME, layout.BUFFER, TEAM, JOB_HEADER))


@inline
def operand(frame: int, index: int) -> int:
    """Return the address of an operand's data; a chain has any number of them."""
    return _buffer(word(_frame(frame).operands, index)).data


@inline
def result(frame: int, index: int) -> int:
    """Return the address of a result's data."""
    return _buffer(word(_frame(frame).results, index)).data


@inline
def sizes_of(plan: int) -> int:
    """Return the address of the plan's sizes."""
    return plan + HEADER_BYTES


@inline
def buffers_of(plan: int) -> int:
    """Return the address of the plan's buffers."""
    return sizes_of(plan) + 4 * _header(plan).sizes


@inline
def calls_of(plan: int) -> int:
    """Return the address of the plan's calls."""
    return buffers_of(plan) + PLAN_BUFFER_BYTES * _header(plan).buffers


@inline
def lay_out_sizes(plan: int, frame: int, sizes: int, gaps: int) -> None:
    """Fill the plan's sizes in, and the gaps: how many rows come before each and how many are in it."""
    header = _header(plan)
    rows, own = header.decode_rows, header.decode_rows
    if header.ends > 0:
        prompts = max(0, min(i32(operand(frame, header.prompts), 0), header.most_prompts))
        rows = max(rows, min(rows + i32(operand(frame, header.ends), prompts), header.tokens))
    while own > 0 and i32(operand(frame, header.lens), own - 1) <= 0:
        own -= 1
    unread = 0
    if header.unread > 0:
        unread = max(0, min(i32(operand(frame, header.unread), 0), rows - header.decode_rows))
    for index in range(GAPS):
        set_i32(gaps, 2 * index, own)
        set_i32(gaps, 2 * index + 1, header.decode_rows - own + index * unread)
    for index in range(header.sizes):
        size = i32(sizes_of(plan), index)
        set_word(sizes, index, size if size >= 0 else rows)


@inline
def lay_out_buffers(plan: int, frame: int, sizes: int, records: int, gaps: int) -> None:
    """Fill in a record of each of the plan's buffers, as XLA would."""
    scratch = result(frame, _header(plan).scratch)
    for index in range(_header(plan).buffers):
        planned = _plan_buffer(buffers_of(plan) + PLAN_BUFFER_BYTES * index)
        if planned.where == OPERAND:
            data = operand(frame, planned.number)
        elif planned.where == RESULT:
            data = result(frame, planned.number)
        elif planned.where == GAP:
            data = gaps + WORD * planned.number
        else:
            data = scratch + planned.number * STEP
        record = _buffer(records + RECORD_BYTES * index)
        record.data = data
        record.dims = sizes + WORD * planned.shape


@inline
def make_calls(plan: int, entries: int, team: int, own: int, pointers: int, records: int) -> None:
    """Make all calls of a plan. `own` is memory for the frame, `pointers` for the addresses of operands and results."""
    at = calls_of(plan)
    for _ in range(_header(plan).calls):
        planned = _plan_call(at)
        at += CALL_BYTES
        count = planned.operands + planned.results
        for index in range(count):
            set_word(pointers, index, records + i32(at, index) * RECORD_BYTES)
        at += 4 * count
        frame = _frame(own)
        frame.size = CHAINED
        frame.extension = 0
        frame.operands = pointers
        frame.results = pointers + WORD * planned.operands
        frame.team = team
        call(word(entries, planned.entry), own)


class ChainRunner:
    """`(plan int32 [n], operands …) -> results …, scratch`."""

    symbol = f"rekindle_{CHAIN}_task"

    def functions(self) -> tuple[Any, Callable[[], Any]]:
        """Return the task of a member of the team, and the maker of XLA's handler."""
        return _task(), _handler


def _task() -> Any:
    @cfunc(types.void(types.int64), **HANDLER_JIT)
    def task(team: int) -> None:
        """A member: whatever job is on, until the chain is over."""
        seen, spins = 0, 0
        while this_thread(0) != _team(team).caller:  # XLA may make a request right where it is asked
            job = acquire(team + TEAM_JOB)
            if job == OVER:
                break
            if job != seen:
                seen, spins = job, 0
                call(_job(job).task, job)
            else:
                spins += 1
                if spins > SPINS:
                    give_way(0)
        leave(team)

    return task


def _handler() -> Any:
    task_address, entries_address = memory.address_of(ChainRunner.symbol), memory.address_of(ENTRIES)

    @cfunc(types.int64(types.int64), **HANDLER_JIT)
    def handle(frame: int) -> int:
        if asks_version(frame):
            return 0
        plan, pool = operand(frame, 0), threads(frame)
        header, members = _header(plan), pool - 1
        size = TEAM_BYTES + FRAME_BYTES + WORD * (MOST + GAPS + header.sizes) + SCHEDULE_BYTES * pool
        team = malloc(size + RECORD_BYTES * header.buffers + JOB_BYTES * header.calls)
        own = team + TEAM_BYTES
        pointers = own + FRAME_BYTES
        requests = pointers + WORD * MOST
        gaps = requests + SCHEDULE_BYTES * pool
        sizes = gaps + WORD * GAPS
        records = sizes + WORD * header.sizes
        shared, mine = _team(team), _frame(own)
        shared.job = 0
        shared.arena = records + RECORD_BYTES * header.buffers
        shared.threads = pool
        shared.caller = this_thread(0)
        shared.users = members + 1
        mine.api = _frame(frame).api
        mine.context = _frame(frame).context
        lay_out_sizes(plan, frame, sizes, gaps)
        lay_out_buffers(plan, frame, sizes, records, gaps)
        ask_for_help(frame, task_address(), team, requests, members)
        make_calls(plan, entries_address(), team, own, pointers, records)
        publish(team + TEAM_JOB, OVER)
        leave(team)
        return 0

    return handle
