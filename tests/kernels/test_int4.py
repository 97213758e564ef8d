"""Matrices of four bits: what they hold and mean, and products with them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from rekindle_kernels import int4

RANDOM = np.random.default_rng(0)


def integers(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 16, shape).astype(np.uint8)


@pytest.mark.parametrize("shape", [(16, 32), (48, 128), (3, 32, 96), (2, 16, 2048)], ids=str)
def test_integers_and_scales_come_back(shape: tuple[int, ...]) -> None:
    q = integers(*shape)
    packed = int4.pack(q)
    assert (packed.dtype, packed.shape) == (np.uint8, int4.weight_shape(shape))
    assert packed.nbytes * 2 == q.size
    assert int4.matrix_shape(packed) == shape
    np.testing.assert_array_equal(int4.unpack(packed), q)
    scales = RANDOM.random((*shape[:-1], shape[-1] // 32)).astype(np.float16)
    small = int4.pack_scales(scales)
    assert small.shape == int4.scale_shape(shape, 32)
    assert int4.group_of(packed, small) == 32
    np.testing.assert_array_equal(int4.unpack_scales(small), scales)


def test_a_byte_lies_where_the_definition_says() -> None:
    q = integers(64, 256)
    packed = int4.pack(q)
    for output, column in [(0, 0), (5, 3), (5, 4), (63, 255), (17, 100), (40, 9)]:
        tile, inside = column // 8, column % 8
        byte = packed[output // 16, tile * 64 + 4 * (output % 16) + inside % 4]
        assert (byte >> 4 if inside >= 4 else byte & 15) == q[output, column]


@pytest.mark.parametrize("group", int4.GROUPS)
@pytest.mark.parametrize("kind", int4.SCALES)
@pytest.mark.parametrize("shape", [(32, 256), (2, 16, 128)], ids=str)
def test_values_are_those_of_the_definition_to_the_last_bit(shape: tuple[int, ...], kind: str, group: int) -> None:
    q = integers(*shape)
    scale, minimum = (
        RANDOM.standard_normal((*shape[:-1], shape[-1] // group)).astype(np.float32).astype(kind) for _ in range(2)
    )
    wide, low = (np.repeat(array.astype(np.float64), group, -1) for array in (scale, minimum))
    weight, *packed = int4.pack(q), int4.pack_scales(scale), int4.pack_scales(minimum)
    symmetric = np.asarray(int4.dequantized(weight, packed[0], None))
    np.testing.assert_array_equal(symmetric, ((q.astype(np.float64) - 8) * wide).astype(np.float32))
    got = np.asarray(int4.dequantized(weight, *packed))
    want = q.astype(np.float64) * wide
    np.testing.assert_allclose(got, (want + low).astype(np.float32), rtol=2e-6, atol=1e-5)
    if len(shape) == 2:
        at = RANDOM.integers(0, shape[0], (3, 5))
        np.testing.assert_array_equal(int4.rows(weight, *packed, jnp.asarray(at)), got[at])
        np.testing.assert_array_equal(int4.rows(weight, packed[0], None, jnp.asarray(at)), symmetric[at])


def test_zero_points_are_held_exactly_by_float32() -> None:
    """AWQ and GPTQ: scale · (q - zero), a float16 scale and an integer zero for each group."""
    q, zero = integers(16, 256), RANDOM.integers(0, 17, (16, 2))
    scale = RANDOM.random((16, 2)).astype(np.float16).astype(np.float32)
    weight, packed = int4.pack(q), int4.pack_scales(scale)
    got = np.asarray(int4.dequantized(weight, packed, int4.pack_scales(-scale * zero.astype(np.float32))))
    want = (q.astype(np.float64) - np.repeat(zero, 128, -1)) * np.repeat(scale.astype(np.float64), 128, -1)
    np.testing.assert_array_equal(got.astype(np.float64), want)


def test_what_it_does_not_hold() -> None:
    assert int4.reason_against(64, 128, 64) is None
    assert "16" in str(int4.reason_against(40, 128, 64))
    assert "group of 64" in str(int4.reason_against(64, 96, 64))
    assert "48" in str(int4.reason_against(64, 96, 48))
