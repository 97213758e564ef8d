"""Warming: compiling or loading programs before their first step, the likeliest first, in parallel."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import math
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Protocol

from rekindle._src.core.activity import in_notebook
from rekindle._src.core.priority import give_way, handing_over
from rekindle._src.programs.buckets import SCATTER, Bucket, Key
from rekindle._src.programs.ledger import Form, ProgramRecord
from rekindle._src.programs.programs import Programs
from rekindle.errors import CompileError, InvalidRequest
from rekindle_kernels import build_kernels, current_platform


class Maker(Protocol):
    """A maker of programs in threads of its own."""

    @property
    def flush(self) -> Callable[[], None]:
        """Waits until all new programs are stored."""
        ...

    def stop(self, timeout: float | None = ...) -> None:
        """Start no further program, and wait up to `timeout` seconds."""


_at_work: weakref.WeakSet[Maker] = weakref.WeakSet()
_registered = False
# Seconds that a program which a first text does without waits until the session is open, and for that text.
FOR_OPENING, FOR_TEXT = 1.0, 0.1
KERNEL_SECONDS = 180.0  # the longest wait for native kernels; two idle cores compile a model's in 10 to 20
WORKERS = 2  # threads; XLA compiles a program on one core, and more workers than cores slow serving down


@dataclasses.dataclass(frozen=True, slots=True)
class WarmingProgress:
    """Progress: one more program is ready."""

    program: ProgramRecord
    done: int
    total: int


Progress = Callable[[WarmingProgress], None]


def likely_first(keys: Iterable[Key]) -> list[Key]:
    """Sort the keys, few rows first: a notebook's first request needs the smallest prefill and decode programs.

    Programs that are no steps come before all. The thread that runs steps makes one that it needs, such as that which
    copies pages of a shared prefix, and all streams wait for it.
    """

    def rank(key: Key) -> tuple[int, int, int]:
        if not isinstance(key, Bucket):
            return -1, 0, 0
        return (1 if key.variants else 0) + (2 if key.span else 0), key.rows, key.tokens

    return sorted(keys, key=rank)


def first_needed(programs: Programs, *, restoring: bool) -> list[Key]:
    """Return the programs that a new session needs first, in order: for restored pages, a short prompt, decoding."""
    plain = sorted(bucket for bucket in programs.lattice.ahead if not bucket.variants)
    decode = next(bucket for bucket in plain if not bucket.tokens)
    mixed = [bucket for bucket in plain if bucket.tokens]
    prefill = [bucket for bucket in mixed if bucket.rows == mixed[0].rows]
    return [*(programs.lattice.fills if restoring else ()), *prefill[:1], decode, *prefill[1:]]


def needed_after_restart(programs: Programs) -> list[Key]:
    """Return the programs that a later process needs first if it restores this one's pages; empty without a store.

    It copies the pages to the device, computes the tokens beyond the last full page, at most a page of them, and then
    decodes. This process may have needed none of these programs: its prompts were longer, and pages never came back.
    """
    if not programs.keeps or SCATTER not in programs.keys:
        return []
    first = first_needed(programs, restoring=True)
    buckets = [key for key in first if isinstance(key, Bucket)]
    page = programs.recipes.page_size
    enough = next((bucket.tokens for bucket in buckets if bucket.tokens >= page), programs.config.max_tokens_per_step)
    return [key for key in first if not isinstance(key, Bucket) or key.tokens <= enough]


def is_deep(programs: Programs) -> bool:
    """True if whole programs take longer to compile than a first text should wait: more than two seconds."""
    return programs.recipes.model.num_layers >= 12


def seconds_of_parts(programs: Programs, precompile: str) -> float:
    """Return the time that programs of parts serve alone, from the opening until whole ones are compiled.

    The first text may be the only one; then neither this process nor the next one compiles more than it used. With
    "lazy" that is likelier. Either way whole programs are ready by the tenth second on a CPU. A GPU's take ten to
    twenty seconds each, and a process ends when the one being compiled is ready.
    """
    soon = is_deep(programs) and current_platform() != "gpu"
    return 0.7 if precompile == "background" or soon else 6.0


def warm(
    programs: Programs,
    keys: Iterable[Key] | None = None,
    *,
    progress: Progress | None = None,
    stopped: threading.Event | None = None,
    contexts: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    workers: int = WORKERS,
    before_each: Callable[[], None] = lambda: None,
) -> None:
    """Make all programs ready, or just `keys` in this order. Raise the first `CompileError`."""
    ordered = likely_first(programs.keys) if keys is None else [*keys]
    workers = min(workers, len(ordered))
    upcoming: queue.SimpleQueue[Key] = queue.SimpleQueue()
    for key in ordered:
        upcoming.put(key)
    done: list[Key] = []
    errors: list[BaseException] = []
    lock = threading.Lock()
    stopped = stopped or threading.Event()

    def work() -> None:
        with contexts():
            while True:
                before_each()
                if stopped.is_set() or errors or not threading.main_thread().is_alive():
                    return
                try:
                    key = upcoming.get_nowait()
                except queue.Empty:
                    return
                try:
                    programs.get(key)
                except BaseException as error:
                    errors.append(error)
                    return
                record = programs.ledger.entries[key].record
                with lock:
                    done.append(key)
                    if progress is not None and record is not None:
                        progress(WarmingProgress(record, len(done), len(ordered)))

    # Not daemons: a thread that is ended inside XLA aborts the process. So the interpreter's exit waits for programs
    # that are being compiled, and no further ones start.
    threads = [threading.Thread(target=work, name="rekindle compile", daemon=False) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def finish_at_exit(maker: Maker) -> None:
    """Let it finish and store its program at the interpreter's exit, which waits for its thread in any case.

    Orbax stores in thread pools, which accept no more work once threading's own exit functions have run, the last
    registered first; see `models.loading.prepared`.
    """
    global _registered
    _at_work.add(maker)
    if not _registered:
        import concurrent.futures.thread  # noqa: F401  registers the end of thread pools, which has to come later

        getattr(threading, "_register_atexit", atexit.register)(_finish)
        _registered = True


def _finish() -> None:
    for maker in tuple(_at_work):
        maker.stop(None)
        maker.flush()


class Warming:
    """The work of the option `precompile`, which starts while the weights are being read.

    all         every program is ready when the session opens
    background  every program is made ready while the session serves; one that fails is tried again when it is needed
    lazy        the first request's programs are loaded from the store until the session opens; a model with many layers
                has them compiled if they are not stored, and nothing else is

    A session that restores pages opens when it has loaded the stored programs that their first request needs.

    Where the installation has no native kernels and numba can compile them, other processes compile them first. All
    programs wait for the kernels, so that a session's arithmetic is the same from its first token to its last: for
    three minutes at most, and with "all" for as long as it takes. This process then does without the remaining ones.

    A conversation needs more than a first text does: see `expect`.

    A model of many layers begins with programs made of parts, which are ready much sooner; whole programs replace them.
    With "lazy", the part that greedy steps don't need is compiled at its first use: a command that prints one text
    would otherwise not end before that is compiled.

    In a notebook, a program that no text waits for begins when the kernel's main thread has a moment: see `give_way`.
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
        self._programs, self._precompile, self._restoring = programs, precompile, restoring
        self._progress, self._contexts = progress, contexts
        self._stopped = threading.Event()
        self._opened = threading.Event()
        self._opening = threading.Event()  # set once the opening waits for the awaited programs only
        self.flush = programs.flush
        self._error: BaseException | None = None
        self._kernels = build_kernels(programs.recipes.kernels())
        together = programs.recipes.parts.multi_process  # several processes have to compute alike
        bounded = precompile != "all" and not together
        self._longest = KERNEL_SECONDS if bounded else math.inf
        filling = restoring and not programs.moved_by_host(programs.lattice.fills)
        self._first = first_needed(programs, restoring=filling)
        fills = len(programs.lattice.fills) * filling
        self._prefill_and_decode = self._first[: fills + 2]
        self._in_parts = False
        if precompile != "all" and not programs.config.deterministic and not together:
            self._in_parts = programs.quicker_in_parts(self._first[fills : fills + 2])
        if self._in_parts:
            programs.settle_for(Form.PARTS)
        self.in_peace = self._in_parts  # parts serve, and only programs in demand are compiled
        self._awaited = self._prefill_and_decode if restoring and not self._in_parts else []
        # A deep model's programs are compiled while weights are read: a first text would wait for them for seconds.
        self._is_deep = is_deep(programs) and programs.recipes.compiles_slowly
        self._thread = threading.Thread(target=self._work, name="rekindle warming", daemon=False)
        finish_at_exit(self)
        self._thread.start()
        self._expecting: threading.Thread | None = None

    def expect(self, tokens: Callable[[], int], *, drawn: bool) -> None:
        """Make the programs of a first message ahead, in a thread of its own, unless `precompile` has done it.

        A chat template makes a prompt that is longer than most first texts, and needs another program; where its tokens
        are `drawn`, programs of parts need their whole closing. `tokens` returns the length of such a prompt, in that
        thread. Later calls do nothing.
        """
        if self._expecting is None and self._precompile != "all" and not self._is_stopped():
            self._expecting = threading.Thread(
                target=self._make_chat, args=(tokens, drawn), name="rekindle warming chat", daemon=False
            )
            self._expecting.start()

    def _make_chat(self, tokens: Callable[[], int], drawn: bool) -> None:
        if not self.wait_for_kernels():
            return
        with self._contexts(), contextlib.suppress(CompileError, InvalidRequest):  # the first message raises it
            sizes = sorted(
                (key for key in self._first if isinstance(key, Bucket) and key.tokens), key=attrgetter("tokens")
            )
            needed = tokens()
            prefill = next((key for key in sizes if key.tokens >= needed), sizes[-1])  # a longer prompt is cut
            for key in (prefill, self._prefill_and_decode[-1]):
                self._give_way()
                if self._is_stopped():
                    return
                self._programs.get(key)
                if drawn and not self._is_stopped():
                    self._programs.complete(key)

    def _work(self) -> None:
        if not self.wait_for_kernels():
            return
        if self._precompile == "lazy":
            self.make_first()
            return
        try:
            self._make_all()
        except BaseException as error:
            self._error = error

    def make_first(self) -> None:
        """Make the programs of a first text. A step that needs one that does not compile tries again, and raises."""
        if self._in_parts:
            with contextlib.suppress(CompileError):
                self._make_parts()
            self._replace_parts()
            return
        if not self._load(self._prefill_and_decode) and self._is_deep:
            with contextlib.suppress(CompileError):
                self._warm(self._prefill_and_decode)
        if not self._opening.is_set():
            self._load(self._first)

    def _make_all(self) -> None:
        """Make all programs, the likeliest first."""
        if self._in_parts:
            self._make_parts()
            self._complete_parts()
            self._replace_parts()
        elif self._precompile == "background":
            self._load(self._prefill_and_decode)
        if self._precompile == "background" and self._restoring:
            # A request is likely to come at once, and needs no other program: none is loaded meanwhile.
            self._opened.wait()
            self._stopped.wait(0.5)
        others = (key for key in likely_first(self._programs.keys) if key not in self._first)
        if self._precompile == "all":
            self._warm([*self._first, *others])
        else:
            with handing_over():
                # The other core serves.
                self._warm([*self._first, *others], workers=1, before_each=self._give_way)
        # Guided programs are stored where earlier sessions had guided requests; this one may need them as well.
        self._load(self._programs.lattice.late_keys, all_of_them=True)

    @property
    def waits_for_kernels(self) -> bool:
        """True while native kernels are being compiled."""
        return self._kernels is not None and self._kernels.running

    def describe_kernels(self) -> str:
        """Return how many native kernels are compiled, in words; empty if none are being compiled."""
        kernels = self._kernels
        if kernels is None or not kernels.running:
            return ""
        return f"native kernels {len(kernels.names) - len(kernels.left)} of {len(kernels.names)}"

    def wait_for_kernels(self) -> bool:
        """Wait until native kernels are ready, or it takes too long. Return False if stopped before."""
        if self._kernels is None:
            return True
        if not self._kernels.wait(self._is_stopped, longest=self._longest):
            return False
        if self.late_kernels:
            self._programs.use_no_store()
        return True

    @property
    def late_kernels(self) -> tuple[str, ...]:
        """The native kernels that this process does without, since they were not compiled in time."""
        return () if self._kernels is None else self._kernels.put_off

    def restorable(self) -> list[Key]:
        """Load and return the stored programs that the first request for restored pages needs.

        About half of them are loaded in this thread, from the last on; the warming thread begins with the first.
        """
        self._opening.set()
        return [key for key in self._awaited[::-1] if self._programs.load(key)][::-1]

    def opened(self) -> None:
        """Go on when the session is open. Raise the `CompileError` of a program that has to be ready by now."""
        self._opened.set()
        if self._precompile == "all":
            self._thread.join()
            if self._error is not None:
                raise self._error

    def stop(self, timeout: float | None = 0.5) -> None:
        """Start no further program; wait up to `timeout` seconds. A compilation can't be interrupted and goes on."""
        self._stopped.set()
        self._opened.set()  # ends the wait for the opening, too
        self._thread.join(timeout)
        if self._expecting is not None:
            self._expecting.join(timeout)

    def _give_way(self) -> None:
        if in_notebook():
            give_way(self._is_stopped)

    def _warm(
        self, keys: Sequence[Key], *, workers: int = WORKERS, before_each: Callable[[], None] = lambda: None
    ) -> None:
        warm(
            self._programs,
            keys,
            progress=self._progress,
            stopped=self._stopped,
            contexts=self._contexts,
            workers=workers,
            before_each=before_each,
        )

    def _load(self, keys: Iterable[Key], *, all_of_them: bool = False) -> bool:
        """Load programs up to the first that is not stored, or `all_of_them` that are. True if all are loaded."""
        stored = True
        with self._contexts():
            for key in keys:
                if self._is_stopped() or (self._precompile == "lazy" and self._opened.is_set()):
                    return False
                stored &= self._programs.load(key)
                if not (stored or all_of_them):
                    return False
        return stored

    def _make_parts(self) -> None:
        """Make the program that decodes, in parts, after the others, which have all cores until then.

        The first text needs the program of its prompt alone, which also makes further tokens until decoding is ready.
        It needs weights and vocabulary, too: where these come soon, they have the cores. A GPU's parts take seconds
        each, and fewer of them together.
        """
        keys = self._prefill_and_decode
        if current_platform() == "gpu":
            self._warm(keys)
            return
        with self._programs.ledger.made_next(keys[-1]):
            self._warm(keys[:-1])
            if not all(map(self._programs.load, keys[-1:])):
                if self._opened.wait(FOR_OPENING):
                    self._stopped.wait(FOR_TEXT)
                self._warm(keys[-1:])

    def _complete_parts(self) -> None:
        """Make the closings that programs of parts lack so far, since greedy steps do without them."""
        with self._contexts():
            for key in self._prefill_and_decode:
                self._give_way()
                if self._is_stopped():
                    return
                self._programs.complete(key)

    def _replace_parts(self) -> None:
        """Put whole programs in place of parts, an earlier process's too, after a moment without compilations.

        A process that ends within that moment compiles nothing that it did not need."""
        with self._contexts():
            self._opened.wait()  # until then weights and the vocabulary want the cores
            self._stopped.wait(seconds_of_parts(self._programs, self._precompile))
            self.in_peace = False
            self._programs.replace_parts(self._is_stopped, before_each=self._give_way)

    def _is_stopped(self) -> bool:
        """True after `stop`, and at the interpreter's exit, which waits for this thread before it closes sessions."""
        return self._stopped.is_set() or not threading.main_thread().is_alive()
