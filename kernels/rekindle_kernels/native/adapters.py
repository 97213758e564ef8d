"""Products of adapters as calls of JAX."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rekindle_kernels.native.build import builds
from rekindle_kernels.native.calling import call
from rekindle_kernels.native.kernel_table import ADAPTER, ADAPTER_GATE

LANES, TOGETHER = 16, 4
STORED = ("float32", "bfloat16", "float16")


def adds(
    y: jax.Array,
    x: jax.Array,
    down: jax.Array,
    up: jax.Array,
    units: int,
    outputs: Sequence[int],
    gate: str | None,
    norm: bool = False,
) -> bool:
    """True if `add_adapters` takes these: whole vectors of float32, of which a norm takes two at a time, units of whole
    groups of rows, and silu as a gate of one module or of two, which are gates and ups."""
    whole = x.shape[-1] % (2 * LANES if norm else LANES) == 0 and all(count % LANES == 0 for count in outputs)
    known = y.dtype.name == x.dtype.name == "float32" and down.dtype == up.dtype and up.dtype.name in STORED
    divided = up.shape[0] % (units * TOGETHER) == 0
    halves = gate is None or (gate == "silu" and y.shape[-1] % (2 * LANES) == 0 and _two_halves(outputs))
    spec = ADAPTER if gate is None else ADAPTER_GATE
    return whole and known and divided and halves and builds(spec.variant(up.dtype.name).name)


def _two_halves(outputs: Sequence[int]) -> bool:
    return len(outputs) == 1 or (len(outputs) == 2 and outputs[0] == outputs[1])


def add_adapters(
    y: jax.Array,
    x: jax.Array,
    down: jax.Array,
    up: jax.Array,
    owners: jax.Array,
    order: jax.Array,
    slots: jax.Array,
    norm: jax.Array | None = None,
    *,
    place: int,
    outputs: Sequence[int],
    gated: bool,
    eps: float = 0.0,
) -> jax.Array:
    """Return y [T, N] plus x [T, K] times the rows of `down` [L · B, K] of each token's adapter, times those of `up`
    [B, N]. `order` [T] and `slots` [T] are the tokens by their adapters, and these in that order; `outputs` are those
    of each of L modules. Where it is gated, return silu of the first half of that times the other. With `norm`, x is
    `rms_norm(x, norm, eps)` first. A row's results do not depend on the others, to the last bit."""
    T, spans = y.shape[0], np.cumsum(outputs).astype(np.int32)
    assert order.shape == slots.shape == (T,), f"{T} tokens, and an order {order.shape} of slots {slots.shape}"
    assert down.shape[0] == len(spans) * up.shape[0], f"{len(spans)} modules of {up.shape[0]} rows in {down.shape}"
    assert spans[-1] == y.shape[1], f"{spans[-1]} outputs in rows of {y.shape[1]}"
    assert 0 <= place < owners.shape[0], f"place {place} of {owners.shape[0]}"
    operands = {
        "y": y, "x": x, "down": down, "up": up, "owners": owners, "order": order, "slots": slots, "spans": spans,
        "norm": None if norm is None else norm.astype(jnp.float32),
    }  # fmt: skip
    spec, sizes = (ADAPTER_GATE, {"M": y.shape[1] // 2}) if gated else (ADAPTER, None)
    (added,) = call(spec.variant(up.dtype.name), operands, {"place": place, "eps": eps}, sizes)
    return added
