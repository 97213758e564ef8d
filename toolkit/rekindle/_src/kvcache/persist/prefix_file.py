"""A prefix as one file, to hand to a colleague who has the same model: its index, then its payloads."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rekindle._src.kvcache.persist.segment import (
    LeafSpec,
    Page,
    Payload,
    checksum,
    decode,
    encode,
    from_bytes,
    leaves_of,
    pages_of,
    records_of,
    to_bytes,
)
from rekindle._src.kvcache.persist.snapshot import Identity
from rekindle.errors import SnapshotRefused, StoreError

_MAGIC = b"rekindle prefix\n"
_LENGTH = 8


def write(path: Path, identity: Identity, pages: Sequence[tuple[Page, Payload]]) -> None:
    """Complete or absent. Raises StoreError if there is nothing to write."""
    if not pages:
        raise StoreError("nothing of the prompt is cached. Generate with it first")
    records = records_of([page for page, _ in pages], identity.page_size)
    data = [to_bytes(payload) for _, payload in pages]
    records["sum"] = [checksum(page.digest, one) for (page, _), one in zip(pages, data, strict=True)]
    index = encode(identity.fields() | {"leaves": leaves_of(pages[0][1])}, records)
    own = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with own.open("wb") as file:
            file.writelines([_MAGIC, len(index).to_bytes(_LENGTH, "little"), index, *data])
        os.replace(own, path)
    finally:
        own.unlink(missing_ok=True)


def read(path: Path, identity: Identity) -> list[tuple[Page, Payload]]:
    """Raises StoreError if it is damaged, SnapshotRefused if it is no good for `identity`."""
    data = path.read_bytes()
    if not data.startswith(_MAGIC):
        raise StoreError(f"{path} is not an exported prefix")
    start = len(_MAGIC) + _LENGTH
    end = start + int.from_bytes(data[len(_MAGIC) : start], "little")
    header, records = decode(data[start:end])
    reason = identity.refuses(header["identity"])
    if reason is not None:
        raise SnapshotRefused(f"{path} can't be imported: {reason}. Export it from a session like this one")
    leaves = tuple(LeafSpec(tuple(shape), dtype) for shape, dtype in header["leaves"])
    step = sum(leaf.nbytes for leaf in leaves)
    found = []
    for index, page in enumerate(pages_of(records)):
        one = np.frombuffer(data[end + index * step : end + (index + 1) * step], np.uint8).copy()
        if len(one) != step or checksum(page.digest, one) != records[index]["sum"]:
            raise StoreError(f"page {index} of {path} does not match its checksum. Export it again")
        found.append((page, from_bytes(one, leaves)))
    return found
