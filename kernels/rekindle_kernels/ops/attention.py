"""Paged attention: `paged_attention(inputs, options)`.

Axes: T tokens, N sequences, R decode rows, H query heads, D head size, W page-table width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from rekindle_kernels.ops.registry import Registry, current_platform
from rekindle_kernels.pages import LayerKV, widened

ATTENTION = Registry("attention")  # run(inputs, options) -> [T, H, D]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("q", "kv", "page_table", "kv_lens", "cu_q_lens", "num_prefills", "sinks", "unread"),
    meta_fields=(),
)
@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The arrays of a ragged batch; a pytree.

    Tokens 0..R-1 are one token each of sequences 0..R-1, the decode rows; the others are prefill tokens of sequences
    R..N-1, packed without gaps. Query i of a prefill sequence sits at position kv_len - q_len + i. Rows and tokens
    beyond the lengths are padding and give zeros.
    """

    q: jax.Array  # [T, H, D]
    kv: LayerKV  # one layer's pages, into which `write_kv` has already written this step's tokens
    page_table: jax.Array  # int32 [N, W]
    kv_lens: jax.Array  # int32 [N], keys of each sequence, this step's included; 0 marks an empty row
    cu_q_lens: jax.Array  # int32 [N-R+1], half-open offsets of each prefill sequence within q[R:]
    num_prefills: jax.Array  # int32 [], how many of the N-R prefill sequences are real
    sinks: jax.Array | None = None  # float32 [H], a logit per head that the softmax counts and that carries no value
    # int32 [], the number of tokens at the start of the first prefill sequence whose results are not used: an
    # implementation may leave them undefined
    unread: jax.Array | None = None


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The static options of a call."""

    decode_rows: int  # R
    scale: float  # logits are scale · q·k
    sliding_window: int | None = None  # w: a query at position p sees keys p-w+1..p
    soft_cap: float | None = None  # c: logits become c·tanh(logits / c)
    deterministic: bool = False  # a query's result is the same to the last bit in any batch
    value_size: int | None = None  # of latent pages: so many first numbers of the keys are the values
    causal: bool = True  # False: a query also sees the keys behind it, with a window the w - 1 next ones


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
    kv_dtype: jnp.dtype  # LayerKV.dtype: bfloat16 for pages stored as uint16
    storage: jnp.dtype  # the dtype of LayerKV.pages
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    deterministic: bool = False
    value_size: int | None = None
    causal: bool = True

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
            causal=options.causal,
        )


def paged_attention(
    inputs: AttentionInputs,
    options: AttentionOptions,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
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
    width = inputs.q.shape[-1]
    if width < inputs.kv.head_dim:  # zeros change no product, and those of the values are cut off below
        inputs = replace(inputs, q=widened(inputs.q, inputs.kv))
    chosen = ATTENTION.choose(AttentionCall.of(inputs, options, platform), implementation)
    with jax.named_scope(f"paged_attention_{chosen.name}"):
        out: jax.Array = chosen.run(inputs, options)
    width = options.value_size or width
    return out if out.shape[-1] == width else out[..., :width]


def implementation_names() -> tuple[str, ...]:
    """Return the names that `paged_attention(implementation=…)` accepts, in order of preference."""
    return ATTENTION.names()
