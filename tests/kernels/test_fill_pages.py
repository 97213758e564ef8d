"""Pages filled by one call for all layers: bit by bit what XLA's own operations do, in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.kernel_state import begin_with
from helpers.thorough import by_default
from rekindle_kernels import LayerKV, abstract_pages, fill_pages
from rekindle_kernels.native import python_handlers

DTYPES = by_default(["int8", "float32", "bfloat16"])
LAYERS, PAGES, MOVED = 5, 40, 4
needs_kernel = pytest.mark.skipif(
    not python_handlers.has_fill() or jax.default_backend() != "cpu", reason="has no kernel that fills pages"
)


def random_like(shape: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    raw = np.random.default_rng(seed).integers(0, 255, (*shape.shape, shape.dtype.itemsize), np.uint8)
    return jnp.asarray(raw.view(shape.dtype)[..., 0])


def pages_of(dtype: str) -> tuple[tuple[LayerKV, ...], list[tuple[Any, ...]]]:
    """Layers full of random bits, and pages from outside."""
    layer = abstract_pages(PAGES, 2, 8, 16, dtype)
    layers = tuple(jax.tree.map(lambda leaf, at=at: random_like(leaf, at), layer) for at in range(LAYERS))
    outside = [jax.ShapeDtypeStruct((1, LAYERS, *leaf.shape[1:]), leaf.dtype) for leaf in jax.tree.leaves(layer)]
    return layers, [tuple(random_like(leaf, 100 + at) for leaf in outside) for at in range(MOVED)]


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_call_does_what_xla_does_bit_by_bit_and_in_place(dtype: str) -> None:
    layers, pages = pages_of(dtype)
    ids = jnp.asarray([7, 0, PAGES - 1, 0], jnp.int32)
    pages[3] = pages[1]  # padding: both go to page 0
    want = fill_pages(layers, ids, pages, implementation="xla")
    before = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(layers)]
    call = jax.jit(lambda *args: fill_pages(*args, implementation="native"), donate_argnums=0)
    compiled = call.lower(layers, ids, pages).compile()
    used = compiled.memory_analysis()
    assert used.alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(layers))
    assert used.temp_size_in_bytes < used.alias_size_in_bytes / 20
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(layers)]
    got = jax.tree.leaves(compiled(layers, ids, pages))
    assert [leaf.unsafe_buffer_pointer() for leaf in got] == places
    for found, expected, old in zip(got, jax.tree.leaves(want), before, strict=True):
        found, expected = (np.asarray(leaf).view(np.uint8) for leaf in (found, expected))
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(found[1:7], old.view(np.uint8)[1:7])


@needs_kernel
def test_the_program_has_one_operation_however_many_layers_there_are() -> None:
    layers, pages = pages_of("bfloat16")
    lowered = jax.jit(lambda *args: fill_pages(*args, platform="cpu")).lower(layers, jnp.zeros(MOVED, jnp.int32), pages)
    assert lowered.as_text().count("custom_call") == 1 and "dynamic_update_slice" not in lowered.as_text()


def test_where_xla_refused_the_kernel_of_zeros_it_fills_pages_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle_kernels.ops.memory import FILL_PAGES, MemoryCall

    begin_with(monkeypatch, failed="zeros")
    assert FILL_PAGES.choose(MemoryCall("cpu")).name == ("xla")


def test_other_platforms_use_xla() -> None:
    from rekindle_kernels.ops.memory import FILL_PAGES, MemoryCall

    assert FILL_PAGES.choose(MemoryCall("gpu")).name == "joined"
    assert FILL_PAGES.choose(MemoryCall("tpu")).name == "xla"


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_placed_at_once_are_those_placed_one_by_one(dtype: str) -> None:
    layers, pages = pages_of(dtype)
    ids = jnp.asarray([7, 0, PAGES - 1, 0], jnp.int32)
    pages[3] = pages[1]  # padding: both go to page 0
    found = (fill_pages(layers, ids, pages, implementation=name) for name in ("joined", "xla"))
    for got, want in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))
