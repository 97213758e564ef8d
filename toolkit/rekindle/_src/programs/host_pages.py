"""Pages off the devices: the parts that each of several processes has, and transfers through pinned memory.

Off the devices a page is whole, with every kv head once, as on a single device, or it is the part of one process:
the heads that its devices have, each once and in order. Programs take and return arrays over all devices; a
process sees its own devices' parts of them. For one process all of these are the same.

Between an accelerator and the host, a transfer through pinned memory is one copy for each array of a layer, and nothing
waits for it. From ordinary memory the runtime would copy every page to pinned memory of its own, one after the other. A
CPU has no use for that, and where a session has several processes, pages are exchanged one by one. The copies are no
part of the programs that gather and scatter pages. XLA for an H100 and for a v5e does compile a gather with its
result in such memory, but that program ends when the copy has ended, and the next step waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.partitioning import PAYLOAD_HEADS, Partitioning
from rekindle_kernels import current_platform

PayloadLayout = list[tuple[tuple[int, ...], Any]]  # shape and dtype of each array of one page
Heads = Sequence[np.ndarray]  # the indices of some kv heads, for each array of a page


class PageParts:
    """This process's parts of a session's pages, and conversions between parts and whole pages.

    This class serves a single process, which has whole pages; `DividedPageParts` serves one of several.
    """

    def __init__(self, parts: Partitioning, kv: paged.KV) -> None:
        self._parts, self._kv = parts, kv
        self.whole = parts.payload_layout(kv)
        self.layout = self.whole  # of this process's part

    @classmethod
    def of(cls, parts: Partitioning, kv: paged.KV) -> PageParts:
        """Return the parts of this process."""
        return DividedPageParts(parts, kv) if parts.multi_process else PageParts(parts, kv)

    @property
    def own_heads(self) -> Heads:
        """The kv heads of a whole page that are in this process's part."""
        return [np.arange(shape[PAYLOAD_HEADS]) for shape, _ in self.whole]

    def heads(self, process: int) -> Heads:
        """Return the kv heads of a whole page that the devices of a process have."""
        places = self._parts.heads_of(process, self._kv)
        return [np.unique(at // copies) for at, copies in zip(places, self._parts.copies(len(places)), strict=True)]

    def to_host(self, payload: paged.Payload) -> list[np.ndarray]:
        """Wait for pages of `gather`, and return this process's part of them in host memory."""
        return self._parts.to_host(payload)

    def collect(self, payload: paged.Payload) -> list[np.ndarray]:
        """Wait for whole pages of `collect`, and return this process's part of them."""
        whole = tuple(self._parts.to_host(payload))
        return list(self.cut(whole))

    def to_scatter(self, part: paged.Payload) -> paged.Payload:
        """Return a page in the form that `scatter` takes, with this process's part filled in."""
        return self._parts.to_device(part)

    def cut(self, whole: paged.Payload, heads: Heads | None = None) -> paged.Payload:
        """Return the part of a whole page that has these heads, by default this process's."""
        return whole if heads is None else _take(whole, heads)

    def join(self, local: paged.Payload, remote: Sequence[tuple[Heads, paged.Payload]]) -> paged.Payload:
        """Return a whole page from this process's part and the other processes' parts, each with its heads."""
        pages = []
        for index, (shape, dtype) in enumerate(self.whole):
            page = np.empty(shape, dtype)
            for heads, part in [*remote, (self.own_heads, local)]:
                page[:, :, :, heads[index]] = part[index]
            pages.append(page)
        return tuple(pages)


class DividedPageParts(PageParts):
    """The parts of one of several processes."""

    def __init__(self, parts: Partitioning, kv: paged.KV) -> None:
        super().__init__(parts, kv)
        self._places = parts.heads_of(jax.process_index(), kv)  # along the heads of all devices
        self._copies = parts.copies(len(self._places))
        self._heads = self.heads(jax.process_index())
        self.layout = layout_of(self.whole, self._heads)

    @property
    def own_heads(self) -> Heads:
        return self._heads

    def to_host(self, payload: paged.Payload) -> list[np.ndarray]:
        arrays = []
        for leaf, own, copies in zip(payload, self._heads, self._copies, strict=True):
            shape = list(leaf.shape)
            shape[PAYLOAD_HEADS] = len(own)
            array = np.empty(shape, leaf.dtype)
            for shard in leaf.addressable_shards:
                first = shard.index[PAYLOAD_HEADS].start or 0
                heads = (first + np.arange(shard.data.shape[PAYLOAD_HEADS])) // copies
                array[:, :, :, np.searchsorted(own, heads)] = np.asarray(shard.data)
            arrays.append(array)
        return arrays

    def to_scatter(self, part: paged.Payload) -> paged.Payload:
        pages = []
        layouts = paged.payload_layout(self._kv)
        sides = zip(part, layouts, self._places, self._heads, self._copies, strict=True)
        for leaf, (shape, dtype), places, own, copies in sides:
            page = np.empty(shape, dtype)
            page[:, :, :, places] = leaf[:, :, :, np.searchsorted(own, places // copies)]
            pages.append(page)
        return tuple(pages)

    def cut(self, whole: paged.Payload, heads: Heads | None = None) -> paged.Payload:
        return _take(whole, self._heads if heads is None else heads)


def _take(whole: paged.Payload, heads: Heads) -> paged.Payload:
    pairs = zip(whole, heads, strict=True)
    return tuple(np.ascontiguousarray(np.take(leaf, own, axis=PAYLOAD_HEADS)) for leaf, own in pairs)


def layout_of(whole: PayloadLayout, heads: Heads) -> PayloadLayout:
    """Return the layout of a part with these heads."""
    pairs = zip(whole, heads, strict=True)
    return [((*shape[:PAYLOAD_HEADS], len(own), *shape[PAYLOAD_HEADS + 1 :]), dtype) for (shape, dtype), own in pairs]


PINNED = "pinned_host"  # memory that the device itself reads and writes


def uses_pinned(parts: Partitioning) -> bool:
    """True if pages are transferred through such memory: it exists, and it is no CPU's."""
    if current_platform() == "cpu" or parts.multi_process:
        return False
    return any(memory.kind == PINNED for memory in parts.first_device.addressable_memories())


def begin_to_host(parts: Partitioning, payload: paged.Payload) -> paged.Payload:
    """Begin to copy the result of a gather. Reading the copies as numpy arrays waits for them."""
    return tuple(jax.device_put(list(payload), parts.payload_sharding(PINNED)))


def begin_to_device(parts: Partitioning, payload: Sequence[np.ndarray[Any, Any]]) -> paged.Payload:
    """Begin to copy a payload to the device. Its arrays must not be written any more."""
    pinned = jax.device_put(list(payload), parts.payload_sharding(PINNED))
    return tuple(jax.device_put(pinned, parts.payload_sharding(None)))


def joined(pages: Mapping[int, paged.Payload], places: int) -> list[np.ndarray[Any, Any]]:
    """Join pages into one payload of `places` pages, each at its index; the others are zeros."""
    arrays = []
    for index, leaf in enumerate(next(iter(pages.values()))):
        array = np.empty((places, *leaf.shape[1:]), leaf.dtype)
        for place in range(places):
            array[place] = pages[place][index][0] if place in pages else 0
        arrays.append(array)
    return arrays


def scatter_whole(
    kv: paged.KV, ids: Array, payload: paged.Payload, *, scatter: Callable[..., paged.KV] = paged.scatter
) -> paged.KV:
    """Write the pages of a payload [n, layers, …] to the pages `ids` [n], as `scatter` does. Padding ids are 0."""
    each = [tuple(leaf[index : index + 1] for leaf in payload) for index in range(ids.shape[0])]
    return scatter(kv, ids, each)
