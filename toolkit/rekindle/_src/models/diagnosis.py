"""Finds non-finite numbers in a model: the weights that hold NaN or infinity, and the first layer that makes one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rekindle._src.models.base import LoadedModel, merge
from rekindle._src.models.nn.packing import is_packed, matrix_shape
from rekindle._src.models.plain import PlainAttention
from rekindle_kernels import int4


class BrokenWeight(NamedTuple):
    """A parameter with numbers that are not finite."""

    path: str  # as in `Graph.paths`
    nans: int
    infinities: int

    def __str__(self) -> str:
        return f"{self.path} holds {self.nans:,} NaN and {self.infinities:,} infinities"


def broken_weights(model: LoadedModel) -> Iterator[BrokenWeight]:
    """Yield every parameter that holds NaN or infinity, in the order of the layers. Reads all weights once."""
    leaves = dict(zip(model.graph.paths, model.leaves, strict=True))
    for path, leaf in leaves.items():
        matrix = leaves.get(path.removesuffix("scale").removesuffix("minimum") + "weight")
        if matrix is not None and is_packed(matrix):  # its scales may be integers with steps
            values = int4.numbers(leaf, matrix_shape(matrix)[-1])
        else:
            values = _values(model, leaf)
        if not jnp.issubdtype(values.dtype, jnp.floating):
            continue
        nans, infinities = int(jnp.isnan(values).sum()), int(jnp.isinf(values).sum())
        if nans or infinities:
            yield BrokenWeight(path, nans, infinities)


def first_broken_stage(model: LoadedModel, token_ids: Sequence[int]) -> str | None:
    """Return the first part of the model with an output for a prompt that is not finite, such as "layers.7", or None.

    Computes without programs or pages: in one piece, with every token attending to those before it.
    """
    tokens = jnp.asarray(token_ids, jnp.int32)
    module = merge(model.graph, model.leaves)
    first: list[str] = []

    def check(stage: str, values: jax.Array) -> jax.Array:
        if not first and not bool(jnp.isfinite(values.astype(jnp.float32)).all()):
            first.append(stage)
        return values

    def listener(site: str, layer: int) -> Callable[[jax.Array], jax.Array] | None:
        stage = {"residual_before": "embed", "residual": f"layers.{layer}"}.get(site)
        return None if stage is None else functools.partial(check, stage)

    attend = PlainAttention(module, len(tokens))
    hidden = check("norm", module(tokens, jnp.arange(len(tokens)), attend, listeners=[listener]))
    check("head", module.logits(hidden))
    return first[0] if first else None


def _values(model: LoadedModel, leaf: jax.Array) -> jax.Array:
    """Return the values of a leaf: some leaves hold the bits of 16-bit floats."""
    dtype = model.graph.precision.value_dtype(leaf.dtype)
    return leaf if dtype == leaf.dtype else jax.lax.bitcast_convert_type(leaf, dtype)
