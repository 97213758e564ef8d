"""Encodes in small steps, so that a large picture does not hold up others, with the same result as `tower.encode`.

Patches are cut into chunks of one size. A step computes some rows of a chunk: of the first layer's input, of a layer's
heads, of its output, or tokens. Or it computes attention from one chunk's patches to another's. How many rows and
how large a chunk is comes from how long each takes. All chunks, layers and levels share their programs, and the first
row is an argument, so an encoder has eight programs, whatever the size of a picture and however many layers it has.

The caller runs each step. Given shapes in the place of leaves and chunks, and shapes as results, the same loop meets
every program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rekindle._src.models.vision.inputs import PackedPictures, PatchBatch
from rekindle._src.models.vision.layers import PatchHeads, PatchPass, VisionTower, joined_heads
from rekindle._src.models.vision.tower import AbstractTower, TowerGraph, merge_tower
from rekindle_kernels import AttentionSums, add_keys, traits

R = TypeVar("R")
REPEATED = ("layers", "mergers")  # modules that an encoder repeats, all with the same shapes


class StepSizes(NamedTuple):
    """The patches of steps. A chunk is a multiple of the rows, and rows are whole tokens."""

    rows: int  # of steps that compute products with matrices
    chunk: int  # of attention: so many queries, and as many keys


class TowerStep(NamedTuple, Generic[R]):
    """A program, and the arguments that it is called with."""

    name: str  # of the program among those of an encoder's sizes; steps with one name differ in arguments alone
    function: Callable[..., R]
    arguments: tuple[object, ...]
    donated: tuple[int, ...] = ()  # arguments that are not used again: the result can take their memory


class StepRunner(Protocol):
    """Returns the result of a step's function for its arguments, or the result's shapes."""

    def __call__(self, step: TowerStep[R], /) -> R: ...


class ChunkSpan(NamedTuple):
    """Which patches of packed pictures a chunk has, and sees."""

    first: int  # its first patch among all
    patches: int  # their number; padding follows
    sees: tuple[int, int]  # the patches among all, from and to, that its patches attend to


class PatchChunk(NamedTuple):
    """Some patches of packed pictures."""

    batch: PatchBatch
    span: ChunkSpan


class ChunkBuffers(NamedTuple):
    """The arrays of a chunk that steps write rows of."""

    x: Array  # [C, E]: a layer's input, then its output
    heads: PatchHeads
    shared: PatchPass


class TokenParts(NamedTuple):
    """The tokens of pictures in parts of some rows, in the order of the text; the last of a chunk may have padding."""

    tokens: list[Array]
    levels: list[list[Array]]  # of each level


class TowerParts:
    """The leaves of an encoder by module: what each program needs of them, in an order that modules of a kind share."""

    def __init__(self, tower: AbstractTower) -> None:
        self.tower = tower
        self.places: dict[str, list[list[int]]] = {"": [[]], **{module: [] for module in REPEATED}}
        for place, path in enumerate(tower.graph.paths):
            module, _, rest = path.partition(".")
            number = int(rest.partition(".")[0]) if module in REPEATED else 0
            several = self.places[module if module in REPEATED else ""]
            several += [[] for _ in range(number + 1 - len(several))]
            several[number].append(place)

    @property
    def plain(self) -> VisionTower:
        """An encoder with shapes as leaves."""
        return merge_tower(self.tower.graph, self.tower.shapes)

    def leaves(self, module: str, number: int, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the leaves of one of several modules; with "", the rest of the encoder's."""
        return tuple(leaves[place] for place in self.places[module][number])

    def merged(self, module: str, leaves: Sequence[Any]) -> VisionTower:
        """Return an encoder that has these leaves in its first such module, and shapes in all others."""
        merged: list[Any] = list(self.tower.shapes)
        for place, leaf in zip(self.places[module][0], leaves, strict=True):
            merged[place] = leaf
        return merge_tower(self.tower.graph, merged)


def step_sizes(graph: TowerGraph, operations: float, most: int) -> StepSizes:
    """Return the sizes of steps of about so many additions and multiplications each, and of at most `most` patches.

    A step has whole tokens, and at least 16 patches.
    """
    config = graph.config
    E, width, joined = config.hidden_size, config.num_heads * config.head_dim, config.hidden_size * config.merge**2
    of_row = max(
        2 * E * config.patch_length,
        6 * E * width,
        2 * E * (width + 3 * config.intermediate_size),
        2 * joined * (joined + config.out_size) // config.patches_of_token,
    )
    least = -(-16 // config.patches_of_token) * config.patches_of_token
    largest = min((operations / max(1, 4 * width)) ** 0.5, most)
    rows = _doubled(least, min(operations / of_row, largest))
    return StepSizes(rows, _doubled(rows, largest))


def _doubled(least: int, most: float) -> int:
    """Return the largest of least, twice as much, … that is at most `most`; `least` if that is more."""
    return least << max(0, int(most / least).bit_length() - 1)


def chunks_of(packed: PackedPictures, size: int) -> Iterator[PatchChunk]:
    """Yield pictures in chunks of so many patches. A chunk's content is computed when it is taken."""
    for first in range(0, packed.patches, size):
        stop = min(first + size, packed.patches)
        yield PatchChunk(packed.cut(first, size), ChunkSpan(first, stop - first, packed.span(first, stop)))


def encode_in_steps(
    tower: AbstractTower, leaves: Sequence[object], chunks: Iterator[PatchChunk], sizes: StepSizes, run: StepRunner
) -> TokenParts:
    """Encode pictures in chunks, by steps that `run` runs one after the other."""
    config, parts, size = tower.graph.config, TowerParts(tower), sizes.chunk
    outer = parts.leaves("", 0, leaves)

    def step(name: str, function: Callable[..., R], *arguments: object, donated: tuple[int, ...] = ()) -> R:
        return run(TowerStep(name, functools.partial(function, parts), arguments, donated))

    def firsts(span: ChunkSpan) -> list[np.int32]:
        return [np.int32(first) for first in range(0, span.patches, sizes.rows)]

    def of_rows(function: Callable[..., R]) -> Callable[..., R]:
        return functools.partial(function, count=sizes.rows)

    spans, buffers = list[ChunkSpan](), list[ChunkBuffers]()
    for batch, span in chunks:
        x, heads, shared = step("buffers", _buffers, outer, batch)
        for first in firsts(span):
            x, shared = step("begin", of_rows(_begin), outer, batch, x, shared, first, donated=(2, 3))
        spans.append(span)
        buffers.append(ChunkBuffers(x, heads, shared))
    levels = list[list[Array]]()
    for number in range(config.num_layers):
        own = parts.leaves("layers", number, leaves)
        for at, span in enumerate(spans):
            x, heads, shared = buffers[at]
            for first in firsts(span):
                heads = step("project", of_rows(_project), own, x, heads, shared, first, donated=(2,))
            buffers[at] = ChunkBuffers(x, heads, shared)
        for at, span in enumerate(spans):
            x, heads, shared = buffers[at]
            sums = step("sums", _sums, heads.q)
            for other, seen in zip(spans, buffers, strict=True):
                if span.sees[0] < other.first + size and other.first < span.sees[1]:
                    sums = step(
                        "attend", _attend, sums, heads.q, seen.heads, shared, np.int32(other.first), donated=(0,)
                    )
            for first in firsts(span):
                x = step("mix", of_rows(_mix), own, x, sums, first, donated=(1,))
            buffers[at] = ChunkBuffers(x, heads, shared)
        if number in config.deepstack:
            own, level = parts.leaves("mergers", len(levels), leaves), list[Array]()
            for span, (x, _, _) in zip(spans, buffers, strict=True):
                for first in firsts(span):
                    level.append(step("level", of_rows(_level), own, x, first))
            levels.append(level)
    tokens = list[Array]()
    for span, (x, _, _) in zip(spans, buffers, strict=True):
        for first in firsts(span):
            tokens.append(step("end", of_rows(_end), outer, x, first))
    return TokenParts(tokens, levels)


def one_chunk(packed: PackedPictures, size: int) -> PatchChunk:
    """Return the shapes of a chunk, for steps that visit every program."""
    batch = packed.cut(0, size)
    shapes = PatchBatch(*(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in batch))
    return PatchChunk(shapes, ChunkSpan(0, 1, (0, 1)))


def _buffers(parts: TowerParts, outer: Sequence[Any], batch: PatchBatch) -> ChunkBuffers:
    config = parts.tower.graph.config
    x, shared = jax.eval_shape(lambda outer, batch: parts.merged("", outer).begin(batch), outer, batch)
    # Heads are kept in 16 bits where matrices are: then attention's products are fast, and its memory is half as large.
    narrow = parts.tower.graph.precision.weights == "bfloat16" and traits().fast_bfloat16
    dtype = jnp.dtype(jnp.bfloat16) if narrow else x.dtype
    heads = (jnp.zeros((config.num_heads, x.shape[0], config.head_dim), dtype) for _ in range(3))
    x, shared = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (x, shared))
    return ChunkBuffers(x, PatchHeads(*heads), shared)


def _sums(parts: TowerParts, q: Array) -> AttentionSums:
    return AttentionSums.none(*q.shape)


def _attend(
    parts: TowerParts, sums: AttentionSums, q: Array, seen: PatchHeads, shared: PatchPass, first: Array
) -> AttentionSums:
    starts, stops = shared.starts - first, shared.stops - first
    return add_keys(sums, q, seen.k, seen.v, starts, stops, parts.plain.layers[0].scale)


def _begin(
    parts: TowerParts, outer: Sequence[Any], batch: PatchBatch, x: Array, shared: PatchPass, first: Array, *, count: int
) -> tuple[Array, PatchPass]:
    return _put((x, shared), parts.merged("", outer).begin(_cut(batch, first, count)), first)


def _project(
    parts: TowerParts, own: Sequence[Any], x: Array, heads: PatchHeads, shared: PatchPass, first: Array, *, count: int
) -> PatchHeads:
    layer = parts.merged("layers", own).layers[0]
    return _put(heads, layer.project(*_cut((x, shared), first, count)), first, axis=1)


def _mix(parts: TowerParts, own: Sequence[Any], x: Array, sums: AttentionSums, first: Array, *, count: int) -> Array:
    rows, attended = _cut(x, first, count), _cut(sums, first, count, axis=1).result
    return _put(x, parts.merged("layers", own).layers[0].mix(rows, joined_heads(attended, rows)), first)


def _level(parts: TowerParts, own: Sequence[Any], x: Array, first: Array, *, count: int) -> Array:
    return parts.merged("mergers", own).level(0, _cut(x, first, count))


def _end(parts: TowerParts, outer: Sequence[Any], x: Array, first: Array, *, count: int) -> Array:
    return parts.merged("", outer).end(_cut(x, first, count))


def _cut(tree: Any, first: Array, count: int, axis: int = 0) -> Any:
    """Return so many rows of each array, from one on."""
    return jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, first, count, axis), tree)


def _put(whole: Any, rows: Any, first: Array, axis: int = 0) -> Any:
    """Write rows to each array, from one on."""

    def put(array: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(array, new.astype(array.dtype), first, axis)

    return jax.tree.map(put, whole, rows)
