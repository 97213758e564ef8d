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

A product of few rows is bound by reading its matrix. On CPU `rekindle_kernels.linear` does that at the speed of memory
where numba is installed; XLA:CPU takes half again as long, and 20 times as long for a single row: there callers pad to
two. It also uses the instructions for four int8 at a time, which XLA:CPU does not: products of many rows take less than
half as long.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import rekindle_kernels
from rekindle._src.models.precision import Precision
from rekindle_kernels import LinearOptions, gated


def parameter(shape: tuple[int, ...], dtype: DTypeLike) -> nnx.Param:
    """A parameter as its shape and dtype. `merge` puts the array in."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))


class RMSNorm(nnx.Module):
    """RMS norm: x / rms(x) · weight over the last axis, computed in float32. A weight may have more axes."""

    def __init__(self, shape: int | tuple[int, ...], eps: float, precision: Precision) -> None:
        self.weight = parameter((shape,) if isinstance(shape, int) else shape, jnp.float32)
        self.eps, self.implementation = eps, precision.implementation

    def __call__(self, x: jax.Array) -> jax.Array:
        return rekindle_kernels.rms_norm(x, self.weight[...], self.eps, implementation=self.implementation)


class Matrix(nnx.Module):
    """A stored matrix, or a stack of them, one per expert."""

    def __init__(self, shape: tuple[int, ...], precision: Precision, *, quantize: bool = True) -> None:
        self.quantize = precision.quantize if quantize else None
        self.implementation, self.deterministic = precision.implementation, precision.deterministic
        self.weight = parameter(shape, precision.weights if self.quantize is None else jnp.int8)
        self.scale: Any = None if self.quantize is None else parameter(shape[:-1], jnp.float32)


class Linear(Matrix):
    """A linear layer, x [..., in] → [..., out], with an optional bias; other options as in `linear`.

    With `partial`, x is the part of the inputs that this device has, if a model is divided; products are summed then.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        precision: Precision,
        *,
        bias: bool = False,
        quantize: bool = True,
        partial: bool = False,
    ) -> None:
        super().__init__((out_features, in_features), precision, quantize=quantize)
        self.bias = parameter((out_features,), jnp.float32) if bias else None
        self.shards = precision.shards if partial else None

    def __call__(
        self,
        x: jax.Array,
        *,
        norm: RMSNorm | None = None,
        gate: str | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        if self.bias is None and self.shards is None:
            return linear(x, self, norm=norm, gate=gate, residual=residual)
        y = linear(x, self, norm=norm)
        if self.shards is not None:
            y = self.shards.sum(y)
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)
        y = y if gate is None else gated(y, gate)
        return y if residual is None else residual + y


class Embedding(Matrix):
    """The embedding: token ids [...] → rows [..., E] in the stream's dtype. `linear(x, embedding)` is the tied head."""

    def __init__(self, vocab_size: int, hidden_size: int, precision: Precision) -> None:
        super().__init__((vocab_size, hidden_size), precision, quantize=precision.quantize_embeddings)
        self.stream, self.shards, self.rows = precision.stream, precision.shards, vocab_size

    def __call__(self, tokens: jax.Array) -> jax.Array:
        if self.shards is None:
            return self._lookup(tokens)
        own, here = self.shards.lookup(tokens, self.rows)
        rows = self._lookup(own)
        return self.shards.sum(jnp.where(here[..., None], rows, jnp.zeros_like(rows)))

    def _lookup(self, tokens: jax.Array) -> jax.Array:
        rows = self.weight[...][tokens].astype(self.stream)
        if self.scale is None:
            return rows
        return rows * self.scale[...][tokens][..., None].astype(self.stream)


def head_logits(hidden: jax.Array, head: Matrix, precision: Precision, *, count: jax.Array | None = None) -> jax.Array:
    """hidden [N, E] → float32 [N, V] by a head of the vocabulary or a tied embedding; all of it on every device."""
    logits = linear(hidden, head, jnp.float32, count=count)
    return logits if precision.shards is None else precision.shards.whole_vocab(logits)


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
    """norm(x [..., in]) · matrix [out, in] (+ residual) → [..., out] in `dtype`, by default x's own.

    With `gate`, the name of an activation, the result is `gated(…, gate)` [..., out / 2]. Rows behind the first `count`
    are undefined.
    """
    return rekindle_kernels.linear(
        x,
        matrix.weight[...],
        scale=None if matrix.scale is None else matrix.scale[...],
        norm=None if norm is None else norm.weight[...],
        residual=residual,
        count=count,
        options=LinearOptions(matrix.quantize, gate, 0.0 if norm is None else norm.eps, matrix.deterministic),
        dtype=dtype,
        implementation=matrix.implementation,
    )
