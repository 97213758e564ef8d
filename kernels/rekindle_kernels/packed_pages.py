"""Pages of keys in eight or four bits with values in four: their formats, rotation and rounding.

The numbers of a vector share one scale, so a single large number takes the bits of all others. An orthonormal Hadamard
matrix spreads it over the vector first: products of a rotated query and rotated keys are those of the plain ones, and a
weighted sum of rotated values is rotated back once. The matrix is its own inverse. Of a head size that is no power of
two, blocks of its largest power of two are rotated.

A format is one line of `PACKED`. Its keys and values are arrays of their own. A byte of four-bit codes has element i of
a vector in its lower half and element i + D/2 in the upper one; code c means (2·c - 15) times the vector's scale.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

CODES = 15  # the largest code of four bits, and the largest number that one means


@dataclass(frozen=True, slots=True)
class PackedDtype:
    """How pages store keys and values that differ in width, each vector with a float32 scale."""

    name: str
    key_bits: int
    value_bits: int = 4

    @property
    def bits(self) -> tuple[int, int]:
        """The bits of a number of keys, and of values."""
        return self.key_bits, self.value_bits

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the array of keys."""
        return _STORED[self.key_bits]

    @property
    def itemsize(self) -> int:
        """The bytes of an element of that array."""
        return self.dtype.itemsize


PACKED = {each.name: each for each in (PackedDtype("int8-int4", 8), PackedDtype("int4", 4))}
_OF_BITS = {each.bits: each for each in PACKED.values()}
_STORED = {8: jnp.dtype(jnp.int8), 4: jnp.dtype(jnp.uint8)}


def packed_dtype(dtype: DTypeLike) -> PackedDtype | None:
    """Return the packed format of that name; None for dtypes of JAX's."""
    return PACKED.get(dtype) if isinstance(dtype, str) else None


def format_of(keys: Array, values: Array) -> PackedDtype:
    """Return the format of two arrays of pages."""
    return _OF_BITS[bits_of(keys), bits_of(values)]


def bits_of(stored: Array) -> int:
    """Return the bits of a number in an array of pages."""
    return 8 if stored.dtype == jnp.int8 else 4


def width_of(head_dim: int, bits: int) -> tuple[int, jnp.dtype]:
    """Return the elements of a stored vector, and the dtype of the array."""
    return head_dim * bits // 8, _STORED[bits]


def block_of(head_dim: int) -> int:
    """Return the size of the blocks that are rotated: the largest power of two that divides the head size."""
    return head_dim & -head_dim


@functools.cache
def hadamard(size: int) -> np.ndarray:
    """Return the orthonormal Hadamard matrix of a power of two, in float32; it is symmetric."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(np.sqrt(size))


def rotate(x: Array) -> Array:
    """Return vectors [..., D], rotated block by block in float32, in x's dtype. A second call undoes it."""
    size = block_of(x.shape[-1])
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, size)
    rotated = jnp.einsum("...d,de->...e", blocks, jnp.asarray(hadamard(size)), precision=lax.Precision.HIGHEST)
    return rotated.reshape(x.shape).astype(x.dtype)


def quantize_four_bits(values: Array) -> tuple[Array, Array]:
    """Return float32 values [..., D] as codes in bytes [..., D/2], and a scale per vector."""
    scales = jnp.max(jnp.abs(values), axis=-1) / CODES
    steps = values / jnp.where(scales == 0, 1, scales)[..., None]
    codes = jnp.clip(jnp.round((steps + CODES) / 2), 0, CODES).astype(jnp.uint8)
    low, high = jnp.split(codes, 2, axis=-1)
    return low | high << 4, scales


def unpack(codes: Array) -> Array:
    """Return bytes [..., D/2] of codes as the int8 numbers [..., D] that they mean, without their scales."""
    both = jnp.concatenate([codes & CODES, codes >> 4], axis=-1)
    return 2 * both.astype(jnp.int8) - jnp.int8(CODES)
