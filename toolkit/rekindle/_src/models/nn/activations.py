"""The activation functions of MLPs, by the names of `ModelConfig.activation`."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def activate(x: jax.Array, name: str) -> jax.Array:
    """The activation of that name, applied to each element."""
    if name == "silu":
        return jax.nn.silu(x)
    if name == "relu":
        return jax.nn.relu(x)
    return jax.nn.gelu(x, approximate=name == "gelu_tanh")


def gated(gate_up: jax.Array, activation: str) -> jax.Array:
    """Splits [..., 2·I] into gate and up; returns act(gate) · up [..., I]."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return activate(gate, activation) * up
