"""Encoding of program calls as messages. A program has its name in the store; its layout gives the arrays' lengths.

A step is sent without the state that both sides share. Both keep for every slot the page table, the length, the flags
and the options of its request. The message of decode rows names their slots; lengths grow by one, and tokens are on the
device. Of the page tables only added pages are sent, so the size does not depend on the length of contexts. A buffer of
256 rows of 8,192 tokens has 280 KB, its message 0.9.

Axes: N rows of the program, U of them in use, W pages of a sequence.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.records import Mask, mask_words
from rekindle._src.kvcache.digest import DIGEST_SIZE
from rekindle._src.kvcache.persist.segment import Page, decode, encode, pages_of, records_of
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import FEW, Bucket, Key, StepSpan
from rekindle._src.programs.features import PLAIN, Features
from rekindle._src.programs.host_pages import PageParts, PayloadLayout
from rekindle._src.programs.packing import Layout, columns_of, sections
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.request_state import NOWHERE, admission_sizes
from rekindle._src.programs.row_option import RowFlag
from rekindle.errors import ProcessLost, StoreError

Ints = NDArray[np.int32]
_NAME, _COUNT = struct.Struct("<B"), struct.Struct("<I")
_HEAD = struct.Struct("<BI")
_TYPES = (np.dtype("<u1"), np.dtype("<u2"), np.dtype("<i4"))
_LENGTH = struct.Struct("<I")
DONE = struct.Struct("<QI")  # the number of the step, and the checksum
_SAMPLES = int(RowFlag.SAMPLES)


def packed(values: NDArray[np.integer]) -> bytes:
    """Encode integers with their count and width."""
    flat = values.reshape(-1)
    low, high = (int(flat.min()), int(flat.max())) if flat.size else (0, 0)
    number = 2 if low < 0 or high > 0xFFFF else int(high > 0xFF)
    return _HEAD.pack(number, flat.size) + flat.astype(_TYPES[number]).tobytes()


def zipped(array: NDArray[np.generic]) -> bytes:
    """Encode an array that is mostly one value."""
    content = zlib.compress(np.ascontiguousarray(array).tobytes(), 1)
    return _LENGTH.pack(len(content)) + content


class MessageReader:
    """Reads a message part by part; raises ProcessLost where one is missing or longer than its place."""

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    @property
    def at(self) -> int:
        return self._at

    def take(self, count: int) -> bytes:
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
            bounds = f"from {values.min()} to {values.max()}"
            raise ProcessLost(f"a message has integers {bounds}, they have to be below {below}")
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


_STEP = struct.Struct("<HHB")  # decode rows, prefills, and 1 if integers for each token follow
_ON_DEVICE = -1  # in place of a decode row's token


class _Change(NamedTuple):
    """The changes of a step to the known state of the slots."""

    slots: Ints  # [U]
    lengths: Ints  # [U]
    flags: Ints  # [U]
    renewed: Ints  # slots with changed options
    constants: Ints  # of the renewed slots
    floats: NDArray[np.float32]
    rows: Ints  # of each page that is new in a table: the row of U, where in the table, and the page
    columns: Ints
    pages: Ints


class StepCodec:
    """One side of a session's steps. Messages are decoded in the order of their encoding."""

    def __init__(self, slots: int, width: int, page_size: int, features: Features = PLAIN) -> None:
        """Set up for `slots`, not counting the scratch slot; `width` is the most pages of a sequence."""
        self._page_size = page_size
        self._tables = np.zeros((slots + 1, width), np.int32)
        ints, neutral = columns_of(features)
        self._constants = np.zeros((slots + 1, ints), np.int32)
        self._floats = np.tile(neutral, (slots + 1, 1))
        self._lengths, self._flags = np.zeros(slots + 1, np.int32), np.zeros(slots + 1, np.int32)

    def encode(self, layout: Layout, ints: Ints, floats: NDArray[np.float32]) -> bytes:
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
        aims = bool(layout.tokens) and bool((parts.extra != -1).any())
        message = [
            _STEP.pack(decode, prefills, aims),
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
            zipped(parts.extra.astype("<i4")) if aims else b"",
            zipped(parts.row_extra.astype("<i4")) if parts.row_extra.size else b"",
        ]
        self._apply(change)
        return b"".join(message)

    def decode(self, layout: Layout, message: bytes) -> tuple[Ints, NDArray[np.float32]]:
        """Decode a message into new buffers. Raises ProcessLost if it doesn't fit the layout."""
        reader, ints = MessageReader(message), np.zeros(layout.ints, np.int32)
        parts = sections(layout, ints)
        decode, prefills, aims = reader.unpack(_STEP)
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
        shapes = ((len(renewed), table.shape[1]) for table in (self._constants, self._floats))
        constants, options = (
            np.frombuffer(reader.take(4 * rows * columns), kind).reshape(rows, columns)
            for (rows, columns), kind in zip(shapes, ("<i4", "<f4"), strict=True)
        )
        rows = reader.ints(count * width, count)
        columns, pages = reader.ints(count * width, width), reader.ints(count * width, 2**31 - 1)
        _check_count(len(rows), len(columns))
        _check_count(len(rows), len(pages))
        chunks = reader.ints(prefills)
        _check_count(len(chunks), prefills)
        prompt = reader.ints(layout.tokens)
        _check_count(len(prompt), int(chunks.sum()))
        extra = reader.zipped(np.dtype("<i4"), parts.extra.shape) if aims else None
        if parts.row_extra.size:
            parts.row_extra[:] = reader.zipped(np.dtype("<i4"), parts.row_extra.shape)
        reader.end()
        self._apply(_Change(slots, lengths, flags, renewed, constants, options, rows, columns, pages))
        used = np.r_[:decode, layout.rows : layout.rows + prefills]
        parts.any_flags[0] = np.bitwise_or.reduce(flags, initial=0)
        parts.varying[:, 0] = layout.slots
        first_tokens = prompt[np.cumsum(chunks) - chunks] if prefills else prompt[:0]
        parts.varying[used] = np.stack([slots, lengths, np.concatenate([tokens, first_tokens]), flags], axis=1)
        slots_of_rows = parts.varying[:, 0]
        parts.constant[:] = self._constants[slots_of_rows]
        parts.table[used] = self._tables[slots]
        parts.offsets[1 : prefills + 1] = np.cumsum(chunks)
        parts.offsets[prefills + 1 :] = len(prompt)
        parts.tokens[: len(prompt)] = prompt
        parts.extra[:] = -1 if extra is None else extra
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


def _with_exceptions(reader: MessageReader, expected: Ints) -> Ints:
    at = reader.ints(len(expected), max(1, len(expected)))
    values = reader.ints(len(expected))
    _check_count(len(at), len(values))
    result = expected.copy()
    result[at] = values
    return result


def _check_count(count: int, expected: int) -> None:
    if count != expected:
        raise ProcessLost(f"a message has {count} values where {expected} belong")


class StepCall(NamedTuple):
    """A step, or the first half of a guided one."""

    key: Bucket
    ints: np.ndarray
    floats: np.ndarray


class CallCodec:
    """One side of a session's calls. Keeps the state that both sides share, so every message must pass it, in order."""

    def __init__(self, programs: Programs) -> None:
        config, recipes = programs.config, programs.recipes
        self._programs, self._names = programs, {key.name.encode(): key for key in programs.ledger.entries}
        self._steps = StepCodec(config.max_requests, recipes.width, recipes.page_size, programs.features)
        self._ints, self._floats = admission_sizes(recipes.width * recipes.page_size, recipes.features.slots)
        self._words = mask_words(recipes.model.vocab_size)
        self.parts = PageParts.of(recipes.parts, recipes.kv)

    def step(self, key: Bucket, ints: np.ndarray, floats: np.ndarray) -> bytes:
        return _encode_name(key) + self._steps.encode(self._programs.recipes.layout(key), ints, floats)

    def sampling(self, key: Bucket, ints: np.ndarray) -> np.ndarray:
        """Return the rows of a step that choose a token of their own."""
        return sampling(self._programs.recipes.layout(key), ints)

    def read_step(self, content: bytes) -> StepCall:
        key, rest = self._key(content)
        if key.span not in (StepSpan.ALL, StepSpan.FORWARD):
            raise ProcessLost(f"{key.name} begins no step")
        return StepCall(key, *self._steps.decode(self._programs.recipes.layout(key), rest))

    def choose(self, key: Bucket, masks: Mask) -> bytes:
        """Encode the masks of a step; rows that allow every token are left out."""
        rows = np.flatnonzero((masks != -1).any(axis=1))
        return _encode_name(key) + packed(rows) + zipped(masks[rows].astype("<i4", copy=False))

    def read_choose(self, content: bytes) -> tuple[Bucket, Mask]:
        key, rest = self._key(content)
        sequences = self._programs.recipes.layout(key).sequences
        reader = MessageReader(rest)
        rows = reader.ints(sequences, sequences)
        masks = np.full((sequences, self._words), -1, np.int32)
        masks[rows] = reader.zipped(np.dtype("<i4"), (len(rows), self._words))
        reader.end()
        return key, masks

    def admit(self, ints: np.ndarray, floats: np.ndarray) -> bytes:
        used = int(np.flatnonzero(ints != NOWHERE).max(initial=-1)) + 1
        content = zipped(ints[:used].astype("<i4", copy=False)) + zipped(floats.astype("<f4", copy=False))
        return _COUNT.pack(used) + content

    def read_admit(self, content: bytes) -> tuple[np.ndarray, np.ndarray]:
        reader = MessageReader(content)
        (used,) = reader.unpack(_COUNT)
        if used > self._ints:
            raise ProcessLost(f"an admission has {used} integers, more than {self._ints}")
        ints = np.full(self._ints, NOWHERE, np.int32)
        ints[:used] = reader.zipped(np.dtype("<i4"), (used,))
        floats = reader.zipped(np.dtype("<f4"), (self._floats,))
        reader.end()
        return ints, floats

    def encode_move(self, ids: np.ndarray, digests: Sequence[bytes]) -> bytes:
        """Encode a gather, collect or scatter: the device pages, and the digests of all that are not padding."""
        return packed(ids) + self.encode_digests(digests)

    def read_move(self, content: bytes) -> tuple[np.ndarray, list[bytes]]:
        reader = MessageReader(content)
        ids = self._ids(reader)
        digests = self.read_digests(content[reader.at :])
        if len(digests) > FEW:
            raise ProcessLost(f"{len(digests)} pages are named, {FEW} are the most")
        return ids, digests

    def encode_copy(self, sources: np.ndarray, ids: np.ndarray) -> bytes:
        return packed(sources) + packed(ids)

    def read_copy(self, content: bytes) -> tuple[np.ndarray, np.ndarray]:
        reader = MessageReader(content)
        sources, ids = self._ids(reader), self._ids(reader)
        reader.end()
        return sources, ids

    def encode_digests(self, digests: Sequence[bytes]) -> bytes:
        return b"".join(digests)

    def read_digests(self, content: bytes) -> list[bytes]:
        if len(content) % DIGEST_SIZE:
            raise ProcessLost(f"{len(content)} bytes name no pages: a name has {DIGEST_SIZE} bytes")
        return [content[at : at + DIGEST_SIZE] for at in range(0, len(content), DIGEST_SIZE)]

    def encode_records(self, pages: Sequence[Page]) -> bytes:
        """Encode the records of pages that are written to disk."""
        return encode({}, records_of(pages, self._programs.recipes.page_size))

    def read_records(self, content: bytes) -> list[Page]:
        try:
            return pages_of(decode(content)[1])
        except StoreError as error:
            raise ProcessLost(f"pages are to be written that can't be read: {error}") from None

    def part(self, digest: bytes, part: paged.Payload | None) -> bytes:
        """Encode a page's part with its digest; no part means that there is none."""
        return digest + b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in part or ())

    def read_part(self, content: bytes, layout: PayloadLayout | None = None) -> tuple[bytes, paged.Payload | None]:
        """Decode a page's part; without a layout, it is this process's own part."""
        reader = MessageReader(content)
        digest = reader.take(DIGEST_SIZE)
        if reader.at == len(content):
            return digest, None
        leaves = []
        for shape, dtype in layout or self.parts.layout:
            flat = np.frombuffer(reader.take(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype)
            leaves.append(flat.reshape(shape))
        reader.end()
        return digest, tuple(leaves)

    def _ids(self, reader: MessageReader) -> np.ndarray:
        ids = reader.ints(FEW, paged.pages_of(self._programs.recipes.kv)[0].num_pages)
        if len(ids) != FEW:
            raise ProcessLost(f"{len(ids)} pages are named, {FEW} belong to a transfer")
        return ids

    def _key(self, content: bytes) -> tuple[Bucket, bytes]:
        reader = MessageReader(content)
        (length,) = reader.unpack(_NAME)
        key = self.program(reader.take(length))
        if not isinstance(key, Bucket):
            raise ProcessLost(f"{key.name} is no step")
        return key, content[1 + length :]

    def program(self, name: bytes) -> Key:
        try:
            return self._names[name]
        except KeyError:
            raise ProcessLost(f"there is no program {name!r} here") from None


def _encode_name(key: Bucket) -> bytes:
    name = key.name.encode()
    return _NAME.pack(len(name)) + name


def sampling(layout: Layout, ints: np.ndarray) -> np.ndarray:
    """Return the rows of a step that choose a token of their own."""
    varying = sections(layout, ints).varying
    return np.flatnonzero((varying[:, 1] > 0) & (varying[:, 3] & _SAMPLES != 0))


def checksum(rows: np.ndarray, chosen: np.ndarray) -> int:
    """Return the checksum of the tokens in the chosen rows."""
    return zlib.crc32(np.ascontiguousarray(rows[chosen, 0], "<i4").tobytes())
