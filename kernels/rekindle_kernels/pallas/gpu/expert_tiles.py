"""The tile table of products with experts: the rows and the expert that each program multiplies.

Axes: M rows, sorted by expert, G experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

OWNER, FIRST, END = range(3)  # rows of the tile table: expert, its tile's first row, the row after its last one


def tile_table(sizes: jax.Array, rows: int, tile: int) -> jax.Array:
    """Return the tiles of all experts, int32 [3, tiles]; unused tiles have no rows."""
    experts = sizes.shape[0]
    tiles = (sizes + tile - 1) // tile
    ends, row_ends = jnp.cumsum(tiles), jnp.cumsum(sizes)
    number = jnp.arange(rows // tile + min(experts, rows), dtype=jnp.int32)  # an expert wastes less than one
    owner = jnp.minimum(jnp.sum(number[:, None] >= ends[None, :], axis=1), experts - 1)
    first = (row_ends - sizes)[owner] + (number - (ends - tiles)[owner]) * tile
    return jnp.stack([owner, first, row_ends[owner]]).astype(jnp.int32)
