"""A model in functional form: a static graph and a flat tuple of arrays.

Flax and the families are imported where a model is made or traced. A start that finds its programs and weights in the
cache needs neither, and importing them would take 0.2 s of the one second that it takes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from numpy.typing import NDArray

from rekindle._src.core.drawable import Drawable
from rekindle._src.core.dtypes import dtype_name
from rekindle._src.core.mesh_shape import MeshReport
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.hooks import NO_DELTAS, Deltas, Listener
from rekindle._src.models.loading.hugepages import adopted
from rekindle._src.models.nn.packing import is_packed, matrix_shape
from rekindle._src.models.precision import Precision
from rekindle._src.models.registry import module
from rekindle._src.models.roles import LeafParts
from rekindle_kernels import current_platform

if TYPE_CHECKING:
    from flax import nnx

    from rekindle._src.models.nn.forward import Attend, ForwardPass, RopeTables
    from rekindle._src.models.nn.linear import Products


class ShapeLike(Protocol):
    """An array, or its shape and dtype alone."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def size(self) -> int: ...


class Model(Protocol):
    """A model's module, as `merge` returns it.

    Calling it is the same as `begin`, each of the `layers` with its `ForwardPass`, and `end`.
    """

    config: ModelConfig
    layers: Sequence[Callable[[Array, ForwardPass], Array]]
    embed: Callable[[Array], Array]  # of tokens [T] → [T, E], before any scale

    @property
    def whole_vocab_size(self) -> int:
        """The size of the whole model's vocabulary; a device of a mesh has a part."""
        ...

    def __call__(
        self,
        tokens: Array,
        positions: Array,
        attend: Attend,
        lengths: Array | None = None,
        listeners: Sequence[Listener] = (),
    ) -> Array:
        """Compute tokens, positions [T] → hidden [T, E] after the final norm."""
        ...

    def begin(
        self,
        tokens: Array,
        positions: Array,
        lengths: Array | None = None,
        listeners: Sequence[Listener] = (),
    ) -> tuple[Array, RopeTables]:
        """Compute tokens, positions [T] → the first layer's input [T, E], and the tables that all layers share."""
        ...

    def end(self, x: Array) -> Array:
        """Compute the last layer's output [T, E] → hidden [T, E]."""
        ...

    def logits(self, hidden: Array, count: Array | None = None) -> Array:
        """Compute hidden [N, E] → float32 [N, V], with the final soft cap; with `count`, only that many first rows."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Graph:
    """Everything static in a model. It is hashable, and equal for equal configs and precisions."""

    config: ModelConfig
    precision: Precision
    paths: tuple[str, ...]  # "layers.0.attention.qkv.weight"…, in the order of the leaves


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices that a model lies on. Here that is one, and nothing is divided; see `MeshPlacement` for several."""

    @property
    def divided(self) -> bool:
        """True if programs run on a mesh."""
        return False

    @property
    def data(self) -> int:
        """The number of shards that have pages and requests of their own."""
        return 1

    @property
    def size(self) -> int:
        """The number of devices that share one model."""
        return 1

    @property
    def one_pool(self) -> bool:
        """True if all devices share one pool of pages, in one process."""
        return self.data == 1 and self.processes == 1

    @property
    def pages_apart(self) -> bool:
        """True if layers that give pages back have ids of their own."""
        return self.one_pool

    @property
    def processes(self) -> int:
        """The number of processes that have some of the devices."""
        return 1

    @property
    def devices(self) -> list[Any]:
        """The devices in the order of the mesh; empty without a mesh, when programs run on the default device."""
        return []

    @property
    def local_devices(self) -> list[Any]:
        """The devices that this process has of those."""
        return jax.local_devices()[:1]

    def key(self) -> dict[str, object]:
        """Return the fields of program keys that depend on the devices."""
        return {}

    def local_config(self, config: ModelConfig) -> ModelConfig:
        """Return the config of one device's part of a model."""
        return config

    def local_graph(self, graph: Graph) -> Graph:
        """Return the graph of one device's part of a model."""
        return graph

    def shapes(self, leaves: Sequence[jax.ShapeDtypeStruct]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shapes of a whole model's leaves as they lie on the devices."""
        return tuple(leaves)

    def whole_shapes(self, leaves: Sequence[ShapeLike]) -> Sequence[ShapeLike]:
        """Return the shapes of the whole model's leaves, given the leaves on the devices."""
        return leaves

    def bytes_per_device(self, leaves: Sequence[ShapeLike]) -> int:
        """Return the bytes of weights that each device holds."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The devices that share one model, by mesh axis."""
        return {"expert": 1, "model": 1}

    def parts(self, of: Callable[[Mapping[str, int]], NDArray[Any]]) -> Array:
        """Put `of(place)`, an array of one shape, on each of the devices that share the model, by its place.

        On a mesh the result has an axis of these devices in front.
        """
        return jax.device_put(of(dict.fromkeys(self.sizes, 0)))

    def part_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of an array that `parts` makes of parts of this shape."""
        return tuple(shape)

    def of(self, graph: Graph) -> Placement:
        """Return the placement of another model that is divided as this one is, such as a part of it."""
        return self

    def part(self, graph: Graph, prefix: str) -> Placement:
        """Return the placement of part of a model, with this graph of its own: the paths that begin with `prefix`."""
        return self

    def whole(self, graph: Graph) -> Placement:
        """Return the placement of another model that lies as a whole on each of these devices."""
        return self

    def model(self, model: LoadedModel) -> LoadedModel:
        """Return a loaded model on these devices. The original stays unchanged."""
        return model

    def place(self, path: str, leaf: Array) -> Array:
        """Put a leaf of a model that lies on one device on these devices."""
        return leaf

    def replacement(self, path: str, new: ArrayLike, old: Array) -> Array:
        """Put a whole leaf where `old`, which it replaces, lies."""
        if not isinstance(new, Array):
            new = np.array(new)  # a copy: on CPU, jax may use the caller's memory, which the caller may write to later
        # To jax.jit, an array that is committed to its device where the old one was not means another program.
        return jax.device_put(new, old.sharding if old.committed else None)

    def hold_all(self, leaves: Sequence[Array], shapes: Sequence[ShapeLike]) -> Sequence[Array] | Sequence[LeafParts]:
        """Return the leaves in checkpoints' form; `shapes` are the whole model's."""
        return leaves

    def report(self, page_bytes: int) -> MeshReport | None:
        """Return a session's report about its mesh; None without one."""
        return None


ALONE = Placement()
_KINDS = {  # by the dtypes of stored matrices
    "uint8": "4 bits", "int16": "4 bits", "uint32": "6 bits", "int32": "8 bits", "int8": "int8",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class LoadedModel(Drawable):
    """Weights on the device, ready to be passed to programs as `leaves`."""

    config: ModelConfig
    graph: Graph
    leaves: tuple[Array, ...]
    fingerprint: str  # identifies config and weights; everything persistent is keyed by it
    folder: Path | None = None  # the folder or GGUF file that holds the tokenizer and the chat template
    placement: Placement = ALONE

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def held(self) -> str:
        """The storage kinds of the weights, and the memory of each: "4 bits 62 MB, 8 bits 30 MB, …"."""
        return storage_kinds(self.graph, self.leaves)

    @property
    def num_parameters(self) -> int:
        return sum(prod(matrix_shape(leaf)) for leaf in self.leaves)

    def __repr__(self) -> str:
        size = f"{self.num_parameters / 1e6:,.1f}M parameters, {self.nbytes / 2**20:,.0f} MiB"
        return f"<LoadedModel {self.config.model_type}: {size}>"


def storage_kinds(graph: Graph, leaves: Sequence[Array | jax.ShapeDtypeStruct]) -> str:
    """Return the storage kinds of a graph's leaves, and the memory of each: "4 bits 62 MB, 8 bits 30 MB, …"."""
    ordered = sorted(_bytes_of_kinds(graph, leaves).items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {max(1, round(size / 1e6)):,} MB" for kind, size in ordered)


def precision_name(graph: Graph, leaves: Sequence[Array | jax.ShapeDtypeStruct]) -> str:
    """Return the storage kinds of a graph's leaves alone: "4 bits, 8 bits, float32"."""
    return ", ".join(sorted(_bytes_of_kinds(graph, leaves)))


def _bytes_of_kinds(graph: Graph, leaves: Sequence[Array | jax.ShapeDtypeStruct]) -> dict[str, int]:
    kinds = dict[str, str]()
    sizes = dict[str, int]()
    for path, leaf in zip(graph.paths, leaves, strict=True):
        owner, _, part = path.rpartition(".")
        if part == "weight":
            kinds[owner] = _KINDS.get(leaf.dtype.name, leaf.dtype.name)
    for path, leaf in zip(graph.paths, leaves, strict=True):
        kind = kinds.get(path.rpartition(".")[0], leaf.dtype.name)  # scales count as the matrices that they scale
        sizes[kind] = sizes.get(kind, 0) + leaf.size * leaf.dtype.itemsize
    return sizes


def abstract_model(
    config: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    quantize: str | Mapping[str, str | None] | None = None,
    *,
    quantize_embeddings: bool = True,
    kinds: tuple[tuple[str, str], ...] = (),
) -> tuple[Graph, tuple[jax.ShapeDtypeStruct, ...]]:
    """Return the graph and the shapes of the leaves: enough to compile programs and to load weights.

    `kinds` are the kinds of matrices by their paths, as in `Precision`.
    """
    precision = Precision.of(dtype, quantize, quantize_embeddings=quantize_embeddings)
    return graph_of(config, dataclasses.replace(precision, kinds=kinds))


def graph_of(config: ModelConfig, precision: Precision) -> tuple[Graph, tuple[jax.ShapeDtypeStruct, ...]]:
    """Return the same as `abstract_model`, for a precision that is known."""
    _, state = _split(config, precision)
    keyed, _ = jax.tree_util.tree_flatten_with_path(state)
    paths = tuple(".".join(str(key.key) for key in path[:-1]) for path, _ in keyed)
    return Graph(config, precision, paths), tuple(leaf for _, leaf in keyed)


def leaf_shapes(graph: Graph) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes of a graph's leaves, in their order."""
    _, state = _split(graph.config, graph.precision)
    return tuple(jax.tree.leaves(state))


def merge(graph: Graph, leaves: Sequence[Array], deltas: Deltas = NO_DELTAS, products: Products | None = None) -> Model:
    """Return the module of a graph and its leaves (arrays or tracers), with these deltas added to its matrices.

    With `products`, they compute the products of its matrices.
    """
    from flax import nnx

    definition, state = _split(graph.config, graph.precision)
    model = nnx.merge(definition, jax.tree.unflatten(jax.tree.structure(state), leaves))
    for path, delta in deltas.items():
        matrix: Any = model
        for name in path.split("."):
            matrix = matrix[int(name)] if name.isdecimal() else getattr(matrix, name)
        assert hasattr(matrix, "delta"), f"{path} declares no delta"
        matrix.delta = delta
    if products is not None:
        from rekindle._src.models.nn import linear

        for path, matrix in linear.matrices(cast("nnx.Module", model)).items():
            if not path.endswith("router"):  # it is in float32 in any case
                matrix.products = products
    return cast(Model, model)


@functools.lru_cache(maxsize=8)
def _split(config: ModelConfig, precision: Precision) -> tuple[Any, Any]:
    """Return the model's nnx.GraphDef, and its state with shapes for arrays."""
    from flax import nnx

    definition, state = nnx.split(_module(config, precision))
    return definition, state


def kinds_in(graph: Graph) -> tuple[tuple[str, str], ...]:
    """Return the kind of each quantised matrix of a model by its path: `Precision.kinds` of the same graph, in full."""
    from rekindle._src.models.nn import linear

    matrices = linear.matrices(_module(graph.config, graph.precision))
    kinds = ((path, matrix.packing.kind if matrix.packing else matrix.quantize) for path, matrix in matrices.items())
    return tuple((path, kind) for path, kind in kinds if kind is not None)


def _module(config: ModelConfig, precision: Precision) -> Any:
    from rekindle._src.models.nn import linear

    made = module(config, precision)
    linear.quantise(made, precision)
    return made


def random_name(config: ModelConfig, seed: int, dtype: DTypeLike, quantize: object) -> str:
    """Return the fingerprint of random weights."""
    platform = current_platform()
    prefix = "" if platform == "cpu" else f"{platform}-"
    return f"random-{prefix}{seed}-{config.digest()}-{dtype_name(dtype)}-{quantize}"


def draw(graph: Graph, shapes: Sequence[jax.ShapeDtypeStruct], seed: int) -> Iterator[Array]:
    """Yield random leaves of a graph, one after the other: a GPU or TPU draws them itself, for a CPU the host does."""
    if current_platform() != "cpu":
        yield from drawn_on_device(graph, shapes, seed)
        return
    rng = np.random.default_rng(seed)
    for path, leaf in zip(graph.paths, shapes, strict=True):
        yield jax.device_put(adopted(_random(path, leaf, graph.config, graph.precision, rng)), may_alias=True)


def drawn_on_device(graph: Graph, shapes: Sequence[jax.ShapeDtypeStruct], seed: int) -> Iterator[Array]:
    """Yield random leaves of a graph, drawn by the default device one after the other."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    for key, path, leaf in zip(keys, graph.paths, shapes, strict=True):
        value = _constant(path, leaf, graph.config)
        if value is not None:
            yield jnp.full(leaf.shape, value, leaf.dtype)
        else:
            yield drawn_leaf(key, leaf, graph.precision.value_dtype(leaf.dtype), _spread(path, graph.config))


# One program for each shape, whatever the leaf is called: a program for each leaf took a minute to compile on a GPU.
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def drawn_leaf(key: Array, leaf: jax.ShapeDtypeStruct, value_dtype: DTypeLike, spread: float) -> Array:
    if leaf.dtype == jnp.int8:
        return jax.random.randint(key, leaf.shape, -127, 128, jnp.int8)
    if is_packed(leaf):
        return jax.random.bits(key, leaf.shape, jnp.uint8)  # only files have groups of other bits
    values = (jax.random.normal(key, leaf.shape) * spread).astype(value_dtype)
    return values if values.dtype == leaf.dtype else jax.lax.bitcast_convert_type(values, leaf.dtype)


def _constant(path: str, leaf: jax.ShapeDtypeStruct, config: ModelConfig) -> float | None:
    """Return the value of a constant leaf; None for a leaf that is drawn."""
    name = path.rsplit(".", 1)[-1]
    if leaf.dtype == jnp.int8 or is_packed(leaf):
        return None
    if name == "scale":  # by the deviation of the integers that are drawn
        return config.hidden_size**-0.5 / (4.6 if leaf.dtype == jnp.float16 else 73.0)
    if name == "bias":
        return 0.0
    return 1.0 if "norm" in path or name.endswith("scalar") else None


def _spread(path: str, config: ModelConfig) -> float:
    """Return the standard deviation of a matrix."""
    return config.hidden_size**-0.5 if not path.startswith("embed") or config.tie_embeddings else 1.0


def _random(
    path: str, leaf: jax.ShapeDtypeStruct, config: ModelConfig, precision: Precision, rng: np.random.Generator
) -> Any:
    value = _constant(path, leaf, config)
    if value is not None:
        return np.full(leaf.shape, value, leaf.dtype)
    if leaf.dtype == jnp.int8:
        return rng.integers(-127, 128, leaf.shape, np.int8)
    if is_packed(leaf):
        return rng.integers(0, 256, leaf.shape, np.uint8)
    values = rng.standard_normal(leaf.shape, np.float32)
    values *= _spread(path, config)
    return values.astype(precision.value_dtype(leaf.dtype)).view(leaf.dtype)
