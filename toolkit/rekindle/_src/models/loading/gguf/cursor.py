"""A reader of the numbers and strings of a GGUF header, in order, which trusts none of its counts.

The file is read piece by piece as far as the header goes. Every count is compared with the bytes that are left in the
file before anything is allocated for it, and an error names the key or tensor that was being read.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import CheckpointError

MAX_HEADER = 256 << 20  # bytes; a vocabulary of 256,000 tokens with its merges takes some 15 MB
MAX_TEXTS = 1 << 22  # strings of one array
_STEP = 4 << 20
_LENGTH = struct.Struct("<Q")
_WINDOW = 1 << 20  # bytes that are searched for strings at once


class Texts(Sequence[str]):
    """An array of strings, decoded when they are read."""

    def __init__(self, content: bytes, starts: NDArray[np.int32], ends: NDArray[np.int32]) -> None:
        self.content = content  # of the array: a length of 8 bytes before each string
        self.starts, self.ends = starts, ends  # of the strings in it

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return list(self)[index]
        return self.content[self.starts[index] : self.ends[index]].decode()

    def __iter__(self) -> Iterator[str]:
        content = self.content
        for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True):
            yield content[start:end].decode()

    def equal_to(self, strings: Iterable[str], among: NDArray[np.int64]) -> list[int]:
        """Return the indices of `among` whose string is one of `strings`, ascending, without decoding any."""
        octets, lengths, matches = np.frombuffer(self.content, np.uint8), self.ends - self.starts, list[int]()
        for encoded in {string.encode() for string in strings}:
            left = among[lengths[among] == len(encoded)]
            for at, octet in enumerate(encoded):
                left = left[octets[self.starts[left] + at] == octet]
            matches += left.tolist()
        return sorted(matches)


class Cursor:
    """A position in the header of a file. `reading` names in errors what is being read there."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.position, self.reading = path, 0, "its header"
        self.size = os.fstat(file.fileno()).st_size
        self._file, self._buffer = file, bytearray()

    @property
    def left(self) -> int:
        """The bytes of the file behind the position."""
        return self.size - self.position

    def digest(self) -> bytes:
        """Return a digest of the header up to the position."""
        with memoryview(self._buffer) as view:
            return hashlib.blake2b(view[: self.position]).digest()

    def broken(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is truncated or corrupt: {self.reading}: {problem}. Download or copy it again."
        )

    def skip(self, count: int) -> int:
        """Pass over bytes, which are in the buffer then; return where they begin."""
        start = self.position
        if count > self.left:
            raise self.broken(f"needs {_amount(count)} bytes, and {self.left:,} are left in the file")
        self._fill(start + count)
        self.position += count
        return start

    def number(self, form: str) -> Any:
        """Return a number of one of `struct`'s forms, such as "Q"."""
        start = self.skip(struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{form}", self._buffer, start)[0]

    def count(self, least: int, what: str, most: int = 1 << 62) -> int:
        """Read a count of items, each of at least `least` bytes. Raise `CheckpointError` if they can't fit."""
        items = int(self.number("Q"))
        if items > min(most, self.left // least):
            raise self.broken(f"{_amount(items)} {what} don't fit into the {self.left:,} bytes that are left")
        return items

    def text(self, most: int = MAX_HEADER) -> str:
        """Return a string. Raise `CheckpointError` if it is longer than `most` bytes, or not UTF-8."""
        length = self.count(1, "bytes of a string", most)
        start = self.skip(length)
        try:
            return self._buffer[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.broken(f"is not UTF-8 ({error.reason})") from None

    def texts(self) -> Texts:
        """Read a count and an array of strings."""
        count = self.count(8, "strings", MAX_TEXTS)
        first, pieces, left, batch = self.position, [np.empty(0, np.int64)], count, 256
        while left:
            pieces.append(self._seen(left))
            left -= len(pieces[-1])
            if left and self.left >= 8 and len(pieces[-1]) < 1024:  # the search stopped where only lengths lead on
                pieces.append(self._followed(min(left, batch), count - left))
                left, batch = left - len(pieces[-1]), batch * 2
            elif not len(pieces[-1]):
                raise self.broken(f"string {count - left:,} needs 8 bytes, and {self.left:,} are left in the file")
        starts = (np.concatenate(pieces) - first).astype(np.int32)
        content = bytes(self._buffer[first : self.position])
        ends = np.append(starts[1:] - 8, np.int32(len(content)))[: len(starts)]
        try:
            if not content.isascii():  # lengths count as ASCII: no character spans one
                bare, lengths = bytearray(content), ends - starts
                for start in starts[lengths >= 128].tolist():
                    bare[start - 8 : start] = bytes(8)
                bare.decode()
        except UnicodeDecodeError as error:
            raise self.broken(f"holds a string that is not UTF-8 ({error.reason})") from None
        return Texts(content, starts, ends)

    def _seen(self, most: int) -> NDArray[np.int64]:
        """Pass over strings, at most `most`, that one search finds; return where they begin.

        Each begins behind the zeros of its length, and the lengths have to lead from one to the next: an empty string,
        or one with zeros in it, ends the search.
        """
        first = self.position
        window = np.frombuffer(self._buffer, np.uint8, min(_WINDOW, self._fill_some(_WINDOW)), first)
        two = window[:-1] | window[1:]
        four = two[:-2] | two[2:]
        zeros = np.flatnonzero((four[:-2] | two[4:]) == 0)  # each the first of six
        starts = (zeros[np.diff(zeros, append=zeros[-1:] + 2) > 1] + 6)[:most]
        starts = starts[starts < len(window)]
        if not len(starts) or starts[0] != 8:
            return np.empty(0, np.int64)
        lengths = np.ndarray((len(window) - 7,), "<u8", window, strides=(1,))[starts - 8]
        del window
        leads = starts[:-1] + lengths[:-1].astype(np.int64) + 8 == starts[1:]
        count = len(starts) if leads.all() else int(np.argmin(leads)) + 1
        last = first + int(starts[count - 1])
        if int(lengths[count - 1]) > self.size - last:
            count -= 1  # `_followed`, which takes it next, raises its error
            if not count:
                return np.empty(0, np.int64)
            last = first + int(starts[count - 1])
        self.position = last
        self.skip(int(lengths[count - 1]))
        return first + starts[:count]

    def _followed(self, count: int, number: int) -> NDArray[np.int64]:
        """Pass over `count` strings, from this one on, by the length of each; return where they begin."""
        position, filled, starts = self.position, len(self._buffer), list[int]()
        for _ in range(count):  # only calls that are needed
            if position + 8 > filled:
                filled = self._fill(position + 8)
            length = _LENGTH.unpack_from(self._buffer, position)[0]
            starts.append(position + 8)
            position += 8 + length
            if position > self.size:
                where = number + len(starts) - 1
                raise self.broken(f"string {where:,} needs {_amount(length)} bytes, more than the file has")
        self._fill(position)
        self.position = position
        return np.array(starts, np.int64)

    def numbers(self, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Read a count and an array of numbers."""
        count = self.count(dtype.itemsize, "numbers")
        start = self.skip(count * dtype.itemsize)
        return np.frombuffer(bytes(self._buffer[start : self.position]), dtype)

    def _fill_some(self, most: int) -> int:
        """Read `most` bytes from the position on, or the rest of the file; return how many are there."""
        return self._fill(min(self.position + most, self.size)) - self.position

    def _fill(self, wanted: int) -> int:
        """Read until `wanted` bytes are in the buffer; return how many are there."""
        while len(self._buffer) < wanted:
            if wanted > MAX_HEADER:
                raise self.broken(f"the header is longer than the {MAX_HEADER >> 20} MiB that are read")
            data = self._file.read(max(_STEP, wanted - len(self._buffer)))
            if not data:
                raise self.broken(f"the file ends after {len(self._buffer):,} bytes")
            self._buffer += data
        return len(self._buffer)


def _amount(count: int) -> str:
    return f"{count:,}" if count < 1 << 50 else f"{count:.2e}"
