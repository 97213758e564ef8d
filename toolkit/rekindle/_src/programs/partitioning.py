"""The layout of a program's operands and results on the devices of a mesh: the one place that wraps programs for it.

A program is written for one device: its shapes are local ones, and its layers communicate with other devices
(`models/nn/shards.py`). To run a new kind of program on a mesh, declare the layout of each operand and result, in the
`Recipe` that `Programs` makes of it; nothing else is needed:

    WEIGHTS   the leaves of the model, each by its role
    PAGES     KV pages (a pytree of them), divided by kv heads
    PAYLOAD   pages in transfers to or from the host, divided by kv heads
    ROWS      uploads, request state, masks, tokens and all else of rows or slots: the same on every device,
              and with several data shards one part for each of them along the first axis
    POOLED    the same with the parts along the second axis
    WHOLE     the same on every device

A recipe's arguments that are ROWS or PAYLOAD have the shapes of one data shard.

Without a placement nothing is wrapped, and programs are those of one device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from rekindle._src.core.mesh_shape import DATA
from rekindle._src.models.placement import Placement
from rekindle._src.models.roles import ALL
from rekindle._src.programs import kv_layout as paged


class DeviceLayout(enum.Enum):
    """The layout of an operand or a result on the devices of a mesh."""

    WEIGHTS = enum.auto()
    PAGES = enum.auto()
    PAYLOAD = enum.auto()
    ROWS = enum.auto()
    POOLED = enum.auto()
    WHOLE = enum.auto()


WEIGHTS, PAGES, PAYLOAD = DeviceLayout.WEIGHTS, DeviceLayout.PAGES, DeviceLayout.PAYLOAD
ROWS, POOLED, WHOLE = DeviceLayout.ROWS, DeviceLayout.POOLED, DeviceLayout.WHOLE
_KV_HEADS = 2  # the axis of a layer's pages, and of their scales
PAYLOAD_HEADS = 3


class Recipe(NamedTuple):
    """A program as it is traced for one device, and the layout of its operands and results on several."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # the shapes of whole arrays that the caller of one data shard passes
    donated: tuple[int, ...]
    operands: tuple[DeviceLayout, ...]
    results: Any  # DeviceLayout, or a tree of them


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """Wraps programs for a mesh, and pages in transfers between it and the host. On one device it changes nothing."""

    placement: Placement | None = None

    def wrap(self, recipe: Recipe, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, the recipe's with any wrappers, in the form that runs on all devices."""
        if self.placement is None:
            return function
        operands = tuple(
            self.spec(kind, argument) for kind, argument in zip(recipe.operands, recipe.arguments, strict=True)
        )
        results = jax.tree.map(self.spec, recipe.results)
        wrapped: Callable[..., Any] = jax.shard_map(
            function, mesh=self.placement.mesh, in_specs=operands, out_specs=results, check_vma=False
        )
        return wrapped

    def tracing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the mesh in which to trace; a user's `jax.set_mesh` would interfere."""
        return contextlib.nullcontext() if self.placement is None else jax.set_mesh(self.placement.mesh)

    def arguments(self, recipe: Recipe) -> tuple[Any, ...]:
        """Return the recipe's arguments with their shardings."""
        if self.placement is None:
            return recipe.arguments
        return tuple(map(self._placed, recipe.operands, recipe.arguments))

    def pages(self, one: paged.KV) -> paged.KV:
        """Return the pages of all devices together, from the shapes of one device's."""
        if self.placement is None:
            return one
        count = self.placement.partition.size

        def whole(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = list(leaf.shape)
            shape[0] *= self.shards
            shape[_KV_HEADS] *= count
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        pages: paged.KV = jax.tree.map(whole, one)
        return pages

    @property
    def shards(self) -> int:
        """The number of data shards."""
        return 1 if self.placement is None else self.placement.data

    @property
    def multi_process(self) -> bool:
        """True if several processes share the devices."""
        return self.placement is not None and self.placement.processes > 1

    @property
    def copies(self) -> int:
        """The number of devices that have the same kv heads."""
        return 1 if self.placement is None else self.placement.partition.kv_copies(self.placement.config)

    def whole_everywhere(self, recipe: Recipe) -> Recipe:
        """Return the recipe of a payload, changed so that each of several processes gets the whole."""

        def whole(*arguments: Any) -> Any:
            return jax.tree.map(
                lambda leaf: lax.all_gather(leaf, ALL, axis=PAYLOAD_HEADS, tiled=True), recipe.function(*arguments)
            )

        return recipe._replace(function=whole, results=WHOLE)

    def payload_layout(self, kv: paged.KV) -> list[tuple[tuple[int, ...], Any]]:
        """Return shape and dtype of each array of one page on the host, which do not depend on the mesh."""
        layout = []
        for shape, dtype in paged.payload_layout(kv):
            heads = shape[PAYLOAD_HEADS] // self.copies
            layout.append(((*shape[:PAYLOAD_HEADS], heads, *shape[PAYLOAD_HEADS + 1 :]), dtype))
        return layout

    def heads_of(self, process: int, kv: paged.KV) -> np.ndarray:
        """Return the indices of a payload's kv heads, copies on devices included, that a process's devices have."""
        assert self.placement is not None, "one device"
        per_device = paged.payload_layout(kv)[0][0][PAYLOAD_HEADS] // self.placement.partition.size
        places = np.array(self.placement.positions(process))
        heads: np.ndarray = (places[:, None] * per_device + np.arange(per_device)).reshape(-1)
        return heads

    def to_host(self, payload: paged.Payload) -> list[np.ndarray[Any, Any]]:
        """Wait for a payload that this process has whole, and return it in host memory, with each kv head once."""
        arrays = [np.asarray(leaf) for leaf in payload]
        return arrays if self.copies == 1 else [array[:, :, :, :: self.copies] for array in arrays]

    def to_device(self, payload: paged.Payload) -> paged.Payload:
        """Return a page from the host in the form that `scatter` takes: with a copy of each kv head for each device."""
        if self.copies == 1:
            return payload
        return tuple(np.repeat(leaf, self.copies, axis=PAYLOAD_HEADS) for leaf in payload)

    def spec(self, kind: DeviceLayout, argument: Any = None) -> Any:
        """Return the partition of this layout. For WEIGHTS, `argument` are the leaves."""
        assert self.placement is not None, "one device"
        if kind is WEIGHTS:
            return self.placement.specs(argument)
        over = DATA if self.shards > 1 else None
        if kind is PAGES:
            return PartitionSpec(over, *[None] * (_KV_HEADS - 1), ALL)
        if kind is PAYLOAD:
            return PartitionSpec(over, *[None] * (PAYLOAD_HEADS - 1), ALL)
        if over is None or kind is WHOLE:
            return PartitionSpec()
        return PartitionSpec(None, over) if kind is POOLED else PartitionSpec(over)

    def _placed(self, kind: DeviceLayout, argument: Any) -> Any:
        assert self.placement is not None, "one device"
        placement, spec = self.placement, self.spec(kind, argument)
        if kind is WEIGHTS:
            return tuple(
                jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement.sharding(leaf_spec))
                for leaf, leaf_spec in zip(argument, spec, strict=True)
            )
        sharding = placement.sharding(spec)
        times = self.shards if kind in (ROWS, PAYLOAD) else 1

        def lying(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = (leaf.shape[0] * times, *leaf.shape[1:]) if times > 1 else leaf.shape
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(lying, argument)
