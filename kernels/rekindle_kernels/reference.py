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
) -> Array:
    """Return attention of q [T, H, D] at `positions` over the first kv_len of keys, values [L, K, D]; float32."""
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
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (*logits.shape[:2], 1))
        logits = jnp.concatenate([logits, sink], axis=-1)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(largest), largest, 0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total == 0, 1, total))[..., : keys.shape[0]]
    return jnp.einsum("htl,lhd->thd", weights, values, precision="highest")


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
        result = attend(q, keys, values, positions, kv_len, inputs.sinks, options, inputs.sees)
        inside = (token >= first) & (token < first + count) & (kv_len > 0)
        return jnp.where(inside[:, None, None], result, out)

    out = lax.fori_loop(0, kv_lens.shape[0], add_sequence, jnp.zeros(q.shape, jnp.float32))
    return turned(out, inputs.kv).astype(q.dtype)


ATTENTION = Implementation("reference", attention, anything)
