"""Paged attention in the forms that XLA:GPU compiles well, for the GPUs and the calls that no Triton kernel serves.

Decode multiplies queries and keys and sums over the head's numbers, instead of calling a matrix product: XLA reads the
pages within the kernel that sums, so that no copy of the keys is written. Of the values there is one, for a product: as
a sum XLA would read them through a transposed copy in float32. The number of pages is static in each of a few branches,
each twice as wide as the one before; a step takes the first that its longest row fits into. A loop over blocks of keys,
as `attention.py` has it for a CPU, would have the host wait for the device at each turn.

Prefill is that of `attention.py` with larger blocks, and reads them without branches.

No such GPU has run it. The compiler for a T4 (7.5) shows the copies, and that a step of decode rows is one CUDA graph.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from rekindle_kernels.ops.attention import AttentionInputs, AttentionOptions
from rekindle_kernels.ops.registry import Implementation, anything
from rekindle_kernels.pages import LayerKV, as_values
from rekindle_kernels.xla import attention as blocks_of_keys
from rekindle_kernels.xla.attention import MASKED, Blocks, KeyBlock

BLOCKS = Blocks(prefill_queries=256, prefill_keys=1024)
LEAST_KEYS = 512  # of the narrowest branch


def widths(pages: int, page_size: int) -> tuple[int, ...]:
    """Return the numbers of pages of the branches: each twice the one before, and `pages` at last."""
    width, found = max(1, LEAST_KEYS // page_size), list[int]()
    while width < pages:
        found.append(width)
        width *= 2
    return (*found, pages)


def decode(inputs: AttentionInputs, options: AttentionOptions) -> Array:
    """Attend with the decode rows' queries, one per row -> float32 [R, H, V]."""
    rows, kv, window = options.decode_rows, inputs.kv, options.sliding_window
    lens, table, size = inputs.kv_lens[:rows], inputs.page_table[:rows], kv.page_size
    _, heads, head_dim = inputs.q.shape
    grouped = (rows, kv.kv_heads, heads // kv.kv_heads)
    q = (inputs.q[:rows].astype(jnp.float32) * options.scale).reshape(*grouped, head_dim)
    sinks = None if inputs.sinks is None else inputs.sinks.astype(jnp.float32).reshape(1, 1, *grouped[1:])
    first_key = jnp.zeros_like(lens) if window is None else jnp.maximum(lens - window, 0)
    first = first_key // size  # a row's first page that it attends to
    most = table.shape[1] if window is None else min(table.shape[1], -(-(window - 1) // size) + 1)

    def attend(width: int) -> Array:
        """Attend to `width` pages of each row."""
        numbers = first[:, None] + jnp.arange(width)
        ids = jnp.take_along_axis(table, jnp.minimum(numbers, table.shape[1] - 1), axis=1)
        at = (numbers[..., None] * size + jnp.arange(size)).reshape(rows, -1)  # [R, L]
        seen = ((at < lens[:, None]) & (at >= first_key[:, None]))[:, :, None, None]
        (keys, key_scales), (values, value_scales) = _keys_and_values(kv, ids, inputs.q.dtype)
        logits = jnp.sum(q[:, None] * keys[:, :, :, None, :].astype(jnp.float32), axis=-1)  # [R, L, K, G]
        logits = logits if key_scales is None else logits * key_scales[..., None]
        if options.soft_cap is not None:
            logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
        logits = jnp.where(seen, logits, MASKED)
        largest = jnp.max(logits, axis=1, keepdims=True)
        largest = largest if sinks is None else jnp.maximum(largest, sinks)
        weights = jnp.where(seen, jnp.exp(logits - largest), 0)
        total = jnp.sum(weights, axis=1)
        total = total if sinks is None else total + jnp.exp(sinks - largest)[:, 0]
        weights = weights if value_scales is None else weights * jnp.where(seen, value_scales[..., None], 0)
        # Memory of others or never written may be NaN, and 0 · NaN is NaN.
        owned = jnp.where(seen, values[..., : options.value_size or head_dim], 0)  # [R, L, K, V]
        out = blocks_of_keys.dot("rlkg,rlkv->rkgv", weights, owned)
        return out / jnp.where(total == 0, 1, total)[..., None]

    branches = widths(most, size)
    needed = jnp.max(-(-lens // size) - first, initial=0)
    fitting = jnp.sum(needed > jnp.array(branches[:-1], jnp.int32))
    out = lax.switch(fitting, [functools.partial(attend, width) for width in branches])
    return out.reshape(rows, heads, -1)


def _keys_and_values(kv: LayerKV, ids: Array, narrow: DTypeLike) -> list[tuple[Array, Array | None]]:
    """Return keys and values on pages [R, W], each as [R, L, K, D] and its scales [R, L, K]; one-byte numbers are
    converted to `narrow`.

    Tokens come before heads, unlike in the pages: XLA sums over neighbouring dimensions in one kernel.
    """
    heads, size = kv.kv_heads, kv.page_size

    def places(array: Array, place: int) -> Array:
        """Return the places of the vectors of one part in an array [P, parts, K, S, …] of vectors."""
        first = (ids[:, :, None, None] * array.shape[1] + place) * heads + jnp.arange(heads)  # [R, W, 1, K]
        return (first * size + jnp.arange(size)[:, None]).reshape(len(ids), -1, heads)

    halves = list[tuple[Array, Array | None]]()
    for number in (0, 1):
        array, place = kv.part(number)
        stored = array.reshape(-1, array.shape[-1]).at[places(array, place)].get(mode="promise_in_bounds")
        numbers, scales = as_values(stored, kv), None
        numbers = numbers.astype(narrow) if numbers.dtype.itemsize == 1 else numbers
        if kv.scales is not None:
            at = places(kv.scales, min(number, kv.scales.shape[1] - 1))
            scales = kv.scales.reshape(-1).at[at].get(mode="promise_in_bounds")
        halves.append((numbers, scales))
    return halves


def read_block(
    kv: LayerKV,
    pages: Array,
    left: Array,
    _: bool,
    value_size: int | None = None,
    since: Array | None = None,
    *,
    narrow: DTypeLike,
) -> KeyBlock:
    """Return keys and values as `attention.read_block` does, by one gather; one-byte numbers become `narrow`."""
    count, size, parts = pages.shape[1], kv.page_size, 1 if kv.latent else 2
    at = jnp.arange(count * size)
    seen = at < left[:, None]
    seen = (seen if since is None else seen & (at >= since[:, None]))[:, None, :, None]  # [C, 1, L, 1]
    arrays = [as_values(array.at[pages].get(mode="promise_in_bounds"), kv) for array in kv.arrays]
    stored = jnp.concatenate(arrays, axis=2)  # [C, L / S, 2 or 1, K, S, D]
    stored = stored.astype(narrow) if stored.dtype.itemsize == 1 else stored
    in_order = stored.transpose(2, 0, 3, 1, 4, 5).reshape(parts, len(pages), kv.kv_heads, count * size, kv.head_dim)
    keys, values = in_order[0], jnp.where(seen, in_order[parts - 1], 0)
    values = values if value_size is None else values[..., :value_size]
    if kv.scales is None:
        return KeyBlock(keys, values, None, None)
    factors = kv.scales.at[pages].get(mode="promise_in_bounds").transpose(2, 0, 3, 1, 4)  # [2, C, K, L / S, S]
    factors = factors.reshape(parts, len(pages), kv.kv_heads, 1, count * size)
    masked = jnp.where(seen.swapaxes(2, 3), factors, 0)
    return KeyBlock(keys, values, masked[0], masked[parts - 1])


def prefill(inputs: AttentionInputs, options: AttentionOptions) -> Array:
    """Attend with chunks of prompts -> float32 [T, H, V]."""
    read = functools.partial(read_block, narrow=inputs.q.dtype)
    return blocks_of_keys.prefill(inputs, options, blocks=BLOCKS, read=read)


paged_attention = functools.partial(blocks_of_keys.paged_attention, decode=decode, prefill=prefill)


ATTENTION = Implementation("xla_gpu", paged_attention, anything)
