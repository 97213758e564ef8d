"""CPU kernels compiled by numba and called by XLA, for what XLA:CPU has no fast form. Without numba there are none."""

from rekindle_kernels.native.build import builds, called_by, ensure, give_up, unavailable_reason
from rekindle_kernels.native.chain import chained, chains
from rekindle_kernels.native.gradients import differentiable
from rekindle_kernels.native.products import (
    GATED_UNIT,
    gates,
    kernels_for,
    multiplies,
    multiplies_int4,
    multiply,
    multiply_int4,
    norms,
    rms_norm,
)
from rekindle_kernels.native.rope_kv import split, splits
from rekindle_kernels.native.sampling import chooses, draw, gated_masks, has_gates, largest_index

__all__ = [
    "GATED_UNIT",
    "builds",
    "called_by",
    "chained",
    "chains",
    "chooses",
    "differentiable",
    "draw",
    "ensure",
    "gated_masks",
    "gates",
    "give_up",
    "has_gates",
    "kernels_for",
    "largest_index",
    "multiplies",
    "multiplies_int4",
    "multiply",
    "multiply_int4",
    "norms",
    "rms_norm",
    "split",
    "splits",
    "unavailable_reason",
]
