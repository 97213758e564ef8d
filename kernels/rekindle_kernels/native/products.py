"""Rows times a matrix, their norms and gates, and products of adapters, as calls of JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rekindle_kernels import int4
from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.build import builds
from rekindle_kernels.native.calling import NOT_BUILT, call, differentiable, like, unavailable
from rekindle_kernels.native.cpu import has_amx, multiplies_many, multiplies_widened
from rekindle_kernels.native.kernel_table import (
    ACTIVATIONS,
    ADAPTED,
    ADAPTER,
    ADAPTER_GATE,
    DTYPES,
    GATED_ROWS,
    GEMM,
    MATVEC,
    Variant,
    grouped,
)
from rekindle_kernels.ops.linear import (
    AdapterCall,
    AdapterInputs,
    AdapterOptions,
    GatedCall,
    LinearCall,
    LinearOptions,
    NormCall,
    Operands,
)
from rekindle_kernels.ops.registry import Implementation
from rekindle_kernels.xla import linear as plain

FEW_ROWS = 4  # float32 arithmetic on them is faster than reading the matrix, whatever its weights are
SOME_ROWS = 8  # it still beats XLA, which packs the matrix first
# From so many rows, and numbers in the matrix, products of float32 are faster as products of bfloat16 by AMX.
SPLIT_ROWS, SPLIT_NUMBERS = 256, 1 << 18
GATED_UNIT = 32  # outputs: whole vectors of gates and of ups
LANES, TOGETHER = 16, 4  # numbers of a vector, and rows of an adapter that are multiplied together
Described = Array | jax.ShapeDtypeStruct


def multiplies(rows: int, weight: Described, *, quantize_rows: bool = False, deterministic: bool = False) -> bool:
    """True if `multiply` takes so many rows and this weight, and beats XLA unless it has to be deterministic."""
    kernel = _kernel(rows, weight, quantize_rows, deterministic)
    return kernel is not None and builds(kernel.name)


def _kernel(rows: int, weight: Described, quantize_rows: bool, deterministic: bool = False) -> Variant | None:
    """Return the kernel that multiplies; None where XLA is better. Where results have to be deterministic, the
    number of rows has no say in it."""
    if weight.ndim != 2 or weight.dtype.name not in DTYPES:
        return None
    if weight.dtype == jnp.float32 and not deterministic and _multiplies_floats(rows, weight):
        return GEMM.variant("float32")
    # Sixteen-bit weights have to be widened and turned first, which eight rows are too few for.
    widened = multiplies_widened(weight.dtype.name)
    few = SOME_ROWS if weight.dtype == jnp.bfloat16 and widened else FEW_ROWS
    # Where the matrix is widened, one row would take twice as long in the way of many.
    many = not widened if deterministic else rows > few
    if many and _has_gemm(weight) and (quantize_rows or weight.dtype != jnp.int8):
        return GEMM.variant(weight.dtype.name)
    return MATVEC.variant(weight.dtype.name) if rows <= SOME_ROWS or deterministic else None


def _has_gemm(weight: Described) -> bool:
    N, K = weight.shape
    return weight.dtype != jnp.float32 and K % 64 == 0 and N % 16 == 0 and multiplies_many(weight.dtype.name)


def _multiplies_floats(rows: int, weight: Described) -> bool:
    """True if so many rows times a float32 matrix are faster in strips, or as products of bfloat16 by AMX."""
    N, K = weight.shape
    enough = rows > FEW_ROWS if multiplies_widened("float32") else rows >= SPLIT_ROWS and N * K >= SPLIT_NUMBERS
    return enough and K % LANES == 0 and N % LANES == 0 and multiplies_many("float32")


def multiplies_int4(weight: Array, scale: str, group: int) -> bool:
    """True if `multiply_int4` takes this weight with scales of that dtype, one for so many inputs, for any number of
    rows."""
    stored = weight.dtype.name
    scales = int4.STORED.get(stored, ())
    if group == int4.SMALLEST:
        scales = int4.STORED_SMALLEST.get(stored, scales)
    known = weight.ndim == 2 and scale in scales
    return known and builds(grouped(stored, group).variant(scale).name)


def multiply_int4(
    x: Array,
    weight: Array,
    scale: Array,
    minimum: Array | None = None,
    residual: Array | None = None,
    count: Array | None = None,
    norm: Array | None = None,
    expert: Array | None = None,
    *,
    eps: float = 0.0,
    gated: bool = False,
    widened: bool = False,
) -> Array:
    """x [R, K] · a matrix [N, K] of four, six or eight bits in groups, or of a codebook, + residual -> float32 [R, N].

    Norm, gate and `expert` work as in `multiply`.

    Rows become 8-bit integers with a scale for each group of inputs. A row's results do not depend on the number of
    rows, to the last bit; with `widened`, many rows and the matrix become bfloat16 where that is faster. Results after
    the first `count` rows are undefined.
    """
    N, K = int4.matrix_shape(weight)[-2:]
    assert x.shape[1] == K, f"rows of {x.shape[1]} and a matrix of {K} inputs"
    group = int4.group_of(weight, scale)
    reason = int4.reason_against(N, K, group)
    assert reason is None, reason
    assert minimum is None or weight.dtype != int4.CODES, "codebooks have no minimums"
    return _product(
        grouped(weight.dtype.name, group).variant(scale.dtype.name),
        {"weight": weight, "scale": scale, "minimum": minimum},
        Operands(x, weight, residual=residual, rows=count, norm=norm, expert=expert),
        N,
        {"eps": eps, "gated": gated, "amx": has_amx(), "widened": widened},
    )


def _product(
    kernel: Variant, matrix: dict[str, Array | None], each: Operands, N: int, settings: dict[str, float]
) -> Array:
    """Return the rows of `each` times a matrix of N outputs, or one of a stack, which `matrix` has as arrays."""
    x, gated = each.x, settings["gated"]
    assert each.norm is None or norms(x), f"rows of {x.dtype}{list(x.shape)} have to be normed before"
    assert not gated or N % GATED_UNIT == 0, f"{N} outputs have to be gated afterwards"
    if each.expert is not None:  # the axis of matrices is joined with that of their rows
        matrix = {name: None if one is None else one.reshape(-1, *one.shape[2:]) for name, one in matrix.items()}
    operands = {
        **matrix,
        "x": x.astype(jnp.float32),
        "residual": None if each.residual is None else each.residual.astype(jnp.float32),
        "rows": None if each.rows is None else jnp.stack([each.rows, len(x) - each.rows]).astype(jnp.int32),
        "norm": None if each.norm is None else each.norm.astype(jnp.float32),
        "expert": None if each.expert is None else each.expert.astype(jnp.int32),
    }
    (product,) = call(kernel, operands, settings, {"M": N // 2 if gated else N})
    return product


def gates(weight: Array) -> bool:
    """True if `multiply` by this weight can end in a gate."""
    return weight.shape[-2] % GATED_UNIT == 0


def multiply(
    x: Array,
    weight: Array,
    scale: Array | None = None,
    residual: Array | None = None,
    count: Array | None = None,
    norm: Array | None = None,
    expert: Array | None = None,
    *,
    eps: float = 0.0,
    gated: bool = False,
    quantize_rows: bool = False,
    deterministic: bool = False,
    values: str | None = None,
) -> Array:
    """x [R, K] · weight [N, K] · scale [N] + residual -> float32 [R, N].

    With `norm`, x is `rms_norm(x, norm, eps)` first; `gated` results are silu of the first half of the outputs times
    the other, [R, N / 2]. Many rows are rounded to bfloat16 if the weight is bfloat16, unless they are multiplied in
    float32; with an int8 weight and `quantize_rows`, each row becomes int8 with its own scale. With `deterministic`, a
    row's results do not depend on the number of rows, to the last bit. Results after the first `count` rows are
    undefined.

    With `expert`, weight and scale are stacks, with one more axis in front. `expert` chooses a matrix as
    `jax.lax.dynamic_index_in_dim` does, without a copy; 16-bit weights may then be the bits of `values`, as uint16.
    """
    R, (N, K) = x.shape[0], weight.shape[-2:]
    one = jax.ShapeDtypeStruct((N, K), jnp.dtype(values or weight.dtype))
    kernel = _kernel(R, one, quantize_rows, deterministic)
    assert kernel is not None, f"{R} rows times {one.dtype}{list(one.shape)} are XLA's"
    # AMX adds the products of a row in another order than what a program of fewer rows has.
    own: dict[str, int] = {"invariant": deterministic}
    if kernel.spec is GEMM:
        own = {"amx": has_amx() and not deterministic, "place": 0, "number_bytes": 0}
    if scale is None and weight.dtype == jnp.int8:
        scale = jnp.ones(weight.shape[:-1], jnp.float32)
    return _product(
        kernel,
        {"weight": weight, "scale": None if scale is None else scale.astype(jnp.float32)},
        Operands(x, weight, residual=residual, rows=count, norm=norm, expert=expert),
        N,
        {"eps": eps, "gated": gated, **own},
    )


def norms(x: Array) -> bool:
    """True if `rms_norm`, and `multiply` with a norm, take these rows."""
    return (
        x.ndim == 2 and x.dtype == jnp.float32 and x.shape[1] % 32 == 0 and builds(kernel_table.RMS_NORM.variant().name)
    )


def rms_norm(x: Array, weight: Array, eps: float, residual: Array | None = None, factor: Array | None = None) -> Array:
    """x [T, E] / rms(x) · weight [E], + residual [T, E]. With `factor` [1], the sum is multiplied by it and rounded to
    22 bits."""
    assert norms(x), f"rows of {x.dtype}{list(x.shape)} are normed by XLA"
    assert factor is None or residual is not None, "sums are multiplied"
    operands = {"x": x, "weight": weight.astype(jnp.float32), "residual": residual, "factor": factor}
    (normed,) = call(kernel_table.RMS_NORM.variant(), operands, {"eps": eps})
    return normed


def gates_rows(gates: Array, activation: str) -> bool:
    """True if `gated_rows` takes these gates, with their ups after them in each row or in an array of their own."""
    usable = gates.ndim == 2 and gates.dtype == jnp.float32 and gates.shape[1] % GATED_UNIT == 0
    return usable and activation in ACTIVATIONS and builds(GATED_ROWS.variant().name)


def gated_rows(gates: Array, ups: Array | None, activation: str) -> Array:
    """The activation of gates [T, M] times ups [T, M]; without ups, of the halves of gates [T, 2 M]."""
    assert gates_rows(gates, activation), f"{activation} of {gates.dtype}{list(gates.shape)} is applied by XLA"
    height = gates.shape[1] // 2 if ups is None else gates.shape[1]
    settings = {"activation": ACTIVATIONS.index(activation)}
    (gated,) = call(GATED_ROWS.variant(), {"gates": gates, "ups": ups}, settings, {"M": height})
    return gated


def adds(wanted: AdapterCall) -> bool:
    """True if `add_adapters` takes these."""
    x, up, outputs, gate = wanted.x, wanted.up, wanted.outputs, wanted.gate
    whole = x.shape[-1] % (2 * LANES if wanted.norm else LANES) == 0 and all(count % LANES == 0 for count in outputs)
    known = wanted.y.dtype.name == x.dtype.name == "float32" and wanted.down.dtype == up.dtype
    divided = up.shape[0] % (wanted.units * TOGETHER) == 0
    alike = len(outputs) == 1 or (len(outputs) == 2 and outputs[0] == outputs[1])
    halves = gate is None or (gate == "silu" and wanted.y.shape[-1] % (2 * LANES) == 0 and alike)
    spec = ADAPTER if gate is None else ADAPTER_GATE
    usable = whole and known and up.dtype.name in ADAPTED and divided and halves
    return usable and builds(spec.variant(up.dtype.name).name)


def add_adapters(
    y: Array,
    x: Array,
    down: Array,
    up: Array,
    owners: Array,
    order: Array,
    slots: Array,
    norm: Array | None = None,
    *,
    place: int,
    outputs: Sequence[int],
    gated: bool,
    eps: float = 0.0,
) -> Array:
    """Return y [T, N] plus x [T, K] times the rows of `down` [L · B, K] of each token's adapter, times their rows of
    `up` [B, N].

    `order` [T] and `slots` [T] are the tokens sorted by adapter, and their adapters in that order; `outputs` has the
    number of outputs of each of the L modules. If `gated`, return silu of the first half of the sum times the other
    half. With `norm`, x is `rms_norm(x, norm, eps)` first. A row's results do not depend on the others, to the last
    bit.
    """
    T, spans = y.shape[0], np.cumsum(outputs).astype(np.int32)
    assert order.shape == slots.shape == (T,), f"{T} tokens, and an order {order.shape} of slots {slots.shape}"
    assert down.shape[0] == len(spans) * up.shape[0], f"{len(spans)} modules of {up.shape[0]} rows in {down.shape}"
    assert spans[-1] == y.shape[1], f"{spans[-1]} outputs in rows of {y.shape[1]}"
    assert 0 <= place < owners.shape[0], f"place {place} of {owners.shape[0]}"
    operands = {
        "y": y, "x": x, "down": down, "up": up, "owners": owners, "order": order, "slots": slots, "spans": spans,
        "norm": None if norm is None else norm.astype(jnp.float32),
    }  # fmt: skip
    spec, sizes = (ADAPTER_GATE, {"M": y.shape[1] // 2}) if gated else (ADAPTER, None)
    (added,) = call(spec.variant(up.dtype.name), operands, {"place": place, "eps": eps}, sizes)
    return added


# The same as implementations of operations.


def _add_adapters(inputs: AdapterInputs, options: AdapterOptions) -> Array:
    """Implement `ops.linear.add_adapters`."""

    def slow(inputs: AdapterInputs) -> Array:
        x = inputs.x if inputs.norm is None else plain.rms_norm(inputs.x, inputs.norm, options.eps)
        return plain.add_adapters(inputs._replace(x=x, norm=None), options)

    def fast(inputs: AdapterInputs) -> Array:
        y, x, down, up, owners, tokens, norm = inputs
        return add_adapters(
            y, x, down, up, owners, tokens.order, tokens.sorted_slots, norm,
            place=options.place, outputs=options.outputs, gated=options.gate is not None, eps=options.eps,
        )  # fmt: skip

    return differentiable(fast, slow)(inputs)


def _linear(operands: Operands, options: LinearOptions, dtype: jnp.dtype) -> Array:
    """Implement `ops.linear.linear`, all of it in one call."""
    x, gate, eps = operands.x, options.gate, 0.0 if operands.norm is None else options.eps
    rows = x.size // x.shape[-1]

    def slow(each: Operands) -> Array:
        each = each.with_one_matrix(options.values)
        x = each.x if each.norm is None else plain.rms_norm(each.x, each.norm, eps)
        y = plain.multiply(x, each.weight, each.scale, options.quantize, jnp.float32, each.minimum)
        y = y if gate is None else plain.gated(y, None, gate)
        return y if each.residual is None else each.residual + y

    def fast(each: Operands) -> Array:
        x, weight, scale, minimum, *others = each
        if options.quantize == "int4":
            assert scale is not None, "integers have scales"
            fixed = options.deterministic
            return multiply_int4(x, weight, scale, minimum, *others, eps=eps, gated=gate is not None, widened=not fixed)
        return multiply(
            x, weight, scale, *others, eps=eps, gated=gate is not None, quantize_rows=options.quantize == "int8",
            deterministic=options.deterministic, values=options.values,
        )  # fmt: skip

    residual = operands.residual
    flat = None if residual is None else residual.reshape(rows, -1).astype(jnp.float32)
    y = differentiable(fast, slow)(operands._replace(x=x.reshape(rows, -1), residual=flat))
    return y.reshape(*x.shape[:-1], -1).astype(dtype)


def _multiplies(wanted: LinearCall) -> str | None:
    """Why a product can't be native, or can't take its norm or gate along; it is refused where XLA is faster."""
    reason = unavailable(wanted) or _refused(wanted)
    if reason is not None:
        return reason
    if wanted.norm and not norms(like(wanted.x)):
        return f"rows of {wanted.x.dtype.name} {list(wanted.x.shape)} have to be normed before"
    if wanted.gate is not None and (wanted.gate != "silu" or wanted.outputs % GATED_UNIT):
        return f"{wanted.gate} of {wanted.outputs} outputs has to be applied afterwards"
    return None


def _refused(wanted: LinearCall) -> str | None:
    """Why a product is left to XLA."""
    if wanted.quantize == "int4":
        return None if multiplies_int4(like(wanted.weight), wanted.scale or "", wanted.group) else NOT_BUILT
    rounded, fixed = wanted.quantize == "int8", wanted.deterministic
    if multiplies(wanted.rows, wanted.weight, quantize_rows=rounded, deterministic=fixed):
        return None
    shape = "x".join(map(str, wanted.weight.shape))
    return f"XLA is faster for {wanted.rows} rows times {wanted.weight.dtype.name} {shape}, or {NOT_BUILT}"


def _rms_norm(x: Array, weight: Array, eps: float, residual: Array | None = None, factor: Array | None = None) -> Array:
    """Implement `ops.linear.rms_norm`."""

    def one(form: Callable[..., Array]) -> Callable[..., Array]:
        return lambda x, weight, residual, factor: form(x, weight, eps, residual, factor)

    return differentiable(one(rms_norm), one(plain.rms_norm))(x, weight, residual, factor)


def _norms(wanted: NormCall) -> str | None:
    """Say why a norm can't be native, which takes float32 [T, whole vectors]."""
    text = f"{wanted.x.dtype.name} {list(wanted.x.shape)} is not float32 [T, multiple of 32], or {NOT_BUILT}"
    return unavailable(wanted) or (None if norms(like(wanted.x)) else text)


def _gated_rows(gates: Array, ups: Array | None, activation: str) -> Array:
    """Implement `ops.linear.gated`."""
    call = differentiable(*(partial(form, activation=activation) for form in (gated_rows, plain.gated)))
    rows = (None if array is None else array.reshape(-1, array.shape[-1]) for array in (gates, ups))
    return call(*rows).reshape(*gates.shape[:-1], -1)


def _gates_rows(wanted: GatedCall) -> str | None:
    """Why gates can't be native: they are float32 in whole vectors."""
    shape, dtype, activation = wanted.gates.shape, wanted.gates.dtype, wanted.activation
    flat = jax.ShapeDtypeStruct((prod(shape[:-1]), shape[-1]), dtype)
    text = f"{activation} of {dtype.name} {list(shape)} is not one of float32 vectors, or {NOT_BUILT}"
    return unavailable(wanted) or (None if gates_rows(like(flat), activation) else text)


def _adds(wanted: AdapterCall) -> str | None:
    """Say why adapters can't be native, or can't include their norm or gate.

    Native adapters add whole vectors of float32, two at a time with a norm, in units of whole groups of rows. The gate
    is silu, of one module or of two of equal size.
    """
    shapes = f"{wanted.x.dtype.name} {list(wanted.x.shape)} and {list(wanted.outputs)}"
    text = f"{shapes} are not whole vectors, or not gated by silu, or {NOT_BUILT}"
    return unavailable(wanted) or (None if adds(wanted) else text)


LINEAR = Implementation("native", _linear, _multiplies, deterministic=True)
RMS_NORM = Implementation("native", _rms_norm, _norms)
GATED = Implementation("native", _gated_rows, _gates_rows)
ADAPTERS = Implementation("native", _add_adapters, _adds)
