"""Shows what a call waits for while the wait lasts: drawn by its own thread, removed when the wait is over."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self, TextIO

from rekindle._src.core import html
from rekindle._src.core.progress import LOG_INTERVAL, PATIENCE, Backend, in_marimo, in_notebook, log, terminal_columns

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def draw(self) -> None:
        """Show the present state, if its time has come."""
        with _lock:
            if self._ended.is_set() or self._screen is None or _shown[0] is not self:
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
        return _Terminal(out)
    return _Log() if log.isEnabledFor(logging.INFO) else None


class Screen:
    """The place where an activity is shown."""

    thread: Callable[..., threading.Thread] = threading.Thread  # the kind of thread that draws

    def show(self, state: State, seconds: float) -> None:
        """Replace the picture."""

    def clear(self) -> None:
        """Remove the picture."""


class _Terminal(Screen):
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
        self._out.write(f"\r\x1b[K{f'{head} {state.line}'[: max(0, room)]}{_seconds(seconds)}")
        self._out.flush()

    def clear(self) -> None:
        if self._drawn:
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
    fraction = state.fraction
    bar = "" if fraction is None else html.bar({"done": fraction, "to do": 1.0 - fraction}, rest="to do", legend=False)
    return str(html.block(bar, html.line(_line(state, seconds))))  # encoders take no subclass of str
