"""The layout of a program's operands and results on the devices of a mesh: the one place that wraps programs for it.

A program is written for one device: its shapes are local ones, and its layers communicate with other devices
(`models/precision.py`). To run a new kind of program on a mesh, declare the layout of each operand and result, in the
`Recipe` that `Recipes` makes of it, by one of these names or a tree of them; nothing else is needed:

    WEIGHTS   the leaves of the model, each by its role
    PAGES     KV pages (a pytree of them), divided by kv heads
    PAYLOAD   pages in transfers to or from the host, divided by kv heads
    ROWS      uploads, request state, masks, tokens and all else of rows or slots: the same on every device,
              and with several data shards one part for each of them along the first axis
    POOLED    the same with the parts along the second axis
    HEADS     heads of attention by rows, [rows, heads, …]: divided by heads, and rows as in ROWS
    WHOLE     the same on every device
    PARTS     different on each of the devices that share a model, along an axis of its own in front
    WeightsOf the leaves of a part of a model, each by its role

A recipe's arguments that are ROWS or PAYLOAD have the shapes of one data shard.

Without a mesh nothing is wrapped, and programs run on one device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from rekindle._src.core.mesh_shape import DATA
from rekindle._src.models.base import Placement
from rekindle._src.models.config import Pages
from rekindle._src.models.placement import MeshPlacement
from rekindle._src.models.roles import ALL, Role, cut, join, local_shape
from rekindle._src.programs import kv_layout as paged


class DeviceLayout(enum.Enum):
    """The layout of an operand or a result on the devices of a mesh."""

    WEIGHTS = enum.auto()
    PAGES = enum.auto()
    PAYLOAD = enum.auto()
    ROWS = enum.auto()
    POOLED = enum.auto()
    HEADS = enum.auto()
    WHOLE = enum.auto()
    PARTS = enum.auto()


WEIGHTS, PAGES, PAYLOAD, ROWS, POOLED, HEADS, WHOLE, PARTS = DeviceLayout


@dataclasses.dataclass(frozen=True)
class WeightsOf:
    """The layout of leaves that are not the model's own; `shapes` are theirs."""

    placement: Placement
    shapes: tuple[jax.ShapeDtypeStruct, ...]


_KV_HEADS = 2  # the axis of a layer's pages, and of their scales
PAYLOAD_HEADS = 3


class Recipe(NamedTuple):
    """A program as it is traced for one device, and the layout of its operands and results on several."""

    function: Callable[..., object]
    arguments: tuple[object, ...]  # the shapes of whole arrays that the caller of one data shard passes
    donated: tuple[int, ...]
    operands: tuple[object, ...]  # of each argument a DeviceLayout, or a tree of them
    results: object  # DeviceLayout, or a tree of them


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """Wraps programs, and pages in transfers to and from the host. Here, for one device, it changes nothing."""

    @classmethod
    def of(cls, placement: Placement) -> Partitioning:
        """Return the partitioning on a model's devices."""
        return MeshPartitioning(placement) if isinstance(placement, MeshPlacement) else Partitioning()

    @property
    def divided(self) -> bool:
        """True if programs run on a mesh."""
        return False

    @property
    def in_step(self) -> bool:
        """True if steps have to wait for each other: several processes, or several data shards, run each of them."""
        return False

    @property
    def multi_process(self) -> bool:
        """True if several processes share the devices."""
        return False

    def copies(self, arrays: int, *, windows: bool = False) -> tuple[int, ...]:
        """Return for each of the arrays of a payload how many devices have the same kv heads."""
        return (1,) * arrays

    def wrap(self, recipe: Recipe, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, the recipe's with any wrappers, in the form that runs on all devices."""
        return function

    def tracing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context for tracing."""
        return contextlib.nullcontext()

    def arguments(self, recipe: Recipe) -> tuple[Any, ...]:
        """Return the recipe's arguments with their shardings."""
        return recipe.arguments

    def pages(self, one: paged.KV) -> paged.KV:
        """Return the pages of all devices together, from the shapes of one device's."""
        return one

    def payload_sharding(self, kind: str | None) -> Sharding:
        """Return a payload's sharding in memory of a kind; None is the devices' own."""
        return SingleDeviceSharding(self.first_device, memory_kind=kind)

    @property
    def first_device(self) -> Any:
        """The first of the devices that programs run on."""
        device = jax.config.jax_default_device  # type: ignore[attr-defined]
        return jax.devices(device)[0] if device is None or isinstance(device, str) else device

    def whole_everywhere(self, recipe: Recipe) -> Recipe:
        """Return the recipe of a payload, changed so that each of several processes gets the whole."""

        def whole(*arguments: Any) -> Any:
            return jax.tree.map(
                lambda leaf: lax.all_gather(leaf, ALL, axis=PAYLOAD_HEADS, tiled=True), recipe.function(*arguments)
            )

        return recipe._replace(function=whole, results=WHOLE)

    def payload_layout(self, kv: paged.KV, *, windows: bool = False) -> list[tuple[tuple[int, ...], Any]]:
        """Return shape and dtype of each array of one page on the host, which do not depend on the mesh."""
        everywhere = paged.payload_layout(kv, windows=windows)
        layout = []
        for (shape, dtype), copies in zip(everywhere, self.copies(len(everywhere), windows=windows), strict=True):
            heads = shape[PAYLOAD_HEADS] // copies
            layout.append(((*shape[:PAYLOAD_HEADS], heads, *shape[PAYLOAD_HEADS + 1 :]), dtype))
        return layout

    def heads_of(self, process: int, kv: paged.KV) -> list[np.ndarray]:
        """Return for each array of a payload the indices of the kv heads, copies on devices included, that a process's
        devices have."""
        return [np.arange(shape[PAYLOAD_HEADS]) for shape, _ in paged.payload_layout(kv)]

    def to_host(self, payload: paged.Payload, *, windows: bool = False) -> list[np.ndarray[Any, Any]]:
        """Wait for a payload that this process has whole, and return it in host memory, with each kv head once."""
        pairs = zip(payload, self.copies(len(payload), windows=windows), strict=True)
        arrays = ((np.asarray(leaf), copies) for leaf, copies in pairs)
        return [array if copies == 1 else array[:, :, :, ::copies] for array, copies in arrays]

    def states_to_host(self, states: Any) -> np.ndarray:
        """Wait for a transfer to read out the states of one sequence, and return them as a single device has them."""
        return np.asarray(states)

    def states_to_device(self, states: np.ndarray) -> np.ndarray:
        """Return one sequence's states from the host in the form that a transfer fills in."""
        return states

    def to_device(self, payload: paged.Payload, *, windows: bool = False) -> paged.Payload:
        """Return a page from the host in the form that `scatter` takes: with a copy of each kv head for each device."""
        pairs = zip(payload, self.copies(len(payload), windows=windows), strict=True)
        return tuple(leaf if copies == 1 else np.repeat(leaf, copies, axis=PAYLOAD_HEADS) for leaf, copies in pairs)


@dataclasses.dataclass(frozen=True)
class MeshPartitioning(Partitioning):
    """Wraps programs, and pages in transfers to and from the host, for the devices of a mesh."""

    placement: MeshPlacement

    @property
    def divided(self) -> bool:
        return True

    @property
    def in_step(self) -> bool:
        return self.placement.data > 1 or self.multi_process

    @property
    def multi_process(self) -> bool:
        return self.placement.processes > 1

    def copies(self, arrays: int, *, windows: bool = False) -> tuple[int, ...]:
        placement = self.placement
        kinds = placement.config.kinds_apart[windows] if placement.pages_apart else placement.config.kinds_of_pages
        return tuple(placement.partition.kv_copies(each.heads) for each in kinds for _ in range(arrays // len(kinds)))

    def wrap(self, recipe: Recipe, function: Callable[..., Any]) -> Callable[..., Any]:
        operands = tuple(
            jax.tree.map(functools.partial(self.spec, argument=argument), kind)
            for kind, argument in zip(recipe.operands, recipe.arguments, strict=True)
        )
        results = jax.tree.map(self.spec, recipe.results)
        wrapped: Callable[..., Any] = jax.shard_map(
            function, mesh=self.placement.mesh, in_specs=operands, out_specs=results, check_vma=False
        )
        return wrapped

    def tracing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the mesh; a user's `jax.set_mesh` would interfere."""
        context: contextlib.AbstractContextManager[Any] = jax.set_mesh(self.placement.mesh)
        return context

    def arguments(self, recipe: Recipe) -> tuple[Any, ...]:
        return tuple(
            jax.tree.map(self._placed, kind, argument)
            for kind, argument in zip(recipe.operands, recipe.arguments, strict=True)
        )

    def pages(self, one: paged.KV) -> paged.KV:
        def whole(axis: int, leaf: Any) -> jax.ShapeDtypeStruct:
            shape = list(leaf.shape)
            shape[0] *= self.placement.data
            shape[axis] *= self.placement.size
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        pages: paged.KV = jax.tree.map(whole, jax.tree.broadcast(self._divided_axes, one), one)
        return pages

    @functools.cached_property
    def _divided_axes(self) -> Any:
        """The divided axis of each array of pages and states; one number if all have the same."""
        config = self.placement.config
        if not config.is_recurrent:
            return _KV_HEADS
        axes: list[Any] = [_KV_HEADS if isinstance(cache.pages, Pages) else None for cache in config.caches]
        states: list[Any] = [
            tuple(1 + role.divisions[0].axis for role in roles) for roles in self.placement.state_roles
        ]
        return tuple(paged.Layer(pages=axis, states=own) for axis, own in zip(axes, states, strict=True))

    @functools.cached_property
    def _state_shapes(self) -> list[tuple[Role, tuple[int, ...]]]:
        """The role and the shape of each array of a sequence's states, in the order of transfers."""
        placement = self.placement
        shapes = [shape for spec in placement.config.states if spec is not None for shape in spec.shapes]
        return list(zip(itertools.chain.from_iterable(placement.state_roles), shapes, strict=True))

    def states_to_host(self, states: Any) -> np.ndarray:
        sizes = self.placement.sizes
        places = itertools.product(range(sizes["expert"]), range(sizes["model"]))
        parts = dict(zip(places, np.asarray(states).reshape(self.placement.size, -1), strict=True))
        whole, first = [], 0
        for role, shape in self._state_shapes:
            local = local_shape(role, shape, sizes)
            last = first + math.prod(local)
            each = {place: part[first:last].reshape(local) for place, part in parts.items()}
            whole.append(join(role, each, shape, sizes).reshape(1, -1))
            first = last
        return np.concatenate(whole, axis=1)

    def states_to_device(self, states: np.ndarray) -> np.ndarray:
        sizes, parts, first = self.placement.sizes, [], 0
        arrays = []
        for role, shape in self._state_shapes:
            last = first + math.prod(shape)
            arrays.append((role, states[0, first:last].reshape(shape)))
            first = last
        for expert, model in itertools.product(range(sizes["expert"]), range(sizes["model"])):
            place = {"expert": expert, "model": model}
            parts += [cut(role, array, sizes, place).reshape(1, -1) for role, array in arrays]
        return np.concatenate(parts, axis=1)

    def payload_sharding(self, kind: str | None) -> Sharding:
        return NamedSharding(self.placement.mesh, self.spec(PAYLOAD), memory_kind=kind)

    @property
    def first_device(self) -> Any:
        return self.placement.devices[0]

    def heads_of(self, process: int, kv: paged.KV) -> list[np.ndarray]:
        places = np.array(self.placement.positions(process))[:, None]
        counts = (shape[PAYLOAD_HEADS] // self.placement.size for shape, _ in paged.payload_layout(kv))
        return [(places * per_device + np.arange(per_device)).reshape(-1) for per_device in counts]

    def spec(self, kind: DeviceLayout | WeightsOf, argument: Any = None) -> Any:
        """Return the partition of this layout. For WEIGHTS, `argument` are the leaves."""
        if isinstance(kind, WeightsOf):
            assert isinstance(kind.placement, MeshPlacement), "they lie on the same devices"
            return kind.placement.specs(kind.shapes)
        if kind is WEIGHTS:
            return self.placement.specs(argument)
        if kind is PARTS:
            return PartitionSpec(ALL)
        over = DATA if self.placement.data > 1 else None
        if kind is PAGES:
            return jax.tree.map(lambda axis: PartitionSpec(over, *[None] * (axis - 1), ALL), self._divided_axes)
        if kind is PAYLOAD:
            return PartitionSpec(over, *[None] * (PAYLOAD_HEADS - 1), ALL)
        if kind is HEADS:
            return PartitionSpec(over, ALL)
        if over is None or kind is WHOLE:
            return PartitionSpec()
        return PartitionSpec(None, over) if kind is POOLED else PartitionSpec(over)

    def _placed(self, kind: DeviceLayout | WeightsOf, argument: Any) -> Any:
        placement, spec = self.placement, self.spec(kind, argument)
        if kind is WEIGHTS or isinstance(kind, WeightsOf):
            return tuple(
                jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement.sharding(leaf_spec))
                for leaf, leaf_spec in zip(argument, spec, strict=True)
            )
        times = self.placement.data if kind in (ROWS, PAYLOAD) else 1

        def lying(spec: PartitionSpec, leaf: Any) -> jax.ShapeDtypeStruct:
            shape = (leaf.shape[0] * times, *leaf.shape[1:]) if times > 1 else leaf.shape
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=placement.sharding(spec))

        return jax.tree.map(lying, jax.tree.broadcast(spec, argument), argument)
