"""How the operands and results of a program lie on the devices of a mesh: the one place that wraps programs for it.

A program is written for one device: its shapes are local ones, and what it needs of other devices its layers ask for
(`models/nn/shards.py`). To run a new kind of program on a mesh, declare how each operand and result lies, in the
`Recipe` that `Programs` makes of it; nothing else is needed:

    WEIGHTS   the leaves of the model, each as its role says
    PAGES     KV pages (a pytree of them), divided by kv heads
    PAYLOAD   pages on their way to or from the host, divided by kv heads
    ROWS      uploads, request state, masks, tokens and what else belongs to rows or slots: the same on every device,
              and with several data shards one part for each of them along the first axis
    POOLED    the same with the parts along the second axis
    WHOLE     the same on every device

A recipe's arguments that are ROWS or PAYLOAD have the shapes of one data shard.

Without a placement nothing is wrapped, and programs are what they are for one device.
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


class Lies(enum.Enum):
    """How an operand or a result lies on the devices of a mesh."""

    WEIGHTS = enum.auto()
    PAGES = enum.auto()
    PAYLOAD = enum.auto()
    ROWS = enum.auto()
    POOLED = enum.auto()
    WHOLE = enum.auto()


WEIGHTS, PAGES, PAYLOAD = Lies.WEIGHTS, Lies.PAGES, Lies.PAYLOAD
ROWS, POOLED, WHOLE = Lies.ROWS, Lies.POOLED, Lies.WHOLE
_KV_HEADS = 2  # the axis of a layer's pages, and of their scales
PAYLOAD_HEADS = 3


class Recipe(NamedTuple):
    """A program as it is traced for one device, and how what it takes and gives lies on several."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # shapes as the caller of one data shard passes them: those of whole arrays
    donated: tuple[int, ...]
    operands: tuple[Lies, ...]
    results: Any  # Lies, or a tree of them


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """Wraps programs for a mesh, and pages on their way between it and the host; on one device it changes nothing."""

    placement: Placement | None = None

    def wrap(self, recipe: Recipe, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which is the recipe's with whatever was put around it, as it runs on all devices."""
        if self.placement is None:
            return function
        operands = tuple(
            self.spec(kind, argument) for kind, argument in zip(recipe.operands, recipe.arguments, strict=True)
        )
        made = jax.tree.map(self.spec, recipe.results)
        wrapped: Callable[..., Any] = jax.shard_map(
            function, mesh=self.placement.mesh, in_specs=operands, out_specs=made, check_vma=False
        )
        return wrapped

    def tracing(self) -> contextlib.AbstractContextManager[Any]:
        """The mesh in which to trace; a `jax.set_mesh` of the user's would be in the way."""
        return contextlib.nullcontext() if self.placement is None else jax.set_mesh(self.placement.mesh)

    def arguments(self, recipe: Recipe) -> tuple[Any, ...]:
        """The recipe's arguments with where they lie."""
        if self.placement is None:
            return recipe.arguments
        return tuple(map(self._placed, recipe.operands, recipe.arguments))

    def pages(self, one: paged.KV) -> paged.KV:
        """The pages of all devices together, from the shapes of one device's."""
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
        """How many data shards there are."""
        return 1 if self.placement is None else self.placement.data

    @property
    def several(self) -> bool:
        """Whether several processes share the devices."""
        return self.placement is not None and self.placement.processes > 1

    @property
    def copies(self) -> int:
        """How many devices have the same kv heads."""
        return 1 if self.placement is None else self.placement.partition.kv_copies(self.placement.config)

    def whole_everywhere(self, recipe: Recipe) -> Recipe:
        """A recipe that gives a payload, of which each of several processes gets the whole."""

        def whole(*arguments: Any) -> Any:
            return jax.tree.map(
                lambda leaf: lax.all_gather(leaf, ALL, axis=PAYLOAD_HEADS, tiled=True), recipe.function(*arguments)
            )

        return recipe._replace(function=whole, results=WHOLE)

    def payload_layout(self, kv: paged.KV) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of each array of one page on the host, where the mesh makes no difference."""
        found = []
        for shape, dtype in paged.payload_layout(kv):
            heads = shape[PAYLOAD_HEADS] // self.copies
            found.append(((*shape[:PAYLOAD_HEADS], heads, *shape[PAYLOAD_HEADS + 1 :]), dtype))
        return found

    def heads_of(self, process: int, kv: paged.KV) -> np.ndarray:
        """Which of a payload's kv heads, as often as devices have them, lie on the devices of a process."""
        assert self.placement is not None, "one device"
        each = paged.payload_layout(kv)[0][0][PAYLOAD_HEADS] // self.placement.partition.size
        places = np.array(self.placement.positions(process))
        heads: np.ndarray = (places[:, None] * each + np.arange(each)).reshape(-1)
        return heads

    def to_host(self, payload: paged.Payload) -> list[np.ndarray[Any, Any]]:
        """A payload that this process has as a whole, in host memory and with each kv head once; waits for it."""
        arrays = [np.asarray(leaf) for leaf in payload]
        return arrays if self.copies == 1 else [array[:, :, :, :: self.copies] for array in arrays]

    def to_device(self, payload: paged.Payload) -> paged.Payload:
        """A page from the host as `scatter` takes it: with each kv head as often as devices have it."""
        if self.copies == 1:
            return payload
        return tuple(np.repeat(leaf, self.copies, axis=PAYLOAD_HEADS) for leaf in payload)

    def spec(self, kind: Lies, argument: Any = None) -> Any:
        """How what lies so is divided; `argument` are the leaves of WEIGHTS."""
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

    def _placed(self, kind: Lies, argument: Any) -> Any:
        assert self.placement is not None, "one device"
        placement, spec = self.placement, self.spec(kind, argument)
        if kind is WEIGHTS:
            return tuple(
                jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement.sharding(one))
                for leaf, one in zip(argument, spec, strict=True)
            )
        sharding = placement.sharding(spec)
        times = self.shards if kind in (ROWS, PAYLOAD) else 1

        def lying(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = (leaf.shape[0] * times, *leaf.shape[1:]) if times > 1 else leaf.shape
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(lying, argument)
