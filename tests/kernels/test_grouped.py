"""Rows of several experts: XLA's product and the GPU kernel, as plain JAX operations, against one expert at a time."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.thorough import by_default
from rekindle_kernels import GroupedCall, grouped_linear, int4, tuning
from rekindle_kernels.ops.linear import GROUPED_LINEAR
from rekindle_kernels.pallas.gpu import grouped as gpu
from rekindle_kernels.xla import linear as xla_linear

CASES = [  # rows of each expert, inputs, outputs
    ([3, 0, 1, 5], 64, 128),
    ([0, 40, 0, 1, 0], 48, 200),
    ([17], 130, 72),
    ([0, 0, 2], 32, 64),
]
TYPES = [("float32", "float32", 1e-5), ("bfloat16", "bfloat16", 1e-5), ("bfloat16", "int8", 1e-5), ("int8", "int8", 0)]


@pytest.mark.parametrize("implementation", ["xla", "pallas_gpu_interpret"])
@pytest.mark.parametrize(("x_dtype", "dtype", "tolerance"), by_default(TYPES, lambda case: case in TYPES[::2]))
@pytest.mark.parametrize("case", by_default(map(pytest.param, CASES)), ids=str)
def test_each_row_meets_the_matrix_of_its_expert(
    case: tuple[list[int], int, int], x_dtype: str, dtype: str, tolerance: float, implementation: str
) -> None:
    sizes, inputs, outputs = case
    rng, rows = np.random.default_rng(0), sum(sizes)
    beyond = 2  # rows of other devices' experts
    x, weight = (
        jnp.asarray(rng.integers(-9, 10, shape) * (1 if name == "int8" else 0.25), name)
        for shape, name in (((rows + beyond, inputs), x_dtype), ((len(sizes), outputs, inputs), dtype))
    )
    summed = jnp.int32 if x_dtype == "int8" else jnp.float32
    got = np.asarray(
        jax.jit(lambda *args: grouped_linear(*args, dtype=summed, implementation=implementation))(
            x, weight, jnp.array(sizes, jnp.int32)
        )
    )
    assert got.dtype == summed and got.shape == (rows + beyond, outputs)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    wide = np.asarray(weight.astype(jnp.float32))
    want = np.einsum("mi,moi->mo", np.asarray(x.astype(jnp.float32))[:rows], wide[owner])
    np.testing.assert_allclose(got[:rows], want, rtol=tolerance, atol=tolerance * 100)


@pytest.mark.parametrize("implementation", ["pallas_gpu_interpret", "xla_tiles"])
@pytest.mark.parametrize(("bits", "group", "minimums"), by_default([(4, 64, True), (8, 16, True), (4, 32, False)], 2))
@pytest.mark.parametrize("sizes", by_default([[3, 0, 1, 5], [0, 40, 0, 1]]), ids=str)
def test_experts_in_groups_are_multiplied_as_they_are_stored(
    sizes: list[int], bits: int, group: int, minimums: bool, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xla_linear, "AT_ONCE", 3 * 80 * 256 * 2)  # three experts, so tiles have two of the four
    if implementation == "xla_tiles":  # which is for GPUs without Triton
        monkeypatch.setattr(tuning, "compute_capability", lambda: 7.5)
    random, shape = np.random.default_rng(0), (4, 80, 256)
    q = random.integers(0, 16, shape) if bits == 4 else random.integers(-128, 128, shape)
    weight = jnp.asarray(int4.pack(q.astype(np.uint8 if bits == 4 else np.int8)))
    scale, minimum = (
        jnp.asarray(int4.pack_scales(random.standard_normal((4, 80, 256 // group)).astype(np.float16)))
        for _ in range(2)
    )
    x = jnp.asarray(random.standard_normal((sum(sizes) + 2, 256)), jnp.bfloat16)
    given = {"scale": scale, "minimum": minimum if minimums else None}
    got, want = (
        np.asarray(
            jax.jit(partial(grouped_linear, implementation=name, platform="gpu"))(
                x, weight, jnp.array(sizes, jnp.int32), **given
            )
        )
        for name in (implementation, "xla")
    )
    real = sum(sizes)
    np.testing.assert_allclose(got[:real], want[:real], rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_there_is_a_tile_for_every_row_and_none_twice() -> None:
    rng = np.random.default_rng(1)
    for _ in range(10):
        sizes = rng.integers(0, 60, int(rng.integers(1, 12))) * rng.integers(0, 2)
        rows = int(sizes.sum()) + int(rng.integers(0, 3))
        if not rows:
            continue
        tile_table = jax.jit(gpu.tile_table, static_argnums=(1, 2))
        table = np.asarray(tile_table(jnp.asarray(sizes, jnp.int32), rows, 16))
        seen = np.zeros(rows, int)
        for owner, first, end in table.T:
            if first < end:
                mine = np.arange(first, min(first + 16, end))
                assert (np.repeat(np.arange(len(sizes)), sizes)[mine] == owner).all()
                seen[mine] += 1
        assert (seen[: sizes.sum()] == 1).all() and not seen[sizes.sum() :].any()


def test_what_the_kernel_does_not_take_is_left_to_xla() -> None:
    def call(x: str, weight: str, experts: int = 8) -> GroupedCall:
        shapes = ((64, 4096), x), ((experts, 14336, 4096), weight)
        return GroupedCall("gpu", *(jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in shapes))

    assert GROUPED_LINEAR.choose(call("bfloat16", "bfloat16")).name == "pallas_gpu"
    assert GROUPED_LINEAR.choose(call("bfloat16", "int8")).name == "pallas_gpu"
    assert GROUPED_LINEAR.choose(call("bfloat16", "float32")).name == "xla"
    assert "31 bits" in str(gpu.supports(call("bfloat16", "bfloat16", experts=64)))
    stored = jax.ShapeDtypeStruct((8, 256, 32768), jnp.uint8)
    groups = GroupedCall("gpu", jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16), stored, "float16")
    assert GROUPED_LINEAR.choose(groups).name == "pallas_gpu"
