"""The "native" implementation of `paged_attention`: decode and prefill read pages where they lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rekindle_kernels import pages
from rekindle_kernels.calls import Call, Implementation, LayerKV
from rekindle_kernels.native.build import builds, ensure, unavailable_reason
from rekindle_kernels.native.products import DTYPES

LANES = 16
STRETCH = 256  # keys of one piece of work where rows are few
FAR = 1024  # where there are pieces enough for all threads without cutting
FEW = 16  # rows x kv heads
ROWS_PER_TILE = 192  # of prefill: queries x query heads of one kv head


def paged_attention(
    q: jax.Array,
    kv: LayerKV,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_prefills: jax.Array,
    *,
    decode_rows: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Decode rows, then prefill tokens, each into its part of one result: a slice or a concatenation would copy."""
    (T, H, D), R = q.shape, decode_rows
    one = jnp.ones((1,), jnp.float32)  # stands for what is not there, and is not read
    operands = (
        q.astype(jnp.float32),
        kv.pages,
        one if kv.scales is None else kv.scales,
        page_table,
        kv_lens,
        one if sinks is None else sinks.astype(jnp.float32),
        jnp.array([scale, soft_cap or 0], jnp.float32),
    )
    rules = [R, sliding_window or 0, sinks is not None]
    whole = jax.ShapeDtypeStruct((T, H, D), jnp.float32)
    out = one
    if R:
        keys = STRETCH if R * kv.kv_heads < FEW else FAR
        out = jax.ffi.ffi_call(ensure(f"decode_{kv.dtype.name}_{D}"), whole)(
            *operands, jnp.array([*rules, keys], jnp.int32)
        )
    if T > R:
        queries = max(16, ROWS_PER_TILE // (H // kv.kv_heads))
        name, aliases = ensure(f"prefill_{kv.dtype.name}_{D}"), {10: 0} if R else {}
        out = jax.ffi.ffi_call(name, whole, input_output_aliases=aliases)(
            *operands, cu_q_lens, num_prefills, jnp.array([*rules, queries], jnp.int32), out
        )
    return out.astype(q.dtype)


def write(kv: LayerKV, k: jax.Array, v: jax.Array, page_ids: jax.Array, offsets: jax.Array) -> LayerKV:
    """`write_kv`; XLA's own scatter where pages are quantised."""
    known = kv.dtype.name in ("float32", "bfloat16") and kv.head_dim % LANES == 0 and kv.scales is None
    if not known or unavailable_reason() is not None or not builds(f"write_{kv.dtype.name}"):
        return pages.write_kv(kv, k, v, page_ids, offsets)
    shape = jax.ShapeDtypeStruct(kv.pages.shape, kv.pages.dtype)
    call = jax.ffi.ffi_call(ensure(f"write_{kv.dtype.name}"), shape, input_output_aliases={0: 0})
    return LayerKV(call(kv.pages, k.astype(jnp.float32), v.astype(jnp.float32), page_ids, offsets))


def splits(qk: jax.Array, cos: jax.Array) -> bool:
    """Whether `split` takes these."""
    D, F = qk.shape[-1], cos.shape[-1]
    usable = qk.ndim == 3 and qk.dtype == jnp.float32 and D % LANES == 0 and F % LANES == 0
    return usable and builds("split")


def split(
    qk: jax.Array,
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    norm: jax.Array | None = None,
    *,
    heads: int,
    eps: float = 0.0,
) -> tuple[jax.Array, ...]:
    """q [T, H, D] and k [T, K, D] of qk [T, ≥ H + K, D], rotated by cos and sin [T, F], and v [T, K, D] of qkv. With
    `norm` [H + K, D] q and k are divided by the root of their mean square and multiplied by it before."""
    T, A, D = qkv.shape
    counts = (heads, (A - heads) // 2, (A - heads) // 2)
    results = tuple(jax.ShapeDtypeStruct((T, count, D), jnp.float32) for count in counts)
    weights = jnp.ones((1, 1), jnp.float32) if norm is None else norm
    q, k, v = jax.ffi.ffi_call(ensure("split"), results)(qk, qkv, cos, sin, weights, jnp.array([eps], jnp.float32))
    return q, k, v


def supports(call: Call) -> str | None:
    if call.platform != "cpu":
        return f"it runs on a CPU, not on {call.platform}"
    if call.kv_dtype.name not in DTYPES:
        return f"pages of {call.kv_dtype.name} are none of {', '.join(DTYPES)}"
    if call.head_dim % LANES:
        return f"the head size {call.head_dim} is no multiple of {LANES}"
    reason = unavailable_reason()
    if reason is None and not all(builds(f"{part}_{call.kv_dtype.name}_{call.head_dim}") for part in _parts(call)):
        return "its kernels can't be built here: the log says why"
    return reason


def _parts(call: Call) -> list[str]:
    """What a call needs."""
    return ["decode"] * (call.decode_rows > 0) + ["prefill"] * (call.tokens > call.decode_rows)


IMPLEMENTATIONS = {"native": Implementation("native", paged_attention, supports, write)}
