"""The next token of each row of logits, as calls of JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rekindle_kernels.native.build import builds
from rekindle_kernels.native.calling import call
from rekindle_kernels.native.kernel_table import ARGMAX, GATE, SAMPLE


def chooses(logits: jax.Array) -> bool:
    """True if `largest_index` and `draw` take these logits."""
    return logits.dtype == jnp.float32 and builds(ARGMAX.variant().name) and builds(SAMPLE.variant().name)


def has_gates() -> bool:
    """True if `gated_masks` can be called."""
    return builds(GATE.variant().name)


def gated_masks(gate: jax.Array, logits: jax.Array) -> jax.Array:
    """Return the masks int32 [R, W] of a `MaskGate` at the address int32 [2], when logits [R, V] are there and it is
    open."""
    (masks,) = call(GATE.variant(), {"gate": gate, "logits": logits}, sizes={"W": -(-logits.shape[1] // 32)})
    return masks


def largest_index(logits: jax.Array) -> jax.Array:
    """Return the first index [R] of the largest of each row of logits [R, V]."""
    (indices,) = call(ARGMAX.variant(), {"x": logits})
    return indices


def draw(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    block: int,
    masks: jax.Array | None = None,
) -> jax.Array:
    """Return tokens [R] drawn from logits [R, V], those of rows with temperature 0 by `largest_index`; seed is
    uint32 [R, 2], `block` how many tokens the first of a draw's two uniforms does not tell apart. `masks` int32 [R,
    ceil(V / 32)] have a bit for each token, the lowest first: where it is 0, the logit counts as minus infinity."""
    if masks is not None:
        assert block % 32 == 0, f"a block of {block} tokens is not made of whole words of a mask"
        words = -(-logits.shape[1] // 32)
        if masks.shape[1] != words:
            raise ValueError(f"masks have {masks.shape[1]} words a row, and {logits.shape[1]} logits need {words}")
    (tokens,) = call(
        SAMPLE.variant(),
        {
            "logits": logits,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "position": position,
            "masks": masks,
        },
        {"block": block},
    )
    return tokens
