"""Getting programs ready ahead of their first step: in order of likelihood, side by side, with progress."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from rekindle.engine.batch import Bucket
from rekindle.engine.programs import Key, ProgramRecord, Programs
from rekindle.errors import CompileError

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


def warm(
    programs: Programs,
    keys: Iterable[Key] | None = None,
    *,
    progress: Progress | None = None,
    stopped: threading.Event | None = None,
    contexts: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    workers: int = WORKERS,
) -> None:
    """Get every program, or those of `keys`; returns when all are ready, raises the first `CompileError`."""
    ordered = likely_first(programs.keys if keys is None else keys)
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


class Background:
    """`warm` in a thread of its own. A program that fails is tried again, and its error raised, when it is needed."""

    def __init__(
        self,
        programs: Programs,
        *,
        progress: Progress | None = None,
        contexts: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._stopped = threading.Event()

        def work() -> None:
            with contextlib.suppress(CompileError):
                # One worker: the other core serves meanwhile.
                warm(programs, progress=progress, stopped=self._stopped, contexts=contexts, workers=1)

        self._thread = threading.Thread(target=work, name="rekindle warming", daemon=False)
        self._thread.start()

    def stop(self, timeout: float = 0.5) -> None:
        """Begin no further program. One that compiles can't be interrupted and is left to end by itself."""
        self._stopped.set()
        self._thread.join(timeout)
