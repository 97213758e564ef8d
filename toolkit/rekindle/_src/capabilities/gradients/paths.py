"""Programs of attributions: places on a path between two inputs, and exact patches of single nodes.

A path leads from the embeddings of other tokens, or from zeros, to those of the prompt. A node is a site's array at one
position, of one head where the site has heads.

Axes: T tokens with padding, R rows (places, or patched runs), H heads, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rekindle._src.capabilities.gradients.adapted import deltas_of
from rekindle._src.capabilities.gradients.request import Point
from rekindle._src.capabilities.gradients.step import (
    EditArrays,
    GradientArguments,
    GradientKey,
    GradientPrompt,
    listener_of,
    shape,
    value_of,
    zeros_of,
)
from rekindle._src.core.records import IntArray
from rekindle._src.models.base import Graph, Model
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.differentiable import (
    PassResult,
    at_points,
    differentiable,
    module_of,
    recomputing_pass,
)
from rekindle._src.models.hooks import Listener, keeping

OUTPUTS = ("attention", "mlp", "mlp_experts")  # of a layer, which it adds to the stream
_TOKENS = 512  # that the rows of one patching program have together
_MOST_ROWS = 16


def rows_for(size: int) -> int:
    """Return the most rows of one program for prompts of this size: weights are widened once for all of them."""
    return max(1, min(_MOST_ROWS, _TOKENS // size))


class PathArguments(NamedTuple):
    """The operands of places on a path, in addition to the weights."""

    prompt: GradientArguments
    other: Any  # int32 [T]: the tokens at the path's beginning
    present: Any  # float32: 1 if the path begins at their embeddings, 0 if it begins at zeros
    shares: Any  # float32 [R]: the places on the path; 1 is the prompt
    dropped: Any  # int32 [R]: the layer whose outputs pass no gradient; -1 for none


class PathOutputs(NamedTuple):
    """The number [R] at places on a path, and its gradients and the arrays [R, T, …] at each site by index."""

    values: Array
    gradients: dict[str, Array]
    arrays: dict[str, Array]


class PathKey(NamedTuple):
    """Everything that decides on the program of places on a path."""

    of: GradientKey
    rows: int  # R, the places of one call
    ends: bool  # the arrays come back, too

    @property
    def name(self) -> str:
        """Its name in the store."""
        return f"{self.rows} {'ends' if self.ends else 'places'} of {self.of.name}"

    def build(self, graph: Graph) -> Callable[[Sequence[Array], PathArguments], PathOutputs]:
        """Return the function of leaves and arguments."""
        wide, points = differentiable(graph), [at_points(point) for point in self.of.points]
        rows = self.rows

        def compute(leaves: Sequence[Array], arguments: PathArguments) -> PathOutputs:
            module, prompt = module_of(wide, leaves, deltas_of(arguments.prompt.adapter)), arguments.prompt
            listener = _path_listener(module, self, arguments)
            tokens = jnp.tile(prompt.tokens, rows)

            def run(added: Mapping[Point, Array]) -> PassResult:
                return recomputing_pass(module, tokens, prompt.length, points, added, listener, rows)

            def objective(added: Mapping[Point, Array]) -> tuple[Array, tuple[Array, Mapping[Point, Array]]]:
                result = run(added)
                values = values_of(self.of, module, result, prompt, rows)
                return values.sum(), (values, result.arrays)

            zeros = zeros_of(lambda: run({}).arrays)
            (_, (values, arrays)), gradients = jax.value_and_grad(objective, has_aux=True)(zeros)
            return PathOutputs(values, _by_index(gradients, points, rows), _by_index(arrays, points * self.ends, rows))

        return compute

    def shapes(self, model: ModelConfig) -> PathArguments:
        """Return the shapes of the arguments."""
        prompt = self.of.shapes(model)
        shares, dropped = shape(np.float32, self.rows), shape(np.int32, self.rows)
        return PathArguments(prompt, prompt.tokens, shape(np.float32), shares, dropped)


def path_arguments(
    prompt: GradientPrompt, other: IntArray | None, shares: Sequence[float], dropped: Sequence[int]
) -> PathArguments:
    """Return the operands of places on the path from other tokens, or from zeros, to a prompt."""
    tokens = np.zeros(prompt.size, np.int32)
    if other is not None:
        tokens[: len(other)] = other
    places = np.asarray(shares, np.float32), np.asarray(dropped, np.int32)
    return PathArguments(prompt.arguments, tokens, np.float32(other is not None), *places)


def values_of(key: GradientKey, module: Model, result: PassResult, prompt: GradientArguments, rows: int) -> Array:
    """Compute the number [R] after each row of a pass."""

    def value(hidden: Array, arrays: Mapping[Point, Array]) -> Array:
        return value_of(key, module, PassResult(hidden, arrays), prompt)

    apart = jax.tree.map(lambda array: array.reshape(rows, -1, *array.shape[1:]), result)
    return jax.vmap(value)(apart.hidden, apart.arrays)


def _by_index(arrays: Mapping[Point, Array], points: Sequence[Point], rows: int) -> dict[str, Array]:
    """Return the arrays [R, T, …] of points by their index."""
    found = [arrays[point].astype(jnp.float32) for point in points]
    return {str(index): array.reshape(rows, -1, *array.shape[1:]) for index, array in enumerate(found)}


def _path_listener(module: Model, key: PathKey, arguments: PathArguments) -> Listener:
    """Return the listener that puts the embeddings at their places on the path, and drops gradients of layers."""
    prompt, size = arguments.prompt, key.of.size
    edits = listener_of(key.of.places, [_repeated(edit, key.rows) for edit in prompt.edits], len(module.layers))
    kept: dict[Point, Array] = {}
    positions = jnp.arange(size, dtype=jnp.int32)
    module.begin(arguments.other, positions, jnp.full_like(positions, prompt.length), (keeping(kept, ("embedding",)),))
    start = jnp.tile(arguments.present * kept["embedding", 0], (key.rows, 1))
    shares, dropped = (jnp.repeat(each, size)[:, None] for each in (arguments.shares, arguments.dropped))

    def listener(site: str, layer: int) -> Callable[[Array], Array] | None:
        change = edits(site, layer)
        if site == "embedding":
            return lambda x: (start + shares * (x - start)).astype(x.dtype)
        if site not in OUTPUTS:
            return change

        def drop(x: Array) -> Array:
            x = x if change is None else change(x)
            return jnp.where(dropped == layer, jax.lax.stop_gradient(x), x)

        return drop

    return listener


class PatchArguments(NamedTuple):
    """The operands of patched runs, in addition to the weights."""

    prompt: GradientArguments
    source: Any  # int32 [T]: the tokens whose arrays are put in
    nodes: Any  # int32 [R, 3]: point by index, position, and head or -1 for all that is there


class PatchKey(NamedTuple):
    """Everything that decides on the program of patched runs."""

    of: GradientKey

    @property
    def rows(self) -> int:
        """R, the runs of one call."""
        return rows_for(self.of.size)

    @property
    def name(self) -> str:
        """Its name in the store."""
        return f"{self.rows} patches of {self.of.name}"

    def build(self, graph: Graph) -> Callable[[Sequence[Array], PatchArguments], Array]:
        """Return the function of leaves and arguments: the number [R] after each patch."""
        wide, points = differentiable(graph), [at_points(point) for point in self.of.points]
        rows = self.rows

        def compute(leaves: Sequence[Array], arguments: PatchArguments) -> Array:
            module, prompt = module_of(wide, leaves, deltas_of(arguments.prompt.adapter)), arguments.prompt

            def run(tokens: Array, added: Mapping[Point, Array], rows: int) -> PassResult:
                edits = [_repeated(edit, rows) for edit in prompt.edits]
                listener = listener_of(self.of.places, edits, len(module.layers))
                return recomputing_pass(module, tokens, prompt.length, points, added, listener, rows)

            both = run(jnp.concatenate([prompt.tokens, arguments.source]), {}, 2).arrays
            added = {
                point: _patches(both[point].astype(jnp.float32), arguments.nodes, index)
                for index, point in enumerate(points)
            }
            result = run(jnp.tile(prompt.tokens, rows), added, rows)
            return values_of(self.of, module, result, prompt, rows)

        return compute

    def shapes(self, model: ModelConfig) -> PatchArguments:
        """Return the shapes of the arguments."""
        prompt = self.of.shapes(model)
        return PatchArguments(prompt, prompt.tokens, shape(np.int32, self.rows, 3))


def patch_arguments(prompt: GradientPrompt, source: IntArray, nodes: IntArray) -> PatchArguments:
    """Return the operands of patched runs, one for each node [R, 3]: its point, position and head."""
    tokens = np.zeros(prompt.size, np.int32)
    tokens[: len(source)] = source
    return PatchArguments(prompt.arguments, tokens, nodes)


def _patches(both: Array, nodes: Array, index: int) -> Array:
    """Return the additions [R · T, …] to one site's array, from the arrays [2 · T, …] of the prompt and the source."""
    prompt, source = both.reshape(2, -1, *both.shape[1:])
    change = (source - prompt)[None]
    inner = change.ndim - 2  # axes after the position
    place = jnp.arange(prompt.shape[0])
    mask = (nodes[:, 0] == index)[:, None] & (nodes[:, 1][:, None] == place)
    mask = mask.reshape(*mask.shape, *(1,) * inner)
    if inner == 2:
        heads, own = jnp.arange(prompt.shape[1])[None, None, :, None], nodes[:, 2].reshape(-1, 1, 1, 1)
        mask = mask & ((own < 0) | (own == heads))
    return jnp.where(mask, change, 0.0).reshape(-1, *both.shape[1:])


def _repeated(edit: EditArrays, rows: int) -> EditArrays:
    return EditArrays(edit.factors, jnp.tile(edit.vectors, (rows, 1)), jnp.tile(edit.mask, rows))
