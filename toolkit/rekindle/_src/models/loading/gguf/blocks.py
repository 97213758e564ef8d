"""The types of GGUF tensors: how many values a block holds, the fields that its bytes are, and the numbers in them.

Every type is a little-endian record. Blocks become float32 numbers exactly by llama.cpp's own formulas. Each function
takes N blocks as records of its `BlockType` and returns float32 [N, values]. The order of the multiplications is part
of a type's definition: with another one the last bit can differ. Numbers become blocks with llama.cpp's rounding: the
bytes equal its own tools' output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading.gguf.grids import grid, signed, signs_with_parity
from rekindle_kernels import int4

K = 256  # values in a block of the "K" types


class BlockType(NamedTuple):
    """One type of tensors."""

    name: str
    values: int  # in a block; a row holds whole blocks
    layout: np.dtype[Any]  # of a block

    @property
    def plain(self) -> bool:
        """True if a block is one number that numpy can use as it is."""
        return self.layout.names is None


def _plain(name: str, dtype: Any) -> BlockType:
    return BlockType(name, 1, np.dtype(dtype))


def _packed(name: str, values: int, *fields: tuple[str, str] | tuple[str, str, int]) -> BlockType:
    return BlockType(name, values, np.dtype(list(fields)))


F32, F16, BF16 = _plain("F32", "<f4"), _plain("F16", "<f2"), _plain("BF16", ml_dtypes.bfloat16)
Q8_0 = _packed("Q8_0", 32, ("scale", "<f2"), ("low", "i1", 32))
Q4_0 = _packed("Q4_0", 32, ("scale", "<f2"), ("low", "u1", 16))
# By the number that stands for a type in a file.
TYPES: dict[int, BlockType] = {
    0: F32,
    1: F16,
    2: Q4_0,
    3: _packed("Q4_1", 32, ("scale", "<f2"), ("least", "<f2"), ("low", "u1", 16)),
    6: _packed("Q5_0", 32, ("scale", "<f2"), ("high", "u1", 4), ("low", "u1", 16)),
    7: _packed("Q5_1", 32, ("scale", "<f2"), ("least", "<f2"), ("high", "u1", 4), ("low", "u1", 16)),
    8: Q8_0,
    10: _packed("Q2_K", K, ("scales", "u1", 16), ("low", "u1", 64), ("scale", "<f2"), ("least", "<f2")),
    11: _packed("Q3_K", K, ("high", "u1", 32), ("low", "u1", 64), ("scales", "u1", 12), ("scale", "<f2")),
    12: _packed("Q4_K", K, ("scale", "<f2"), ("least", "<f2"), ("scales", "u1", 12), ("low", "u1", 128)),
    13: _packed(
        "Q5_K", K, ("scale", "<f2"), ("least", "<f2"), ("scales", "u1", 12), ("high", "u1", 32), ("low", "u1", 128)
    ),
    14: _packed("Q6_K", K, ("low", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("scale", "<f2")),
    16: _packed("IQ2_XXS", K, ("scale", "<f2"), ("low", "<u4", 16)),
    17: _packed("IQ2_XS", K, ("scale", "<f2"), ("low", "<u2", 32), ("scales", "u1", 8)),
    18: _packed("IQ3_XXS", K, ("scale", "<f2"), ("low", "u1", 64), ("scales", "<u4", 8)),
    19: _packed("IQ1_S", K, ("scale", "<f2"), ("low", "u1", 32), ("high", "<u2", 8)),
    20: _packed("IQ4_NL", 32, ("scale", "<f2"), ("low", "u1", 16)),
    21: _packed(
        "IQ3_S", K, ("scale", "<f2"), ("low", "u1", 64), ("high", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)
    ),
    22: _packed(
        "IQ2_S", K, ("scale", "<f2"), ("low", "u1", 32), ("signs", "u1", 32), ("high", "u1", 8), ("scales", "u1", 8)
    ),
    23: _packed("IQ4_XS", K, ("scale", "<f2"), ("high", "<u2"), ("scales", "u1", 4), ("low", "u1", 128)),
    24: _plain("I8", "<i1"),
    25: _plain("I16", "<i2"),
    26: _plain("I32", "<i4"),
    27: _plain("I64", "<i8"),
    28: _plain("F64", "<f8"),
    29: _packed("IQ1_M", K, ("low", "u1", 32), ("high", "u1", 16), ("scales", "<u2", 4)),
    30: BF16,
    34: _packed("TQ1_0", K, ("low", "u1", 48), ("high", "u1", 4), ("scale", "<f2")),
    35: _packed("TQ2_0", K, ("low", "u1", 64), ("scale", "<f2")),
    39: _packed("MXFP4", 32, ("scale", "u1"), ("low", "u1", 16)),
    40: _packed("NVFP4", 64, ("scales", "u1", 4), ("low", "u1", 32)),
    41: _packed("Q1_0", 128, ("scale", "<f2"), ("low", "u1", 16)),
    42: _packed("Q2_0", 64, ("scale", "<f2"), ("low", "u1", 16)),
}
NUMBERS = {kind.name: number for number, kind in TYPES.items()}
BY_NAME = {kind.name: kind for kind in TYPES.values()}
# Types of rows that products are made with, so that an error can name them: no file has tensors of these.
UNREAD = {9: "Q8_1", 15: "Q8_K"}
# Of Prism ML's fork of llama.cpp, for Bonsai: weights that it rotates as it computes.
PRISM_TYPES = {142: "PQ2_0 (of Prism ML's llama.cpp)", 143: "PTQ1_0 (of Prism ML's llama.cpp)"}
PRISM_NAMES = ("bonsai", "pq2_0", "ptq1_0")  # in the name of a file, or of its model
WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
Blocks = NDArray[np.void]
Values = NDArray[np.float32]
# The 16 levels of IQ4, and twice the levels of a 4-bit float (E2M1).
IQ4, E2M1_TWICE = (np.array(table, np.float32) for table in (int4.IQ4, int4.FLOATS))


def dequantize(kind: BlockType, blocks: NDArray[Any], factors: Values | None = None) -> Values:
    """Return the values [N, values] of N blocks of a type; `factors` [N] multiply the scales of a type in SCALED."""
    if kind.plain:
        return blocks.astype(np.float32)[:, None]
    with np.errstate(all="ignore"):  # scales may be infinite or NaN; the numbers then are, too
        if kind.name in SCALED:
            levels, scales = SCALED[kind.name](blocks)
            scales = scales if factors is None else scales * factors[:, None]
            numbers = scales[:, :, None] * levels.reshape(*scales.shape, -1)
        else:
            numbers = _FUNCTIONS[kind.name](blocks)
        return numbers.reshape(len(blocks), kind.values)


def _parts(packed: NDArray[np.uint8], bits: int, width: int) -> NDArray[Any]:
    """Unpack bytes [N, B] to [N, B / width, 8 / bits, width]: the low bits of `width` bytes come first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed.reshape(len(packed), -1, 1, width) >> shifts) & np.uint8((1 << bits) - 1)


def _single(field: NDArray[Any]) -> Values:
    return field.astype(np.float32)[:, None]


def q4(blocks: Blocks) -> NDArray[np.uint8]:
    """Return the integers [·, 32] of blocks that hold 32 of four bits in 16 bytes, or several times that."""
    return _parts(blocks["low"], 4, 16).reshape(-1, 32)


def q5(blocks: Blocks) -> NDArray[np.uint8]:
    fifth = np.unpackbits(blocks["high"], axis=1, bitorder="little")
    return q4(blocks) | (fifth << np.uint8(4))


def q2_k(blocks: Blocks) -> NDArray[Any]:
    """Return the integers [N, 16, 16] of Q2_K, as bytes."""
    return _parts(blocks["low"], 2, 32).reshape(-1, 16, 16)


def _q2_k(blocks: Blocks) -> Values:
    scales = blocks["scales"]
    step = (_single(blocks["scale"]) * (scales & np.uint8(15)))[:, :, None]
    least = (_single(blocks["least"]) * (scales >> np.uint8(4)))[:, :, None]
    return step * q2_k(blocks) - least


def q3_k(blocks: Blocks) -> NDArray[np.int8]:
    """Return the integers [N, 16, 16] of Q3_K."""
    third = _parts(blocks["high"], 1, 32).reshape(-1, 16, 16)  # where the bit is not set, 4 is subtracted
    return (_parts(blocks["low"], 2, 32).reshape(-1, 16, 16) | (third << np.uint8(2))).view(np.int8) - np.int8(4)


def q3_k_scales(blocks: Blocks) -> NDArray[np.int8]:
    """Return the scales [N, 16] of Q3_K as multiples of the block's scale."""
    packed = blocks["scales"]
    low = _parts(packed[:, :8], 4, 8).reshape(-1, 16)
    high = _parts(packed[:, 8:], 2, 4).reshape(-1, 16)
    return (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)


def six_bit_scales(packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the eight scales and eight minima [N, 8] of 6 bits that Q4_K and Q5_K pack into 12 bytes [N, 12]."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    four, six = np.uint8(15), np.uint8(63)
    scales = [first & six, (third & four) | ((first >> np.uint8(6)) << np.uint8(4))]
    minima = [second & six, (third >> np.uint8(4)) | ((second >> np.uint8(6)) << np.uint8(4))]
    return np.concatenate(scales, axis=1), np.concatenate(minima, axis=1)


def _with_six_bit_scales(blocks: Blocks, integers: NDArray[np.uint8]) -> Values:
    scales, minima = six_bit_scales(blocks["scales"])
    step, least = _single(blocks["scale"]) * scales, _single(blocks["least"]) * minima
    return step[:, :, None] * integers - least[:, :, None]


def q4_k(blocks: Blocks) -> NDArray[np.uint8]:
    """Return the integers [N, 8, 32] of Q4_K."""
    integers: NDArray[np.uint8] = _parts(blocks["low"], 4, 32).reshape(-1, 8, 32)
    return integers


def q5_k(blocks: Blocks) -> NDArray[np.uint8]:
    """Return the integers [N, 8, 32] of Q5_K."""
    fifth = _parts(blocks["high"], 1, 32).reshape(-1, 8, 32)
    return q4_k(blocks) | (fifth << np.uint8(4))


def q6_k(blocks: Blocks) -> NDArray[np.int8]:
    """Return the integers [N, 16, 16] of Q6_K."""
    low = _parts(blocks["low"], 4, 64).reshape(-1, 16, 16)
    high = _parts(blocks["high"], 2, 32).reshape(-1, 16, 16)
    integers: NDArray[np.int8] = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    return integers


def iq4_xs_levels(blocks: Blocks) -> NDArray[np.int8]:
    """Return the scales [N, 8] of IQ4_XS as multiples of the block's scale."""
    low = _parts(blocks["scales"], 4, 1).reshape(-1, 8)
    high = (blocks["high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & np.uint8(3)
    levels: NDArray[np.int8] = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    return levels


_FUNCTIONS: dict[str, Callable[[Blocks], Values]] = {
    "Q4_0": lambda blocks: _single(blocks["scale"]) * (q4(blocks).view(np.int8) - np.int8(8)),
    "Q4_1": lambda blocks: _single(blocks["scale"]) * q4(blocks) + _single(blocks["least"]),
    "Q5_0": lambda blocks: _single(blocks["scale"]) * (q5(blocks).view(np.int8) - np.int8(16)),
    "Q5_1": lambda blocks: _single(blocks["scale"]) * q5(blocks) + _single(blocks["least"]),
    "Q8_0": lambda blocks: _single(blocks["scale"]) * blocks["low"],
    "Q2_K": _q2_k,
    "Q3_K": lambda blocks: (_single(blocks["scale"]) * q3_k_scales(blocks))[:, :, None] * q3_k(blocks),
    "Q4_K": lambda blocks: _with_six_bit_scales(blocks, q4_k(blocks)),
    "Q5_K": lambda blocks: _with_six_bit_scales(blocks, q5_k(blocks)),
    "Q6_K": lambda blocks: (_single(blocks["scale"]) * blocks["scales"])[:, :, None] * q6_k(blocks),
    "IQ4_NL": lambda blocks: _single(blocks["scale"]) * IQ4[q4(blocks)],
    "IQ4_XS": lambda blocks: (
        (_single(blocks["scale"]) * iq4_xs_levels(blocks))[:, :, None] * IQ4[q4(blocks).reshape(-1, 8, 32)]
    ),
    "MXFP4": lambda blocks: int4.exponent_numbers(blocks["scale"])[:, None] * E2M1_TWICE[q4(blocks)],
}


class ScaledLevels(NamedTuple):
    """Numbers that are an integer times the scale of their group each: the product is exact in float32."""

    levels: NDArray[np.int8]  # [N, values]
    scales: Values  # [N, groups]


def _at(indices: NDArray[Any], bits: NDArray[Any], width: int) -> NDArray[np.intp]:
    """Return indices [N, n] of a grid, with `bits` [N, n] above the lowest `width` bits."""
    return indices.astype(np.intp) | (bits.astype(np.intp) << width)


def _in_turn(packed: NDArray[np.uint8], bits: int) -> NDArray[Any]:
    """Unpack bytes [N, B] to [N, B · 8 / bits]: a byte's parts follow each other, the lowest first."""
    return _parts(packed, bits, 1).reshape(len(packed), -1)


def _odd(blocks: Blocks, multiples: NDArray[Any]) -> Values:
    """Return the scales of groups: the block's scale times 1, 3, 5 and so on."""
    return _single(blocks["scale"]) * (multiples.astype(np.float32) * np.float32(2) + np.float32(1))


def _sevens(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Return the signs [N, 4 n] of words [N, n] that have four times seven of them."""
    shifts = np.arange(0, 28, 7, dtype=np.uint32)
    return signs_with_parity((words[:, :, None] >> shifts).reshape(len(words), -1))


def _iq2_xxs(blocks: Blocks) -> ScaledLevels:
    words = blocks["low"].reshape(-1, 8, 2)
    indices = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    levels = signed(grid("IQ2_XXS")[indices], _sevens(words[:, :, 1]))
    return ScaledLevels(levels, _odd(blocks, words[:, :, 1] >> 28) * np.float32(0.125))


def _iq2_xs(blocks: Blocks) -> ScaledLevels:
    words = blocks["low"]
    levels = signed(grid("IQ2_XS")[words & np.uint16(511)], signs_with_parity(words >> np.uint16(9)))
    return ScaledLevels(levels, _odd(blocks, _in_turn(blocks["scales"], 4)) * np.float32(0.125))


def _iq2_s(blocks: Blocks) -> ScaledLevels:
    indices = _at(blocks["low"], _in_turn(blocks["high"], 2), 8)
    levels = signed(grid("IQ2_S")[indices], blocks["signs"])
    return ScaledLevels(levels, _odd(blocks, _in_turn(blocks["scales"], 4)) * np.float32(0.125))


def _iq3_xxs(blocks: Blocks) -> ScaledLevels:
    levels = signed(grid("IQ3_XXS")[blocks["low"]], _sevens(blocks["scales"]))
    return ScaledLevels(levels, _odd(blocks, blocks["scales"] >> 28) * np.float32(0.5))


def _iq3_s(blocks: Blocks) -> ScaledLevels:
    indices = _at(blocks["low"], _in_turn(blocks["high"], 1), 8)
    levels = signed(grid("IQ3_S")[indices], blocks["signs"])
    return ScaledLevels(levels, _odd(blocks, _in_turn(blocks["scales"], 4)))


def _with_shifts(entries: NDArray[np.int8], lower: NDArray[Any]) -> NDArray[np.int8]:
    """Return eight times the levels of IQ1: a grid's entries [N, n, 8], minus one where `lower`, else plus one."""
    shift = np.int8(1) - np.int8(2) * lower.astype(np.int8)
    return (entries + shift[:, :, None]).reshape(len(entries), -1)


def _iq1_s(blocks: Blocks) -> ScaledLevels:
    words = blocks["high"]
    bits = (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16)) & np.uint16(7)
    indices = _at(blocks["low"], bits.reshape(len(blocks), -1), 8)
    levels = _with_shifts(grid("IQ1")[indices], np.repeat(words >> np.uint16(15), 4, axis=1))
    return ScaledLevels(levels, _odd(blocks, (words >> np.uint16(12)) & np.uint16(7)) * np.float32(0.125))


def _iq1_m(blocks: Blocks) -> ScaledLevels:
    words, fours = blocks["scales"], _in_turn(blocks["high"], 4)
    quarters = (words >> np.uint16(12)) << np.arange(0, 16, 4, dtype=np.uint16)  # of the block's scale
    scale = np.bitwise_or.reduce(quarters, axis=1).view(np.float16).astype(np.float32)
    multiples = ((words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16)) & np.uint16(7)).reshape(len(blocks), -1)
    levels = _with_shifts(grid("IQ1")[_at(blocks["low"], fours & np.uint8(7), 8)], fours >> np.uint8(3))
    scales = scale[:, None] * (multiples.astype(np.float32) * np.float32(2) + np.float32(1))
    return ScaledLevels(levels, scales * np.float32(0.125))


def _tq1_0(blocks: Blocks) -> ScaledLevels:
    """Bytes have five digits of base three, the highest first, as parts of 256; the last four bytes have four."""

    def digits(packed: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
        shifted = packed[:, None, :] * np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
        return ((shifted.astype(np.uint16) * np.uint16(3)) >> np.uint16(8)).astype(np.uint8).reshape(len(packed), -1)

    low = blocks["low"]
    found = [digits(low[:, :32], 5), digits(low[:, 32:], 5), digits(blocks["high"], 4)]
    return ScaledLevels(np.concatenate(found, axis=1).view(np.int8) - np.int8(1), _single(blocks["scale"]))


def _nvfp4(blocks: Blocks) -> ScaledLevels:
    levels = np.array(int4.FLOATS, np.int8)[_parts(blocks["low"], 4, 8)]
    return ScaledLevels(levels.reshape(len(blocks), -1), _e4m3_halves()[blocks["scales"]])


@functools.cache
def _e4m3_halves() -> Values:
    """Return half of what each byte means as a float of 8 bits (E4M3) without a sign. 0x7F, which is NaN, counts as 0;
    the highest bit is left out of account but there, as llama.cpp does."""
    exponents, fractions = np.divmod(np.arange(256) & 127, 8)
    halves = np.where(exponents == 0, fractions * 2.0**-10, (8 + fractions) * 2.0 ** (exponents - 11.0))
    halves[127] = 0
    return halves.astype(np.float32)


def _of_bits(bits: int, zero: int, factor: int = 1) -> Callable[[Blocks], ScaledLevels]:
    """Return a function for integers of so many bits in turn, one scale for all, that are `factor` times larger."""

    def found(blocks: Blocks) -> ScaledLevels:
        stored = _in_turn(blocks["low"], bits).view(np.int8)
        return ScaledLevels(stored * np.int8(factor) - np.int8(zero), _single(blocks["scale"]))

    return found


# The types with nothing more to their numbers.
SCALED: dict[str, Callable[[Blocks], ScaledLevels]] = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "TQ1_0": _tq1_0,
    "TQ2_0": lambda blocks: ScaledLevels(
        _parts(blocks["low"], 2, 32).reshape(-1, K).view(np.int8) - np.int8(1), _single(blocks["scale"])
    ),
    "NVFP4": _nvfp4,
    "Q1_0": _of_bits(1, 1, 2),
    "Q2_0": _of_bits(2, 1),
}


def quantize(kind: BlockType, rows: NDArray[Any]) -> NDArray[Any]:
    """Return the blocks [..., blocks of a row] of rows [..., columns]; columns are a multiple of the type's values."""
    if kind.plain:
        with np.errstate(over="ignore"):  # values too large for 16 bits become infinite
            return np.ascontiguousarray(rows.astype(kind.layout))
    values = rows.astype(np.float32, copy=False).reshape(-1, kind.values)
    blocks = np.empty(len(values), kind.layout)
    with np.errstate(all="ignore"):
        {Q8_0.name: _to_q8_0, Q4_0.name: _to_q4_0}[kind.name](values, blocks)
    return blocks.reshape(*rows.shape[:-1], -1)


def _inverse(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def _to_q8_0(values: NDArray[np.float32], blocks: NDArray[Any]) -> None:
    scale = np.abs(values).max(axis=1) / np.float32(127)
    scaled = values * _inverse(scale)[:, None]
    blocks["scale"] = scale
    blocks["low"] = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))  # halves away from zero


def _to_q4_0(values: NDArray[np.float32], blocks: NDArray[Any]) -> None:
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)[:, 0]
    scale = largest / np.float32(-8)  # the largest becomes 0 or, if it is positive, 16, which is cut to 15
    levels = np.trunc(values * _inverse(scale)[:, None] + np.float32(8.5)).astype(np.uint8).clip(0, 15)
    blocks["scale"] = scale
    blocks["low"] = levels[:, :16] | (levels[:, 16:] << np.uint8(4))
