"""Matrices of four, six and eight bits in groups, and of codebooks: what they hold and mean, and products with them."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.compilers import ABSENT
from helpers.group_matrices import (
    FEW_FORMS,
    FORMS,
    INDICES,
    RANDOM,
    RARER,
    clamped,
    integers,
    matrix,
    of_xla_and_native,
    stored,
)
from helpers.thorough import by_default
from rekindle_kernels import LinearOptions, deprecated, int4, linear
from rekindle_kernels.native import build, chain, products
from rekindle_kernels.native.cpu import has_feature

needs_numba = pytest.mark.skipif(build.unavailable_reason() is not None, reason="numba is not installed")


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("shape", [(16, 32), (48, 128), (3, 32, 96), (2, 16, 2048)], ids=str)
def test_integers_and_scales_come_back(shape: tuple[int, ...], bits: int) -> None:
    q = integers(*shape, bits=bits)
    packed = int4.pack(q, bits)
    assert (packed.dtype.name, packed.shape) == (int4.DTYPES[bits], int4.weight_shape(shape, bits))
    assert packed.nbytes * 8 == q.size * bits
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


def test_six_bits_lie_where_the_definition_says() -> None:
    q = integers(64, 256, bits=6)
    packed = int4.pack(q, 6).view(np.uint8)
    for output, column in [(0, 0), (5, 3), (5, 4), (63, 255), (17, 100), (40, 9), (31, 14)]:
        tile, four, inside = column // 16, column % 16 // 4, column % 4
        line, high = (192 * tile + 64 * part + 4 * (output % 16) + inside for part in (four // 2, 2))
        row = packed[output // 16].astype(int)
        low = row[line] >> 4 if four % 2 else row[line] & 15
        assert low + ((row[high] >> 2 * four & 3) << 4) - 32 == q[output, column]


@pytest.mark.parametrize("rows", [1, 3000])
def test_six_bits_are_packed_in_pieces(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q = integers(160, 64, bits=6)
    whole = int4.pack(q, 6)
    monkeypatch.setattr(int4, "_AT_ONCE", rows)
    np.testing.assert_array_equal(int4.pack(q, 6), whole)
    np.testing.assert_array_equal(int4.unpack(whole), q)


@pytest.mark.parametrize(
    ("bits", "group"),
    by_default(
        [(bits, group) for bits in (4, 6, 8) for group in int4.STORED_GROUPS],
        lambda case: case in {(4, 32), (4, 128), (6, 16), (8, 64)},
    ),
)
@pytest.mark.parametrize("kind", int4.SCALES)
@pytest.mark.parametrize("shape", by_default(map(pytest.param, [(32, 256), (2, 16, 128)])), ids=str)
def test_values_are_those_of_the_definition_to_the_last_bit(
    shape: tuple[int, ...], kind: str, bits: int, group: int
) -> None:
    q, offset = integers(*shape, bits=bits), 8 if bits == 4 else 0
    scale, minimum = (
        RANDOM.standard_normal((*shape[:-1], shape[-1] // group)).astype(np.float32).astype(kind) for _ in range(2)
    )
    wide, low = (np.repeat(array.astype(np.float64), group, -1) for array in (scale, minimum))
    weight, *packed = int4.pack(q, bits), int4.pack_scales(scale), int4.pack_scales(minimum)
    symmetric = np.asarray(int4.dequantized(weight, packed[0], None))
    np.testing.assert_array_equal(symmetric, ((q.astype(np.float64) - offset) * wide).astype(np.float32))
    got = np.asarray(int4.dequantized(weight, *packed))
    want = q.astype(np.float64) * wide
    atol = 1e-5 if bits == 4 else 2e-4
    np.testing.assert_allclose(got, (want + low).astype(np.float32), rtol=2e-6, atol=atol)
    if len(shape) == 2:
        at = RANDOM.integers(0, shape[0], (3, 5))
        np.testing.assert_array_equal(int4.rows(weight, *packed, jnp.asarray(at)), got[at])
        np.testing.assert_array_equal(int4.rows(weight, packed[0], None, jnp.asarray(at)), symmetric[at])


@pytest.mark.parametrize(
    ("bits", "group", "shape"),
    by_default(
        [(*form, shape) for shape in ((32, 256), (2, 16, 1024)) for form in ((8, 16), (8, 32), (8, 128), (6, 16))],
        lambda case: case in {(8, 128, (32, 256)), (6, 16, (32, 256)), (8, 16, (2, 16, 1024))},
    ),
    ids=str,
)
def test_scales_with_steps_are_their_products_to_the_last_bit(bits: int, group: int, shape: tuple[int, ...]) -> None:
    q = integers(*shape, bits=bits)
    scales = [RANDOM.integers(-128, 128, (*shape[:-1], shape[-1] // group), np.int8) for _ in range(2)]
    steps = [RANDOM.standard_normal((*shape[:-1], shape[-1] // 256)).astype(np.float16) for _ in range(2)]
    wide = [
        each.astype(np.float32) * np.repeat(step.astype(np.float32), 256 // group, -1)
        for each, step in zip(scales, steps, strict=True)
    ]
    held = [int4.stepped(*pair) for pair in zip(scales, steps, strict=True)]
    packed = [int4.pack_scales(each) for each in held]
    weight = int4.pack(q, bits)
    assert packed[0].shape == int4.scale_shape(shape, group, int4.STEPPED)
    assert int4.group_of(weight, packed[0]) == group
    for each, number in zip(held, wide, strict=True):
        np.testing.assert_array_equal(int4.stepped_numbers(each), number)
    plain = [int4.pack_scales(number) for number in wide]
    np.testing.assert_array_equal(int4.dequantized(weight, *packed), int4.dequantized(weight, *plain))
    np.testing.assert_array_equal(int4.dequantized(weight, packed[0], None), int4.dequantized(weight, plain[0], None))
    if len(shape) == 2:
        at = jnp.asarray(RANDOM.integers(0, shape[0], (3, 5)))
        np.testing.assert_array_equal(int4.rows(weight, *packed, at), int4.rows(weight, *plain, at))
        np.testing.assert_array_equal(int4.rows(weight, packed[0], None, at), int4.rows(weight, plain[0], None, at))


@needs_numba
@pytest.mark.parametrize(
    ("bits", "group"), [(4, 32), *(pytest.param(*form, marks=RARER) for form in ((6, 16), (8, 16), (8, 32)))]
)
@pytest.mark.parametrize("rows", by_default([3, 1, 40], lambda rows: rows != 1))
def test_products_with_steps_are_those_with_numbers_to_the_last_bit(rows: int, bits: int, group: int) -> None:
    q = jnp.asarray(int4.pack(integers(80, 1280, bits=bits), bits))
    scale, minimum = (stored(RANDOM.standard_normal((80, 1280 // group)), "int8", group) for _ in range(2))
    x = jnp.asarray(RANDOM.standard_normal((rows, 1280), np.float32))
    for low in (minimum, None):
        held = [None if one is None else jnp.asarray(int4.pack_scales(one)) for one in (scale, low)]
        wide = [
            None if one is None else jnp.asarray(int4.pack_scales(int4.stepped_numbers(one))) for one in (scale, low)
        ]
        np.testing.assert_array_equal(products.multiply_int4(x, q, *held), products.multiply_int4(x, q, *wide))


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


def rounded(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows as the native kernel multiplies them: 8-bit integers with a scale for each group, in float64; and in which
    rows no number lies between two integers, where either is right."""
    grouped = x.reshape(len(x), -1, group)
    unit = np.maximum(np.abs(grouped).max(-1, keepdims=True), np.float32(1e-30)) / np.float32(127)
    unit = ((unit.view(np.int32) + 3) & -4).view(np.float32)  # 22 bits
    steps = grouped * (1 / unit)
    certain = (np.abs(np.abs(steps - np.rint(steps)) - 0.5) > 1e-5).all(axis=(1, 2))
    return (np.rint(steps).astype(np.float64) * unit.astype(np.float64)).reshape(x.shape), certain


@pytest.mark.parametrize(("implementation", "bits", "group", "kind", "minimums"), of_xla_and_native(FORMS))
def test_a_product_is_that_of_the_values(
    implementation: str | None, bits: int | str, group: int, kind: str, minimums: bool
) -> None:
    (weight, scale, minimum), values = matrix(96, 256, group, kind, minimums, bits)

    @jax.jit
    def multiply(inputs: list[jax.Array], weight: jax.Array, **scales: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        options = {**scales, "options": LinearOptions("int4")}
        return [
            (
                linear(x, weight, implementation=implementation, **options),
                linear(x.astype(jnp.bfloat16), weight, **options),
            )
            for x in inputs
        ]

    inputs = [RANDOM.standard_normal((rows, 256), np.float32) for rows in (3, 1, 30)]
    for x, (got, narrow) in zip(inputs, multiply(inputs, weight, scale=scale, minimum=minimum), strict=True):
        expected = x.astype(np.float64) @ values.T
        # Six standard deviations of what it changes to round rows to eight bits.
        rounding = 6 / 127 / 12**0.5 * np.abs(x).max(1, keepdims=True) * np.linalg.norm(values, axis=1)
        allowed = 1e-5 * np.abs(expected).max() if implementation == "xla" else rounding
        assert (np.abs(np.asarray(got) - expected) <= allowed).all(), f"{len(x)} rows"
        assert narrow.dtype == jnp.bfloat16
        beyond = 1.2 * rounding + np.abs(expected) / 128
        assert (np.abs(np.asarray(narrow, np.float64) - expected) <= beyond).all(), f"{len(x)} rows"


@pytest.mark.parametrize(
    ("implementation", "bits", "group", "kind", "minimums"), of_xla_and_native([*FORMS, (None, 0, "", False)])
)
def test_rows_that_are_not_finite_stay_so_and_others_what_they_were(
    implementation: str | None, bits: int | str | None, group: int, kind: str, minimums: bool
) -> None:
    if bits is None:
        weight, scale, minimum = jnp.asarray(RANDOM.integers(-99, 99, (96, 256), np.int8)), jnp.ones(96), None
    else:
        (weight, scale, minimum), _ = matrix(96, 256, group, kind, minimums, bits)
    options = LinearOptions("int8" if bits is None else "int4")
    multiply = partial(linear, options=options, implementation=implementation)

    @jax.jit
    def several(inputs: list[jax.Array], weight: jax.Array, **scales: jax.Array) -> list[jax.Array]:
        return [multiply(x, weight, **scales) for x in inputs]

    product = partial(several, weight=weight, scale=scale, minimum=minimum)
    inputs = [RANDOM.standard_normal((rows, 256), np.float32) for rows in (2, 3, 40)]
    expected = [np.asarray(each) for each in product(inputs)]
    for bad in (np.nan, -np.nan, np.inf, -np.inf, np.uint32(0x7FFFFFFF).view(np.float32)):
        for at in (0, 33, 255):
            broken = [x.copy() for x in inputs]
            for x in broken:
                x[1, at] = bad
            for got, want in zip(map(np.asarray, product(broken)), expected, strict=True):
                assert not np.isfinite(got[1]).any(), (len(got), bad, at)
                np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(want, 1, 0))


@needs_numba
@pytest.mark.parametrize(("bits", "group", "kind", "minimums"), FEW_FORMS)
@pytest.mark.parametrize(
    "shape", by_default(map(pytest.param, [(16, 128), (208, 256), (1056, 384), (48, 2304)])), ids=str
)
def test_rows_of_eight_bits_are_multiplied_exactly(
    shape: tuple[int, int], bits: int | str, group: int, kind: str, minimums: bool
) -> None:
    if kind == int4.STEPPED and shape[1] % int4.SPAN:
        pytest.skip("steps are of 256 inputs")
    packed, values = matrix(*shape, group, kind, minimums, bits)
    random = np.random.default_rng(group)  # the same rows whatever other tests have drawn
    x = random.standard_normal((203, shape[1]), np.float32) * random.random((203, 1), np.float32) * 10
    x[7], x[:, 32:64] = 0, 0  # an empty row, and empty groups
    counts = (203, 1, 3, 4, 5, 11, 12, 13, 100)
    results = jax.jit(lambda inputs: [products.multiply_int4(rows, *packed) for rows in inputs])
    whole, *fewer = map(np.asarray, results([x[:rows] for rows in counts]))
    stored, certain = rounded(x, group)
    assert certain.mean() > 0.9
    expected = (stored @ values.T)[certain]
    np.testing.assert_allclose(whole[certain], expected, rtol=1e-5, atol=2e-6 * np.abs(expected).max())
    for got in fewer:
        np.testing.assert_array_equal(got, whole[: len(got)], err_msg=f"{len(got)} rows differ from all together")


@needs_numba
@pytest.mark.parametrize("minimums", by_default([True, False]))
def test_six_bits_give_what_eight_give_to_the_last_bit(minimums: bool) -> None:
    (six, scale, minimum), _ = matrix(112, 768, 16, "int8", minimums, 6)
    eight = jnp.asarray(int4.pack(int4.unpack(np.asarray(six)), 8))
    x = RANDOM.standard_normal((50, 768), np.float32)
    inputs = [x[:rows] for rows in (1, 2, 4, 14, 50)]
    both = jax.jit(lambda x: [products.multiply_int4(x, weight, scale, minimum) for weight in (six, eight)])
    for each in inputs:
        np.testing.assert_array_equal(*both(each))


@pytest.mark.parametrize("kind", int4.CODEBOOKS)
@pytest.mark.parametrize("shape", by_default(map(pytest.param, [(2, 16, 1024), (32, 256)])), ids=str)
def test_indices_of_a_codebook_are_its_values_to_the_last_bit(shape: tuple[int, ...], kind: str) -> None:
    q, groups = integers(*shape), (*shape[:-1], shape[-1] // 32)
    if kind == int4.EXPONENTS:
        scale = RANDOM.integers(0, 250, groups).astype(np.uint8)
        scale.reshape(-1)[:2] = 0, 1  # subnormal numbers
        numbers, scale = np.ldexp(1.0, scale.astype(int) - 128), scale.view(kind)
    else:
        scale = stored(RANDOM.standard_normal((int(np.prod(shape[:-1])), groups[-1])), kind, 32)
        numbers = (int4.stepped_numbers(scale) if kind == int4.STEPPED else scale.astype(float)).reshape(groups)
        scale = scale.reshape(*shape[:-1], *scale.shape[1:])
    weight, packed = int4.pack(q).view(int4.CODES), int4.pack_scales(scale)
    assert weight.shape == int4.weight_shape(shape, codes=True) and weight.nbytes * 2 == q.size
    assert packed.shape == int4.scale_shape(shape, 32, kind)
    assert (int4.matrix_shape(weight), int4.group_of(weight, packed)) == (shape, 32)
    np.testing.assert_array_equal(int4.unpack(weight), q)
    values = (np.array(int4.CODEBOOKS[kind])[q] * np.repeat(numbers, 32, -1)).astype(np.float32)
    np.testing.assert_array_equal(int4.exponent_numbers(np.arange(256, dtype=np.uint8))[[0, 1, 2, 128, 255]],
                                  [2.0**-128, 2.0**-127, 2.0**-126, 1, 2.0**127])  # fmt: skip
    normal = np.repeat(np.abs(numbers), 32, -1) >= np.finfo(np.float32).tiny  # XLA:CPU takes others for zero
    got = np.asarray(int4.dequantized(weight, packed, None))
    np.testing.assert_array_equal(got[normal], values[normal])
    assert np.abs(got[~normal]).max(initial=0.0) < 2.0**-123
    if len(shape) == 2:
        at = RANDOM.integers(0, shape[0], (3, 5))
        np.testing.assert_array_equal(int4.rows(weight, packed, None, jnp.asarray(at)), got[at])


@needs_numba
@pytest.mark.parametrize("kind", by_default(int4.CODEBOOKS))
@pytest.mark.parametrize("gated", by_default([True, False]))
def test_codebooks_give_what_their_values_give_in_eight_bits_to_the_last_bit(gated: bool, kind: str) -> None:
    """Results are equal for row counts of every tile, with a single matrix and with one of a stack."""
    each = [matrix(96, 768, 32, kind, bits=int4.CODES)[0][:2] for _ in range(3)]
    codes, scale = (jnp.stack(parts) for parts in zip(*each, strict=True))
    values = np.array(int4.CODEBOOKS[kind], np.int8)[int4.unpack(np.asarray(codes))]
    eight = jnp.asarray(int4.pack(values, 8))
    wide = int4.numbers(scale, 768) if kind == int4.EXPONENTS else scale
    x = RANDOM.standard_normal((50, 768), np.float32)
    multiply = partial(products.multiply_int4, gated=gated)

    @jax.jit
    def four(x: jax.Array, expert: jax.Array) -> list[tuple[jax.Array, ...]]:
        """Return ours and theirs of one matrix, and of one of the stack."""
        ours, theirs = (codes, scale), (eight, wide)
        alone = tuple(multiply(x, q[0], scales[0]) for q, scales in (ours, theirs))
        return [alone, tuple(multiply(x, *pair, expert=expert) for pair in (ours, theirs))]

    for rows in (1, 2, 4, 12, 16, 40, 50):
        for got, want in four(x[:rows], np.int32(1)):
            np.testing.assert_array_equal(got, want, err_msg=f"{rows} rows")


@needs_numba
@pytest.mark.parametrize("minimums", [False, True, None])
def test_rows_are_normed_results_gated_and_a_residual_is_added_on_the_way(minimums: bool | None) -> None:
    """With None, of a codebook."""
    if minimums is None:
        packed, _ = matrix(224, 128, 32, int4.EXPONENTS, bits=int4.CODES)
    else:
        packed, _ = matrix(224, 128, 32, minimums=minimums)
    assert packed[1] is not None
    half = tuple(None if array is None else array[:7] for array in packed)
    norm = jnp.asarray(RANDOM.standard_normal(128, np.float32))
    multiply = partial(products.multiply_int4, eps=1.0)

    @jax.jit
    def every_way(x: jax.Array, residual: jax.Array) -> dict[str, jax.Array]:
        normed = jax.lax.optimization_barrier(products.rms_norm(x, norm, 1.0))
        return {
            "wide": multiply(normed, *packed),
            "normed on the way": multiply(x, *packed, norm=norm),
            "gated": multiply(x, *packed, norm=norm, gated=True),
            "gated and added": multiply(x, *packed, residual, norm=norm, gated=True),
            "narrow": multiply(x, *half),
            "added": multiply(x, *half, residual),
        }

    for rows in (1, 3, 16, 47, 199):
        x = RANDOM.standard_normal((rows, 128), np.float32) * 6
        residual = RANDOM.standard_normal((rows, 112), np.float32) * 10
        got = {name: np.asarray(result) for name, result in every_way(x, residual).items()}
        gates, ups = np.split(got["wide"], 2, axis=1)
        want = gates / (1 + np.exp(-gates)) * ups
        check = partial(np.testing.assert_allclose, err_msg=f"{rows} rows")
        check(got["normed on the way"], got["wide"], rtol=1e-4, atol=1e-4)
        check(got["gated"], want, rtol=1e-4, atol=1e-3)
        check(got["gated and added"], want + residual, rtol=1e-4, atol=1e-3)
        check(got["added"], got["narrow"] + residual, rtol=1e-6, atol=1e-4)


@needs_numba
@pytest.mark.skipif(not has_feature("amx-int8"), reason="this processor has no AMX")
@pytest.mark.parametrize(("bits", "group", "kind", "minimums"), FEW_FORMS)
def test_amx_changes_nothing(
    bits: int | str, group: int, kind: str, minimums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = matrix(96, 1280, group, kind, minimums, bits)

    @jax.jit
    def products_of(x: jax.Array) -> list[jax.Array]:
        results = []
        for gated, there in itertools.product((False, True), (True, False)):
            monkeypatch.setattr(products, "has_amx", lambda there=there: there)  # it is asked while this is traced
            results.append(products.multiply_int4(x, *packed, gated=gated))
        return results

    with_amx, without, gated, gated_without = products_of(RANDOM.standard_normal((150, 1280), np.float32))
    np.testing.assert_array_equal(with_amx, without)
    np.testing.assert_array_equal(gated, gated_without)


@needs_numba
@pytest.mark.parametrize("rows", [3, 40, 300])
def test_only_the_first_rows_are_computed(rows: int) -> None:
    packed, _ = matrix(96, 128, 64)
    x = jnp.asarray(RANDOM.standard_normal((rows, 128), np.float32))
    multiply = jax.jit(products.multiply_int4)
    whole = np.asarray(multiply(x, *packed))
    for count in (0, 1, rows // 2, rows - 1):
        poisoned = np.array(x)
        poisoned[count:] = np.nan
        got = np.asarray(multiply(poisoned, *packed, count=np.int32(count)))
        np.testing.assert_array_equal(got[:count], whole[:count])


@needs_numba
@pytest.mark.parametrize(("bits", "group", "kind", "minimums"), FEW_FORMS)
def test_one_matrix_of_a_stack_is_read_in_place(bits: int | str, group: int, kind: str, minimums: bool) -> None:
    each = [matrix(96, 256, group, kind, minimums, bits)[0] for _ in range(3)]
    arrays = [None if parts[0] is None else jnp.stack(parts) for parts in zip(*each, strict=True)]

    @partial(jax.jit, static_argnames="gated")
    def alone_and_in_place(x: jax.Array, index: jax.Array, gated: bool) -> tuple[list[jax.Array], jax.Array]:
        multiply = partial(products.multiply_int4, x, eps=1.0, gated=gated)
        return [multiply(*parts) for parts in each], multiply(*arrays, expert=index)

    for rows, gated in ((1, True), (50, False)):  # each compiles a program
        x = RANDOM.standard_normal((rows, 256), np.float32)
        for index in INDICES:
            alone, got = alone_and_in_place(x, np.int32(index), gated)
            assert not np.array_equal(alone[0], alone[1])
            np.testing.assert_array_equal(got, alone[clamped(index)], err_msg=f"expert {index}, {rows} rows")


@needs_numba
def test_products_run_in_a_chain() -> None:
    first, second = matrix(512, 256, 64)[0], matrix(256, 256, 64)[0]
    norm = jnp.ones(256)

    def layers(x: jax.Array, *arrays: jax.Array) -> jax.Array:
        for _ in range(3):
            y = products.multiply_int4(x, *arrays[:2], norm=norm, eps=1e-5, gated=True)
            x = products.multiply_int4(y, *arrays[2:], residual=x)
        return x

    for rows in (1, 2, 40):
        x = jnp.asarray(RANDOM.standard_normal((rows, 256), np.float32))
        arrays = (*first[:2], *second[:2])
        chained = jax.jit(chain.chained(layers))
        assert "rekindle_chain" in chained.lower(x, *arrays).as_text()
        np.testing.assert_array_equal(chained(x, *arrays), jax.jit(layers)(x, *arrays))


def test_what_does_not_fit_is_refused() -> None:
    (weight, scale, _), _ = matrix(32, 128, 64)
    with pytest.raises(AssertionError, match="rows of 64 and a matrix of 128"):
        products.multiply_int4(jnp.ones((2, 64)), weight, scale)
    with pytest.raises(AssertionError, match="groups of 8"):
        products.multiply_int4(jnp.ones((2, 128)), weight, jnp.ones((2, 256), jnp.float16))


def test_a_derivative_is_that_of_the_values() -> None:
    (weight, scale, _), values = matrix(64, 128, 64)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(linear(x, weight, scale=scale, options=LinearOptions("int4")))

    np.testing.assert_allclose(jax.grad(total)(jnp.ones((2, 128))), np.tile(values.sum(0), (2, 1)), rtol=1e-4)


@pytest.mark.parametrize("implementation", ["xla", None])
def test_an_expert_of_a_stack_has_the_product_and_the_derivative_of_its_matrix(implementation: str | None) -> None:
    each = [matrix(64, 128, 64)[0] for _ in range(3)]
    weight, scale = (jnp.stack([parts[part] for parts in each]) for part in range(2))
    x = jnp.asarray(RANDOM.standard_normal((2, 128), np.float32))

    def product(x: jax.Array, weight: jax.Array, scale: jax.Array, expert: jax.Array | None = None) -> jax.Array:
        options = LinearOptions("int4", "silu")
        return linear(x, weight, scale=scale, expert=expert, options=options, implementation=implementation)

    got = jax.vjp(jax.jit(product), x, weight, scale, jnp.int32(1))
    want = jax.vjp(jax.jit(product), x, *each[1][:2])
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1](got[0])[0], want[1](want[0])[0])


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_it_lowers_for_other_platforms(platform: str) -> None:
    """A GPU has a kernel, a TPU widens the weights before."""
    shapes = [((4, 256), jnp.bfloat16), ((6, 2048), jnp.uint8), ((6, 64), jnp.float16), ((6, 64), jnp.float16)]
    x, weight, scale, minimum = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)

    def product(x: jax.Array, weight: jax.Array, scale: jax.Array, minimum: jax.Array) -> jax.Array:
        options = LinearOptions("int4", "silu")
        kind = {"cuda": "gpu"}.get(platform, platform)
        return linear(x, weight, scale=scale, minimum=minimum, options=options, platform=kind)

    with deprecated.known(), jax.sharding.use_abstract_mesh(ABSENT[platform]):
        triton = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
        export = jax.export.export(jax.jit(product), platforms=[platform], disabled_checks=triton)
        found = export(x, weight, scale, minimum)
    assert found.out_avals[0].shape == (4, 48)
    assert {"cuda": "triton", "tpu": "dot_general"}[platform] in found.mlir_module()
