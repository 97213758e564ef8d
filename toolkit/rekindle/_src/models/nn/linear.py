"""Linear layers and their weights: this module decides on dtypes, layouts and quantisation.

Every matrix is output-major, `[out, in]`, and contracted on its last axis; on CPU the other order is up to 17 times
slower. Matrices have the dtype the user chose, or are quantised; everything of one dimension (norms, biases, scales)
and the routers of experts are float32, always.

A quantised matrix is a pair of leaves of its module, and `quantised = weight * scale[:, None]`:

    weight  int8     [out, in]     or [experts, out, in]
    scale   float32  [out]         or [experts, out]; for an embedding one per row, which is its output channel as head

`quantize="int8"` multiplies int8 by int8 with one dynamic scale per activation row; `"int8-weight"` widens the weights
to the activations' 16 bits right before the product. Both have the same leaves.

Where experts are picked one by one in a loop (on CPU), a stack of 16-bit floats is kept as a uint16 leaf that holds
their bits, `array.view(numpy.uint16)`: XLA:CPU would widen the whole stack to float32 before it takes a slice of it,
but not a stack of integers. `Precision.value_dtype` tells what such a leaf's values are.

A product of few rows is bound by reading its matrix. On CPU `rekindle_kernels.native` does that at the speed of memory
where it is installed. XLA:CPU takes half again as long, and 20 times as long for a single row, so callers pad to two.
The native kernels also use the instructions for four int8 at a time, which XLA:CPU does not: products of many rows take
less than half as long.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from rekindle._src.models.nn.activations import gated
from rekindle._src.models.precision import Precision
from rekindle_kernels import native


def parameter(shape: tuple[int, ...], dtype: DTypeLike) -> nnx.Param:
    """A parameter as its shape and dtype. `merge` puts the array in."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))


class RMSNorm(nnx.Module):
    """RMS norm: x / rms(x) · weight over the last axis, computed in float32. A weight may have more axes."""

    def __init__(self, shape: int | tuple[int, ...], eps: float, precision: Precision) -> None:
        self.weight = parameter((shape,) if isinstance(shape, int) else shape, jnp.float32)
        self.eps, self.native = eps, precision.native

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.native and native.norms(x):
            return native.differentiable(partial(native.rms_norm, eps=self.eps), self.plain)(x, self.weight[...])
        return self.plain(x, self.weight[...])

    def plain(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale * weight).astype(x.dtype)


class Matrix(nnx.Module):
    """A stored matrix, or a stack of them, one per expert."""

    def __init__(self, shape: tuple[int, ...], precision: Precision, *, quantize: bool = True) -> None:
        self.quantize = precision.quantize if quantize else None
        self.native = precision.native
        self.weight = parameter(shape, precision.weights if self.quantize is None else jnp.int8)
        self.scale: Any = None if self.quantize is None else parameter(shape[:-1], jnp.float32)


class Linear(Matrix):
    """A linear layer, x [..., in] → [..., out], with an optional bias; other options as in `linear`."""

    def __init__(
        self, out_features: int, in_features: int, precision: Precision, *, bias: bool = False, quantize: bool = True
    ) -> None:
        super().__init__((out_features, in_features), precision, quantize=quantize)
        self.bias = parameter((out_features,), jnp.float32) if bias else None

    def __call__(
        self,
        x: jax.Array,
        *,
        norm: RMSNorm | None = None,
        gate: str | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        if self.bias is None:
            return linear(x, self, norm=norm, gate=gate, residual=residual)
        y = linear(x, self, norm=norm)
        y = y + self.bias[...].astype(y.dtype)
        y = y if gate is None else gated(y, gate)
        return y if residual is None else residual + y


class Embedding(Matrix):
    """The embedding: token ids [...] → rows [..., E] in the stream's dtype. `linear(x, embedding)` is the tied head."""

    def __init__(self, vocab_size: int, hidden_size: int, precision: Precision) -> None:
        super().__init__((vocab_size, hidden_size), precision, quantize=precision.quantize_embeddings)
        self.stream = precision.stream

    def __call__(self, tokens: jax.Array) -> jax.Array:
        rows = self.weight[...][tokens].astype(self.stream)
        if self.scale is None:
            return rows
        return rows * self.scale[...][tokens][..., None].astype(self.stream)


def linear(
    x: jax.Array,
    matrix: Matrix,
    dtype: DTypeLike | None = None,
    *,
    norm: RMSNorm | None = None,
    gate: str | None = None,
    residual: jax.Array | None = None,
    count: jax.Array | None = None,
) -> jax.Array:
    """Computes norm(x [..., in]) · matrix [out, in] (+ residual) → [..., out] in `dtype`, by default that of x.

    With `gate`, the name of an activation, the result is `gated(…, gate)` [..., out / 2]. Rows after the first `count`
    are undefined. On CPU all of this is one native call, where the kernel supports the combination.
    """
    scale = None if matrix.scale is None else matrix.scale[...]
    rows, weight, dtype = x.size // x.shape[-1], matrix.weight[...], jnp.dtype(dtype or x.dtype)
    rounds = matrix.quantize == "int8"
    is_native = matrix.native and native.multiplies(rows, weight, quantize_rows=rounds)
    if norm is not None and not (is_native and norm.native and native.norms(x)):
        x, norm = norm(x), None
    if gate is not None and not (is_native and gate == "silu" and native.gates(weight)):
        y = gated(linear(x, matrix, dtype, norm=norm, count=count), gate)
        return y if residual is None else residual + y
    out = jnp.dtype(jnp.float32) if is_native else dtype

    def plain(x: jax.Array, weight: jax.Array, scale: Any, residual: Any, count: Any, norms: Any) -> jax.Array:
        y = multiply(x if norm is None else norm.plain(x, norms), weight, scale, matrix.quantize, out)
        y = y if gate is None else gated(y, gate)
        return y if residual is None else residual + y

    if not is_native:
        return plain(x, weight, scale, residual, count, None)
    eps, norms = (0.0, None) if norm is None else (norm.eps, norm.weight[...])
    call = native.differentiable(partial(native.multiply, eps=eps, gated=gate is not None, quantize_rows=rounds), plain)
    flat = None if residual is None else residual.reshape(rows, -1).astype(jnp.float32)
    return call(x.reshape(rows, -1), weight, scale, flat, count, norms).reshape(*x.shape[:-1], -1).astype(dtype)


def multiply(x: jax.Array, weight: jax.Array, scale: Any, quantize: str | None, out: DTypeLike) -> jax.Array:
    """Computes x [..., in] · weight [out, in], with the weight's scale [out] if it is quantised."""
    if quantize == "int8":
        rows, row_scale = quantize_rows(x)
        return (_dot(rows, weight, jnp.int32).astype(jnp.float32) * row_scale * scale).astype(out)
    if quantize == "int8-weight":
        narrow = narrow_dtype(x)
        return (_dot(x.astype(narrow), weight.astype(narrow), jnp.float32) * scale).astype(out)
    # float32 results even from 16-bit operands: XLA:CPU has no fast path for 16-bit results (5–100 times slower).
    return _dot(x.astype(weight.dtype), weight, jnp.promote_types(out, jnp.float32)).astype(out)


def narrow_dtype(x: jax.Array) -> DTypeLike:
    """The 16-bit dtype that int8 weights are widened to. It represents every int8 exactly."""
    return jnp.bfloat16 if x.dtype == jnp.float32 else x.dtype


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantises x [..., in] to int8; returns it with the float32 scale of each row [..., 1]."""
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1e-30) / 127.0
    return jnp.round(x / scale).astype(jnp.int8), scale


def _dot(x: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    contract = (((x.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract, preferred_element_type=jnp.dtype(dtype))
