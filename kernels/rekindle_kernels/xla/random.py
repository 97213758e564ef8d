"""The random numbers of a draw: jax.random's `fold_in(fold_in(key(seed), position), round)`, written out.

Through jax.random the two hashes are 15 kernels to compile and run on CPU; written out they are one.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Hash by Threefry-2x32 with 20 rounds (Salmon et al., 2011), elementwise over uint32 arrays."""
    first, second = key
    schedule = (first, second, first ^ second ^ jnp.uint32(0x1BD11BDA))
    x, y = counter[0] + first, counter[1] + second
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x = x + y
            y = x ^ ((y << rotation) | (y >> (32 - rotation)))
        x = x + schedule[(block + 1) % 3]
        y = y + schedule[(block + 2) % 3] + jnp.uint32(block + 1)
    return x, y


def uniforms(seed: Array, position: Array, round_: Array) -> tuple[Array, Array]:
    """Return two float32 [N] in [0, 1) for seeds [N, 2] (high and low word), positions [N] and a round of rejection."""
    zero = jnp.zeros_like(seed[:, 0])
    key = threefry((seed[:, 0], seed[:, 1]), (zero, position.astype(jnp.uint32)))
    words = threefry(key, (zero, zero + round_.astype(jnp.uint32)))
    first, second = ((word >> 8).astype(jnp.float32) * jnp.float32(2.0**-24) for word in words)
    return first, second
