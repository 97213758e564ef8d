"""TPU attention over pages read in place, in one kernel; queries are laid out in tiles of one sequence each."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from rekindle_kernels import tuning
from rekindle_kernels.ops.attention import AttentionCall, AttentionInputs, AttentionOptions
from rekindle_kernels.ops.registry import Implementation
from rekindle_kernels.pages import as_values
from rekindle_kernels.pallas import tiles
from rekindle_kernels.pallas.tpu.kernel import TileShape, run_tiles

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
        return "queries see the keys behind them"
    if call.value_size is not None:
        return "values are a part of the keys"
    if call.head_dim > 256:
        return f"head_dim {call.head_dim} is more than 256"
    if not sequences_at_once(call.table_width):
        return f"a page table of {call.table_width} pages per sequence overflows scalar memory; use larger pages"
    return None


def _decode_tiles(contexts: jax.Array) -> jax.Array:
    """Return a tile table with one tile per decode row."""
    row = jnp.arange(contexts.shape[0])
    zero = jnp.zeros_like(row)
    return jnp.stack([row, row, (contexts > 0).astype(row.dtype), contexts, zero]).astype(jnp.int32)


def _of_rows(table: jax.Array, first: int, count: int) -> tuple[jax.Array, jax.Array]:
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
) -> jax.Array:
    """Compute `ops.attention.paged_attention`. Block sizes default to those of `tuning`."""
    q, kv, sinks, decode_rows = inputs.q, inputs.kv, inputs.sinks, options.decode_rows
    tokens, heads, head_dim = q.shape
    group = heads // kv.kv_heads
    pages = as_values(kv.pages, kv)
    config = config or tuning.tpu(kv.dtype, head_dim, kv.page_size, heads, kv.kv_heads)
    block_pages = max(1, min(config.keys // kv.page_size, inputs.page_table.shape[1]))

    def run(tiled: jax.Array, table: jax.Array, span: int, page_table: jax.Array) -> jax.Array:
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
