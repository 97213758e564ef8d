"""The programs of a training step: a model cut into its opening, its layers and its head, forward and back.

A step calls them one after the other, so that streams go on in between, and layers that are alike share a program.
Of all layers the inputs are kept, and of as many as the memory allows also the results of products and of attention:
the backward pass computes the rest of a layer again. Weights are read as the session
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
from rekindle._src.models.blocked_attention import BlockedAttention
from rekindle._src.models.differentiable import differentiable, module_of
from rekindle._src.models.hooks import Norm
from rekindle._src.models.kept import Keep, ResultRecorder, ResultReplayer, keep_nothing, read_operands
from rekindle._src.models.nn.forward import ForwardPass, RopeTables
from rekindle._src.programs.layered import Cut
from rekindle_kernels import gated

Leaves = Sequence[Any]
Wanted = Sequence[bool]  # of the arrays that a layer could keep, in their order; empty: none of them
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


class LayerResult(NamedTuple):
    """The results of a layer."""

    x: Any  # [N, E]
    keys: KeysAndValues
    kept: tuple[Any, ...]  # for its derivatives


class KeptArrays(NamedTuple):
    """The arrays of a layer's forward pass that its derivatives read."""

    wanted: Wanted
    size: int  # bytes


class TrainedDelta:
    """The products of the matrices that are trained."""

    def __init__(self, matrix: TrainedMatrix, pair: Pair, scale: float, keep: Keep) -> None:
        self._matrix, self._pair, self._scale, self._keep = matrix, pair, scale, keep

    def add(self, y: Array, x: Array, gate: str | None = None, norm: Norm | None = None) -> Array:
        spans = self._matrix.spans
        x = x if norm is None else norm(x)
        narrow = self._keep(jnp.einsum("...i,mi->...m", x.astype(jnp.float32), self._pair.down, precision="highest"))
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
        y = self._keep(y + jnp.concatenate(wide, axis=-1).astype(y.dtype))
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
        self,
        indices: Sequence[int],
        arrays: Leaves,
        layer: int | None = None,
        pairs: Pairs | None = None,
        keep: Keep = keep_nothing,
    ) -> Model:
        """Return the model with arrays where a part has them, and shapes elsewhere."""
        leaves: list[Any] = list(self.cut.leaves)
        for index, leaf in zip(indices, arrays, strict=True):
            leaves[index] = leaf
        deltas = {
            f"layers.{layer}.{name}": TrainedDelta(self.trained[layer or 0][name], pair, self.scale, keep)
            for name, pair in (pairs or {}).items()
        }
        return module_of(self.cut.graph, leaves, deltas, keep)

    def opening(self, outer: Leaves, tokens: Array, lengths: Array) -> OpeningResult:
        """Compute the first layer's input of tokens [R, T]."""
        rows, size = tokens.shape
        model = self.model(self.cut.outer, outer)
        positions = jnp.tile(jnp.arange(size, dtype=jnp.int32), rows)
        x, tables = model.begin(tokens.reshape(-1), positions, jnp.repeat(lengths, size))
        return OpeningResult(x, tuple(tables.tables[rope] for rope in model.config.ropes), tables.own)

    def layer(self, layer: int, shape: TrainingShape, kept: Wanted = ()) -> Callable[..., LayerResult]:
        """Return the function of one layer, and of all that are like it. `kept` says which arrays it returns, too."""

        def run(*operands: Any) -> LayerResult:
            recorder = ResultRecorder(kept) if kept else None
            x, keys = self._run(layer, shape, recorder or keep_nothing, *operands)
            return LayerResult(x, keys, tuple(recorder.arrays) if recorder else ())

        return run

    def _run(
        self,
        layer: int,
        shape: TrainingShape,
        keep: Keep,
        leaves: Leaves,
        pairs: Pairs,
        x: Array,
        read: KeysAndValues,
        tables: Any,
        own: tuple[Array, ...],
    ) -> tuple[Array, KeysAndValues]:
        model = self.model(self.cut.layers[layer], leaves, layer, pairs, keep)
        attend = BlockedAttention(model, shape.tokens, shape.rows, keep)
        source = self.reads(layer)
        if source is not None:
            attend.kept[source] = (read[0], read[1])
        of_ropes = dict(zip(model.config.ropes, tables, strict=True))
        here = ForwardPass(RopeTables.of(of_ropes, own * (layer + 1)), attend).of(layer)
        x = model.layers[layer](x, here)
        return x, tuple(attend.kept[layer]) if layer in self.shared else ()

    def layer_back(
        self, layer: int, shape: TrainingShape, kept: Wanted = ()
    ) -> Callable[..., tuple[Array, KeysAndValues, Pairs]]:
        """Return the function of one layer's derivatives. The caller donates the change of its output and the sums."""

        def back(
            change: Array,
            read_change: KeysAndValues,
            sums: Pairs,
            arrays: Sequence[Array],
            leaves: Leaves,
            pairs: Pairs,
            x: Array,
            read: KeysAndValues,
            tables: Any,
            own: tuple[Array, ...],
            keys_change: KeysAndValues,
        ) -> tuple[Array, KeysAndValues, Pairs]:
            def run(pairs: Pairs, x: Array, read: KeysAndValues) -> tuple[Array, KeysAndValues]:
                keep = ResultReplayer(kept, arrays) if kept else keep_nothing
                return self._run(layer, shape, keep, leaves, pairs, x, read, tables, own)

            _, pull = jax.vjp(run, pairs, x, read)
            of_pairs, of_x, of_read = pull((change, keys_change))
            add = functools.partial(jax.tree.map, jnp.add)
            return of_x, add(read_change, of_read), add(sums, of_pairs)

        return back

    def kept(self, layer: int, shape: TrainingShape, *operands: object) -> KeptArrays:
        """Return the arrays of a layer's forward pass that its derivatives read, given the operands of its function."""
        recorder = ResultRecorder()
        found = jax.eval_shape(lambda *own: (self._run(layer, shape, recorder, *own), recorder.arrays), *operands)
        (_, keys), arrays = found
        back = self.layer_back(layer, shape, [True] * len(arrays))
        _, pairs, x, read, *_ = operands
        before = (x, read, pairs)
        wanted = read_operands(back, *before, tuple(arrays), *operands, keys)[len(jax.tree.leaves(before)) :]
        return KeptArrays(
            tuple(wanted[: len(arrays)]),
            sum(array.size * array.dtype.itemsize for array, own in zip(arrays, wanted, strict=False) if own),
        )

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
        model = self.model(self.cut.outer, outer)
        logits, pull = jax.vjp(lambda x: model.logits(model.end(x[places])), x)
        total = jax.nn.logsumexp(logits, axis=-1)
        logprobs = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0] - total
        is_target = jnp.arange(logits.shape[-1]) == targets[:, None]
        (of_x,) = pull(weights[:, None] * (jnp.exp(logits - total[:, None]) - is_target))
        return change + of_x, logprobs
