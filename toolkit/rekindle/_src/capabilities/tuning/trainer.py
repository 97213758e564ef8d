"""The state of a training on the device, and its steps as generators that stop between two programs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rekindle._src.capabilities.tuning.batches import MicroBatch
from rekindle._src.capabilities.tuning.losses import Floats, Loss
from rekindle._src.capabilities.tuning.memory import TrainingNeed, need_of, room_of
from rekindle._src.capabilities.tuning.owner import TrainingProgram, TuningPrograms
from rekindle._src.capabilities.tuning.sites import TrainedMatrix
from rekindle._src.capabilities.tuning.step import KeptArrays, LayerResult, Pair, Pairs, TrainingCut, TrainingShape
from rekindle._src.models.adapters.adapter import Adapter, Product, adapter_of
from rekindle._src.models.base import precision_name
from rekindle._src.models.nn.packing import matrix_shape

if TYPE_CHECKING:
    from optax import GradientTransformation

Matrices = NDArray[np.float32]
_LARGEST_NORM = 1.0  # of a step's gradient: longer ones are cut


class ShapePrograms(NamedTuple):
    """The programs of micro-batches of one shape."""

    opening: TrainingProgram
    layers: tuple[TrainingProgram, ...]
    back: tuple[TrainingProgram, ...]
    logprobs: TrainingProgram
    logprobs_back: TrainingProgram


class TrainerState(NamedTuple):
    """Everything of a training on the device, in host memory."""

    numbers: Matrices  # of the adapter, in the order of its matrices
    moments: tuple[NDArray[np.generic], ...]  # the leaves of the optimiser's state


def initial_pairs(matrices: Sequence[TrainedMatrix], rank: int, seed: int) -> list[Pair]:
    """Return a new adapter as PEFT begins one: numbers up to 1 / √in to the rank, and zeros from it."""
    random = np.random.default_rng(seed)
    pairs = []
    for matrix in matrices:
        bound = matrix.site.inputs**-0.5
        shape = len(matrix.modules) * rank, matrix.site.inputs
        pairs.append(
            Pair(random.uniform(-bound, bound, shape).astype(np.float32), np.zeros((matrix.outputs, rank), np.float32))
        )
    return pairs


class Trainer:
    """An adapter in training. Its generators are to be advanced on the device thread, between two steps."""

    def __init__(
        self,
        owner: TuningPrograms,
        cut: TrainingCut,
        matrices: Sequence[TrainedMatrix],
        rank: int,
        optimizer: GradientTransformation | None = None,
    ) -> None:
        self._owner, self._cut, self._matrices, self._rank = owner, cut, tuple(matrices), rank
        self._optimizer, self._own = _standard() if optimizer is None else optimizer, optimizer is not None
        described = repr([(one.site.path, one.modules) for one in matrices] + [rank, cut.scale])
        self._name = f"tune {hashlib.blake2b(described.encode(), digest_size=8).hexdigest()}"
        self._programs: dict[TrainingShape, ShapePrograms] = {}
        self._of_layers: tuple[tuple[int, ...], ...] = tuple(
            tuple(index for index, one in enumerate(matrices) if one.layer == layer)
            for layer in range(len(cut.trained))
        )
        shapes = [Pair(*(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in pair)) for pair in self._shapes()]
        self._pairs: list[Pair] = shapes
        self._sums: list[Pair] = shapes
        self._numbers: Any = None
        self._moments: tuple[Any, ...] = ()
        self._update: TrainingProgram | None = None

    # What it needs, and what it is.

    @property
    def parameters(self) -> int:
        """The number of the adapter's numbers."""
        return sum(matrix.parameters(self._rank) for matrix in self._matrices)

    @property
    def device_bytes(self) -> int:
        """The bytes of its own arrays on the device; what a micro-batch takes comes on top."""
        arrays = [self._numbers, *self._moments, *jax.tree.leaves([self._pairs, self._sums])]
        return sum(array.nbytes for array in arrays if isinstance(array, jax.Array))

    def need(self, shape: TrainingShape) -> TrainingNeed:
        """Return the memory of a training with micro-batches of this shape."""
        cut = self._cut.cut
        parameters = sum(math.prod(matrix_shape(leaf)) for leaf in cut.leaves)
        return need_of(cut.graph.config, self._matrices, self._rank, shape, parameters)

    def _room(self, shape: TrainingShape) -> int:
        """Return the bytes that layers may keep for their derivatives."""
        return room_of(self.need(shape))

    def begin(self, state: TrainerState | None, seed: int) -> None:
        """Put a state on the device: a new one, or one that was kept."""
        if state is None:
            numbers = np.concatenate(
                [leaf.ravel() for pair in initial_pairs(self._matrices, self._rank, seed) for leaf in pair]
            )
            self._numbers = jax.device_put(numbers)
            self._moments = tuple(jnp.asarray(leaf) for leaf in jax.tree.leaves(self._optimizer.init(self._numbers)))
        else:
            self._numbers = jax.device_put(state.numbers)
            self._moments = tuple(jax.device_put(leaf) for leaf in state.moments)
        host = np.asarray(self._numbers)
        self._pairs = jax.device_put(_split(host, self._shapes()))
        self._sums = jax.device_put(
            [Pair(*(np.zeros(leaf.shape, np.float32) for leaf in pair)) for pair in self._shapes()]
        )

    def fits(self, state: TrainerState) -> bool:
        """True if a state is one of this training."""
        shapes = jax.eval_shape(self._optimizer.init, jax.ShapeDtypeStruct((self.parameters,), np.float32))
        expected = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes)]
        return state.numbers.shape == (self.parameters,) and expected == [
            (one.shape, one.dtype) for one in state.moments
        ]

    def end(self) -> None:
        """Let its memory on the device go."""
        self._numbers, self._moments, self._pairs, self._sums = None, (), [], []
        self._programs.clear()
        self._update = None

    def state(self) -> TrainerState:
        """Return everything in host memory."""
        return TrainerState(np.array(self._numbers), tuple(np.array(leaf) for leaf in self._moments))

    def adapter(self, name: str, numbers: Matrices | None = None) -> Adapter:
        """Return the adapter as it is now, or of a state's numbers."""
        pairs = _split(np.array(self._numbers) if numbers is None else numbers, self._shapes())
        products: dict[str, list[Product | None]] = {}
        for matrix, (down, up) in zip(self._matrices, pairs, strict=True):
            of_site: list[Product | None] = [None] * len(matrix.site.modules)
            row = 0
            for place, index in enumerate(matrix.modules):
                own = up[row : row + matrix.site.rows[index]] * np.float32(self._cut.scale)
                of_site[index] = Product(down[place * self._rank : (place + 1) * self._rank], own)
                row += matrix.site.rows[index]
            products[matrix.site.path] = of_site
        cut = self._cut.cut
        return replace(adapter_of(name, products), trained_on=precision_name(cut.graph, cut.leaves))

    # Programs. They are made in the thread of the training, while streams go on.

    def prepare(self, shape: TrainingShape) -> None:
        """Make the programs of a shape, or load them."""
        if shape in self._programs:
            return
        cut, layered, leaves = self._cut, self._cut.cut, self._cut.cut.leaves
        outer = tuple(leaves[index] for index in layered.outer)
        rows = jax.ShapeDtypeStruct((shape.rows, shape.tokens), np.int32), jax.ShapeDtypeStruct((shape.rows,), np.int32)
        opening = self._made(shape, "opening", cut.opening, (outer, *rows))
        opened = jax.eval_shape(cut.opening, outer, *rows)
        x, keys, known = opened.x, dict[int, Any](), dict[int, tuple[Any, KeptArrays]]()
        for layer, kind in enumerate(cut.kinds):
            if kind == layer or layer in cut.shared:
                operands = self._operands(leaves, layer, self._pairs, x, keys, opened.tables, opened.own)
                x, keys[layer], _ = jax.eval_shape(cut.layer(layer, shape), *operands)
            if kind == layer:
                known[layer] = operands, cut.kept(layer, shape, *operands)
        made: dict[tuple[int, bool], tuple[TrainingProgram, TrainingProgram]] = {}
        places, room = list[tuple[int, bool]](), self._room(shape)
        for kind in cut.kinds:
            operands, arrays = known[kind]
            keeps = arrays.size <= room
            room -= arrays.size if keeps else 0
            places.append((kind, keeps))
            if places[-1] in made:
                continue
            wanted, part = arrays.wanted if keeps else (), f"layer {kind}{' kept' * keeps}"
            function = cut.layer(kind, shape, wanted)
            forward = self._made(shape, part, function, operands)
            found = jax.eval_shape(function, *operands)
            before = found.x, operands[3], operands[1], found.kept
            back = self._made(
                shape, f"{part} back", cut.layer_back(kind, shape, wanted), (*before, *operands, found.keys), (0, 2)
            )
            made[kind, keeps] = forward, back
        ints = jax.ShapeDtypeStruct((shape.chosen,), np.int32)
        floats = jax.ShapeDtypeStruct((shape.chosen,), np.float32)
        logprobs = self._made(shape, f"c{shape.chosen}", cut.logprobs, (outer, x, ints, ints))
        backwards = x, outer, x, ints, ints, floats
        logprobs_back = self._made(shape, f"c{shape.chosen} back", cut.logprobs_back, backwards, (0,))
        layers = tuple(made[place] for place in places)
        forwards, backs = tuple(one[0] for one in layers), tuple(one[1] for one in layers)
        self._programs[shape] = ShapePrograms(opening, forwards, backs, logprobs, logprobs_back)

    def prepare_update(self) -> None:
        """Make the program of the optimiser. One of the caller's is not stored: its name says nothing of it."""
        numbers = jax.ShapeDtypeStruct((self.parameters,), np.float32)
        moments = jax.eval_shape(self._optimizer.init, numbers)
        operands = numbers, tuple(jax.tree.leaves(moments)), self._shapes(), jax.ShapeDtypeStruct((), np.float32)
        name = f"{self._name} update"
        function = self._updating(jax.tree.structure(moments))
        self._update = self._owner.program(name, function, operands, (0, 1, 2), stored=not self._own)

    def _made(
        self, shape: TrainingShape, part: str, function: Any, operands: Any, donated: tuple[int, ...] = ()
    ) -> TrainingProgram:
        return self._owner.program(f"{self._name} {shape.name} {part}", function, operands, donated)

    def _operands(
        self,
        leaves: Sequence[Any],
        layer: int,
        pairs: Sequence[Pair],
        x: Any,
        keys: Mapping[int, Any],
        tables: Any,
        own: Any,
    ) -> tuple[Any, ...]:
        """Return the operands of a layer's program."""
        cut = self._cut
        source = cut.reads(layer)
        mine: Pairs = {self._matrices[index].name: pairs[index] for index in self._of_layers[layer]}
        of_layer = tuple(leaves[index] for index in cut.cut.layers[layer])
        return of_layer, mine, x, () if source is None else keys[source], tables, own[layer : layer + 1]

    # Steps.

    def logprobs(self, leaves: Sequence[jax.Array], batch: MicroBatch) -> Generator[None, None, list[Floats]]:
        """Compute the log-probabilities of each line's learned tokens, without the adapter."""
        nothing = [Pair(*(jnp.zeros(leaf.shape, jnp.float32) for leaf in pair)) for pair in self._shapes()]
        programs, outer = self._programs[batch.shape], self._outer(leaves)
        passed = yield from self._forward(leaves, nothing, batch, back=False)
        return (yield from self._chosen(programs, outer, passed.xs[-1], batch))

    def accumulate(self, leaves: Sequence[jax.Array], batch: MicroBatch, loss: Loss) -> Generator[None, None, float]:
        """Add a micro-batch's gradients to the step's. Return its part of the loss."""
        programs, outer = self._programs[batch.shape], self._outer(leaves)
        passed = yield from self._forward(leaves, self._pairs, batch, back=True)
        x = passed.xs.pop()
        if loss.ahead:
            weighed = loss.weigh(batch.lines, [np.zeros(count) for count in batch.counts])
        else:
            weighed = loss.weigh(batch.lines, (yield from self._chosen(programs, outer, x, batch)))
        weights = np.zeros(len(batch.places), np.float32)
        weights[: sum(batch.counts)] = np.concatenate(weighed.weights)
        change, size, found = jnp.zeros_like(x), batch.shape.chosen, list[NDArray[np.float32]]()
        for start in range(0, len(batch.places), size):
            part = slice(start, start + size)
            change, of_part = programs.logprobs_back(
                change, outer, x, batch.places[part], batch.targets[part], weights[part]
            )
            found.append(np.asarray(of_part))
            yield
        value = weighed.value
        if loss.ahead:
            value = loss.weigh(batch.lines, _lines(found, batch.counts)).value
        yield from self._backward(leaves, batch, passed, change)
        return value

    def update(self, rate: float) -> Generator[None, None, tuple[float, bool]]:
        """Take a step with the gradients so far. Return their norm, and whether it was finite."""
        assert self._update is not None, "prepared"
        yield  # nothing may stop the training between the step and its record
        self._numbers, self._moments, self._pairs, self._sums, norm = self._update(
            self._numbers, self._moments, self._sums, np.float32(rate)
        )
        length = float(norm)
        return length, bool(np.isfinite(length))

    def _outer(self, leaves: Sequence[jax.Array]) -> tuple[Any, ...]:
        return tuple(leaves[index] for index in self._cut.cut.outer)

    def _forward(
        self, leaves: Sequence[jax.Array], pairs: Sequence[Pair], batch: MicroBatch, *, back: bool
    ) -> Generator[None, None, _ForwardArrays]:
        programs = self._programs[batch.shape]
        opened = programs.opening(self._outer(leaves), batch.tokens, batch.lengths)
        passed = _ForwardArrays([opened.x], {}, [], opened.tables, opened.own)
        for layer, program in enumerate(programs.layers):
            operands = self._operands(leaves, layer, pairs, passed.xs[-1], passed.keys, passed.tables, passed.own)
            found: LayerResult = program(*operands)
            if found.keys:
                passed.keys[layer] = found.keys
            if back:
                passed.kept.append(found.kept)
            passed.xs.append(jax.block_until_ready(found.x))
            yield
        return passed

    def _backward(
        self, leaves: Sequence[jax.Array], batch: MicroBatch, passed: _ForwardArrays, change: Any
    ) -> Generator[None, None, None]:
        changes = {layer: tuple(jnp.zeros_like(array) for array in keys) for layer, keys in passed.keys.items()}
        for layer, program in reversed(list(enumerate(self._programs[batch.shape].back))):
            operands = self._operands(
                leaves, layer, self._pairs, passed.xs.pop(), passed.keys, passed.tables, passed.own
            )
            source = self._cut.reads(layer)
            sums: Pairs = {self._matrices[index].name: self._sums[index] for index in self._of_layers[layer]}
            read = () if source is None else changes[source]
            kept = passed.kept.pop()
            change, read, sums = program(change, read, sums, kept, *operands, changes.get(layer, ()))
            if source is not None:
                changes[source] = read
            for index in self._of_layers[layer]:
                self._sums[index] = sums[self._matrices[index].name]
            jax.block_until_ready(change)
            del operands, kept  # before the next layer's are computed
            yield

    def _chosen(
        self, programs: ShapePrograms, outer: Any, x: Any, batch: MicroBatch
    ) -> Generator[None, None, list[Floats]]:
        found: list[NDArray[np.float32]] = []
        for start in range(0, len(batch.places), batch.shape.chosen):
            part = slice(start, start + batch.shape.chosen)
            found.append(np.asarray(programs.logprobs(outer, x, batch.places[part], batch.targets[part])))
            yield
        return _lines(found, batch.counts)

    def _shapes(self) -> list[Pair]:
        return [
            Pair(
                jax.ShapeDtypeStruct((len(matrix.modules) * self._rank, matrix.site.inputs), np.float32),
                jax.ShapeDtypeStruct((matrix.outputs, self._rank), np.float32),
            )
            for matrix in self._matrices
        ]

    def _updating(self, structure: Any) -> Any:
        def update(numbers: Any, moments: Any, sums: Any, rate: Any) -> Any:
            import optax

            gradient = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(sums)])
            norm = jnp.sqrt(jnp.sum(gradient * gradient))
            changes, new = self._optimizer.update(gradient, jax.tree.unflatten(structure, moments), numbers)
            moved = optax.apply_updates(numbers, changes if self._own else -rate * changes)
            finite = jnp.isfinite(norm)
            moved = jnp.where(finite, moved, numbers)
            kept = tuple(jnp.where(finite, a, b) for a, b in zip(jax.tree.leaves(new), moments, strict=True))
            pairs, at = [], 0
            for shapes in self._shapes():
                leaves = []
                for shape in shapes:
                    leaves.append(moved[at : at + shape.size].reshape(shape.shape))
                    at += shape.size
                pairs.append(Pair(*leaves))
            return moved, kept, pairs, jax.tree.map(jnp.zeros_like, sums), norm

        return update


class _ForwardArrays(NamedTuple):
    """A forward pass: the inputs of all layers and the output of the last, and what else is kept of each layer."""

    xs: list[Any]
    keys: dict[int, Any]
    kept: list[tuple[Any, ...]]
    tables: Any
    own: Any


def _standard() -> GradientTransformation:
    """Return Adam's direction after a limit of the gradient's length; the training multiplies by its own rates."""
    import optax

    return optax.chain(optax.clip_by_global_norm(_LARGEST_NORM), optax.scale_by_adam())


def _split(numbers: Matrices, shapes: Sequence[Pair]) -> list[Pair]:
    pairs, at = [], 0
    for pair in shapes:
        leaves = []
        for shape in pair:
            leaves.append(numbers[at : at + shape.size].reshape(shape.shape))
            at += shape.size
        pairs.append(Pair(*leaves))
    return pairs


def _lines(values: Sequence[NDArray[np.float32]], counts: Sequence[int]) -> list[Floats]:
    """Return the log-probabilities of each line."""
    every = np.concatenate(values).astype(np.float64)
    ends = np.cumsum(counts)
    return [every[end - count : end] for end, count in zip(ends, counts, strict=True)]
