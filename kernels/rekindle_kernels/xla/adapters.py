"""Products of adapters, by XLA.

In a step of few tokens all rows of rank are multiplied with all tokens, and each token keeps what its own adapter
makes. In one of many, tokens are sorted by their adapters, and each unit of rows is multiplied with windows over the
tokens of its own. Units that no token needs cost nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from rekindle_kernels.ops.adapters import AdaptedTokens, AdapterCall, AdapterOptions
from rekindle_kernels.ops.registry import Implementation
from rekindle_kernels.xla.linear import exact_precision, gated

FEW, ROWS = 64, 1024  # tokens, and rows of rank, of which all are multiplied
WINDOW = 64


def add_adapters(
    y: jax.Array,
    x: jax.Array,
    down: jax.Array,
    up: jax.Array,
    owners: jax.Array,
    tokens: AdaptedTokens,
    norm: jax.Array | None,
    options: AdapterOptions,
) -> jax.Array:
    """Implement `ops.adapters.add_adapters`."""
    assert norm is None, "x is normed before"
    mine, outputs, gate = owners[options.place], options.outputs, options.gate
    add = _all_rows if y.shape[0] <= FEW and up.shape[0] <= ROWS else _own_rows
    needed = ((mine[:, None] == tokens.slots) & (mine[:, None] > 0)).any(axis=1)
    stacked = down.reshape(len(outputs), *up.shape[:1], -1)
    result: jax.Array = lax.cond(needed.any(), lambda: add(y, x, stacked, up, mine, needed, tokens, outputs), lambda: y)
    return result if gate is None else gated(result, None, gate)


def _all_rows(
    y: jax.Array,
    x: jax.Array,
    down: jax.Array,
    up: jax.Array,
    owners: jax.Array,
    needed: jax.Array,
    tokens: AdaptedTokens,
    outputs: tuple[int, ...],
) -> jax.Array:
    rows = jnp.repeat(owners, up.shape[0] // owners.shape[0])
    mine = (rows == tokens.slots[:, None]) & (rows > 0)
    return y + _delta(x, down, up, mine, outputs).astype(y.dtype)


def _own_rows(
    y: jax.Array,
    x: jax.Array,
    down: jax.Array,
    up: jax.Array,
    owners: jax.Array,
    needed: jax.Array,
    tokens: AdaptedTokens,
    outputs: tuple[int, ...],
) -> jax.Array:
    unit = up.shape[0] // owners.shape[0]
    begins = jnp.searchsorted(tokens.sorted_slots, owners, side="left")
    ends = jnp.searchsorted(tokens.sorted_slots, owners, side="right")
    windows = jnp.where(needed, -(-(ends - begins) // WINDOW), 0)
    behind = jnp.cumsum(windows)
    # Windows may reach behind the last token: what they read there is masked, and what they add is zero.
    order = jnp.pad(tokens.order, (0, WINDOW))

    def added(index: jax.Array, y: jax.Array) -> jax.Array:
        which = jnp.searchsorted(behind, index, side="right")
        begin = begins[which] + (index - (behind[which] - windows[which])) * WINDOW
        chosen = lax.dynamic_slice_in_dim(order, begin, WINDOW)
        mine = begin + jnp.arange(WINDOW) < ends[which]
        downs = lax.dynamic_slice_in_dim(down, which * unit, unit, axis=1)
        ups = lax.dynamic_slice_in_dim(up, which * unit, unit)
        delta = _delta(x[chosen], downs, ups, jnp.broadcast_to(mine[:, None], (WINDOW, unit)), outputs)
        return y.at[jnp.where(mine, chosen, y.shape[0])].add(delta.astype(y.dtype), mode="drop")

    result: jax.Array = lax.fori_loop(0, behind[-1], added, y)
    return result


def _delta(x: jax.Array, down: jax.Array, up: jax.Array, mine: jax.Array, outputs: tuple[int, ...]) -> jax.Array:
    """Return x [T, I] · down [M, B, I]ᵀ · up [B, O] as float32, of the rows of rank in `mine` [T, B] alone."""
    with jax.named_scope("adapters"):
        narrow = _product(x, down.reshape(-1, down.shape[-1]).T).reshape(x.shape[0], len(outputs), -1)
        narrow = jnp.where(mine[:, None], narrow, 0.0)
        wide, begin = [], 0
        for index, count in enumerate(outputs):
            wide.append(_product(narrow[:, index], up[:, begin : begin + count]))
            begin += count
        return wide[0] if len(wide) == 1 else jnp.concatenate(wide, axis=-1)


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return x [T, I] · weight [I, O] as float32; x is rounded as for the base's own products."""
    x = x.astype(weight.dtype)
    return jnp.matmul(x, weight, precision=exact_precision(x, weight), preferred_element_type=jnp.float32)


def supports(call: AdapterCall) -> str | None:
    """Why products can't take their norm along."""
    return "x has to be normed before" if call.norm else None


ADAPTERS = Implementation("xla", add_adapters, supports)
