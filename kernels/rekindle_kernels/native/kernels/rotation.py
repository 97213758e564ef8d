"""Heads rotated by an orthonormal Hadamard matrix, as `rekindle_kernels.packed_pages` describes, in butterflies."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from rekindle_kernels.native.language.jit import emits, inline
from rekindle_kernels.native.language.vector import (
    FLOATS,
    LANES,
    VECTOR,
    add,
    load_f32,
    multiply,
    splat,
    store,
    subtract,
)


def _butterfly(step: int) -> Any:
    """Return an operation on pairs of lanes that are `step` apart: the sum goes to the first, the difference to the
    second.
    """

    @emits(VECTOR, VECTOR)
    def operation(builder: Any, x: Any) -> Any:
        partners = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [lane ^ step for lane in range(LANES)])
        signs = ir.Constant(FLOATS, [-1.0 if lane & step else 1.0 for lane in range(LANES)])
        return builder.fadd(builder.shuffle_vector(x, x, partners), builder.fmul(x, signs))

    return operation


_pairs, _fours, _eights, _sixteens = (_butterfly(step) for step in (1, 2, 4, 8))


def rotator(head_dim: int) -> Any:
    """Return `rotate(source, target)`: a head of that size is rotated from one address to another, or in place."""
    block = head_dim & -head_dim  # as `packed_pages.block_of`, which JAX comes with
    factor = np.float32(1 / np.sqrt(block))

    @inline
    def rotate(source: int, target: int) -> None:
        for i in range(0, head_dim, LANES):
            x = _sixteens(_eights(_fours(_pairs(load_f32(source, i)))))
            store(target, i, multiply(x, splat(factor)))
        step = LANES
        while step < block:
            for first in range(0, head_dim, 2 * step):
                for i in range(first, first + step, LANES):
                    a, b = load_f32(target, i), load_f32(target, i + step)
                    store(target, i, add(a, b))
                    store(target, i + step, subtract(a, b))
            step *= 2

    return rotate
