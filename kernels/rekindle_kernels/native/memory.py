"""Memory for pages on a CPU: zeros that the system makes at first touch, and pages copied into their places."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import jax
import numpy as np
from jax import Array

from rekindle_kernels.native import build, python_handlers
from rekindle_kernels.native.calling import NOT_BUILT
from rekindle_kernels.ops.memory import MemoryCall
from rekindle_kernels.ops.registry import Implementation


def untouched(leaves: Sequence[jax.ShapeDtypeStruct]) -> Sequence[Array]:
    """Implement `ops.memory.zeros`: the system zeroes these pages at first touch."""
    sizes = np.array([leaf.dtype.itemsize for leaf in leaves], np.int32)
    made: Sequence[Array] = jax.ffi.ffi_call(build.ensure(python_handlers.ZEROS), leaves)(sizes)
    return made


def has_untouched(call: MemoryCall) -> str | None:
    """Why zeros can't be left to the system: only Linux does that. This kernel needs no compiler."""
    if call.platform != "cpu" or not python_handlers.has_zeros():
        return "only Linux gives CPU memory back as zeros"
    return None if build.builds(python_handlers.ZEROS) else NOT_BUILT


def fill(leaves: Sequence[Array], ids: Array, pages: Sequence[Sequence[Array]], layers: int) -> Sequence[Array]:
    """Implement `ops.memory.fill_pages`, by one call for all layers."""
    arrays = len(leaves) // layers
    sizes = [prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in leaves[:arrays]]
    plan = python_handlers.fill_plan(len(pages), layers, sizes)
    results = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    aliases = {python_handlers.FIRST + index: index for index in range(len(leaves))}
    call = jax.ffi.ffi_call(build.ensure(python_handlers.FILL), results, input_output_aliases=aliases)
    filled: Sequence[Array] = call(plan, ids, *leaves, *(leaf for page in pages for leaf in page))
    return filled


def fills(call: MemoryCall) -> str | None:
    """Why pages can't be filled by one call. Where XLA refused the kernel of zeros, it would refuse this one too."""
    if call.platform != "cpu" or not python_handlers.has_fill():
        return "it copies in the memory of a CPU"
    refused = python_handlers.has_zeros() and not build.builds(python_handlers.ZEROS)
    return NOT_BUILT if refused or not build.builds(python_handlers.FILL) else None


ZEROS = Implementation("native", untouched, has_untouched, give_up=partial(build.give_up, python_handlers.ZEROS))
FILL_PAGES = Implementation("native", fill, fills)
