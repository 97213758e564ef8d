"""A model on a mesh of devices: the places of each leaf's parts, and the transfers there and back.

Nothing outside depends on the mesh: leaves come in checkpoints' form, `hold_all` returns them in that form, and pages
leave the mesh as they leave a single device. So stored weights, pages and snapshots of one mesh serve any other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from numpy.typing import NDArray

from rekindle._src.core.dtypes import checked_dtype
from rekindle._src.core.mesh_shape import AXES, DATA, KNOWN, DeviceMesh, MeshReport, MeshShape, checked_mesh
from rekindle._src.core.mesh_shape import Mesh as MeshOption
from rekindle._src.models.base import (
    ALONE,
    Graph,
    LoadedModel,
    Placement,
    ShapeLike,
    abstract_model,
    draw,
    leaf_shapes,
    random_name,
)
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.hugepages import aligned
from rekindle._src.models.partition import Partition, kv_heads_of, roles_of
from rekindle._src.models.roles import (
    ALL,
    REPLICATED,
    LeafParts,
    Role,
    Span,
    column,
    count_of,
    cut,
    local_shape,
    ranges,
)
from rekindle.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class MeshPlacement(Placement):
    """The devices that share one model. `mesh` has the axes "expert" and "model".

    With several data shards it has the axis "data" before them, and each shard has the whole model.
    """

    mesh: Mesh
    partition: Partition
    graph: Graph  # of the whole model
    data: int = 1  # shards that have pages and requests of their own

    @property
    def sizes(self) -> Mapping[str, int]:
        """The devices that share one model, by axis."""
        return self.partition.sizes

    @property
    def config(self) -> ModelConfig:
        """The config of the whole model."""
        return self.graph.config

    @functools.cached_property
    def roles(self) -> Mapping[str, Role]:
        """The role of every leaf by its path, scales included."""
        return roles_of(self.graph)

    @property
    def divided(self) -> bool:
        return True

    @property
    def size(self) -> int:
        return self.partition.size

    @functools.cached_property
    def local(self) -> Graph:
        """The graph of one device's part, for use under `jax.shard_map` over the mesh."""
        return self.partition.graph(self.graph)

    def local_graph(self, graph: Graph) -> Graph:
        return self.local

    def local_config(self, config: ModelConfig) -> ModelConfig:
        return self.local.config

    def of(self, graph: Graph) -> Placement:
        return self if graph is self.graph else dataclasses.replace(self, graph=graph)

    def part(self, graph: Graph, prefix: str) -> Placement:
        roles = {path.removeprefix(prefix): role for path, role in self.roles.items() if path.startswith(prefix)}
        return PartPlacement(self.mesh, self.partition, graph, self.data, roles)

    def whole(self, graph: Graph) -> Placement:
        return WholePlacement(self.mesh, self.partition, graph, self.data)

    @functools.cached_property
    def state_roles(self) -> tuple[tuple[Role, ...], ...]:
        """The role of each array of each layer's state: a convolution's last inputs are divided as its weights are."""
        result: list[tuple[Role, ...]] = []
        for layer, spec in enumerate(cache.state for cache in self.config.caches):
            if spec is None:
                result.append(())
                continue
            start, end = f"layers.{layer}.", ".convolution"
            (channels,) = (role for path, role in self.roles.items() if path.startswith(start) and path.endswith(end))
            tail = Role((channels.divisions[0]._replace(axis=1),))
            result.append((tail, column(Span(spec.heads, spec.heads))) if spec.heads else (tail,))
        return tuple(result)

    @property
    def means(self) -> int:
        """The norms over all heads, which take a mean of squares over the devices."""
        return sum(path.endswith("q_norm.weight") and role != REPLICATED for path, role in self.roles.items())

    @property
    def products(self) -> int:
        """The products with results that are summed over the devices."""
        ends = (".out.weight", ".down.weight")
        return sum(path.endswith(ends) and ".shared." not in path for path in self.graph.paths)

    def spec(self, path: str, ndim: int) -> PartitionSpec:
        """Return the partition of a leaf over the mesh."""
        axes: list[Any] = [None] * ndim
        for division in self.roles[path].divisions:
            axes[division.axis] = division.over if len(division.over) > 1 else division.over[0]
        return PartitionSpec(*axes)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def specs(self, shapes: Sequence[ShapeLike]) -> tuple[PartitionSpec, ...]:
        """Return the partitions of all leaves over the mesh, in the graph's order."""
        return tuple(self.spec(path, len(leaf.shape)) for path, leaf in zip(self.graph.paths, shapes, strict=True))

    def abstract(self, path: str, leaf: ShapeLike) -> jax.ShapeDtypeStruct:
        """Return a leaf's shape on the mesh: repeated and padded parts make it larger than the checkpoint's."""
        shape = self._joined_shape(path, local_shape(self.roles[path], leaf.shape, self.sizes))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=self.sharding(self.spec(path, len(shape))))

    def place(self, path: str, leaf: ArrayLike) -> Array:
        """Put a leaf on the mesh: every device gets its own part, and nothing else is copied to it."""
        role, array = self.roles[path], np.asarray(leaf)
        parts = [
            (array if role == REPLICATED else cut(role, array, self.sizes, place, aligned), devices)
            for place, devices in self.different(role, array.ndim)
        ]
        return self.joined(path, parts)

    def parts(self, of: Callable[[Mapping[str, int]], NDArray[Any]]) -> Array:
        made: dict[tuple[int, ...], NDArray[Any]] = {}  # data shards have the same
        arrays = []
        for device, place in self._places():
            key = tuple(place.values())
            if key not in made:
                made[key] = of(place)[None]
            arrays.append(jax.device_put(made[key], device))
        shape = self.part_shape(arrays[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.sharding(PartitionSpec(ALL)), arrays)

    def part_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (self.size, *shape)

    def different(self, role: Role, ndim: int) -> list[tuple[Mapping[str, int], list[jax.Device]]]:
        """Return the different parts of a leaf on this process's devices: a place of each part, and all its devices."""
        parts: dict[object, tuple[Mapping[str, int], list[jax.Device]]] = {}
        for device, place in self._places():
            blocks = ranges(role, ndim, self.sizes, place)
            key = tuple((bounds.start, bounds.stop) for source, _ in blocks for bounds in source)
            parts.setdefault(key, (place, []))[1].append(device)
        return list(parts.values())

    def joined(self, path: str, parts: Sequence[tuple[NDArray[Any], Sequence[jax.Device]]]) -> Array:
        """Join a leaf from its parts in host memory, each with the devices that it is for."""
        shape = self._joined_shape(path, parts[0][0].shape)
        arrays = {device: jax.device_put(part, device, may_alias=True) for part, devices in parts for device in devices}
        ordered = [arrays[device] for device, _ in self._places()]
        sharding = self.sharding(self.spec(path, len(shape)))
        return jax.make_array_from_single_device_arrays(shape, sharding, ordered)

    def _joined_shape(self, path: str, part: Sequence[int]) -> tuple[int, ...]:
        shape = list(part)
        for division in self.roles[path].divisions:
            shape[division.axis] *= count_of(division.over, self.sizes)
        return tuple(shape)

    def hold(self, path: str, leaf: Array, shape: tuple[int, ...]) -> LeafParts:
        """Return a leaf in checkpoints' form, joined when it is read as an array. On CPU it outlives the leaf."""
        by_device = {shard.device: shard.data for shard in leaf.addressable_shards}
        on_host = all(device.platform == "cpu" for device in by_device)
        parts = {
            (place["expert"], place["model"]): np.asarray(by_device[device]) if on_host else by_device[device]
            for device, place in self._places()
        }
        return LeafParts(parts, self.roles[path], shape, np.dtype(leaf.dtype), self.partition.sizes)

    def hold_all(self, leaves: Sequence[Array], shapes: Sequence[ShapeLike]) -> list[LeafParts]:
        """Call `hold` for all leaves, in the graph's order. `shapes` are the whole model's."""
        entries = zip(self.graph.paths, leaves, shapes, strict=True)
        return [self.hold(path, leaf, tuple(shape.shape)) for path, leaf, shape in entries]

    def whole_shapes(self, leaves: Sequence[ShapeLike] = ()) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shapes of the whole model's leaves, as on one device."""
        return leaf_shapes(self.graph)

    def shapes(self, leaves: Sequence[jax.ShapeDtypeStruct]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Call `abstract` for all leaves, in the graph's order."""
        return tuple(self.abstract(path, leaf) for path, leaf in zip(self.graph.paths, leaves, strict=True))

    def bytes_per_device(self, leaves: Sequence[ShapeLike]) -> int:
        """Return the bytes of weights that each device holds."""
        sizes, total = self.partition.sizes, 0
        for path, leaf in zip(self.graph.paths, leaves, strict=True):
            total += int(np.prod(local_shape(self.roles[path], leaf.shape, sizes))) * np.dtype(leaf.dtype).itemsize
        return total

    def model(self, model: LoadedModel) -> LoadedModel:
        """Return a model that lies on this mesh as it is, and a copy of one that was loaded for one device."""
        if model.placement == self:
            return model
        leaves = tuple(
            self.place(path, np.asarray(leaf)) for path, leaf in zip(model.graph.paths, model.leaves, strict=True)
        )
        return dataclasses.replace(model, leaves=leaves, placement=self)

    def replacement(self, path: str, new: ArrayLike, old: Array) -> Array:
        return self.place(path, np.array(new))

    @property
    def devices(self) -> list[Any]:
        return list(self.mesh.devices.flat)

    @property
    def local_devices(self) -> list[Any]:
        return [device for device in self.devices if device.process_index == jax.process_index()]

    @functools.cached_property
    def processes(self) -> int:
        """The number of processes that have devices of the mesh."""
        return len({device.process_index for device in self.devices})

    def positions(self, process: int) -> list[int]:
        """Return the indices of a process's devices among all devices of the mesh."""
        return [index for index, device in enumerate(self.devices) if device.process_index == process]

    def key(self) -> dict[str, object]:
        """Return the mesh: axes, devices and partition; with several processes, this one's number, too."""
        fields = {
            "axes": list(self.mesh.axis_names),
            "devices": [device.id for device in self.devices],
            "partition": self.partition.sizes,
        }
        return {"mesh": fields if self.processes == 1 else fields | {"process": jax.process_index()}}

    def report(self, page_bytes: int) -> MeshReport:
        config, local, norms = self.config, self.local.config, self.means
        width = jnp.dtype(self.graph.precision.stream).itemsize
        sizes = {DATA: self.data, **self.partition.sizes}
        return MeshReport(
            axes={name: count for name, count in sizes.items() if count > 1} or {"model": 1},
            devices=tuple(str(device) for device in self.devices),
            heads=local.num_heads,
            kv_heads=local.num_kv_heads,
            kv_copies=max(map(self.partition.kv_copies, kv_heads_of(config))),
            weight_bytes=self.bytes_per_device(self.whole_shapes()),
            page_bytes=page_bytes,
            processes=self.processes,
            sums=1 + self.products + norms,
            bytes_per_token=(1 + self.products) * config.hidden_size * width + 8 * norms,
        )

    def __repr__(self) -> str:
        shards = f", {self.data} times" if self.data > 1 else ""
        return f"<Placement {self.partition.size} devices: {self.partition.sizes}{shards}>"

    def _places(self) -> list[tuple[jax.Device, dict[str, int]]]:
        """Return this process's devices, and their places in their data shards."""
        here = jax.process_index()
        grid = np.ndenumerate(self.mesh.devices)
        return [
            (device, dict(zip(AXES, index[-2:], strict=True))) for index, device in grid if device.process_index == here
        ]


@dataclasses.dataclass(frozen=True)
class PartPlacement(MeshPlacement):
    """The devices of a mesh that share a part of a model."""

    part_roles: Mapping[str, Role] = dataclasses.field(default_factory=dict)

    @property
    def roles(self) -> Mapping[str, Role]:  # type: ignore[override]
        return self.part_roles


@dataclasses.dataclass(frozen=True)
class WholePlacement(MeshPlacement):
    """The devices of a mesh, each with all of a model."""

    @functools.cached_property
    def roles(self) -> Mapping[str, Role]:
        return dict.fromkeys(self.graph.paths, REPLICATED)

    @functools.cached_property
    def local(self) -> Graph:
        return self.graph


def placement_of(mesh: MeshShape | DeviceMesh | None, graph: Graph, *, processes: int = 1) -> Placement:
    """Return the placement for the option `mesh`.

    With several processes each provides equally many devices. Raise ConfigError where there are too few, or for a
    model that they can't share.
    """
    if mesh is None or (isinstance(mesh, MeshShape) and mesh.size == 1):
        return ALONE
    if isinstance(mesh, MeshShape):
        sizes = {axis: mesh.get(axis, 1) for axis in KNOWN}
        available = _devices() if processes == 1 else _devices_of_all(mesh, processes)
        if mesh.size > len(available):
            raise ConfigError(
                "mesh",
                mesh,
                f"asks for {mesh.size} devices, and there {'is' if len(available) == 1 else 'are'} {len(available)}",
                f"Use at most {len(available)}"
                + (
                    f', or simulate them: XLA_FLAGS="--xla_force_host_platform_device_count={mesh.size}"'
                    if available[0].platform == "cpu"
                    else ""
                ),
            )
        axes = _axes(sizes[DATA])
        shape = tuple(sizes[axis] for axis in axes)
        built = jax.make_mesh(shape, axes, (AxisType.Auto,) * len(axes), devices=available[: mesh.size])
    else:
        grid = np.asarray(mesh.devices)
        if any(device.process_index != jax.process_index() for device in grid.flat):
            raise ConfigError(
                "mesh", mesh, "has devices of other processes", "Use jax.local_devices(): a session has one process"
            )
        given = dict(zip(mesh.axis_names, grid.shape, strict=True))
        sizes = {axis: given.get(axis, 1) for axis in KNOWN}
        ordered = np.moveaxis(grid, [mesh.axis_names.index(axis) for axis in KNOWN if axis in given], range(grid.ndim))
        axes = _axes(sizes[DATA])
        built = Mesh(ordered.reshape([sizes[axis] for axis in axes]), axes, axis_types=(AxisType.Auto,) * len(axes))
    data, partition = sizes.pop(DATA), Partition(**sizes)
    partition.check(graph.config)
    partition.check_packed(graph)
    return MeshPlacement(built, partition, graph, data)


def _axes(data: int) -> tuple[str, ...]:
    """Return the axes of the mesh that programs use. A single data shard has no axis."""
    return KNOWN if data > 1 else AXES


def _devices_of_all(mesh: MeshShape, processes: int) -> list[jax.Device]:
    """Return equally many devices of each process, as many as the mesh needs."""
    share = mesh.size // processes
    devices: list[jax.Device] = []
    for process in range(processes):
        local = [device for device in jax.devices() if device.process_index == process]
        if len(local) < share:
            raise ConfigError(
                "mesh",
                mesh,
                f"needs {share} devices of each of {processes} processes, and process {process} has {len(local)}",
                f"Use at most {len(local) * processes}, or give every process as many devices",
            )
        devices += local[:share]
    return devices


def _devices() -> list[jax.Device]:
    """Return the devices of the platform that sessions use."""
    default: Any = getattr(jax.config, "jax_default_device", None)
    if default is None:
        return jax.local_devices()
    return jax.local_devices(backend=default if isinstance(default, str) else default.platform)


def random_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: DTypeLike = jnp.float32,
    quantize: str | Mapping[str, str | None] | None = None,
    quantize_embeddings: bool = True,
    mesh: MeshOption | None = None,
) -> LoadedModel:
    """Make a model with random weights of a sensible spread, for tests, benchmarks and the start of training.

    The weights depend on the platform: a GPU or TPU draws them itself, which a host would do for minutes at 8B. With
    `mesh`, as `rekindle.open` takes it, each weight is drawn, divided over those devices and forgotten before the next
    one, so that the model may be larger than one of them. Sessions over it use that mesh, and give the tokens of the
    same model on one device.
    """
    dtype = checked_dtype("dtype", dtype)
    graph, shapes = abstract_model(config, dtype, quantize, quantize_embeddings=quantize_embeddings)
    placement, leaves = placement_of(checked_mesh(mesh), graph), draw(graph, shapes, seed)
    placed = (placement.place(path, leaf) for path, leaf in zip(graph.paths, leaves, strict=True))
    return LoadedModel(config, graph, tuple(placed), random_name(config, seed, dtype, quantize), placement=placement)
