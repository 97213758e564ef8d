"""CPU kernels compiled by numba and called by XLA, for what XLA:CPU has no fast form."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rekindle_kernels.native.build import builds, called_by, ensure, give_up, unavailable_reason
    from rekindle_kernels.native.chain import chained, chains
    from rekindle_kernels.native.implementations import differentiable
    from rekindle_kernels.native.products import (
        GATED_UNIT,
        gated_rows,
        gates,
        gates_rows,
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

_HOMES = {  # modules and the names that they give; loaded at first use: kernels are compiled where there is no JAX
    "build": (
        "builds",
        "called_by",
        "ensure",
        "give_up",
        "unavailable_reason",
    ),
    "chain": (
        "chained",
        "chains",
    ),
    "implementations": ("differentiable",),
    "products": (
        "GATED_UNIT",
        "gated_rows",
        "gates",
        "gates_rows",
        "kernels_for",
        "multiplies",
        "multiplies_int4",
        "multiply",
        "multiply_int4",
        "norms",
        "rms_norm",
    ),
    "rope_kv": (
        "split",
        "splits",
    ),
    "sampling": (
        "chooses",
        "draw",
        "gated_masks",
        "has_gates",
        "largest_index",
    ),
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _HOMES.items() for name in names}

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
    "gated_rows",
    "gates",
    "gates_rows",
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


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(importlib.import_module(_MODULES[name]), name))
