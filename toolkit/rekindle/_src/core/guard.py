"""A guard: a process that does a stranger's work for this one, and may hang, run out of memory or die of it.

Nothing in a process can stop a library that backtracks or overflows its stack; a process can be ended. A guard keeps
what its jobs need, such as a tokenizer, and does one job at a time within bounds of time, memory and stack. Its side of
the pipes is `guarded.py`; what it does is a file of jobs, with a function `prepare`.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock, Timer
from typing import IO, NamedTuple

from rekindle._src.core import guarded
from rekindle_kernels import system

LONGEST_ANSWER = 1 << 28  # bytes
START_SECONDS = 60.0  # in which a process has started and made what its jobs need, on a machine that is busy


class GuardLimits(NamedTuple):
    """Bounds of a guard, and how it is run."""

    memory: int  # bytes that jobs may allocate after the process has started, on systems that can limit it
    stack: int = 0  # bytes of the thread that does the jobs; 0: the system's own size
    gives_way: bool = False  # True: other processes come first


class Cause(enum.Enum):
    """Why a guard ended during a job."""

    START = "it did not start in time"
    LATE = "it was not done by its deadline"
    PROCESSOR = "it used up its time of a processor"
    STACK = "its stack overflowed"
    MEMORY = "it took too much memory, or was aborted"
    OTHER = "unknown"


class GuardEnded(Exception):
    """A guard ended before it answered."""

    def __init__(self, cause: Cause, status: int | None) -> None:
        super().__init__(f"{cause.value} (status {status})")
        self.cause, self.status = cause, status


class GuardProcess:
    """A process for the jobs of one file. Its owner does one job at a time; `kill` may come from any thread."""

    def __init__(
        self, jobs: Path, settings: Mapping[str, object], limits: GuardLimits, *, modules: Iterable[str] = ()
    ) -> None:
        """Start the process. `modules` are packages that it imports and that may lie outside `sys.path`.

        Raises OSError where no process can be started.
        """
        self.ended = False
        self._late: Cause | None = None  # the cause of an end by the clock
        self._lock = Lock()
        self._exchanged: object = None  # the exchange that its watch may end
        self._first: dict[str, object] | None = {
            "path": [*dict.fromkeys([*map(str, sys.path), *_folders(("rekindle_kernels", *modules))])],
            "jobs": str(jobs),
            "settings": dict(settings),
            **limits._asdict(),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guarded.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            **system.own_group(),
        )
        self._owner = os.getpid()  # a forked child has the pipes, too, and may not use them
        weakref.finalize(self, _end, self._process, self._owner)

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """True if it can do a job: it has not ended, and this process has started it."""
        return not self.ended and self._owner == os.getpid() and self._process.poll() is None

    def ask(self, job: object, *, seconds: float, processor: float, most: int = LONGEST_ANSWER) -> dict[str, object]:
        """Return the answer to a job; both are values of JSON. Raises `GuardEnded`.

        A job has `seconds` by the clock and `processor` seconds of a processor, and an answer at most `most` bytes.
        The first one waits for the start of the process, too, for `START_SECONDS` at most. Any error in here ends the
        guard. A job may overrun the process: check the shape of its answer, and raise `refuse_answer` otherwise.
        """
        if self._first is not None:
            first, self._first = self._first, None
            self._exchange(first, START_SECONDS, most, late=Cause.START)
        return self._exchange({"job": job, "processor": processor}, seconds, most)

    def kill(self) -> None:
        """End the process, from any thread."""
        self.ended = True
        if self._owner == os.getpid():
            with contextlib.suppress(OSError):
                self._process.kill()

    def end(self) -> int:
        """Kill the process and free its pipes. Return its exit status."""
        self.ended = True
        return _end(self._process, self._owner)

    def refuse_answer(self) -> GuardEnded:
        """End the process because an answer is not of its job's shape: it may have been overrun. Return the error."""
        return self._cause(self.end())

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None, "a pipe"
        return self._process.stdin

    @property
    def _stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None, "a pipe"
        return self._process.stdout

    def _exchange(self, message: object, seconds: float, most: int, *, late: Cause = Cause.LATE) -> dict[str, object]:
        exchange = object()
        watch = Timer(seconds, self._kill_late, (exchange, late))
        watch.daemon = True
        answer = None
        try:
            with self._lock:
                self._exchanged = exchange
            watch.start()
            # The process is gone, or it has been overrun and its answer is no JSON, or nests too deeply.
            with contextlib.suppress(OSError, ValueError, RecursionError):
                guarded.send(self._stdin, message)
                answer = guarded.receive(self._stdout, most)
        except BaseException:
            self.end()
            raise
        finally:
            watch.cancel()
            with self._lock:  # a watch that runs already has ended the process, or leaves it to the next exchange
                self._exchanged = None
        if not isinstance(answer, dict):
            raise self._cause(self._ended())
        return answer

    def _kill_late(self, exchange: object, cause: Cause) -> None:
        with self._lock:
            if exchange is self._exchanged:
                self._late = cause
                self.kill()

    def _ended(self) -> int:
        """Return the status of a process that closed its pipe, which it does as it ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return self.end()

    def _cause(self, status: int) -> GuardEnded:
        cause = Cause.OTHER
        if self._late is not None:
            cause = self._late
        elif status == -getattr(signal, "SIGPROF", 0):
            cause = Cause.PROCESSOR
        elif status in (-getattr(signal, "SIGSEGV", 0), -getattr(signal, "SIGBUS", 0), 0xC00000FD):
            cause = Cause.STACK
        elif status in (-getattr(signal, "SIGABRT", 0), 0xC0000409, guarded.NO_MEMORY):  # Windows's number of an abort
            cause = Cause.MEMORY
        return GuardEnded(cause, status)


def _end(process: subprocess.Popen[bytes], owner: int) -> int:
    if owner != os.getpid():
        return 0
    with contextlib.suppress(OSError):
        process.kill()
    status = process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    return status


def _folders(modules: Iterable[str]) -> list[str]:
    """Return the folders of packages; an editable installation has some outside `sys.path`."""
    found = (importlib.util.find_spec(name) for name in modules)
    return [str(Path(one.origin).parent.parent) for one in found if one is not None and one.origin is not None]
