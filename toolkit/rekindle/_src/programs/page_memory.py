"""Pages and entries of side caches on one CPU device as the host's own memory: read and filled without a program.

A program that moves pages would have to be compiled first, and a script that closes right after its text would wait for
that; so would the first text of the next one. Nothing else may read or write the arrays meanwhile:
`DeviceCalls.at_rest` waits for it. The memory is reached by its address, since a NumPy view of an array would keep the
next step from reusing its memory.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rekindle._src.programs import kv_layout as paged


def view(array: Any) -> np.ndarray[Any, Any]:
    """Return the memory of an array on a CPU, to be read or written before the next program that takes the array."""
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(memory, np.uint8).view(array.dtype).reshape(array.shape)


def read_pages(kv: paged.KV, ids: Sequence[int], *, windows: bool = False) -> paged.Payload:
    """Return the pages `ids` as `kv_layout.gather` does."""
    rows, payload = np.asarray(ids), list[np.ndarray[Any, Any]]()
    for layers in _groups(kv, windows=windows):
        payload += [np.stack([view(leaf)[rows] for leaf in leaves], axis=1) for leaves in zip(*layers, strict=True)]
    return tuple(payload)


def fill_pages(kv: paged.KV, ids: Sequence[int], pages: Sequence[paged.Payload], *, windows: bool = False) -> None:
    """Write payloads, one for each page, to the pages `ids`, as `kv_layout.scatter` does."""
    at = 0
    for layers in _groups(kv, windows=windows):
        for leaves in zip(*layers, strict=True):
            for number, leaf in enumerate(leaves):
                memory = view(leaf)
                for page, payload in zip(ids, pages, strict=True):
                    memory[page] = payload[at][0, number]
            at += 1


def read_states(kv: paged.KV, ids: Sequence[int]) -> paged.Payload:
    """Return the states in the slots `ids`, joined over all layers into one array [n, B]."""
    rows = np.asarray(ids)
    return (np.concatenate([view(state)[rows].reshape(len(rows), -1) for state in _states(kv)], axis=1),)


def fill_states(kv: paged.KV, ids: Sequence[int], entries: Sequence[paged.Payload]) -> None:
    """Write entries of `read_states`, one for each slot, to the slots `ids`."""
    first = 0
    for state in _states(kv):
        memory, size = view(state), math.prod(state.shape[1:])
        for slot, (entry,) in zip(ids, entries, strict=True):
            memory[slot] = entry[0, first : first + size].reshape(state.shape[1:])
        first += size


def _groups(kv: paged.KV, *, windows: bool) -> list[list[list[Any]]]:
    """Return the arrays of each layer with pages, for each group of layers."""
    return [
        [jax.tree.leaves(kv[number].windows if windows else kv[number].pages) for number in numbers]
        for numbers in paged.groups_of(kv, windows=windows)
    ]


def _states(kv: paged.KV) -> list[Any]:
    return [state for layer in kv for state in layer.states]
