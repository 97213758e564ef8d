"""Tokens as labels in a picture: every token is visible, and no token changes the text around it."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

from rekindle._src.core import words

_DRAWN: Mapping[str, str] = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡", "\u200b": "·"}
# Control characters are no XML, and marks of the writing direction turn the labels after them around.
_HIDDEN = frozenset(("Cc", "Cf", "Cn", "Cs", "Zl", "Zp"))


def visible(text: str, width: int = 12) -> str:
    """Return a token's text with its spaces and line breaks drawn, in at most `width` characters; not escaped."""
    return words.shorten("".join(map(_drawn, text[: width + 1])), width) or "∅"


def readable(text: str, width: int) -> str:
    """Return the beginning of a longer text as a label: spaces stay spaces, and the rest is as in `visible`."""
    return words.shorten("".join(" " if one == " " else _drawn(one) for one in text[: width + 1]), width)


def _drawn(character: str) -> str:
    drawn = _DRAWN.get(character)
    if drawn is not None:
        return drawn
    if ord(character) < 0x20:
        return chr(0x2400 + ord(character))
    return "\ufffd" if unicodedata.category(character) in _HIDDEN else character
