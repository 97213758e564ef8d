"""Attention as native calls: heads are rotated, keys and values written into pages, and read where they lie."""

from __future__ import annotations

import sys
from functools import partial

import jax.numpy as jnp
from jax import Array

from rekindle_kernels.native import kernel_table, page_bounds
from rekindle_kernels.native.build import builds
from rekindle_kernels.native.calling import NOT_BUILT, call, differentiable, like, unavailable
from rekindle_kernels.native.cpu import has_feature
from rekindle_kernels.native.kernel_table import (
    DECODE,
    DECODE_PACKED,
    DTYPES,
    PREFILL,
    PREFILL_PACKED,
    WRITE_PACKED,
    WRITTEN,
    KernelSpec,
    Variant,
)
from rekindle_kernels.ops.attention import AttentionCall, AttentionInputs, AttentionOptions, RopeCall, WriteCall
from rekindle_kernels.ops.registry import Implementation
from rekindle_kernels.packed_pages import PACKED
from rekindle_kernels.pages import LayerKV
from rekindle_kernels.xla import attention as plain_attention

STRETCH = 256  # keys of one piece of work where rows are few
FAR = 1024  # where there are pieces enough for all threads without cutting
FEW = 16  # rows x kv heads
ROWS_PER_TILE = 192  # of prefill: queries x query heads of one kv head
LANES = 16  # numbers of a vector
FURTHEST = 1 << 30  # keys, more than any sequence has


def packed_variant(spec: KernelSpec, dtype: str, head_dim: int) -> Variant:
    """Return the kernel of a table of `kernel_table.PACKED` for a format of packed pages."""
    return spec.variant(dtype.replace("-", ""), head_dim)


def attention_variants(dtype: str, head_dim: int) -> tuple[Variant, Variant]:
    """Return the kernels of decode rows and of prompts for pages of that dtype."""
    if dtype in PACKED:
        return packed_variant(DECODE_PACKED, dtype, head_dim), packed_variant(PREFILL_PACKED, dtype, head_dim)
    return DECODE.variant(dtype, head_dim), PREFILL.variant(dtype, head_dim)


def write(kv: LayerKV, k: Array, v: Array, page_ids: Array, offsets: Array) -> LayerKV:
    """Implement `ops.attention.write_kv`."""
    operands = {"pages": kv.pages, "k": k.astype(jnp.float32), "v": v.astype(jnp.float32)}
    operands |= {"page_ids": page_ids, "offsets": offsets}
    if kv.values is not None:
        kernel = packed_variant(WRITE_PACKED, kv.dtype.name, kv.head_dim)
        pages, values, scales = call(kernel, {**operands, "values": kv.values, "scales": kv.scales}, sizes=widths(kv))
        return LayerKV(pages, scales, values)
    (written,) = call(kernel_table.WRITE_KV.variant(kv.dtype.name), operands)
    return LayerKV(written)


def widths(kv: LayerKV) -> dict[str, int]:
    """Return the sizes of the axes of packed pages that their heads determine: the bytes of keys and values."""
    if kv.values is None:
        return {}
    return {"A": kv.head_dim if kv.pages.dtype == jnp.int8 else kv.head_dim // 2, "B": kv.head_dim // 2}


def writes(wanted: WriteCall) -> str | None:
    """Why pages can't be written natively: it takes float32, bfloat16 and packed ones, and heads of whole vectors."""
    if wanted.kv_dtype.name in PACKED:
        return (
            _packed_heads(wanted.head_dim)
            or unavailable(wanted)
            or (None if builds(packed_variant(WRITE_PACKED, wanted.kv_dtype.name, wanted.head_dim).name) else NOT_BUILT)
        )
    if wanted.kv_dtype.name not in WRITTEN or wanted.scaled:
        return f"pages are {wanted.kv_dtype.name}, not one of {', '.join(WRITTEN)}"
    if wanted.latent:
        return "keys alone are written"
    if wanted.head_dim % LANES:
        return f"the head size {wanted.head_dim} is not a multiple of {LANES}"
    return unavailable(wanted) or (
        None if builds(kernel_table.WRITE_KV.variant(wanted.kv_dtype.name).name) else NOT_BUILT
    )


def splits(qk: Array, cos: Array) -> bool:
    """True if `split` takes these."""
    D, F = qk.shape[-1], cos.shape[-1]
    usable = qk.ndim == 3 and qk.dtype == jnp.float32 and D % LANES == 0 and F % LANES == 0
    return usable and builds(kernel_table.ROPE.variant().name)


def split(
    qk: Array, qkv: Array, cos: Array, sin: Array, norm: Array | None = None, *, heads: int, eps: float = 0.0
) -> tuple[Array, ...]:
    """q [T, H, D] and k [T, K, D] of qk [T, ≥ H + K, D], rotated by cos and sin [T, F], and v [T, K, D] of qkv. With
    `norm` [H + K, D] q and k are divided by the root of their mean square and multiplied by it before. K may be 0."""
    kv_heads = (qkv.shape[1] - heads) // 2
    if kv_heads < 0 or qk.shape[1] < heads + kv_heads or 2 * cos.shape[-1] > qk.shape[-1] or not splits(qk, cos):
        raise ValueError(
            f"qk {list(qk.shape)}, qkv {list(qkv.shape)} and cos {list(cos.shape)} can't be split into {heads} heads"
        )
    operands = {"qk": qk, "qkv": qkv, "cos": cos, "sin": sin, "norm": norm}
    return call(kernel_table.ROPE.variant(), operands, {"eps": eps}, {"H": heads, "K": kv_heads})


def rope(
    qk: Array,
    qkv: Array,
    cos: Array | None,
    sin: Array | None,
    norm: Array | None = None,
    *,
    heads: int,
    eps: float = 0.0,
) -> tuple[Array, ...]:
    """Implement `ops.attention.rope`."""
    fast, plain = (partial(form, heads=heads, eps=eps) for form in (split, plain_attention.rope))
    return differentiable(fast, plain)(qk, qkv, cos, sin, *(() if norm is None else (norm,)))


def rotates(wanted: RopeCall) -> str | None:
    """Why a rope can't be native: it rotates float32 heads of whole vectors."""
    if wanted.cos is None:
        return "it always rotates"
    text = f"{wanted.qk.dtype.name} heads of {wanted.qk.shape[-1]} are not float32 in whole vectors, or {NOT_BUILT}"
    return unavailable(wanted) or (None if splits(like(wanted.qk), like(wanted.cos)) else text)


def paged_attention(inputs: AttentionInputs, options: AttentionOptions) -> Array:
    """Decode rows, then prefill tokens, each into its part of one result: a slice or a concatenation would copy.

    With `deterministic`, prefill's kernel takes all of them: it gives a query the same result in any batch, since it
    passes over the keys in tiles that are counted from the first key.
    """
    q, kv, deterministic = inputs.q, inputs.kv, options.deterministic
    (T, H, D), R = q.shape, options.decode_rows
    if min(T, inputs.kv_lens.shape[0]) < R or H % kv.kv_heads:
        raise ValueError(
            f"{R} decode rows of {T} tokens and {inputs.kv_lens.shape[0]} lengths, "
            f"{H} query heads of {kv.kv_heads} kv heads: every decode row needs a token and a length, "
            "and every kv head as many query heads"
        )
    queries32 = q.astype(jnp.float32)
    operands = {
        "q": queries32,
        "pages": kv.pages,
        "scales": kv.scales,
        **({} if kv.values is None else {"values": kv.values}),
        "page_table": inputs.page_table,
        "lens": inputs.kv_lens,
        "sinks": None if inputs.sinks is None else inputs.sinks.astype(jnp.float32),
    }
    settings = {
        "decode_rows": R,
        "window": options.sliding_window or 0,
        "scale": options.scale,
        "soft_cap": options.soft_cap or 0,
    }
    decoding, prompting = attention_variants(kv.dtype.name, D)
    out, sizes = None, widths(kv)
    if R and not deterministic:
        keys, read = STRETCH if R * kv.kv_heads < FEW else FAR, operands
        if options.most_pages is not None:
            read = {**operands, "page_table": page_bounds.choose(queries32, inputs, options)}
        (out,) = call(decoding, read, {**settings, "keys": keys, "apart": read is not operands}, sizes)
    if T > R or deterministic:
        queries = max(16, ROWS_PER_TILE // (H // kv.kv_heads))
        prompts = {
            "ends": inputs.cu_q_lens, "prompts": inputs.num_prefills, "decoded": out, "unread": inputs.unread,
        }  # fmt: skip
        ahead = 0 if options.causal else (options.sliding_window or FURTHEST) - 1
        settings |= {"queries": queries, "together": deterministic, "amx": has_amx(), "ahead": ahead}
        (out,) = call(prompting, {**operands, **prompts}, settings, sizes)
    assert out is not None, "a step without tokens"
    return out.astype(q.dtype)


def has_amx() -> bool:
    """True if prompts over pages of bfloat16 may use AMX; Linux gives it to a process that asks."""
    return has_feature("amx-bf16") and sys.platform == "linux"


def supports(wanted: AttentionCall) -> str | None:
    """Why attention can't be native."""
    dtype = wanted.kv_dtype.name
    if dtype not in DTYPES and dtype not in PACKED:
        return f"pages of {dtype} are none of {', '.join((*DTYPES, *PACKED))}"
    if dtype in PACKED and (reason := _packed_heads(wanted.head_dim)):
        return reason
    if wanted.sees:
        return "the parts of a picture see each other"
    if wanted.value_size is not None:
        return "values are a part of the keys"
    if wanted.head_dim % LANES:
        return f"the head size {wanted.head_dim} is not a multiple of {LANES}"
    decoding, prompting = (kernel.name for kernel in attention_variants(dtype, wanted.head_dim))
    kernels = [decoding] * (wanted.decode_rows > 0) + [prompting] * (wanted.tokens > wanted.decode_rows)
    if wanted.deterministic:
        kernels = [prompting]
    return unavailable(wanted) or (None if all(map(builds, kernels)) else NOT_BUILT) or page_bounds.chooses(wanted)


def _packed_heads(head_dim: int) -> str | None:
    """Why packed vectors of this size can't be read: half of one is whole vectors of the processor's."""
    return f"the head size {head_dim} is not a multiple of {2 * LANES}" if head_dim % (2 * LANES) else None


ATTENTION = Implementation("native", paged_attention, supports, deterministic=True, chooses_pages=True)
WRITE_KV = Implementation("native", write, writes)
ROPE = Implementation("native", rope, rotates)
