"""The tile table: the rows and the sequence that each program of a prefill kernel works on.

Prefill queries are packed without gaps, so a fixed grid of query tiles would straddle sequences. Here every tile
belongs to one sequence. Padding tokens form one more sequence without keys: kernels write its zeros like any other row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rekindle_kernels.ops.attention import AttentionInputs

# Rows of the table, int32 [5, tiles].
SEQUENCE = 0  # row of the page table (padding tiles name an existing row and never read it)
QUERY = 1  # first token of the sequence, counted in the whole of q
QUERIES = 2  # number of tokens of the sequence in q
CONTEXT = 3  # keys of the sequence, this step's included
FIRST = 4  # first row of the tile within the sequence; a row is one (token, head of the group) pair


def tile_count(tokens: int, sequences: int, rows_per_token: int, block: int) -> int:
    """Return enough tiles for any spread of `tokens` over `sequences`: each sequence wastes less than one tile."""
    return min(tokens * rows_per_token, tokens * rows_per_token // block + sequences + 1)


def tile_table(inputs: AttentionInputs, *, decode_rows: int, rows_per_token: int, block: int) -> jax.Array:
    """Fill the table for tiles of `block` rows."""
    cu_q_lens, tokens = inputs.cu_q_lens, inputs.q.shape[0] - decode_rows
    sequences = cu_q_lens.shape[0] - 1
    real = jnp.arange(sequences) < inputs.num_prefills
    queries = jnp.where(real, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    used = jnp.sum(queries)
    queries = jnp.append(queries, tokens - used)
    starts = jnp.append(cu_q_lens[:-1], used)
    contexts = jnp.append(jnp.where(real, inputs.kv_lens[decode_rows:], 0), 0)

    tiles = (queries * rows_per_token + block - 1) // block
    ends = jnp.cumsum(tiles)
    tile = jnp.arange(tile_count(tokens, sequences, rows_per_token, block))
    owner = jnp.minimum(jnp.sum(tile[:, None] >= ends[None, :], axis=1), sequences)
    first = (tile - (ends - tiles)[owner]) * block
    row = decode_rows + jnp.minimum(owner, sequences - 1)
    table = [row, decode_rows + starts[owner], queries[owner], contexts[owner], first]
    return jnp.stack(table).astype(jnp.int32)
