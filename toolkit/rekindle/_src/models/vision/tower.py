"""An encoder as a graph and its leaves, as programs take it: enough to compile them comes without the weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
from jax import Array
from jax.typing import DTypeLike

from rekindle._src.models.precision import Precision
from rekindle._src.models.vision.config import VisionConfig
from rekindle._src.models.vision.inputs import ImagePatches, PackedPictures, PatchBatch
from rekindle._src.models.vision.layers import PictureEmbeddings, VisionTower
from rekindle._src.models.vision.registry import tower_family


@dataclasses.dataclass(frozen=True, slots=True)
class TowerGraph:
    """Everything static in an encoder. It is hashable, and equal for equal configs and precisions."""

    config: VisionConfig
    precision: Precision
    paths: tuple[str, ...]  # "layers.0.attention.qkv.weight"…, in the order of the leaves


class AbstractTower(NamedTuple):
    """An encoder without its weights."""

    graph: TowerGraph
    shapes: tuple[jax.ShapeDtypeStruct, ...]  # of the leaves


def abstract_tower(config: VisionConfig, dtype: DTypeLike = "float32") -> AbstractTower:
    """Return the graph and the shapes of the leaves, for matrices of a dtype: float32, bfloat16 or float16.

    Norms and biases are float32. So is everything computed between matrices on a CPU; elsewhere it has their dtype.
    """
    precision = Precision.of(dtype)
    _, state = _split(config, precision)
    keyed, _ = jax.tree_util.tree_flatten_with_path(state)
    paths = tuple(".".join(str(key.key) for key in path[:-1]) for path, _ in keyed)
    return AbstractTower(TowerGraph(config, precision, paths), tuple(leaf for _, leaf in keyed))


def merge_tower(graph: TowerGraph, leaves: Sequence[Any]) -> VisionTower:
    """Return the module of a graph and its leaves (arrays or tracers)."""
    from flax import nnx

    definition, state = _split(graph.config, graph.precision)
    return cast(VisionTower, nnx.merge(definition, jax.tree.unflatten(jax.tree.structure(state), leaves)))


def encode(graph: TowerGraph, leaves: Sequence[Array], batch: PatchBatch) -> PictureEmbeddings:
    """Encode the pictures of a batch, all at once. It is pure; `steps.py` computes the same in small steps."""
    return merge_tower(graph, leaves)(batch)


def encoder_of(graph: TowerGraph) -> Callable[[Sequence[Array], PatchBatch], PictureEmbeddings]:
    """Return `encode` for a graph; it compiles once for each size of batches."""
    return jax.jit(functools.partial(encode, graph))


def pack_images(images: Sequence[ImagePatches], config: VisionConfig) -> PackedPictures:
    """Return pictures as the encoder of this config takes them."""
    entry = tower_family(config.model_type)
    return PackedPictures(images, config, entry.positions, blocks=entry.blocks)


@functools.lru_cache(maxsize=4)
def _split(config: VisionConfig, precision: Precision) -> tuple[Any, Any]:
    from flax import nnx

    definition, state = nnx.split(tower_family(config.model_type).module(config, precision))
    return definition, state
