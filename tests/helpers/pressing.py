"""The messages that a page sends to a view's widget for presses, marks and typed text, without a browser."""

from __future__ import annotations

from typing import Any


def hear(view: Any, content: Any) -> None:
    """Send a message as ipywidgets delivers it."""
    view.widget._handle_custom_msg(content, [])


def press(view: Any, name: str, **fields: list[str]) -> None:
    """Press a button; `fields` are texts typed before it, each with the text that the page knew."""
    hear(view, {"event": "press", "name": name, **({"fields": fields} if fields else {})})


def act(view: Any, name: str, at: int) -> None:
    """Press a button of the picture that belongs to one of its parts."""
    hear(view, {"event": "act", "name": name, "value": at})


def mark(view: Any, token: Any) -> None:
    """Press a token, or a bar."""
    hear(view, {"event": "token", "name": "", "value": token})
