"""Random models that are too large for one device: their weights are divided over devices one by one."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from rekindle._src.core.dtypes import checked_dtype
from rekindle._src.core.mesh_shape import checked_mesh
from rekindle._src.core.options import Mesh
from rekindle._src.models.base import LoadedModel, abstract_model, draw, random_name
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.placement import placement_of


def random_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: DTypeLike = jnp.float32,
    quantize: str | Mapping[str, str | None] | None = None,
    quantize_embeddings: bool = True,
    mesh: Mesh | None = None,
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
    name = random_name(config, seed, dtype, quantize)
    if placement is None:
        return LoadedModel(config, graph, tuple(leaves), name)
    parts = (placement.place(path, np.asarray(leaf)) for path, leaf in zip(graph.paths, leaves, strict=True))
    return LoadedModel(config, graph, tuple(parts), name, placement=placement)
