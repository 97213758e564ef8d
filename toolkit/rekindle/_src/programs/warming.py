"""Warming: programs are compiled or loaded before their first step, the likeliest first, in parallel."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.helpers import SCATTER
from rekindle._src.programs.keys import Key
from rekindle._src.programs.program_record import ProgramRecord
from rekindle._src.programs.programs import Programs
from rekindle.errors import CompileError
from rekindle_kernels import build_kernels

_at_work: weakref.WeakSet[Warming] = weakref.WeakSet()
_registered = False
# Seconds from when a session is open and has the programs of a first text, before whole ones are compiled in place of
# parts: it may be all that is asked, and then neither this process nor the next one compiles more than it used. With
# "lazy" that is likelier, and those of a model that is not DEEP compile within two seconds; either way they are there
# by the tenth.
PEACE, LONGER_PEACE, DEEP = 0.7, 6.0, 12
SETTLING = 0.5  # seconds from the opening of a session that restores, in which others are not loaded beside its request
WORKERS = 2  # threads; XLA compiles a program on one core, and more workers than cores slow serving down


@dataclasses.dataclass(frozen=True, slots=True)
class Warmed:
    """Progress: one more program is ready."""

    program: ProgramRecord
    done: int
    total: int


Progress = Callable[[Warmed], None]


def likely_first(keys: Iterable[Key]) -> list[Key]:
    """The keys with few rows first: a notebook's first request needs the smallest prefill and decode programs."""

    def rank(key: Key) -> tuple[int, int, int]:
        if not isinstance(key, Bucket):
            return 4, 0, 0
        return (1 if key.processed else 0) + (2 if key.part else 0), key.rows, key.tokens

    return sorted(keys, key=rank)


def first_needed(programs: Programs, *, restoring: bool) -> list[Key]:
    """The programs that a new session needs first: for restored pages, then for a short prompt, then for decoding."""
    plain = sorted(bucket for bucket in programs.lattice if not bucket.processed)
    decode = next(bucket for bucket in plain if not bucket.tokens)
    mixed = [bucket for bucket in plain if bucket.tokens]
    prefill = [bucket for bucket in mixed if bucket.rows == mixed[0].rows]
    return [*(programs.fills if restoring else ()), *prefill[:1], decode, *prefill[1:]]


def needed_after_restart(programs: Programs) -> list[Key]:
    """The programs that a process needs first which restores the pages of this one, as far as it has a store.

    It copies the pages to the device, then computes what no full page holds, at most a page of tokens; then it decodes.
    This process may have needed none of them: its prompts were longer, and pages never came back.
    """
    if not programs.keeps or SCATTER not in programs.keys:
        return []
    first = first_needed(programs, restoring=True)
    buckets = [key for key in first if isinstance(key, Bucket)]
    page = programs.kv[0].page_size
    enough = next((bucket.tokens for bucket in buckets if bucket.tokens >= page), programs.config.max_tokens_per_step)
    return [key for key in first if not isinstance(key, Bucket) or key.tokens <= enough]


def warm(
    programs: Programs,
    keys: Iterable[Key] | None = None,
    *,
    progress: Progress | None = None,
    stopped: threading.Event | None = None,
    contexts: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    workers: int = WORKERS,
) -> None:
    """Make all programs ready, or those of `keys` in this order. Raises the first `CompileError`."""
    ordered = likely_first(programs.keys) if keys is None else [*keys]
    workers = min(workers, len(ordered))
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

    # Not daemons: a thread that is ended inside XLA aborts the process. So the interpreter's exit waits for the program
    # that is being compiled, and for no further one.
    threads = [threading.Thread(target=work, name="rekindle compile", daemon=False) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _finish_at_exit(warming: Warming) -> None:
    """Let it finish and store its program at the interpreter's exit, which waits for its thread in any case.

    Orbax stores in thread pools, which take no more work once threading's own exit functions have run, last registered
    first; see `models.loading.prepared`.
    """
    global _registered
    _at_work.add(warming)
    if not _registered:
        import concurrent.futures.thread  # noqa: F401  registers the end of thread pools, which has to come later

        getattr(threading, "_register_atexit", atexit.register)(_finish)
        _registered = True


def _finish() -> None:
    for warming in tuple(_at_work):
        warming.stop(None)
        warming.flush()


class Warming:
    """The work of the option `precompile`, which starts while the weights are being read.

    all         every program is ready when the session opens
    background  every program is made ready while the session serves; one that fails is tried again when it is needed
    lazy        the first request's programs are loaded from the store until the session opens; those of a model of many
                layers are compiled if they are not stored, and nothing else is

    A session that restores pages opens when it has loaded what their first request needs, of what is stored.

    Where the installation brought no native kernels and numba can compile them, other processes do that first, and all
    programs wait for them: a session's arithmetic is the same from its first token to its last.

    A model of many layers begins with programs made of parts, which are there much sooner; whole ones replace them.
    With "lazy", what greedy steps don't need of them is left until it is asked for: a command that prints one text
    would not end before it is compiled.
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
        self._opened = threading.Event()
        self._opening = threading.Event()  # whoever opens the session waits for no other program than those awaited
        self._precompile = precompile
        self.flush = programs.flush
        self._error: BaseException | None = None
        self._kernels = build_kernels(programs.kernels())
        self.in_peace = False  # parts serve; nothing is compiled that nobody asked for
        if precompile != "all" and not programs.config.deterministic and not programs.parts.multi_process:
            self.in_peace = programs.starts_anew(first_needed(programs, restoring=False)[:2])
        in_parts = self.in_peace
        if in_parts:
            programs.begin_parts()
        first = first_needed(programs, restoring=restoring)
        prefill_and_decode = first[: 2 + len(programs.fills) * restoring]
        self._awaited: list[Key] = prefill_and_decode if restoring and not in_parts else []
        self._programs = programs
        # Programs of many layers are compiled while weights are read, since a first text would wait for seconds.
        self._is_deep = programs.model.num_layers >= DEEP and bool(programs.kernels())

        def work() -> None:
            if not self.wait_for_kernels():
                return
            if precompile == "lazy":
                if in_parts:
                    with contextlib.suppress(CompileError):  # whoever needs the program tries again, and gets the error
                        self._make_first(programs, prefill_and_decode, contexts)
                    self._replace(programs, contexts)
                stored = self._load(programs, prefill_and_decode, contexts)
                if not (stored or in_parts) and self._is_deep:
                    with contextlib.suppress(CompileError):  # as above
                        warm(programs, prefill_and_decode, stopped=self._stopped, contexts=contexts)
                if not self._opening.is_set():
                    self._load(programs, first, contexts)
                return
            # In the background one worker, because the other core serves; but not until the first programs are there.
            workers = WORKERS if precompile == "all" else 1
            try:
                if precompile == "background":
                    if in_parts:
                        self._make_first(programs, prefill_and_decode, contexts)
                        self._complete(programs, prefill_and_decode, contexts)
                        self._replace(programs, contexts)
                    else:
                        self._load(programs, prefill_and_decode, contexts)
                    if restoring:  # a request is likely to come at once, and needs no other program
                        self._opened.wait()
                        self._stopped.wait(SETTLING)
                now = first_needed(programs, restoring=restoring)
                keys = [*now, *(key for key in likely_first(programs.keys) if key not in now)]
                warm(programs, keys, progress=progress, stopped=self._stopped, contexts=contexts, workers=workers)
                # Earlier sessions had guided requests; those programs are there, and this one may need them as well.
                self._load(programs, programs.guided_keys, contexts, all_of_them=True)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work, name="rekindle warming", daemon=False)
        _finish_at_exit(self)
        self._thread.start()

    @property
    def waits_for_kernels(self) -> bool:
        """Whether native kernels are still being compiled."""
        return self._kernels is not None and self._kernels.running

    def wait_for_kernels(self) -> bool:
        """Wait until all native kernels are there that can be; False where this is stopped before."""
        return self._kernels is None or self._kernels.wait(self._is_stopped)

    def restorable(self) -> list[Key]:
        """The programs that the first request for restored pages needs, loaded by now as far as they are stored.

        About half of them are loaded here, since another thread comes from the other end.
        """
        self._opening.set()
        return [key for key in self._awaited[::-1] if self._programs.load(key)][::-1]

    def opened(self) -> None:
        """Called when the weights are loaded. Raises the `CompileError` of a program that has to be ready by now."""
        self._opened.set()
        if self._precompile == "lazy":
            return
        if self._precompile == "all":
            self._thread.join()
            if self._error is not None:
                raise self._error

    def stop(self, timeout: float | None = 0.5) -> None:
        """Start no further program. A compilation can't be interrupted and is left to end by itself."""
        self._stopped.set()
        self._opened.set()  # nor wait for that any longer
        self._thread.join(timeout)

    def _load(
        self, programs: Programs, keys: Iterable[Key], contexts: Callable[[], Any], *, all_of_them: bool = False
    ) -> bool:
        """Load programs one by one as long as they are stored, or `all_of_them` that are; whether all were."""
        found = True
        with contexts():
            for key in keys:
                if self._is_stopped() or (self._precompile == "lazy" and self._opened.is_set()):
                    return False
                found &= programs.load(key)
                if not (found or all_of_them):
                    return False
        return found

    def _make_first(self, programs: Programs, keys: Sequence[Key], contexts: Callable[[], Any]) -> None:
        """Make the last of `keys`, the program that decodes, after the others, which have all cores until then.

        The first text comes with the program of its prompt, and so do further tokens until that which decodes is there.
        """
        with programs.made_next(keys[-1]):
            for some in (keys[:-1], keys[-1:]):
                warm(programs, some, stopped=self._stopped, contexts=contexts)

    def _complete(self, programs: Programs, keys: Iterable[Key], contexts: Callable[[], Any]) -> None:
        """Make what programs without kernels leave out, since greedy steps do without it."""
        with contexts():
            for key in keys:
                if self._is_stopped():
                    return
                programs.complete(key)

    def _replace(self, programs: Programs, contexts: Callable[[], Any]) -> None:
        """Put whole programs in place of parts, which serve for a moment in peace, those of an earlier process too: a
        process that ends within it compiles nothing that it did not need."""
        with contexts():
            soon = programs.model.num_layers >= DEEP or self._precompile == "background"
            self._opened.wait()  # until then weights and the vocabulary want the cores
            self._stopped.wait(PEACE if soon else LONGER_PEACE)
            self.in_peace = False
            programs.end_parts(self._is_stopped)

    def _is_stopped(self) -> bool:
        """Also at the interpreter's exit, which waits for this thread before it closes sessions."""
        return self._stopped.is_set() or not threading.main_thread().is_alive()
