"""The programs of an encoder of pictures: its beginning, one layer, one level and its end, in a few sizes.

All layers have the same shapes and share one program, as all levels do. So little is compiled, and on a device with a
queue of its own steps run between two layers of a large picture. Programs are kept in the store of the session's
programs.

Axes: N patches of a bucket, T its tokens, E hidden size of the language model.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from rekindle._src.models.vision.inputs import ImagePatches, PatchBatch
from rekindle._src.models.vision.layers import PatchPass
from rekindle._src.models.vision.tower import AbstractTower, merge_tower, pack_images
from rekindle._src.programs.store import Executables
from rekindle.errors import StoreError

_REPEATED = ("layers", "mergers")  # modules of which a tower has several, all of the same shapes
_SMALLEST = 64  # patches of a bucket
Leaves = Sequence[Array]


def buckets(whole: int) -> Iterator[int]:
    """Yield the sizes of buckets in patches, each half as large again as the one before: multiples of `whole`."""
    size = -(-_SMALLEST // whole) * whole
    while True:
        yield size
        size = -(-size * 3 // (2 * whole)) * whole


def bucket_of(patches: int, whole: int) -> int:
    """Return the size of the bucket for so many patches."""
    return next(size for size in buckets(whole) if size >= patches)


class EncoderPrograms:
    """Encodes pictures with the leaves of a tower. One thread calls it at a time."""

    def __init__(self, tower: AbstractTower, leaves: Leaves, store: Executables) -> None:
        self._graph, self._config, self._shapes, self._store = tower.graph, tower.graph.config, tower.shapes, store
        self._places: dict[str, list[list[int]]] = {module: [] for module in (*_REPEATED, "")}
        self._places[""].append([])
        for index, path in enumerate(tower.graph.paths):
            module, _, rest = path.partition(".")
            if module in _REPEATED:
                number = int(rest.partition(".")[0])
                several = self._places[module]
                several += [[] for _ in range(number + 1 - len(several))]
                several[number].append(index)
            else:
                self._places[""][0].append(index)
        self._leaves = {
            module: [tuple(leaves[index] for index in places) for places in several]
            for module, several in self._places.items()
        }
        self._compiled: dict[str, Any] = {}
        self.compilations = 0

    def __call__(self, images: Sequence[ImagePatches]) -> NDArray[Any]:
        """Return the rows of pictures or tiles, one after the other [1 + levels, tokens, E]."""
        patches, whole = sum(image.grid.patches for image in images), self._config.patches_of_token
        bucket = bucket_of(patches, whole)
        packed = PatchBatch(*map(jnp.asarray, pack_images(images, self._config, bucket)))
        rows = self._encoded(packed, bucket, self._run)
        return np.stack([np.asarray(one)[: patches // whole] for one in rows])

    def make(self, images: Sequence[ImagePatches]) -> None:
        """Make the programs of the bucket that these pictures need, without running them."""
        bucket = bucket_of(sum(image.grid.patches for image in images), self._config.patches_of_token)
        packed = pack_images(images, self._config, bucket)
        shapes = PatchBatch(*(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in packed))
        self._encoded(shapes, bucket, self._shaped)

    def _encoded(self, batch: Any, bucket: int, run: Callable[..., Any]) -> list[Any]:
        """Run the encoder part by part: return its tokens and its levels, all [T, E]."""
        (outer,) = self._leaves[""]
        x, shared = run("begin", bucket, self._begin, outer, batch)
        levels: list[Any] = []
        for number, leaves in enumerate(self._leaves["layers"]):
            x = run("layer", bucket, self._layer, leaves, x, shared)
            if number in self._config.deepstack:
                levels.append(run("level", bucket, self._level, self._leaves["mergers"][len(levels)], x, batch))
        return [run("end", bucket, self._end, outer, x, batch), *levels]

    def _tower(self, module: str, leaves: Leaves) -> Any:
        """Return the tower with the leaves of one part, the first of several; all others are shapes alone."""
        merged: list[Any] = list(self._shapes)
        for index, leaf in zip(self._places[module][0], leaves, strict=True):
            merged[index] = leaf
        return merge_tower(self._graph, merged)

    def _begin(self, outer: Leaves, batch: PatchBatch) -> tuple[Array, PatchPass]:
        x, shared = self._tower("", outer).begin(batch)
        return x, shared

    def _layer(self, leaves: Leaves, x: Array, shared: PatchPass) -> Array:
        y: Array = self._tower("layers", leaves).layers[0](x, shared)
        return y

    def _level(self, leaves: Leaves, x: Array, batch: PatchBatch) -> Array:
        rows: Array = self._tower("mergers", leaves).level(0, x, batch)
        return rows

    def _end(self, outer: Leaves, x: Array, batch: PatchBatch) -> Array:
        rows: Array = self._tower("", outer).end(x, batch)
        return rows

    def _run(self, part: str, bucket: int, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._program(part, bucket, function, arguments)(*arguments)

    def _shaped(self, part: str, bucket: int, function: Callable[..., Any], *arguments: Any) -> Any:
        self._program(part, bucket, function, arguments)
        return jax.eval_shape(function, *arguments)

    def _program(self, part: str, bucket: int, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Return a program: one that was made before, the stored one, or one that is compiled now and stored."""
        name = f"pictures {part} {bucket}"
        compiled = self._compiled.get(name)
        if compiled is None:
            with contextlib.suppress(StoreError):
                compiled = self._store.load(name)
        if compiled is None:
            start = time.perf_counter()
            compiled = jax.jit(function).lower(*arguments).compile()
            self.compilations += 1
            self._store.save(name, compiled, time.perf_counter() - start)
        self._compiled[name] = compiled
        return compiled
