"""Makes texts of others safe for a terminal, where control characters could move the cursor or write the clipboard."""

from __future__ import annotations

from typing import Final, TextIO

# A picture in the place of each character that can steer a terminal.
PICTURES: Final = {
    **{code: chr(0x2400 + code) for code in range(32)},
    **dict.fromkeys(range(127, 160), "�"),
}
_IN_TEXT: Final = {code: picture for code, picture in PICTURES.items() if chr(code) not in "\n\t"}


def without_controls(text: str) -> str:
    """Return a text with pictures of its control characters, except for line breaks and tabs."""
    return text.translate(_IN_TEXT)


def for_stream(text: str, stream: TextIO) -> str:
    """Return the text to write to a stream: unchanged, or without control characters for a terminal."""
    return without_controls(text) if stream.isatty() else text
