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


class Live:
    """A view. Subclasses say what it looks like now (`draw`) and when it is over (`ended`).

    Displaying it shows the widget. `text/html` beside it is what viewers without a kernel show; the output is replaced
    by that alone when the view ends, since a saved notebook holds no widget state.
    """

    interval: float = INTERVAL

    def __init__(self, *controls: Control) -> None:
        self.widget: Any = Panel(list(controls), self._heard)  # Any: anywidget has no types
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._shown: list[Any] = []  # display handles
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

    def _draw(self) -> None:
        self.picture = str(self.draw())  # not Markup: marimo's encoder knows no subclasses of str
        self.pictures += 1

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
            self._draw()
            self._left = True
            for handle in self._shown:
                handle.update({"text/html": self.picture, "text/plain": repr(self)}, raw=True)
            if self._shown:
                self.widget.close()  # it is not shown any more, and the kernel would keep it for ever
            else:
                self.widget.html, self.widget.controls = self.picture, []

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
            handle = display(data, metadata=metadata, raw=True, display_id=True)
            if self._left:
                self.widget.close()
            elif handle is not None:
                self._shown.append(handle)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {'ended' if self.ended else 'live'}>"
