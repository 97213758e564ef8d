"""An adapter (LoRA): products of two narrow matrices that are added to matrices of a model."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.words import count
from rekindle._src.models.loading.tensor_files import listed
from rekindle.errors import CheckpointError, InvalidRequest

Matrix = NDArray[np.float32]


class Product(NamedTuple):
    """The product `up · down` that an adapter adds to one module, with its scale in `up`."""

    down: Matrix  # [rank, in]
    up: Matrix  # [out, rank]


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Adapter:
    """The products of one adapter, and the digest in the keys of its pages.

    `products` has one for each module of a site, by the site's path, and None for a module without one.
    """

    name: str
    digest: str
    products: Mapping[str, tuple[Product | None, ...]]
    trained_on: str = ""  # how the weights were held, if it was trained in a session

    @property
    def rank(self) -> int:
        """The largest rank of its products."""
        return max(len(product.down) for products in self.products.values() for product in products if product)

    @property
    def largest(self) -> float:
        """The largest absolute value of its numbers."""
        products = (product for products in self.products.values() for product in products if product)
        return max(float(np.abs(matrix).max()) for product in products for matrix in product)

    @property
    def nbytes(self) -> int:
        products = (product for products in self.products.values() for product in products if product)
        return sum(product.down.nbytes + product.up.nbytes for product in products)

    def __repr__(self) -> str:
        modules = sum(product is not None for products in self.products.values() for product in products)
        return f"<Adapter {self.name}: rank {self.rank}, {modules} modules, {self.digest[:8]}>"


def does_not_fit(shown: object, problems: Sequence[str]) -> CheckpointError:
    """Return the error for an adapter with these problems."""
    return CheckpointError(
        f"The adapter {shown} does not fit the model ({count(len(problems), 'problem')}): {listed(problems)}. Pass one "
        "that was trained on this model."
    )


def adapter_of(name: str, products: Mapping[str, Sequence[Product | None]]) -> Adapter:
    """Return an adapter of these products. Raise CheckpointError for numbers that are not finite."""
    digest = hashlib.blake2b(digest_size=16)
    stored: dict[str, tuple[Product | None, ...]] = {}
    for path in sorted(products):
        entries: list[Product | None] = []
        for index, product in enumerate(products[path]):
            if product is None:
                entries.append(None)
                continue
            digest.update(f"{path} {index} {product.down.shape} {product.up.shape}\0".encode())
            matrices = [np.ascontiguousarray(matrix, np.float32) for matrix in product]
            for matrix in matrices:
                if not np.isfinite(matrix).all():
                    raise CheckpointError(
                        f"The adapter {name!r} has numbers in {path} that are not finite. Train it again, with a "
                        "smaller learning rate."
                    )
                digest.update(matrix.data)
            entries.append(Product(*matrices))
        if any(entries):
            stored[path] = tuple(entries)
    if not stored:
        raise CheckpointError(f"The adapter {name!r} has no tensors. Check how it was saved.")
    return Adapter(name, digest.hexdigest(), stored)


def combined(parts: Sequence[tuple[Adapter, float]]) -> Adapter:
    """Return the weighted sum of adapters as one adapter. Its rank is the sum of their ranks.

    Raise InvalidRequest if its numbers are not finite with these weights: other rows of a step would get them, too.
    """
    if len(parts) == 1 and parts[0][1] == 1.0:
        return parts[0][0]
    digest = hashlib.blake2b(digest_size=16)
    for adapter, weight in parts:
        digest.update(f"{adapter.digest} {float(weight).hex()}\0".encode())
    products: dict[str, tuple[Product | None, ...]] = {}
    for path in dict.fromkeys(path for adapter, _ in parts for path in adapter.products):
        of_parts = [(adapter.products[path], weight) for adapter, weight in parts if path in adapter.products]
        modules = zip(*(products for products, _ in of_parts), strict=True)
        with np.errstate(over="ignore", invalid="ignore"):
            weights = [np.float32(weight) for _, weight in of_parts]
            products[path] = tuple(_sum([*zip(module, weights, strict=True)]) for module in modules)
        if not all(np.isfinite(product.up).all() for product in products[path] if product is not None):
            shown = {adapter.name: weight for adapter, weight in parts}
            raise InvalidRequest("adapter", shown, f"makes numbers in {path} that are not finite", "Pass lower weights")
    name = " + ".join(f"{weight:g} {adapter.name}" for adapter, weight in parts)
    return Adapter(name, digest.hexdigest(), products)


def _sum(terms: Sequence[tuple[Product | None, np.float32]]) -> Product | None:
    weighted = [(product.down, product.up * weight) for product, weight in terms if product is not None]
    if not weighted:
        return None
    downs, ups = zip(*weighted, strict=True)
    return Product(np.concatenate(downs), np.concatenate(ups, axis=1))
