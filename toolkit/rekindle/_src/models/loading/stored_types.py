"""The forms that a checkpoint's tensors take in memory, by the type they are stored in: exact, rounded or unpacked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rekindle._src.models.base import Graph
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.four_bits import fills
from rekindle._src.models.loading.manifest import Source
from rekindle._src.models.loading.named_tensors import named_tensors, shown_name
from rekindle._src.models.loading.stored import StoredCheckpoint
from rekindle._src.models.loading.tensor_files import TensorEntry
from rekindle._src.models.nn.packing import Packing, matrix_shape, packings_in


class StoredType(NamedTuple):
    """The tensors of one type that take the same form in memory."""

    name: str  # as the file says it: Q4_K
    form: str  # in words
    exact: bool  # every number is the one that the file stands for
    tensors: int
    stored_bytes: int
    bytes: int  # of memory, on all devices together


def stored_types(
    stored: StoredCheckpoint, config: ModelConfig, graph: Graph, shapes: Sequence[jax.ShapeDtypeStruct]
) -> list[StoredType]:
    """Return the types of a checkpoint's tensors with their forms in a model, in order of their bytes.

    `shapes` are the shapes of the graph's leaves. Tensors that the model does not use are left out.
    """
    manifest, entries = named_tensors(stored, config)
    leaves = dict(zip(graph.paths, shapes, strict=True))
    packings = packings_in(leaves)
    found: dict[tuple[str, str, bool], tuple[set[str], float, float]] = {}
    for path, source in manifest.sources.items():
        leaf, packing = leaves[path], packings.get(path)
        shape = matrix_shape(leaf)
        for part in source.parts(shape):
            entry = entries[part.name]
            form, exact = _form(entry, source, leaf, packing)
            names, on_disk, in_memory = found.get((entry.dtype, form, exact), (set[str](), 0.0, 0.0))
            names.add(shown_name(stored, config, manifest, part.name).partition("[")[0])  # experts are of one
            rows = part.place[-1]
            assert isinstance(rows, slice), "the rows that a tensor fills"
            share = len(range(rows.start, rows.stop)) / (sum(source.rows) * (shape[0] if source.stack else 1))
            found[entry.dtype, form, exact] = (
                names, on_disk + entry.nbytes, in_memory + share * _leaf_bytes(path, leaves),
            )  # fmt: skip
    kinds = [
        StoredType(name, form, exact, len(names), round(on_disk), round(in_memory))
        for (name, form, exact), (names, on_disk, in_memory) in found.items()
    ]
    return sorted(kinds, key=lambda kind: kind.stored_bytes, reverse=True)


def _leaf_bytes(path: str, leaves: dict[str, Any]) -> int:
    """Return the bytes of a matrix with its scales and minimums, or of any other leaf."""
    parts = [path]
    if path.endswith(".weight"):
        parts += [path.removesuffix("weight") + name for name in ("scale", "minimum")]
    return sum(
        math.prod(leaves[name].shape) * np.dtype(leaves[name].dtype).itemsize for name in parts if name in leaves
    )


def _form(entry: TensorEntry, source: Source, leaf: Any, packing: Packing | None) -> tuple[str, bool]:
    """Return the form of an entry's numbers in a leaf in words, and whether they are exact."""
    dtype = str(np.dtype(leaf.dtype))
    if packing is not None:
        bits = f"{packing.bits} bits" + (", indices of a table" if packing.codes else "")
        if fills(packing, entry, source):
            return f"in groups of {packing.group} by {bits}", True
        return f"rounded to groups of {packing.group} by {bits}", False
    if np.issubdtype(np.dtype(leaf.dtype), np.integer):
        return f"rounded to {dtype}", False
    exact = not source.add
    if entry.rows is None and entry.numpy_dtype == np.dtype(leaf.dtype):
        return "as stored", exact
    # float32 holds what any type stands for.
    return f"{'as' if entry.rows is None else 'unpacked to'} {dtype}", exact and dtype == "float32"
