"""Blocks of every type of tensor: the numbers they stand for, and the bytes that numbers become, as llama.cpp's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from helpers.gguf_files import NOT_IN_THE_PACKAGE, numbers_of
from rekindle._src.models.loading.gguf.blocks import BY_NAME, NUMBERS, TYPES, WRITTEN, BlockType, dequantize, quantize
from rekindle._src.models.loading.gguf.grids import GRIDS, grid

gguf = pytest.importorskip("gguf", reason="the oracle: pip install gguf")
quants = pytest.importorskip("gguf.quants")
INTEGERS = ("I8", "I16", "I32", "I64", "F64")  # types that no weights of a model have
FLOATS = [name for name in BY_NAME if name not in INTEGERS]


def theirs(kind: BlockType) -> int:
    return gguf.GGMLQuantizationType(NUMBERS[kind.name])


def expected_of(kind: BlockType, stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The numbers of blocks [N, bytes] as the package reads them."""
    if kind.plain:
        return np.ascontiguousarray(quants.dequantize(stored, theirs(kind)))
    return numbers_of(kind, stored).reshape(len(stored), kind.values)


def same_bits(ours: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    both_nan = np.isnan(ours) & np.isnan(expected)
    return bool(((ours.view(np.uint32) == expected.view(np.uint32)) | both_nan).all())


@pytest.mark.parametrize("number", [number for number in TYPES if number != NUMBERS["Q2_0"]])
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
    found = dequantize(kind, stored.reshape(-1).view(kind.layout))
    assert found.dtype == np.float32
    assert same_bits(found, expected_of(kind, stored))


def test_all_types_of_the_package_are_read() -> None:
    known = {kind.name for kind in quants._type_traits} | {name for name in BY_NAME if BY_NAME[name].plain}
    assert known | set(NOT_IN_THE_PACKAGE) == set(BY_NAME)


@pytest.mark.parametrize("scale", [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00, 0x7E00], ids=hex)
@pytest.mark.parametrize("name", [name for name in FLOATS if not BY_NAME[name].plain and name != "MXFP4"])
def test_extreme_scales_stand_for_the_same_numbers(name: str, scale: int) -> None:
    kind = BY_NAME[name]
    blocks = np.random.default_rng(scale).integers(0, 256, (8, kind.layout.itemsize), np.uint8).reshape(-1)
    blocks = blocks.view(kind.layout)
    if name == "NVFP4":
        blocks["scales"] = scale >> 8
    elif name == "IQ1_M":  # four bits in each word
        blocks["scales"] = blocks["scales"] & 0xFFF | ((scale >> np.arange(0, 16, 4) & 15) << 12)
    else:
        blocks["scale"] = np.uint16(scale).view(np.float16)
    assert same_bits(dequantize(kind, blocks), expected_of(kind, blocks.view(np.uint8).reshape(8, -1)))


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x7F, 0x80], ids=hex)
@pytest.mark.parametrize("name", FLOATS)
def test_blocks_of_one_byte_stand_for_the_same_numbers(name: str, byte: int) -> None:
    """The first and the last entry of each table, all signs, and the largest multiples of scales."""
    kind = BY_NAME[name]
    stored = np.full((2, kind.layout.itemsize), byte, np.uint8)
    if "scale" in (kind.layout.names or ()) and kind.layout["scale"] == np.float16:
        stored.reshape(-1).view(kind.layout)["scale"] = [0.5, -3]
    assert same_bits(dequantize(kind, stored.reshape(-1).view(kind.layout)), expected_of(kind, stored))


def test_every_byte_of_a_scale_of_nvfp4_stands_for_the_same_number() -> None:
    stored = np.zeros((64, 36), np.uint8)
    stored[:, :4] = np.arange(256, dtype=np.uint8).reshape(64, 4)
    stored[:, 4:] = 0x92
    assert same_bits(
        dequantize(BY_NAME["NVFP4"], stored.reshape(-1).view(BY_NAME["NVFP4"].layout)),
        expected_of(BY_NAME["NVFP4"], stored),
    )


@pytest.mark.parametrize("name", GRIDS)
def test_the_grids_are_theirs(name: str) -> None:
    entries = getattr(quants, "IQ1_S" if name == "IQ1" else name)
    entries.init_grid()
    np.testing.assert_array_equal(grid(name), entries.grid[0, 0] * {"IQ1": 8, "IQ3_XXS": 0.5}.get(name, 1))


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
