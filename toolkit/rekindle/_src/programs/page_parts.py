"""The parts of pages in several processes: each has the kv heads of its own devices.

Off the devices a page is whole, with every kv head once, as on a single device, or it is the part of one process:
the heads that its devices have, each once and in order. Programs take and return arrays over all devices, of which a
process sees its own devices' parts. For one process all of these are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.partitioning import PAYLOAD_HEADS, Partitioning

PayloadLayout = list[tuple[tuple[int, ...], Any]]  # shape and dtype of each array of one page


class PageParts:
    """This process's parts of a session's pages, and conversions between parts and whole pages."""

    def __init__(self, parts: Partitioning, kv: paged.KV) -> None:
        self._parts, self._kv = parts, kv
        self.whole = parts.payload_layout(kv)
        self.layout = self.whole  # of this process's part
        if parts.multi_process:
            self._places = parts.heads_of(jax.process_index(), kv)  # along the heads of all devices
            self._heads = np.unique(self._places // parts.copies)
            self.layout = layout_of(self.whole, len(self._heads))

    @property
    def own_heads(self) -> list[int]:
        """The kv heads of a whole page that are in this process's part."""
        if self._parts.multi_process:
            return [int(head) for head in self._heads]
        return list(range(self.whole[0][0][PAYLOAD_HEADS]))

    def heads(self, process: int) -> np.ndarray:
        """Return the kv heads of a whole page that the devices of a process have."""
        return np.unique(self._parts.heads_of(process, self._kv) // self._parts.copies)

    def to_host(self, payload: paged.Payload) -> list[np.ndarray]:
        """Wait for pages of `gather`, and return this process's part of them in host memory."""
        if not self._parts.multi_process:
            return self._parts.to_host(payload)
        arrays = []
        for leaf in payload:
            shape = list(leaf.shape)
            shape[PAYLOAD_HEADS] = len(self._heads)
            array = np.empty(shape, leaf.dtype)
            for shard in leaf.addressable_shards:
                first = shard.index[PAYLOAD_HEADS].start or 0
                heads = (first + np.arange(shard.data.shape[PAYLOAD_HEADS])) // self._parts.copies
                array[:, :, :, np.searchsorted(self._heads, heads)] = np.asarray(shard.data)
            arrays.append(array)
        return arrays

    def collect(self, payload: paged.Payload) -> list[np.ndarray]:
        """Wait for whole pages of `collect`, and return this process's part of them."""
        whole = tuple(self._parts.to_host(payload))
        return list(self.cut(whole))

    def to_scatter(self, part: paged.Payload) -> paged.Payload:
        """Return a page in the form that `scatter` takes, with this process's part filled in."""
        if not self._parts.multi_process:
            return self._parts.to_device(part)
        indices = np.searchsorted(self._heads, self._places // self._parts.copies)
        pages = []
        for leaf, (shape, dtype) in zip(part, paged.payload_layout(self._kv), strict=True):
            page = np.empty(shape, dtype)
            page[:, :, :, self._places] = leaf[:, :, :, indices]
            pages.append(page)
        return tuple(pages)

    def cut(self, whole: paged.Payload, heads: np.ndarray | None = None) -> paged.Payload:
        """Return the part of a whole page that has these heads, by default this process's."""
        if heads is None:
            if not self._parts.multi_process:
                return whole
            heads = self._heads
        return tuple(np.ascontiguousarray(np.take(leaf, heads, axis=PAYLOAD_HEADS)) for leaf in whole)

    def join(self, local: paged.Payload, remote: Sequence[tuple[np.ndarray, paged.Payload]]) -> paged.Payload:
        """Return a whole page from this process's part and those of others, each with its heads."""
        pages = []
        for index, (shape, dtype) in enumerate(self.whole):
            page = np.empty(shape, dtype)
            for heads, part in remote:
                page[:, :, :, heads] = part[index]
            if self._parts.multi_process:
                page[:, :, :, self._heads] = local[index]
            else:
                page[:] = local[index]
            pages.append(page)
        return tuple(pages)


def layout_of(whole: PayloadLayout, heads: int) -> PayloadLayout:
    """Return the layout of a part with this number of heads."""
    return [((*shape[:PAYLOAD_HEADS], heads, *shape[PAYLOAD_HEADS + 1 :]), dtype) for shape, dtype in whole]
