"""Small GGUF files: of any of the tiny checkpoints, and broken ones byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers import checkpoints
from rekindle._src.models.loading.gguf.blocks import BY_NAME, BlockType
from rekindle._src.models.loading.gguf.export import export, write_gguf
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
    *, magic: bytes = b"GGUF", version: int = 3, pairs: Sequence[bytes] = (), entries: Sequence[bytes] = (),
    counts: tuple[int, int] | None = None, data: bytes = b"",
) -> bytes:  # fmt: skip
    """The bytes of a file; `counts` are what it says of its numbers of tensors and keys."""
    tensors, keys = counts or (len(entries), len(pairs))
    head = magic + struct.pack("<IQQ", version, tensors, keys) + b"".join((*pairs, *entries))
    return head + bytes(-len(head) % 32) + data


def random_blocks(kind: BlockType, rows: int, columns: int, rng: np.random.Generator) -> NDArray[Any]:
    """Blocks of any type [rows, blocks of a row] that stand for numbers of a sensible size."""
    count = rows * columns // kind.values
    blocks = rng.integers(0, 256, count * kind.layout.itemsize, np.uint8).view(kind.layout)
    if kind.plain:
        return rng.standard_normal((rows, columns)).astype(kind.layout)
    for name in ("scale", "least"):
        if name in (kind.layout.names or ()) and kind.layout[name] == np.float16:
            blocks[name] = (rng.standard_normal(count) * 0.01).astype(np.float16)
    if kind.name == "MXFP4":
        blocks["scale"] = rng.integers(118, 124, count)  # exponents
    return blocks.reshape(rows, -1)


def of_types(file: Path, raw: Mapping[str, Any], types: Callable[[str], str], seed: int = 0) -> Path:
    """A random model of a config; `types` gives the type of each matrix by its name in the file."""
    config = config_from_hf(raw)
    rng = np.random.default_rng(seed)
    folder = checkpoints.write(file.with_suffix(""), raw)
    made = export(look(folder), config, "f32", lambda count: None)
    tensors, pieces = [], []
    for tensor in made.tensors:
        kind = BY_NAME[types(tensor.name) if len(tensor.shape) > 1 else "F32"]
        rows = int(np.prod(tensor.shape[:-1]))
        tensors.append(tensor._replace(kind=kind))
        plain = len(tensor.shape) == 1
        pieces.append(np.ones(tensor.shape, np.float32) if plain else random_blocks(kind, rows, tensor.shape[-1], rng))
    write_gguf(file, made.metadata, tensors, pieces)
    return file
