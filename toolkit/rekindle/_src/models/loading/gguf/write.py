"""A writer of GGUF files: metadata, the table of tensors, and the tensors, one piece at a time."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading.gguf.block_types import NUMBERS, BlockType
from rekindle._src.models.loading.gguf.header import ALIGNMENT, MAGIC

VERSION = 3


class Outgoing(NamedTuple):
    """A tensor to write: its place in the table."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) // self.kind.values * self.kind.layout.itemsize


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Sequence[Outgoing], pieces: Iterable[NDArray[Any]]
) -> None:
    """Write a file. `pieces` are the tensors' blocks in the order of `tensors`, in any number of pieces for each.

    Values of the metadata are bool, int (32 bits, unsigned unless negative), float (32 bits), str, lists of one of
    these (integers signed), or numpy arrays of numbers.
    """
    header = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        header += _text(key) + _value(value)
    offset = 0
    for tensor in tensors:
        header += _text(tensor.name) + struct.pack("<I", len(tensor.shape))
        header += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape[::-1])
        header += struct.pack("<IQ", NUMBERS[tensor.kind.name], offset)
        offset += _padded(tensor.nbytes)
    header += bytes(-len(header) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(header)
        _write_tensors(file, tensors, iter(pieces))


def _write_tensors(file: BinaryIO, tensors: Sequence[Outgoing], pieces: Any) -> None:
    for tensor in tensors:
        remaining = tensor.nbytes
        while remaining > 0:
            piece = next(pieces)
            file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            remaining -= piece.nbytes
        assert remaining == 0, f"{tensor.name}: pieces are {-remaining} bytes too long"
        file.write(bytes(_padded(tensor.nbytes) - tensor.nbytes))


def _padded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        number = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "u8": 10, "i8": 11, "f8": 12}[
            f"{value.dtype.kind}{value.dtype.itemsize}"
        ]
        return struct.pack("<IIQ", 9, number, value.size) + value.astype(value.dtype.newbyteorder("<")).tobytes()
    if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
        return _value(np.asarray(value, np.int32))  # llama.cpp takes the kinds of tokens in no other type
    if isinstance(value, (list, tuple)):
        kind, _ = _single(value[0] if value else "")
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(_single(item)[1] for item in value)
    kind, data = _single(value)
    return struct.pack("<I", kind) + data


def _single(value: Any) -> tuple[int, bytes]:
    """Return the number of a value's type, and its bytes."""
    if isinstance(value, bool):
        return 7, struct.pack("<B", value)
    if isinstance(value, int):
        if not -(1 << 31) <= value < 1 << 32:
            return (11, struct.pack("<q", value)) if value < 0 else (10, struct.pack("<Q", value))
        return (5, struct.pack("<i", value)) if value < 0 else (4, struct.pack("<I", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    return 8, _text(value)
