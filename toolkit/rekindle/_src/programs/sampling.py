"""Sampling on the device: the next token of each row, by the flags that the host sends with a step."""

from __future__ import annotations

from jax import Array

import rekindle_kernels
from rekindle._src.programs.flags import Flag
from rekindle_kernels import Choice, Wanted


def choose(
    logits: Array, choice: Choice, features: Array, masks: Array | None = None, *, implementation: str | None = None
) -> Array:
    """Return tokens [N] for logits [N, V], among those that `masks` allow; rows with temperature 0 are greedy.

    `features` is the union of the rows' flags.
    """
    options = Wanted(
        draws=features & Flag.DRAWS != 0,
        top_k=features & Flag.TOP_K != 0,
        large_k=features & Flag.LARGE_K != 0,
        top_p=features & Flag.TOP_P != 0,
    )
    return rekindle_kernels.draw(logits, choice, options, masks, implementation=implementation)
