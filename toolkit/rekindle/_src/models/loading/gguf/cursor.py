"""Reads the numbers and strings of a GGUF header in order, and believes none of its counts.

The file is read piece by piece as far as the header goes. Every count is compared with the bytes that are left in the
file before anything is allocated for it, and an error names the key or tensor that was being read.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np

from rekindle.errors import CheckpointError

MAX_HEADER = 256 << 20  # bytes; a vocabulary of 256,000 tokens with its merges takes some 15 MB
MAX_TEXTS = 1 << 22  # strings of one array
_STEP = 4 << 20
_LENGTH = struct.Struct("<Q")


class Texts(Sequence[str]):
    """An array of strings, decoded when they are asked for."""

    def __init__(self, content: bytes, ends: Sequence[int]) -> None:
        self._content = content  # of the array: a length of 8 bytes before each string
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return list(self)[index]
        index = range(len(self))[index]
        start = (self._ends[index - 1] if index else 0) + 8
        return self._content[start : self._ends[index]].decode()

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self._ends:
            yield self._content[start + 8 : end].decode()
            start = end


class Cursor:
    """A position in the header of a file. `reading` says in errors what is being read there."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.position, self.reading = path, 0, "its header"
        self.size = os.fstat(file.fileno()).st_size
        self._file, self._buffer = file, bytearray()

    @property
    def left(self) -> int:
        """The bytes of the file behind the position."""
        return self.size - self.position

    @property
    def seen(self) -> bytes:
        """The header up to the position."""
        return bytes(self._buffer[: self.position])

    def broken(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is truncated or corrupt: {self.reading}: {problem}. Download or copy it again."
        )

    def skip(self, count: int) -> int:
        """Passes over bytes, which are in the buffer then; returns where they begin."""
        start = self.position
        if count > self.left:
            raise self.broken(f"needs {_amount(count)} bytes, and {self.left:,} are left in the file")
        self._fill(start + count)
        self.position += count
        return start

    def number(self, form: str) -> Any:
        """A number of one of `struct`'s forms, such as "Q"."""
        start = self.skip(struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{form}", self._buffer, start)[0]

    def count(self, least: int, what: str, most: int = 1 << 62) -> int:
        """How many of something follow, each of which takes at least so many bytes."""
        found = int(self.number("Q"))
        if found > min(most, self.left // least):
            raise self.broken(f"{_amount(found)} {what} don't fit into the {self.left:,} bytes that are left")
        return found

    def text(self, most: int = MAX_HEADER) -> str:
        """A string. Raises `CheckpointError` if it is longer than `most` bytes, or not UTF-8."""
        length = self.count(1, "bytes of a string", most)
        start = self.skip(length)
        try:
            return self._buffer[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.broken(f"is not UTF-8 ({error.reason})") from None

    def texts(self) -> Texts:
        """An array of strings, after its count."""
        count = self.count(8, "strings", MAX_TEXTS)
        start = position = self.position
        ends = list[int]()
        unpack, size, filled = _LENGTH.unpack_from, self.size, len(self._buffer)
        for _ in range(count):  # some 300,000 times: no calls but for what is needed
            if position + 8 > filled:
                filled = self._fill(position + 8)
            length = unpack(self._buffer, position)[0]
            position += 8 + length
            if position > size:
                raise self.broken(f"string {len(ends):,} needs {_amount(length)} bytes, more than the file has")
            ends.append(position - start)
        self._fill(position)
        self.position = position
        content = bytes(self._buffer[start:position])
        try:
            content.decode(errors="strict") if content.isascii() else _check(content, ends)
        except UnicodeDecodeError as error:
            raise self.broken(f"holds a string that is not UTF-8 ({error.reason})") from None
        return Texts(content, ends)

    def numbers(self, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """An array of numbers, after its count."""
        count = self.count(dtype.itemsize, "numbers")
        start = self.skip(count * dtype.itemsize)
        return np.frombuffer(bytes(self._buffer[start : self.position]), dtype)

    def _fill(self, wanted: int) -> int:
        """Reads until so many bytes are in the buffer; returns how many are."""
        while len(self._buffer) < wanted:
            if wanted > MAX_HEADER:
                raise self.broken(f"the header is longer than the {MAX_HEADER >> 20} MiB that are read")
            found = self._file.read(max(_STEP, wanted - len(self._buffer)))
            if not found:
                raise self.broken(f"the file ends after {len(self._buffer):,} bytes")
            self._buffer += found
        return len(self._buffer)


def _check(content: bytes, ends: Sequence[int]) -> None:
    """Raises `UnicodeDecodeError` for the first string that is not UTF-8."""
    start = 0
    for end in ends:
        content[start + 8 : end].decode()
        start = end


def _amount(count: int) -> str:
    return f"{count:,}" if count < 1 << 50 else f"{count:.2e}"
