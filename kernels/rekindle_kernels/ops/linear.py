"""Rows times a stored matrix, with a transformer's norm, gate and residual around it: `linear(x, weight, …)`.

Axes: I inputs, O outputs.

An implementation is selected by the product alone. It then reports which of norm and gate it can fuse into the call;
the others are separate operations, before or after. RMS norms, the functions between the
matrices of an MLP, and rows of several experts, each times its expert's matrix (`grouped_linear`), are here, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from rekindle_kernels import int4
from rekindle_kernels.ops.registry import Registry, current_platform

LINEAR = Registry("linear")  # run(operands, options, dtype) -> [..., O]
CLAMP, CLAMP_SLOPE = 7.0, 1.702  # of "clamped_silu", in `gated`


class Operands(NamedTuple):
    """The arrays of a product, as `linear` describes them."""

    x: Array
    weight: Array
    scale: Array | None = None
    minimum: Array | None = None
    residual: Array | None = None
    rows: Array | None = None  # `count`
    norm: Array | None = None
    expert: Array | None = None

    def with_one_matrix(self, values: str | None) -> Operands:
        """Return the operands with the matrix of `expert` in place of a stack; see `LinearOptions.values`."""
        if self.expert is None:
            return self
        weight, scale, minimum = matrix_of_expert(self.expert, self.weight, self.scale, self.minimum, values)
        return self._replace(weight=weight, scale=scale, minimum=minimum, expert=None)


@dataclass(frozen=True, slots=True)
class LinearOptions:
    """The static options of a product."""

    # The product with a weight that is not of floats: int8 by "int8", which rounds rows to int8, or by "int8-weight",
    # which doesn't. "int4" is stored in the form of `rekindle_kernels.int4`, in four bits or more.
    quantize: str | None = None
    gate: str | None = None  # an activation: the result is `gated(…, gate)`, half as wide
    eps: float = 0.0  # of the norm
    deterministic: bool = False  # a row's result is the same to the last bit for any number of rows
    values: str | None = None  # the dtype of a stack that is uint16 and holds the bits of 16-bit floats


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
    group: int = 0  # the inputs that share one, if it is stored in groups
    expert: bool = False  # the weight is one of a stack, which is read in place

    @property
    def outputs(self) -> int:
        """The number of the matrix's outputs, before a gate."""
        return self.weight.shape[0] * (int4.OUTPUTS if self.quantize == "int4" else 1)

    @property
    def rows(self) -> int:
        """Rows of x, over all of its leading axes."""
        return self.x.size // self.x.shape[-1]


def linear(
    x: Array,
    weight: Array,
    *,
    scale: Array | None = None,
    minimum: Array | None = None,
    norm: Array | None = None,
    residual: Array | None = None,
    count: Array | None = None,
    expert: Array | None = None,
    options: LinearOptions = PLAIN,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Compute x [..., I] · weight [O, I] (· scale [O]) → [..., O] in `dtype`, by default x's own.

    With `options.quantize` "int4", `weight`, `scale` and `minimum` are the arrays of `rekindle_kernels.int4`.

    With `norm` [I], x is RMS-normed before. With `options.gate`, the result is the activation of its first half times
    its second half. `residual`, shaped like the result, is added last. Rows after the first `count` are undefined.

    With `expert`, an int32 scalar, `weight`, `scale` and `minimum` are stacks [G, …], of which it chooses one matrix as
    `jax.lax.dynamic_index_in_dim` does. Where an implementation can, that is read in place, else it is copied first.
    """
    dtype = jnp.dtype(dtype or x.dtype)
    call = LinearCall(
        platform or current_platform(),
        _shape(x),
        jax.ShapeDtypeStruct(weight.shape if expert is None else weight.shape[1:], options.values or weight.dtype),
        options.quantize,
        deterministic=options.deterministic,
        scale=None if scale is None else scale.dtype.name,
        group=int4.group_of(weight, scale) if options.quantize == "int4" else 0,
    )
    chosen = LINEAR.choose(call, implementation)
    operands = Operands(x, weight, scale, minimum, residual, count, norm, expert)
    if expert is not None and chosen.supports(replace(call, expert=True)) is not None:
        operands, options = operands.with_one_matrix(options.values), replace(options, values=None)
    if norm is not None and chosen.supports(replace(call, norm=True)) is not None:
        x = rms_norm(x, norm, options.eps, implementation=implementation, platform=platform)
        operands = operands._replace(x=x, norm=None)
    gate = options.gate
    if gate is None or chosen.supports(replace(call, gate=gate)) is None:
        y: Array = chosen.run(operands, options, dtype)
        return y
    y = chosen.run(operands._replace(residual=None), replace(options, gate=None), dtype)
    y = gated(y, gate, implementation=implementation, platform=platform)
    return y if residual is None else residual + y


def matrix_of_expert(
    expert: Array, weight: Array, scale: Array | None, minimum: Array | None, values: str | None
) -> tuple[Array, Array | None, Array | None]:
    """Return one matrix of a stack, its scale and its minimum; `values` is the option of `LinearOptions`."""

    def one(stack: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(stack, expert, keepdims=False)

    weight = one(weight)
    if values is not None:
        weight = jax.lax.bitcast_convert_type(weight, jnp.dtype(values))
    return weight, None if scale is None else one(scale), None if minimum is None else one(minimum)


def activate(x: Array, name: str) -> Array:
    """Apply the activation called `name` ("silu", "relu", "relu2", "gelu" or "gelu_tanh") to every element."""
    if name == "silu":
        return jax.nn.silu(x)
    if name == "relu":
        return jax.nn.relu(x)
    if name == "relu2":
        return jnp.square(jax.nn.relu(x))
    return jax.nn.gelu(x, approximate=name == "gelu_tanh")


GATED = Registry("gated")  # run(gates, ups, activation) -> [..., I]


@dataclass(frozen=True, slots=True)
class GatedCall:
    """The static facts that select an implementation."""

    platform: str
    gates: jax.ShapeDtypeStruct
    activation: str


def gated(
    gates: Array,
    activation: str,
    ups: Array | None = None,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Return act(gate) · up [..., I] of gates and ups [..., I]. Without `ups`, they follow in gates [..., 2·I].

    "clamped_silu" limits gates to 7 and ups to ±7, and returns gate · sigmoid(1.702 · gate) · (up + 1).
    `implementation` is that of the product whose gate it is: of "xla", everything is XLA's; other names say nothing
    about gates.
    """
    call = GatedCall(platform or current_platform(), _shape(gates), activation)
    chosen = GATED.choose(call, implementation if implementation == "xla" else None)
    result: Array = chosen.run(gates, ups, activation)
    return result


RMS_NORM = Registry("rms_norm")  # run(x, weight, eps, residual, factor) -> like x


@dataclass(frozen=True, slots=True)
class NormCall:
    """The static facts that select an implementation."""

    platform: str
    x: jax.ShapeDtypeStruct


def rms_norm(
    x: Array,
    weight: Array,
    eps: float,
    *,
    residual: Array | None = None,
    factor: Array | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Compute x / sqrt(mean(x²) + eps) · weight in x's dtype; the mean is over the last axis, in float32.

    `residual`, shaped like x, is added. The sum is multiplied by `factor` [1], if there is one, and rounded to 22 bits.
    """
    call = NormCall(platform or current_platform(), _shape(x))
    normed: Array = RMS_NORM.choose(call, implementation).run(x, weight, eps, residual, factor)
    return normed


GROUPED_LINEAR = Registry("grouped_linear")  # run(x, weight, sizes, scale, minimum, dtype) -> [M, O]


@dataclass(frozen=True, slots=True)
class GroupedCall:
    """The static facts that select an implementation."""

    platform: str
    x: jax.ShapeDtypeStruct
    weight: jax.ShapeDtypeStruct
    scale: str | None = None  # the dtype of its scales, if it is stored in the form of `rekindle_kernels.int4`


def grouped_linear(
    x: Array,
    weight: Array,
    sizes: Array,
    *,
    scale: Array | None = None,
    minimum: Array | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Compute x [M, I] → [M, O] in `dtype`: `sizes[0]` rows times `weight[0]`, then `sizes[1]` times `weight[1]`, …

    Rows beyond the sum of `sizes` are undefined. Weights of int8 are widened to x's type, exactly; with
    rows of int8 as well, sums are integers and `dtype` is int32. With a `scale`, and perhaps a `minimum`, these are the
    arrays of `rekindle_kernels.int4`, for a stack of matrices.
    """
    stored = None if scale is None else scale.dtype.name
    call = GroupedCall(platform or current_platform(), _shape(x), _shape(weight), stored)
    run = GROUPED_LINEAR.choose(call, implementation).run
    result: Array = run(x, weight, sizes, scale, minimum, jnp.dtype(dtype))
    return result


# Products of adapters (LoRA), added to those of a step whose tokens each have their own or none.
#
# Axes: T tokens, I inputs, O outputs, M modules whose outputs follow one another, B rows of rank, U units that
# share these rows alike, C places: rows of `owners`, of which a call reads one.
ADAPTERS = Registry("adapters")  # run(inputs, options) -> [T, O], gated [T, O / 2]


class AdaptedTokens(NamedTuple):
    """The adapters of a step's tokens; `of` makes it, once for all products."""

    slots: Array  # int32 [T], 0 for none
    order: Array  # int32 [T]: the tokens, those of one adapter together
    sorted_slots: Array  # int32 [T]: `slots` in this order

    @classmethod
    def of(cls, slots: Array) -> AdaptedTokens:
        """Return the tokens with these adapters."""
        order = jnp.argsort(slots, stable=True).astype(jnp.int32)
        return cls(slots, order, slots[order])


class AdapterInputs(NamedTuple):
    """The arrays of a call, as `add_adapters` describes them."""

    y: Array
    x: Array
    down: Array
    up: Array
    owners: Array
    tokens: AdaptedTokens
    norm: Array | None = None


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """The static options of a call."""

    place: int
    outputs: tuple[int, ...]
    gate: str | None
    eps: float  # of the norm


@dataclass(frozen=True, slots=True)
class AdapterCall:
    """The static facts that select an implementation."""

    platform: str
    y: jax.ShapeDtypeStruct
    x: jax.ShapeDtypeStruct
    down: jax.ShapeDtypeStruct
    up: jax.ShapeDtypeStruct
    units: int
    outputs: tuple[int, ...]
    gate: str | None = None
    norm: bool = False


def add_adapters(
    y: Array,
    x: Array,
    down: Array,
    up: Array,
    owners: Array,
    tokens: AdaptedTokens,
    *,
    place: int,
    outputs: tuple[int, ...],
    gate: str | None = None,
    norm: Array | None = None,
    eps: float = 0.0,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Return y [T, O] plus x [T, I] · downᵀ · up, with the rows of rank of each token's adapter.

    `down` [M · B, I] has the B rows of the first module, then those of the next; `up` [B, O] has their weights of the
    `outputs` of all modules. Unit u of the rows belongs to the adapter `owners[place, u]` (int32 [C, U], 0 for none).
    Rows of tokens without an adapter are those of y, to the last bit. With `norm` [I], x is `rms_norm(x, norm, eps)`.
    With the name of an activation as `gate`, the result is `gated(…, gate)`, of all tokens.
    """
    call = AdapterCall(
        platform or current_platform(), _shape(y), _shape(x), _shape(down), _shape(up), owners.shape[1], outputs
    )
    chosen = ADAPTERS.choose(call, implementation)
    if norm is not None and chosen.supports(replace(call, norm=True)) is not None:
        x, norm = rms_norm(x, norm, eps, implementation=implementation, platform=platform), None
    behind = gate if gate is not None and chosen.supports(replace(call, gate=gate)) is not None else None
    options = AdapterOptions(place, outputs, gate if behind is None else None, eps)
    added: Array = chosen.run(AdapterInputs(y, x, down, up, owners, tokens, norm), options)
    return added if behind is None else gated(added, behind, implementation=implementation, platform=platform)


def _shape(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
