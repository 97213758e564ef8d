"""Memory for pages: their shapes, zeros for a tree of shapes, and pages filled from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from rekindle_kernels.ops.registry import Registry, current_platform
from rekindle_kernels.packed_pages import packed_dtype, width_of
from rekindle_kernels.pages import LayerKV, needs_scales, storage_dtype, stored_head_dim

ZEROS = Registry("zeros")  # run(leaves) -> one array per ShapeDtypeStruct
FILL_PAGES = Registry("fill_pages")  # run(leaves of all layers, ids, leaves of each page, layers) -> leaves
Tree = TypeVar("Tree")


@dataclass(frozen=True, slots=True)
class MemoryCall:
    """The static facts that select an implementation."""

    platform: str


def zeros(shapes: Tree, *, implementation: str | None = None, platform: str | None = None) -> Tree:
    """Return zeros for a tree of ShapeDtypeStructs, inside a program; on Linux CPUs, memory that is not touched."""
    leaves, tree = jax.tree.flatten(shapes)
    run = ZEROS.choose(MemoryCall(platform or current_platform()), implementation).run
    arrays: Tree = jax.tree.unflatten(tree, run(leaves))
    return arrays


def fill_pages(
    layers: Sequence[LayerKV],
    ids: jax.Array,
    pages: Sequence[Sequence[jax.Array]],
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[LayerKV, ...]:
    """Write each of `pages` at its id ([n] int32) in all layers; in place when the caller donates `layers`.

    A page is [1, layers, ...] for each array of a layer. Ids that pad the transfer are 0, the scratch page.
    """
    leaves, tree = jax.tree.flatten(tuple(layers))
    run = FILL_PAGES.choose(MemoryCall(platform or current_platform()), implementation).run
    filled: tuple[LayerKV, ...] = jax.tree.unflatten(tree, run(leaves, ids, pages, len(layers)))
    return filled


def give_up_zeros(error: Exception, *, platform: str | None = None) -> bool:
    """Stop using the implementation of `zeros` that a failed program used.

    `error` is logged. Return False where no implementation could be given up, so the error has another cause.
    """
    candidates = ZEROS.on(platform or current_platform())
    return any(candidate.give_up is not None and candidate.give_up(error) for candidate in candidates)


def abstract_pages(
    num_pages: int,
    kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: DTypeLike,
    *,
    latent: bool = False,
    bounded: bool = False,
    platform: str | None = None,
) -> LayerKV:
    """Return the shapes of `init_pages`, without memory and without tracing."""
    platform = platform or current_platform()
    bounds = None
    if bounded:
        vectors = num_pages, 2, kv_heads, stored_head_dim(head_dim, platform)
        bounds = jax.ShapeDtypeStruct(vectors, storage_dtype(jnp.bfloat16, platform))
    packed = packed_dtype(dtype)
    if packed is not None:
        assert not latent, f"{packed.name} pages have values of their own"
        vectors = num_pages, 1, kv_heads, page_size
        widths = (width_of(stored_head_dim(head_dim, platform), bits) for bits in packed.bits)
        keys, values = (jax.ShapeDtypeStruct((*vectors, width), stored) for width, stored in widths)
        factors = jax.ShapeDtypeStruct((num_pages, 2, *vectors[2:]), jnp.float32)
        return LayerKV(keys, factors, values, bounds)  # type: ignore[arg-type]
    stored = storage_dtype(dtype, platform)
    shape = (num_pages, 1 if latent else 2, kv_heads, page_size, stored_head_dim(head_dim, platform))
    scales = jax.ShapeDtypeStruct(shape[:-1], jnp.float32) if needs_scales(dtype) else None
    return LayerKV(jax.ShapeDtypeStruct(shape, stored), scales, bounds=bounds)  # type: ignore[arg-type]


def init_pages(
    num_pages: int,
    kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: DTypeLike,
    *,
    latent: bool = False,
    bounded: bool = False,
    platform: str | None = None,
) -> LayerKV:
    """Return zeroed pages of one layer, page 0 included; narrow pages, of int8 or fp8 or packed, come with scales.

    `latent` pages hold keys alone, of which attention takes the first numbers as values. `bounded` pages come with
    bounds of their keys.
    """
    sizes = num_pages, kv_heads, page_size, head_dim
    shapes = abstract_pages(*sizes, dtype, latent=latent, bounded=bounded, platform=platform)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
