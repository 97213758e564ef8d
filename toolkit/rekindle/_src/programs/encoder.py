"""The programs of an encoder of pictures: its beginning, one layer, its levels and its end, in a few sizes.

All layers have the same shapes and share one program, so little is compiled, and on a device with a queue of its own
steps run between two layers of a large picture. Programs are kept in the store of the session's programs.

Axes: N patches of a bucket, T its tokens, E hidden size of the language model.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
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

_LAYER = "layers."
_SMALLEST = 64  # patches of a bucket


def bucket_of(patches: int, whole: int) -> int:
    """Return the size of the bucket for so many patches: 64, 96, 128, 192, …, in tokens of `whole` patches."""
    size = -(-_SMALLEST // whole) * whole
    while size < patches:
        more = -(-size * 3 // (2 * whole)) * whole
        size = more if more >= patches else size * 2
    return size


class EncoderPrograms:
    """Encodes pictures with the leaves of a tower. One thread calls it at a time."""

    def __init__(self, tower: AbstractTower, leaves: Sequence[Array], store: Executables) -> None:
        self._graph, self._config, self._store = tower.graph, tower.graph.config, store
        layers: dict[int, list[int]] = {}
        rest: list[int] = []
        for index, path in enumerate(tower.graph.paths):
            if path.startswith(_LAYER):
                layers.setdefault(int(path.removeprefix(_LAYER).partition(".")[0]), []).append(index)
            else:
                rest.append(index)
        self._rest, self._layers = rest, layers
        self._outer = tuple(leaves[index] for index in rest)
        self._inner = [tuple(leaves[index] for index in layers[number]) for number in range(len(layers))]
        self._shapes = tower.shapes
        self._compiled: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.compilations = 0

    def __call__(self, images: Sequence[ImagePatches]) -> NDArray[Any]:
        """Return the rows of pictures or tiles, one after the other [1 + levels, tokens, E]."""
        config = self._config
        patches = sum(image.grid.patches for image in images)
        bucket = bucket_of(patches, config.patches_of_token)
        batch = PatchBatch(*map(jnp.asarray, pack_images(images, config, bucket)))
        x, shared = self._run("begin", bucket, self._begin, self._outer, batch)
        levels: list[Array] = []
        for number, leaves in enumerate(self._inner):
            x = self._run("layer", bucket, self._layer, leaves, x, shared)
            if number in config.deepstack:
                place = len(levels)
                levels.append(self._run(f"level {place}", bucket, self._level(place), self._outer, x, batch))
        tokens = self._run("end", bucket, self._end, self._outer, x, batch)
        count = patches // config.patches_of_token
        return np.stack([np.asarray(rows)[:count] for rows in (tokens, *levels)])

    def _tower(self, outer: Sequence[Array], inner: Sequence[Array] = ()) -> Any:
        """Return the module with these leaves; those of all layers but the first are shapes alone."""
        leaves: list[Any] = list(self._shapes)
        for index, leaf in zip(self._rest, outer, strict=False):
            leaves[index] = leaf
        for index, leaf in zip(self._layers.get(0, ()), inner, strict=False):
            leaves[index] = leaf
        return merge_tower(self._graph, leaves)

    def _begin(self, outer: Sequence[Array], batch: PatchBatch) -> tuple[Array, PatchPass]:
        x, shared = self._tower(outer).begin(batch)
        return x, shared

    def _layer(self, inner: Sequence[Array], x: Array, shared: PatchPass) -> Array:
        y: Array = self._tower((), inner).layers[0](x, shared)
        return y

    def _level(self, number: int) -> Callable[..., Array]:
        def level(outer: Sequence[Array], x: Array, batch: PatchBatch) -> Array:
            rows: Array = self._tower(outer).level(number, x, batch)
            return rows

        return level

    def _end(self, outer: Sequence[Array], x: Array, batch: PatchBatch) -> Array:
        rows: Array = self._tower(outer).end(x, batch)
        return rows

    def _run(self, part: str, bucket: int, function: Callable[..., Any], *arguments: Any) -> Any:
        name = f"pictures {part} {bucket}"
        compiled = self._compiled.get(name)
        if compiled is None:
            compiled = self._compiled[name] = self._made(name, function, arguments)
        return compiled(*arguments)

    def _made(self, name: str, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Return a program: the stored one, or one that is compiled now and stored."""
        with contextlib.suppress(StoreError):
            return self._store.load(name)
        start = time.perf_counter()
        compiled = jax.jit(function).lower(*arguments).compile()
        self.compilations += 1
        self._store.save(name, compiled, time.perf_counter() - start)
        return compiled
