"""An adapter in the programs of gradients: its products are operands, so that one program serves all of its shape.

Axes: T tokens, M rows of experts, r rank, X experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rekindle._src.models.adapters.adapter import Adapter, Product
from rekindle._src.models.adapters.sites import sites_of
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.hooks import Delta, ExpertsDelta, Norm
from rekindle_kernels import gated

AdapterShape = tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]  # paths of matrices, shapes of `down` and `up`


class AdapterPair(NamedTuple):
    """The product that is added to one matrix, or to each of a stack of experts."""

    down: Any  # [r, in], or [X, r, in]
    up: Any  # [out, r], or [X, out, r]


AdapterArrays = Mapping[str, AdapterPair]  # by the paths of matrices, such as "layers.0.attention.qkv"


def arrays_of(adapter: Adapter, model: ModelConfig) -> dict[str, AdapterPair]:
    """Return an adapter's products: one for each matrix, also where several modules lie in it."""
    pairs: dict[str, AdapterPair] = {}
    for site in sites_of(model).sites:
        products = adapter.products.get(site.path)
        if products is None:
            continue
        count = len(site.rows)
        units = [_joined(products[at : at + count], site.rows, site.inputs) for at in range(0, len(products), count)]
        if site.experts:
            rank = max(unit.down.shape[0] for unit in units)
            units = [_padded(unit, rank) for unit in units]
            pairs[site.path] = AdapterPair(*(np.stack(each) for each in zip(*units, strict=True)))
        else:
            (pairs[site.path],) = units
    return pairs


def _joined(products: Sequence[Product | None], rows: Sequence[int], inputs: int) -> AdapterPair:
    rank = sum(len(product.down) for product in products if product)
    down, up = np.zeros((rank, inputs), np.float32), np.zeros((sum(rows), rank), np.float32)
    row = at = 0
    for product, size in zip(products, rows, strict=True):
        if product is not None:
            own = slice(at, at + len(product.down))
            down[own], up[row : row + size, own] = product.down, product.up
            at = own.stop
        row += size
    return AdapterPair(down, up)


def _padded(unit: AdapterPair, rank: int) -> AdapterPair:
    more = rank - unit.down.shape[0]
    return AdapterPair(np.pad(unit.down, ((0, more), (0, 0))), np.pad(unit.up, ((0, 0), (0, more))))


def shape_of(arrays: AdapterArrays) -> AdapterShape:
    """Return the shapes of an adapter's arrays."""
    return tuple((path, np.shape(pair.down), np.shape(pair.up)) for path, pair in sorted(arrays.items()))


def shapes_of(adapter: AdapterShape) -> dict[str, AdapterPair]:
    """Return them as operands."""
    return {path: AdapterPair(*(jax.ShapeDtypeStruct(size, np.float32) for size in sizes)) for path, *sizes in adapter}


def shape_digest(adapter: AdapterShape) -> str:
    """Return a digest of shapes, for the name of a program."""
    return hashlib.blake2b(repr(adapter).encode(), digest_size=8).hexdigest()


def deltas_of(arrays: AdapterArrays) -> dict[str, Delta | ExpertsDelta]:
    """Return the additions to a model's matrices."""
    return {path: _ExpertsProduct(pair) if pair.down.ndim == 3 else _Product(pair) for path, pair in arrays.items()}


class _Product:
    """The product of an adapter with the rows of one matrix."""

    def __init__(self, pair: AdapterPair) -> None:
        self._pair = pair

    def add(self, y: Array, x: Array, gate: str | None = None, norm: Norm | None = None) -> Array:
        rows = (x if norm is None else norm(x)).astype(jnp.float32)
        narrow = jnp.einsum("...i,ri->...r", rows, self._pair.down, precision="highest")
        y = y + jnp.einsum("...r,or->...o", narrow, self._pair.up, precision="highest").astype(y.dtype)
        return y if gate is None else gated(y, gate, implementation="xla")


class _ExpertsProduct:
    """The products of an adapter with rows that are sorted by expert."""

    needed: Any = True

    def __init__(self, pair: AdapterPair) -> None:
        self._pair = pair

    def add_to_rows(self, y: Array, x: Array, sizes: Array, tokens: Array) -> Array:
        ends, index, rows = jnp.cumsum(sizes), jnp.arange(x.shape[0]), x.astype(jnp.float32)

        def add(total: Array, expert: tuple[AdapterPair, Array, Array]) -> tuple[Array, None]:
            pair, start, stop = expert
            own = jnp.where(((index >= start) & (index < stop))[:, None], rows, 0.0)
            narrow = jnp.einsum("mi,ri->mr", own, pair.down, precision="highest")
            return total + jnp.einsum("mr,or->mo", narrow, pair.up, precision="highest"), None

        total, _ = jax.lax.scan(add, jnp.zeros(y.shape, jnp.float32), (self._pair, ends - sizes, ends))
        return y + total.astype(y.dtype)
