"""Several decode steps in one dispatch: the program of a step, repeated on the device.

Starting a program takes about as long as a step of a small model. Where nobody waits, such a model takes up to
`MOST_STEPS` steps in one call: each row's token is the next one's input, which the slot has on the device already, and
its place is one position further on. Everything else that the host says of a row has to stay as it is for all of them:
see `RowOption.repeats`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.models.base import ShapeLike
from rekindle._src.programs.packing import Layout, sections
from rekindle._src.programs.row_option import RowFlag
from rekindle._src.programs.step import StepOutput
from rekindle_kernels import current_platform

MOST_STEPS = 8
# Bytes of weights, all of which a step reads. From there on a step takes so long that starting it does not show, and
# that another request would have to wait for too long.
_LARGEST = 64 << 20


def repeats(leaves: Iterable[ShapeLike]) -> bool:
    """True if steps with these weights are so short that it pays to repeat them; not measured on accelerators."""
    return (
        current_platform() == "cpu"
        and sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves) <= _LARGEST
    )


def repeated(step: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """Repeat a step on the device, as often as its upload says. The result has the rows of each step in turn."""

    def steps(leaves: Any, kv: Any, state: Any, ints: Array, floats: Array, operands: Any) -> Any:
        shape = jax.eval_shape(step, leaves, kv, state, ints, floats, operands)[2]
        assert not any(extra is not None for extra in shape.extra), "outputs of features are of one step"
        rows = jnp.zeros((MOST_STEPS, *shape.rows.shape), shape.rows.dtype)

        def one(index: Array, carried: Any) -> Any:
            kv, state, rows = carried
            kv, state, output = step(leaves, kv, state, moved(layout, ints, index), floats, operands)
            return kv, state, lax.dynamic_update_index_in_dim(rows, output.rows, index, 0)

        count = sections(layout, ints).steps[0]
        kv, state, rows = lax.fori_loop(0, count, one, (kv, state, rows))
        return kv, state, StepOutput(rows.reshape(-1, rows.shape[-1]), shape.extra)

    return steps


def moved(layout: Layout, ints: Array, index: Array) -> Array:
    """Return the integer buffer of a step with its rows `index` positions further on."""
    slots, lengths, tokens, flags = jnp.unstack(sections(layout, ints).varying, axis=1)
    is_later = index > 0
    lengths = jnp.where(lengths > 0, lengths + index, 0)
    tokens = jnp.where(is_later, -1, tokens)  # the token that the slot sampled last
    flags = jnp.where(is_later, flags & ~int(RowFlag.KEPT), flags)
    varying = jnp.stack([slots, lengths, tokens, flags], axis=1)
    return lax.dynamic_update_slice(ints, varying.reshape(-1), (1,))  # after the union of all flags
