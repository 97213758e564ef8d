"""The programs of an encoder of pictures, in a few sizes, kept in the store of the session's programs.

A picture is encoded in steps of some rows each (`models.vision.steps`), so that a large one holds nobody up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.vision.inputs import ImagePatches, PatchBatch
from rekindle._src.models.vision.steps import TowerStep, rows_for, run_steps, tower_steps
from rekindle._src.models.vision.tower import AbstractTower, pack_images
from rekindle._src.programs.store import Executables
from rekindle.errors import StoreError

OPERATIONS = 2e9  # additions and multiplications of a step: a twentieth of a second on two cores
_SMALLEST = 64  # patches of a bucket


def buckets(whole: int) -> Iterator[int]:
    """Yield the sizes of buckets in patches, each half as large again as the one before: multiples of `whole`."""
    size = -(-_SMALLEST // whole) * whole
    while True:
        yield size
        size = -(-size * 3 // (2 * whole)) * whole


def bucket_of(patches: int, whole: int) -> int:
    """Return the size of the bucket for so many patches."""
    return next(size for size in buckets(whole) if size >= patches)


class EncodingPrograms:
    """Encodes pictures with the leaves of a tower. One thread calls it at a time."""

    def __init__(self, tower: AbstractTower, leaves: Sequence[Any], store: Executables) -> None:
        self._tower, self._leaves, self._store = tower, leaves, store
        self._config = tower.graph.config
        self._compiled: dict[str, Any] = {}
        self.compilations = 0

    def __call__(self, images: Sequence[ImagePatches]) -> NDArray[Any]:
        """Return the rows of pictures or tiles, one after the other [1 + levels, tokens, E]."""
        patches, whole = sum(image.grid.patches for image in images), self._config.patches_of_token
        bucket = bucket_of(patches, whole)
        packed = PatchBatch(*map(jnp.asarray, pack_images(images, self._config, bucket)))
        rows = rows_for(self._tower.graph, bucket, OPERATIONS)
        steps = tower_steps(self._tower, self._leaves, packed, rows)
        embeddings = run_steps(steps, lambda step: self._program(step, bucket, rows)(*step.arguments))
        count = patches // whole
        first = np.asarray(embeddings.tokens)[None, :count]
        return np.concatenate([first, np.asarray(embeddings.levels)[:, :count]])

    def make(self, images: Sequence[ImagePatches]) -> None:
        """Make the programs of the bucket that such pictures need, without running them."""
        bucket = bucket_of(sum(image.grid.patches for image in images), self._config.patches_of_token)
        packed = pack_images(images, self._config, bucket)
        shapes = PatchBatch(*(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in packed))
        rows = rows_for(self._tower.graph, bucket, OPERATIONS)

        def shaped(step: TowerStep) -> Any:
            self._program(step, bucket, rows)
            return jax.eval_shape(step.function, *step.arguments)

        run_steps(tower_steps(self._tower, self._leaves, shapes, rows), shaped)

    def _program(self, step: TowerStep, bucket: int, rows: int) -> Any:
        """Return a program: one that was made before, the stored one, or one that is compiled now and stored."""
        name = f"pictures {step.name} {bucket} by {rows}"
        compiled = self._compiled.get(name)
        if compiled is None:
            with contextlib.suppress(StoreError):
                compiled = self._store.load(name)
        if compiled is None:
            start = time.perf_counter()
            compiled = jax.jit(step.function, donate_argnums=step.donated).lower(*step.arguments).compile()
            self.compilations += 1
            self._store.save(name, compiled, time.perf_counter() - start)
        self._compiled[name] = compiled
        return compiled
