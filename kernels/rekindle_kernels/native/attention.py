"""The "native" implementation of `paged_attention`: decode and prefill read pages where they lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rekindle_kernels import pages, xla
from rekindle_kernels.calls import Call, Implementation, LayerKV
from rekindle_kernels.native.build import builds, ensure, reason_against
from rekindle_kernels.native.products import DTYPES

LANES = 16
MANY_TOKENS = 32  # from which moving them is worth a call
STRETCH = 256  # keys of one piece of work where rows are few
FAR = 1024  # where there are pieces enough for all threads without cutting
FEW = 16  # rows x kv heads
ROWS_PER_TILE = 192  # of prefill: queries x query heads of one kv head


def decode(
    q: jax.Array, kv: LayerKV, page_table: jax.Array, kv_lens: jax.Array, sinks: jax.Array | None, rules: xla.Rules
) -> jax.Array:
    """One query per row: q [R, H, D], page_table [R, W], kv_lens [R] -> float32 [R, H, D]."""
    R, H, D = q.shape
    keys = STRETCH if R * kv.kv_heads < FEW else FAR
    pieces = R * -(-page_table.shape[1] * kv.page_size // keys)
    results = (
        jax.ShapeDtypeStruct((R, H, D), jnp.float32),
        jax.ShapeDtypeStruct((pieces, H, D + 2), jnp.float32),
        jax.ShapeDtypeStruct((pieces, 2), jnp.int32),
    )
    call = jax.ffi.ffi_call(ensure(f"decode_{kv.dtype.name}_{D}"), results)
    out: jax.Array = call(
        *_operands(q, kv, page_table, kv_lens, sinks, rules),
        jnp.array([rules.sliding_window or 0, sinks is not None, keys], jnp.int32),
    )[0]
    return out


def _operands(
    q: jax.Array, kv: LayerKV, page_table: jax.Array, kv_lens: jax.Array, sinks: jax.Array | None, rules: xla.Rules
) -> tuple[jax.Array, ...]:
    """What both kernels take first; what is not there is a one that is not read."""
    one = jnp.ones((1,), jnp.float32)
    return (
        q.astype(jnp.float32),
        kv.pages,
        one if kv.scales is None else kv.scales,
        page_table,
        kv_lens,
        one if sinks is None else sinks.astype(jnp.float32),
        jnp.array([rules.scale, rules.soft_cap or 0], jnp.float32),
    )


def prefill(
    q: jax.Array,
    kv: LayerKV,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_prefills: jax.Array,
    sinks: jax.Array | None,
    rules: xla.Rules,
) -> jax.Array:
    """Chunks of prompts: q [T, H, D] packed by cu_q_lens [N+1], page_table [N, W], kv_lens [N] -> float32 [T, H, D]."""
    T, H, D = q.shape
    queries = max(16, ROWS_PER_TILE // (H // kv.kv_heads))
    tiles = kv_lens.shape[0] + T // queries
    results = (jax.ShapeDtypeStruct((T, H, D), jnp.float32), jax.ShapeDtypeStruct((tiles, 2), jnp.int32))
    call = jax.ffi.ffi_call(ensure(f"prefill_{kv.dtype.name}_{D}"), results)
    out: jax.Array = call(
        *_operands(q, kv, page_table, kv_lens, sinks, rules),
        cu_q_lens,
        num_prefills[None],
        jnp.array([rules.sliding_window or 0, sinks is not None, queries], jnp.int32),
    )[0]
    return out


def write(kv: LayerKV, k: jax.Array, v: jax.Array, page_ids: jax.Array, offsets: jax.Array) -> LayerKV:
    """`write_kv`; XLA's own scatter where tokens are few or pages are quantised."""
    known = kv.dtype.name in ("float32", "bfloat16") and kv.head_dim % LANES == 0 and kv.scales is None
    usable = known and reason_against() is None and k.shape[0] >= MANY_TOKENS
    if not usable or not builds(f"write_{kv.dtype.name}"):
        return pages.write_kv(kv, k, v, page_ids, offsets)
    shape = jax.ShapeDtypeStruct(kv.pages.shape, kv.pages.dtype)
    call = jax.ffi.ffi_call(ensure(f"write_{kv.dtype.name}"), shape, input_output_aliases={0: 0})
    return LayerKV(call(kv.pages, k.astype(jnp.float32), v.astype(jnp.float32), page_ids, offsets))


def rotates(x: jax.Array, cos: jax.Array) -> bool:
    """Whether `rotate` takes these, and is faster than XLA."""
    usable = x.ndim == 3 and x.shape[0] >= MANY_TOKENS and x.dtype == jnp.float32 and cos.shape[-1] % LANES == 0
    return usable and builds("rotate")


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, first: int, count: int) -> jax.Array:
    """The heads [first, first + count) of x [T, A, D] rotated by cos and sin [T, F]."""
    call = jax.ffi.ffi_call(ensure("rotate"), jax.ShapeDtypeStruct((x.shape[0], count, x.shape[2]), jnp.float32))
    rotated: jax.Array = call(x, cos, sin, jnp.array([first, count], jnp.int32))
    return rotated


def supports(call: Call) -> str | None:
    if call.platform != "cpu":
        return f"it runs on a CPU, not on {call.platform}"
    if call.kv_dtype.name not in DTYPES:
        return f"pages of {call.kv_dtype.name} are none of {', '.join(DTYPES)}"
    if call.head_dim % LANES:
        return f"the head size {call.head_dim} is no multiple of {LANES}"
    reason = reason_against()
    if reason is None and not all(builds(f"{part}_{call.kv_dtype.name}_{call.head_dim}") for part in _parts(call)):
        return "its kernels can't be built here: the log says why"
    return reason


def _parts(call: Call) -> list[str]:
    """What a call needs."""
    return ["decode"] * (call.decode_rows > 0) + ["prefill"] * (call.tokens > call.decode_rows)


IMPLEMENTATIONS = {"native": Implementation("native", xla.in_parts(decode, prefill), supports, write)}
