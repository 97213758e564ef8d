"""Page transfers between a device and the host, through host memory that the device itself reads and writes.

A transfer is one copy for each array of a layer, and nothing waits for it. From ordinary memory the runtime would copy
every page to pinned memory of its own, one after the other. A CPU has no use for any of this, and where a session has
several processes, pages are exchanged one by one.

The copies are no part of the programs that gather and scatter pages. XLA for an H100 and for a v5e does compile a
gather whose result lies in such memory, but that program ends when the copy has ended, and the next step waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.partitioning import Partitioning
from rekindle_kernels import current_platform

KIND = "pinned_host"


def used(parts: Partitioning) -> bool:
    """True if pages are transferred through such memory: it exists, and it is no CPU's."""
    if current_platform() == "cpu" or parts.multi_process:
        return False
    return any(memory.kind == KIND for memory in parts.first_device.addressable_memories())


def begin_to_host(parts: Partitioning, payload: paged.Payload) -> paged.Payload:
    """Begin to copy the result of a gather. Reading the copies as numpy arrays waits for them."""
    return tuple(jax.device_put(list(payload), parts.payload_sharding(KIND)))


def begin_to_device(parts: Partitioning, payload: Sequence[np.ndarray[Any, Any]]) -> paged.Payload:
    """Begin to copy a payload to the device. Its arrays must not be written any more."""
    pinned = jax.device_put(list(payload), parts.payload_sharding(KIND))
    return tuple(jax.device_put(pinned, parts.payload_sharding(None)))


def join(pages: Mapping[int, paged.Payload], places: int) -> list[np.ndarray[Any, Any]]:
    """Join pages into one payload of `places` pages, each at its index; the others are zeros."""
    joined = []
    for index, leaf in enumerate(next(iter(pages.values()))):
        array = np.empty((places, *leaf.shape[1:]), leaf.dtype)
        for place in range(places):
            array[place] = pages[place][index][0] if place in pages else 0
        joined.append(array)
    return joined


def scatter(kv: paged.KV, ids: Array, payload: paged.Payload, *, tails: bool = False) -> paged.KV:
    """Write the pages of a payload [n, layers, …] to the pages `ids` [n], or `tails`. Padding ids are 0."""
    each = [tuple(leaf[index : index + 1] for leaf in payload) for index in range(ids.shape[0])]
    return paged.scatter(kv, ids, each, tails=tails)
