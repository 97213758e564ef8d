"""The number of values of a JSON text, counted before it is parsed: a value takes some 100 bytes, however short it is.

Python's parser holds the interpreter's lock throughout; NumPy, which counts here, releases it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MARKS = (b",", b":", b"[", b"{")  # each stands before or after a value
BYTES_PER_VALUE = 100  # of a parsed one, at most, without its characters
BLOCK = 1 << 20
LONG_STRING = 1 << 18  # bytes from which on a string is taken out of a text before it is parsed


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


class TooMuchJson(ValueError):
    """A text has more values, or more characters outside of long strings, than are parsed."""


def parse_with_long_strings(data: bytes, *, most_values: int, most_text: int) -> object:
    """Return the value of a JSON text with long strings of ASCII, such as pictures in base64.

    They are taken out before the parser, which holds the interpreter's lock, sees the text. Raise `TooMuchJson` for
    more than `most_values` values, or more than `most_text` bytes without them; ValueError for no JSON.
    """
    taken = dict[str, str]()
    if len(data) > LONG_STRING:
        data = _without_long_strings(data, most_values, taken)
    if len(data) > most_text:
        raise TooMuchJson(f"has {len(data):,} bytes of text; at most {most_text:,} are read")
    if count_values(data, most_values, most_values).values > most_values:
        raise TooMuchJson(f"has more than {most_values:,} values")
    value = json.loads(data.decode("utf-8-sig"))  # bytes in UTF-16 would be other values than were counted
    return _restored(value, taken) if taken else value


def _without_long_strings(data: bytes, most_values: int, taken: dict[str, str]) -> bytes:
    """Return a text with names in the place of long strings, which are added to `taken` by name."""
    if sum(data.count(b'"', at, at + BLOCK) for at in range(0, len(data), BLOCK)) > 4 * most_values:
        raise TooMuchJson(f"has more than {most_values:,} values")
    quotes = quotes_of(data)
    starts, stops = quotes[0 : len(quotes) // 2 * 2 : 2], quotes[1::2]
    parts, at, name = list[bytes](), 0, secrets.token_hex(16)  # no text has it by chance or on purpose
    for index in np.flatnonzero(stops - starts > LONG_STRING).tolist():
        start, stop = int(starts[index]) + 1, int(stops[index])
        content = data[start:stop]
        if content.isascii() and b"\\" not in content:
            key = f"{name} {index}"
            taken[key] = content.decode("ascii")
            parts += [data[at:start], key.encode()]
            at = stop
    return b"".join([*parts, data[at:]]) if taken else data


def _restored(value: Any, taken: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return taken.get(value, value)
    if isinstance(value, list):
        return [_restored(one, taken) for one in value]
    if isinstance(value, dict):
        return {taken.get(name, name): _restored(one, taken) for name, one in value.items()}
    return value
