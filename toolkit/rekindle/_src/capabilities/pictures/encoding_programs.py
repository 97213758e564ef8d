"""The programs of an encoder of pictures, which serve pictures of all sizes, in the store of the session's programs.

A picture is encoded in steps of a bounded size (`models.vision.steps`), so that a large one does not hold up others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.vision.inputs import ImagePatches, PatchGrid
from rekindle._src.models.vision.steps import TowerStep, chunks_of, encode_in_steps, one_chunk, step_sizes
from rekindle._src.models.vision.tower import AbstractTower, TowerGraph, pack_images
from rekindle._src.programs.store import CompiledProgram, Executables
from rekindle.errors import StoreError
from rekindle_kernels import current_platform, traits

R = TypeVar("R")

# Additions and multiplications of a step, and its most patches. On a CPU a twentieth of a second of one core, in which
# other programs wait for its cores; elsewhere a few milliseconds, so that starting a step costs little. Products of a
# Xeon's core, 1,024 × 4,096: of 64 rows 97 GFLOP/s in float32 and 350 to 460 in bfloat16, of 256 rows 130 and 530, of
# 512 rows 132 and 540, and with AMX 160 in float32. An encoder of that size took 0.7 times as long as with 64 rows.
CPU_STEP, AMX_STEP, OTHER_STEP = (8e9, 512), (17e9, 512), (1e11, 2048)


def _bounds(graph: TowerGraph) -> tuple[float, int]:
    """Return the work of a step, and its most patches."""
    if current_platform() != "cpu":
        return OTHER_STEP
    fast = graph.precision.weights in ("bfloat16", "float32") and traits().fast_bfloat16
    return AMX_STEP if fast else CPU_STEP


class Cancellation(Exception):
    """Ends an encoding that no caller waits for any more."""


class EncodingPrograms:
    """Makes and keeps the programs of an encoder, which need no weights. Its methods may be called in any thread."""

    def __init__(self, tower: AbstractTower, store: Executables) -> None:
        self._tower, self._store = tower, store
        self._sizes = step_sizes(tower.graph, *_bounds(tower.graph))
        self._compiled: dict[str, CompiledProgram] = {}
        self._lock = threading.Lock()
        self.compilations = 0

    def encode(
        self, leaves: Sequence[object], images: Sequence[ImagePatches], wanted: Callable[[], bool] = lambda: True
    ) -> NDArray[Any]:
        """Return the rows of pictures or tiles, one after the other [1 + levels, tokens, E].

        At most one step is in the device's queue. Raise `Cancellation` between two steps once it is not `wanted`.
        """
        config, packed = self._tower.graph.config, pack_images(images, self._tower.graph.config)

        def run(step: TowerStep[R]) -> R:
            if not wanted():
                raise Cancellation
            result: R = jax.block_until_ready(self._program(step)(*step.arguments))
            return result

        chunks = chunks_of(packed, self._sizes.chunk)
        parts = encode_in_steps(self._tower, leaves, chunks, self._sizes, run)
        # Chunks and parts have whole tokens, and only the last of a picture's parts has padding.
        count = packed.patches // config.patches_of_token
        return np.stack([np.concatenate(level)[:count] for level in (parts.tokens, *parts.levels)])

    def make(self, grid: PatchGrid, stopped: Callable[[], bool] = lambda: False) -> None:
        """Make all programs, without running them; `grid` is one that a picture may have."""
        config = self._tower.graph.config
        numbers = np.broadcast_to(np.float32(0), (grid.patches, config.patch_length))
        chunk = one_chunk(pack_images([ImagePatches(numbers, grid)], config), self._sizes.chunk)

        def shaped(step: TowerStep[R]) -> R:
            if stopped():
                raise Cancellation
            self._program(step)
            shapes: R = jax.eval_shape(step.function, *step.arguments)
            return shapes

        with contextlib.suppress(Cancellation):
            encode_in_steps(self._tower, self._tower.shapes, iter([chunk]), self._sizes, shaped)

    def _program(self, step: TowerStep[Any]) -> CompiledProgram:
        """Return a program: one that was made before, the stored one, or one that is compiled now and stored."""
        compiled = self._compiled.get(step.name)
        if compiled is not None:
            return compiled
        with self._lock:
            compiled = self._compiled.get(step.name)
            if compiled is None:
                compiled = self._compiled[step.name] = self._made(step)
        return compiled

    def _made(self, step: TowerStep[Any]) -> CompiledProgram:
        name = f"pictures {step.name} {self._sizes.rows} of {self._sizes.chunk}"
        with contextlib.suppress(StoreError):
            stored = self._store.load(name)
            if stored is not None:
                return stored
        start = time.perf_counter()
        compiled = jax.jit(step.function, donate_argnums=step.donated).lower(*step.arguments).compile()
        self.compilations += 1
        self._store.save(name, compiled, time.perf_counter() - start)
        return compiled
