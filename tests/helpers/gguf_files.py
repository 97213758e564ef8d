"""Small GGUF files: of any of the tiny checkpoints, and broken ones byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers import checkpoints
from rekindle._src.models.loading.gguf.blocks import BY_NAME, NUMBERS, BlockType
from rekindle._src.models.loading.gguf.export import OutgoingTensor, export, write_gguf
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
    """Return the bytes of a file; `counts` are its stated numbers of tensors and keys."""
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
    if kind.name == "NVFP4":
        blocks["scales"] = rng.integers(1, 24, (count, 4))  # up to 0.03
    if kind.name == "IQ1_M":  # the scale's four bits in each word
        bits = (rng.standard_normal(count) * 0.01).astype(np.float16).view(np.uint16)
        fours = (bits[:, None] >> np.arange(0, 16, 4, dtype=np.uint16)) << np.uint16(12)
        blocks["scales"] = blocks["scales"] & np.uint16(0xFFF) | fours
    return blocks.reshape(rows, -1)


def of_types(
    file: Path, raw: Mapping[str, Any], types: Callable[[str], str], seed: int = 0, *, unpacked: bool = False
) -> Path:
    """A random model of a config; `types` gives the type of each matrix by its name in the file.

    Matrices of NVFP4 have factors. With `unpacked`, the same numbers are stored as F32, by functions of others.
    """
    config = config_from_hf(raw)
    rng = np.random.default_rng(seed)
    folder = checkpoints.write(file.with_suffix(""), raw)
    made = export(look(folder), config, "f32", lambda count: None)
    tensors, pieces = list[OutgoingTensor](), []
    for tensor in made.tensors:
        kind = BY_NAME[types(tensor.name) if len(tensor.shape) > 1 else "F32"]
        if len(tensor.shape) == 1:
            tensors.append(tensor._replace(kind=kind))
            pieces.append(np.ones(tensor.shape, np.float32))
            continue
        blocks = random_blocks(kind, int(np.prod(tensor.shape[:-1])), tensor.shape[-1], rng)
        factors = np.array(FACTORS[: tensor.shape[0] if len(tensor.shape) == 3 else 1], np.float32)
        if unpacked:
            numbers = blocks.astype(np.float32) if kind.plain else numbers_of(kind, blocks)
            if kind.name == "NVFP4":
                numbers = (numbers.reshape(len(factors), -1) * factors[:, None]).reshape(numbers.shape)
            kind, blocks = BY_NAME["F32"], numbers
        tensors.append(tensor._replace(kind=kind))
        pieces.append(blocks)
        if kind.name == "NVFP4":
            for ending in ("scale", "input_scale"):
                name = tensor.name.removesuffix("weight") + ending
                tensors.append(OutgoingTensor(name, BY_NAME["F32"], factors.shape))
                pieces.append(factors)
    write_gguf(file, made.metadata, tensors, pieces)
    return file


FACTORS = (0.75, 1.25, 0.5, 1.5, 0.625, 1.0, 0.875, 1.125)  # of few bits, so that any order of products is exact


def numbers_of(kind: BlockType, blocks: NDArray[Any]) -> NDArray[np.float32]:
    """The numbers [..., columns] of blocks [..., blocks of a row] as the gguf package reads them."""
    stored = np.ascontiguousarray(blocks).view(np.uint8).reshape(-1, kind.layout.itemsize)
    with np.errstate(all="ignore"):
        if kind.name in NOT_IN_THE_PACKAGE:
            found = _bit_by_bit(kind, stored)
        else:
            from gguf import GGMLQuantizationType, quants

            found = quants.dequantize(stored, GGMLQuantizationType(NUMBERS[kind.name]))
    return np.ascontiguousarray(found).reshape(*blocks.shape[:-1], -1)


NOT_IN_THE_PACKAGE = ("Q1_0", "Q2_0")  # its functions don't read them


def _bit_by_bit(kind: BlockType, stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the numbers of blocks [N, bytes]: a scale of 16 bits, then integers, a byte's from its lowest bits on."""
    bits = {"Q1_0": 1, "Q2_0": 2}[kind.name]
    index = np.arange(kind.values) * bits
    codes = (stored[:, 2 + index // 8] >> (index % 8).astype(np.uint8)) & np.uint8((1 << bits) - 1)
    scales = np.ascontiguousarray(stored[:, :2]).view(np.float16).astype(np.float32)
    return scales * (codes * np.float32(2) - np.float32(1) if bits == 1 else codes - np.float32(1))
