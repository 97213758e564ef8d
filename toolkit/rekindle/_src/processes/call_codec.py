"""Encoding of program calls as messages. A program has its name in the store; its layout gives the arrays' lengths."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rekindle._src.core.guides import Mask, mask_words
from rekindle._src.kvcache.digest import DIGEST_SIZE
from rekindle._src.kvcache.persist.segment import Page, decode, encode, pages_of, records_of
from rekindle._src.processes.numbers import Reader, packed, zipped
from rekindle._src.processes.results import sampling
from rekindle._src.processes.step_codec import StepCodec
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import FORWARD, Bucket
from rekindle._src.programs.helpers import FEW
from rekindle._src.programs.keys import Key
from rekindle._src.programs.page_parts import PageParts, PayloadLayout
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.request_state import NOWHERE, admission_sizes
from rekindle.errors import ProcessLost, StoreError

_NAME, _COUNT = struct.Struct("<B"), struct.Struct("<I")


class StepCall(NamedTuple):
    """A step, or the first half of a guided one."""

    key: Bucket
    ints: np.ndarray
    floats: np.ndarray


class CallCodec:
    """One side of a session's calls. Keeps the state that both sides share, so every message must pass it, in order."""

    def __init__(self, programs: Programs) -> None:
        config = programs.config
        self._programs, self._names = programs, {key.name.encode(): key for key in programs.known}
        self._steps = StepCodec(config.max_requests, programs.width, programs.kv[0].page_size)
        self._ints, self._floats = admission_sizes(programs.width * programs.kv[0].page_size)
        self._words = mask_words(programs.model.vocab_size)
        self.parts = PageParts(programs.parts, programs.kv)

    def step(self, key: Bucket, ints: np.ndarray, floats: np.ndarray) -> bytes:
        return _encode_name(key) + self._steps.encode(self._programs.layout(key), ints, floats)

    def sampling(self, key: Bucket, ints: np.ndarray) -> np.ndarray:
        """Return the rows of a step that choose a token of their own."""
        return sampling(self._programs.layout(key), ints)

    def read_step(self, content: bytes) -> StepCall:
        key, rest = self._key(content)
        if key.part not in ("", FORWARD):
            raise ProcessLost(f"{key.name} begins no step")
        return StepCall(key, *self._steps.decode(self._programs.layout(key), rest))

    def choose(self, key: Bucket, masks: Mask) -> bytes:
        """Encode the masks of a step; rows that allow every token are left out."""
        rows = np.flatnonzero((masks != -1).any(axis=1))
        return _encode_name(key) + packed(rows) + zipped(masks[rows].astype("<i4", copy=False))

    def read_choose(self, content: bytes) -> tuple[Bucket, Mask]:
        key, rest = self._key(content)
        sequences = self._programs.layout(key).sequences
        reader = Reader(rest)
        rows = reader.ints(sequences, sequences)
        masks = np.full((sequences, self._words), -1, np.int32)
        masks[rows] = reader.zipped(np.dtype("<i4"), (len(rows), self._words))
        reader.end()
        return key, masks

    def admit(self, ints: np.ndarray, floats: np.ndarray) -> bytes:
        used = int(np.flatnonzero(ints != NOWHERE).max(initial=-1)) + 1
        return (
            _COUNT.pack(used) + zipped(ints[:used].astype("<i4", copy=False)) + zipped(floats.astype("<f4", copy=False))
        )

    def read_admit(self, content: bytes) -> tuple[np.ndarray, np.ndarray]:
        reader = Reader(content)
        (used,) = reader.unpack(_COUNT)
        if used > self._ints:
            raise ProcessLost(f"an admission has {used} integers, more than {self._ints}")
        ints = np.full(self._ints, NOWHERE, np.int32)
        ints[:used] = reader.zipped(np.dtype("<i4"), (used,))
        floats = reader.zipped(np.dtype("<f4"), (self._floats,))
        reader.end()
        return ints, floats

    def encode_move(self, ids: np.ndarray, digests: Sequence[bytes]) -> bytes:
        """Encode a gather, collect or scatter: device pages, and the digests of those that are not padding."""
        return packed(ids) + self.encode_digests(digests)

    def read_move(self, content: bytes) -> tuple[np.ndarray, list[bytes]]:
        reader = Reader(content)
        ids = self._ids(reader)
        digests = self.read_digests(content[reader.at :])
        if len(digests) > FEW:
            raise ProcessLost(f"{len(digests)} pages are named, {FEW} are the most")
        return ids, digests

    def encode_digests(self, digests: Sequence[bytes]) -> bytes:
        return b"".join(digests)

    def read_digests(self, content: bytes) -> list[bytes]:
        if len(content) % DIGEST_SIZE:
            raise ProcessLost(f"{len(content)} bytes name no pages, whose names have {DIGEST_SIZE}")
        return [content[at : at + DIGEST_SIZE] for at in range(0, len(content), DIGEST_SIZE)]

    def encode_records(self, pages: Sequence[Page]) -> bytes:
        """Encode the records of pages that are written to disk."""
        return encode({}, records_of(pages, self._programs.kv[0].page_size))

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
        reader = Reader(content)
        digest = reader.take(DIGEST_SIZE)
        if reader.at == len(content):
            return digest, None
        leaves = []
        for shape, dtype in layout or self.parts.layout:
            flat = np.frombuffer(reader.take(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype)
            leaves.append(flat.reshape(shape))
        reader.end()
        return digest, tuple(leaves)

    def _ids(self, reader: Reader) -> np.ndarray:
        ids = reader.ints(FEW, self._programs.kv[0].num_pages)
        if len(ids) != FEW:
            raise ProcessLost(f"{len(ids)} pages are named, {FEW} belong to a transfer")
        return ids

    def _key(self, content: bytes) -> tuple[Bucket, bytes]:
        reader = Reader(content)
        (length,) = reader.unpack(_NAME)
        key = self.program(reader.take(length))
        if not isinstance(key, Bucket):
            raise ProcessLost(f"{key.name} is no step")
        return key, content[1 + length :]

    def program(self, name: bytes) -> Key:
        """Return the program of this name."""
        try:
            return self._names[name]
        except KeyError:
            raise ProcessLost(f"there is no program {name!r} here") from None


def _encode_name(key: Bucket) -> bytes:
    name = key.name.encode()
    return _NAME.pack(len(name)) + name
