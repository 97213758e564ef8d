"""Rows times a stored matrix, with a transformer's norm, gate and residual around it: `linear(x, weight, …)`.

Axes: I inputs, O outputs.

An implementation is selected by the product alone. It then reports which of norm and gate it can fuse into the call;
the others are separate operations, before or after.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from rekindle_kernels import int4
from rekindle_kernels.activations import gated
from rekindle_kernels.ops.norm import rms_norm
from rekindle_kernels.ops.registry import Registry, current_platform

LINEAR = Registry("linear")  # run(x, weight, scale, minimum, residual, count, norm, options, dtype) -> [..., O]


@dataclass(frozen=True, slots=True)
class LinearOptions:
    """The static options of a product."""

    # The product with a weight that is not of floats: int8 by "int8", which rounds rows to int8, or by "int8-weight",
    # which doesn't. "int4" is stored in the form of `rekindle_kernels.int4`, in four bits or more.
    quantize: str | None = None
    gate: str | None = None  # an activation: the result is `gated(…, gate)`, half as wide
    eps: float = 0.0  # of the norm
    deterministic: bool = False  # a row's result is the same to the last bit for any number of rows


PLAIN = LinearOptions()


@dataclass(frozen=True, slots=True)
class LinearCall:
    """The static facts that select an implementation."""

    platform: str
    x: jax.ShapeDtypeStruct
    weight: jax.ShapeDtypeStruct
    quantize: str | None = None
    norm: bool = False
    gate: str | None = None
    deterministic: bool = False
    scale: str | None = None  # the dtype of its scales, if there are any

    @property
    def outputs(self) -> int:
        """The number of the matrix's outputs, before a gate."""
        return self.weight.shape[0] * (int4.OUTPUTS if self.quantize == "int4" else 1)

    @property
    def rows(self) -> int:
        """Rows of x, over all of its leading axes."""
        return self.x.size // self.x.shape[-1]


def linear(
    x: jax.Array,
    weight: jax.Array,
    *,
    scale: jax.Array | None = None,
    minimum: jax.Array | None = None,
    norm: jax.Array | None = None,
    residual: jax.Array | None = None,
    count: jax.Array | None = None,
    options: LinearOptions = PLAIN,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Compute x [..., I] · weight [O, I] (· scale [O]) → [..., O] in `dtype`, by default x's own.

    With `options.quantize` "int4", `weight`, `scale` and `minimum` are the arrays of `rekindle_kernels.int4`.

    With `norm` [I], x is RMS-normed before. With `options.gate`, the result is the activation of its first half times
    its second half. `residual`, shaped like the result, is added last. Rows after the first `count` are undefined.
    """
    dtype = jnp.dtype(dtype or x.dtype)
    call = LinearCall(
        platform or current_platform(),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(weight.shape, weight.dtype),
        options.quantize,
        deterministic=options.deterministic,
        scale=None if scale is None else scale.dtype.name,
    )
    chosen = LINEAR.choose(call, implementation)
    if norm is not None and chosen.supports(replace(call, norm=True)) is not None:
        x, norm = rms_norm(x, norm, options.eps, implementation=implementation, platform=platform), None
    separate_gate = options.gate
    if separate_gate is not None and chosen.supports(replace(call, gate=separate_gate)) is None:
        separate_gate = None
    if separate_gate is None:
        y: jax.Array = chosen.run(x, weight, scale, minimum, residual, count, norm, options, dtype)
        return y
    y = chosen.run(x, weight, scale, minimum, None, count, norm, replace(options, gate=None), dtype)
    y = gated(y, separate_gate)
    return y if residual is None else residual + y
