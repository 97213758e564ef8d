"""A prefix as one file, to hand to a colleague who has the same model: its index, then its payloads.

Entries of side caches follow in the same form, one cache after the other, if nodes have them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.plain_files import open_plain
from rekindle._src.kvcache.persist.identity import Identity, verify
from rekindle._src.kvcache.persist.segment import (
    Page,
    Payload,
    checksum,
    decode,
    encode,
    from_bytes,
    leaves_in,
    leaves_of,
    pages_of,
    records_of,
    to_bytes,
)
from rekindle.errors import SnapshotRefused, StoreError
from rekindle_kernels import private_files

MAGIC = b"rekindle prefix\n"
_LENGTH = 8
MOST_INDEX = 64 << 20  # bytes; the index of a million tokens in pages of 16 has 7 MB


Pairs = list[tuple[Page, Payload]]


def write(
    path: Path,
    identity: Identity,
    pages: Sequence[tuple[Page, Payload]],
    *,
    sides: Sequence[tuple[Identity, Sequence[tuple[Page, Payload]]]] = (),
) -> None:
    """Write pages that follow each other, and the entries of each side cache that some of them have; the file is
    complete or absent. Raises StoreError if it can't be written."""
    if not pages:
        raise StoreError("nothing of the prompt is cached. Generate with it first")
    content = [MAGIC, *_part(identity, pages)]
    for own, entries in sides:
        content += _part(own, entries) if entries else []
    try:
        private_files.write(path, content, mode=0o666, durable=True)
    except OSError as error:
        raise StoreError(f"the prefix was not exported: {error}. Free some space, or check the folder") from error


def _part(identity: Identity, pages: Sequence[tuple[Page, Payload]]) -> list[Any]:
    records = records_of([page for page, _ in pages], identity.page_size)
    data = [to_bytes(payload) for _, payload in pages]
    records["sum"] = [checksum(page.digest, content) for (page, _), content in zip(pages, data, strict=True)]
    index = encode(identity.fields() | {"leaves": leaves_of(pages[0][1])}, records)
    return [len(index).to_bytes(_LENGTH, "little"), index, *data]


def read(
    path: Path, identity: Identity, *, sides: Sequence[Identity] = (), most: int | None = None
) -> tuple[Pairs, list[Pairs]]:
    """Read and verify the pages of a file, and the entries of side caches, in the order of their identities. Raises
    StoreError if it can't be read, is damaged or has more than `most` bytes, SnapshotRefused if a session with these
    identities can't use it.

    Nothing is read of a payload before its index is verified and the size of the file fits.
    """
    try:
        with open_plain(path) as opened:
            file = _PrefixFile(path, opened, os.fstat(opened.fileno()).st_size)
            if file.take(min(file.size, len(MAGIC))) != MAGIC:
                raise StoreError(f"{path} is not an exported prefix")
            if most is not None and file.size > most:
                raise StoreError(
                    f"{path} has {file.size:,} bytes, and host_memory and disk_memory hold {most:,} at most. "
                    "Open the session with more"
                )
            pages = file.pages(identity, file.index(), chained=True)
            entries: list[Pairs] = []
            index = file.index() if file.left and sides else None
            for place, own in enumerate(sides):
                follows = index is not None and (place == len(sides) - 1 or index.belongs_to(own))
                entries.append(file.pages(own, index, chained=False) if follows and index is not None else [])
                if follows:
                    index = file.index() if file.left and place < len(sides) - 1 else None
            if file.left or index is not None:
                raise file.wrong_size(file.at)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(f"the prefix was not imported: {path}: {reason}. Check the path") from error
    return pages, entries


class _Index(NamedTuple):
    """An index in a file, not verified yet."""

    header: dict[str, Any]
    records: NDArray[Any]

    def belongs_to(self, identity: Identity) -> bool:
        """True if its pages are of `identity`, and not of a later side cache."""
        return identity.mismatch(Identity.stored_in(self.header)) is None


class _PrefixFile:
    """A file that is read in order."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.size, self.at = path, size, 0
        self._file = file

    @property
    def left(self) -> int:
        """The bytes after the position."""
        return self.size - self.at

    def wrong_size(self, expected: int) -> StoreError:
        return StoreError(f"{self.path} has {self.size} bytes and should have {expected}. Export it again")

    def take(self, count: int) -> bytes:
        """Return the next bytes. Raise StoreError, before reading, for more than are left."""
        if count > self.left:
            raise self.wrong_size(self.at + count)
        data = self._file.read(count)
        if len(data) < count:  # it was cut off meanwhile
            raise self.wrong_size(self.at + count)
        self.at += count
        return data

    def index(self) -> _Index:
        """Read the index that begins here."""
        length = int.from_bytes(self.take(_LENGTH), "little")
        if length > MOST_INDEX:
            raise StoreError(
                f"{self.path} can't be imported: an index has {length:,} bytes, and at most {MOST_INDEX:,} are read. "
                "Export it again"
            )
        try:
            return _Index(*decode(self.take(length)))
        except StoreError as error:
            raise StoreError(f"{self.path} can't be imported: {error}. Export it again") from error

    def pages(self, identity: Identity, index: _Index, *, chained: bool) -> Pairs:
        """Verify an index, and read its payloads, which follow."""
        header, records = index
        try:
            reason = identity.mismatch(Identity.stored_in(header))
            if reason is not None:
                raise SnapshotRefused(
                    f"{self.path} can't be imported: {reason}. Export it from a session like this one"
                )
            leaves = leaves_in(header)
            verify(identity, records, leaves)
            if chained:
                _check_chain(identity, records)
        except SnapshotRefused:
            raise
        except StoreError as error:
            raise StoreError(f"{self.path} can't be imported: {error}. Export it again") from error
        step = sum(leaf.nbytes for leaf in leaves)
        if step * len(records) > self.left:
            raise self.wrong_size(self.at + step * len(records))
        pages = []
        for number, page in enumerate(pages_of(records)):
            payload = np.frombuffer(bytearray(self.take(step)), np.uint8)
            if checksum(page.digest, payload) != records[number]["sum"]:
                raise StoreError(f"page {number} of {self.path} does not match its checksum. Export it again")
            pages.append((page, from_bytes(payload, leaves)))
        return pages


def _check_chain(identity: Identity, records: NDArray[Any]) -> None:
    """Raise StoreError unless each page follows the one before it, and the first one the root."""
    parent = identity.root
    for index, record in enumerate(records):
        if record["parent"].tobytes() != parent:
            raise StoreError(f"page {index} does not follow the page before it")
        parent = record["digest"].tobytes()
