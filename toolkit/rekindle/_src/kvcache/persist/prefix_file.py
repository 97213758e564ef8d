"""A prefix as one file, to hand to a colleague who has the same model: its index, then its payloads.

Entries of side caches follow in the same form, one cache after the other, if nodes have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


def read(path: Path, identity: Identity, *, sides: Sequence[Identity] = ()) -> tuple[Pairs, list[Pairs]]:
    """Read and verify the pages of a file, and the entries of side caches, in the order of their identities. Raises
    StoreError if it can't be read or is damaged, SnapshotRefused if a session with these identities can't use it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"the prefix was not imported: {error}. Check the path") from error
    if not data.startswith(MAGIC):
        raise StoreError(f"{path} is not an exported prefix")
    pages, end = _read(path, data, len(MAGIC), identity, chained=True)
    entries: list[Pairs] = []
    for place, own in enumerate(sides):
        follows = end < len(data) and (place == len(sides) - 1 or _fits(data, end, own))
        pairs, end = _read(path, data, end, own, chained=False) if follows else ([], end)
        entries.append(pairs)
    if end != len(data):
        raise StoreError(f"{path} has {len(data)} bytes and should have {end}. Export it again")
    return pages, entries


def _fits(data: bytes, at: int, identity: Identity) -> bool:
    """True if the index at `at` belongs to `identity`, and not to a later side cache."""
    start = at + _LENGTH
    header, _ = decode(data[start : start + int.from_bytes(data[at:start], "little")])
    return identity.mismatch(Identity.stored_in(header)) is None


def _read(path: Path, data: bytes, at: int, identity: Identity, *, chained: bool) -> tuple[Pairs, int]:
    """Read the pages of the index that begins at `at`. Return them, and the offset where they end."""
    start = at + _LENGTH
    end = start + int.from_bytes(data[at:start], "little")
    try:
        header, records = decode(data[start:end])
        reason = identity.mismatch(Identity.stored_in(header))
        if reason is not None:
            raise SnapshotRefused(f"{path} can't be imported: {reason}. Export it from a session like this one")
        leaves = leaves_in(header)
        verify(identity, records, leaves)
        if chained:
            _check_chain(identity, records)
    except SnapshotRefused:
        raise
    except StoreError as error:
        raise StoreError(f"{path} can't be imported: {error}. Export it again") from error
    step = sum(leaf.nbytes for leaf in leaves)
    if len(data) < end + step * len(records):
        raise StoreError(f"{path} has {len(data)} bytes and should have {end + step * len(records)}. Export it again")
    pages = []
    for index, page in enumerate(pages_of(records)):
        payload = np.frombuffer(data[end + index * step : end + (index + 1) * step], np.uint8).copy()
        if checksum(page.digest, payload) != records[index]["sum"]:
            raise StoreError(f"page {index} of {path} does not match its checksum. Export it again")
        pages.append((page, from_bytes(payload, leaves)))
    return pages, end + step * len(records)


def _check_chain(identity: Identity, records: NDArray[Any]) -> None:
    """Raise StoreError unless each page follows the one before it, and the first one the root."""
    parent = identity.root
    for index, record in enumerate(records):
        if record["parent"].tobytes() != parent:
            raise StoreError(f"page {index} does not follow the page before it")
        parent = record["digest"].tobytes()
