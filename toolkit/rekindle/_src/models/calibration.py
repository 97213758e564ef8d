"""Calibrates a model layer by layer: runs texts through it, and rounds each matrix by the rows that it multiplies.

A layer is run twice: as it is, to record the inputs of its matrices, and once they are rounded, so that the
layers after it are rounded for their actual inputs.

A matrix is rounded to four bits so that its products with these rows change least (GPTQ). Columns are rounded one
after another. The columns that follow compensate a column's rounding error, as far as rows have both: the inverse of
`gram`, the sum of x · xᵀ over rows x, holds the amounts. A group's scale is chosen among several at its first column,
by the remaining squared error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from rekindle._src.models.base import LoadedModel, abstract_model, merge
from rekindle._src.models.config import AttentionSpec
from rekindle._src.models.loading import quantize
from rekindle._src.models.loading.hugepages import adopted
from rekindle._src.models.loading.quantize import int4_rounded, int4_scales
from rekindle._src.models.nn.packing import Packing, matrix_shape, packings_in
from rekindle._src.models.plain import AttendOwn
from rekindle_kernels import int4

QUERIES = 512  # queries with attention scores in memory at a time
DAMPING = 0.01  # share of the mean of gram's diagonal that is added to it: columns that no row has stay as they are
# Candidate scales, as shares of the one that reaches the largest weight. A negative one flips the side that
# reaches further.
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, -8 / 7, -1.0, -0.9)
SHARES_WITH_MINIMUMS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
Floats = NDArray[np.float32]
Parts = tuple[NDArray[np.uint8], NDArray[Any], NDArray[Any] | None]


class CalibrationProgress(NamedTuple):
    """One progress report of a calibration."""

    done: int  # matrices
    total: int
    path: str  # of the last one

    def __str__(self) -> str:
        return f"{self.done} of {self.total} matrices"


Report = Callable[[CalibrationProgress], None]


def calibrate(
    model: LoadedModel,
    tokens: Sequence[Sequence[int]],
    plan: str | Mapping[str, str | None],
    *,
    report: Report | None = None,
) -> LoadedModel:
    """Quantise `model`, which has floats, by a plan. Matrices of four bits are rounded for these sequences of tokens.

    Stacks of experts are rounded to the nearest, since each of them would need texts of its own.
    """
    assert not model.graph.precision.quantizes, "a quantised model has no floats to begin with"
    graph, shapes = abstract_model(model.config, model.graph.precision.weights, plan)
    targets = dict(zip(graph.paths, shapes, strict=True))
    packings = packings_in(targets)
    floats = dict(zip(model.graph.paths, model.leaves, strict=True))
    single = {path: entry for path, entry in packings.items() if len(floats[path].shape) == 2}
    rounds = _Rounds({path for path in single if path.startswith("layers.")}, single, report)
    _run(model, tokens, rounds)
    leaves: dict[str, Any] = {}
    for path, leaf in floats.items():
        if path in packings:
            parts = rounds.rounded.get(path) or _nearest(model, path, leaf, packings[path])
            leaves |= _named(path, parts)
        elif targets[path].dtype == jnp.int8:
            weight, scale = quantize.quantize(_floats(model, leaf))
            leaves |= {path: weight, path.removesuffix("weight") + "scale": scale}
        else:
            leaves[path] = leaf
    placed = tuple(
        leaf if isinstance(leaf, Array) else jax.device_put(adopted(leaf), may_alias=True)
        for leaf in (leaves[path] for path in graph.paths)
    )
    digest = hashlib.blake2b(repr((model.fingerprint, graph.precision, tokens)).encode(), digest_size=16)
    return LoadedModel(model.config, graph, placed, f"calibrated-{digest.hexdigest()}", model.folder)


class _Rounds:
    """The matrices rounded so far, and the rounding of a layer's matrices."""

    def __init__(self, targets: set[str], packings: Mapping[str, Packing], report: Report | None) -> None:
        self.targets, self.packings, self.rounded = targets, packings, dict[str, Parts]()
        self._report = report

    def layer(self, number: int, layer: Any, *arguments: Any) -> Any:
        """Round a layer's matrices, and return its outputs with the rounded ones."""
        from rekindle._src.models.nn.linear import Linear, RMSNorm, matrices

        grams: dict[str, Any] = {}
        places: dict[str, tuple[dict[str, Any], str, Linear]] = {}

        def recorded(path: str, linear: Linear) -> Callable[..., Array]:
            def call(x: Array, *, norm: RMSNorm | None = None, **options: Any) -> Array:
                rows = (x if norm is None else norm(x)).astype(jnp.float32).reshape(-1, x.shape[-1])
                grams[path] = np.asarray(_gram(rows))
                return linear(x, norm=norm, **options)

            return call

        for path, matrix in matrices(layer).items():
            full_path = f"layers.{number}.{path}.weight"
            if full_path in self.targets and isinstance(matrix, Linear):
                *owners, name = path.split(".")
                owner = layer
                for attribute in owners:
                    owner = getattr(owner, attribute)
                places[full_path] = vars(owner), name, matrix
                vars(owner)[name] = recorded(full_path, matrix)
        layer(*arguments)
        for attributes, name, matrix in places.values():
            attributes[name] = matrix
        for path, gram in grams.items():
            self._round(path, places[path][2], gram)
        return layer(*arguments)

    def _round(self, path: str, matrix: Any, gram: NDArray[Any]) -> None:
        parts = calibrated(np.asarray(matrix.weight[...], np.float32), gram, self.packings[path])
        self.rounded[path] = parts
        weight, scale, minimum = (None if part is None else jnp.asarray(part) for part in parts)
        assert weight is not None, "a matrix has weights"
        assert scale is not None, "integers have scales"
        matrix.weight[...] = int4.dequantized(weight, scale, minimum, matrix.weight[...].dtype)
        if self._report is not None:
            self._report(CalibrationProgress(len(self.rounded), len(self.targets), path))


def _run(model: LoadedModel, sequences: Sequence[Sequence[int]], rounds: _Rounds) -> None:
    """Run all sequences through all layers at once."""
    from rekindle._src.models.nn.layers import soft_cap, soft_max

    module: Any = merge(model.graph, model.leaves)
    lengths = [len(sequence) for sequence in sequences]
    starts = np.cumsum([0, *lengths[:-1]])
    tokens = jnp.asarray(np.concatenate([np.asarray(sequence, np.int32) for sequence in sequences]))
    positions = jnp.asarray(np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]))

    def attention(q: Array, k: Array, v: Array, spec: AttentionSpec, sinks: Array | None) -> Array:
        group = q.shape[1] // k.shape[1]
        outputs = []
        for start, length in zip(starts, lengths, strict=True):
            keys, values = (x[start : start + length].astype(jnp.float32) for x in (k, v))
            for first in range(0, length, QUERIES):
                queries = q[start + first : start + min(length, first + QUERIES)].astype(jnp.float32)
                count = queries.shape[0]
                grouped = queries.reshape(count, -1, group, queries.shape[-1])
                scores = soft_cap(jnp.einsum("tkgd,skd->kgts", grouped, keys) * spec.scale, spec.soft_cap)
                distance = jnp.arange(first, first + count)[:, None] - jnp.arange(length)
                visible = spec.sees(distance)
                weights = soft_max(jnp.where(visible, scores, -jnp.inf), sinks)
                outputs.append(jnp.einsum("kgts,skd->tkgd", weights, values).reshape(*queries.shape[:2], -1))
        return jnp.concatenate(outputs).astype(q.dtype)

    def watched(number: int, layer: Any) -> Callable[..., Array]:
        return lambda *arguments: rounds.layer(number, layer, *arguments)

    vars(module)["layers"] = [watched(number, layer) for number, layer in enumerate(module.layers)]
    module(tokens, positions, AttendOwn(model.config, attention))


@jax.jit
def _gram(rows: Array) -> Array:
    return jax.lax.dot_general(rows, rows, (((0,), (0,)), ((), ())), precision="highest")


def _floats(model: LoadedModel, leaf: Any) -> NDArray[Any]:
    """Return a leaf's values on the host: some leaves hold the bits of 16-bit floats."""
    return np.asarray(leaf).view(model.graph.precision.value_dtype(leaf.dtype))


def _nearest(model: LoadedModel, path: str, leaf: Any, packing: Packing) -> Parts:
    values = _floats(model, leaf)
    assert matrix_shape(leaf) == values.shape, path
    return quantize.quantize_int4(values, packing.group, minimums=packing.minimum, scales=packing.scales)


def _named(path: str, parts: Parts) -> dict[str, NDArray[Any]]:
    names = ("weight", "scale", "minimum")
    stem = path.removesuffix("weight")
    return {stem + name: part for name, part in zip(names, parts, strict=True) if part is not None}


def calibrated(matrix: Floats, gram: NDArray[Any], packing: Packing) -> Parts:
    """Return weight, scale and minimum of a matrix [out, in], as `rekindle_kernels.int4` stores them, for rows with
    this gram [in, in]."""
    outputs, inputs = matrix.shape
    group, groups = packing.group, inputs // packing.group
    columns = np.array(matrix.T, np.float32, order="C")  # [in, out]: a column lies in one piece
    factor, importance = _factor(gram)
    integers = np.empty((inputs, outputs), np.uint8)
    scale = np.empty((outputs, groups), packing.scales)
    minimum = np.empty_like(scale) if packing.minimum else None
    errors = np.empty((group, outputs), np.float32)
    for number in range(groups):
        begin, end = number * group, (number + 1) * group
        scales, lowest = chosen_scales(columns[begin:end].T[:, None, :], importance[begin:end], packing)
        scale[:, number] = scales[:, 0]
        if minimum is not None and lowest is not None:
            minimum[:, number] = lowest[:, 0]
        wide = scales[:, 0].astype(np.float32)
        base = -int4.OFFSET * wide if lowest is None else lowest[:, 0].astype(np.float32)
        for column in range(begin, end):
            integer = int4_rounded(columns[column][:, None, None].copy(), scales, lowest)[:, 0, 0]
            integers[column] = integer
            error = (columns[column] - (wide * integer + base)) / factor[column, column]
            errors[column - begin] = error
            columns[column + 1 : end] -= factor[column, column + 1 : end][:, None] * error
        columns[end:] -= factor[begin:end, end:].T @ errors
    packed = None if minimum is None else int4.pack_scales(minimum)
    return int4.pack(np.ascontiguousarray(integers.T)), int4.pack_scales(scale), packed


def chosen_scales(block: Floats, importance: Floats, packing: Packing) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return scales and minimums [out, 1] of weights [out, 1, group]: the best candidates by squared errors, weighted
    by `importance` [group]."""
    widest, lowest = int4_scales(block, packing.scales, packing.minimum)
    best, least = widest, np.full(widest.shape, np.inf, np.float32)
    for share in SHARES_WITH_MINIMUMS if packing.minimum else SHARES:
        candidate = (widest.astype(np.float32) * np.float32(share)).astype(packing.scales)
        integers = int4_rounded(block.copy(), candidate, lowest)
        wide = candidate.astype(np.float32)[..., None]
        base = -int4.OFFSET * wide if lowest is None else lowest.astype(np.float32)[..., None]
        error = np.sum((block - (wide * integers + base)) ** 2 * importance, axis=-1)
        better = error < least
        best, least = np.where(better, candidate, best), np.where(better, error, least)
    return best.astype(packing.scales), lowest


def _factor(gram: NDArray[Any]) -> tuple[Floats, Floats]:
    """Return the upper factor of the inverse of gram, damped, and its diagonal: the importance of each column."""
    damped = np.array(gram, np.float64)
    diagonal = np.einsum("ii->i", damped)
    diagonal += max(DAMPING * float(diagonal.mean()), 1e-12)
    importance = diagonal.astype(np.float32)
    inverse = np.linalg.inv(damped)
    factor = np.linalg.cholesky((inverse + inverse.T) / 2).T
    return np.ascontiguousarray(factor, np.float32), importance / importance.mean()
