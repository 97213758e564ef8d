"""TPU attention over pages read in place, in one kernel; queries are laid out in tiles of one sequence each."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rekindle_kernels import tuning
from rekindle_kernels.ops.attention import AttentionCall, AttentionInputs, AttentionOptions
from rekindle_kernels.ops.registry import Implementation
from rekindle_kernels.pages import as_values
from rekindle_kernels.pallas import tiles

TYPES = ("bfloat16", "float32")
# Scalar memory for the page table, out of 1 MiB on a v5e (by compiling); the rest is for tile tables and semaphores.
TABLE_BYTES = 896 << 10


def sequences_at_once(table_width: int) -> int:
    """Return how many page table rows fit scalar memory, where they are padded to tiles of 8 rows and 128 columns."""
    return TABLE_BYTES // (-(-table_width // 128) * 128 * 4) // 8 * 8


def supports(call: AttentionCall) -> str | None:
    """Return the reason why the kernel can't serve the call, or None."""
    if call.q_dtype.name not in TYPES:
        return f"queries are {call.q_dtype.name}, not one of {', '.join(TYPES)}"
    if call.kv_dtype.name not in TYPES:
        return f"pages are {call.kv_dtype.name}, not one of {', '.join(TYPES)}"
    if call.page_size % 8:
        return f"page size {call.page_size} is not a multiple of 8, the rows of a tile"
    if not call.causal:
        return "queries see the keys after them"
    if call.value_size is not None:
        return "values are a part of the keys"
    if call.head_dim > 256:
        return f"head_dim {call.head_dim} is more than 256"
    if not sequences_at_once(call.table_width):
        return f"a page table of {call.table_width} pages per sequence overflows scalar memory; use larger pages"
    return None


def _decode_tiles(contexts: Array) -> Array:
    """Return a tile table with one tile per decode row."""
    row = jnp.arange(contexts.shape[0])
    zero = jnp.zeros_like(row)
    return jnp.stack([row, row, (contexts > 0).astype(row.dtype), contexts, zero]).astype(jnp.int32)


def _of_rows(table: Array, first: int, count: int) -> tuple[Array, Array]:
    """Return True for the tiles of page table rows first..first+count-1, and a table where only these have keys."""
    row = table[tiles.SEQUENCE] - first
    selected = (row >= 0) & (row < count)
    masked = table.at[tiles.SEQUENCE].set(jnp.clip(row, 0, count - 1))
    return selected, masked.at[tiles.CONTEXT].set(jnp.where(selected, masked[tiles.CONTEXT], 0))


def _pad_rows(rows: int, dtype: jnp.dtype) -> int:
    """Round the rows of a tile up to a multiple of one register's rows: 8 sublanes of 32 bits."""
    least = 8 * 4 // dtype.itemsize
    return -(-rows // least) * least


def attention(
    inputs: AttentionInputs,
    options: AttentionOptions,
    *,
    config: tuning.Tpu | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Array:
    """Compute `ops.attention.paged_attention`. Block sizes default to the values in `tuning`."""
    q, kv, sinks, decode_rows = inputs.q, inputs.kv, inputs.sinks, options.decode_rows
    tokens, heads, head_dim = q.shape
    group = heads // kv.kv_heads
    pages = as_values(kv.pages, kv)
    config = config or tuning.tpu(kv.dtype, head_dim, kv.page_size, heads, kv.kv_heads)
    block_pages = max(1, min(config.keys // kv.page_size, inputs.page_table.shape[1]))

    def run(tiled: Array, table: Array, span: int, page_table: Array) -> Array:
        """Run the kernel on tiled [tiles, span, H, D]; same layout out. `table` has indices of rows of `page_table`."""
        rows = _pad_rows(span * group, q.dtype)
        folded = tiled.reshape(-1, span, kv.kv_heads, group, head_dim).swapaxes(1, 2)
        folded = folded.reshape(-1, kv.kv_heads, span * group, head_dim)
        folded = jnp.pad(folded, ((0, 0), (0, 0), (0, rows - span * group), (0, 0)))
        tile_sinks = None
        if sinks is not None:
            tile_sinks = jnp.tile(sinks.reshape(kv.kv_heads, group), (1, span))
            tile_sinks = jnp.pad(tile_sinks, ((0, 0), (0, rows - span * group)))
        shape = TileShape(
            group, rows, block_pages, kv.page_size, float(options.scale), options.soft_cap, options.sliding_window
        )
        out = run_tiles(folded, pages, table, page_table, tile_sinks, shape=shape, interpret=interpret)
        out = out[:, :, : span * group].reshape(-1, kv.kv_heads, span, group, head_dim)
        return out.swapaxes(1, 2).reshape(-1, span, heads, head_dim)

    parts = []
    at_once = sequences_at_once(inputs.page_table.shape[1])
    if decode_rows:
        with jax.named_scope("decode"):
            for first in range(0, decode_rows, at_once):
                part = slice(first, min(first + at_once, decode_rows))
                table = _decode_tiles(inputs.kv_lens[part])
                parts.append(run(q[part, None], table, 1, inputs.page_table[part])[:, 0])
    if tokens > decode_rows:
        with jax.named_scope("prefill"):
            span = min(config.tokens, _pad_rows(tokens - decode_rows, q.dtype))
            table = tiles.tile_table(inputs, decode_rows=decode_rows, rows_per_token=group, block=span * group)
            start = table[tiles.FIRST] // group
            offset = start[:, None] + jnp.arange(span)
            token = table[tiles.QUERY][:, None] + offset
            real = offset < table[tiles.QUERIES][:, None]
            queries, sequences = q[jnp.where(real, token, 0)], inputs.kv_lens.shape[0] - decode_rows
            tiled = jnp.zeros_like(queries)
            for first in range(decode_rows, decode_rows + sequences, at_once):
                rows = inputs.page_table[first : first + at_once]
                selected, masked = _of_rows(table, first, rows.shape[0])
                result = run(queries, masked, span, rows)
                tiled = result if sequences <= at_once else jnp.where(selected[:, None, None, None], result, tiled)
            # Every token from decode_rows on is in exactly one tile, padding included.
            place = jnp.zeros((tokens,), jnp.int32)
            place = place.at[jnp.where(real, token, tokens)].set(
                jnp.arange(real.size, dtype=jnp.int32).reshape(real.shape), mode="drop"
            )
            parts.append(tiled.reshape(-1, heads, head_dim)[place[decode_rows:]])
    return jnp.concatenate(parts) if parts else jnp.zeros_like(q)


ATTENTION = Implementation("pallas_tpu", attention, supports)
# The same kernel as plain JAX operations, on any device: slow, for tests.
INTERPRETED = Implementation("pallas_tpu_interpret", functools.partial(attention, interpret=True), supports)


# The TPU attention kernel: one tile of query rows per grid step against paged keys, fetched two blocks deep.
#
# Axes: M tile rows ((token, head of the group) pairs), K kv heads, G heads per kv head, D head_dim, S page size, B
# pages of a block. A page holds all heads' keys and values in one piece of HBM, so one DMA brings it whole and the
# kernel works on all heads. The last block of a tile starts the fetch of the first block of the next tile that has
# keys: only the very first DMA is waited for in full.

# A finite start for running maxima: with -inf a row with only masked keys would compute exp(-inf - -inf) = nan.
LOWEST = -1e30
LANES = 128


@dataclass(frozen=True)
class TileShape:
    """The sizes and options that a kernel is compiled for."""

    group: int  # G
    rows: int  # M
    block_pages: int  # B
    page_size: int
    scale: float
    soft_cap: float | None
    sliding_window: int | None


class KeySpan(NamedTuple):
    """The keys that one tile reads."""

    sequence: Array
    context: Array  # keys of the sequence
    nearest: Array  # position of the tile's first token
    low: Array  # half-open range of key blocks that some row sees
    high: Array


def span(table: jax.Ref | Array, tile: Array, shape: TileShape) -> KeySpan:
    """Return the tile's span, from the tile table."""
    queries, context, first = (table[row, tile] for row in (tiles.QUERIES, tiles.CONTEXT, tiles.FIRST))
    size = shape.block_pages * shape.page_size
    nearest = context - queries + lax.div(first, jnp.int32(shape.group))
    farthest = jnp.minimum(nearest + (shape.rows - 1) // shape.group, context - 1)
    empty = (first >= queries * shape.group) | (context <= 0)
    high = jnp.where(empty, 0, lax.div(farthest + size, jnp.int32(size)))
    low = jnp.zeros_like(high)
    if shape.sliding_window is not None:
        low = jnp.minimum(lax.div(jnp.maximum(nearest - shape.sliding_window + 1, 0), jnp.int32(size)), high)
    return KeySpan(table[tiles.SEQUENCE, tile], context, nearest, low, high)


class PageFetch:
    """Starts and awaits the pages of a block in one of the two buffers."""

    def __init__(self, pages: jax.Ref, table: jax.Ref, buffers: jax.Ref, semaphores: jax.Ref, shape: TileShape) -> None:
        self.pages, self.table, self.buffers, self.semaphores = pages, table, buffers, semaphores
        self.shape = shape

    def _for_pages(self, span: KeySpan, block: Array, slot: Array, act: str) -> None:
        first = block * self.shape.block_pages
        count = lax.div(span.context + (self.shape.page_size - 1), jnp.int32(self.shape.page_size)) - first

        def one(index: Array, _: None) -> None:
            page = self.table[span.sequence, first + index] if act == "start" else 0
            copy = pltpu.make_async_copy(self.pages.at[page], self.buffers.at[slot, index], self.semaphores.at[slot])
            getattr(copy, act)()

        lax.fori_loop(0, jnp.minimum(count, self.shape.block_pages), one, None)

    def start(self, span: KeySpan, block: Array, slot: Array) -> None:
        self._for_pages(span, block, slot, "start")

    def wait(self, span: KeySpan, block: Array, slot: Array) -> None:
        # Waiting counts bytes, so any page of the same size describes the copy.
        self._for_pages(span, block, slot, "wait")


def _attend_block(
    q_ref: jax.Ref,  # [1, K, M, D]
    page_ref: jax.Ref,  # [B, 2, K, S, D]
    top_ref: jax.Ref,  # float32 [K, M, 128]: running maximum, the same in every lane
    total_ref: jax.Ref,  # float32 [K, M, 128]
    values_ref: jax.Ref,  # float32 [K, M, D]
    span: KeySpan,
    block: Array,
    shape: TileShape,
) -> None:
    """Add one block of keys to every head's online softmax."""
    keys = shape.block_pages * shape.page_size
    kv_heads, head_dim = q_ref.shape[1], q_ref.shape[-1]
    start = block * keys
    lowest = jnp.int32(0)
    if shape.sliding_window is not None:
        lowest = jnp.maximum(span.nearest - shape.sliding_window + 1, 0)

    # Weights of invisible keys are zero, but zero times a number from unwritten memory may be nan.
    @pl.when((start + keys > span.context) | (start < lowest))
    def _clear() -> None:
        values_at = (slice(None), 1)
        stored = page_ref[values_at]
        page = lax.broadcasted_iota(jnp.int32, stored.shape, 0)
        key = start + page * shape.page_size + lax.broadcasted_iota(jnp.int32, stored.shape, 2)
        page_ref[values_at] = jnp.where((key < span.context) & (key >= lowest), stored, jnp.zeros_like(stored))

    key = start + lax.broadcasted_iota(jnp.int32, (shape.rows, keys), 1)
    row = lax.broadcasted_iota(jnp.int32, (shape.rows, keys), 0)
    position = span.nearest + lax.div(row, jnp.int32(shape.group))
    visible = key <= jnp.minimum(position, span.context - 1)
    if shape.sliding_window is not None:
        visible &= key > position - shape.sliding_window
    for head in range(kv_heads):
        q = q_ref[0, head]
        k, v = (page_ref[:, half, head].reshape(keys, head_dim).astype(q.dtype) for half in (0, 1))
        precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        dot = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
        logits = dot(q, k, (((1,), (1,)), ((), ()))) * shape.scale
        if shape.soft_cap is not None:
            logits = shape.soft_cap * jnp.tanh(logits / shape.soft_cap)
        logits = jnp.where(visible, logits, -jnp.inf)
        previous = top_ref[head]
        top = jnp.maximum(previous, jnp.max(logits, axis=1, keepdims=True))
        weights = jnp.exp(logits - top[:, :1])
        shrink = jnp.exp(previous - top)
        top_ref[head] = top
        total_ref[head] = total_ref[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        added = dot(weights.astype(q.dtype), v, (((1,), (0,)), ((), ())))
        values_ref[head] = values_ref[head] * shrink[:, :1] + added


def _kernel(
    table_ref: jax.Ref,  # int32 [5, tiles]
    next_ref: jax.Ref,  # int32 [tiles + 1]: the next tile that has keys, at [-1] the first; `tiles` where there is none
    page_table_ref: jax.Ref,  # int32 [N, W]
    q_ref: jax.Ref,  # [1, K, M, D]
    sinks_ref: jax.Ref | None,  # float32 [K, M, 128]
    pages_ref: jax.Ref,  # [P, 2, K, S, D] in HBM
    o_ref: jax.Ref,  # [1, K, M, D]
    buffers: jax.Ref,  # [2, B, 2, K, S, D]
    semaphores: jax.Ref,
    slot_ref: jax.Ref,  # int32 [1]: the buffer that the next block is in
    top_ref: jax.Ref,
    total_ref: jax.Ref,
    values_ref: jax.Ref,
    *,
    shape: TileShape,
) -> None:
    tile, count = pl.program_id(0), pl.num_programs(0)
    fetch = PageFetch(pages_ref, page_table_ref, buffers, semaphores, shape)
    keys = span(table_ref, tile, shape)

    @pl.when(tile == next_ref[count])
    def _first() -> None:
        slot_ref[0] = 0
        fetch.start(keys, keys.low, jnp.int32(0))

    # A sink is a logit without a value: one term of the total from the start.
    top_ref[...] = jnp.full_like(top_ref, LOWEST) if sinks_ref is None else jnp.maximum(sinks_ref[...], LOWEST)
    total_ref[...] = jnp.full_like(total_ref, 0.0 if sinks_ref is None else 1.0)
    values_ref[...] = jnp.zeros_like(values_ref)
    following = next_ref[tile]
    after = span(table_ref, jnp.minimum(following, count - 1), shape)

    def step(block: Array, slot: Array) -> Array:
        last = block + 1 == keys.high

        @pl.when(jnp.logical_not(last))
        def _same_tile() -> None:
            fetch.start(keys, block + 1, 1 - slot)

        @pl.when(last & (following < count))
        def _next_tile() -> None:
            fetch.start(after, after.low, 1 - slot)

        fetch.wait(keys, block, slot)
        _attend_block(q_ref, buffers.at[slot], top_ref, total_ref, values_ref, keys, block, shape)
        return 1 - slot

    @pl.when(keys.low < keys.high)
    def _work() -> None:
        slot_ref[0] = lax.fori_loop(keys.low, keys.high, step, slot_ref[0])

    total = total_ref[:, :, :1]
    o_ref[0] = (values_ref[...] / jnp.where(total == 0.0, 1.0, total)).astype(o_ref.dtype)


def run_tiles(
    q: Array,  # [tiles, K, M, D]
    pages: Array,  # [P, 2, K, S, D]
    table: Array,  # int32 [5, tiles]
    page_table: Array,  # int32 [N, W]
    sinks: Array | None,  # float32 [K, M]
    *,
    shape: TileShape,
    interpret: bool | pltpu.InterpretParams = False,
) -> Array:
    """Compute the attention of every tile, [tiles, K, M, D]."""
    count, kv_heads, rows, head_dim = q.shape
    spans = span(table, jnp.arange(count), shape)
    ahead = jnp.where(spans.low < spans.high, jnp.arange(count), count)
    ahead = lax.cummin(ahead, reverse=True)
    following = jnp.concatenate([ahead[1:], jnp.array([count]), ahead[:1]]).astype(jnp.int32)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32)[..., None], (*sinks.shape, LANES))

    tile = pl.BlockSpec((1, kv_heads, rows, head_dim), lambda index, *_: (index, 0, 0, 0))
    whole = pl.BlockSpec((kv_heads, rows, LANES), lambda index, *_: (0, 0, 0))
    page = (kv_heads, shape.page_size, head_dim)
    return pl.pallas_call(
        functools.partial(_kernel, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(count,),
            in_specs=[tile, None if sinks is None else whole, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=tile,
            scratch_shapes=[
                pltpu.VMEM((2, shape.block_pages, 2, *page), pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.dtype(jnp.int32)),
                pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, rows, head_dim), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        # Tiles run in order on one core: each starts the fetch that the next one waits for.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_attention",
    )(table, following, page_table, q, sinks, pages)
