"""Contents of a panel's fields as a page sends them: with every message, next to the texts that they are based on.

Contents are no trait that the page sets: a host may hold a trait back while an earlier change is unanswered, and a
press would arrive without the last keys before it. `static/fields.js` is the page's side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_KINDS = ("text", "slider", "choice")


def texts(fields: object, controls: Iterable[Mapping[str, Any]], values: Mapping[str, Any]) -> dict[str, str]:
    """Return the new texts of the controls, by their names. What no control has, or is of another form, is dropped."""
    kinds = {control["name"]: control["kind"] for control in controls if control["kind"] in _KINDS}
    return {
        name: merged(text, base, str(values.get(name, ""))) if kinds[name] == "text" else text
        for name, text, base in _pairs(fields)
        if name in kinds
    }


def merged(text: str, base: str | None, now: str) -> str:
    """Return a field's text after keys in a page made `text` of `base`, while it became `now` in the kernel.

    What was added to the base is added to what is there now. A text that was changed in another way, or has no base,
    replaces it.
    """
    return now + text[len(base) :] if base is not None and now != base and text.startswith(base) else text


def _pairs(fields: object) -> Iterator[tuple[str, str, str | None]]:
    if isinstance(fields, dict):
        for name, pair in fields.items():
            if isinstance(pair, list) and len(pair) == 2 and isinstance(name, str) and isinstance(pair[0], str):
                base = pair[1]
                yield name, pair[0], base if isinstance(base, str) else None
