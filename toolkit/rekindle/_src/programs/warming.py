"""Getting programs ready ahead of their first step: in order of likelihood, side by side, with progress."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.programs import SCATTER, Key, ProgramRecord, Programs

WORKERS = 2  # XLA compiles one program on one core; more workers than cores only slow serving down


@dataclasses.dataclass(frozen=True, slots=True)
class Warmed:
    """One more program is ready."""

    program: ProgramRecord
    done: int
    total: int


Progress = Callable[[Warmed], None]


def likely_first(keys: Iterable[Key]) -> list[Key]:
    """Few rows before many: a notebook's first request needs the smallest prefill and the smallest decode program."""

    def rank(key: Key) -> tuple[int, int, int]:
        if not isinstance(key, Bucket):
            return 2, 0, 0
        return (1 if key.processed else 0), key.rows, key.tokens

    return sorted(keys, key=rank)


def first_needed(programs: Programs, *, restoring: bool) -> list[Key]:
    """Of a session that has just been opened: restored pages first, then prompts of few requests, then their decode."""
    plain = sorted(bucket for bucket in programs.lattice if not bucket.processed)
    decode = next(bucket for bucket in plain if not bucket.tokens)
    mixed = [bucket for bucket in plain if bucket.tokens]
    prefill = [bucket for bucket in mixed if bucket.rows == mixed[0].rows]
    return [*([SCATTER] if restoring else []), *prefill[:1], decode, *prefill[1:]]


def warm(
    programs: Programs,
    keys: Iterable[Key] | None = None,
    *,
    progress: Progress | None = None,
    stopped: threading.Event | None = None,
    contexts: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    workers: int = WORKERS,
) -> None:
    """Get every program, or those of `keys` in turn; returns when all are ready, raises the first `CompileError`."""
    ordered = likely_first(programs.keys) if keys is None else [*keys]
    waiting: queue.SimpleQueue[Key] = queue.SimpleQueue()
    for key in ordered:
        waiting.put(key)
    done: list[Key] = []
    errors: list[BaseException] = []
    lock = threading.Lock()
    stopped = stopped or threading.Event()

    def work() -> None:
        with contexts():
            while not stopped.is_set() and not errors and threading.main_thread().is_alive():
                try:
                    key = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    programs.get(key)
                except BaseException as error:
                    errors.append(error)
                    return
                with lock:
                    done.append(key)
                    if progress is not None:
                        progress(Warmed(programs.record(key), len(done), len(ordered)))

    # Not daemons: a thread that the interpreter ends inside XLA takes the process down with an abort. So an exit waits
    # for the program that is being compiled, and for no further one.
    threads = [threading.Thread(target=work, name="rekindle compile", daemon=False) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Warming:
    """What `precompile` asks for, begun while the weights are still read.

    all         every program is ready when the session is open
    background  the same, but the session opens meanwhile; a program that fails is tried again when it is needed
    lazy        nothing is compiled; what is stored of the first request's programs is loaded until the session is open
    """

    def __init__(
        self,
        programs: Programs,
        precompile: str,
        *,
        restoring: bool = False,
        progress: Progress | None = None,
        contexts: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._stopped = threading.Event()
        self._precompile = precompile
        self._error: BaseException | None = None
        first = first_needed(programs, restoring=restoring)

        def work() -> None:
            if precompile == "lazy":
                self._load(programs, first, contexts)
                return
            keys = [*first, *(key for key in likely_first(programs.keys) if key not in first)]
            # In the background one worker: the other core serves meanwhile.
            workers = WORKERS if precompile == "all" else 1
            try:
                warm(programs, keys, progress=progress, stopped=self._stopped, contexts=contexts, workers=workers)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work, name="rekindle warming", daemon=False)
        self._thread.start()

    def opened(self) -> None:
        """The weights are there. Raises the `CompileError` of a program that had to be ready by now."""
        if self._precompile == "lazy":
            self._stopped.set()
        elif self._precompile == "all":
            self._thread.join()
            if self._error is not None:
                raise self._error

    def stop(self, timeout: float = 0.5) -> None:
        """Begin no further program. One that compiles can't be interrupted and is left to end by itself."""
        self._stopped.set()
        self._thread.join(timeout)

    def _load(self, programs: Programs, keys: Iterable[Key], contexts: Callable[[], Any]) -> None:
        with contexts():
            for key in keys:
                if self._stopped.is_set() or not programs.load(key):
                    return
