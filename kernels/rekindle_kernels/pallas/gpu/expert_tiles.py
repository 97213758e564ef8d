"""The tile table of products with experts: which rows of which expert each program multiplies.

Axes: M rows, sorted by expert, G experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

OWNER, FIRST, END = range(3)  # rows of the tile table: expert, its tile's first row, the row behind its last one


def tile_table(sizes: jax.Array, rows: int, tile: int) -> jax.Array:
    """The tiles of all experts, int32 [3, tiles]; those that are left over have no rows."""
    experts = sizes.shape[0]
    tiles = (sizes + tile - 1) // tile
    ends, behind = jnp.cumsum(tiles), jnp.cumsum(sizes)
    number = jnp.arange(rows // tile + min(experts, rows), dtype=jnp.int32)  # an expert wastes less than one
    owner = jnp.minimum(jnp.sum(number[:, None] >= ends[None, :], axis=1), experts - 1)
    first = (behind - sizes)[owner] + (number - (ends - tiles)[owner]) * tile
    return jnp.stack([owner, first, behind[owner]]).astype(jnp.int32)
