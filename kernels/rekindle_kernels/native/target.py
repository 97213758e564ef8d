"""From three numba functions to a function that XLA calls: a call frame in, blocks of work on XLA's own threads.

A kernel is `prepare(frame, job, threads) -> blocks`, which reads operands and notes what the blocks need in the job's
fields; `block(job, index)`, which computes one of them on any thread; and `finish(job)`, once all are done. Whoever is
free takes the next block, the calling thread included, so nothing waits for a thread that never comes: a helper that
starts late finds no block left. The job lives on the heap until its last user lets go of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cfunc, njit, types

from rekindle_kernels.native import memory
from rekindle_kernels.native.memory import acquire, call, fetch_add, free, i32, malloc, publish, set_i32, set_word, word

# No error model but numpy's: nothing raises, so that the code needs nothing of Python. Sums may be reordered: that is
# what lets the compiler keep sixteen of them in a register. NaN and infinities mean what they mean.
JIT = {
    "nogil": True,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "error_model": "numpy",
    "boundscheck": False,
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
}
jit = njit(**JIT)
inline = njit(**JIT, forceinline=True)

# Words of a job. The last ones are for the threads that are asked to help; in a chain the first of them is the task.
NEXT, DONE, USERS, BLOCKS, FIELDS, SCHEDULING = 0, 1, 2, 3, 4, 32
TASK, JOB_WORDS = SCHEDULING, SCHEDULING + 1

# Words of a team, the threads of a chain (chaining.py), beside USERS: the job that they work on, memory for the next
# one, how many they are, and the thread that was called.
JOB, ARENA, THREADS, CALLER, TEAM_WORDS = 0, 1, 3, 4, 5
FOR_EVER = 1 << 40

# Words of XLA's structures (xla/ffi/api/c_api.h, version 0); a call frame embeds its operands' and results' records.
_EXTENSION, API, CONTEXT, _OPERANDS, _RESULTS = 1, 2, 3, 9, 14
_KIND, _NEXT, _METADATA = 2, 2, 1  # of an extension: its kind is the third int32, the next one the third word
_DATA, _DIMS = 3, 5  # of a buffer
_SCHEDULE, _THREADS = 17, 18  # functions of the api: its six words of header, and the eleven before them
_API_MAJOR, _API_MINOR = 0, 1  # the oldest that has all of this; XLA takes any that is not newer than its own

# Our own call frame, of a call in a chain: where XLA's says how large it is, it says so, and it has one word more.
CHAINED = 1
TEAM, FRAME_WORDS, RECORD_WORDS = 15, 16, 6


@inline
def operand(frame: int, index: int) -> int:
    """Address of an operand's data."""
    return word(word(word(frame, _OPERANDS), index), _DATA)


@inline
def dim(frame: int, index: int, axis: int) -> int:
    """Size of an operand's axis."""
    return word(word(word(word(frame, _OPERANDS), index), _DIMS), axis)


@inline
def result(frame: int, index: int) -> int:
    """Address of a result's data."""
    return word(word(word(frame, _RESULTS), index), _DATA)


@inline
def result_dim(frame: int, index: int, axis: int) -> int:
    """Size of a result's axis."""
    return word(word(word(word(frame, _RESULTS), index), _DIMS), axis)


@inline
def field(job: int, index: int) -> int:
    return word(job, FIELDS + index)


@inline
def set_field(job: int, index: int, value: int) -> None:
    set_word(job, FIELDS + index, value)


@inline
def first_unit(index: int, blocks: int, units: int) -> int:
    """Where a block of work begins that is handed out in whole units; the larger blocks come first, so that threads
    end together."""
    return index * (units // blocks) + min(index, units % blocks)


@inline
def threads(frame: int) -> int:
    """How many threads XLA computes with."""
    arguments = malloc(5 * 8)
    set_word(arguments, 0, 32)
    set_word(arguments, 1, 0)
    set_word(arguments, 2, word(frame, CONTEXT))
    set_word(arguments, 3, arguments + 32)
    set_word(arguments, 4, 1)
    call(word(word(frame, API), _THREADS), arguments)
    count = word(arguments, 4)
    free(arguments)
    return count


@inline
def leave(job: int) -> None:
    """The last one frees it."""
    if fetch_add(job + 8 * USERS, -1) == 1:
        free(job)


@inline
def asks_version(frame: int) -> bool:
    """Whether XLA only asks for the version of its interface that this was written for; then it is answered.

    XLA asks when a kernel is registered, and refuses one that is too old: it promises to take a version for a year.
    `build.builds` then says that there is no such kernel.
    """
    extension = word(frame, _EXTENSION)
    while extension != 0:
        if i32(extension, _KIND) == _METADATA:
            metadata = word(extension, 3)
            set_i32(metadata, 6, _API_MAJOR)
            set_i32(metadata, 7, _API_MINOR)
            set_i32(metadata, 8, 0)
            return True
        extension = word(extension, _NEXT)
    return False


@inline
def ask_for_help(frame: int, task: int, job: int, requests: int, helpers: int) -> None:
    """Have `helpers` of XLA's threads call task(job); `requests` is memory for asking, five words for each."""
    for helper in range(helpers):
        arguments = requests + 40 * helper
        set_word(arguments, 0, 40)
        set_word(arguments, 1, 0)
        set_word(arguments, 2, word(frame, CONTEXT))
        set_word(arguments, 3, task)
        set_word(arguments, 4, job)
        call(word(word(frame, API), _SCHEDULE), arguments)


@inline
def set_record(record: int, data: int, dims: int) -> None:
    """A buffer, as `operand` and `dim` read it."""
    set_word(record, _DATA, data)
    set_word(record, _DIMS, dims)


@inline
def set_frame(frame: int, team: int, operands: int, results: int) -> None:
    """The frame of a call in a chain: `operands` and `results` are arrays of records' addresses."""
    set_word(frame, 0, CHAINED)
    set_word(frame, _EXTENSION, 0)
    set_word(frame, _OPERANDS, operands)
    set_word(frame, _RESULTS, results)
    set_word(frame, TEAM, team)


@dataclass(frozen=True)
class Kernel:
    """What `build.ensure` turns into machine code."""

    name: str
    prepare: Any
    block: Any
    finish: Any

    def functions(self) -> tuple[Any, Callable[[], Any]]:
        """The thread pool's task, and the maker of XLA's handler, which refers to the task by `symbol`."""
        prepare, block, finish = self.prepare, self.block, self.finish
        task_address = memory.address_of(self.symbol)

        options = {key: JIT[key] for key in ("error_model", "boundscheck", "fastmath")}

        @cfunc(types.void(types.int64), **options)
        def task(job: int) -> None:
            while True:
                index = fetch_add(job + 8 * NEXT, 1)
                if index >= word(job, BLOCKS):
                    break
                block(job, index)
                fetch_add(job + 8 * DONE, 1)
            leave(job)

        def handler() -> Any:
            @cfunc(types.int64(types.int64), **options)
            def handle(frame: int) -> int:
                if asks_version(frame):
                    return 0
                team = word(frame, TEAM) if word(frame, 0) == CHAINED else 0
                pool = word(team, THREADS) if team != 0 else threads(frame)
                if team != 0:
                    job = word(team, ARENA)
                    set_word(team, ARENA, job + 8 * JOB_WORDS)
                else:
                    job = malloc(8 * (SCHEDULING + 5 * pool))
                blocks = prepare(frame, job, pool)
                helpers = max(0, min(pool, blocks) - 1)
                set_word(job, NEXT, 0)
                set_word(job, DONE, 0)
                set_word(job, USERS, helpers + 2 if team == 0 else FOR_EVER)
                set_word(job, BLOCKS, blocks)
                if team == 0:
                    ask_for_help(frame, task_address(), job, job + 8 * SCHEDULING, helpers)
                elif helpers > 0:
                    set_word(job, TASK, task_address())
                    publish(team + 8 * JOB, job)
                call(task_address(), job)  # by address, so that the blocks are compiled once
                while acquire(job + 8 * DONE) < blocks:
                    pass
                finish(job)
                leave(job)
                return 0

            return handle

        return task, handler

    @property
    def symbol(self) -> str:
        """Of the task, in the object code."""
        return f"rekindle_{self.name}_task"


@jit
def nothing(job: int) -> None:
    """A `finish` that has nothing to do."""
