"""Parts of messages: integers in the fewest bytes that hold them, and arrays that are mostly one value."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import ProcessLost

Ints = NDArray[np.int32]
_HEAD = struct.Struct("<BI")
_TYPES = (np.dtype("<u1"), np.dtype("<u2"), np.dtype("<i4"))


def packed(values: NDArray[np.integer]) -> bytes:
    """Encode integers with their count and width."""
    flat = values.reshape(-1)
    low, high = (int(flat.min()), int(flat.max())) if flat.size else (0, 0)
    number = 2 if low < 0 or high > 0xFFFF else int(high > 0xFF)
    return _HEAD.pack(number, flat.size) + flat.astype(_TYPES[number]).tobytes()


class Reader:
    """Reads a message part by part; raises ProcessLost where one is missing or longer than its place."""

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    @property
    def at(self) -> int:
        """Number of bytes that were read."""
        return self._at

    def take(self, count: int) -> bytes:
        """Read the next `count` bytes."""
        if count > len(self._content) - self._at:
            raise ProcessLost(f"a message ends after {len(self._content)} bytes, within a part of {count}")
        self._at += count
        return self._content[self._at - count : self._at]

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        """Read the next numbers of a fixed form."""
        return form.unpack(self.take(form.size))

    def ints(self, most: int, below: int | None = None) -> Ints:
        """Read the next integers: at most `most`, and with `below` in [0, below)."""
        number, count = self.unpack(_HEAD)
        if number >= len(_TYPES) or count > most:
            raise ProcessLost(f"a message has {count} integers of width {number} where at most {most} belong")
        values = np.frombuffer(self.take(count * _TYPES[number].itemsize), _TYPES[number]).astype(np.int32)
        if below is not None and count and not (values.min() >= 0 and values.max() < below):
            raise ProcessLost(
                f"a message has integers from {values.min()} to {values.max()}, they have to be below {below}"
            )
        return values

    def zipped(self, dtype: np.dtype[np.generic] | type[np.generic], shape: tuple[int, ...]) -> NDArray[np.generic]:
        """Read an array of this form that `zipped` has encoded."""
        (length,) = self.unpack(_LENGTH)
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        reader = zlib.decompressobj()
        try:
            content = reader.decompress(self.take(length), size)
        except zlib.error as error:
            raise ProcessLost(f"a message can't be read: {error}") from None
        if len(content) != size or reader.unconsumed_tail:
            raise ProcessLost(f"a message has other than the {size:,} bytes of {np.dtype(dtype)}{list(shape)}")
        return np.frombuffer(content, dtype).reshape(shape).copy()

    def end(self) -> None:
        """Raise ProcessLost if anything is left."""
        if self._at != len(self._content):
            raise ProcessLost(f"a message has {len(self._content) - self._at} bytes too many")


_LENGTH = struct.Struct("<I")


def zipped(array: NDArray[np.generic]) -> bytes:
    """Encode an array that is mostly one value."""
    content = zlib.compress(np.ascontiguousarray(array).tobytes(), 1)
    return _LENGTH.pack(len(content)) + content
