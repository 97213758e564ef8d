"""The widget of all views: a picture in HTML, buttons and text fields, a note.

It is one anywidget instead of a tree of ipywidgets, since each ipywidget is two or three models that the kernel
announces. Making it takes 0.8 ms instead of 2.0. The session waits meanwhile, since both hold the interpreter's lock.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

_STATIC = Path(__file__).parent / "static"
_SCRIPT, _STYLE = ((_STATIC / name).read_text() for name in ("panel.js", "panel.css"))
Control = dict[str, Any]


def button(name: str, label: str, *, title: str = "", disabled: bool = False) -> Control:
    return {"kind": "button", "name": name, "label": label, "title": title, "disabled": disabled}


def field(name: str, label: str, *, width: str = "20em", rows: int = 1) -> Control:
    """Return a text field. It shows its label while empty. Enter presses `{name}:enter`; Shift+Enter is a new line."""
    return {"kind": "text", "name": name, "label": label, "width": width, "rows": rows}


def slider(name: str, label: str, *, low: float, high: float, step: float, title: str = "") -> Control:
    """Return a slider for a number from `low` to `high`. Its value is text, like that of every control."""
    return {
        "kind": "slider", "name": name, "label": label, "title": title, "least": low, "most": high, "step": step,
    }  # fmt: skip


@functools.cache
def _layout() -> Any:
    """Return the layout of all panels. One for each would be another model for the kernel to announce and keep."""
    return ipywidgets.Layout()


class Panel(anywidget.AnyWidget):
    """Calls `hears(event, name, value)`: "press" when a button is pressed, "token" when a token is clicked."""

    _esm = traitlets.Unicode(_SCRIPT).tag(sync=True)
    _css = traitlets.Unicode(_STYLE).tag(sync=True)
    html = traitlets.Unicode().tag(sync=True)
    note = traitlets.Unicode().tag(sync=True)
    controls: Any = traitlets.List().tag(sync=True)
    values: Any = traitlets.Dict().tag(sync=True)  # contents of text fields, by name
    kept = traitlets.Unicode().tag(sync=True)  # class of the static copies, hidden while this is shown
    gone = traitlets.Unicode(  # the page's note after its kernel is gone
        "Its kernel was restarted or is gone: this is the last picture. Run the cell again to go on."
    ).tag(sync=True)
    heard = traitlets.Int().tag(sync=True)  # messages from the page so far: they show the page that the kernel answers

    def __init__(self, controls: list[Control], hears: Callable[[str, str, Any], None]) -> None:
        super().__init__(controls=controls, layout=_layout(), kept=f"rekindle-kept-{uuid.uuid4().hex}")
        self._hears = hears
        self.on_msg(lambda widget, content, buffers: self.hear(content))

    def hear(self, content: Any) -> None:
        """Handle a message from the page; messages of unknown form are dropped."""
        if isinstance(content, dict) and isinstance(content.get("event"), str):
            self.heard += 1
            self._hears(content["event"], str(content.get("name", "")), content.get("value"))

    def value(self, name: str) -> str:
        """Return the content of a text field."""
        return str(self.values.get(name, ""))

    def fill(self, name: str, value: str) -> None:
        """Write into a text field."""
        self.values = {**self.values, name: value}
