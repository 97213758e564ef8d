"""The types of GGUF tensors: how many values a block holds, and the fields that its bytes are.

Every type is a little-endian record. Nibbles and other parts of bytes are unpacked in `dequantize`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

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
    20: _packed("IQ4_NL", 32, ("scale", "<f2"), ("low", "u1", 16)),
    23: _packed("IQ4_XS", K, ("scale", "<f2"), ("high", "<u2"), ("scales", "u1", 4), ("low", "u1", 128)),
    24: _plain("I8", "<i1"),
    25: _plain("I16", "<i2"),
    26: _plain("I32", "<i4"),
    27: _plain("I64", "<i8"),
    28: _plain("F64", "<f8"),
    30: BF16,
    39: _packed("MXFP4", 32, ("scale", "u1"), ("low", "u1", 16)),
}
NUMBERS = {kind.name: number for number, kind in TYPES.items()}
BY_NAME = {kind.name: kind for kind in TYPES.values()}
# Types that are known and not read, so that an error can name them.
UNREAD = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
