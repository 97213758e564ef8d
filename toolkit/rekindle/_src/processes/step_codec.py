"""The buffers of a step as a short message, without the state that both sides share.

Both sides keep for every slot the page table, the length, the flags and the options of its request. The message of
decode rows names their slots; lengths grow by one, and tokens are on the device. Of the page tables only added pages
are sent, so the size does not depend on the length of contexts. A buffer of 256 rows of 8,192 tokens has
280 KB, its message 0.9.

Axes: N rows of the program, U of them in use, W pages of a sequence.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.processes.numbers import Ints, Reader, packed, zipped
from rekindle._src.programs.packing import NEUTRAL, Layout, sections
from rekindle.errors import ProcessLost

_HEAD = struct.Struct("<HHB")  # decode rows, prefills, whether targets follow
_ON_DEVICE = -1  # in place of a decode row's token


class _Change(NamedTuple):
    """The changes of a step to the known state of the slots."""

    slots: Ints  # [U]
    lengths: Ints  # [U]
    flags: Ints  # [U]
    renewed: Ints  # slots whose options have changed
    constants: Ints  # of the renewed slots
    floats: NDArray[np.float32]
    rows: Ints  # of each page that is new in a table: the row of U, where in the table, and the page
    columns: Ints
    pages: Ints


class StepCodec:
    """One side of a session's steps. Messages are decoded in the order in which the other side has encoded them."""

    def __init__(self, slots: int, width: int, page_size: int) -> None:
        """Set up for `slots`, not counting the scratch slot; `width` is the most pages of a sequence."""
        self._page_size = page_size
        self._tables = np.zeros((slots + 1, width), np.int32)
        self._constants = np.zeros((slots + 1, 4), np.int32)
        self._floats = np.tile(NEUTRAL, (slots + 1, 1))
        self._lengths, self._flags = np.zeros(slots + 1, np.int32), np.zeros(slots + 1, np.int32)

    def encode(self, layout: Layout, ints: Ints, floats: NDArray[np.float32]) -> bytes:
        """Encode a packed upload."""
        parts = sections(layout, ints)
        lengths = parts.varying[:, 1]
        decode, prefills = (int(np.count_nonzero(part)) for part in (lengths[: layout.rows], lengths[layout.rows :]))
        used = np.r_[:decode, layout.rows : layout.rows + prefills]
        slots, lengths, tokens, flags = np.ascontiguousarray(parts.varying[used].T)
        chunks = np.diff(parts.offsets[: prefills + 1])
        prompt = parts.tokens[: int(parts.offsets[prefills])]
        constants, options = parts.constant[used], floats.reshape(layout.sequences, -1)[used]
        stale = (constants != self._constants[slots]).any(axis=1) | (options != self._floats[slots]).any(axis=1)
        renewed, first = np.unique(slots[stale], return_index=True)
        counts = -(-lengths // self._page_size)
        width = int(counts.max(initial=0))
        table = parts.table[used, :width]
        new = (table != self._tables[slots, :width]) & (np.arange(width) < counts[:, None])
        rows, columns = (at.astype(np.int32) for at in np.nonzero(new))
        change = _Change(
            slots, lengths, flags, renewed, constants[stale][first], options[stale][first], rows, columns,
            table[rows, columns],
        )  # fmt: skip
        aims = bool(layout.tokens) and bool((parts.targets != -1).any())
        message = [
            _HEAD.pack(decode, prefills, aims),
            packed(slots),
            *_exceptions(lengths, self._expected(slots)),
            *_exceptions(flags, self._flags[slots]),
            *_exceptions(tokens[:decode], np.full(decode, _ON_DEVICE, np.int32)),
            packed(renewed),
            np.ascontiguousarray(change.constants, "<i4").tobytes(),
            np.ascontiguousarray(change.floats, "<f4").tobytes(),
            packed(rows),
            packed(columns),
            packed(change.pages),
            packed(chunks),
            packed(prompt),
            zipped(parts.targets.astype("<i4")) if aims else b"",
        ]
        self._apply(change)
        return b"".join(message)

    def decode(self, layout: Layout, message: bytes) -> tuple[Ints, NDArray[np.float32]]:
        """Decode a message into new buffers. Raises ProcessLost if it doesn't fit the layout."""
        reader = Reader(message)
        decode, prefills, aims = reader.unpack(_HEAD)
        if decode > layout.rows or prefills > layout.prefills:
            raise ProcessLost(f"a step has {decode} rows and {prefills} prefills, more than its program")
        count, scratch, width = decode + prefills, len(self._tables) - 1, self._tables.shape[1]
        slots = reader.ints(count, scratch)
        _check_count(len(slots), count)
        lengths = _with_exceptions(reader, self._expected(slots))
        if count and not (lengths.min() > 0 and lengths.max() <= width * self._page_size):
            raise ProcessLost(f"a step has lengths from {lengths.min()} to {lengths.max()}")
        flags = _with_exceptions(reader, self._flags[slots])
        tokens = _with_exceptions(reader, np.full(decode, _ON_DEVICE, np.int32))
        renewed = reader.ints(count, scratch)
        constants = np.frombuffer(reader.take(16 * len(renewed)), "<i4").reshape(-1, 4)
        options = np.frombuffer(reader.take(24 * len(renewed)), "<f4").reshape(-1, 6)
        rows = reader.ints(count * width, count)
        columns, pages = reader.ints(count * width, width), reader.ints(count * width, 2**31 - 1)
        _check_count(len(rows), len(columns))
        _check_count(len(rows), len(pages))
        chunks = reader.ints(prefills)
        _check_count(len(chunks), prefills)
        prompt = reader.ints(layout.tokens)
        _check_count(len(prompt), int(chunks.sum()))
        targets = reader.zipped(np.dtype("<i4"), (layout.tokens,)) if aims else None
        reader.end()
        self._apply(_Change(slots, lengths, flags, renewed, constants, options, rows, columns, pages))
        ints = np.zeros(layout.ints, np.int32)
        parts = sections(layout, ints)
        used = np.r_[:decode, layout.rows : layout.rows + prefills]
        parts.features[0] = np.bitwise_or.reduce(flags, initial=0)
        parts.varying[:, 0] = layout.slots
        first_tokens = prompt[np.cumsum(chunks) - chunks] if prefills else prompt[:0]
        parts.varying[used] = np.stack([slots, lengths, np.concatenate([tokens, first_tokens]), flags], axis=1)
        slots_of_rows = parts.varying[:, 0]
        parts.constant[:] = self._constants[slots_of_rows]
        parts.table[used] = self._tables[slots]
        parts.offsets[1 : prefills + 1] = np.cumsum(chunks)
        parts.offsets[prefills + 1 :] = len(prompt)
        parts.tokens[: len(prompt)] = prompt
        parts.targets[:] = -1 if targets is None else targets
        return ints, self._floats[slots_of_rows].reshape(-1)

    def _expected(self, slots: Ints) -> Ints:
        expected: Ints = self._lengths[slots] + 1
        return expected

    def _apply(self, change: _Change) -> None:
        self._constants[change.renewed], self._floats[change.renewed] = change.constants, change.floats
        self._tables[change.slots[change.rows], change.columns] = change.pages
        self._lengths[change.slots], self._flags[change.slots] = change.lengths, change.flags


def _exceptions(values: Ints, expected: Ints) -> tuple[bytes, bytes]:
    """Encode the positions of values that differ from those expected, and these values."""
    at = np.flatnonzero(values != expected)
    return packed(at), packed(values[at])


def _with_exceptions(reader: Reader, expected: Ints) -> Ints:
    at = reader.ints(len(expected), max(1, len(expected)))
    values = reader.ints(len(expected))
    _check_count(len(at), len(values))
    result = expected.copy()
    result[at] = values
    return result


def _check_count(count: int, expected: int) -> None:
    if count != expected:
        raise ProcessLost(f"a message has {count} values where {expected} belong")
