"""The metadata of a GGUF file: typed values by key, and errors that name the key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rekindle._src.models.loading.gguf.cursor import Cursor, Texts
from rekindle.errors import CheckpointError

Value = int | float | bool | str | Texts | np.ndarray[Any, Any]
MAX_KEY = 1 << 16  # bytes; the format's own limit
_MISSING: Any = object()
# The numbers that stand for the types of values: struct's letter and numpy's dtype.
_NUMBERS = {
    0: ("B", "u1"), 1: ("b", "i1"), 2: ("H", "<u2"), 3: ("h", "<i2"), 4: ("I", "<u4"), 5: ("i", "<i4"),
    6: ("f", "<f4"), 10: ("Q", "<u8"), 11: ("q", "<i8"), 12: ("d", "<f8"),
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9


class Metadata(Mapping[str, Value]):
    """The values of a file by their keys. Floats of 32 bits are the shortest decimals that they stand for."""

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self.path = path
        self._values = dict(values)

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def integer(self, key: str, default: Any = _MISSING) -> Any:
        """Return a whole number, or `default` if the key is absent. Raise `CheckpointError` if there is no default."""
        return self._of(key, "a whole number", default, lambda value: type(value) is int)

    def number(self, key: str, default: Any = _MISSING) -> Any:
        """Return a number, as a float."""
        value = self._of(key, "a number", default, lambda value: type(value) in (int, float))
        return float(value) if isinstance(value, int) else value

    def flag(self, key: str, default: Any = _MISSING) -> Any:
        """Return True or False."""
        return self._of(key, "true or false", default, lambda value: type(value) is bool)

    def text(self, key: str, default: Any = _MISSING) -> Any:
        """Return a string."""
        return self._of(key, "a string", default, lambda value: isinstance(value, str))

    def texts(self, key: str, default: Any = _MISSING) -> Any:
        """Return an array of strings."""
        return self._of(key, "an array of strings", default, lambda value: isinstance(value, Texts))

    def numbers(self, key: str, default: Any = _MISSING) -> Any:
        """Return an array of numbers."""
        return self._of(key, "an array of numbers", default, lambda value: isinstance(value, np.ndarray))

    def _of(self, key: str, kind: str, default: Any, fits: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            if default is _MISSING:
                raise CheckpointError(
                    f"{self.path} has no {key} in its metadata ({kind}). Download it again, or convert it anew."
                )
            return default
        if not fits(value):
            shown = repr(value) if isinstance(value, (int, float, bool)) else f"a {type(value).__name__}"
            raise CheckpointError(f"{self.path}: {key} is {shown[:80]}, not {kind}. Download it again.")
        return value


def read_metadata(cursor: Cursor, count: int) -> Metadata:
    """Read `count` keys and values."""
    values = dict[str, Value]()
    for number in range(count):
        cursor.reading = f"key {number + 1:,} of its metadata"
        key = cursor.text(MAX_KEY)
        cursor.reading = f"the metadata's {key[:100]!r}"
        if key in values:
            raise cursor.broken("is there twice")
        values[key] = _value(cursor, cursor.number("I"))
    return Metadata(cursor.path, values)


def _value(cursor: Cursor, kind: int) -> Value:
    if kind in _NUMBERS:
        number = cursor.number(_NUMBERS[kind][0])
        return float(str(np.float32(number))) if kind == 6 else number
    if kind == _BOOL:
        return bool(cursor.number("B"))
    if kind == _STRING:
        return cursor.text()
    if kind != _ARRAY:
        raise cursor.broken(f"has a type of value that the format does not know ({kind})")
    inner = cursor.number("I")
    if inner in _NUMBERS:
        return cursor.numbers(np.dtype(_NUMBERS[inner][1]))
    if inner == _BOOL:
        return cursor.numbers(np.dtype(np.uint8)) != 0
    if inner == _STRING:
        return cursor.texts()
    raise cursor.broken(f"is an array of arrays or of an unknown type ({inner}), which is not read")
