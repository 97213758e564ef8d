"""Rows times a matrix as one dot, with 4-bit weights widened before, and rounding rows to int8."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from rekindle_kernels import gpus, int4
from rekindle_kernels.ops.linear import (
    CLAMP,
    CLAMP_SLOPE,
    AdapterCall,
    AdapterInputs,
    AdapterOptions,
    GroupedCall,
    LinearCall,
    LinearOptions,
    Operands,
    activate,
)
from rekindle_kernels.ops.registry import Implementation, anything, current_platform
from rekindle_kernels.pages import largest_magnitude

AT_ONCE = 64 << 20  # bytes of floats that a matrix in groups may have in memory at once, on a GPU without Triton


def multiply(
    x: Array, weight: Array, scale: Any, quantize: str | None, out: DTypeLike, minimum: Array | None = None
) -> Array:
    """Return x [..., I] · weight [O, I], with its scale [O] if it is quantised, as [..., O] in `out`."""
    if quantize == "int4":
        values = int4.dequantized(weight, scale, minimum, x.dtype)
        return _dot(x, values, jnp.float32).astype(out)
    if quantize == "int8":
        rows, row_scale = quantize_rows(x)
        return (_dot(rows, weight, jnp.int32).astype(jnp.float32) * row_scale * scale).astype(out)
    if quantize == "int8-weight":
        narrow = narrow_dtype(x)
        return (_dot(x.astype(narrow), weight.astype(narrow), jnp.float32) * scale).astype(out)
    # float32 results even from 16-bit operands: XLA:CPU has no fast path for 16-bit results (5–100 times slower).
    return _dot(x.astype(weight.dtype), weight, jnp.promote_types(out, jnp.float32)).astype(out)


def narrow_dtype(x: Array) -> DTypeLike:
    """Return the dtype that int8 weights are widened to for a product with x; it holds them exactly."""
    return jnp.bfloat16 if x.dtype == jnp.float32 else x.dtype


def quantize_rows(x: Array) -> tuple[Array, Array]:
    """Return x [..., I] as int8, and the float32 scale of each row [..., 1]."""
    x = x.astype(jnp.float32)
    scale = largest_magnitude(x, 1e-30) / 127.0
    return jnp.round(x / scale).astype(jnp.int8), scale


def exact_precision(x: Array, weight: Array) -> lax.Precision | None:
    """Return the precision of a product of float32: by default a GPU rounds its operands to 11 bits and a TPU to 8.

    A CPU has the exact one only, and programs for it stay as they are.
    """
    exact = x.dtype == weight.dtype == jnp.float32 and current_platform() != "cpu"
    return lax.Precision.HIGHEST if exact else None


def _dot(x: Array, weight: Array, dtype: DTypeLike) -> Array:
    precision = exact_precision(x, weight)
    contract = (((x.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    return lax.dot_general(x, weight, contract, precision, preferred_element_type=jnp.dtype(dtype))


def run(operands: Operands, options: LinearOptions, dtype: jnp.dtype) -> Array:
    """Implement `ops.linear.linear`; every row is computed, whatever `count` says."""
    x, weight, scale, minimum, residual, _, norm, expert = operands
    assert norm is None, "the operation norms before"
    assert options.gate is None, "the operation gates afterwards"
    assert expert is None, "the operation takes the matrix out of the stack"
    y = multiply(x, weight, scale, options.quantize, dtype, minimum)
    return y if residual is None else residual + y


def supports(call: LinearCall) -> str | None:
    """Return None for every plain product. Norms and gates are separate operations, which XLA fuses by itself, and so
    is the slice of a stack, at least of some."""
    if call.expert:
        return "it takes one matrix"
    if call.norm:
        return "it takes rows that are normed"
    if call.gate is not None:
        return "it gates nothing"
    return None


LINEAR = Implementation("xla", run, supports)


def run_in_tiles(operands: Operands, options: LinearOptions, dtype: jnp.dtype) -> Array:
    """Implement `ops.linear.linear` for weights in groups: matrices are widened by AT_ONCE bytes, one tile after
    another."""
    x, weight, scale, minimum, *_ = operands
    *rows, inputs = x.shape
    x = x.reshape(-1, inputs)
    # A single row would be no product of cuBLAS: XLA would widen matrices to float32 for it.
    x = jnp.pad(x, ((0, int(len(x) == 1)), (0, 0)))
    step = max(1, AT_ONCE // (int4.OUTPUTS * inputs * x.dtype.itemsize))  # blocks of outputs
    parts: list[Array] = []
    for first in range(0, weight.shape[0], step):
        tile = [None if array is None else array[first : first + step] for array in (weight, scale, minimum)]
        # Without an order among tiles XLA widens all of them before it multiplies any.
        x, _, tile = lax.optimization_barrier((x, parts[-1:], tile))
        one = Operands(x, tile[0], tile[1], tile[2])
        parts.append(run(one, options, dtype))
    y = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    y = y[: math.prod(rows)].reshape(*rows, -1)
    return y if operands.residual is None else operands.residual + y


def supports_tiles(call: LinearCall) -> str | None:
    """Return None on a GPU without Triton, where no kernel takes a group's bits apart."""
    if call.quantize != "int4":
        return "it is for groups of four bits and more"
    if gpus.without_triton() is None:
        return "Triton's kernel takes bits apart here"
    return supports(call)


TILES = Implementation("xla_tiles", run_in_tiles, supports_tiles)


def rms_norm(x: Array, weight: Array, eps: float, residual: Array | None = None, factor: Array | None = None) -> Array:
    """Implement `ops.linear.rms_norm`; `weight` broadcasts against x."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normed = (wide * scale * weight).astype(x.dtype)
    y = normed if residual is None else residual + normed
    # Rounded, by one bit more than the product would be: XLA:CPU would else join it to an addition that follows.
    return y if factor is None else lax.reduce_precision(y * factor.astype(y.dtype), 8, 22)


RMS_NORM = Implementation("xla", rms_norm, anything)


def gated(gates: Array, ups: Array | None, activation: str) -> Array:
    """Implement `ops.linear.gated`."""
    if ups is None:
        gates, ups = jnp.split(gates, 2, axis=-1)
    if activation == "clamped_silu":
        gates, ups = jnp.minimum(gates, CLAMP), jnp.clip(ups, -CLAMP, CLAMP)
        return gates * jax.nn.sigmoid(CLAMP_SLOPE * gates) * (ups + 1)
    return activate(gates, activation) * ups


GATED = Implementation("xla", gated, anything)


def grouped_linear(
    x: Array, weight: Array, sizes: Array, scale: Array | None, minimum: Array | None, dtype: jnp.dtype
) -> Array:
    """Implement `ops.linear.grouped_linear` by XLA's ragged product, which a TPU computes as such.

    XLA:CPU and XLA:GPU multiply all rows with all experts: with 128 of them, 8 to a token, that is 16 times the work.
    Rows beyond the sum of `sizes` are zero.
    """
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    weight = weight.astype(x.dtype) if scale is None else int4.dequantized(weight, scale, minimum, x.dtype)
    precision = exact_precision(x, weight)
    return lax.ragged_dot_general(x, weight, sizes, numbers, precision, preferred_element_type=dtype)


GROUPED = Implementation("xla", grouped_linear, anything)


def grouped_in_tiles(
    x: Array, weight: Array, sizes: Array, scale: Array | None, minimum: Array | None, dtype: jnp.dtype
) -> Array:
    """Implement `ops.linear.grouped_linear` for weights in groups: experts are widened by AT_ONCE bytes, some after
    others. Rows beyond the sum of `sizes` are zero."""
    experts, outputs = weight.shape[0], weight.shape[1] * int4.OUTPUTS
    most = max(1, AT_ONCE // (outputs * x.shape[1] * x.dtype.itemsize))
    step = next(count for count in range(min(most, experts), 0, -1) if experts % count == 0)
    begins = jnp.cumsum(sizes) - sizes

    def add(index: Array, y: Array) -> Array:
        first = index * step
        tile, own = (lax.dynamic_slice_in_dim(array, first, step) for array in (weight, sizes))
        factors, offsets = (
            None if array is None else lax.dynamic_slice_in_dim(array, first, step) for array in (scale, minimum)
        )
        # The rows of these experts come first; the product leaves those after them zero.
        rows = jnp.roll(x, -begins[first], axis=0)
        return y + jnp.roll(grouped_linear(rows, tile, own, factors, offsets, dtype), begins[first], axis=0)

    y: Array = lax.fori_loop(0, experts // step, add, jnp.zeros((x.shape[0], outputs), dtype))
    return y


def supports_grouped_tiles(call: GroupedCall) -> str | None:
    """Return None on a GPU without Triton, where no kernel takes a group's bits apart."""
    if call.scale is None:
        return "it is for groups of four bits and more"
    return None if gpus.without_triton() is not None else "Triton's kernel takes bits apart here"


GROUPED_TILES = Implementation("xla_tiles", grouped_in_tiles, supports_grouped_tiles)


# Products of adapters, by XLA.
#
# In a step of few tokens all rows of rank are multiplied with all tokens, and each token keeps what its own adapter
# makes. In one of many, tokens are sorted by their adapters, and each unit of rows is multiplied with windows over the
# tokens of its own. Units that no token needs cost nothing.
FEW, ROWS = 64, 1024  # tokens, and rows of rank, of which all are multiplied
WINDOW = 64


def add_adapters(inputs: AdapterInputs, options: AdapterOptions) -> Array:
    """Implement `ops.linear.add_adapters`."""
    y, x, down, up, owners, tokens, norm = inputs
    assert norm is None, "x is normed before"
    mine, outputs, gate = owners[options.place], options.outputs, options.gate
    needed = ((mine[:, None] == tokens.slots) & (mine[:, None] > 0)).any(axis=1)
    stacked, unit = down.reshape(len(outputs), len(up), -1), len(up) // len(mine)

    def all_rows() -> Array:
        rows = jnp.repeat(mine, unit)
        own = (rows == tokens.slots[:, None]) & (rows > 0)
        return y + _delta(x, stacked, up, own, outputs).astype(y.dtype)

    def own_rows() -> Array:
        begins = jnp.searchsorted(tokens.sorted_slots, mine, side="left")
        ends = jnp.searchsorted(tokens.sorted_slots, mine, side="right")
        windows = jnp.where(needed, -(-(ends - begins) // WINDOW), 0)
        behind = jnp.cumsum(windows)
        # Windows may reach past the last token: what they read there is masked, and they add zeros there.
        order = jnp.pad(tokens.order, (0, WINDOW))

        def added(index: Array, y: Array) -> Array:
            which = jnp.searchsorted(behind, index, side="right")
            begin = begins[which] + (index - (behind[which] - windows[which])) * WINDOW
            chosen = lax.dynamic_slice_in_dim(order, begin, WINDOW)
            inside = begin + jnp.arange(WINDOW) < ends[which]
            downs = lax.dynamic_slice_in_dim(stacked, which * unit, unit, axis=1)
            ups = lax.dynamic_slice_in_dim(up, which * unit, unit)
            delta = _delta(x[chosen], downs, ups, jnp.broadcast_to(inside[:, None], (WINDOW, unit)), outputs)
            return y.at[jnp.where(inside, chosen, y.shape[0])].add(delta.astype(y.dtype), mode="drop")

        return lax.fori_loop(0, behind[-1], added, y)

    add = all_rows if len(y) <= FEW and len(up) <= ROWS else own_rows
    result: Array = lax.cond(needed.any(), add, lambda: y)
    return result if gate is None else gated(result, None, gate)


def _delta(x: Array, down: Array, up: Array, mine: Array, outputs: tuple[int, ...]) -> Array:
    """Return x [T, I] · down [M, B, I]ᵀ · up [B, O] as float32, of the rows of rank in `mine` [T, B] alone."""
    with jax.named_scope("adapters"):
        narrow = _product(x, down.reshape(-1, down.shape[-1]).T).reshape(x.shape[0], len(outputs), -1)
        narrow = jnp.where(mine[:, None], narrow, 0.0)
        wide, begin = [], 0
        for index, count in enumerate(outputs):
            wide.append(_product(narrow[:, index], up[:, begin : begin + count]))
            begin += count
        return wide[0] if len(wide) == 1 else jnp.concatenate(wide, axis=-1)


def _product(x: Array, weight: Array) -> Array:
    """Return x [T, I] · weight [I, O] as float32; x is rounded as for the base's own products."""
    x = x.astype(weight.dtype)
    return jnp.matmul(x, weight, precision=exact_precision(x, weight), preferred_element_type=jnp.float32)


def supports_adapters(call: AdapterCall) -> str | None:
    """Why products can't take their norm along."""
    return "x has to be normed before" if call.norm else None


ADAPTERS = Implementation("xla", add_adapters, supports_adapters)
