"""Progress of slow work, shown in a notebook cell's output, a terminal, or a log.

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
from collections.abc import Callable
from typing import Any, Literal, TextIO

from rekindle._src.core import html

log = logging.getLogger("rekindle.progress")
PATIENCE = 0.5  # seconds before anything is shown; most loads are over by then
INTERVAL = 0.05
LOG_INTERVAL = 10.0
Backend = Literal["auto", "notebook", "terminal", "log"]


class Progress:
    """A progress bar. Call it with an object that has `done` and `total`; each call replaces the line before."""

    def __init__(
        self, label: str, *, backend: Backend = "auto", quiet: bool = False, stream: TextIO | None = None
    ) -> None:
        self.label = label
        self.done = self.total = 0
        self._show = _silent if quiet else _backend(backend, stream)
        self._every = LOG_INTERVAL if self._show is _logged else INTERVAL
        self._began = time.monotonic()
        self._last = self._began + PATIENCE - self._every
        self._lock = threading.Lock()  # programs are compiled by several threads
        self._visible = False

    def __call__(self, report: Any) -> None:
        with self._lock:
            self.done, self.total = report.done, report.total
            now = time.monotonic()
            complete = self.done >= self.total
            if (complete and self._visible) or (not complete and now - self._last >= self._every):
                self._last, self._visible = now, True
                self._show(self.line(report), self.fraction, complete)

    @property
    def fraction(self) -> float:
        return self.done / self.total if self.total else 1.0

    def line(self, report: Any) -> str:
        """Return the line for a report. Compiling shows the program's name and the time left; others their own text."""
        program = getattr(report, "program", None)
        if program is None:
            return f"{self.label}: {report}"
        seconds_left = (time.monotonic() - self._began) / report.done * (report.total - report.done)
        eta = f", {seconds_left:.0f} s left" if report.done < report.total else ""
        return f"{self.label}: {report.done} of {report.total} programs, {program.name}{eta}"


def _backend(backend: Backend, stream: TextIO | None) -> Callable[[str, float, bool], None]:
    out = sys.stderr if stream is None else stream
    if backend == "auto":
        backend = "notebook" if in_notebook() else "terminal" if out.isatty() else "log"
    if backend == "notebook":
        return _Output()
    return _Terminal(out) if backend == "terminal" else _logged


def terminal_columns(terminal: TextIO) -> int:
    """Return the terminal's present width; if it can't tell, an exported COLUMNS, perhaps of another window."""
    with contextlib.suppress(OSError, ValueError):
        if columns := os.get_terminal_size(terminal.fileno()).columns:
            return columns
    return shutil.get_terminal_size().columns


def _silent(line: str, fraction: float, complete: bool) -> None: ...


def _logged(line: str, fraction: float, complete: bool) -> None:
    log.info(line)


class _Terminal:
    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __call__(self, line: str, fraction: float, complete: bool) -> None:
        filled = round(20 * fraction)
        columns = terminal_columns(self._out) - 1  # a wrapped line could not be overwritten
        self._out.write(
            f"\r[{'█' * filled}{'·' * (20 - filled)}] {line:<70}"[: columns + 1] + ("\n" if complete else "")
        )
        self._out.flush()


class _Output:
    """A cell's output that each call replaces; the last one stays. It is not a widget, so every viewer shows it."""

    def __init__(self) -> None:
        self._output: Any = None

    def __call__(self, line: str, fraction: float, complete: bool) -> None:
        from IPython.display import display

        bar = "" if complete else html.bar({"done": fraction, "to do": 1.0 - fraction}, rest="to do", legend=False)
        data = {"text/html": str(html.block(bar, html.line(line))), "text/plain": line}
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
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
