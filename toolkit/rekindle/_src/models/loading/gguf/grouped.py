"""GGUF types of integers in groups of 32 or 16, and how they are kept exactly in four, six or eight bits.

They stand for the numbers that `dequantize` returns: levels of a table are integers, and scales that a type computes in
float32 as a product are kept as its factors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading.four_bits import Integers
from rekindle._src.models.loading.gguf import dequantize
from rekindle._src.models.nn.packing import Packing
from rekindle_kernels import int4

PACKINGS = {
    "Q4_0": Packing(32),
    "Q4_1": Packing(32, minimum=True),
    "Q4_K": Packing(32, minimum=True, scales=int4.STEPPED),
    "Q5_0": Packing(32, bits=6),
    "Q5_1": Packing(32, minimum=True, bits=6),
    "Q5_K": Packing(32, minimum=True, scales=int4.STEPPED, bits=6),
    "Q6_K": Packing(16, scales=int4.STEPPED, bits=6),
    "Q8_0": Packing(32, bits=8),
    "IQ4_NL": Packing(32, bits=8),
    "IQ4_XS": Packing(32, scales=int4.STEPPED, bits=8),
    "MXFP4": Packing(32, scales="float32", bits=8),
}


def integers(kind: str, blocks: NDArray[Any]) -> Integers:
    """Return the integers of rows of blocks [rows, blocks of a row], for a type that PACKINGS has."""
    with np.errstate(all="ignore"):  # scales may be infinite or NaN; the numbers then are, too
        levels, scales, minimums = _FUNCTIONS[kind](blocks.reshape(-1))
    rows, dtype = len(blocks), np.uint8 if PACKINGS[kind].bits == 4 else np.int8
    shape = (rows, -1, *scales.shape[2:])
    return Integers(
        levels.reshape(rows, -1).view(dtype),
        scales.reshape(shape),
        None if minimums is None else minimums.reshape(shape),
    )


Found = tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]  # integers of 8 bits, scales, minimums


def _one_group(levels: Callable[[Any], NDArray[Any]], *, minimums: bool = False) -> Callable[[Any], Found]:
    """Return a function for blocks of one group each, with a scale of 16 bits, that returns integers and scales."""
    return lambda blocks: (levels(blocks), blocks["scale"], blocks["least"] if minimums else None)


def _with_k_scales(levels: Callable[[Any], NDArray[Any]]) -> Callable[[Any], Found]:
    """Return such a function for blocks of eight groups, with scales and minimums of six bits."""

    def found(blocks: Any) -> Found:
        scales, minimums = dequantize.six_bit_scales(blocks["scales"])
        return levels(blocks), _stepped(scales, blocks["scale"]), _stepped(minimums, -blocks["least"])

    return found


def _stepped(scales: NDArray[Any], steps: NDArray[Any]) -> NDArray[np.int8]:
    """Return small integers [N, groups] of N blocks with their steps [N], one for each block: [N, 1, groups + 2]."""
    return int4.stepped(scales.view(np.int8), steps[:, None])


def _of_table(table: NDArray[Any], blocks: Any) -> NDArray[Any]:
    levels: NDArray[Any] = table.astype(np.int8)[dequantize.q4(blocks)]
    return levels


_FUNCTIONS: dict[str, Callable[[Any], Found]] = {
    "Q4_0": _one_group(dequantize.q4),
    "Q4_1": _one_group(dequantize.q4, minimums=True),
    "Q4_K": _with_k_scales(dequantize.q4_k),
    "Q5_0": _one_group(lambda blocks: dequantize.q5(blocks).view(np.int8) - np.int8(16)),
    "Q5_1": _one_group(dequantize.q5, minimums=True),
    "Q5_K": _with_k_scales(dequantize.q5_k),
    "Q6_K": lambda blocks: (dequantize.q6_k(blocks), _stepped(blocks["scales"], blocks["scale"]), None),
    "Q8_0": _one_group(lambda blocks: np.ascontiguousarray(blocks["low"])),
    "IQ4_NL": _one_group(lambda blocks: _of_table(dequantize.IQ4, blocks)),
    "IQ4_XS": lambda blocks: (
        _of_table(dequantize.IQ4, blocks),
        _stepped(dequantize.iq4_xs_levels(blocks), blocks["scale"]),
        None,
    ),
    "MXFP4": lambda blocks: (
        _of_table(dequantize.E2M1_TWICE, blocks),
        dequantize.half_powers(blocks["scale"])[:, None],
        None,
    ),
}
