"""What all views share: a widget that is redrawn from a thread, coalesced, and replaced by static HTML at the end."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from rekindle._src.core import html
from rekindle._src.notebook.panel import Control, Panel
from rekindle.errors import RekindleError

# Ten pictures a second, however fast tokens come. Drawing one takes 0.5 ms, sending it about as much in the kernel's
# output thread and in the notebook server, all of it on cores that the engine computes with.
INTERVAL = 0.1
# The copy that stays when the kernel dies may be older than the view by this much. Each update goes to the notebook.
KEEP_SECONDS = 2.0
# What subclasses and the page call, and tests read; Tab leaves it out.
_MACHINERY = frozenset(
    ("draw", "press", "token", "wait", "start", "refresh", "epitaph", "keep", "interval", "picture", "pictures")
)
_BESIDE = html.line("A live view. When its kernel is gone, what it showed last is the picture above.")


class Live:
    """A view. Subclasses say what it looks like now (`draw`) and when it is over (`ended`).

    Displaying it gives two outputs: a static copy of the picture, which the widget hides while it is shown, and the
    widget. JupyterLab shows an error in place of a widget whose kernel is gone, whatever HTML lies beside it; then the
    copy is what remains, so it is kept current. When the view ends, its HTML takes the place of both.
    """

    interval: float = INTERVAL

    def __init__(self, *controls: Control) -> None:
        self.widget: Any = Panel(list(controls), self._heard)  # Any: anywidget has no types
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._shown: list[tuple[Any, Any]] = []  # display handles, of a widget and of its static copy
        self._timer: threading.Timer | None = None  # until the copies are brought up to date
        self._left = False  # the last picture was drawn
        self._lock = threading.Lock()  # a view may be displayed or redrawn at the moment when it ends
        self.picture: str = ""  # the latest
        self.pictures: int = 0  # drawn so far

    def draw(self) -> str:
        """The view as static HTML, as it is now."""
        raise NotImplementedError

    def press(self, name: str) -> None:
        """A button was pressed, or Enter in a text field."""

    def token(self, index: int) -> None:
        """A token of the picture was clicked."""

    @property
    def ended(self) -> bool:
        """Whether the view will not change any more."""
        return self._stopped.is_set()

    def wait(self) -> None:
        """Block the drawing thread until there may be something new."""

    def start(self) -> None:
        """Begin to draw."""
        if self._thread is None:
            self.refresh()
            self._thread = threading.Thread(target=self._run, name="rekindle view", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Draw no more and leave the static picture."""
        self._stopped.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the last picture."""
        if self._thread is not None:
            self._thread.join(timeout)

    def refresh(self) -> None:
        """Draw now; nothing is sent when the picture is the same."""
        with self._lock:  # a press draws from the kernel's thread: an older picture must not come last
            self._draw()
            self.widget.html = self.picture

    def epitaph(self) -> str:
        """What the static copy says below the picture, to somebody who finds it without a kernel."""
        return ""

    def keep(self) -> None:
        """Called at most every `KEEP_SECONDS`, after the picture has changed, and when the view has ended."""

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _MACHINERY]

    def _draw(self) -> None:
        before, self.picture = self.picture, str(self.draw())  # not Markup: marimo's encoder takes no subclass of str
        self.pictures += 1
        if self.picture != before and self._timer is None and not self._left:
            self._timer = threading.Timer(KEEP_SECONDS, self._keep)
            self._timer.daemon = True
            self._timer.start()

    def _keep(self) -> None:
        with contextlib.suppress(Exception):  # as in `_run`
            with self._lock:
                self._timer = None
                if self._left:
                    return
                for _, copy in self._shown:
                    copy.update(self._copy(), raw=True)
            self.keep()

    def _copy(self) -> dict[str, str]:
        """The static copy that a notebook has of a live view."""
        shown = f'<div class="{self.widget.kept}">{self.picture}{self.epitaph()}</div>'
        return {"text/html": shown, "text/plain": repr(self)}

    def _heard(self, event: str, name: str, value: Any) -> None:
        try:
            if event == "press":
                self.press(name)
            elif event == "token" and isinstance(value, int):
                self.token(value)
        except RekindleError as error:  # an exception in a callback would be shown nowhere
            self.widget.note = str(html.line(f"{type(error).__name__}: {error}"))

    def _run(self) -> None:
        # Errors end here: the kernel's channels may close at any time, and the user can do nothing about it.
        with contextlib.suppress(Exception):
            while not self.ended:
                self.wait()
                if self.ended:
                    break
                self.refresh()
                self._stopped.wait(self.interval)
        with contextlib.suppress(Exception):
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._left = True
            self._draw()
            if self._timer is not None:
                self._timer.cancel()
            for handle, copy in self._shown:
                handle.update({"text/html": self.picture, "text/plain": repr(self)}, raw=True)
                copy.update({"text/html": "", "text/plain": ""}, raw=True)
            if self._shown:
                self.widget.close()  # it is not shown any more, and the kernel would keep it for ever
            else:
                self.widget.html, self.widget.controls = self.picture, []
        self.keep()

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle: dict[str, Any] = {"text/html": self.picture, "text/plain": repr(self)}
        if self._left:
            return bundle, {}
        # Metadata is where Colab looks up how to show widgets that are not its own.
        data, metadata = self.widget._repr_mimebundle_() or ({}, {})
        return {**data, **bundle}, metadata

    def _ipython_display_(self) -> None:
        from IPython.display import display

        self.start()
        with self._lock:
            data, metadata = self._repr_mimebundle_()
            if self._left:
                self.widget.close()
                display(data, metadata=metadata, raw=True)
                return
            copy = display(self._copy(), raw=True, display_id=True)
            handle = display(data | {"text/html": str(_BESIDE)}, metadata=metadata, raw=True, display_id=True)
            if handle is not None and copy is not None:
                self._shown.append((handle, copy))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {'ended' if self.ended else 'live'}>"
