"""The next token of each row of logits, as native calls."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from rekindle_kernels.native.build import builds
from rekindle_kernels.native.calling import NOT_BUILT, call, unavailable
from rekindle_kernels.native.kernel_table import ARGMAX, SAMPLE
from rekindle_kernels.ops.registry import Implementation
from rekindle_kernels.ops.sampling import Choice, SamplingCall, Wanted, block_size, mask_words


def largest_index(logits: Array) -> Array:
    """Return the first index [R] of the largest of each row of logits [R, V]."""
    (indices,) = call(ARGMAX.variant(), {"x": logits})
    return indices


def draw(logits: Array, choice: Choice, block: int, masks: Array | None = None) -> Array:
    """Return tokens [R] drawn from logits [R, V]; rows with temperature 0 get `largest_index`. The first of a draw's
    two uniforms chooses a block of `block` tokens. Where a bit of `masks` int32 [R, mask_words(V)] is 0, the logit
    counts as minus infinity.
    """
    if masks is not None:
        assert block % 32 == 0, f"a block of {block} tokens is not made of whole words of a mask"
        words = mask_words(logits.shape[1])
        if masks.shape[1] != words:
            raise ValueError(f"masks have {masks.shape[1]} words a row, and {logits.shape[1]} logits need {words}")
    (tokens,) = call(SAMPLE.variant(), {"logits": logits, **choice._asdict(), "masks": masks}, {"block": block})
    return tokens


def greedy(logits: Array, masks: Array | None = None) -> Array:
    """Implement `ops.sampling.greedy`; a masked row is chosen by the kernel that draws."""
    if masks is None:
        return largest_index(logits)
    rows = logits.shape[0]
    off, none = jnp.zeros((rows,), jnp.float32), jnp.zeros((rows,), jnp.int32)
    choice = Choice(off, none, off, off, jnp.zeros((rows, 2), jnp.uint32), none)
    return draw(logits, choice, block_size(logits.shape[-1]), masks)


def draw_any(logits: Array, choice: Choice, wanted: Wanted, masks: Array | None = None) -> Array:
    """Implement `ops.sampling.draw`; each row looks at its own options, whatever is `wanted`."""
    return draw(logits, choice, block_size(logits.shape[-1]), masks)


def supports(call: SamplingCall) -> str | None:
    """Why a choice can't be native: it takes float32 logits."""
    name, reason = call.logits.dtype.name, unavailable(call)
    if reason is None and not (name == "float32" and all(builds(spec.variant().name) for spec in (ARGMAX, SAMPLE))):
        reason = f"logits are {name}, not float32, or {NOT_BUILT}"
    return reason


GREEDY = Implementation("native", greedy, supports, one_call=True)
DRAW = Implementation("native", draw_any, supports, one_call=True)
