"""Products with matrices of four and eight bits by the GPU kernel, as plain JAX operations, against XLA's."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.thorough import by_default
from rekindle_kernels import LinearOptions, int4, linear
from rekindle_kernels.ops.linear import LINEAR, LinearCall
from rekindle_kernels.pallas.gpu import int4 as gpu

FORMS = [  # bits, group, dtype of scales, minimums
    (4, 32, "float16", False), (4, 64, "float16", True), (4, 128, "float32", True), (4, 32, "int8", True),
    (8, 32, "float16", False), (8, 16, "float32", True), (8, 16, "int8", False),
]  # fmt: skip
DEFAULT = {(4, 64, "float16", True), (4, 32, "int8", True), (8, 16, "float32", True), (8, 16, "int8", False)}
SHAPES = [(1, 80, 256), (5, 48, 1280), (70, 160, 512)]  # rows, outputs, inputs


def matrix(outputs: int, inputs: int, group: int, kind: str, minimums: bool, bits: int) -> list[Any]:
    random = np.random.default_rng(bits + group)
    q = random.integers(0, 16, (outputs, inputs)) if bits == 4 else random.integers(-128, 128, (outputs, inputs))
    arrays = []
    for there in (True, minimums):
        numbers = random.standard_normal((outputs, inputs // group)).astype(np.float32)
        if kind == int4.STEPPED:
            steps = np.full((outputs, inputs // int4.SPAN), 0.01, np.float16)
            held = int4.stepped(random.integers(-99, 99, numbers.shape, np.int8), steps)
        else:
            held = numbers.astype(kind)
        arrays.append(jnp.asarray(int4.pack_scales(held)) if there else None)
    return [jnp.asarray(int4.pack(q.astype(np.uint8 if bits == 4 else np.int8))), *arrays]


def product(x: jax.Array, packed: list[Any], implementation: str, **given: Any) -> np.ndarray:
    weight, scale, minimum = packed
    run = partial(linear, options=LinearOptions("int4"), implementation=implementation, **given)
    return np.asarray(jax.jit(run)(x, weight, scale=scale, minimum=minimum).astype(jnp.float32))


@pytest.mark.parametrize("shape", by_default(map(pytest.param, SHAPES)), ids=str)
@pytest.mark.parametrize(("bits", "group", "kind", "minimums"), by_default(FORMS, lambda form: form in DEFAULT))
def test_a_product_is_that_of_xla(
    shape: tuple[int, int, int], bits: int, group: int, kind: str, minimums: bool
) -> None:
    rows, outputs, inputs = shape
    packed = matrix(outputs, inputs, group, kind, minimums, bits)
    x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, inputs)), jnp.bfloat16)
    want = product(x, packed, "xla", dtype=jnp.float32)
    got = product(x, packed, "pallas_gpu_interpret", dtype=jnp.float32)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("dtype", by_default(["float32", "bfloat16", "float16"], 2))
def test_weights_are_rounded_as_xla_rounds_them(dtype: str) -> None:
    """With one input at a time there is nothing to add up: the results are the weights in the type of the rows."""
    packed = matrix(32, 64, 32, "float16", True, 4)
    x = jnp.eye(64, dtype=dtype)
    values = jax.jit(lambda *packed: int4.dequantized(*packed, jnp.dtype(dtype)).astype(jnp.float32))(*packed)
    np.testing.assert_array_equal(product(x, packed, "pallas_gpu_interpret", dtype=jnp.float32), values.T)


def test_integers_are_multiplied_exactly() -> None:
    packed = matrix(64, 2048, 64, "float16", False, 4)
    packed[1] = jnp.full_like(packed[1], 0.5)
    x = jnp.asarray(np.random.default_rng(0).integers(-8, 9, (3, 2048)), jnp.bfloat16)
    want = np.asarray(x, np.float64) @ (np.asarray(int4.unpack(np.asarray(packed[0])), np.float64) - 8).T / 2
    np.testing.assert_array_equal(product(x, packed, "pallas_gpu_interpret", dtype=jnp.float32), want)


def test_a_residual_is_added_gates_follow_and_leading_axes_stay() -> None:
    packed = matrix(64, 256, 32, "float16", False, 4)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 256)), jnp.float32)
    residual = jnp.ones((2, 3, 32), jnp.float32)
    weight, scale, _ = packed
    run = jax.jit(partial(linear, options=LinearOptions("int4", "silu")), static_argnames="implementation")
    got, want = (
        run(x, weight, scale=scale, residual=residual, implementation=name) for name in ("pallas_gpu_interpret", "xla")
    )
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 8, 64, 65, 2048])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (28672, 4096), (4096, 14336), (576, 1536)])
def test_tiles_cover_every_input_once(rows: int, outputs: int, inputs: int) -> None:
    words = inputs // 8
    tile = gpu.tile_for(jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16), outputs, words)
    turns = -(-words // tile.words)
    share = -(-turns // tile.parts)
    assert tile.parts == 1 or rows <= gpu.FEW_ROWS
    assert share * tile.parts >= turns > share * (tile.parts - 1), "a part has nothing to do"


def test_what_the_kernel_does_not_take_is_left_to_xla() -> None:
    def call(x: str, quantize: str | None, **given: Any) -> LinearCall:
        weight = jax.ShapeDtypeStruct((256, 32768), jnp.uint8)
        return LinearCall("gpu", jax.ShapeDtypeStruct((8, 4096), jnp.dtype(x)), weight, quantize, **given)

    assert LINEAR.choose(call("bfloat16", "int4")).name == "pallas_gpu"
    assert LINEAR.choose(call("bfloat16", "int8")).name == "xla"
    assert LINEAR.choose(call("bfloat16", None)).name == "xla"
    assert "normed" in str(gpu.supports(call("bfloat16", "int4", norm=True)))
    assert "gates" in str(gpu.supports(call("bfloat16", "int4", gate="silu")))
    wide = jax.ShapeDtypeStruct((2**16, 2**16), jnp.uint8)
    assert "31 bits" in str(
        gpu.supports(LinearCall("gpu", jax.ShapeDtypeStruct((8, 8192), jnp.bfloat16), wide, "int4"))
    )
