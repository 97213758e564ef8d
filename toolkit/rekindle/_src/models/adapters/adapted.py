"""Models with something added: to what layers compute, by adapters of a step or one that is trained, or to weights."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rekindle._src.models.adapters.adapter import Adapter
from rekindle._src.models.adapters.sites import sites_of
from rekindle._src.models.base import LoadedModel
from rekindle.errors import ConfigError
from rekindle_kernels import gated

if TYPE_CHECKING:
    from rekindle._src.models.nn.linear import RMSNorm


class Delta(Protocol):
    """An addition at one site."""

    def add(self, y: Array, x: Array, gate: str | None = None, norm: RMSNorm | None = None) -> Array:
        """Return y [T, out] plus what is made of x [T, in], normed if there is a norm; gated [T, out / 2] if an
        activation is named."""
        ...


class ExpertsDelta(Protocol):
    """An addition to the products of a stack of experts."""

    @property
    def needed(self) -> Array:
        """A bool: if it is false, nothing is added."""
        ...

    def add_to_rows(self, y: Array, x: Array, sizes: Array, tokens: Array) -> Array:
        """Return y [M, out] plus what is made of x [M, in].

        The first sizes[0] rows are of expert 0, the next sizes[1] of expert 1, …, and row m belongs to tokens[m].
        """
        ...


def adapt(model: Any, path: str, delta: Delta) -> None:
    """Replace the layer at a path, such as "layers.0.attention.qkv", by one that adds to it."""
    owner, _, name = path.rpartition(".")
    parent = _at(model, owner)
    setattr(parent, name, _AdaptedLinear(getattr(parent, name), delta))


def adapt_experts(model: Any, path: str, gate_up: ExpertsDelta, down: ExpertsDelta) -> None:
    """Change the experts at a path, such as "layers.0.mlp", so that they add to both of their products."""
    experts = _at(model, path)
    experts.compute = _AdaptedExperts(experts, experts.compute, gate_up, down)


def _at(model: Any, path: str) -> Any:
    for part in path.split("."):
        model = model[int(part)] if part.isdecimal() else getattr(model, part)
    return model


class _AdaptedLinear:
    """A linear layer with a delta, in the place of the layer. Both norm its rows on the way into their products."""

    def __init__(self, layer: Any, delta: Delta) -> None:
        self._layer, self._delta = layer, delta

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(
        self, x: Array, *, norm: RMSNorm | None = None, gate: str | None = None, residual: Array | None = None
    ) -> Array:
        y = self._layer(x, norm=norm, residual=residual if gate is None else None)
        y = self._added(y, x, gate, norm)
        return y if gate is None or residual is None else residual + y

    def _added(self, y: Array, x: Array, gate: str | None, norm: RMSNorm | None) -> Array:
        shards = getattr(self._layer, "shards", None)
        if shards is None:
            return self._delta.add(y, x, gate, norm)
        # x is a device's part of the inputs.
        whole: Array = y + shards.sum(self._delta.add(jnp.zeros_like(y), x, None, norm))
        return whole if gate is None else gated(whole, gate, implementation=self._layer.implementation)


class _AdaptedExperts:
    """The products of experts with deltas, in the place of `Experts.compute`, which runs where neither is needed."""

    def __init__(self, experts: Any, plain: Any, gate_up: ExpertsDelta, down: ExpertsDelta) -> None:
        self._experts, self._plain, self._gate_up, self._down = experts, plain, gate_up, down

    def __call__(self, rows: Array, sizes: Array, tokens: Array) -> Array:
        def adapted() -> Array:
            experts = self._experts
            with jax.named_scope("adapters"):
                wide = experts.product(experts.gate_up, rows, sizes)
                hidden = experts.activated(self._gate_up.add_to_rows(wide, rows, sizes, tokens))
                out = experts.product(experts.down, hidden, sizes)
                return self._down.add_to_rows(out, hidden, sizes, tokens)

        needed = self._gate_up.needed | self._down.needed
        result: Array = lax.cond(needed, adapted, lambda: self._plain(rows, sizes, tokens))
        return result


def merged(model: LoadedModel, adapter: Adapter) -> LoadedModel:
    """Return a model with an adapter's products added to its matrices, in their own dtype; it then costs nothing."""
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
