"""Tokens as the bytes that they stand for in texts."""

from __future__ import annotations

import functools
from typing import NamedTuple


class Spelled(NamedTuple):
    """The tokens of a vocabulary, for a reader other than the tokenizers library."""

    tokens: list[bytes]  # by their ids, as they stand in texts; empty for an id without a token
    special: list[int]


@functools.cache
def byte_of_character() -> dict[str, int]:
    """Return the byte of each character in GPT-2's alphabet: printable Latin-1 unchanged, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}
