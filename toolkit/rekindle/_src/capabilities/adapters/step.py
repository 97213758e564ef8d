"""Adapters in a step: rows with different ones, or without, in one batch, in programs of a variant of their own.

Axes: R decode rows, S prefill sequences, N = R + S, T tokens of the step.

Each matrix that may have adapters gets a delta that adds them: `rekindle_kernels.add_adapters`, once for each chunk of
the stacks. Tokens without an adapter keep their numbers to the last bit. On a CPU these are native calls,
which runs of other native calls go through.

On the device, each site of a model has chunks of `CHUNK` rows of rank that all adapters share. A chunk's arrays have
fixed shapes, so that adapters come and go without a new program: `down` [modules · CHUNK, in], and `up` [CHUNK, out],
with the outputs of the site's modules one after the other. In a stack of experts, each has CHUNK rows of its own.
Empty chunks of one shape are one array. A chunk that changes is replaced by a new one, which steps in flight do not
notice. On a mesh each device has the columns of `down` and `up` that belong to its part of the weights.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

import rekindle_kernels
from rekindle._src.capabilities.adapters.request import AdapterUse
from rekindle._src.capabilities.adapters.slots import UNIT, AdapterLoad
from rekindle._src.core.extension import DeviceLoad
from rekindle._src.core.records import Request, StepPlan
from rekindle._src.models.adapters.adapter import Adapter, Product
from rekindle._src.models.adapters.sites import Site
from rekindle._src.models.base import Placement
from rekindle._src.models.hooks import Norm
from rekindle._src.models.loading.hugepages import aligned
from rekindle._src.models.roles import Role, cut, local_shape
from rekindle._src.programs.buckets import ProgramVariant
from rekindle._src.programs.partitioning import PARTS, WHOLE
from rekindle._src.programs.row_option import Columns, RowOption
from rekindle._src.programs.step_part import Hooks, StepInputs, StepPart
from rekindle_kernels import AdaptedTokens

CHUNK = 128
UNITS = CHUNK // UNIT  # of a chunk


class Chunk(NamedTuple):
    """One chunk of a site."""

    down: Any  # [modules · experts · CHUNK, in], where experts is 1 but for stacks of them
    up: Any  # [experts · CHUNK, out]


log = logging.getLogger("rekindle.session")


class AdapterOperands(NamedTuple):
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
        self._failed: dict[str, AdapterLoad] = {}  # by digest; tried again for each request
        self._stacks: list[list[Chunk]] | None = None  # made at the first use
        self._operands: AdapterOperands | None = None  # of steps, until the stacks change
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
        """Return the slot of an adapter that was loaded. Put it there if that failed before."""
        failed = self._failed.get(digest)
        if failed is not None:
            self._put_load(failed)
            del self._failed[digest]
        return self._slots[digest]

    @functools.cached_property
    def shapes(self) -> AdapterOperands:
        """The shapes of the operands."""
        stacks = tuple((self._shape(site),) * self.chunks for site in self.sites)
        return AdapterOperands(jax.ShapeDtypeStruct((len(self.sites) * self.chunks, UNITS), np.int32), stacks)

    @property
    def layout(self) -> Any:
        """The layout of the operands on a mesh: each device has the rows and columns of its part of the weights."""
        return AdapterOperands(WHOLE, PARTS)  # type: ignore[arg-type]  # of all stacks

    def outputs(self, site: Site) -> tuple[int, ...]:
        """Return the outputs of each module of a site on a device."""
        return site.local_rows(self._placement.sizes)

    def own(self, array: Array) -> Array:
        """Return a device's part of a stack in a program."""
        return array[0] if self._placement.divided else array

    @property
    def operands(self) -> AdapterOperands:
        """The operands of the next step."""
        if self._operands is None:
            if self._stacks is None:
                self._stacks = self._placed()
            owners: Any = self._owners.reshape(-1, UNITS)  # a mesh takes it from the host
            owners = owners.copy() if self._placement.divided else jax.device_put(owners)
            self._operands = AdapterOperands(owners, tuple(map(tuple, self._stacks)))
        return self._operands

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks that hold adapters."""
        return sum(array.nbytes for chunk in self._host.values() for array in chunk)

    def free(self) -> None:
        """Let go of the device's arrays, which the next step brings back from host memory."""
        self._stacks = self._operands = None

    def load(self, load: AdapterLoad) -> None:
        """Put an adapter into a slot. Its units' former content is lost. If it fails, requests try again."""
        units = set(load.units)
        for digest, failed in tuple(self._failed.items()):
            if digest == load.adapter.digest or failed.slot == load.slot or not units.isdisjoint(failed.units):
                del self._failed[digest]
        try:
            self._put_load(load)
        except Exception as error:
            log.warning("the adapter %r could not be put on the device: %r", load.adapter.name, error)
            self._failed[load.adapter.digest] = load

    def _put_load(self, load: AdapterLoad) -> None:
        adapter = load.adapter
        assert isinstance(adapter, Adapter), "adapters of a session have weights"
        owners = self._owners.copy()
        self._slots = {digest: slot for digest, slot in self._slots.items() if slot != load.slot}
        owners[owners == load.slot] = 0
        places = [divmod(unit, UNITS) for unit in load.units]
        rows: dict[int, list[tuple[int, int]]] = {}  # of each chunk: the row of the chunk, and the adapter's row
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
        """Return a chunk with some rows replaced: a pair has the number of its first row in the chunk and in the
        products, for UNIT rows. The chunk gets new memory, since a CPU device uses the old chunk's.
        """
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
        """Put a chunk on the device, or its parts on the devices of a mesh."""
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


class AdapterOption(RowOption[Array]):
    """The adapter of a row: its slot in a column."""

    option, ints = AdapterUse, 1

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks

    def constants(self, request: Request) -> tuple[tuple[int, ...], tuple[float, ...]]:
        use = request.extensions.get(AdapterUse)
        assert use is not None, "its option"
        return (self._stacks.slot(use.adapter.digest),), ()

    def in_plan(self, plan: StepPlan) -> bool:
        return bool([row for row in plan.rows if AdapterUse in row.request.extensions])

    def unpack(self, columns: Columns) -> Array:
        slots: Array = columns.ints[:, 0]
        return slots


class Adapters(StepPart[Array, AdapterOperands]):
    """The adapters of rows. Operands are the stacks, which `load` changes between steps."""

    variant, inside = ProgramVariant.ADAPTERS, True

    def __init__(self, stacks: Stacks, *, ahead: bool = False, implementation: str | None = None) -> None:
        self.stacks, self.warmed = stacks, ahead
        self._implementation, self.matrices = implementation, stacks.dtype

    @property
    def operands(self) -> AdapterOperands:  # type: ignore[override]
        return self.stacks.operands

    @property
    def operand_shapes(self) -> AdapterOperands:
        return self.stacks.shapes

    @property
    def operand_layout(self) -> object:  # type: ignore[override]
        return self.stacks.layout

    def load(self, loads: Sequence[DeviceLoad]) -> None:
        for load in loads:
            if isinstance(load, AdapterLoad):
                self.stacks.load(load)

    def free(self) -> None:
        self.stacks.free()

    def hooks(self, inputs: StepInputs, own: Array, operands: AdapterOperands) -> Hooks:
        tokens = AdaptedTokens.of(inputs.of_tokens(own))
        deltas: dict[str, _Delta] = {}
        for index, site in enumerate(self.stacks.sites):
            chunks = [Chunk(*map(self.stacks.own, chunk)) for chunk in operands.stacks[index]]
            outputs, first = self.stacks.outputs(site), index * len(chunks)
            deltas[site.path] = _Delta(chunks, operands.owners, outputs, first, tokens, self._implementation)
        return Hooks(deltas=deltas)


class _Delta:
    """The sum that the adapters of a step's tokens add at one site."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        owners: Array,
        outputs: tuple[int, ...],
        first: int,
        tokens: AdaptedTokens,
        implementation: str | None,
    ) -> None:
        self._chunks, self._owners, self._outputs, self._first = chunks, owners, outputs, first
        self._tokens, self._implementation = tokens, implementation

    def add(self, y: Array, x: Array, gate: str | None = None, norm: Norm | None = None) -> Array:
        """Return y [T, out] plus the adapters' products of x [T, in]; with the name of an activation, gated by it."""
        if norm is not None and len(self._chunks) > 1:
            x, norm = norm(x), None  # once for all of them
        flat, rows = y.reshape(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        with jax.named_scope("adapters"):
            added = self._added(flat, rows, self._owners, self._tokens, self._first, gate, norm)
        return added.reshape(*y.shape[:-1], -1)

    @property
    def needed(self) -> Array:
        """A bool: true if an adapter on the device has a product here."""
        return (self._own_owners > 0).any()

    @jax.named_scope("adapters")
    def add_to_rows(self, y: Array, x: Array, sizes: Array, tokens: Array) -> Array:
        """Return y [M, out] plus the adapters' products of x [M, in], rows of tokens sorted by expert.

        Each expert of an adapter has rows of rank of its own: to the products, it is an adapter.
        """
        count, place = sizes.shape[0], jnp.arange(x.shape[0])
        experts = jnp.repeat(jnp.arange(count), sizes, total_repeat_length=x.shape[0])
        slots = jnp.where(place < sizes.sum(), self._tokens.slots[tokens], 0)  # the rest is of other devices' experts
        own = self._own_owners[:, None]
        owners = jnp.where(own > 0, own * count + jnp.arange(count)[:, None], 0).reshape(len(self._chunks), -1)
        pairs = AdaptedTokens.of(jnp.where(slots > 0, slots * count + experts, 0).astype(jnp.int32))
        return self._added(y, x, owners.astype(jnp.int32), pairs, 0)

    @property
    def _own_owners(self) -> Array:
        """The owners of this site's units [chunks, UNITS]."""
        own: Array = self._owners[self._first : self._first + len(self._chunks)]
        return own

    def _added(
        self,
        y: Array,
        x: Array,
        owners: Array,
        tokens: AdaptedTokens,
        first: int,
        gate: str | None = None,
        norm: Norm | None = None,
    ) -> Array:
        last = len(self._chunks) - 1
        for index, chunk in enumerate(self._chunks):
            y = rekindle_kernels.add_adapters(
                y,
                x,
                chunk.down,
                chunk.up,
                owners,
                tokens,
                place=first + index,
                outputs=self._outputs,
                gate=gate if index == last else None,
                norm=None if norm is None else norm.weight[...],
                eps=0.0 if norm is None else norm.eps,
                implementation=self._implementation,
            )
        return y
