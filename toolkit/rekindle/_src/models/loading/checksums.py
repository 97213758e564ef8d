"""Checksums of kept weights: flipped bits, zeroed and exchanged blocks are detected at the speed of memory.

They are no protection against intent. A tensor's checksum is a sum of its 64-bit words, in which every block of 256 KiB
has a weight of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading.tensor_files import TensorEntry

PIECE = 8 << 20  # bytes that are read and summed at a time: whole blocks
_BLOCK = 1 << 15  # words


def of_array(array: NDArray[Any]) -> str:
    """Return the checksum of an array that lies in one piece."""
    return of_pieces(array.nbytes, [array.reshape(-1).view(np.uint8)])


def of_pieces(size: int, pieces: Iterable[NDArray[np.uint8]]) -> str:
    """Return the checksum of `size` bytes in pieces; all of them but the last one are whole numbers of blocks."""
    total, index, tail = np.uint64(size), 0, 0
    with np.errstate(over="ignore"):
        for flat in pieces:
            words = flat[: flat.size // 8 * 8].view(np.uint64)
            for start in range(0, words.size, _BLOCK):
                block = words[start : start + _BLOCK]
                total += np.add.reduce(block) * np.uint64(2 * index + 1)
                index += 1
            tail = int.from_bytes(flat[words.nbytes :].tobytes(), "little")
    return f"{int(total):016x}{tail:x}"


def of_file(entries: Sequence[TensorEntry], content: NDArray[np.uint8]) -> dict[str, str]:
    """Return the checksums of all tensors in a file's `content`, by name.

    One call of numpy's adds up all that lies on whole words, and leaves the GIL meanwhile. A call for each block would
    wait for the GIL a thousand times while another thread imports JAX.
    """
    result = dict[str, str]()
    joined = _joined(entries)
    if joined:
        blocks = [range(entry.offset // 8, (entry.offset + entry.nbytes) // 8, _BLOCK) for entry in joined]
        firsts = np.cumsum([0, *map(len, blocks)])[:-1]
        weights = np.concatenate([np.arange(1, 2 * len(starts), 2) for starts in blocks]).astype(np.uint64)
        words = content[: joined[-1].offset + joined[-1].nbytes].view(np.uint64)
        sums = np.add.reduceat(words, np.concatenate(blocks)) * weights
        totals = np.add.reduceat(sums, firsts) + np.array([entry.nbytes for entry in joined], np.uint64)
        result = {entry.name: f"{int(total):016x}0" for entry, total in zip(joined, totals, strict=True)}
    others = (entry for entry in entries if entry.name not in result)
    return result | {entry.name: of_array(content[entry.offset : entry.offset + entry.nbytes]) for entry in others}


def _joined(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Return the tensors that lie side by side from the first one on, in whole words of the file."""
    adjacent = list[TensorEntry]()
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.offset % 8 or entry.nbytes % 8 or not entry.nbytes:
            continue
        if adjacent and entry.offset != adjacent[-1].offset + adjacent[-1].nbytes:
            break
        adjacent.append(entry)
    return adjacent
