"""The beginning of a value, for error messages: of a large one, no more is looked at than is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def abbreviated(value: object, most: int = 80) -> str:
    """Return at most `most` characters of a value's repr."""
    text = _beginning(value, most)
    return text if len(text) <= most else text[: most - 3] + "..."


def _beginning(value: object, room: int) -> str:
    """Return the repr of a value, or more than `room` characters of its beginning."""
    if type(value) is str or type(value) is bytes:
        return repr(value[: max(0, room) + 1])
    if type(value) is list:
        return f"[{_joined(value, room, _beginning)}]"
    if type(value) is tuple:
        return f"({_joined(value, room, _beginning)}{',' * (len(value) == 1)})"
    if type(value) is dict:
        return "{" + _joined(value.items(), room, _pair) + "}"
    try:
        return repr(value)
    except Exception:  # an int of more than 4,300 digits, or an object that can't show itself
        return f"<{type(value).__name__}>"


def _pair(pair: tuple[object, object], room: int) -> str:
    name = _beginning(pair[0], room)
    return f"{name}: {_beginning(pair[1], room - len(name))}"


def _joined(values: Iterable[Any], room: int, beginning: Callable[[Any, int], str]) -> str:
    text = ""
    for value in values:
        if len(text) > room:
            break
        text += (", " if text else "") + (beginning(value, room - len(text) - 1) if room > len(text) else "…")
    return text
