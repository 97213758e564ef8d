"""Products of adapters (LoRA), added to those of a step whose tokens each have their own or none: `add_adapters(…)`.

Axes: T tokens, I inputs, O outputs, M modules whose outputs lie one behind the other, B rows of rank, U units that
share these rows alike, C places: rows of `owners`, of which a call reads one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rekindle_kernels.ops.linear import gated, rms_norm
from rekindle_kernels.ops.registry import Registry, current_platform

ADAPTERS = Registry("adapters")  # run(y, x, down, up, owners, tokens, norm, options) -> [T, O], gated [T, O / 2]


class AdaptedTokens(NamedTuple):
    """The adapters of a step's tokens; `of` makes it, once for all products."""

    slots: jax.Array  # int32 [T], 0 for none
    order: jax.Array  # int32 [T]: the tokens, those of one adapter together
    sorted_slots: jax.Array  # int32 [T]: `slots` in this order

    @classmethod
    def of(cls, slots: jax.Array) -> AdaptedTokens:
        """Return the tokens with these adapters."""
        order = jnp.argsort(slots, stable=True).astype(jnp.int32)
        return cls(slots, order, slots[order])


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """The static options of a call."""

    place: int
    outputs: tuple[int, ...]
    gate: str | None
    eps: float  # of the norm


@dataclass(frozen=True, slots=True)
class AdapterCall:
    """The static facts that select an implementation."""

    platform: str
    y: jax.ShapeDtypeStruct
    x: jax.ShapeDtypeStruct
    down: jax.ShapeDtypeStruct
    up: jax.ShapeDtypeStruct
    units: int
    outputs: tuple[int, ...]
    gate: str | None = None
    norm: bool = False


def add_adapters(
    y: jax.Array,
    x: jax.Array,
    down: jax.Array,
    up: jax.Array,
    owners: jax.Array,
    tokens: AdaptedTokens,
    *,
    place: int,
    outputs: tuple[int, ...],
    gate: str | None = None,
    norm: jax.Array | None = None,
    eps: float = 0.0,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Return y [T, O] plus x [T, I] · downᵀ · up, with the rows of rank of each token's adapter.

    `down` [M · B, I] has the B rows of the first module, then those of the next; `up` [B, O] has their weights of the
    `outputs` of all modules. Unit u of the rows belongs to the adapter `owners[place, u]` (int32 [C, U], 0 for none).
    Rows of tokens without an adapter are those of y, to the last bit. With `norm` [I], x is `rms_norm(x, norm, eps)`.
    With the name of an activation as `gate`, the result is `gated(…, gate)`, of all tokens.
    """
    call = AdapterCall(
        platform or current_platform(), _shape(y), _shape(x), _shape(down), _shape(up), owners.shape[1], outputs
    )
    chosen = ADAPTERS.choose(call, implementation)
    if norm is not None and chosen.supports(replace(call, norm=True)) is not None:
        x, norm = rms_norm(x, norm, eps, implementation=implementation, platform=platform), None
    separate_gate = gate
    if separate_gate is not None and chosen.supports(replace(call, gate=separate_gate)) is None:
        separate_gate = None
    options = AdapterOptions(place, outputs, gate if separate_gate is None else None, eps)
    added: jax.Array = chosen.run(y, x, down, up, owners, tokens, norm, options)
    if separate_gate is None:
        return added
    return gated(added, separate_gate, implementation=implementation, platform=platform)


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
