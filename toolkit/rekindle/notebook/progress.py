"""How far something slow is, shown where it is read: a widget in a notebook, a bar on a terminal, lines in a log.

session = await rekindle.open(folder, progress=Progress("loading"))
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, TextIO

log = logging.getLogger("rekindle.progress")
PATIENCE = 0.5  # seconds before anything is shown: most loads are over by then
INTERVAL = 0.05
LOG_INTERVAL = 10.0
Backend = Literal["auto", "widget", "terminal", "log"]


class Progress:
    """Call it with anything that has `done` and `total`; one line, which is gone from notebooks when all is done."""

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
        self._shown = False

    def __call__(self, report: Any) -> None:
        with self._lock:
            self.done, self.total = report.done, report.total
            now = time.monotonic()
            ended = self.done >= self.total
            if (ended and self._shown) or (not ended and now - self._last >= self._every):
                self._last, self._shown = now, True
                self._show(self.line(report), self.fraction, ended)

    @property
    def fraction(self) -> float:
        return self.done / self.total if self.total else 1.0

    def line(self, report: Any) -> str:
        """Loads say how many bytes and how long still, programs say which one."""
        program = getattr(report, "program", None)
        words = str(report) if program is None else f"{report.done} of {report.total} programs, {program.name}"
        return f"{self.label}: {words}"


def _backend(asked: Backend, stream: TextIO | None) -> Callable[[str, float, bool], None]:
    out = sys.stderr if stream is None else stream
    if asked == "auto":
        asked = "widget" if _in_notebook() else "terminal" if out.isatty() else "log"
    if asked == "widget":
        return _Widget()
    return _Terminal(out) if asked == "terminal" else _logged


def _silent(line: str, fraction: float, ended: bool) -> None: ...


def _logged(line: str, fraction: float, ended: bool) -> None:
    log.info(line)


class _Terminal:
    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __call__(self, line: str, fraction: float, ended: bool) -> None:
        filled = round(20 * fraction)
        self._out.write(f"\r[{'█' * filled}{'·' * (20 - filled)}] {line:<70}" + ("\n" if ended else ""))
        self._out.flush()


class _Widget:
    """Shown by the first call, closed by the last, so that a saved notebook keeps nothing of it."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, line: str, fraction: float, ended: bool) -> None:
        import ipywidgets
        from IPython.display import display

        if self._bar is None:
            self._bar = ipywidgets.FloatProgress(min=0.0, max=1.0)
            self._text = ipywidgets.HTML()
            self.box = ipywidgets.HBox([self._bar, self._text])
            display(self.box)
        self._bar.value, self._text.value = fraction, line
        if ended:
            self.box.close()


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
