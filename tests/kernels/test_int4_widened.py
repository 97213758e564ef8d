"""Many rows times matrices in groups as bfloat16, by AMX, and where that is left alone."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.group_matrices import FORMS, ONE_FORM, RANDOM, matrix
from helpers.thorough import by_default
from rekindle_kernels import LinearOptions, int4, linear, tuning
from rekindle_kernels.native import build, products
from rekindle_kernels.xla import linear as xla_linear

needs_numba = pytest.mark.skipif(build.unavailable_reason() is not None, reason="numba is not installed")
FEWEST = {16: 48, 32: 48, 64: 96}  # rows, by group; larger groups are multiplied as integers
widens = pytest.mark.skipif(not products.has_amx(), reason="this processor has no AMX")


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """Values of float32 rounded to the nearest bfloat16, from the middle away from zero, in float64."""
    bits = values.astype(np.float32).view(np.uint32) + np.uint32(0x8000) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def turning(values: np.ndarray) -> np.ndarray:
    """How much may change where what float32 arithmetic makes of a value lies on the other side of the middle of two
    bfloat16."""
    bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    middles = (bits | np.uint32(0x8000)).view(np.float32).astype(np.float64)
    near = np.abs(values - middles) <= 2.0**-21 * np.abs(values).max()
    return np.where(near, 2.0**-7 * np.abs(values), 0.0)


@needs_numba
@widens
@pytest.mark.parametrize(("bits", "group", "kind", "minimums"), ONE_FORM)
@pytest.mark.parametrize("shape", [(208, 256), (1072, 1280), (48, 2304)], ids=str)
def test_many_rows_are_multiplied_as_bfloat16(
    shape: tuple[int, int], bits: int | str, group: int, kind: str, minimums: bool
) -> None:
    packed, values = matrix(*shape, group, kind, minimums, bits)
    random = np.random.default_rng(group)
    x = random.standard_normal((203, shape[1]), np.float32) * random.random((203, 1), np.float32) * 10
    x[7], x[:, 32:64] = 0, 0
    multiply, exactly = jax.jit(partial(products.multiply_int4, widened=True)), jax.jit(products.multiply_int4)
    fewest = FEWEST.get(group, 204)
    few = x[: fewest - 1]
    np.testing.assert_array_equal(multiply(few, *packed), exactly(few, *packed))
    if group not in FEWEST:
        return
    whole = np.asarray(multiply(x, *packed))
    narrow = np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float64)
    turned = 0.0 if kind == "float16" and not minimums else np.abs(narrow) @ turning(values).T
    expected = narrow @ as_bfloat16(values).T
    near = 1e-5 * np.abs(expected) + 4e-6 * np.abs(expected).max()
    assert (np.abs(whole - expected) <= near + turned).all()
    exact = x.astype(np.float64) @ values.T
    # Six standard deviations of what it changes to round both to bfloat16, by no more than a 512th part.
    rounding = 6 * 2.0**-8 / 6**0.5 * np.linalg.norm(x, axis=1)[:, None] * np.abs(values).max()
    assert (np.abs(whole - exact) <= rounding).all()
    for rows in (fewest, fewest + 1, 112, 113, 128, 150, 192):
        got = multiply(x[:rows], *packed)
        np.testing.assert_array_equal(got, whole[:rows], err_msg=f"{rows} rows differ from all together")


@needs_numba
@widens
@pytest.mark.parametrize("inputs", [32, 544, 576, 608, 1184])
def test_inputs_that_panels_of_weights_do_not_divide(inputs: int) -> None:
    packed, values = matrix(48, inputs, 32)
    x = np.random.default_rng(inputs).standard_normal((113, inputs), np.float32)
    got = jax.jit(partial(products.multiply_int4, widened=True))(x, *packed)
    expected = np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float64) @ as_bfloat16(values).T
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=4e-6 * np.abs(expected).max())


@needs_numba
@widens
@pytest.mark.parametrize("rows", [51, 299])
def test_bfloat16_rows_are_normed_results_gated_and_a_residual_is_added(rows: int) -> None:
    packed, _ = matrix(224, 128, 32)
    x = jnp.asarray(RANDOM.standard_normal((rows, 128), np.float32) * 6)
    norm = jnp.asarray(RANDOM.standard_normal(128, np.float32))
    residual = jnp.asarray(RANDOM.standard_normal((rows, 112), np.float32) * 10)
    multiply = jax.jit(partial(products.multiply_int4, eps=1.0, widened=True), static_argnames="gated")
    wide = multiply(products.rms_norm(x, norm, 1.0), *packed)
    np.testing.assert_allclose(multiply(x, *packed, norm=norm), wide, rtol=1e-4, atol=1e-4)
    want = jax.nn.silu(wide[:, :112]) * wide[:, 112:]
    got = multiply(x, *packed, residual, norm=norm, gated=True)
    np.testing.assert_allclose(got, want + residual, rtol=1e-4, atol=1e-3)
    count = jnp.array(rows - 3, jnp.int32)
    first = multiply(x.at[rows - 3 :].set(jnp.nan), *packed, count=count)
    np.testing.assert_array_equal(first[: rows - 3], multiply(x, *packed)[: rows - 3])


def test_deterministic_products_stay_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        products, "multiply_int4", lambda x, *_, widened, **__: asked.append(widened) or jnp.zeros((2, 32))
    )
    monkeypatch.setattr(products, "multiplies_int4", lambda *_: True)
    (weight, scale, _), _ = matrix(32, 128, 64)
    for deterministic in (False, True):
        options = LinearOptions("int4", deterministic=deterministic)
        linear(jnp.zeros((2, 128)), weight, scale=scale, options=options, implementation="native")
    assert asked == [True, False]


@pytest.mark.parametrize("rows", by_default([1, 40]))
@pytest.mark.parametrize(("bits", "group", "kind", "minimums"), [FORMS[0], FORMS[3], FORMS[14], FORMS[15]])
def test_a_gpu_without_triton_widens_tiles_that_stand_for_the_whole_matrix(
    rows: int, bits: int | str, group: int, kind: str, minimums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (weight, scale, minimum), _ = matrix(208, 256, group, kind, minimums, bits)
    random = np.random.default_rng(rows)
    x, residual = (random.standard_normal((rows, size), np.float32) for size in (256, 208))
    monkeypatch.setattr(xla_linear, "AT_ONCE", 3 * int4.OUTPUTS * 256 * 4)  # three of its thirteen blocks

    def product(implementation: str) -> jax.Array:
        options = LinearOptions("int4")
        run = partial(linear, options=options, platform="gpu", implementation=implementation)
        return jax.jit(run)(x, weight, scale=scale, minimum=minimum, residual=residual)

    monkeypatch.setattr(tuning, "compute_capability", lambda: 7.5)
    tiles = jax.make_jaxpr(partial(product, "xla_tiles"))()
    assert str(tiles).count("dot_general") == 5
    np.testing.assert_allclose(product("xla_tiles"), product("xla"), rtol=1e-6, atol=1e-5)
