"""The functions between the matrices of an MLP, by the names that configurations give them."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def activate(x: jax.Array, name: str) -> jax.Array:
    """Apply the activation called `name` ("silu", "relu", "gelu" or "gelu_tanh") to every element."""
    if name == "silu":
        return jax.nn.silu(x)
    if name == "relu":
        return jax.nn.relu(x)
    return jax.nn.gelu(x, approximate=name == "gelu_tanh")


def gated(gate_up: jax.Array, activation: str) -> jax.Array:
    """Return act(gate) · up [..., I] of `gate_up` [..., 2·I], where the gate is the first half."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return activate(gate, activation) * up
