"""Blocks of every type of tensor: the numbers they stand for, and the bytes that numbers become, as llama.cpp's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rekindle._src.models.loading.gguf.blocks import BY_NAME, NUMBERS, TYPES, WRITTEN, BlockType, dequantize, quantize

gguf = pytest.importorskip("gguf", reason="the oracle: pip install gguf")
quants = pytest.importorskip("gguf.quants")
INTEGERS = ("I8", "I16", "I32", "I64", "F64")  # types that no weights of a model have
FLOATS = [name for name in BY_NAME if name not in INTEGERS]


def theirs(kind: BlockType) -> int:
    return gguf.GGMLQuantizationType(NUMBERS[kind.name])


def same_bits(ours: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    both_nan = np.isnan(ours) & np.isnan(expected)
    return bool(((ours.view(np.uint32) == expected.view(np.uint32)) | both_nan).all())


@pytest.mark.parametrize("number", TYPES)
def test_a_block_is_as_large_as_theirs(number: int) -> None:
    kind = TYPES[number]
    assert gguf.GGML_QUANT_SIZES[theirs(kind)] == (kind.values, kind.layout.itemsize)
    assert theirs(kind).name == kind.name


@pytest.mark.parametrize("name", FLOATS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 40))
def test_random_blocks_stand_for_the_same_numbers_to_the_last_bit(name: str, seed: int, blocks: int) -> None:
    """Random bytes make every scale, subnormal, infinite and NaN ones included."""
    kind = BY_NAME[name]
    stored = np.random.default_rng(seed).integers(0, 256, (blocks, kind.layout.itemsize), np.uint8)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(stored, theirs(kind)).reshape(blocks, kind.values)
    found = dequantize(kind, stored.reshape(-1).view(kind.layout))
    assert found.dtype == np.float32
    assert same_bits(found, np.ascontiguousarray(expected))


@pytest.mark.parametrize("scale", [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00, 0x7E00], ids=hex)
@pytest.mark.parametrize("name", [name for name in FLOATS if not BY_NAME[name].plain and name != "MXFP4"])
def test_extreme_scales_stand_for_the_same_numbers(name: str, scale: int) -> None:
    kind = BY_NAME[name]
    blocks = np.random.default_rng(scale).integers(0, 256, (8, kind.layout.itemsize), np.uint8).reshape(-1)
    blocks = blocks.view(kind.layout)
    blocks["scale"] = np.uint16(scale).view(np.float16)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(blocks.view(np.uint8).reshape(8, -1), theirs(kind)).reshape(8, kind.values)
    assert same_bits(dequantize(kind, blocks), np.ascontiguousarray(expected))


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-12, 4))
def test_numbers_become_the_same_bytes(name: str, seed: int, exponent: int) -> None:
    kind = BY_NAME[name]
    rows = np.random.default_rng(seed).standard_normal((5, 64)).astype(np.float32) * np.float32(10.0**exponent)
    rows[0] = 0
    rows[1, :32] = np.linspace(-127, 127, 32)
    with np.errstate(all="ignore"):
        expected = quants.quantize(rows, theirs(kind))
    found = quantize(kind, rows)
    np.testing.assert_array_equal(found.view(np.uint8).reshape(5, -1), expected.view(np.uint8).reshape(5, -1))


@pytest.mark.parametrize("name", WRITTEN)
def test_what_was_unpacked_is_packed_to_numbers_close_to_it(name: str) -> None:
    kind = BY_NAME[name]
    rows = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    back = dequantize(kind, quantize(kind, rows).reshape(-1)).reshape(rows.shape)
    error = np.abs(back - rows).max()
    assert error <= {"F32": 0.0, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 2e-2, "Q4_0": 0.5}[name]
