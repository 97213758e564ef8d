"""Replacing a model's weights by others of the same graph, shapes and dtypes, so that compiled programs still fit."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rekindle._src.models.base import LoadedModel
from rekindle._src.models.loading.differences import listed
from rekindle._src.models.placement import Placement
from rekindle.errors import CheckpointError

if TYPE_CHECKING:
    from flax import nnx

    Weights = LoadedModel | nnx.Module | nnx.State | Mapping[str, Any]


def replace_weights(
    model: LoadedModel, weights: Weights, *, fingerprint: str | None = None, placement: Placement | None = None
) -> LoadedModel:
    """Return `model` with other weights. One `CheckpointError` lists the differences in names, shapes and dtypes.

    `weights` is another loaded model, a module of the same family, its nnx state, or arrays by path such as
    `layers.0.mlp.down.weight`. The result takes `fingerprint`, else the loaded model's own, else a new random
    one, so that nothing cached for other weights can match. If the running model lies on a mesh, `placement` puts the
    new weights there; `weights` are whole, as for one device.
    """
    leaves = _by_path(weights)
    shapes: Any = model.leaves if placement is None else placement.whole_shapes()
    running = dict(zip(model.graph.paths, shapes, strict=True))
    leaves |= {
        path: jax.lax.bitcast_convert_type(leaf, jnp.uint16)
        for path, leaf in leaves.items()
        if path in running and running[path].dtype == jnp.uint16 and leaf.dtype == model.graph.precision.weights
    }
    config = weights.config if isinstance(weights, LoadedModel) else None
    check_fits(running, leaves, same_config=config in (None, model.config))
    if fingerprint is None:
        fingerprint = weights.fingerprint if isinstance(weights, LoadedModel) else f"state-{uuid.uuid4().hex}"
    # To jax.jit, an array that is committed to its device where the old one was not means another program.
    placed = tuple(
        _put(leaves[path], old) if placement is None else placement.place(path, np.array(leaves[path]))
        for path, old in running.items()
    )
    folder = weights.folder if isinstance(weights, LoadedModel) else model.folder
    return dataclasses.replace(model, leaves=placed, fingerprint=fingerprint, folder=folder or model.folder)


def check_fits(wanted: Mapping[str, Any], found: Mapping[str, Any], *, same_config: bool) -> None:
    """Raise CheckpointError with the differences between the leaves of the running model and others, by path."""
    problems = [f"missing: {path}" for path in wanted if path not in found]
    problems += [f"unexpected: {path}" for path in found if path not in wanted]
    for path, old in wanted.items():
        new = found.get(path)
        if new is not None and (tuple(new.shape) != tuple(old.shape) or new.dtype != old.dtype):
            problems.append(f"{path}: {new.dtype}{list(new.shape)}, expected {old.dtype}{list(old.shape)}")
    if not same_config and not problems:
        problems.append("the configs differ")
    if problems:
        raise CheckpointError(
            f"The weights do not fit the running model ({len(problems)} differences): {listed(problems)}. "
            "Open a new session for them."
        )


def _put(new: Any, old: jax.Array) -> jax.Array:
    if not isinstance(new, jax.Array):
        new = np.array(
            new
        )  # a copy: on CPU, jax may use the caller's memory itself, which the caller may write to later
    return jax.device_put(new, old.sharding if old.committed else None)


def _by_path(weights: Weights) -> dict[str, Any]:
    if isinstance(weights, LoadedModel):
        return dict(zip(weights.graph.paths, weights.leaves, strict=True))
    from flax import nnx

    if isinstance(weights, nnx.Module):
        weights = nnx.state(weights, nnx.Param)
    if isinstance(weights, nnx.State):
        keyed, _ = jax.tree_util.tree_flatten_with_path(weights)
        return {".".join(str(key.key) for key in path[:-1]): leaf for path, leaf in keyed}
    return dict(weights)
