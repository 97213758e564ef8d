"""Rows times a matrix, their norms and gates, and products of adapters, as calls of JAX."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rekindle_kernels import int4
from rekindle_kernels.native.build import builds
from rekindle_kernels.native.calling import call
from rekindle_kernels.native.chain_plan import CHAIN
from rekindle_kernels.native.cpu import has_feature, multiplies_many, multiplies_widened
from rekindle_kernels.native.kernel_spec import Variant
from rekindle_kernels.native.kernel_table import (
    ACTIVATIONS,
    ADAPTER,
    ADAPTER_GATE,
    ARGMAX,
    DECODE,
    GATE,
    GATED_ROWS,
    GEMM,
    GROUPED,
    MATVEC,
    PREFILL,
    RECURRENT,
    RMS_NORM,
    ROPE,
    SAMPLE,
    WRITE_KV,
)

FEW_ROWS = 4  # float32 arithmetic on them is faster than reading the matrix, whatever its weights are
SOME_ROWS = 8  # it still beats XLA, which packs the matrix first
GATED_UNIT = 32  # outputs: whole vectors of gates and of ups
DTYPES = ("float32", "bfloat16", "float16", "int8")
LANES, TOGETHER = 16, 4  # numbers of a vector, and rows of an adapter that are multiplied together
ADAPTERS = ("float32", "bfloat16", "float16")  # dtypes of adapters
Described = jax.Array | jax.ShapeDtypeStruct


def multiplies(rows: int, weight: Described, *, quantize_rows: bool = False, deterministic: bool = False) -> bool:
    """True if `multiply` takes so many rows and this weight, and beats XLA unless it has to be deterministic."""
    kernel = _kernel(rows, weight, quantize_rows, deterministic)
    return kernel is not None and builds(kernel.name)


def _kernel(rows: int, weight: Described, quantize_rows: bool, deterministic: bool = False) -> Variant | None:
    """Return the kernel that multiplies; None where XLA is better. Where results have to be deterministic, the
    number of rows has no say in it."""
    if weight.ndim != 2 or weight.dtype.name not in DTYPES:
        return None
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
    return K % 64 == 0 and N % 16 == 0 and multiplies_many(weight.dtype.name)


def kernels_for(
    matrices: Iterable[str],
    pages: str,
    head_dim: int | Iterable[int],
    scaled: Iterable[tuple[str, str]] = (),
    adapters: str | None = None,
    recurrent: bool = False,
) -> list[str]:
    """Return the kernels that a step calls, by their names, for matrices and pages of these dtypes, with
    heads of one or of several sizes; `scaled` are those of matrices with scales, and of their scales, and `adapters` is
    that of adapters, if there may be any. `recurrent` is True for models with states."""
    matrices, scaled = set(matrices), set(scaled)
    kinds = [dtype for dtype in DTYPES if dtype in matrices]
    products = [MATVEC.variant(dtype) for dtype in kinds]
    products += [GEMM.variant(dtype) for dtype in kinds if multiplies_many(dtype)]
    for stored, spec in GROUPED.items():
        scales = sorted(scale for dtype, scale in scaled if dtype == stored) or ["float16"]
        products += [spec.variant(scale) for scale in scales] if stored in matrices else []
    own = [spec.variant() for spec in (RMS_NORM, GATED_ROWS, ROPE, ARGMAX, SAMPLE, GATE)]
    own += [ADAPTER.variant(adapters), ADAPTER_GATE.variant(adapters)] if adapters in ADAPTERS else []
    own += [spec.variant() for spec in RECURRENT] if recurrent else []
    sizes = [size for size in ([head_dim] if isinstance(head_dim, int) else head_dim) if size % 16 == 0]
    if pages in DTYPES and sizes:
        own += [spec.variant(pages, size) for size in sizes for spec in (DECODE, PREFILL)]
        own += [WRITE_KV.variant(pages)] if pages in ("float32", "bfloat16") else []
    return [CHAIN, *(kernel.name for kernel in (*products, *own))]


def multiplies_int4(weight: jax.Array, scale: str) -> bool:
    """True if `multiply_int4` takes this weight with scales of that dtype, for any number of rows."""
    stored = weight.dtype.name
    known = weight.ndim == 2 and scale in int4.STORED.get(stored, ())
    return known and builds(GROUPED[stored].variant(scale).name)


def has_amx() -> bool:
    """True if products of many rows may use AMX; Linux gives it to a process that asks."""
    return has_feature("amx-int8") and has_feature("amx-bf16") and sys.platform == "linux"


def multiply_int4(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    minimum: jax.Array | None = None,
    residual: jax.Array | None = None,
    count: jax.Array | None = None,
    norm: jax.Array | None = None,
    expert: jax.Array | None = None,
    *,
    eps: float = 0.0,
    gated: bool = False,
    widened: bool = False,
) -> jax.Array:
    """x [R, K] · a matrix [N, K] of four, six or eight bits in groups, or of a codebook, + residual -> float32 [R, N].

    Norm, gate and `expert` are those of `multiply`.

    Rows become 8-bit integers with a scale for each group of inputs. A row's results do not depend on the number of
    rows, to the last bit; with `widened`, many rows and the matrix become bfloat16 where that is faster. Results behind
    the first `count` rows are undefined.
    """
    R, (N, K) = x.shape[0], int4.matrix_shape(weight)[-2:]
    assert norm is None or norms(x), f"rows of {x.dtype}{list(x.shape)} have to be normed before"
    assert not gated or N % GATED_UNIT == 0, f"{N} outputs have to be gated behind"
    assert x.shape[1] == K, f"rows of {x.shape[1]} and a matrix of {K} inputs"
    reason = int4.reason_against(N, K, int4.group_of(weight, scale), int4.BITS[weight.dtype.name])
    assert reason is None, reason
    assert minimum is None or weight.dtype != int4.CODES, "codebooks have no minimums"
    (product,) = call(
        GROUPED[weight.dtype.name].variant(scale.dtype.name),
        {
            **_arrays(expert, weight=weight, scale=scale, minimum=minimum),
            "x": x.astype(jnp.float32),
            "residual": None if residual is None else residual.astype(jnp.float32),
            "rows": None if count is None else jnp.stack([count, R - count]).astype(jnp.int32),
            "norm": None if norm is None else norm.astype(jnp.float32),
        },
        {"eps": eps, "gated": gated, "amx": has_amx(), "widened": widened},
        {"M": N // 2 if gated else N},
    )
    return product


def _arrays(expert: jax.Array | None, **arrays: jax.Array | None) -> dict[str, jax.Array | None]:
    """Return the operands that hold a matrix, or a stack of them: its axis joined with that of the matrices' rows."""
    if expert is None:
        return arrays
    joined = {name: None if one is None else one.reshape(-1, *one.shape[2:]) for name, one in arrays.items()}
    return {**joined, "expert": expert.astype(jnp.int32)}


def gates(weight: jax.Array) -> bool:
    """True if `multiply` by this weight can end in a gate."""
    return weight.shape[-2] % GATED_UNIT == 0


def multiply(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None = None,
    residual: jax.Array | None = None,
    count: jax.Array | None = None,
    norm: jax.Array | None = None,
    expert: jax.Array | None = None,
    *,
    eps: float = 0.0,
    gated: bool = False,
    quantize_rows: bool = False,
    deterministic: bool = False,
    values: str | None = None,
) -> jax.Array:
    """x [R, K] · weight [N, K] · scale [N] + residual -> float32 [R, N]. With `norm`, x is `rms_norm(x, norm,
    eps)` first; `gated` results are silu of the first half of the outputs times the other, [R, N / 2]. Many rows are
    rounded to bfloat16 where the weight is, unless they are multiplied in float32; where it is int8, with
    `quantize_rows`, they become int8 with a scale of their own. With `deterministic`, a row's results do not depend on
    the number of rows, to the last bit. Results behind the first `count` rows are undefined. With `expert`, weight and
    scale have an axis of matrices in front, of which it chooses one as `jax.lax.dynamic_index_in_dim` does, without a
    copy; 16-bit weights may then be the bits of `values`, as uint16."""
    assert norm is None or norms(x), f"rows of {x.dtype}{list(x.shape)} have to be normed before"
    assert not gated or gates(weight), f"{weight.shape[-2]} outputs have to be gated behind"
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
    (product,) = call(
        kernel,
        {
            **_arrays(expert, weight=weight, scale=None if scale is None else scale.astype(jnp.float32)),
            "x": x.astype(jnp.float32),
            "residual": None if residual is None else residual.astype(jnp.float32),
            "rows": None if count is None else jnp.stack([count, R - count]).astype(jnp.int32),
            "norm": None if norm is None else norm.astype(jnp.float32),
        },
        {"eps": eps, "gated": gated, **own},
        {"M": N // 2 if gated else N},
    )
    return product


def norms(x: jax.Array) -> bool:
    """True if `rms_norm`, and `multiply` with a norm, take these rows."""
    return x.ndim == 2 and x.dtype == jnp.float32 and x.shape[1] % 32 == 0 and builds(RMS_NORM.variant().name)


def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    eps: float,
    residual: jax.Array | None = None,
    factor: jax.Array | None = None,
) -> jax.Array:
    """x [T, E] / rms(x) · weight [E], + residual [T, E]. With `factor` [1], the sum is multiplied by it and rounded to
    22 bits."""
    assert norms(x), f"rows of {x.dtype}{list(x.shape)} are normed by XLA"
    assert factor is None or residual is not None, "sums are multiplied"
    operands = {"x": x, "weight": weight.astype(jnp.float32), "residual": residual, "factor": factor}
    (normed,) = call(RMS_NORM.variant(), operands, {"eps": eps})
    return normed


def gates_rows(gates: jax.Array, activation: str) -> bool:
    """True if `gated_rows` takes these gates, with ups behind them or in an array of their own."""
    usable = gates.ndim == 2 and gates.dtype == jnp.float32 and gates.shape[1] % GATED_UNIT == 0
    return usable and activation in ACTIVATIONS and builds(GATED_ROWS.variant().name)


def gated_rows(gates: jax.Array, ups: jax.Array | None, activation: str) -> jax.Array:
    """The activation of gates [T, M] times ups [T, M]; without ups, of the halves of gates [T, 2 M]."""
    assert gates_rows(gates, activation), f"{activation} of {gates.dtype}{list(gates.shape)} is applied by XLA"
    height = gates.shape[1] // 2 if ups is None else gates.shape[1]
    settings = {"activation": ACTIVATIONS.index(activation)}
    (gated,) = call(GATED_ROWS.variant(), {"gates": gates, "ups": ups}, settings, {"M": height})
    return gated


def adds(
    y: jax.Array,
    x: jax.Array,
    down: jax.Array,
    up: jax.Array,
    units: int,
    outputs: Sequence[int],
    gate: str | None,
    norm: bool = False,
) -> bool:
    """True if `add_adapters` takes these: whole vectors of float32, of which a norm takes two at a time, units of whole
    groups of rows, and silu as a gate of one module or of two, which are gates and ups."""
    whole = x.shape[-1] % (2 * LANES if norm else LANES) == 0 and all(count % LANES == 0 for count in outputs)
    known = y.dtype.name == x.dtype.name == "float32" and down.dtype == up.dtype and up.dtype.name in ADAPTERS
    divided = up.shape[0] % (units * TOGETHER) == 0
    halves = gate is None or (gate == "silu" and y.shape[-1] % (2 * LANES) == 0 and _two_halves(outputs))
    spec = ADAPTER if gate is None else ADAPTER_GATE
    return whole and known and divided and halves and builds(spec.variant(up.dtype.name).name)


def _two_halves(outputs: Sequence[int]) -> bool:
    return len(outputs) == 1 or (len(outputs) == 2 and outputs[0] == outputs[1])


def add_adapters(
    y: jax.Array,
    x: jax.Array,
    down: jax.Array,
    up: jax.Array,
    owners: jax.Array,
    order: jax.Array,
    slots: jax.Array,
    norm: jax.Array | None = None,
    *,
    place: int,
    outputs: Sequence[int],
    gated: bool,
    eps: float = 0.0,
) -> jax.Array:
    """Return y [T, N] plus x [T, K] times the rows of `down` [L · B, K] of each token's adapter, times those of `up`
    [B, N]. `order` [T] and `slots` [T] are the tokens by their adapters, and these in that order; `outputs` are those
    of each of L modules. Where it is gated, return silu of the first half of that times the other. With `norm`, x is
    `rms_norm(x, norm, eps)` first. A row's results do not depend on the others, to the last bit."""
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
