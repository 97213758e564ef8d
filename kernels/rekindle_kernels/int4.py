"""Matrices of four, six and eight bits in groups, and of codebooks: packing them, and their values.

`int4_format` has the definition.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from numpy.typing import NDArray

from rekindle_kernels.int4_format import (  # noqa: F401  other modules import the format from here
    BITS,
    CODEBOOKS,
    CODES,
    COLUMNS,
    DTYPES,
    EXPONENTS,
    FLOATS,
    GRIDS,
    GROUPS,
    HIGHEST,
    INPUTS,
    INPUTS_OF,
    IQ4,
    OFFSET,
    OUTPUTS,
    ROW_BYTES,
    SCALES,
    SIX_OFFSET,
    SMALLEST,
    SPAN,
    STEP_BYTES,
    STEPPED,
    STORED,
    STORED_GROUPS,
    STORED_SMALLEST,
    TILE,
)

_NIBBLES, _PAIRS = 0x0F0F0F0F, 0x03030303  # four and two bits of each byte
_AT_ONCE = 1 << 16  # words packed at a time, so that intermediate arrays stay in the cache


def reason_against(outputs: int, inputs: int, group: int) -> str | None:
    """Return why a matrix can't be stored with this group; None if it can."""
    if group not in STORED_GROUPS:
        return f"groups of {group} inputs are not known, only those of {', '.join(map(str, STORED_GROUPS))}"
    if outputs % OUTPUTS:
        return f"its {outputs} outputs are not a multiple of {OUTPUTS}"
    if inputs % group:
        return f"its {inputs} inputs are not a multiple of the group of {group}"
    return None


def weight_shape(shape: tuple[int, ...], bits: int = 4, *, codes: bool = False) -> tuple[int, ...]:
    """Return the shape of `weight` for a matrix [N, K] or a stack [G, N, K]; with `codes`, of a codebook's indices."""
    *stack, outputs, inputs = shape
    return (*stack, outputs // OUTPUTS, inputs * COLUMNS[CODES if codes else DTYPES[bits]])


def scale_shape(shape: tuple[int, ...], group: int, dtype: str = "float16") -> tuple[int, ...]:
    """Return the shape of `scale` and of `minimum` for a matrix or a stack."""
    *stack, outputs, inputs = shape
    return (*stack, outputs // OUTPUTS, int(inputs * scale_columns(group, dtype)))


def scale_columns(group: int, dtype: str) -> Fraction:
    """Return the number of columns of `scale` for each input."""
    return Fraction(OUTPUTS * (SPAN // group + STEP_BYTES), SPAN) if dtype == STEPPED else Fraction(OUTPUTS, group)


def matrix_shape(weight: Any) -> tuple[int, ...]:
    """Return the shape [N, K] or [G, N, K] of the matrices that `weight` holds."""
    *stack, blocks, width = weight.shape
    return (*stack, blocks * OUTPUTS, width // COLUMNS[weight.dtype.name])


def group_of(weight: Any, scale: Any) -> int:
    """Return the number of inputs that share a scale."""
    inputs: int = weight.shape[-1] // COLUMNS[weight.dtype.name]
    if scale.dtype.name == STEPPED:
        return SPAN // (scale.shape[-1] // (inputs // SPAN) // OUTPUTS - STEP_BYTES)
    group: int = inputs * OUTPUTS // scale.shape[-1]
    return group


def pack(integers: NDArray[Any], bits: int | None = None, *, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return `weight` for integers [N, K] or [G, N, K]: four bits for 0 to 15; for int8 eight bits, or `bits`.

    It is written to `out`, if there is one. `pack(indices).view(CODES)` is the weight of a codebook.
    """
    inputs = integers.shape[-1]
    bits = bits or (8 if integers.dtype == np.int8 else 4)
    if out is None:
        out = np.empty(weight_shape(integers.shape, bits), DTYPES[bits])
    octets = np.ascontiguousarray(integers, np.int8 if integers.dtype == np.int8 else np.uint8)
    words = octets.view(np.uint32).reshape(-1, OUTPUTS, inputs // 4)
    packed = out.view(np.uint32).reshape(len(words), -1, OUTPUTS)
    if bits == 8:
        packed[...] = np.swapaxes(words, 1, 2)
        return out
    # In words of four bytes: byte by byte it takes four times as long.
    step = max(1, _AT_ONCE // (OUTPUTS * words.shape[2]))
    for first in range(0, len(words), step):
        chunk = slice(first, first + step)
        if bits == 6:
            _pack_six(words[chunk], packed[chunk])
        else:
            halves = words[chunk].reshape(-1, OUTPUTS, inputs // INPUTS, 2)
            packed[chunk] = np.swapaxes(halves[..., 0] | (halves[..., 1] << np.uint32(4)), 1, 2)
    return out


def _pack_six(quads: NDArray[np.uint32], packed: NDArray[np.uint32]) -> None:
    """Fill tiles [blocks, K / 16 * 3, 16] of six bits that hold words [blocks, 16, K / 4] of four integers of int8."""
    lines = packed.reshape(len(quads), -1, 3, OUTPUTS)
    # Adding 32 to six bits of two's complement turns the highest one around. Bytes are shifted as words: bits from
    # the neighbouring byte are masked.
    stored = (quads ^ np.uint32(0x20202020)).reshape(len(quads), OUTPUTS, -1, 4)
    fours = [np.swapaxes(stored[..., four], 1, 2) for four in range(4)]
    low = [four & np.uint32(_NIBBLES) for four in fours]
    high = [(four >> np.uint32(4)) & np.uint32(_PAIRS) for four in fours]
    lines[:, :, 0] = low[0] | (low[1] << np.uint32(4))
    lines[:, :, 1] = low[2] | (low[3] << np.uint32(4))
    lines[:, :, 2] = high[0] | (high[1] << np.uint32(2)) | (high[2] << np.uint32(4)) | (high[3] << np.uint32(6))


def _words_of_six(tiles: Any) -> tuple[Any, ...]:
    """Return four arrays of words [..., 16], one for each four inputs of tiles [..., 3, 16] in six bits.

    The bytes of a word are the integers, larger by SIX_OFFSET. For arrays of NumPy and of JAX.
    """
    lines = [tiles[..., line, :] for line in range(3)]
    words = []
    for quad in range(4):
        low = (lines[quad // 2] >> np.uint32(4 * (quad % 2))) & np.uint32(_NIBBLES)
        words.append(low | (((lines[2] >> np.uint32(2 * quad)) & np.uint32(_PAIRS)) << np.uint32(4)))
    return tuple(words)


def unpack(weight: NDArray[Any]) -> NDArray[Any]:
    """Return the integers [N, K] or [G, N, K] that `weight` holds, or the indices; the inverse of `pack`."""
    if weight.dtype == CODES:
        weight = weight.view(np.uint8)
    *stack, blocks, width = weight.shape
    if weight.dtype == np.uint32:
        tiles = weight.reshape(*stack, blocks, width // (3 * OUTPUTS), 3, OUTPUTS)
        words = np.stack(_words_of_six(tiles), axis=-1)  # [..., blocks, tiles, 16, 4]
        integers = np.ascontiguousarray(np.swapaxes(words, -2, -3)).view(np.int8) - np.int8(SIX_OFFSET)
        return integers.reshape(matrix_shape(weight))
    if weight.dtype == np.int32:
        quads = np.swapaxes(weight.reshape(*stack, blocks, width // OUTPUTS, OUTPUTS), -1, -2)
        return np.ascontiguousarray(quads).view(np.int8).reshape(matrix_shape(weight))
    pairs = np.moveaxis(weight.reshape(*stack, blocks, width // TILE, OUTPUTS, 4), -3, -2)
    return np.stack([pairs & 15, pairs >> 4], axis=-2).reshape(matrix_shape(weight))


def pack_scales(scales: NDArray[Any]) -> NDArray[Any]:
    """Return `scale` or `minimum` for numbers [N, K / group] or [G, N, K / group], or for a result of `stepped`."""
    if scales.dtype == np.int8:
        *stack, outputs, spans, columns = scales.shape
        rows = scales.reshape(*stack, outputs // OUTPUTS, OUTPUTS, spans, columns)
        integers = np.moveaxis(rows[..., :-STEP_BYTES], -3, -1).reshape(*stack, outputs // OUTPUTS, spans, -1)
        steps = np.moveaxis(rows[..., -STEP_BYTES:], -3, -2).reshape(*stack, outputs // OUTPUTS, spans, -1)
        return np.concatenate([integers, steps], axis=-1).reshape(*stack, outputs // OUTPUTS, -1)
    *stack, outputs, groups = scales.shape
    blocks = scales.reshape(*stack, outputs // OUTPUTS, OUTPUTS, groups)
    return np.ascontiguousarray(np.moveaxis(blocks, -1, -2)).reshape(*stack, outputs // OUTPUTS, groups * OUTPUTS)


def stepped(integers: NDArray[np.int8], steps: NDArray[np.float16]) -> NDArray[np.int8]:
    """Return scales [..., N, K / 256, 256 / group + 2] of integers [..., N, K / group] and steps [..., N, K / 256]."""
    grouped = integers.reshape(*steps.shape, -1)
    bits = np.ascontiguousarray(steps, np.float16)[..., None].view(np.int8)
    return np.concatenate([grouped, bits], axis=-1)


def stepped_numbers(scales: NDArray[np.int8]) -> NDArray[np.float32]:
    """Return the numbers [..., N, K / group] that scales made by `stepped` stand for."""
    steps = np.ascontiguousarray(scales[..., -STEP_BYTES:]).view(np.float16)
    numbers = scales[..., :-STEP_BYTES].astype(np.float32) * steps.astype(np.float32)
    return numbers.reshape(*scales.shape[:-2], -1)


def exponent_numbers(exponents: Any) -> Any:
    """Return the scales that exponents, or their bytes, stand for, as float32. The two smallest are subnormal.

    For arrays of NumPy and of JAX.
    """
    xp: Any = jnp if isinstance(exponents, Array) else np
    wide = exponents.view(np.uint8).astype(np.int32)
    return xp.maximum((wide - 1) << 23, (wide + 1) << 21).view(np.float32)


def unpack_scales(packed: NDArray[Any]) -> NDArray[Any]:
    """Return the numbers [N, K / group] or [G, N, K / group] of `scale` or `minimum`; the inverse of `pack_scales`."""
    *stack, blocks, width = packed.shape
    numbers = np.moveaxis(packed.reshape(*stack, blocks, width // OUTPUTS, OUTPUTS), -1, -2)
    return numbers.reshape(*stack, blocks * OUTPUTS, width // OUTPUTS)


def dequantized(weight: Array, scale: Array, minimum: Array | None, dtype: DTypeLike = jnp.float32) -> Array:
    """Return the values [N, K] or [G, N, K], computed in float32 and rounded to `dtype`."""
    *stack, blocks, width = weight.shape
    inputs = width // COLUMNS[weight.dtype.name]
    kind = scale.dtype.name
    scale, minimum = numbers(scale, inputs), None if minimum is None else numbers(minimum, inputs)
    groups = scale.shape[-1] // OUTPUTS
    q = _integers(weight.reshape(*stack, blocks, groups, width // groups // _wide(weight), _wide(weight)), kind)
    shape = (*stack, blocks, groups, 1, OUTPUTS, 1, 1)
    values = _values(weight, q, *(None if array is None else array.reshape(shape) for array in (scale, minimum)))
    ordered = jnp.moveaxis(values.astype(dtype), -3, -5)
    return ordered.reshape(matrix_shape(weight))


def numbers(scale: Array, inputs: int) -> Array:
    """Return `scale` or `minimum` as numbers [..., K / group * 16], whatever their dtype."""
    if scale.dtype.name == EXPONENTS:
        exponents: Array = exponent_numbers(scale)
        return exponents
    if scale.dtype != jnp.int8:
        return scale
    parts = scale.reshape(*scale.shape[:-1], inputs // SPAN, -1, OUTPUTS)
    bits = parts[..., -STEP_BYTES:, :].reshape(*parts.shape[:-2], OUTPUTS, STEP_BYTES)
    steps = jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
    numbers = parts[..., :-STEP_BYTES, :].astype(jnp.float32) * steps[..., None, :]
    return numbers.reshape(*scale.shape[:-1], -1)


def _wide(weight: Array) -> int:
    """Return the number of columns of `weight` in a tile."""
    return INPUTS_OF[BITS[weight.dtype.name]] * COLUMNS[weight.dtype.name]


def _integers(tiles: Array, scales: str) -> Array:
    """Return the integers of tiles [..., columns] as float32 [..., 16, 2, 4], of six bits [..., 16, 4, 4].

    The axes are outputs, fours of inputs, inputs. Integers of four bits are counted from 0; indices of a codebook,
    which the dtype `scales` names, become its values.
    """
    if tiles.dtype == jnp.uint32:
        words = jnp.stack(_words_of_six(tiles.reshape(*tiles.shape[:-1], 3, OUTPUTS)), axis=-1)
        return _bytes_of_six(words)
    if tiles.dtype == jnp.int32:
        halves = jnp.swapaxes(tiles.reshape(*tiles.shape[:-1], 2, OUTPUTS), -1, -2)
        return jax.lax.bitcast_convert_type(halves, jnp.int8).astype(jnp.float32)
    return _of_pairs(tiles.reshape(*tiles.shape[:-1], OUTPUTS, -1), scales)


def _of_pairs(pairs: Array, scales: str) -> Array:
    """Return the integers, or values of a codebook, of the tiles of an output: float32 [..., 2, 4]."""
    if pairs.dtype != CODES:
        return jnp.stack([pairs & 15, pairs >> 4], axis=-2).astype(jnp.float32)
    pairs = jax.lax.bitcast_convert_type(pairs, jnp.uint8).reshape(*pairs.shape[:-1], 4)
    indices, values = jnp.stack([pairs & 15, pairs >> 4], axis=-2), [jnp.float32(one) for one in CODEBOOKS[scales]]
    for bit in range(4):  # one of each two that are left; XLA:CPU has no instruction for a look-up of many
        is_odd = (indices >> bit) & 1 != 0
        values = [jnp.where(is_odd, odd, even) for even, odd in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _bytes_of_six(words: Array) -> Array:
    """Return the integers of words [...] made by `_words_of_six`, as float32 [..., 4]."""
    return (jax.lax.bitcast_convert_type(words, jnp.int8) - jnp.int8(SIX_OFFSET)).astype(jnp.float32)


def rows(weight: Array, scale: Array, minimum: Array | None, at: Array, dtype: DTypeLike = jnp.float32) -> Array:
    """Return the rows `at` [...] of a matrix, as values [..., K]."""
    block, lane = at // OUTPUTS, at % OUTPUTS

    def one(array: Array, lanes: tuple[int, ...]) -> Array:
        tiled = array.reshape(array.shape[0], -1, OUTPUTS, *lanes)
        return tiled[block, :, lane]

    if weight.dtype == jnp.int32:
        q = jax.lax.bitcast_convert_type(one(weight, ()), jnp.int8).astype(jnp.float32)  # [..., quads, 4]
    elif weight.dtype == jnp.uint32:
        lines = one(weight, ()).reshape(*at.shape, -1, 3, 1)  # [..., tiles, lines, 1]
        q = _bytes_of_six(jnp.concatenate(_words_of_six(lines), axis=-1))  # [..., tiles, quads, 4]
    else:
        q = _of_pairs(one(weight, (4 // weight.dtype.itemsize,)), scale.dtype.name)  # [..., tiles, 2, 4]
    inputs = weight.shape[-1] // COLUMNS[weight.dtype.name]
    grouped = q.reshape(*at.shape, inputs // group_of(weight, scale), -1)

    def chosen(array: Array) -> Array:
        if array.dtype != jnp.int8:
            return numbers(one(array, ()), inputs)[..., None]
        wide = numbers(array[block], inputs).reshape(*at.shape, -1, OUTPUTS)
        return jnp.take_along_axis(wide, lane[..., None, None], axis=-1)

    scales, minimums = (None if array is None else chosen(array) for array in (scale, minimum))
    return _values(weight, grouped, scales, minimums).astype(dtype).reshape(*at.shape, -1)


def _values(weight: Array, q: Array, scale: Array | None, minimum: Array | None) -> Array:
    assert scale is not None, "integers have scales"
    if minimum is None:
        return (q - (OFFSET if weight.dtype == jnp.uint8 else 0)) * scale.astype(jnp.float32)
    return q * scale.astype(jnp.float32) + minimum.astype(jnp.float32)
