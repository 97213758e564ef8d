"""From three numba functions to a function that XLA calls: a call frame in, blocks of work on XLA's own threads.

A kernel is `prepare(frame, job, threads) -> blocks`, which reads the operands and notes what the blocks need in the
fields of the job; `block(job, index)`, which computes one block on any thread; and `finish(job)`, called once when all
are done. A thread that is free takes the next block, the calling thread included, so no call waits for a thread that
never comes: a helper that starts late finds no block left. The job lies on the heap until its last user leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from numba import cfunc, types

from rekindle_kernels.native import layout
from rekindle_kernels.native.kernel_table import KernelSpec
from rekindle_kernels.native.language import memory
from rekindle_kernels.native.language.jit import HANDLER_JIT, inline, jit
from rekindle_kernels.native.language.memory import acquire, call, fetch_add, free, malloc, publish
from rekindle_kernels.native.language.records import address_of_record, frame_at, record_at
from rekindle_kernels.native.layout import WORD, RecordField, RecordLayout, words

# What every job begins with: the next block, how many are done, who still uses the job, and how many there are. The
# kernel's own fields follow; after them is the task, which the threads of a chain call, or memory for asking threads.
_HEADER = ("next", "done", "users", "blocks")
_TASK = 32
JOB_HEADER = words("Job", {**{name: index for index, name in enumerate(_HEADER)}, "task": _TASK})
JOB_BYTES = JOB_HEADER.size
NEXT, DONE, USERS = (JOB_HEADER.offset(name) for name in ("next", "done", "users"))
FOR_EVER = 1 << 40  # users of a job whose memory is its team's

# The threads of a chain (kernels/chain_runner.py): the job that they work on, memory for the next one, how many they
# are, and the thread that was called. `users` lies where a job has it, so that `leave` takes both.
TEAM = words("Team", {"job": 0, "arena": 1, "users": JOB_HEADER.index("users"), "threads": 3, "caller": 4})
TEAM_JOB = TEAM.offset("job")
CHAINED = 1  # in the frame of a call in a chain, where XLA's says how large it is

_job, _team, _frame = record_at(JOB_HEADER), record_at(TEAM), record_at(layout.CALL_FRAME)
_api, _extension, _metadata = (record_at(each) for each in (layout.API, layout.EXTENSION, layout.METADATA))
_threads_call, _schedule_call = record_at(layout.THREADS), record_at(layout.SCHEDULE)
_COUNT, _THREADS_BYTES, _THREADS_SIZE = layout.THREADS.offset("count"), layout.THREADS.size, layout.THREADS_SIZE
SCHEDULE_BYTES = layout.SCHEDULE.size
_METADATA_KIND = layout.METADATA_KIND
_MAJOR, _MINOR, _PATCH = layout.API_VERSION


def job_layout(
    kind: str, fields: Mapping[str, str], plain: str = "", *, numbers: Mapping[str, str] | None = None
) -> RecordLayout:
    """Return the layout of a kernel's jobs. `fields` are words and `numbers` float32, by name, with their meanings;
    `plain` names words that explain themselves.
    """
    names = [*_HEADER, *fields, *plain.split(), *(numbers or {})]
    assert len(names) <= _TASK, f"{kind}: {len(names)} fields, and room for {_TASK}"
    assert len(set(names)) == len(names), f"{kind}: two fields of one name"
    kinds = {name: "float32" if name in (numbers or {}) else "word" for name in names}
    return RecordLayout(
        f"{kind} job", {name: RecordField(WORD * i, kinds[name]) for i, name in enumerate(names)}, WORD * len(names)
    )


@inline
def first_unit(index: int, blocks: int, units: int) -> int:
    """Return where a block of work begins if `units` are handed out in `blocks`; the larger blocks come first, so that
    threads end together."""
    return index * (units // blocks) + min(index, units % blocks)


@inline
def wait_for_blocks(job: Any, count: int) -> None:
    """Wait until so many of the job's blocks are done; their results can be read then."""
    while acquire(address_of_record(job) + DONE) < count:
        pass


@inline
def threads(frame: int) -> int:
    """Return how many threads XLA computes with."""
    memory = malloc(_THREADS_BYTES)
    arguments = _threads_call(memory)
    arguments.size = _THREADS_SIZE
    arguments.extension = 0
    arguments.context = _frame(frame).context
    arguments.count_at = memory + _COUNT
    arguments.count = 1
    call(_api(_frame(frame).api).threads, memory)
    count = arguments.count
    free(memory)
    return count


@inline
def leave(job: int) -> None:
    """Use a job or a team no more; the last user frees its memory."""
    if fetch_add(job + USERS, -1) == 1:
        free(job)


@inline
def asks_version(frame: int) -> bool:
    """True if XLA only asks for the version of its interface that this was written for; then it is answered."""
    extension = _frame(frame).extension
    while extension != 0:
        if _extension(extension).kind == _METADATA_KIND:
            answer = _metadata(_extension(extension).metadata)
            answer.major = _MAJOR
            answer.minor = _MINOR
            answer.patch = _PATCH
            return True
        extension = _extension(extension).next
    return False


@inline
def ask_for_help(frame: int, task: int, job: int, requests: int, helpers: int) -> None:
    """Have `helpers` of XLA's threads call task(job); `requests` is memory for asking, SCHEDULE_BYTES for each."""
    for helper in range(helpers):
        memory = requests + SCHEDULE_BYTES * helper
        arguments = _schedule_call(memory)
        arguments.size = SCHEDULE_BYTES
        arguments.extension = 0
        arguments.context = _frame(frame).context
        arguments.task = task
        arguments.data = job
        call(_api(_frame(frame).api).schedule, memory)


@dataclass(frozen=True)
class Kernel:
    """The functions of a kernel, which `build.ensure` turns into machine code. `job` is the layout of its jobs."""

    spec: KernelSpec
    job: RecordLayout
    prepare: Any
    block: Any
    finish: Any

    @cached_property
    def symbol(self) -> str:
        """The name of the task in the object code, until it is renamed after the kernel."""
        return f"rekindle_{self.spec.kind}_task"

    def functions(self) -> tuple[Any, Callable[[], Any]]:
        """Return the task that threads are given, and the maker of XLA's handler, which refers to the task by
        `symbol`."""
        task_address = memory.address_of(self.symbol)
        return _task(self), lambda: _handler(self, task_address)


def _task(kernel: Kernel) -> Any:
    block, typed = kernel.block, record_at(kernel.job)

    @cfunc(types.void(types.int64), **HANDLER_JIT)
    def task(job: int) -> None:
        """Take blocks until none is left."""
        while True:
            index = fetch_add(job + NEXT, 1)
            if index >= _job(job).blocks:
                break
            block(typed(job), index)
            fetch_add(job + DONE, 1)
        leave(job)

    return task


def _handler(kernel: Kernel, task_address: Any) -> Any:
    prepare, finish, typed, typed_frame = kernel.prepare, kernel.finish, record_at(kernel.job), frame_at(kernel.spec)

    @cfunc(types.int64(types.int64), **HANDLER_JIT)
    def handle(frame: int) -> int:
        if asks_version(frame):
            return 0
        team = _frame(frame).team if _frame(frame).size == CHAINED else 0
        pool = _team(team).threads if team != 0 else threads(frame)
        if team != 0:
            job = _team(team).arena
            _team(team).arena = job + JOB_BYTES
        else:
            job = malloc(JOB_BYTES + SCHEDULE_BYTES * pool)
        blocks = prepare(typed_frame(frame), typed(job), pool)
        helpers = max(0, min(pool, blocks) - 1)
        header = _job(job)
        header.next = 0
        header.done = 0
        header.users = helpers + 2 if team == 0 else FOR_EVER
        header.blocks = blocks
        if team == 0:
            ask_for_help(frame, task_address(), job, job + JOB_BYTES, helpers)
        elif helpers > 0:
            header.task = task_address()
            publish(team + TEAM_JOB, job)
        call(task_address(), job)  # by address, so that the blocks are compiled once
        while acquire(job + DONE) < blocks:
            pass
        finish(typed(job))
        leave(job)
        return 0

    return handle


@jit
def nothing(job: Any) -> None:
    """A `finish` that has nothing to do."""
