"""Pages by one scatter, and zeros as XLA makes them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from rekindle_kernels import pages
from rekindle_kernels.ops.registry import Implementation, anything


def zeros(leaves: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Arrays of zeros, written one by one."""
    return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]


WRITE_KV = Implementation("xla", pages.write_kv, anything)
WRITE_ROWS = Implementation("rows", pages.write_kv_rows, anything)
ZEROS = Implementation("xla", zeros, anything)
