"""The programs of a training step: a model cut into its opening, its layers and its head, forward and back.

A step calls them one after the other, so that streams go on in between, and layers that are alike share a program.
Of all layers, the inputs alone are kept: the backward pass computes a layer again. Weights are read as the session
holds them, by `models/differentiable.py`, in float32.

Axes: R rows, T tokens of each with padding, N = R · T, E hidden size, C tokens whose log-probabilities are computed at
once, V vocabulary, M modules of a matrix, r rank.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rekindle._src.capabilities.tuning.sites import TrainedMatrix
from rekindle._src.models.base import Graph, Model
from rekindle._src.models.differentiable import differentiable, module_of
from rekindle._src.models.hooks import Norm
from rekindle._src.models.nn.forward import ForwardPass, RopeTables
from rekindle._src.models.plain import PlainAttention
from rekindle._src.programs.layered import Cut
from rekindle_kernels import gated

Leaves = Sequence[Any]
KeysAndValues = tuple[Any, ...]  # of a layer that others attend to: k, v [N, K, D]; empty for others


class Pair(NamedTuple):
    """The two trained matrices of a site, with the modules one after the other."""

    down: Any  # [M · r, in]
    up: Any  # [outputs of all modules, r]


Pairs = dict[str, Pair]  # of one layer, by the names of its matrices, such as "attention.qkv"


class TrainingShape(NamedTuple):
    """The sizes of a micro-batch."""

    rows: int
    tokens: int
    chosen: int  # C

    @property
    def name(self) -> str:
        """Its part of the names of programs."""
        return f"r{self.rows}t{self.tokens}"


class OpeningResult(NamedTuple):
    """The results of the opening."""

    x: Any  # [N, E]
    tables: tuple[tuple[Any, ...], ...]  # of each of the model's ropes
    own: tuple[Any, ...]  # what each layer reads alone, or nothing


class TrainedDelta:
    """The products of the matrices that are trained."""

    def __init__(self, matrix: TrainedMatrix, pair: Pair, scale: float) -> None:
        self._matrix, self._pair, self._scale = matrix, pair, scale

    def add(self, y: Array, x: Array, gate: str | None = None, norm: Norm | None = None) -> Array:
        spans = self._matrix.spans
        x = x if norm is None else norm(x)
        narrow = jnp.einsum("...i,mi->...m", x.astype(jnp.float32), self._pair.down, precision="highest")
        rank = self._pair.up.shape[1]
        wide: list[Array] = []
        at = row = 0
        for index, span in enumerate(spans):
            if span.start > at:
                wide.append(jnp.zeros((*y.shape[:-1], span.start - at), jnp.float32))
            up = self._pair.up[row : row + span.stop - span.start]
            own = narrow[..., index * rank : (index + 1) * rank]
            wide.append(jnp.einsum("...r,or->...o", own, up, precision="highest") * self._scale)
            row, at = row + span.stop - span.start, span.stop
        if at < y.shape[-1]:
            wide.append(jnp.zeros((*y.shape[:-1], y.shape[-1] - at), jnp.float32))
        y = y + jnp.concatenate(wide, axis=-1).astype(y.dtype)
        return y if gate is None else gated(y, gate, implementation="xla")


@dataclasses.dataclass(frozen=True)
class TrainingCut:
    """A model in parts, with the matrices that are trained in each layer."""

    cut: Cut
    trained: tuple[Mapping[str, TrainedMatrix], ...]  # of each layer
    scale: float

    @classmethod
    def of(cls, graph: Graph, leaves: Leaves, matrices: Sequence[TrainedMatrix], scale: float) -> TrainingCut:
        cut = Cut.of(differentiable(graph), leaves)
        trained: list[dict[str, TrainedMatrix]] = [{} for _ in cut.layers]
        for matrix in matrices:
            trained[matrix.layer][matrix.name] = matrix
        return cls(cut, tuple(trained), scale)

    @functools.cached_property
    def shared(self) -> frozenset[int]:
        """The layers with keys and values for others, too."""
        return frozenset(source for layer, source in enumerate(self.cut.sources) if source != layer)

    @functools.cached_property
    def kinds(self) -> tuple[int, ...]:
        """For each layer, the first one that is like it."""
        first: dict[Any, int] = {}
        looks = zip(self.cut.kinds, self.trained, strict=True)
        return tuple(
            first.setdefault(
                (kind, layer in self.shared, *((name, one.modules, one.site.rows) for name, one in own.items())), layer
            )
            for layer, (kind, own) in enumerate(looks)
        )

    def reads(self, layer: int) -> int | None:
        """Return the other layer that has a layer's keys and values; None if the layer has its own."""
        source = self.cut.sources[layer]
        return None if source == layer else source

    def model(
        self, indices: Sequence[int], arrays: Leaves, layer: int | None = None, pairs: Pairs | None = None
    ) -> Model:
        """Return the model with arrays where a part has them, and shapes elsewhere."""
        leaves: list[Any] = list(self.cut.leaves)
        for index, leaf in zip(indices, arrays, strict=True):
            leaves[index] = leaf
        deltas = {
            f"layers.{layer}.{name}": TrainedDelta(self.trained[layer or 0][name], pair, self.scale)
            for name, pair in (pairs or {}).items()
        }
        return module_of(self.cut.graph, leaves, deltas)

    def opening(self, outer: Leaves, tokens: Array, lengths: Array) -> OpeningResult:
        """Compute the first layer's input of tokens [R, T]."""
        rows, size = tokens.shape
        model = self.model(self.cut.outer, outer)
        positions = jnp.tile(jnp.arange(size, dtype=jnp.int32), rows)
        x, tables = model.begin(tokens.reshape(-1), positions, jnp.repeat(lengths, size))
        return OpeningResult(x, tuple(tables.tables[rope] for rope in model.config.ropes), tables.own)

    def layer(self, layer: int, shape: TrainingShape) -> Callable[..., tuple[Array, KeysAndValues]]:
        """Return the function of one layer, and of all that are like it."""

        def run(
            leaves: Leaves, pairs: Pairs, x: Array, read: KeysAndValues, tables: Any, own: tuple[Array, ...]
        ) -> tuple[Array, KeysAndValues]:
            model = self.model(self.cut.layers[layer], leaves, layer, pairs)
            attend = PlainAttention(model, shape.tokens, shape.rows)
            source = self.reads(layer)
            if source is not None:
                attend.kept[source] = (read[0], read[1])
            of_ropes = dict(zip(model.config.ropes, tables, strict=True))
            here = ForwardPass(RopeTables.of(of_ropes, own * (layer + 1)), attend).of(layer)
            x = model.layers[layer](x, here)
            return x, tuple(attend.kept[layer]) if layer in self.shared else ()

        return run

    def layer_back(self, layer: int, shape: TrainingShape) -> Callable[..., tuple[Array, KeysAndValues, Pairs]]:
        """Return the function of one layer's derivatives. The caller donates the change of its output and the sums."""
        run = self.layer(layer, shape)

        def back(
            change: Array,
            read_change: KeysAndValues,
            sums: Pairs,
            leaves: Leaves,
            pairs: Pairs,
            x: Array,
            read: KeysAndValues,
            tables: Any,
            own: tuple[Array, ...],
            kept_change: KeysAndValues,
        ) -> tuple[Array, KeysAndValues, Pairs]:
            _, pull = jax.vjp(lambda pairs, x, read: run(leaves, pairs, x, read, tables, own), pairs, x, read)
            of_pairs, of_x, of_read = pull((change, kept_change))
            add = functools.partial(jax.tree.map, jnp.add)
            return of_x, add(read_change, of_read), add(sums, of_pairs)

        return back

    def logprobs(self, outer: Leaves, x: Array, places: Array, targets: Array) -> Array:
        """Compute the log-probabilities of targets [C] after the tokens at places [C] of x [N, E]."""
        model = self.model(self.cut.outer, outer)
        logits = model.logits(model.end(x[places]))
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    def logprobs_back(
        self, change: Array, outer: Leaves, x: Array, places: Array, targets: Array, weights: Array
    ) -> tuple[Array, Array]:
        """Compute the same, and add the change of x for the sum of −weights · log-probabilities. It is donated."""
        logprobs, pull = jax.vjp(lambda x: self.logprobs(outer, x, places, targets), x)
        (of_x,) = pull(-weights)
        return change + of_x, logprobs
