"""Models with an adapter in their weights."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from rekindle._src.models.adapters.adapter import Adapter
from rekindle._src.models.adapters.sites import sites_of
from rekindle._src.models.base import LoadedModel, precision_name
from rekindle.errors import ConfigError


def merged(model: LoadedModel, adapter: Adapter) -> LoadedModel:
    """Return a model with an adapter's products added to its matrices, in their own dtype; it then costs nothing."""
    held = precision_name(model.graph, model.leaves)
    if adapter.trained_on not in ("", held):
        raise ConfigError(
            "merge", adapter.name,
            f"was trained on weights held as {adapter.trained_on}; merged into {held}, it is another model",
            "Open the weights that it was trained on, and load it there with load_adapter",
        )  # fmt: skip
    leaves = dict(zip(model.graph.paths, model.leaves, strict=True))
    for site in sites_of(model.config).sites:
        products = adapter.products.get(site.path)
        if products is None:
            continue
        path = f"{site.path}.weight"
        leaf, matrix = leaves[path], (site.outputs, site.inputs)
        values = model.graph.precision.value_dtype(leaf.dtype)  # experts may be kept as bits
        whole_shape = (site.experts, *matrix) if site.experts else matrix
        if model.placement.divided or leaf.shape != whole_shape or values.kind in "iu":
            raise ConfigError(
                "merge", adapter.name, f"can't be added to {path}, which is quantised or divided",
                "Load it as an adapter, or open the model in 16 bits on one device",
            )  # fmt: skip
        whole = np.array(np.asarray(leaf).view(values), np.float32)
        matrices, spans = whole.reshape(-1, *matrix), site.spans
        for index, product in enumerate(products):
            if product is not None:
                expert, part = divmod(index, len(spans))
                matrices[expert, spans[part]] += product.up @ product.down
        leaves[path] = jax.device_put(whole.astype(values).view(leaf.dtype))
    fingerprint = f"{model.fingerprint}+{adapter.digest}"
    return dataclasses.replace(model, leaves=tuple(leaves.values()), fingerprint=fingerprint)
