"""The number of values of a JSON text, counted before it is parsed: a value takes some 100 bytes, however short it is.

Python's parser holds the interpreter's lock throughout; NumPy, which counts here, releases it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MARKS = (b",", b":", b"[", b"{")  # each stands before or after a value
BYTES_PER_VALUE = 100  # of a parsed one, at most, without its characters
BLOCK = 1 << 20


class JsonCounts(NamedTuple):
    """The values of a text, or a few more, and the named fields among them."""

    values: int
    names: int


def count_values(data: bytes | bytearray, most: int, most_names: int) -> JsonCounts:
    """Count the values and names of a JSON text. Stop once there are more than `most`, or more than `most_names`."""
    values, names = sum(data.count(mark) for mark in MARKS), data.count(b":")
    if values <= most and names <= most_names:
        return JsonCounts(values, names)  # marks in texts are among them, and there may be
    values, names, in_string, marks = 0, 0, 0, np.frombuffer(b"".join(MARKS), np.uint8)
    for _, block, quotes in _blocks(data):
        string_mask = np.bitwise_xor.accumulate(quotes.view(np.uint8)) ^ np.uint8(in_string)
        in_string = int(string_mask[-1])
        outside = string_mask == 0
        values += int(np.count_nonzero(np.isin(block, marks) & outside))
        names += int(np.count_nonzero((block == ord(":")) & outside))
        if values > most or names > most_names:
            break
    return JsonCounts(values, names)


def quotes_of(data: bytes | bytearray) -> NDArray[np.int64]:
    """Return the places of the quotes that begin and end the strings of a JSON text; 8 bytes for each."""
    places = [start + np.flatnonzero(quotes) for start, _, quotes in _blocks(data)]
    return np.concatenate([np.empty(0, np.int64), *places])


def _blocks(data: bytes | bytearray) -> Iterator[tuple[int, NDArray[np.uint8], NDArray[Any]]]:
    """Yield the blocks of a text: where each begins, its bytes, and which of these are quotes without a backslash."""
    escaped = False
    for start in range(0, len(data), BLOCK):
        block = np.frombuffer(data, np.uint8, min(BLOCK, len(data) - start), start)
        quotes = block == ord('"')
        slashes = block == ord("\\")
        if escaped or slashes.any():
            positions = np.arange(len(block))
            # positions of the last byte other than a backslash, at each byte
            last_other = np.maximum.accumulate(np.where(slashes, -1 - escaped, positions))
            odd = ((positions - last_other) & 1).astype(bool)  # True where an odd number of backslashes ends
            quotes[1:] &= ~odd[:-1]
            quotes[0] &= not escaped
            escaped = bool(odd[-1])
        yield start, block, quotes
