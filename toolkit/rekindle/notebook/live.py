"""What all views share: a widget that is redrawn from a thread, coalesced, and replaced by static HTML at the end."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import ipywidgets

INTERVAL = 0.05  # at most 20 pictures a second, however fast tokens come


class Live:
    """A view. Subclasses say what it looks like now (`draw`) and when it is over (`ended`).

    Displaying it shows the widget. `text/html` beside it is what viewers without a kernel show; the output is replaced
    by that alone when the view ends, since a saved notebook holds no widget state.
    """

    interval = INTERVAL

    def __init__(self, *controls: Any) -> None:
        self._picture = ipywidgets.HTML()
        self.widget = ipywidgets.VBox([self._picture, ipywidgets.HBox(list(controls))])
        self._controls = controls
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._shown: list[Any] = []  # display handles
        self.pictures = 0  # drawn so far

    def draw(self) -> str:
        """Static HTML of how things are."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """Nothing will change any more."""
        return self._stopped.is_set()

    def wait(self) -> None:
        """Block the drawing thread until there may be something new."""
        self._stopped.wait(self.interval)

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
        self._picture.value = self.draw()
        self.pictures += 1

    def _run(self) -> None:
        # A view must not hurt: whatever happens to the kernel's channels at its end is not the user's business.
        with contextlib.suppress(Exception):
            while not self.ended:
                self.wait()
                self.refresh()
                self._stopped.wait(self.interval)
        with contextlib.suppress(Exception):
            self._leave()

    def _leave(self) -> None:
        self.refresh()
        for control in self._controls:
            control.close()
        for handle in self._shown:
            handle.update({"text/html": self._picture.value, "text/plain": repr(self)}, raw=True)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/html": self._picture.value, "text/plain": repr(self)}
        if not (self._thread is not None and not self._thread.is_alive()):
            bundle |= self.widget._repr_mimebundle_() or {}
            bundle["text/plain"] = repr(self)
        return bundle

    def _ipython_display_(self) -> None:
        from IPython.display import display

        self.start()
        handle = display(self._repr_mimebundle_(), raw=True, display_id=True)
        if handle is not None:
            self._shown.append(handle)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {'ended' if self.ended else 'live'}>"
