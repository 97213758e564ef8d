"""The attention that every kernel is tested against: plain jnp, one sequence at a time, in float32, for any shape."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from rekindle_kernels.ops.attention import AttentionInputs, AttentionOptions
from rekindle_kernels.ops.registry import Implementation, anything
from rekindle_kernels.pages import LayerKV, as_values, turned


def sequence_keys_values(kv: LayerKV, pages: Array) -> tuple[Array, Array]:
    """Return keys and values of the sequence that owns `pages` ([W]), each float32 [W·S, K, D].

    Latent pages are both.
    """
    parts = [as_values(array[pages], kv).astype(jnp.float32) for array in kv.arrays]
    numbers = jnp.concatenate(parts, axis=1)  # [W, 2 or 1, K, S, D]
    if kv.scales is not None:
        numbers = numbers * kv.scales[pages][..., None]
    flat = numbers.transpose(1, 0, 3, 2, 4).reshape(numbers.shape[1], -1, kv.kv_heads, kv.head_dim)
    return flat[0], flat[-1]


def attend(
    q: Array,
    keys: Array,
    values: Array,
    positions: Array,
    kv_len: Array,
    sinks: Array | None,
    options: AttentionOptions,
    sees: Array | None = None,
    chosen: Array | None = None,
) -> Array:
    """Return attention of q [T, H, D] at `positions` over the first kv_len of keys, values [L, K, D]; float32.

    Of these it sees only the ones that are `chosen` [K, L].
    """
    group = q.shape[1] // keys.shape[1]
    at = jnp.arange(keys.shape[0])
    stored = (at < kv_len)[:, None, None]
    keys = jnp.repeat(jnp.where(stored, keys, 0), group, axis=1)
    values = jnp.repeat(jnp.where(stored, values, 0), group, axis=1)
    logits = jnp.einsum("thd,lhd->htl", q.astype(jnp.float32), keys, precision="highest") * options.scale
    if options.soft_cap is not None:
        logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
    visible = jnp.broadcast_to(at[None, :] < kv_len, (len(positions), len(at)))
    if options.causal:
        limit = positions + 1 if sees is None else jnp.maximum(positions + 1, sees)
        visible &= at[None, :] < limit[:, None]
    if options.sliding_window is not None:
        visible &= at[None, :] > positions[:, None] - options.sliding_window
        if not options.causal:
            visible &= at[None, :] < positions[:, None] + options.sliding_window
    logits = jnp.where(visible[None], logits, -jnp.inf)
    if chosen is not None:
        logits = jnp.where(jnp.repeat(chosen, group, axis=0)[:, None], logits, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (*logits.shape[:2], 1))
        logits = jnp.concatenate([logits, sink], axis=-1)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(largest), largest, 0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total == 0, 1, total))[..., : keys.shape[0]]
    return jnp.einsum("htl,lhd->thd", weights, values, precision="highest")


def chosen_keys(q: Array, kv: LayerKV, pages: Array, kv_len: Array, options: AttentionOptions) -> Array:
    """Return bool [K, L], True for the keys on pages that a decode row with query q [H, D] attends to."""
    assert kv.bounds is not None, "the pages have bounds"
    assert options.most_pages is not None, "rows choose pages"
    K, D = kv.kv_heads, q.shape[-1]
    bounds = kv.bounds if kv.bounds.dtype == jnp.bfloat16 else lax.bitcast_convert_type(kv.bounds, jnp.bfloat16)
    bounds = bounds[pages].astype(jnp.float32)  # [W, 2, K, D]
    products = q.astype(jnp.float32).reshape(K, -1, 1, 1, D) * bounds.transpose(2, 0, 1, 3)[:, None]  # [K, G, W, 2, D]
    most = jnp.max(products, axis=3).sum(-1) * options.scale
    at, last = jnp.arange(len(pages)), (kv_len - 1) // kv.page_size
    most = jnp.where(at < last, most, -jnp.inf)
    largest = jnp.max(most, axis=-1, keepdims=True)
    shares = jnp.exp(jnp.maximum(most - jnp.where(jnp.isfinite(largest), largest, 0), -80))
    shares = jnp.where(at < last, shares, 0)
    total = shares.sum(-1, keepdims=True)
    shares = jnp.where(at < last, (shares / jnp.where(total == 0, 1, total)).sum(1), -1)
    order = jnp.argsort(-shares, axis=-1, stable=True)[:, : options.most_pages - 1]
    chosen = jnp.zeros(shares.shape, bool).at[jnp.arange(K)[:, None], order].set(True) | (at == last)
    return jnp.repeat(chosen, kv.page_size, axis=1)


def attention(inputs: AttentionInputs, options: AttentionOptions) -> Array:
    """Implement `ops.attention.paged_attention`, one sequence after the other."""
    q, decode_rows, kv_lens, cu_q_lens = (
        turned(inputs.q, inputs.kv),
        options.decode_rows,
        inputs.kv_lens,
        inputs.cu_q_lens,
    )
    token = jnp.arange(q.shape[0])
    # A decode row is a sequence with one query; prefill sequences beyond num_prefills have none.
    rows = jnp.arange(decode_rows)
    q_lens = jnp.where(jnp.arange(cu_q_lens.shape[0] - 1) < inputs.num_prefills, jnp.diff(cu_q_lens), 0)
    firsts = jnp.concatenate([rows, decode_rows + cu_q_lens[:-1]])
    counts = jnp.concatenate([jnp.ones_like(rows), q_lens])

    def add_sequence(sequence: Array, out: Array) -> Array:
        kv_len, first, count = kv_lens[sequence], firsts[sequence], counts[sequence]
        keys, values = sequence_keys_values(inputs.kv, inputs.page_table[sequence])
        positions = kv_len - count + (token - first)
        if options.sliding_window is not None:  # pages before the first query's window may be anyone's
            owned = (jnp.arange(len(keys)) > kv_len - count - options.sliding_window)[:, None, None]
            keys, values = jnp.where(owned, keys, 0), jnp.where(owned, values, 0)
        chosen = None
        if options.most_pages is not None:
            row = jnp.minimum(sequence, decode_rows - 1)
            chosen = chosen_keys(q[row], inputs.kv, inputs.page_table[row], kv_lens[row], options)
            chosen |= sequence >= decode_rows
        result = attend(q, keys, values, positions, kv_len, inputs.sinks, options, inputs.sees, chosen)
        inside = (token >= first) & (token < first + count) & (kv_len > 0)
        return jnp.where(inside[:, None, None], result, out)

    out = lax.fori_loop(0, kv_lens.shape[0], add_sequence, jnp.zeros(q.shape, jnp.float32))
    return turned(out, inputs.kv).astype(q.dtype)


ATTENTION = Implementation("reference", attention, anything, chooses_pages=True)
