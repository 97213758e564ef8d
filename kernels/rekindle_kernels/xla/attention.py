"""Paged attention in the forms that XLA:CPU runs fast: the fallback on every platform.

Decode: rows are sorted by length and taken in chunks; a loop walks over (chunk, block of keys) and never over a block
that no row of the chunk owns, so time follows the true lengths and not the page table's width. Prefill: a loop over
(sequence, block of queries), within it one over the keys those queries see. Both gather a block of pages, multiply, and
merge by online softmax; a block stays in the cache between its gather and its two products.

Measured with JAX 0.10.2 on 2 shared cores with AVX-512 (34-46 GB/s memory read); head size 64, group 3, the write of
the step's token included, every layer its own pages; µs per layer. The machine's pace varies by half from run to run:
compare within a run.

    decode; bfloat16 / int8 pages                            2 x 256, K=3   32 x 256, K=3   8 x 2048, K=5
    run 1: one gather, two batched dots, page 64                73 / 126       644 / 625
           blocks of 256 keys of all rows                       71 / 103       752 / 643     3176 / 3021
           items (row, block) merged by a one-hot product       88 / 120       798 / 855     3366 / 3087
    run 2: run 1 with a fence after the gather (read_block)     83 /  88       647 / 595
           blocks of 256 keys of all rows                       73 /  82       641 / 641     1879 / 1864
           blocks of 512 keys of all rows                                                    2244 / 1676
           items (row, block)                                   84 /  90       725 / 721     1955 / 1974
    run 3: as run 2, page 16                                    80 /  80       743 / 584     2345 / 1922
           chunks of 8 sorted rows x 256 keys (this file)       67 /  75       764 / 899     2382 / 1963
           chunks of 4                                                         827 / 1024    2499 / 2797
           chunks of 32                                                        738 / 578
    run 4: this file, page 16                                  131 / 114      1230 / 1227    3490 / 2957
           this file, page 128                                 112 / 113      1031 / 1197    3033 / 2986
           this file, float32 pages, page 16                      187            1768            5433
           no paging: dense buffers per row, float32 / int8     91 /  92       897 / 614     1948 / 1406

Dense float32 segments of growing width per row (256, 256, 512, 1024, ...), read in place under `lax.cond`, against this
file on bfloat16 pages of 16: 112 instead of 130 (2 x 256), 1113 / 1212 (32 x 256), 1764 / 2124 (8 x 2048, K=3),
1475 / 2539 (2 x 8192): not enough for twice the memory and for copies wherever a page is shared.

Chunks cost a little where all rows are equally long and save what ragged rows do not own. The parts, over data that
comes from memory: queries x keys in GB/s read float32 12 (keys transposed 20), bfloat16 12, int8 (keys left) 17;
weights x values float32 29, bfloat16 15, int8 14. So bfloat16 is bound by the products' packing and float32 by memory.
Multiply-and-reduce instead of a product is slower but for float32 values. Gathers, GB/s copied: [rows, S·D] 20-29,
[rows, S, D] 8-12, a loop of dynamic slices 9, concatenated slices 10.

Prefill, 512 queries at offset 1536, K=5, bfloat16 pages: blocks of 256 x 512 take 12.4 ms (283 GFLOP/s, 63 % of the
float32 product rate), 128 x 512 14.0, 128 x 256 14.6; 16.1 when every block is masked; jax.nn.dot_product_attention 60.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from rekindle_kernels.ops.attention import AttentionInputs, AttentionOptions
from rekindle_kernels.ops.registry import Implementation, anything
from rekindle_kernels.pages import LayerKV, as_values, largest_magnitude, turned
from rekindle_kernels.xla import page_bounds
from rekindle_kernels.xla.linear import rms_norm

# Finite: a block that is masked throughout gives weights of 1, which the next real block wipes out, and not NaN.
MASKED = -1e30


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows, queries and keys of one iteration."""

    decode_rows: int = 8
    decode_keys: int = 256
    prefill_queries: int = 128
    prefill_keys: int = 512


BLOCKS = Blocks()


class SoftmaxState(NamedTuple):
    """The state of an online softmax for M queries of C rows: the largest logit, the sum and the weighted values."""

    largest: Array  # float32 [C, K, M, 1]
    total: Array  # float32 [C, K, M, 1]
    values: Array  # float32 [C, K, M, D], or [C, K, M, value_size]


class KeyBlock(NamedTuple):
    """A block of keys and values of C rows, L keys each, with scales for narrow pages."""

    keys: Array  # [C, K, L, D]
    values: Array  # [C, K, L, D], zero where nothing was written
    key_scales: Array | None  # float32 [C, K, 1, L]
    value_scales: Array | None


def read_block(
    kv: LayerKV,
    pages: Array,
    left: Array,
    integer_dots: bool,
    value_size: int | None = None,
    since: Array | None = None,
) -> KeyBlock:
    """Return the keys and values on `pages` [C, L/S], or on `pages` [C, K, L/S] of each head's own.

    Row c owns the first left[c] of them (≤ 0: none; ≥ L: all), except the first since[c], because it may have given
    those pages back (≤ 0 or None: it owns them too).
    """
    C, count = pages.shape[0], pages.shape[-1]
    pages = pages if pages.ndim == 3 else pages[:, None]
    K, S, D = kv.kv_heads, kv.page_size, kv.head_dim
    places = jnp.arange(count) * S

    def in_pages(bounds: Array) -> Array:
        """Return bounds [C] of rows, counted from the first key of each page."""
        return jnp.broadcast_to(bounds[:, None, None] - places, (C, K, count)).reshape(-1, 1)

    def rows_of(array: Array, place: int) -> Array:
        """Return the rows of an array [P·parts·K, …] with the part at that place: one for each head of each page."""
        return (pages * (array.shape[1] * K) + place * K + jnp.arange(K)[None, :, None]).reshape(-1)

    def part(number: int) -> Array:
        array, place = kv.part(number)
        # Two dimensions, K and V apart: XLA:CPU vectorises only the innermost dimension of a gather, S·D elements.
        flat = array.reshape(-1, S * array.shape[-1]).at[rows_of(array, place)].get(mode="promise_in_bounds")
        if kv.values is None:
            return widen(flat, kv, integer_dots)
        return widen(flat.reshape(-1, S, array.shape[-1]), kv, integer_dots).reshape(-1, S * D)

    def gather(masked: bool) -> tuple[Array, Array]:
        keys = part(0)
        values = keys if kv.latent else part(1)
        if masked:
            at = jnp.arange(S * D)
            owned = at < in_pages(left) * D
            values = jnp.where(owned if since is None else owned & (at >= in_pages(since) * D), values, 0)
        return keys, values

    # Memory of others or never written may be NaN, and 0 · NaN is NaN; integers are masked by scales. Two branches save
    # the mask where all is owned, and are a fence: without it XLA:CPU fuses the reshape below into the gather and
    # loses the fast form (K and V of 32 rows x 256 in bfloat16: 910 µs of CPU time instead of 590; int8 570, not 190).
    maskable = not (kv.scales is not None and integer_dots)
    whole = jnp.min(left) >= count * S
    whole = whole if since is None else whole & (jnp.max(since) <= 0)
    keys, values = lax.cond(whole, lambda: gather(False), lambda: gather(maskable))
    keys, values = (x.reshape(C, K, count * S, D) for x in (keys, values))
    values = values if value_size is None else values[..., :value_size]
    if kv.scales is None:
        return KeyBlock(keys, values, None, None)
    scales = kv.scales.reshape(-1, S)
    key_scales, value_scales = (
        scales.at[rows_of(kv.scales, place)].get(mode="promise_in_bounds").reshape(C, K, 1, count * S)
        for place in (0, kv.scales.shape[1] - 1)
    )
    at = jnp.arange(count * S)
    seen = at < left[:, None, None, None]
    seen = seen if since is None else seen & (at >= since[:, None, None, None])
    return KeyBlock(keys, values, jnp.where(seen, key_scales, 0), jnp.where(seen, value_scales, 0))


Attend = Callable[[AttentionInputs, AttentionOptions], Array]
ReadBlock = Callable[[LayerKV, Array, Array, bool, int | None, Array | None], KeyBlock]  # as `read_block`


def widen(stored: Array, kv: LayerKV, integer_dots: bool) -> Array:
    """Widen stored numbers to a type with fast dots: float32, bfloat16, or int8 where both sides are integers."""
    values = as_values(stored, kv)
    if values.dtype in (jnp.float32, jnp.bfloat16) or (values.dtype == jnp.int8 and integer_dots):
        return values
    # One-byte numbers are exact in bfloat16; float16 has no fast dot on CPU.
    return values.astype(jnp.bfloat16 if values.dtype.itemsize == 1 else jnp.float32)


def two_int8(x: Array, bound: Array) -> tuple[Array, Array]:
    """Return float32 x [..., M, n], |x| ≤ bound, as int8 [..., 2·M, n] and its scale: (high + low/254)·scale ≈ x.

    High parts come first, then low parts: fifteen bits, because softmax weights far below the largest would vanish in
    eight. Twice the rows of a dot that is bound by reading its other side cost nothing.
    """
    scale = bound / 127
    steps = x / jnp.where(scale == 0, 1, scale)
    high = jnp.round(steps)
    low = jnp.round((steps - high) * 254)
    return jnp.concatenate([high, low], axis=-2).astype(jnp.int8), scale


def dot(subscripts: str, a: Array, b: Array) -> Array:
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    wide = jnp.int32 if b.dtype == jnp.int8 else jnp.float32
    return jnp.einsum(subscripts, a.astype(b.dtype), b, preferred_element_type=wide, precision=precision).astype(
        jnp.float32
    )


def logits_of(q: Array, block: KeyBlock, options: AttentionOptions) -> Array:
    """Return logits [C, K, M, L] of scaled queries q [C, K, M, D]."""
    if block.keys.dtype == jnp.int8:
        parts, scale = two_int8(q, largest_magnitude(q))
        M = q.shape[2]
        # Keys on the left: the integer micro-kernel reads that side without repacking it, 1.8x faster.
        sums = dot("cktd,ckmd->cktm", block.keys, parts)
        logits = (sums[..., :M] + sums[..., M:] / 254).swapaxes(2, 3) * scale
    else:
        logits = dot("ckmd,cktd->ckmt", q, block.keys)
    if block.key_scales is not None:
        logits = logits * block.key_scales
    return logits if options.soft_cap is None else options.soft_cap * jnp.tanh(logits / options.soft_cap)


def weighted_values(weights: Array, block: KeyBlock) -> Array:
    """Return weights [C, K, M, L] times values: [C, K, M, D]."""
    if block.value_scales is not None:
        weights = weights * block.value_scales
    if block.value_scales is None or block.values.dtype != jnp.int8:
        return dot("ckmt,cktd->ckmd", weights, block.values)
    # Softmax weights are at most 1, so that the scales alone bound the products: one pass over them less.
    parts, scale = two_int8(weights, jnp.max(block.value_scales, axis=-1, keepdims=True))
    sums = dot("ckmt,cktd->ckmd", parts, block.values)
    M = weights.shape[2]
    return (sums[:, :, :M] + sums[:, :, M:] / 254) * scale


def absorb(
    running: SoftmaxState, q: Array, block: KeyBlock, seen: Array | None, options: AttentionOptions
) -> SoftmaxState:
    """Continue an online softmax with a block; `seen` is a mask that broadcasts to [C, K, M, L], None without one."""
    logits = logits_of(q, block, options)
    if seen is not None:
        logits = jnp.where(seen, logits, MASKED)
    largest = jnp.maximum(running.largest, jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.exp(logits - largest)
    keep = jnp.exp(running.largest - largest)
    return SoftmaxState(
        largest,
        running.total * keep + jnp.sum(weights, axis=-1, keepdims=True),
        running.values * keep + weighted_values(weights, block),
    )


def start(shape: tuple[int, ...], sinks: Array | None) -> SoftmaxState:
    """Begin the softmax for values of `shape` [C, K, M, D]; a sink ([K, M]) is a logit in front of all blocks."""
    if sinks is None:
        return SoftmaxState(jnp.full((*shape[:-1], 1), MASKED), jnp.zeros((*shape[:-1], 1)), jnp.zeros(shape))
    largest = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, :, None], (*shape[:-1], 1))
    return SoftmaxState(largest, jnp.ones_like(largest), jnp.zeros(shape))


def finish(running: SoftmaxState) -> Array:
    return running.values / jnp.where(running.total == 0, 1, running.total)


def padded_table(page_table: Array, per_block: int) -> Array:
    """Widen the table to whole blocks with the scratch page."""
    return jnp.pad(page_table, (*((0, 0),) * (page_table.ndim - 1), (0, -page_table.shape[-1] % per_block)))


def pages_per_block(keys: int, page_size: int, table_width: int) -> int:
    return min(max(1, keys // page_size), table_width)


def longest_first(lens: Array) -> tuple[Array, Array]:
    """Return the rows in the order of their lengths, longest first, and the place of each row in it.

    It counts, in place of two sorts.
    """
    rows = jnp.arange(lens.size)
    longer, as_long = lens > lens[:, None], lens == lens[:, None]
    places = jnp.sum(longer | (as_long & (rows < rows[:, None])), axis=1)
    return jnp.argmax(places == rows[:, None], axis=1), places


def decode(inputs: AttentionInputs, options: AttentionOptions) -> Array:
    """Attend with the decode rows' queries, one per row -> float32 [R, H, V].

    V is the size of values, D but for latent pages. The page table may be [R, K, W], where heads have pages of their
    own.
    """
    R, kv = options.decode_rows, inputs.kv
    q, page_table, kv_lens, sinks = inputs.q[:R], inputs.page_table[:R], inputs.kv_lens[:R], inputs.sinks
    _, H, D = q.shape
    K, V = kv.kv_heads, options.value_size or D
    chunk = min(R, BLOCKS.decode_rows)
    chunks = -(-R // chunk)
    per_block = pages_per_block(BLOCKS.decode_keys, kv.page_size, page_table.shape[-1])
    keys = per_block * kv.page_size

    order, places = longest_first(kv_lens) if chunks > 1 else (jnp.arange(R), jnp.arange(R))
    whole = lambda x: jnp.pad(x[order], ((0, chunks * chunk - R),) + ((0, 0),) * (x.ndim - 1))  # noqa: E731
    lens, table = whole(kv_lens), padded_table(whole(page_table), per_block)
    q_sorted = whole(q.astype(jnp.float32) * options.scale).reshape(chunks * chunk, K, H // K, D)
    first_key = (
        jnp.zeros_like(lens) if options.sliding_window is None else jnp.maximum(lens - options.sliding_window, 0)
    )

    # Work list: the blocks [first, last) of each chunk, numbered through.
    by_chunk = lambda x: x.reshape(chunks, chunk)  # noqa: E731
    last = -(-jnp.max(by_chunk(lens), axis=1) // keys)
    first = jnp.min(by_chunk(jnp.where(lens > 0, first_key // keys, page_table.shape[-1])), axis=1)
    ends = jnp.cumsum(jnp.maximum(last - first, 0))

    def step(item: Array, running: SoftmaxState) -> SoftmaxState:
        c = jnp.sum(ends <= item) if chunks > 1 else 0
        index = last[c] - ends[c] + item
        rows = lambda x: lax.dynamic_slice_in_dim(x, c * chunk, chunk) if chunks > 1 else x  # noqa: E731
        row_lens = rows(lens)
        left = row_lens - index * keys
        pages = lax.dynamic_slice_in_dim(rows(table), index * per_block, per_block, axis=-1)
        since = None if options.sliding_window is None else rows(first_key) - index * keys
        block = read_block(kv, pages, left, kv.integers, options.value_size, since)
        at = index * keys + jnp.arange(keys)
        seen = (at < row_lens[:, None]) & (at >= rows(first_key)[:, None])
        new = absorb(SoftmaxState(*map(rows, running)), rows(q_sorted), block, seen[:, None, None, :], options)
        if chunks == 1:
            return new
        put = lambda old, x: lax.dynamic_update_slice_in_dim(old, x, c * chunk, 0)  # noqa: E731
        return SoftmaxState(*map(put, running, new))

    by_head = None if sinks is None else sinks.reshape(K, H // K)
    out = finish(lax.fori_loop(0, ends[-1], step, start((*q_sorted.shape[:-1], V), by_head)))
    out = jnp.where((lens > 0)[:, None, None, None], out, 0).reshape(chunks * chunk, H, V)[:R]
    return out if chunks == 1 else out[places]


def prefill(
    inputs: AttentionInputs, options: AttentionOptions, *, blocks: Blocks | None = None, read: ReadBlock | None = None
) -> Array:
    """Attend with chunks of prompts.

    q [T, H, D] packed by cu_q_lens [N+1], page_table [N, W], kv_lens [N] -> float32 [T, H, V]. `blocks` has the sizes
    of an iteration, and `read` reads its keys and values; both default to this module's.
    """
    blocks, read = blocks or BLOCKS, read or read_block
    R, kv, cu_q_lens, num_prefills = options.decode_rows, inputs.kv, inputs.cu_q_lens, inputs.num_prefills
    q, page_table, kv_lens, sinks = inputs.q[R:], inputs.page_table[R:], inputs.kv_lens[R:], inputs.sinks
    T, H, D = q.shape
    V = options.value_size or D
    K, N = kv.kv_heads, page_table.shape[0]
    G = H // K
    queries = min(T, blocks.prefill_queries if N > 1 else 2 * blocks.prefill_queries)  # short sequences fill less
    per_block = pages_per_block(blocks.prefill_keys, kv.page_size, page_table.shape[1])
    keys = per_block * kv.page_size
    table = padded_table(page_table, per_block)
    q_lens = jnp.where(jnp.arange(N) < num_prefills, jnp.diff(cu_q_lens), 0)
    ends = jnp.cumsum(-(-q_lens // queries))  # work list: blocks of queries, numbered through the sequences
    q = jnp.pad(q, ((0, queries), (0, 0), (0, 0)))  # so that the last block's slice does not slide back
    by_head = None if sinks is None else jnp.repeat(sinks.reshape(K, G), queries, axis=1)
    later = None if inputs.sees is None else jnp.pad(inputs.sees[R:], (0, queries))
    # A query at position p sees keys before p + ahead, or before `later`.
    ahead = 1 if options.causal else options.sliding_window or page_table.shape[1] * kv.page_size

    def step(item: Array, out: Array) -> Array:
        s = jnp.sum(ends <= item)
        begin = (item - (ends[s] - -(-q_lens[s] // queries))) * queries  # within the sequence
        kv_len = kv_lens[s]
        token = cu_q_lens[s] + begin
        local_q = lax.dynamic_slice_in_dim(q, token, queries).astype(jnp.float32) * options.scale
        local_q = local_q.reshape(queries, K, G, D).transpose(1, 2, 0, 3).reshape(1, K, G * queries, D)
        position = kv_len - q_lens[s] + begin + jnp.arange(queries)
        limit = position + ahead
        if later is not None:
            limit = jnp.maximum(limit, lax.dynamic_slice_in_dim(later, token, queries))
        last_key = jnp.minimum(position[-1] + ahead if later is None else jnp.max(limit), kv_len)
        first_key = 0 if options.sliding_window is None else jnp.maximum(position[0] - options.sliding_window + 1, 0)

        def absorb_keys(index: Array, running: SoftmaxState, all_seen: bool = False) -> SoftmaxState:
            pages = lax.dynamic_slice(table, (s, index * per_block), (1, per_block))
            since = None if options.sliding_window is None else (first_key - index * keys)[None]
            block = read(kv, pages, (kv_len - index * keys)[None], False, options.value_size, since)
            if all_seen:
                return absorb(running, local_q, block, None, options)
            at = index * keys + jnp.arange(keys)
            seen = (at < limit[:, None]) & (at < kv_len)
            if options.sliding_window is not None:
                seen &= at > position[:, None] - options.sliding_window
            seen = jnp.broadcast_to(seen[None], (G, queries, keys)).reshape(1, 1, G * queries, keys)
            return absorb(running, local_q, block, seen, options)

        running = start((*local_q.shape[:-1], V), by_head)
        bordering = first_key // keys
        if options.sliding_window is None:
            bordering = jnp.minimum(position[0] + ahead, kv_len) // keys
            running = lax.fori_loop(0, bordering, partial(absorb_keys, all_seen=True), running)
        block_out = finish(lax.fori_loop(bordering, -(-last_key // keys), absorb_keys, running))
        block_out = block_out.reshape(K, G, queries, V).transpose(2, 0, 1, 3).reshape(queries, H, V)
        valid = (begin + jnp.arange(queries) < q_lens[s])[:, None, None]
        old = lax.dynamic_slice_in_dim(out, token, queries)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(valid, block_out, old), token, 0)

    # Float32 whatever q is: XLA:CPU would widen and narrow all of a bfloat16 array at every update.
    return lax.fori_loop(0, ends[-1], step, jnp.zeros((*q.shape[:-1], V), jnp.float32))[:T]


def within(inputs: AttentionInputs, options: AttentionOptions) -> AttentionInputs:
    """Return the inputs of decode rows with the pages that they choose."""
    R, most = options.decode_rows, options.most_pages
    if most is None:
        return inputs
    q, table, lens = (x[:R] for x in (inputs.q, inputs.page_table, inputs.kv_lens))
    chosen = page_bounds.choose(q, inputs.kv, table, lens, most, options.scale)
    return replace(inputs, page_table=chosen.table, kv_lens=chosen.lens)


def paged_attention(
    inputs: AttentionInputs, options: AttentionOptions, *, decode: Attend = decode, prefill: Attend = prefill
) -> Array:
    """Implement `ops.attention.paged_attention`, with decode rows and prefill tokens apart."""
    q, R, kv = inputs.q, options.decode_rows, inputs.kv
    inputs = replace(inputs, q=turned(q, kv))
    parts = [decode(within(inputs, options), options)] if R else []
    if q.shape[0] > R:
        if inputs.page_table.shape[0] == R:
            parts.append(jnp.zeros((*q[R:].shape[:-1], options.value_size or q.shape[-1]), q.dtype))
        else:
            parts.append(prefill(inputs, options))
    parts = [turned(part, kv).astype(q.dtype) for part in parts]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


ATTENTION = Implementation("xla", paged_attention, anything, chooses_pages=True)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Return x [..., heads, D] with its first 2·F dimensions rotated, the first half of them against the second."""
    half = cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if rest.shape[-1]:
        parts.append(rest.astype(parts[0].dtype))
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def rope(
    qk: Array,
    qkv: Array,
    cos: Array | None,
    sin: Array | None,
    norm: Array | None = None,
    *,
    heads: int,
    eps: float = 0.0,
) -> tuple[Array, Array, Array]:
    """Implement `ops.attention.rope`."""
    both = (qkv.shape[-2] + heads) // 2
    qk = qk if norm is None else rms_norm(qk[..., :both, :], norm, eps)
    q, k = qk[..., :heads, :], qk[..., heads:both, :]
    if cos is not None and sin is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, k, qkv[..., both:, :]


ROPE = Implementation("xla", rope, anything)
