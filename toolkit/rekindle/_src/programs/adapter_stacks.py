"""The adapters on the device: for each site of a model, chunks of `CHUNK` rows of rank that all adapters share.

A chunk's arrays have fixed shapes, so that adapters come and go without a new program: `down` [modules · CHUNK, in],
and `up` [CHUNK, out], with the outputs of the site's modules one behind the other. In a stack of experts, each has
CHUNK rows of its own. Empty chunks of one shape are one array. A chunk that changes is replaced by a new one, which
steps in flight do not notice. On a mesh each device has the columns of `down` and `up` that belong to its part of the
weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from rekindle._src.core.records import UNIT, AdapterLoad
from rekindle._src.models.adapters.adapter import Adapter, Product
from rekindle._src.models.adapters.sites import Site
from rekindle._src.models.base import Placement
from rekindle._src.models.loading.hugepages import aligned
from rekindle._src.models.roles import Role, cut, local_shape
from rekindle._src.programs.device_layout import PARTS, WHOLE

CHUNK = 128
UNITS = CHUNK // UNIT  # of a chunk


class Chunk(NamedTuple):
    """One chunk of a site."""

    down: Any  # [modules · experts · CHUNK, in], where experts is 1 but for stacks of them
    up: Any  # [experts · CHUNK, out]


class Operands(NamedTuple):
    """The stacks as a program's operands."""

    owners: Any  # int32 [sites · chunks, UNITS]: the slot of each unit's adapter, 0 if it has no product at the site
    stacks: tuple[tuple[Chunk, ...], ...]  # of each site and chunk


class Stacks:
    """The arrays of all sites. One thread changes them, in the order of the steps."""

    def __init__(self, sites: Callable[[], tuple[Site, ...]], units: int, dtype: str, placement: Placement) -> None:
        """Make no array yet. `sites` is called when a program with adapters, or an adapter, is first needed."""
        self._find_sites, self.chunks, self._placement = sites, -(-units // UNITS), placement
        self._dtype = jnp.dtype(dtype)
        self._slots: dict[str, int] = {}  # by digest
        self._stacks: list[list[Chunk]] | None = None  # made at the first use
        self._operands: Operands | None = None  # of steps, until the stacks change
        self._host: dict[tuple[int, int], Chunk] = {}  # the content of chunks that are not empty

    @functools.cached_property
    def sites(self) -> tuple[Site, ...]:
        """The sites of the model."""
        return self._find_sites()

    @functools.cached_property
    def _owners(self) -> NDArray[np.int32]:
        return np.zeros((len(self.sites), self.chunks, UNITS), np.int32)

    @property
    def dtype(self) -> str:
        """The dtype of the matrices."""
        return self._dtype.name

    def slot(self, digest: str) -> int:
        """Return the slot of an adapter that is here."""
        return self._slots[digest]

    @functools.cached_property
    def shapes(self) -> Operands:
        """The shapes of the operands."""
        stacks = tuple((self._shape(site),) * self.chunks for site in self.sites)
        return Operands(jax.ShapeDtypeStruct((len(self.sites) * self.chunks, UNITS), np.int32), stacks)

    @property
    def layout(self) -> Any:
        """The layout of the operands on a mesh: each device has the rows and columns of its part of the weights."""
        return Operands(WHOLE, PARTS)  # type: ignore[arg-type]  # of all stacks

    def outputs(self, site: Site) -> tuple[int, ...]:
        """Return the outputs of each module of a site on a device."""
        return site.local_rows(self._placement.sizes)

    def own(self, array: Array) -> Array:
        """Return a device's part of a stack in a program."""
        return array[0] if self._placement.divided else array

    @property
    def operands(self) -> Operands:
        """The operands of the next step."""
        if self._operands is None:
            if self._stacks is None:
                self._stacks = self._placed()
            owners: Any = self._owners.reshape(-1, UNITS)  # a mesh takes it from the host
            owners = owners.copy() if self._placement.divided else jax.device_put(owners)
            self._operands = Operands(owners, tuple(map(tuple, self._stacks)))
        return self._operands

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks that hold adapters."""
        return sum(array.nbytes for chunk in self._host.values() for array in chunk)

    def free(self) -> None:
        """Let go of the device's arrays, which the next step brings back from host memory."""
        self._stacks = self._operands = None

    def put(self, load: AdapterLoad) -> None:
        """Put an adapter into a slot. Its units' former content is lost."""
        adapter = load.adapter
        assert isinstance(adapter, Adapter), "adapters of a session have weights"
        owners = self._owners.copy()
        self._slots = {digest: slot for digest, slot in self._slots.items() if slot != load.slot}
        owners[owners == load.slot] = 0
        places = [divmod(unit, UNITS) for unit in load.units]
        rows: dict[int, list[tuple[int, int]]] = {}  # of each chunk: the row of the chunk, and that of the adapter
        for number, (chunk, unit) in enumerate(places):
            rows.setdefault(chunk, []).append((unit * UNIT, number * UNIT))
        stacks = self._placed() if self._stacks is None else [list(chunks) for chunks in self._stacks]
        changed: dict[tuple[int, int], Chunk] = {}
        for index, site in enumerate(self.sites):
            products = adapter.products.get(site.path)
            for chunk, pairs in rows.items():
                units = [start // UNIT for start, _ in pairs]
                if products is None:  # the rest of the buffer is unused
                    owners[index, chunk, units] = 0
                    continue
                content = self._filled(self._host.get((index, chunk)), site, products, pairs)
                owners[index, chunk, units] = load.slot
                changed[index, chunk] = content
                stacks[index][chunk] = self._put(site, content)
        self._host.update(changed)
        self._owners, self._stacks, self._operands = owners, stacks, None
        self._slots[adapter.digest] = load.slot

    def _filled(
        self, old: Chunk | None, site: Site, products: tuple[Product | None, ...], pairs: list[tuple[int, int]]
    ) -> Chunk:
        """Return a chunk with other rows: of each pair, UNIT rows of the chunk from the first number on. Its memory is
        new, since a CPU device uses that of the old one."""
        spans, experts = site.spans, max(1, site.experts)
        shapes = (len(spans) * experts * CHUNK, site.inputs), (experts * CHUNK, site.outputs)
        whole = Chunk(*(aligned(shape, self._dtype) for shape in shapes))
        for array, before in zip(whole, old or (0, 0), strict=True):
            array[...] = before
        down = whole.down.reshape(len(spans), experts, CHUNK, -1)
        up = whole.up.reshape(experts, CHUNK, -1)
        for start, first in pairs:
            down[:, :, start : start + UNIT] = 0
            up[:, start : start + UNIT] = 0
            for index, product in enumerate(products):
                if product is not None:
                    expert, module = divmod(index, len(spans))
                    rank = max(0, min(UNIT, len(product.down) - first))
                    down[module, expert, start : start + rank] = product.down[first : first + rank]
                    up[expert, start : start + rank, spans[module]] = product.up[:, first : first + rank].T
        return whole

    def _put(self, site: Site, content: Chunk) -> Chunk:
        """Put a chunk on the device, or its parts on those of a mesh."""
        place_of, experts, sizes = self._placement.parts, max(1, site.experts), self._placement.sizes
        if not self._placement.divided:
            return Chunk(*(jax.device_put(array, may_alias=True) for array in content))
        down = content.down.reshape(len(site.rows), experts, CHUNK, -1)
        up = content.up.reshape(experts, CHUNK, -1)

        def part(array: Any, role: Role, place: Any) -> Any:
            own = cut(role, array, sizes, place)
            return own.reshape(-1, own.shape[-1])

        return Chunk(
            place_of(functools.partial(part, down, site.down_role)), place_of(functools.partial(part, up, site.up_role))
        )

    def _shape(self, site: Site) -> Chunk:
        """Return the shapes of a chunk, on a mesh with an axis of devices."""
        experts, sizes = max(1, site.experts), self._placement.sizes
        down = local_shape(site.down_role, (len(site.rows), experts, CHUNK, site.inputs), sizes)
        up = local_shape(site.up_role, (experts, CHUNK, site.outputs), sizes)
        shapes = (math.prod(down[:-1]), down[-1]), (math.prod(up[:-1]), up[-1])
        return Chunk(*(jax.ShapeDtypeStruct(self._placement.part_shape(shape), self._dtype) for shape in shapes))

    def _placed(self) -> list[list[Chunk]]:
        """Return new arrays on the device, with what host memory has."""
        stacks = self._empty()
        for (index, chunk), content in self._host.items():
            stacks[index][chunk] = self._put(self.sites[index], content)
        return stacks

    def _empty(self) -> list[list[Chunk]]:
        zeros: dict[tuple[int, ...], Array] = {}

        def empty(shape: jax.ShapeDtypeStruct) -> Array:
            if shape.shape not in zeros:
                own = shape.shape[1:] if self._placement.divided else shape.shape
                zeros[shape.shape] = self._placement.parts(lambda place: np.zeros(own, self._dtype))
            return zeros[shape.shape]

        shapes = (self._shape(site) for site in self.sites)
        return [[Chunk(*map(empty, shape))] * self.chunks for shape in shapes]
