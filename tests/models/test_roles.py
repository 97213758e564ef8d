"""Cutting a parameter into the parts of devices, and putting it together again."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle._src.models import roles
from rekindle._src.models.roles import REPLICATED, Role, Span, column, cut, experts, heads, join, local_shape, row
from rekindle_kernels import int4


def parts(role: Role, array: np.ndarray, expert: int, model: int) -> dict[tuple[int, int], np.ndarray]:
    sizes = {"expert": expert, "model": model}
    places = itertools.product(range(expert), range(model))
    return {at: cut(role, array, sizes, {"expert": at[0], "model": at[1]}) for at in places}


def numbered(*shape: int) -> np.ndarray:
    return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


def test_fused_heads_are_divided_head_by_head() -> None:
    """[q0 q1 q2 q3 | k0 k1 | v0 v1] of heads with two rows each, for two devices."""
    array = numbered(16, 1)
    first, second = parts(column(*heads(4, 2, 2)), array, 1, 2).values()
    assert first[:, 0].tolist() == [1, 2, 3, 4, 9, 10, 13, 14]
    assert second[:, 0].tolist() == [5, 6, 7, 8, 11, 12, 15, 16]


def test_kv_heads_are_repeated_where_there_are_more_devices() -> None:
    array = numbered(8, 1)  # four q heads, two k, two v, one row each
    found = parts(column(*heads(4, 2, 1)), array, 1, 4)
    assert [part[:, 0].tolist() for part in found.values()] == [[1, 5, 7], [2, 5, 7], [3, 6, 8], [4, 6, 8]]


def test_inputs_are_divided_along_the_last_axis() -> None:
    array = numbered(2, 4)
    first, second = parts(row(4), array, 1, 2).values()
    assert first.tolist() == [[1, 2], [5, 6]] and second.tolist() == [[3, 4], [7, 8]]


def test_what_does_not_divide_evenly_is_padded_with_zeros() -> None:
    found = parts(column(Span(5)), numbered(5), 1, 4)
    assert [part.tolist() for part in found.values()] == [[1, 2], [3, 4], [5, 0], [0, 0]]


def test_experts_are_divided_first_and_each_of_them_then() -> None:
    array = numbered(4, 2, 1)
    found = parts(experts(4, column(Span(2))), array, 2, 2)
    assert found[0, 0][..., 0].tolist() == [[1], [3]] and found[1, 1][..., 0].tolist() == [[6], [8]]


def test_scales_follow_the_outputs_of_their_matrix() -> None:
    assert column(Span(4)).scale == column(Span(4))
    assert row(4).scale == REPLICATED
    assert experts(2, row(4)).scale == Role((roles.Division(0, ("expert",), (Span(2),)),))


SPANS = st.lists(st.builds(Span, st.integers(1, 9).map(lambda n: 4 * n), st.sampled_from([None, 2, 4])), min_size=1)


@given(SPANS, st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (2, 4)]), st.booleans(), st.booleans())
def test_parts_make_the_whole_again(spans: list[Span], mesh: tuple[int, int], last: bool, stacked: bool) -> None:
    total = sum(span.size for span in spans)
    role = Role((roles.Division(-1 if last else 0, roles.ALL, tuple(spans)),))
    array = numbered(3, total) if last else numbered(total, 3)
    if stacked:
        role, array = experts(4, role), np.stack([array + 1000 * index for index in range(4)])
    found = parts(role, array, *mesh)
    sizes = dict(zip(("expert", "model"), mesh, strict=True))
    assert {part.shape for part in found.values()} == {local_shape(role, array.shape, sizes)}
    assert np.array_equal(join(role, found, array.shape, sizes), array)


def test_a_part_has_memory_of_its_own() -> None:
    array = numbered(4, 2)
    part = cut(column(Span(4)), array, {"expert": 1, "model": 2}, {"expert": 0, "model": 0})
    assert not np.shares_memory(part, array)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.float32])
def test_the_dtype_stays(dtype: type) -> None:
    array = numbered(4, 2).astype(dtype)
    assert all(part.dtype == dtype for part in parts(column(Span(4)), array, 1, 2).values())


@pytest.mark.parametrize(
    ("role", "shape", "sizes"),
    [
        (column(*heads(4, 2, 32)), (256, 64), (1, 2)),
        (column(Span(64), Span(64)), (128, 64), (1, 4)),
        (row(256), (32, 256), (1, 4)),
        (experts(4, column(Span(64))), (4, 64, 64), (2, 2)),
        (experts(4, row(128)), (4, 16, 128), (2, 2)),
    ],
)
def test_parts_of_four_bits_are_those_of_the_matrix(role: Role, shape: tuple[int, ...], sizes: tuple[int, int]) -> None:
    q = np.random.default_rng(0).integers(0, 16, shape).astype(np.uint8)
    scale = np.random.default_rng(1).random((*shape[:-1], shape[-1] // 32)).astype(np.float16)
    stack, named = len(shape) == 3, dict(zip(("expert", "model"), sizes, strict=True))
    assert role.reason_against_packing(stack, int4.OUTPUTS, 32, named) is None
    weights = role.packed(stack, int4.OUTPUTS, Fraction(int4.ROW_BYTES))
    scales = role.packed(stack, int4.OUTPUTS, Fraction(int4.OUTPUTS, 32))
    wide = np.repeat(scale, 32, -1)
    whole = parts(role, q, *sizes), parts(role, wide, *sizes)
    found = parts(weights, int4.pack(q), *sizes), parts(scales, int4.pack_scales(scale), *sizes)
    for at, part in whole[0].items():
        np.testing.assert_array_equal(int4.unpack(found[0][at]), part)
        np.testing.assert_array_equal(np.repeat(int4.unpack_scales(found[1][at]), 32, -1), whole[1][at])
    joined = join(weights, found[0], int4.weight_shape(shape), named)
    np.testing.assert_array_equal(joined, int4.pack(q))


@pytest.mark.parametrize(("role", "shape"), [(column(Span(64)), (64, 256)), (row(1024), (16, 1024))])
def test_parts_of_scales_with_steps_are_those_of_the_matrix(role: Role, shape: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    q = random.integers(0, 16, shape).astype(np.uint8)
    integers = random.integers(-128, 128, (shape[0], shape[1] // 32), np.int8)
    scale = int4.stepped(integers, random.random((shape[0], shape[1] // 256)).astype(np.float16))
    values = (q - np.float32(8)) * np.repeat(int4.stepped_numbers(scale), 32, -1)
    assert role.reason_against_packing(False, int4.OUTPUTS, int4.SPAN, {"expert": 1, "model": 4}) is None
    weights = role.packed(False, int4.OUTPUTS, Fraction(int4.ROW_BYTES))
    scales = role.packed(False, int4.OUTPUTS, int4.scale_columns(32, int4.STEPPED))
    found = parts(weights, int4.pack(q), 1, 4), parts(scales, int4.pack_scales(scale), 1, 4)
    for at, part in parts(role, values, 1, 4).items():
        np.testing.assert_array_equal(int4.dequantized(found[0][at], found[1][at], None), part)


def test_parts_that_would_cut_a_group_or_a_block_are_refused() -> None:
    two = {"expert": 1, "model": 2}
    assert "96 inputs in 2 parts are not multiples of 32" in str(row(96).reason_against_packing(False, 16, 32, two))
    assert "48 outputs in 2 parts" in str(column(Span(48)).reason_against_packing(False, 16, 32, two))
    assert column(*heads(4, 1, 16)).reason_against_packing(False, 16, 32, two) is None, "one kv head is repeated"
