"""The native kernels as implementations of the operations.

XLA can't differentiate a native call. Norms, products and ropes therefore carry their plain form along, which computes
both value and derivative where a gradient is asked for.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from rekindle_kernels.native import (
    attention,
    build,
    kernel_table,
    products,
    python_handlers,
    recurrence,
    sampling,
)
from rekindle_kernels.native.kernel_spec import KernelSpec
from rekindle_kernels.native.recurrence import Results
from rekindle_kernels.ops.adapters import AdaptedTokens, AdapterCall, AdapterOptions
from rekindle_kernels.ops.linear import GatedCall, LinearCall, LinearOptions, NormCall, matrix_of_expert
from rekindle_kernels.ops.memory import MemoryCall
from rekindle_kernels.ops.recurrence import RecurrenceCall
from rekindle_kernels.ops.registry import Facts, Implementation
from rekindle_kernels.ops.rope import RopeCall
from rekindle_kernels.ops.sampling import Choice, SamplingCall, Wanted, block_size
from rekindle_kernels.ops.write_kv import WriteCall
from rekindle_kernels.xla import adapters as plain_adapters
from rekindle_kernels.xla import linear as plain_linear
from rekindle_kernels.xla import recurrence as plain_recurrence
from rekindle_kernels.xla import rope as plain_rope

NOT_BUILT = "its kernel can't be built here: the log says why"


def unavailable(call: Facts) -> str | None:
    """Why no native kernel serves a call with these facts; None if one may."""
    if call.platform != "cpu":
        return f"it runs on a CPU, not on {call.platform}"
    return _missing(os.environ.get("REKINDLE_NATIVE", "1"))


@functools.cache
def _missing(setting: str) -> str | None:
    """Return `build.unavailable_reason()`, cached: it looks for packages on disk, and every product of every layer
    asks."""
    return build.unavailable_reason()


def _like(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Return the shape as an array, for functions that read nothing but shape and dtype."""
    return cast(jax.Array, shape)


def writes(call: WriteCall) -> str | None:
    """Why pages can't be written natively: it takes float32 and bfloat16, and heads of whole vectors."""
    if call.kv_dtype.name not in ("float32", "bfloat16") or call.scaled:
        return f"pages are {call.kv_dtype.name}, not float32 or bfloat16"
    if call.latent:
        return "keys alone are written"
    if call.head_dim % attention.LANES:
        return f"the head size {call.head_dim} is not a multiple of {attention.LANES}"
    reason = unavailable(call)
    return reason or (None if build.builds(f"write_{call.kv_dtype.name}") else NOT_BUILT)


def linear(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None,
    minimum: jax.Array | None,
    residual: jax.Array | None,
    count: jax.Array | None,
    norm: jax.Array | None,
    expert: jax.Array | None,
    options: LinearOptions,
    dtype: jnp.dtype,
) -> jax.Array:
    """Implement `ops.linear.linear`, all of it in one call."""
    rows, gate, eps = x.size // x.shape[-1], options.gate, 0.0 if norm is None else options.eps

    def plain(
        x: jax.Array,
        weight: jax.Array,
        scale: jax.Array | None,
        minimum: jax.Array | None,
        residual: jax.Array | None,
        count: jax.Array | None,
        norm: jax.Array | None,
        expert: jax.Array | None,
    ) -> jax.Array:
        if expert is not None:
            weight, scale, minimum = matrix_of_expert(expert, weight, scale, minimum, options.values)
        x = x if norm is None else plain_linear.rms_norm(x, norm, eps)
        y = plain_linear.multiply(x, weight, scale, options.quantize, jnp.float32, minimum)
        y = y if gate is None else plain_linear.gated(y, None, gate)
        return y if residual is None else residual + y

    def product(
        x: jax.Array, weight: jax.Array, scale: jax.Array | None, minimum: jax.Array | None, *others: jax.Array | None
    ) -> jax.Array:
        if options.quantize == "int4":
            assert scale is not None, "integers have scales"
            return products.multiply_int4(
                x,
                weight,
                scale,
                minimum,
                *others,
                eps=eps,
                gated=gate is not None,
                widened=not options.deterministic,
            )
        return products.multiply(
            x,
            weight,
            scale,
            *others,
            eps=eps,
            gated=gate is not None,
            quantize_rows=options.quantize == "int8",
            deterministic=options.deterministic,
            values=options.values,
        )

    flat = None if residual is None else residual.reshape(rows, -1).astype(jnp.float32)
    y = differentiable(product, plain)(x.reshape(rows, -1), weight, scale, minimum, flat, count, norm, expert)
    return y.reshape(*x.shape[:-1], -1).astype(dtype)


def multiplies(call: LinearCall) -> str | None:
    """Why a product can't be native, or can't take its norm or gate along; it is refused where XLA is faster."""
    reason = unavailable(call) or _refused(call)
    if reason is not None:
        return reason
    if call.norm and not products.norms(_like(call.x)):
        return f"rows of {call.x.dtype.name} {list(call.x.shape)} have to be normed before"
    if call.gate is not None and (call.gate != "silu" or call.outputs % products.GATED_UNIT):
        return f"{call.gate} of {call.outputs} outputs has to be applied behind"
    return None


def _refused(call: LinearCall) -> str | None:
    """Why a product is left to XLA."""
    if call.quantize == "int4":
        return None if products.multiplies_int4(_like(call.weight), call.scale or "") else NOT_BUILT
    rounded, fixed = call.quantize == "int8", call.deterministic
    if products.multiplies(call.rows, _like(call.weight), quantize_rows=rounded, deterministic=fixed):
        return None
    shape = "x".join(map(str, call.weight.shape))
    return f"XLA is faster for {call.rows} rows times {call.weight.dtype.name} {shape}, or {NOT_BUILT}"


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, residual: jax.Array | None = None, factor: jax.Array | None = None
) -> jax.Array:
    """Implement `ops.linear.rms_norm`."""

    def one(form: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda x, weight, residual, factor: form(x, weight, eps, residual, factor)

    return differentiable(one(products.rms_norm), one(plain_linear.rms_norm))(x, weight, residual, factor)


def norms(call: NormCall) -> str | None:
    """Why a norm can't be native: it takes two-dimensional float32 whose rows are whole vectors."""
    reason = unavailable(call)
    if reason is not None or products.norms(_like(call.x)):
        return reason
    return f"{call.x.dtype.name} {list(call.x.shape)} is not float32 [T, multiple of 32], or {NOT_BUILT}"


def gated_rows(gates: jax.Array, ups: jax.Array | None, activation: str) -> jax.Array:
    """Implement `ops.linear.gated`."""
    call = differentiable(*(partial(form, activation=activation) for form in (products.gated_rows, plain_linear.gated)))
    rows = (None if array is None else array.reshape(-1, array.shape[-1]) for array in (gates, ups))
    return call(*rows).reshape(*gates.shape[:-1], -1)


def gates_rows(call: GatedCall) -> str | None:
    """Why gates can't be native: they are float32 in whole vectors."""
    reason, shape = unavailable(call), call.gates.shape
    flat = jax.ShapeDtypeStruct((prod(shape[:-1]), shape[-1]), call.gates.dtype)
    if reason is not None or products.gates_rows(_like(flat), call.activation):
        return reason
    return f"{call.activation} of {call.gates.dtype.name} {list(shape)} is not one of float32 vectors, or {NOT_BUILT}"


def add_adapters(
    y: jax.Array,
    x: jax.Array,
    down: jax.Array,
    up: jax.Array,
    owners: jax.Array,
    tokens: AdaptedTokens,
    norm: jax.Array | None,
    options: AdapterOptions,
) -> jax.Array:
    """Implement `ops.adapters.add_adapters`."""

    def plain(y: jax.Array, x: jax.Array, *others: Any) -> jax.Array:
        down, up, owners, norm, *of = others
        x = x if norm is None else plain_linear.rms_norm(x, norm, options.eps)
        return plain_adapters.add_adapters(y, x, down, up, owners, AdaptedTokens(*of), None, options)

    def fast(y: jax.Array, x: jax.Array, *others: Any) -> jax.Array:
        down, up, owners, norm, *of = others
        each = AdaptedTokens(*of)
        return products.add_adapters(
            y, x, down, up, owners, each.order, each.sorted_slots, norm,
            place=options.place, outputs=options.outputs, gated=options.gate is not None, eps=options.eps,
        )  # fmt: skip

    return differentiable(fast, plain)(y, x, down, up, owners, norm, *tokens)


def adds(call: AdapterCall) -> str | None:
    """Why adapters can't be native, or can't take their norm or gate along: they add whole vectors of float32."""
    reason = unavailable(call)
    y, x, down, up = (_like(array) for array in (call.y, call.x, call.down, call.up))
    if reason is not None or products.adds(y, x, down, up, call.units, call.outputs, call.gate, call.norm):
        return reason
    shapes = f"{call.x.dtype.name} {list(call.x.shape)} and {list(call.outputs)}"
    return f"{shapes} are not whole vectors, or not gated by silu, or {NOT_BUILT}"


def rope(
    qk: jax.Array,
    qkv: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    norm: jax.Array | None = None,
    *,
    heads: int,
    eps: float = 0.0,
) -> tuple[jax.Array, ...]:
    """Implement `ops.rope.rope`."""
    plain, fast = (partial(form, heads=heads, eps=eps) for form in (plain_rope.rope, attention.split))
    weights = () if norm is None else (norm,)
    return differentiable(fast, plain)(qk, qkv, cos, sin, *weights)


def splits(call: RopeCall) -> str | None:
    """Why a rope can't be native: it rotates float32 heads of whole vectors."""
    if call.cos is None:
        return "it always rotates"
    reason = unavailable(call)
    if reason is not None or attention.splits(_like(call.qk), _like(call.cos)):
        return reason
    return f"{call.qk.dtype.name} heads of {call.qk.shape[-1]} are not float32 in whole vectors, or {NOT_BUILT}"


def greedy(logits: jax.Array, masks: jax.Array | None = None) -> jax.Array:
    """Implement `ops.sampling.greedy`; a masked row is chosen by the kernel that draws."""
    if masks is None:
        return sampling.largest_index(logits)
    rows = logits.shape[0]
    off, none = jnp.zeros((rows,), jnp.float32), jnp.zeros((rows,), jnp.int32)
    seed = jnp.zeros((rows, 2), jnp.uint32)
    return sampling.draw(logits, *Choice(off, none, off, off, seed, none), block_size(logits.shape[-1]), masks)


def draw(logits: jax.Array, choice: Choice, wanted: Wanted, masks: jax.Array | None = None) -> jax.Array:
    """Implement `ops.sampling.draw`; each row looks at its own options, whatever is `wanted`."""
    return sampling.draw(logits, *choice, block_size(logits.shape[-1]), masks)


def chooses(call: SamplingCall) -> str | None:
    """Why a choice can't be native: it takes float32 logits."""
    reason = unavailable(call)
    if reason is not None or sampling.chooses(_like(call.logits)):
        return reason
    return f"logits are {call.logits.dtype.name}, not float32, or {NOT_BUILT}"


def untouched(leaves: Sequence[jax.ShapeDtypeStruct]) -> Sequence[jax.Array]:
    """Implement `ops.memory.zeros`, whose pages the system makes zero at first touch."""
    sizes = np.array([leaf.dtype.itemsize for leaf in leaves], np.int32)
    made: Sequence[jax.Array] = jax.ffi.ffi_call(build.ensure(python_handlers.ZEROS), leaves)(sizes)
    return made


def has_untouched(call: MemoryCall) -> str | None:
    """Why zeros can't be left to the system: only Linux does that. This kernel needs no compiler."""
    if call.platform != "cpu" or not python_handlers.has_zeros():
        return "only Linux gives CPU memory back as zeros"
    return None if build.builds(python_handlers.ZEROS) else NOT_BUILT


def fill(
    leaves: Sequence[jax.Array], ids: jax.Array, pages: Sequence[Sequence[jax.Array]], layers: int
) -> Sequence[jax.Array]:
    """Implement `ops.memory.fill_pages`, by one call for all layers."""
    arrays = len(leaves) // layers
    sizes = [prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in leaves[:arrays]]
    plan = python_handlers.fill_plan(len(pages), layers, sizes)
    results = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    aliases = {python_handlers.FIRST + index: index for index in range(len(leaves))}
    call = jax.ffi.ffi_call(build.ensure(python_handlers.FILL), results, input_output_aliases=aliases)
    filled: Sequence[jax.Array] = call(plan, ids, *leaves, *(leaf for page in pages for leaf in page))
    return filled


def fills(call: MemoryCall) -> str | None:
    """Why pages can't be filled by one call. Where XLA refused the kernel of zeros, it would refuse this one too."""
    if call.platform != "cpu" or not python_handlers.has_fill():
        return "it copies in the memory of a CPU"
    refused = python_handlers.has_zeros() and not build.builds(python_handlers.ZEROS)
    return NOT_BUILT if refused or not build.builds(python_handlers.FILL) else None


def recurs(spec: KernelSpec, call: RecurrenceCall) -> str | None:
    """Why a layer with a state can't be native: it takes float32, and states of whole vectors."""
    dtypes = {array.dtype.name for array in (call.x, call.projected, call.state)}
    if dtypes != {"float32"}:
        return f"{' and '.join(sorted(dtypes))} are not float32 alone"
    *_, keys, values = call.state.shape
    whole = (
        values % recurrence.KEYS == 0
        if spec is kernel_table.CONVOLUTION
        else keys % recurrence.KEYS == values % recurrence.VALUES == 0
    )
    if not whole:
        return f"states of {keys} x {values} are not whole vectors"
    return unavailable(call) or (None if build.builds(spec.variant().name) else NOT_BUILT)


def _recurrent(spec: KernelSpec, run: Callable[..., Results], plain: Implementation) -> Implementation:
    """Return an implementation of a layer with a state; its last argument are static options."""

    def either(*arguments: Any) -> Results:
        *arrays, options = arguments
        fast, slow = (lambda *arrays, form=form: form(*arrays, options) for form in (run, plain.run))
        return differentiable(fast, slow)(*arrays)

    return Implementation("native", either, partial(recurs, spec), deterministic=True)


ATTENTION = Implementation("native", attention.paged_attention, attention.supports, deterministic=True)
WRITE_KV = Implementation("native", attention.write, writes)
LINEAR = Implementation("native", linear, multiplies, deterministic=True)
RMS_NORM = Implementation("native", rms_norm, norms)
GATED = Implementation("native", gated_rows, gates_rows)
ADAPTERS = Implementation("native", add_adapters, adds)
ROPE = Implementation("native", rope, splits)
GREEDY = Implementation("native", greedy, chooses, one_call=True)
DRAW = Implementation("native", draw, chooses, one_call=True)
ZEROS = Implementation("native", untouched, has_untouched, give_up=partial(build.give_up, python_handlers.ZEROS))
FILL_PAGES = Implementation("native", fill, fills)
CONVOLUTION = _recurrent(kernel_table.CONVOLUTION, recurrence.convolve, plain_recurrence.CONVOLUTION_ROWS)
GATED_DELTA = _recurrent(kernel_table.GATED_DELTA, recurrence.gated_delta, plain_recurrence.GATED_DELTA_ROWS)
SELECTIVE_SCAN = _recurrent(
    kernel_table.SELECTIVE_SCAN, recurrence.selective_scan, plain_recurrence.SELECTIVE_SCAN_ROWS
)


Out = TypeVar("Out")


def differentiable(call: Callable[..., Out], plain: Callable[..., Out]) -> Callable[..., Out]:
    """Return `call`, or `plain` where it is differentiated; both take the same arrays."""
    either = jax.custom_jvp(call)
    either.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return either
