"""Products of adapters, and the gate behind a product, as calls of JAX."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from rekindle_kernels.native.build import builds
from rekindle_kernels.native.calling import call
from rekindle_kernels.native.kernel_table import ADAPTER, SILU_GATE

LANES, TOGETHER = 16, 4
STORED = ("float32", "bfloat16", "float16")


def adds(y: jax.Array, x: jax.Array, down: jax.Array, up: jax.Array, units: int, outputs: Sequence[int]) -> bool:
    """True if `add_adapters` takes these: whole vectors of float32, and units of whole groups of rows."""
    whole = x.shape[-1] % LANES == 0 and all(count % LANES == 0 for count in outputs)
    known = y.dtype.name == x.dtype.name == "float32" and down.dtype == up.dtype and up.dtype.name in STORED
    divided = up.shape[0] % (units * TOGETHER) == 0
    return whole and known and divided and builds(ADAPTER.variant(up.dtype.name).name)


def add_adapters(
    y: jax.Array,
    x: jax.Array,
    down: jax.Array,
    up: jax.Array,
    owners: jax.Array,
    order: jax.Array,
    slots: jax.Array,
    *,
    place: int,
    outputs: Sequence[int],
) -> jax.Array:
    """Return y [T, N] plus x [T, K] times the rows of `down` [L · B, K] of each token's adapter, times those of `up`
    [B, N]. `order` [T] and `slots` [T] are the tokens by their adapters, and these in that order; `outputs` are those
    of each of L modules. A row's results do not depend on the others, to the last bit."""
    T, spans = y.shape[0], np.cumsum(outputs).astype(np.int32)
    assert order.shape == slots.shape == (T,), f"{T} tokens, and an order {order.shape} of slots {slots.shape}"
    assert down.shape[0] == len(spans) * up.shape[0], f"{len(spans)} modules of {up.shape[0]} rows in {down.shape}"
    assert spans[-1] == y.shape[1], f"{spans[-1]} outputs in rows of {y.shape[1]}"
    assert 0 <= place < owners.shape[0], f"place {place} of {owners.shape[0]}"
    operands = {
        "y": y, "x": x, "down": down, "up": up, "owners": owners, "order": order, "slots": slots, "spans": spans
    }  # fmt: skip
    (added,) = call(ADAPTER.variant(up.dtype.name), operands, {"place": place})
    return added


def gates_rows(x: jax.Array) -> bool:
    """True if `gate_rows` takes these."""
    return x.ndim == 2 and x.dtype.name == "float32" and x.shape[1] % 2 == 0 and builds(SILU_GATE.variant().name)


def gate_rows(x: jax.Array) -> jax.Array:
    """Return silu of the first half of each row times the other, [T, N] → [T, N / 2]."""
    (gated,) = call(SILU_GATE.variant(), {"x": x}, sizes={"M": x.shape[1] // 2})
    return gated
