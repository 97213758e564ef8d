"""Writing pages by one scatter or putting them into their places one by one, and zeros as XLA makes them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from rekindle_kernels import pages
from rekindle_kernels.ops.registry import Implementation, anything


def zeros(leaves: Sequence[jax.ShapeDtypeStruct]) -> list[Array]:
    """Return arrays of zeros, written one by one."""
    return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]


def fill(leaves: Sequence[Array], ids: Array, pages: Sequence[Sequence[Array]], layers: int) -> list[Array]:
    """Return each layer's arrays with each page put into its place."""
    arrays = len(leaves) // layers
    filled = []
    for index, leaf in enumerate(leaves):
        layer, array = divmod(index, arrays)
        for number, page in enumerate(pages):
            leaf = lax.dynamic_update_slice_in_dim(leaf, page[array][:, layer], ids[number], 0)
        filled.append(leaf)
    return filled


def fill_joined(leaves: Sequence[Array], ids: Array, pages: Sequence[Sequence[Array]], layers: int) -> list[Array]:
    """Return each layer's arrays with all pages put into their places by one operation per array, however many."""
    joined = [jnp.concatenate(parts) for parts in zip(*pages, strict=True)]
    placed = []
    for index, leaf in enumerate(leaves):
        layer, array = divmod(index, len(joined))
        placed.append(leaf.at[ids].set(joined[array][:, layer], mode="promise_in_bounds"))
    return placed


WRITE_KV = Implementation("xla", pages.write_kv, anything)
WRITE_ROWS = Implementation("rows", pages.write_kv_rows, anything)
ZEROS = Implementation("xla", zeros, anything)
FILL_PAGES = Implementation("xla", fill, anything)
FILL_JOINED = Implementation("joined", fill_joined, anything)
