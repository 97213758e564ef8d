"""Small GGUF files: of any of the tiny checkpoints, and broken ones byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle._src.models.loading.gguf.export import export
from rekindle._src.models.loading.gguf.write import write_gguf
from rekindle._src.models.loading.stored import look
from rekindle._src.models.registry import config_from_hf


def convert(folder: Path, file: Path, kind: str = "f32", **metadata: Any) -> Path:
    """A checkpoint as a GGUF file without a vocabulary."""
    stored = look(folder)
    made = export(stored, config_from_hf(stored.raw), kind, lambda count: None)
    write_gguf(file, made.metadata | metadata, made.tensors, made.pieces)
    return file


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    """A key of the metadata, with the bytes of its value."""
    return text(key) + struct.pack("<I", kind) + value


def entry(name: str, shape: Sequence[int], kind: int, offset: int, *, dimensions: int | None = None) -> bytes:
    """A tensor's entry in the table."""
    count = len(shape) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", count, *shape[::-1], kind, offset)


def raw(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    pairs: Sequence[bytes] = (),
    entries: Sequence[bytes] = (),
    counts: tuple[int, int] | None = None,
    data: bytes = b"",
) -> bytes:
    """The bytes of a file; `counts` are what it says of its numbers of tensors and keys."""
    tensors, keys = counts or (len(entries), len(pairs))
    head = magic + struct.pack("<IQQ", version, tensors, keys) + b"".join((*pairs, *entries))
    return head + bytes(-len(head) % 32) + data


def metadata_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a header's metadata as plain Python objects."""
    return {key: value if isinstance(value, (str, int, float)) else list(value) for key, value in values.items()}
