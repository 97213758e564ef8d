"""Programs of attribution patching of edges, from the output of one node to the input of another one.

An edge's score is the change of what its source writes, from the prompt to another prompt of as many tokens, times the
gradient at the input of its target alone, summed over positions. A head writes its part of attention's output; where a
norm or a factor follows the half, the change goes through its derivative at the prompt. An exact patch adds the same
change to that one input, and runs the rest of the model again.

Axes: T tokens with padding, U sources, V targets, n nodes of a layer, R patched runs, H heads, D head size, E hidden
size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rekindle._src.capabilities.captures.tapped import TapFacts
from rekindle._src.capabilities.gradients.adapted import deltas_of
from rekindle._src.capabilities.gradients.paths import rows_for, values_of
from rekindle._src.capabilities.gradients.request import Point
from rekindle._src.capabilities.gradients.step import (
    GradientArguments,
    GradientKey,
    GradientPrompt,
    shape,
    value_of,
    zeros_of,
)
from rekindle._src.core.records import IntArray
from rekindle._src.models.adapters.sites import sites_of
from rekindle._src.models.base import Graph, Model
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.differentiable import (
    HeadsAttention,
    PassResult,
    at_points,
    differentiable,
    module_of,
    recomputing_pass,
)
from rekindle._src.models.hooks import Listener, keeping
from rekindle._src.models.nn.forward import ForwardPass

_INPUTS = ("attention_input", "mlp_input")
_STREAM: Point = ("residual_before", 0)


class EdgeNodes(NamedTuple):
    """Nodes of one array: the heads of a site in a layer, or the whole of it."""

    site: str
    layer: int
    size: int  # heads, or 1

    @property
    def names(self) -> list[str]:
        """Their names in words."""
        if self.site == _STREAM[0]:
            return ["embedding"]
        if self.site == "residual":
            return ["output"]
        what = self.site.removesuffix("_input")
        heads = self.site in ("heads", "q", "k", "v")
        return [f"layer {self.layer}, {what}{f' {head}' if heads else ''}" for head in range(self.size)]


class EdgeTable(NamedTuple):
    """All nodes that write into the stream, and all that read from it, in the order of the model."""

    sources: tuple[EdgeNodes, ...]
    targets: tuple[EdgeNodes, ...]

    @classmethod
    def of(cls, model: ModelConfig, facts: TapFacts) -> EdgeTable:
        """Return the nodes of a model: heads, or a half as one node if it has a gate, a state or other inputs."""
        last, H = facts.layers - 1, model.num_heads
        plain = {layer for layer in facts.sites.get("v", ()) if model.states[layer] is None}
        matrices: dict[int, dict[str, int]] = {}
        for site in sites_of(model).sites:
            _, number, name = site.path.split(".", 2)
            if name.startswith("attention."):
                matrices.setdefault(int(number), {})[name] = site.outputs
        sources, targets = [EdgeNodes(*_STREAM, 1)], list[EdgeNodes]()
        for layer in range(facts.layers):
            if layer in facts.sites.get("attention", ()):
                sources.append(EdgeNodes("heads", layer, H) if layer in plain else EdgeNodes("attention", layer, 1))
                pages = model.pages_of(layer) if layer in plain else None
                rows = None if pages is None else (H + 2 * pages.heads) * pages.key_size
                if pages is not None and matrices.get(layer) == {
                    "attention.qkv": rows, "attention.out": model.hidden_size,
                }:  # fmt: skip
                    targets += [EdgeNodes("q", layer, H), *(EdgeNodes(site, layer, pages.heads) for site in "kv")]
                else:
                    targets.append(EdgeNodes("attention_input", layer, 1))
            if layer in facts.sites.get("mlp", ()):
                sources.append(EdgeNodes("mlp", layer, 1))
                targets.append(EdgeNodes("mlp_input", layer, 1))
        return cls(tuple(sources), (*targets, EdgeNodes("residual", last, 1)))

    @property
    def widths(self) -> tuple[int, int]:
        """U and V."""
        return sum(nodes.size for nodes in self.sources), sum(nodes.size for nodes in self.targets)

    def reaches(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return [U, V]: True where the source writes before the target reads."""
        ends = np.repeat([_order(nodes) for nodes in self.sources], [nodes.size for nodes in self.sources])
        starts = np.repeat([_order(nodes) for nodes in self.targets], [nodes.size for nodes in self.targets])
        return ends[:, None] < starts[None]


def _order(nodes: EdgeNodes) -> int:
    """Return a node's place in a pass: reads of attention, its output, reads of the MLP, its output."""
    if nodes.site == _STREAM[0]:
        return -1
    places = {"heads": 1, "attention": 1, "mlp_input": 2, "mlp": 3, "residual": 4}
    return 4 * nodes.layer + places.get(nodes.site, 0)


class EdgeArguments(NamedTuple):
    """The operands of edges, in addition to the weights."""

    prompt: GradientArguments
    source: Any  # int32 [T]: the tokens that the change leads to
    share: Any  # float32: the place of the embeddings on the path from them, 1 at the prompt
    edges: Any  # int32 [R, 2]: the source and the target of each patched run; -1 for a run without


class EdgeOutputs(NamedTuple):
    """The number at the prompt, and the scores [U, V]."""

    value: Array
    scores: Array


def edge_arguments(prompt: GradientPrompt, source: IntArray, share: float, edges: IntArray) -> EdgeArguments:
    """Return the operands of edges of a prompt."""
    tokens = np.zeros(prompt.size, np.int32)
    tokens[: len(source)] = source
    return EdgeArguments(prompt.arguments, tokens, np.float32(share), edges)


class EdgeKey(NamedTuple):
    """Everything that decides on the program of all edges' scores."""

    of: GradientKey
    table: EdgeTable

    @property
    def name(self) -> str:
        """Its name in the store."""
        return f"edges of {self.of.name}"

    def build(self, graph: Graph) -> Callable[[Sequence[Array], EdgeArguments], EdgeOutputs]:
        """Return the function of leaves and arguments."""
        wide = differentiable(graph)

        def compute(leaves: Sequence[Array], arguments: EdgeArguments) -> EdgeOutputs:
            module = module_of(wide, leaves, deltas_of(arguments.prompt.adapter))
            parts = _Parts(module, self.of, self.table, arguments)
            targets = [at_points(nodes[:2]) for nodes in self.table.targets]

            def objective(added: Mapping[Point, Array]) -> tuple[Array, Mapping[Point, Array]]:
                result = parts.run(added)
                return value_of(self.of, parts.module, result, arguments.prompt), result.arrays

            zeros = zeros_of(lambda: {point: parts.run({}).arrays[point] for point in targets})
            (value, parts.arrays), gradients = jax.value_and_grad(objective, has_aux=True)(zeros)
            return EdgeOutputs(value, parts.scores(gradients))

        return compute

    def shapes(self, model: ModelConfig) -> EdgeArguments:
        """Return the shapes of the arguments."""
        prompt = self.of.shapes(model)
        return EdgeArguments(prompt, prompt.tokens, shape(np.float32), shape(np.int32, 0, 2))


class EdgePatchKey(NamedTuple):
    """Everything that decides on the program of runs with one patched edge each."""

    of: GradientKey
    table: EdgeTable

    @property
    def rows(self) -> int:
        """R, the runs of one call."""
        return rows_for(self.of.size)

    @property
    def name(self) -> str:
        """Its name in the store."""
        return f"{self.rows} patched edges of {self.of.name}"

    def build(self, graph: Graph) -> Callable[[Sequence[Array], EdgeArguments], Array]:
        """Return the function of leaves and arguments: the number [R] after each patch."""
        wide, rows = differentiable(graph), self.rows

        def compute(leaves: Sequence[Array], arguments: EdgeArguments) -> Array:
            module = module_of(wide, leaves, deltas_of(arguments.prompt.adapter))
            parts = _Parts(module, self.of, self.table, arguments)
            parts.arrays = parts.run({}).arrays
            added, prompt = parts.additions(arguments.edges), arguments.prompt
            points = [*map(at_points, self.of.points), *added]
            tokens = jnp.tile(prompt.tokens, rows)
            result = recomputing_pass(parts.module, tokens, prompt.length, points, added, rows=rows)
            return values_of(self.of, parts.module, result, prompt, rows)

        return compute

    def shapes(self, model: ModelConfig) -> EdgeArguments:
        """Return the shapes of the arguments."""
        prompt = self.of.shapes(model)
        return EdgeArguments(prompt, prompt.tokens, shape(np.float32), shape(np.int32, self.rows, 2))


class _Writes(NamedTuple):
    """The change that each of a layer's nodes writes, a row for each node, at its site and in the stream after it."""

    sites: Array  # [n, T, E]
    stream: Array  # [n, T, E]


class _Parts:
    """A model's layers taken apart at one prompt: the reads of halves, and the writes of nodes."""

    def __init__(self, module: Model, key: GradientKey, table: EdgeTable, arguments: EdgeArguments) -> None:
        self.module, self._key, self._table, self._arguments = module, key, table, arguments
        prompt, self._layers = arguments.prompt, len(module.layers)
        positions = jnp.arange(key.size, dtype=jnp.int32)
        lengths = jnp.full_like(positions, prompt.length)
        _, self._tables = module.begin(prompt.tokens, positions, lengths)
        points = [at_points(nodes[:2]) for nodes in table.sources]
        tokens = jnp.concatenate([prompt.tokens, arguments.source])
        both = recomputing_pass(module, tokens, prompt.length, points, {}, rows=2).arrays
        halves = {
            point: array.astype(jnp.float32).reshape(2, key.size, *array.shape[1:]) for point, array in both.items()
        }
        self._changes = {point: each[1] - each[0] for point, each in halves.items()}
        kept: dict[Point, Array] = {}
        module.begin(arguments.source, positions, lengths, (keeping(kept, ("embedding",)),))
        self._start = kept["embedding", 0]
        self.arrays: Mapping[Point, Array] = {}

    def run(self, added: Mapping[Point, Array]) -> PassResult:
        """Compute the prompt, or the place on the path to it, and keep everything that parts need."""
        points = {*map(at_points, self._key.points), *added, _STREAM}
        points |= {at_points(nodes[:2]) for nodes in (*self._table.sources, *self._table.targets)}
        every = range(self._layers)
        points |= {(site, layer) for site in ("residual", "attention", "k", "v") for layer in every}
        start, share = self._start, self._arguments.share

        def listener(site: str, layer: int) -> Callable[[Array], Array] | None:
            return (lambda x: (start + share * (x - start)).astype(x.dtype)) if site == "embedding" else None

        prompt = self._arguments.prompt
        return recomputing_pass(self.module, prompt.tokens, prompt.length, tuple(points), added, listener)

    def _layer(self, layer: int, x: Array, listener: Listener) -> Array:
        """Compute a layer of a stream before it."""
        attend = HeadsAttention(self.module, self._key.size)
        source = self.module.config.source(layer)
        if source != layer and ("k", source) in self.arrays:
            keys = self.arrays["k", source]
            values = self.arrays.get(("v", source), keys[..., : self.module.config.pages_of(layer).value_size])
            attend.kept = {source: (keys, values)}
        attend.listeners = (listener,)
        here = ForwardPass(self._tables, attend, attend.listeners).of(layer)
        result: Array = self.module.layers[layer](x, here)
        return result

    def _before(self, layer: int) -> Array:
        return self.arrays[at_points(("residual_before", layer))]

    def _reads(self, layer: int, sites: Sequence[str], stream: Array, output: Array) -> dict[str, Array]:
        """Compute what a layer's nodes read, after additions to the stream before it and to attention's output."""
        kept: dict[Point, Array] = {}
        keep, attention = keeping(kept, sites), self.arrays.get(("attention", layer))

        def listener(site: str, at: int) -> Callable[[Array], Array] | None:
            if site == "attention" and attention is not None:
                return lambda _: attention + output
            return keep(site, at)

        self._layer(layer, self._before(layer) + stream, listener)
        return {site: kept[site, layer] for site in sites}

    def _writes(self, layer: int) -> list[_Writes]:
        """Compute the changes that the nodes of a layer write."""
        own = [nodes for nodes in self._table.sources if nodes.layer == layer and nodes.site != _STREAM[0]]
        x, found = self._before(layer), list[_Writes]()
        for nodes in own:
            half = "mlp" if nodes.site == "mlp" else "attention"
            change = self._changes[nodes[:2]]

            def run(added: Array, at: str, until: str, layer: int = layer) -> Array:
                kept: dict[Point, Array] = {}

                def listener(site: str, layer: int) -> Callable[[Array], Array] | None:
                    def pass_on(array: Array) -> Array:
                        # Only the way past other halves counts: they are targets of their own.
                        array = jax.lax.stop_gradient(array) if site in _INPUTS else array
                        array = array + added.astype(array.dtype) if site == at else array
                        kept[site, layer] = array
                        return array

                    return pass_on

                kept["residual", layer] = self._layer(layer, x, listener)
                return kept[until, layer]

            if nodes.site == "heads":
                masked = jnp.eye(nodes.size)[:, None, :, None] * change[None]
                sites = _pushed(functools.partial(run, at="heads", until="attention"), masked)
            else:
                sites = change[None]
            found.append(_Writes(sites, _pushed(functools.partial(run, at=half, until="residual"), sites)))
        return found

    def scores(self, gradients: Mapping[Point, Array]) -> Array:
        """Compute the scores [U, V] from gradients at what targets read."""
        start = self._changes[_STREAM][None]
        written = [(-1, _Writes(start, start))]
        for layer in range(self._layers):
            written += [(layer, each) for each in self._writes(layer)]
        columns: list[Array] = []
        for layer in range(self._layers):
            for half in _INPUTS:
                targets = [nodes for nodes in self._table.targets if _reads_in(nodes, layer, half)]
                if targets:
                    columns.append(_column(written, layer, half, *self._slopes(layer, targets, gradients)))
        end = gradients["residual", self._layers - 1][None]
        columns.append(_column(written, self._layers, "", end, end))
        return jnp.concatenate(columns, axis=1)

    def _slopes(
        self, layer: int, targets: Sequence[EdgeNodes], gradients: Mapping[Point, Array]
    ) -> tuple[Array, Array]:
        """Compute the gradients of targets [n, T, E] by the stream before the layer, and by attention's output."""
        zeros, count = jnp.zeros_like(self._before(layer)), sum(nodes.size for nodes in targets)
        sites = [nodes.site for nodes in targets]
        reads, pull = jax.vjp(functools.partial(self._reads, layer, sites), zeros, zeros)
        changes, start = {}, 0
        for nodes in targets:
            gradient = gradients[nodes[:2]].astype(reads[nodes.site].dtype)
            own = jnp.zeros((count, *gradient.shape), gradient.dtype)
            rows = slice(start, start + nodes.size)
            by_head = jnp.eye(nodes.size)[:, None, :, None] if gradient.ndim == 3 else 1.0
            changes[nodes.site] = own.at[rows].set(gradient[None] * by_head)
            start += nodes.size
        stream, output = jax.vmap(pull)(changes)
        return stream, output

    def additions(self, edges: Array) -> dict[Point, Array]:
        """Compute the additions [R · T, …] to the inputs of targets, in runs with one patched edge [R, 2] each."""
        groups, sites = [self._changes[_STREAM][None]], [jnp.zeros_like(self._changes[_STREAM])[None]]
        layers = [-1]
        for layer in range(self._layers):
            for each in self._writes(layer):
                groups.append(each.stream)
                sites.append(each.sites)
                layers += [layer] * each.sites.shape[0]
        source, target = edges[:, 0], edges[:, 1]
        stream, output = (jnp.concatenate(each)[source] for each in (groups, sites))
        of_layer = jnp.asarray(layers)[source]
        added: dict[Point, Array] = {}
        start = 0
        for nodes in self._table.targets:
            rows, head = target.shape[0], target - start
            mine = (source >= 0) & (head >= 0) & (head < nodes.size)
            start += nodes.size
            if nodes.site == "residual":
                change = stream
            else:
                within = (of_layer == nodes.layer)[:, None, None]
                reads = functools.partial(self._reads, nodes.layer, [nodes.site])
                moved = jax.vmap(reads)(jnp.where(within, 0.0, stream), jnp.where(within, output, 0.0))[nodes.site]
                change = moved - reads(jnp.zeros_like(stream[0]), jnp.zeros_like(stream[0]))[nodes.site]
            mask = mine.reshape(rows, *[1] * (change.ndim - 1))
            if change.ndim == 4:
                mask = mask & (head[:, None] == jnp.arange(nodes.size))[:, None, :, None]
            added[nodes[:2]] = jnp.where(mask, change, 0.0).reshape(-1, *change.shape[2:])
        return added


def _reads_in(nodes: EdgeNodes, layer: int, half: str) -> bool:
    own = "mlp_input" if nodes.site == "mlp_input" else "attention_input"
    return nodes.layer == layer and nodes.site != "residual" and own == half


def _column(written: Sequence[tuple[int, _Writes]], layer: int, half: str, stream: Array, output: Array) -> Array:
    """Compute the scores [U, n] of one half's targets, from their gradients by the stream and attention's output."""
    parts: list[Array] = []
    attention = half == "mlp_input"  # the first node of the same layer is its attention; else its gradient is 0
    for source, writes in written:
        if source < layer:
            parts.append(jnp.einsum("ute,vte->uv", writes.stream, stream, precision="highest"))
        elif source == layer and attention:
            parts.append(jnp.einsum("ute,vte->uv", writes.sites, output, precision="highest"))
            attention = False
        else:
            parts.append(jnp.zeros((writes.sites.shape[0], stream.shape[0])))
    return jnp.concatenate(parts)


def _pushed(function: Callable[[Array], Array], changes: Array) -> Array:
    """Compute the derivative of a function at zeros in the direction of each change [n, …].

    Products with stored matrices have derivatives in reverse alone: that of the reverse derivative is the forward one.
    """
    out, pull = jax.vjp(function, jnp.zeros_like(changes[0]))
    _, push = jax.vjp(pull, jnp.zeros_like(out))
    pushed: Array = jax.vmap(lambda change: push((change,))[0])(changes)
    return pushed
