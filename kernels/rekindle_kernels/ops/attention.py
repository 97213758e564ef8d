"""Paged attention: `paged_attention(inputs, options)`. Before it `rope(qk, qkv, …)` rotates queries and keys, and
`write_kv(kv, k, v, page_ids, offsets)` writes keys and values into their pages.

Axes: T tokens, N sequences, R decode rows, H query heads, K kv heads, D head size, F rotated frequencies, W page-table
width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from rekindle_kernels.ops.registry import Registry, current_platform
from rekindle_kernels.packed_pages import PackedDtype
from rekindle_kernels.pages import LayerKV, widened

ROPE = Registry("rope")  # run(qk, qkv, cos, sin, norm, heads=…, eps=…) -> q, k, v


@dataclass(frozen=True, slots=True)
class RopeCall:
    """The static facts that select an implementation."""

    platform: str
    qk: jax.ShapeDtypeStruct
    cos: jax.ShapeDtypeStruct | None  # None: heads are only split, not rotated
    norm: bool
    kv_heads: int = 1


def rope(
    qk: Array,
    qkv: Array,
    cos: Array | None,
    sin: Array | None,
    *,
    heads: int,
    norm: Array | None = None,
    eps: float = 0.0,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array, Array]:
    """Return q [T, H, D] and k [T, K, D] of qk [T, ≥ H + K, D], rotated by cos and sin [T, F], and v [T, K, D] of qkv.

    `heads` is H, and qkv [T, H + 2·K, D] has queries, keys and values in this order; K may be 0. With `norm`
    [H + K, D] queries and keys are first RMS-normed, head by head. Without cos and sin they are not rotated.
    """
    call = RopeCall(
        platform or current_platform(),
        jax.ShapeDtypeStruct(qk.shape, qk.dtype),
        None if cos is None else jax.ShapeDtypeStruct(cos.shape, cos.dtype),
        norm is not None,
        (qkv.shape[-2] - heads) // 2,
    )
    q, k, v = ROPE.choose(call, implementation).run(qk, qkv, cos, sin, norm, heads=heads, eps=eps)
    return q, k, v


WRITE_KV = Registry("write_kv")  # run(kv, k, v, page_ids, offsets) -> LayerKV


@dataclass(frozen=True, slots=True)
class WriteCall:
    """The static facts that select an implementation."""

    platform: str
    tokens: int
    kv_heads: int
    head_dim: int
    page_size: int
    kv_dtype: jnp.dtype | PackedDtype  # LayerKV.dtype
    scaled: bool  # the pages carry scales
    latent: bool = False  # keys alone are written


def write_kv(
    kv: LayerKV,
    k: Array,
    v: Array | None,
    page_ids: Array,
    offsets: Array,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> LayerKV:
    """Write token t's k[t], v[t] ([T, K, D]) to page page_ids[t] at offsets[t]; in place when the caller donates `kv`.

    Latent pages have keys alone, and v is None. Where the pages' vectors are wider than D, as on TPUs, zeros fill them.
    Bounds stay as they are: see `ops.page_bounds`. Values are rounded, or quantised with a scale per token and head, to
    the dtype of `kv`; those of packed pages are rotated first. Padding tokens write to page 0; which of two tokens with
    one destination wins is undefined.
    """
    assert kv.latent == (v is None), "latent pages, and only they, have no values"
    k, v = widened(k, kv), None if v is None else widened(v, kv)
    call = WriteCall(
        platform=platform or current_platform(),
        tokens=k.shape[0],
        kv_heads=kv.kv_heads,
        head_dim=kv.head_dim,
        page_size=kv.page_size,
        kv_dtype=kv.dtype,
        scaled=kv.scales is not None,
        latent=kv.latent,
    )
    with jax.named_scope("write_kv"):
        written: LayerKV = WRITE_KV.choose(call, implementation).run(kv._replace(bounds=None), k, v, page_ids, offsets)
    return written._replace(bounds=kv.bounds)


ATTENTION = Registry("attention")  # run(inputs, options) -> [T, H, D]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("q", "kv", "page_table", "kv_lens", "cu_q_lens", "num_prefills", "sinks", "unread", "sees"),
    meta_fields=(),
)
@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The arrays of a ragged batch; a pytree.

    Tokens 0..R-1 are one token each of sequences 0..R-1, the decode rows; the others are prefill tokens of sequences
    R..N-1, packed without gaps. Query i of a prefill sequence sits at position kv_len - q_len + i. Rows and tokens
    beyond the lengths are padding and give zeros.
    """

    q: Array  # [T, H, D]
    kv: LayerKV  # one layer's pages, into which `write_kv` has already written this step's tokens
    page_table: Array  # int32 [N, W]
    kv_lens: Array  # int32 [N], keys of each sequence, this step's included; 0 marks an empty row
    cu_q_lens: Array  # int32 [N-R+1], half-open offsets of each prefill sequence within q[R:]
    num_prefills: Array  # int32 [], how many of the N-R prefill sequences are real
    sinks: Array | None = None  # float32 [H], a logit per head that the softmax counts and that carries no value
    # int32 [], the number of tokens at the start of the first prefill sequence whose results are not used: an
    # implementation may leave them undefined
    unread: Array | None = None
    # int32 [T], the position of the first key that a prefill query does not see, where that is after the next one: the
    # parts of a picture see each other. Decode rows see no later keys.
    sees: Array | None = None


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The static options of a call."""

    decode_rows: int  # R
    scale: float  # logits are scale · q·k
    sliding_window: int | None = None  # w: a query at position p sees keys p-w+1..p
    soft_cap: float | None = None  # c: logits become c·tanh(logits / c)
    deterministic: bool = False  # a query's result is the same to the last bit in any batch
    value_size: int | None = None  # of latent pages: so many first numbers of the keys are the values
    causal: bool = True  # False: a query also sees the keys after it; with a window, the next w - 1
    # Pages that a decode row attends to in each kv head, the last one included, chosen as in `ops.page_bounds`
    most_pages: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The static facts that select an implementation."""

    platform: str
    tokens: int  # T; tokens - decode_rows are prefill tokens
    decode_rows: int  # R
    sequences: int  # N
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    table_width: int
    q_dtype: jnp.dtype
    kv_dtype: jnp.dtype | PackedDtype  # LayerKV.dtype: bfloat16 for pages stored as uint16
    storage: jnp.dtype  # the dtype of LayerKV.pages
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    deterministic: bool = False
    value_size: int | None = None
    causal: bool = True  # no query sees the keys after it
    sees: bool = False  # some see as many of them as `AttentionInputs.sees` says
    most_pages: int | None = None

    @classmethod
    def of(cls, inputs: AttentionInputs, options: AttentionOptions, platform: str | None = None) -> AttentionCall:
        """Return the facts of a call with these inputs, which may be shapes alone."""
        q, kv = inputs.q, inputs.kv
        return cls(
            platform=platform or current_platform(),
            tokens=q.shape[0],
            decode_rows=options.decode_rows,
            sequences=inputs.kv_lens.shape[0],
            heads=q.shape[1],
            kv_heads=kv.kv_heads,
            head_dim=kv.head_dim,
            page_size=kv.page_size,
            table_width=inputs.page_table.shape[1],
            q_dtype=q.dtype,
            kv_dtype=kv.dtype,
            storage=kv.pages.dtype,
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
            sinks=inputs.sinks is not None,
            deterministic=options.deterministic,
            value_size=options.value_size,
            causal=options.causal and inputs.sees is None,
            sees=inputs.sees is not None,
            most_pages=options.most_pages,
        )


def paged_attention(
    inputs: AttentionInputs,
    options: AttentionOptions,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Compute attention of a ragged batch over paged keys and values: [T, H, D] in q's dtype.

    Over latent pages the result is [T, H, value_size].
    """
    heads, kv_heads = inputs.q.shape[1], inputs.kv.kv_heads
    table, lens, ends, rows = inputs.page_table, inputs.kv_lens, inputs.cu_q_lens, options.decode_rows
    assert heads % kv_heads == 0, f"{heads} query heads are not a multiple of {kv_heads} kv heads"
    assert table.shape[0] == lens.shape[0] == rows + ends.shape[0] - 1, (
        f"page_table {table.shape}, kv_lens {lens.shape} and cu_q_lens {ends.shape} disagree with {rows} decode rows"
    )
    assert inputs.kv.latent == (options.value_size is not None), "latent pages, and only they, have a value_size"
    assert options.most_pages is None or not options.sliding_window, "a window chooses pages by itself"
    if options.most_pages is not None and (not rows or options.most_pages >= table.shape[1]):
        options = replace(options, most_pages=None)
    platform = platform or current_platform()
    if options.most_pages is not None and platform != "cpu" and inputs.q.shape[0] > rows:
        return _apart(inputs, options, implementation, platform)
    width = inputs.q.shape[-1]
    if width < inputs.kv.head_dim:  # zeros change no product, and those of the values are cut off below
        inputs = replace(inputs, q=widened(inputs.q, inputs.kv))
    chosen = ATTENTION.choose(AttentionCall.of(inputs, options, platform), implementation)
    with jax.named_scope(f"paged_attention_{chosen.name}"):
        out: Array = chosen.run(inputs, options)
    width = options.value_size or width
    return out if out.shape[-1] == width else out[..., :width]


def _apart(inputs: AttentionInputs, options: AttentionOptions, implementation: str | None, platform: str) -> Array:
    """Compute decode rows that choose pages and prefill tokens by a call each: kernels for the latter do not choose."""
    rows, sees = options.decode_rows, inputs.sees
    decoding = replace(
        inputs, q=inputs.q[:rows], page_table=inputs.page_table[:rows], kv_lens=inputs.kv_lens[:rows],
        cu_q_lens=inputs.cu_q_lens[:1], num_prefills=jnp.zeros_like(inputs.num_prefills), unread=None, sees=None,
    )  # fmt: skip
    prompts = replace(
        inputs, q=inputs.q[rows:], page_table=inputs.page_table[rows:], kv_lens=inputs.kv_lens[rows:],
        sees=None if sees is None else sees[rows:],
    )  # fmt: skip
    calls = (decoding, options), (prompts, replace(options, decode_rows=0, most_pages=None))
    return jnp.concatenate([paged_attention(*call, implementation=implementation, platform=platform) for call in calls])


def chooses_pages(implementation: str) -> bool:
    """True if decode rows can choose pages in an implementation."""
    return ATTENTION.load(implementation).chooses_pages


def implementation_names() -> tuple[str, ...]:
    """Return the names that `paged_attention(implementation=…)` accepts, in order of preference."""
    return ATTENTION.names()
