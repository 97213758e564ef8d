"""Linear layers and their weights: this module decides on dtypes, layouts and quantisation.

Every matrix is output-major, `[out, in]`, and contracted on its last axis; on CPU the other order is up to 17 times
slower. Matrices have the dtype the user chose, or are quantised; everything of one dimension (norms, biases, scales)
and the routers of experts are float32, always.

A quantised matrix is a pair of leaves of its module, and `quantised = weight * scale[:, None]`:

    weight  int8     [out, in]     or [experts, out, in]
    scale   float32  [out]         or [experts, out]; for an embedding one per row, which is its output channel as head

`quantize="int8"` multiplies int8 by int8 with one dynamic scale per activation row; `"int8-weight"` widens the weights
to the activations' 16 bits right before the product. Both have the same leaves. A matrix of four bits ("int4", with a
scale for each group of inputs), or of six or eight that a file has in groups, has the leaves `weight`, `scale` and
perhaps `minimum` that `rekindle_kernels.int4` describes. `quantise` chooses, once the model is made, by the precision
and each matrix's place in the model.

Where experts are picked one by one in a loop (on CPU), a stack of 16-bit floats is kept as a uint16 leaf that holds
their bits, `array.view(numpy.uint16)`: XLA:CPU would widen the whole stack to float32 before it takes a slice of it,
but not a stack of integers. `Precision.value_dtype` is the dtype of such a leaf's values.

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
from jax import Array
from jax.typing import DTypeLike

import rekindle_kernels
from rekindle._src.models.hooks import Delta
from rekindle._src.models.nn.packing import Packing, packing
from rekindle._src.models.precision import Precision
from rekindle_kernels import LinearOptions, gated, int4


def parameter(shape: tuple[int, ...], dtype: DTypeLike) -> nnx.Param:
    """Return a parameter with a shape and dtype. `merge` puts the array in."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))


class RMSNorm(nnx.Module):
    """RMS norm: x / rms(x) · weight over the last axis, computed in float32. A weight may have more axes."""

    def __init__(self, shape: int | tuple[int, ...], eps: float, precision: Precision) -> None:
        self.weight = parameter((shape,) if isinstance(shape, int) else shape, jnp.float32)
        self.eps, self.implementation, self.deterministic = eps, precision.implementation, precision.deterministic

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.weight[...], self.eps, self.implementation, deterministic=self.deterministic)

    def add(self, x: Array, residual: Array, factor: Array | None = None) -> Array:
        """Compute residual + norm(x), times `factor` [1], row by row; the weight has one axis."""
        return norm_rows(x, self.weight[...], self.eps, self.implementation, residual, factor)


def rms_norm(x: Array, weight: Array, eps: float, implementation: str | None, *, deterministic: bool) -> Array:
    """Norm x over its last axis. Deterministic steps need native norms."""
    if not deterministic:
        return rekindle_kernels.rms_norm(x, weight, eps, implementation=implementation)
    if weight.ndim == 1:
        return norm_rows(x, weight, eps, implementation)
    return norm_rows(x, None, eps, implementation) * weight


def norm_rows(
    x: Array,
    weight: Array | None,
    eps: float,
    implementation: str | None,
    residual: Array | None = None,
    factor: Array | None = None,
) -> Array:
    """Norm x [..., E] over its last axis as rows [T, E], which native norms take. `residual` and `factor` as in `add`.

    A weight has one axis; None is one of ones.
    """
    rows = x.reshape(-1, x.shape[-1])
    normed = rekindle_kernels.rms_norm(
        rows,
        jnp.ones(x.shape[-1], jnp.float32) if weight is None else weight,
        eps,
        residual=None if residual is None else residual.reshape(rows.shape),
        factor=factor,
        implementation=implementation,
    )
    return normed.reshape(x.shape)


class Products:
    """The products of rows with stored matrices, by the kernels. A trace may have others; see `merge`."""

    def linear(self, x: Array, matrix: Matrix, count: Array | None, options: LinearOptions, **more: Any) -> Array:
        """Compute `rekindle_kernels.linear` of x and a matrix."""
        weight, scale, minimum = matrix.arrays
        return rekindle_kernels.linear(
            x,
            weight,
            scale=scale,
            minimum=minimum,
            count=count,
            options=options,
            implementation=matrix.implementation,
            **more,
        )

    def grouped(self, x: Array, stack: Matrix, sizes: Array) -> Array | None:
        """Compute rows sorted by expert times a stack, in another way than the stack itself; None if there is none."""
        return None


KERNELS = Products()


class Matrix(nnx.Module):
    """A stored matrix, or a stack of them, one per expert."""

    products: Products = KERNELS  # of one trace
    part: str | None = None  # the part of the model, for a plan that quantises some parts; None: by the path

    def __init__(self, shape: tuple[int, ...], precision: Precision, *, quantize: bool = True) -> None:
        self.shape: tuple[int, ...] = shape
        self.quantizable: bool = quantize and precision.quantizes
        self.implementation: str | None = precision.implementation
        self.deterministic: bool = precision.deterministic
        self.quantize: str | None = None
        self.packing: Packing | None = None
        self.weight: Any = parameter(shape, precision.weights)
        self.scale: Any = None
        self.minimum: Any = None

    def store(self, path: str, kind: str) -> None:
        """Take the leaves of a matrix of this kind. Raise ConfigError if the matrix can't be stored like that."""
        self.packing = packing(kind, path, self.shape)
        if self.packing is None:
            self.quantize, self.weight = kind, parameter(self.shape, jnp.int8)
            self.scale = nnx.data(parameter(self.shape[:-1], jnp.float32))
            return
        shape = int4.weight_shape(self.shape, self.packing.bits, codes=self.packing.codes)
        self.quantize, self.weight = "int4", parameter(shape, self.packing.dtype)
        scales = int4.scale_shape(self.shape, self.packing.group, self.packing.scales)
        self.scale = nnx.data(parameter(scales, self.packing.scales))
        if self.packing.minimum:
            self.minimum = nnx.data(parameter(scales, self.packing.scales))

    @property
    def arrays(self) -> tuple[Array, Array | None, Array | None]:
        """Weight, scale and minimum; scale and minimum are None where a matrix has none."""
        scale, minimum = (None if leaf is None else leaf[...] for leaf in (self.scale, self.minimum))
        return self.weight[...], scale, minimum


def quantise(model: nnx.Module, precision: Precision) -> None:
    """Change every matrix of a model to the kind that the precision has for it."""
    if not precision.quantizes:
        return
    for path, matrix in matrices(model).items():
        kind = precision.kind(path, matrix.part or _part(path))
        if kind is not None and matrix.quantizable:
            matrix.store(path, kind)


def matrices(model: nnx.Module) -> dict[str, Matrix]:
    """Return the matrices of a model by their paths, such as "layers.0.attention.qkv"."""
    nodes = nnx.iter_graph(model)
    return {".".join(map(str, path)): node for path, node in nodes if isinstance(node, Matrix)}


def _part(path: str) -> str:
    """Return the part of a model that a matrix belongs to, one of `dtypes.QUANTIZE_PARTS`."""
    return "head" if path == "head" else "attention" if ".attention." in path else "mlp"


class Linear(Matrix):
    """A linear layer, x [..., in] → [..., out], with an optional bias; other options as in `linear`.

    With `partial`, x is this device's part of the inputs if a model is divided, and products are summed. A `delta` is
    added to the product.
    """

    delta: Delta | None = None  # of one trace; see `models/hooks.py`

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
        self, x: Array, *, norm: RMSNorm | None = None, gate: str | None = None, residual: Array | None = None
    ) -> Array:
        if self.delta is None:
            return self._without_delta(x, norm, gate, residual)
        y = self._without_delta(x, norm, None, residual if gate is None else None)
        if self.shards is None:
            y = self.delta.add(y, x, gate, norm)
        else:
            y = y + self.shards.sum(self.delta.add(jnp.zeros_like(y), x, None, norm))
            y = y if gate is None else gated(y, gate, implementation=self.implementation)
        return y if gate is None or residual is None else residual + y

    def _without_delta(self, x: Array, norm: RMSNorm | None, gate: str | None, residual: Array | None) -> Array:
        if self.bias is None and self.shards is None:
            return linear(x, self, norm=norm, gate=gate, residual=residual)
        y = linear(x, self, norm=norm)
        if self.shards is not None:
            y = self.shards.sum(y)
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)
        y = y if gate is None else gated(y, gate, implementation=self.implementation)
        return y if residual is None else residual + y


class Embedding(Matrix):
    """The embedding: token ids [...] → rows [..., E] in the stream's dtype. `linear(x, embedding)` is the tied head."""

    part = "embedding"

    def __init__(self, vocab_size: int, hidden_size: int, precision: Precision) -> None:
        super().__init__((vocab_size, hidden_size), precision, quantize=precision.quantize_embeddings)
        self.stream, self.shards, self.rows = precision.stream, precision.shards, vocab_size

    def __call__(self, tokens: Array) -> Array:
        if self.shards is None:
            return self._lookup(tokens)
        indices, present = self.shards.lookup(tokens, self.rows)
        rows = self._lookup(indices)
        return self.shards.sum(jnp.where(present[..., None], rows, jnp.zeros_like(rows)))

    def _lookup(self, tokens: Array) -> Array:
        weight, scale, minimum = self.arrays
        if self.packing is not None:
            assert scale is not None, "integers have scales"
            return int4.rows(weight, scale, minimum, tokens, self.stream)
        rows = weight[tokens].astype(self.stream)
        if scale is None:
            return rows
        return rows * scale[tokens][..., None].astype(self.stream)


def head_logits(hidden: Array, head: Matrix, precision: Precision, *, count: Array | None = None) -> Array:
    """Compute hidden [N, E] → float32 [N, V] with a head or a tied embedding; every device has all of the result."""
    logits = linear(hidden, head, jnp.float32, count=count)
    return logits if precision.shards is None else precision.shards.whole_vocab(logits)


def linear(
    x: Array,
    matrix: Matrix,
    dtype: DTypeLike | None = None,
    *,
    norm: RMSNorm | None = None,
    gate: str | None = None,
    residual: Array | None = None,
    count: Array | None = None,
) -> Array:
    """Compute norm(x [..., in]) · matrix [out, in] (+ residual) → [..., out] in `dtype`, by default x's own.

    With `gate`, the name of an activation, the result is `gated(…, gate)` [..., out / 2]. Rows after the first `count`
    are undefined.
    """
    return matrix.products.linear(
        x,
        matrix,
        count,
        LinearOptions(matrix.quantize, gate, 0.0 if norm is None else norm.eps, matrix.deterministic),
        norm=None if norm is None else norm.weight[...],
        residual=residual,
        dtype=dtype,
    )
