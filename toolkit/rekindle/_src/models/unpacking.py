"""Quantised matrices as floats, where this machine's products would unpack them every time.

Without native kernels XLA:CPU multiplies groups of four, six and eight bits at a tenth of bfloat16's speed. So they are
unpacked once, piece by piece, to the numbers that they stand for, rounded to the dtype of the weights: a checkpoint's
when they are read (`Rounding`), a model's in memory here. Where there is no room for the floats, matrices stay packed.
`Precision.unpacked` keeps their former kinds.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from rekindle._src.core import memory
from rekindle._src.models.base import Graph, LoadedModel, graph_of, kinds_in
from rekindle._src.models.loading.hugepages import aligned
from rekindle._src.models.nn.packing import is_packed
from rekindle_kernels import int4, traits

PIECE = 4 << 20  # bytes of float32 that are unpacked at a time
_PARTS = "weight", "scale", "minimum"


def unpacked_graph(graph: Graph) -> tuple[Graph, tuple[jax.ShapeDtypeStruct, ...]] | None:
    """Return the graph with floats for matrices that this machine would unpack in each product, and its leaves' shapes.

    None if there are no such matrices.
    """
    matrices = unpacked_in_products(graph)
    if not matrices:
        return None
    precision = graph.precision
    kinds = tuple(pair for pair in precision.kinds if pair not in matrices)
    return graph_of(
        graph.config, dataclasses.replace(precision, kinds=kinds, unpacked=(*precision.unpacked, *matrices))
    )


def unpacked_in_products(graph: Graph) -> tuple[tuple[str, str], ...]:
    """Return the paths and kinds of the matrices that this machine would unpack in each product."""
    unpacks = traits(graph.precision.implementation).unpacks if graph.precision.quantizes else frozenset[str]()
    if not unpacks:
        return ()
    return tuple((path, kind) for path, kind in kinds_in(graph) if _stored_as(kind) in unpacks)


def _stored_as(kind: str) -> str:
    """Return the name of a kind in `LinearOptions.quantize`."""
    return kind if kind in ("int8", "int8-weight") else "int4"


def unpacked_model(model: LoadedModel) -> LoadedModel:
    """Return the model with floats for matrices that this machine would unpack in each product, if there is room.

    All other leaves are the model's own.
    """
    plan = None if model.placement.divided else unpacked_graph(model.graph)
    if plan is None:
        return model
    graph, shapes = plan
    stored, former = dict(zip(model.graph.paths, model.leaves, strict=True)), dict(model.graph.precision.unpacked)
    unpacked = {path for path, _ in graph.precision.unpacked if path not in former}
    new_shapes = {path: shape for path, shape in zip(graph.paths, shapes, strict=True) if _owner(path) in unpacked}
    if not memory.fits(sum(shape.size * shape.dtype.itemsize for shape in new_shapes.values())):
        return model
    leaves = tuple(
        _unpacked(stored, path, new_shapes[path], graph.precision.value_dtype(new_shapes[path].dtype))
        if path in new_shapes and path.endswith(".weight")
        else stored[path]
        for path in graph.paths
    )
    return dataclasses.replace(model, graph=graph, leaves=leaves, fingerprint=f"{model.fingerprint}-unpacked")


def _owner(path: str) -> str:
    return path.rpartition(".")[0]


def _unpacked(stored: dict[str, jax.Array], path: str, shape: jax.ShapeDtypeStruct, dtype: np.dtype[Any]) -> jax.Array:
    """Return a matrix or a stack of them as floats, unpacked in pieces."""
    packed, leaves = is_packed(stored[path]), (stored.get(f"{_owner(path)}.{name}") for name in _PARTS)
    block_rows = int4.OUTPUTS if packed else 1  # rows that lie together
    blocks = math.prod(shape.shape[:-1]) // block_rows
    weight, scale, minimum = (None if leaf is None else np.asarray(leaf).reshape(blocks, -1) for leaf in leaves)
    assert weight is not None, "a matrix has a weight"
    assert scale is not None, "integers have scales"
    values: NDArray[Any] = aligned(shape.shape, dtype)
    rows = values.reshape(-1, shape.shape[-1])
    step = max(1, PIECE // (4 * block_rows * rows.shape[1]))
    for start in range(0, blocks, step):
        part = slice(start, start + step)
        arrays = weight[part], scale[part], None if minimum is None else minimum[part]
        rows[block_rows * start : block_rows * (start + step)] = (
            dequantized(*arrays, dtype) if packed else arrays[0] * arrays[1]
        )
    return jax.device_put(values.view(shape.dtype), may_alias=True)


@jax.jit(static_argnums=3)
def dequantized(weight: Any, scale: Any, minimum: Any, dtype: Any) -> jax.Array:
    return int4.dequantized(weight, scale, minimum, dtype)


def words(graph: Graph) -> str:
    """Explain why matrices are not held, or not multiplied, as they were quantised; empty if they are."""
    held = graph.precision.unpacked
    if held:
        return f"unpacked from {_bits(held)}: no native kernels here"
    packed = unpacked_in_products(graph)
    if packed:
        return f"{_bits(packed)} are unpacked in every product: no native kernels here, and no room for floats"
    return ""


def _bits(found: tuple[tuple[str, str], ...]) -> str:
    """Return the bits of kinds in words: "4 and 8 bits"."""
    bits = sorted({int(next(filter(str.isdigit, kind))) for _, kind in found})
    return f"{' and '.join(map(str, bits)) if len(bits) < 3 else '4, 6 and 8'} bits"
