"""Slow work and waits, shown in a notebook cell's output, a terminal, or a log.

`Activity` shows what a call waits for while the wait lasts: drawn by its own thread, removed when the wait is over.
`ProgramWait` counts and shows the waits of a session's steps for their programs. `Progress` is a bar for work in
counted parts, and its last picture stays:

    session = await rekindle.open(folder, progress=Progress("loading"))
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple, Protocol, Self, TextIO

from rekindle._src.core.drawable import html_of

log = logging.getLogger("rekindle.progress")
PATIENCE = 0.5  # seconds before anything is shown; most loads are over by then
BAR_INTERVAL = 0.05
LOG_INTERVAL = 10.0
Backend = Literal["auto", "notebook", "terminal", "log"]
INTERVAL = 0.2  # seconds between two drawings
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
WIDTH = 100  # most columns of a terminal line; it is replaced and must not wrap


class State(NamedTuple):
    """The state of a wait: a line of text, and the fraction that is done (None if unknown)."""

    line: str
    fraction: float | None = None


Look = Callable[[], State | None]
_shown: list[Activity] = []  # the first one draws: a wait inside another shows nothing
_lock = threading.RLock()
_typing = 0  # lines that are being typed at the terminal
_erased = 0  # how often a line of the terminal was erased


def erased_lines() -> int:
    """Return how often the terminal's present line was erased, for those who had written on it."""
    return _erased


def _count_erased() -> None:
    global _erased
    _erased += 1


@contextmanager
def nothing_drawn() -> Iterator[None]:
    """Draw no activity inside this block, while a line is typed at the terminal; draw them again afterwards."""
    global _typing
    with _lock:
        _typing += 1
        for activity in _shown:
            activity.hide()
    try:
        yield
    finally:
        with _lock:
            _typing -= 1


class Activity:
    """`with Activity(look):` shows the result of `look()` in a cell, a terminal or the log until the block ends.

    Nothing is shown in the first half second, while `look()` is None, or inside another activity. With `at_once` the
    first picture is drawn before the wait begins, for waits that are known to be long and may keep other threads from
    running. `look` is called in another thread. A log, which can't be cleared, gets a line every ten seconds and none
    at the end.
    """

    def __init__(
        self,
        look: Look,
        *,
        backend: Backend = "auto",
        quiet: bool = False,
        stream: TextIO | None = None,
        at_once: bool = False,
    ) -> None:
        self._look, self._backend, self._quiet, self._stream = look, backend, quiet, stream
        self._patience = 0.0 if at_once else PATIENCE
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._screen: Screen | None = None
        self._began = 0.0

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *details: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Begin to show the wait."""
        screen = None if self._quiet else _screen(self._backend, self._stream)
        if screen is None:
            return self
        self._began, self._screen = time.monotonic(), screen
        with _lock:
            _shown.append(self)
        if not self._patience:
            self._draw_or_end()
        self._thread = screen.thread(target=self._run, name="rekindle activity", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the wait and clear its display. A second call does nothing."""
        self._ended.set()
        with _lock:
            if self in _shown:
                _shown.remove(self)
            if self._screen is not None:
                self._screen.clear()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
            self._thread = None

    def hide(self) -> None:
        """Remove the picture until the next one is drawn."""
        if self._screen is not None:
            self._screen.clear()

    def draw(self) -> None:
        """Show the present state, if its time has come."""
        with _lock:
            if self._ended.is_set() or self._screen is None or _shown[0] is not self or _typing:
                return
            seconds = time.monotonic() - self._began
            if seconds >= self._patience:
                state = self._look()
                if state is None:
                    self._screen.clear()
                else:
                    self._screen.show(state, seconds)

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL) and self._draw_or_end():
            pass

    def _draw_or_end(self) -> bool:
        try:
            self.draw()
        except Exception as error:  # a failed drawing must not fail the wait
            log.debug("progress could not be shown: %r", error)
            return False
        return True


def _screen(backend: Backend, stream: TextIO | None) -> Screen | None:
    out = sys.stderr if stream is None else stream
    if backend == "auto" and in_marimo():
        return _Marimo()
    if backend == "auto":
        backend = "notebook" if in_notebook() else "terminal" if out is not None and out.isatty() else "log"
    if backend == "notebook":
        return _Notebook()
    if backend == "terminal":
        return TerminalScreen(out)
    return _Log() if log.isEnabledFor(logging.INFO) else None


class Screen:
    """The place where an activity is shown."""

    thread: Callable[..., threading.Thread] = threading.Thread  # the kind of thread that draws

    def show(self, state: State, seconds: float) -> None:
        """Draw an activity in place of the picture before."""

    def clear(self) -> None:
        """Remove the drawing."""


class TerminalScreen(Screen):
    """One line that is overwritten, and erased at the end."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._drawn = out, 0

    def show(self, state: State, seconds: float) -> None:
        self._drawn += 1
        if state.fraction is None:
            head = SPINNER[self._drawn % len(SPINNER)]
        else:
            filled = round(20 * state.fraction)
            head = f"[{'█' * filled}{'·' * (20 - filled)}]"
        room = min(WIDTH, terminal_columns(self._out) - 1) - len(_seconds(seconds))  # which no long line hides
        _count_erased()
        self._out.write(f"\r\x1b[K{f'{head} {state.line}'[: max(0, room)]}{_seconds(seconds)}")
        self._out.flush()

    def clear(self) -> None:
        if self._drawn:
            _count_erased()
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._drawn = 0


class _Log(Screen):
    """A line every ten seconds."""

    def __init__(self) -> None:
        self._next = 0.0

    def show(self, state: State, seconds: float) -> None:
        if seconds >= self._next:
            self._next = seconds + LOG_INTERVAL
            log.info("%s (%.0f s)", state.line, seconds)


class _Notebook(Screen):
    """An output of the cell that each picture replaces, and an empty one at the end. It is not a widget, so every
    viewer shows it."""

    def __init__(self) -> None:
        self._output: Any = None

    def show(self, state: State, seconds: float) -> None:
        from IPython.display import display

        data = {"text/html": _picture(state, seconds), "text/plain": _line(state, seconds)}
        if self._output is None:
            self._output = display(data, raw=True, display_id=True)
        else:
            self._output.update(data, raw=True)

    def clear(self) -> None:
        if self._output is not None:
            self._output.update({"text/html": "", "text/plain": ""}, raw=True)
            self._output = None


class _Marimo(Screen):
    """The output of the running cell, until it has one itself. Its threads are of a kind that marimo knows."""

    def __init__(self) -> None:
        self._marimo: Any = sys.modules["marimo"]
        self.thread = self._marimo.Thread
        self._drawn = False

    def show(self, state: State, seconds: float) -> None:
        self._marimo.output.replace(self._marimo.Html(_picture(state, seconds)))
        self._drawn = True

    def clear(self) -> None:
        if self._drawn:
            self._marimo.output.clear()
            self._drawn = False


def _line(state: State, seconds: float) -> str:
    return f"{state.line}{_seconds(seconds)}"


def _seconds(seconds: float) -> str:
    return f" · {seconds:.{1 if seconds < 60 else 0}f} s"


def _picture(state: State, seconds: float) -> str:
    return html_of(State(_line(state, seconds), state.fraction))


class WaitSpan(NamedTuple):
    """One wait of a session's steps for a program, by `time.perf_counter()`."""

    start: float
    stop: float
    program: str


_REMEMBERED = 512  # waits for programs, the latest ones


class ProgramWait:
    """Counts the seconds that a session's steps stood still because a program was compiled or loaded, and the seconds
    that single requests waited while others went on.

    One thread waits at a time; any thread may read. The wait is shown while it lasts, unless the session is quiet.
    """

    def __init__(self, *, quiet: bool = True) -> None:
        self.program: str = ""  # that a step waits for; empty if none
        self._quiet = quiet
        self._total = self._since = 0.0
        self._spans: deque[WaitSpan] = deque(maxlen=_REMEMBERED)
        self._lock = threading.Lock()
        self._made = ""  # the program that some requests wait for while others go on
        self._shown: Activity | None = None
        self._added: OrderedDict[str, float] = OrderedDict()

    def announce(self, program: str) -> None:
        """Show that some requests wait for `program`, which is made while others go on; an empty string ends that."""
        if program == self._made:
            return
        self._made = program
        if program and self._shown is None:
            self._shown = Activity(self._state, quiet=self._quiet).start()
        elif not program and self._shown is not None:
            self._shown.stop()
            self._shown = None

    def add(self, request_id: str, seconds: float) -> None:
        """Count seconds that one request waited for a program while others went on."""
        with self._lock:
            self._added[request_id] = self._added.get(request_id, 0.0) + seconds
            if len(self._added) > _REMEMBERED:
                self._added.popitem(last=False)

    def added(self, request_id: str) -> float:
        """Return the seconds that were counted for one request alone."""
        return self._added.get(request_id, 0.0)

    @contextmanager
    def waiting(self, program: str) -> Iterator[None]:
        """Count the time of this block as a wait for `program`."""
        with self._lock:
            self.program, self._since = program, time.perf_counter()
        try:
            with Activity(self._state, quiet=self._quiet):
                yield
        finally:
            with self._lock:
                now = time.perf_counter()
                self._total += now - self._since
                self._spans.append(WaitSpan(self._since, now, program))
                self.program = ""

    def shown_by_caller(self) -> AbstractContextManager[object]:
        """Show the wait in the thread that waits for an answer, where no other thread can: in marimo."""
        return Activity(self._state, quiet=self._quiet) if in_marimo() else contextlib.nullcontext()

    def describe(self) -> str:
        """Return the compilation that a step or a request waits for, in words; empty if there is none."""
        program = self.program or self._made
        if not program:
            return ""
        from rekindle_kernels import kernel_being_compiled  # imports JAX, as programs did before

        kernel = kernel_being_compiled()
        return f"compiling program {program}" + (f", kernel {kernel}" if kernel else "")

    def _state(self) -> State | None:
        text = self.describe()
        return State(text) if text else None

    def seconds(self, now: float) -> float:
        """Return the seconds waited up to `now` (by `time.perf_counter()`), including a wait in progress."""
        with self._lock:
            return self._total + (max(0.0, now - self._since) if self.program else 0.0)

    def since(self, start: float) -> tuple[WaitSpan, ...]:
        """Return the waits that ended after `start`, in their order, the one in progress included."""
        with self._lock:
            spans = tuple(span for span in self._spans if span.stop > start)
            return (*spans, WaitSpan(self._since, time.perf_counter(), self.program)) if self.program else spans


NO_WAIT = ProgramWait()  # of a session with steps that need no programs


class CountedReport(Protocol):
    """How much of some work is done."""

    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...


class Progress:
    """A progress bar. Call it with an object that has `done` and `total`; each call replaces the line before."""

    def __init__(
        self, label: str, *, backend: Backend = "auto", quiet: bool = False, stream: TextIO | None = None
    ) -> None:
        self.label = label
        self.done = self.total = 0
        self._show = _silent if quiet else _backend(backend, stream)
        self._every = LOG_INTERVAL if self._show is _logged else BAR_INTERVAL
        self._last = time.monotonic() + PATIENCE - self._every
        self._first: tuple[float, int] | None = None  # when the first programs were ready, and how many
        self._lock = threading.Lock()  # programs are compiled by several threads
        self._visible = False

    def __call__(self, report: CountedReport) -> None:
        with self._lock:
            self.done, self.total = report.done, report.total
            now = time.monotonic()
            if self._first is None and report.done:
                self._first = now, report.done
            complete = self.done >= self.total
            if (complete and self._visible) or (not complete and now - self._last >= self._every):
                self._last, self._visible = now, True
                self._show(self.line(report), self.fraction, complete)

    @property
    def fraction(self) -> float:
        return self.done / self.total if self.total else 1.0

    def line(self, report: CountedReport) -> str:
        """Return the line for a report. Compiling shows the program's name and the time left; others their own text."""
        program = getattr(report, "program", None)
        if program is None:
            return f"{self.label}: {report}"
        since, first = self._first or (0.0, report.done)  # before the first, other work was done as well
        counted, eta = report.done - first, ""
        if counted > 0 and report.done < report.total:
            eta = f", {(time.monotonic() - since) / counted * (report.total - report.done):.0f} s left"
        return f"{self.label}: {report.done} of {report.total} programs, {program.name}{eta}"


def _backend(backend: Backend, stream: TextIO | None) -> Callable[[str, float, bool], None]:
    out = sys.stderr if stream is None else stream
    if backend == "auto":
        backend = "notebook" if in_notebook() else "terminal" if out.isatty() else "log"
    if backend == "notebook":
        return _CellBar()
    return _TerminalBar(out) if backend == "terminal" else _logged


def terminal_columns(terminal: TextIO) -> int:
    """Return the terminal's present width; if it can't tell, an exported COLUMNS, perhaps of another window."""
    with contextlib.suppress(OSError, ValueError):
        if columns := os.get_terminal_size(terminal.fileno()).columns:
            return columns
    return shutil.get_terminal_size().columns


def _silent(line: str, fraction: float, complete: bool) -> None: ...


def _logged(line: str, fraction: float, complete: bool) -> None:
    log.info(line)


class _TerminalBar:
    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __call__(self, line: str, fraction: float, complete: bool) -> None:
        filled = round(20 * fraction)
        columns = terminal_columns(self._out) - 1  # a wrapped line could not be overwritten
        self._out.write(
            f"\r[{'█' * filled}{'·' * (20 - filled)}] {line:<70}"[: columns + 1] + ("\n" if complete else "")
        )
        self._out.flush()


class _CellBar:
    """A cell's output that each call replaces; the last one stays. It is not a widget, so every viewer shows it."""

    def __init__(self) -> None:
        self._output: Any = None

    def __call__(self, line: str, fraction: float, complete: bool) -> None:
        from IPython.display import display

        data = {"text/html": html_of(State(line, None if complete else fraction)), "text/plain": line}
        if self._output is None:
            self._output = display(data, raw=True, display_id=True)
        else:
            self._output.update(data, raw=True)


def in_marimo() -> bool:
    """True if this thread runs the cells of a marimo notebook. No other thread can show anything there."""
    marimo = sys.modules.get("marimo")
    return marimo is not None and bool(marimo.running_in_notebook())


def in_notebook() -> bool:
    """True if this process is a Jupyter kernel. IPython is not imported: a kernel has it already."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)  # another thread may be importing it
    return get_ipython is not None and hasattr(get_ipython(), "kernel")
