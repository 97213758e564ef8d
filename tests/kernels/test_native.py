"""Native kernels: products, rotation and writing against XLA; object code that is kept, loaded and replaced."""

from __future__ import annotations

import importlib.util
import threading
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.group_matrices import INDICES, clamped
from helpers.kernel_state import begin_with
from helpers.python import run_python
from helpers.thorough import by_default
from rekindle_kernels import GatedCall, LinearOptions, gated, init_pages, linear, pages, rms_norm, rope
from rekindle_kernels.native import attention, build, cpu, kernel_files, library, products, sampling
from rekindle_kernels.native.kernel_table import GEMM
from rekindle_kernels.ops.linear import GATED
from rekindle_kernels.xla import linear as plain_linear

pytestmark = pytest.mark.skipif(build.unavailable_reason() is not None, reason="numba is not installed")
RANDOM = np.random.default_rng(0)


def weights(dtype: str, height: int, width: int) -> tuple[jax.Array, jax.Array | None, np.ndarray]:
    """A matrix, its scale, and what both mean in float64."""
    plain = RANDOM.standard_normal((height, width), np.float32)
    if dtype != "int8":
        stored = jnp.asarray(plain).astype(dtype)
        return stored, None, np.asarray(stored.astype(jnp.float32), np.float64)
    stored, scale = jnp.asarray((plain * 40).astype(np.int8)), jnp.asarray(RANDOM.random(height, np.float32) / 40)
    return stored, scale, np.asarray(stored, np.float64) * np.asarray(scale, np.float64)[:, None]


def rounded_to_bfloat16(x: np.ndarray) -> np.ndarray:
    return x.astype(jnp.bfloat16).astype(np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_few_rows_times_a_matrix(dtype: str) -> None:
    stored = [weights(dtype, height, width) for height, width in [(964, 576), (3, 33), (1, 16), (127, 100)]]
    cases = [(rows, *each) for each in stored for rows in (1, 2, 3, 4, 7, 8)]
    assert all(products.multiplies(rows, weight) for rows, weight, _, _ in cases)
    inputs = [RANDOM.standard_normal((rows, weight.shape[1]), np.float32) for rows, weight, _, _ in cases]
    calls = [(x, weight, scale) for x, (_, weight, scale, _) in zip(inputs, cases, strict=True)]
    results = jax.jit(lambda calls: [products.multiply(*call) for call in calls])(calls)
    for x, got, (rows, weight, _, meaning) in zip(inputs, results, cases, strict=True):
        kernel, wide = products._kernel(rows, weight, False), x.astype(np.float64)
        if kernel is not None and kernel.spec is GEMM and not cpu.multiplies_widened(dtype):
            wide = rounded_to_bfloat16(x)
        error = f"{rows} rows times {weight.shape}"
        np.testing.assert_allclose(got, wide @ meaning.T, rtol=0, atol=1e-5 * weight.shape[1], err_msg=error)


@pytest.fixture(params=["amx", "no amx"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By AMX, where the processor has it, and without."""
    if request.param == "amx" and not products.has_amx():
        pytest.skip("this processor has no AMX")
    monkeypatch.setattr(products, "has_amx", lambda: request.param == "amx")


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_many_rows_times_a_matrix(dtype: str) -> None:
    weight, scale, meaning = weights(dtype, 208, 192)
    if not products._has_gemm(weight):
        assert not products.multiplies(16, weight, quantize_rows=True)
        pytest.skip("this processor has no instruction for it")
    counts = (5, 15, 16, 17, 20, 21, 32, 34, 40, 47, 56, 64, 66, 85, 130, 192, 203, 515)
    assert all(products.multiplies(rows, weight, quantize_rows=True) for rows in counts)
    inputs, random = [], np.random.default_rng(1)  # the same rows whatever other tests have drawn
    for rows in counts:
        x = random.standard_normal((rows, 192), np.float32) * random.random((rows, 1), np.float32) * 10
        x[rows // 2] = 0
        inputs.append(x)
    multiply = partial(products.multiply, weight=weight, scale=scale, quantize_rows=True)
    results = jax.jit(lambda inputs: [multiply(each) for each in inputs])(inputs)
    for x, result in zip(inputs, results, strict=True):
        got, wide = np.asarray(result), x.astype(np.float64)
        if dtype == "int8":
            unit = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(1e-30)) / np.float32(127)
            steps = x * (1 / unit)
            between = np.abs(np.abs(steps - np.rint(steps)) - 0.5).min(axis=1) < 1e-5  # either neighbour is right
            assert between.mean() < 0.1
            wide, got = np.rint(steps[~between]) * unit.astype(np.float64)[~between], got[~between]
        elif not cpu.multiplies_widened(dtype):  # where rows stay what they are
            wide = rounded_to_bfloat16(x)
        np.testing.assert_allclose(got, wide @ meaning.T, rtol=1e-5, atol=1e-3, err_msg=f"{len(x)} rows")


@pytest.fixture
def small_ones_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest products of float32 are split into those of bfloat16, too, where the processor does that."""
    if not cpu.multiplies_many("float32"):
        pytest.skip("XLA multiplies them on this processor")
    monkeypatch.setattr(products, "SPLIT_NUMBERS", 1)
    monkeypatch.setattr(products, "SPLIT_ROWS", 1)


@pytest.mark.usefixtures("either_way", "small_ones_split")
def test_many_rows_times_a_float32_matrix_are_exact() -> None:
    """In strips, and by AMX where numbers that are split into three bfloat16 lose nothing: errors are those of sums of
    float32."""
    shapes = [(5, 16, 16), (33, 48, 80), (40, 304, 1040), (530, 32, 32)]
    inputs = [(weights("float32", N, K)[0], RANDOM.standard_normal((R, K), np.float32)) for R, N, K in shapes]
    inputs += [(weight * 1e-20, x * 1e25) for weight, x in inputs[:2]]
    inputs[1][1][4, 7] = np.nan
    results = jax.jit(lambda inputs: [products.multiply(x, weight) for weight, x in inputs])(inputs)
    for (weight, x), got in zip(inputs, results, strict=True):
        wide, matrix = np.asarray(x, np.float64), np.asarray(weight, np.float64)
        most = np.abs(wide) @ np.abs(matrix).T  # NaN in the rows that have one
        np.testing.assert_array_equal(np.isnan(got), np.isnan(most))
        np.testing.assert_array_less(np.nan_to_num(np.abs(got - wide @ matrix.T) / most), 6e-7)


@pytest.mark.usefixtures("either_way", "small_ones_split")
def test_a_float32_product_takes_norm_gate_and_residual_along() -> None:
    weight, _, _ = weights("float32", 96, 128)
    x, residual = (RANDOM.standard_normal((70, width), np.float32) for width in (128, 48))
    norm, count = jnp.asarray(RANDOM.random(128, np.float32)), jnp.int32(67)
    got = jax.jit(partial(products.multiply, eps=1e-6, gated=True))(x, weight, None, residual, count, norm)
    y = plain_linear.multiply(plain_linear.rms_norm(x, norm, 1e-6), weight, None, None, jnp.float32)
    right = residual + plain_linear.gated(y, None, "silu")
    np.testing.assert_allclose(got[:67], right[:67], rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_with_and_without_amx_a_product_is_the_same(dtype: str, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not products.has_amx():
        pytest.skip("this processor has no AMX")
    weight, scale, _ = weights(dtype, 224, 128)
    x = RANDOM.standard_normal((700, 128), np.float32)

    def product(amx: bool) -> np.ndarray:
        monkeypatch.setattr(products, "has_amx", lambda: amx)
        return np.asarray(jax.jit(partial(products.multiply, quantize_rows=True, gated=gated))(x, weight, scale))

    got, right = product(True), product(False)
    exact = dtype == "int8"  # but for the scales' rounding
    np.testing.assert_allclose(got, right, rtol=2e-6 if exact else 1e-5, atol=1e-5 if exact else 1e-3)


def test_deterministic_products_do_without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scale, _ = weights("bfloat16", 64, 64)
    if not products._has_gemm(weight) or cpu.multiplies_widened("bfloat16"):
        pytest.skip("this processor has no instruction for it")
    asked: list[Any] = []
    monkeypatch.setattr(products, "has_amx", lambda: True)
    monkeypatch.setattr(products, "call", lambda kernel, operands, settings, sizes: asked.append(settings) or (None,))
    for deterministic in (False, True):
        products.multiply(jnp.zeros((64, 64), jnp.float32), weight, scale, deterministic=deterministic)
    assert [settings["amx"] for settings in asked] == [True, False], "sums are added in another order by it"


@pytest.mark.parametrize(("version", "works"), [("0.44.0", False), ("0.47.1", False), ("0.48.0", True), ("1.0", True)])
def test_an_llvm_that_would_end_the_process_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, version: str, works: bool
) -> None:
    monkeypatch.setenv(library.FOLDER, "/nowhere")  # a library needs no LLVM
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    reason = build.unavailable_reason()
    assert (reason is None) == works
    assert works or (version in str(reason) and "pip install --upgrade" in str(reason))


@pytest.mark.parametrize(("rows", "gated"), [(1, True), (8, False), (40, True)])
@pytest.mark.parametrize("dtype", by_default(["float32", "int8", "bfloat16", "float16"], 2))
def test_one_matrix_of_a_stack_is_read_in_place(dtype: str, rows: int, gated: bool) -> None:
    each = [weights(dtype, 96, 128)[:2] for _ in range(3)]
    if not products.multiplies(rows, each[0][0], quantize_rows=True):
        pytest.skip("this processor has no instruction for it")
    weight, scale = (None if parts[0] is None else jnp.stack(parts) for parts in zip(*each, strict=True))
    values = dtype if dtype in ("bfloat16", "float16") else None
    bits = weight if values is None else jax.lax.bitcast_convert_type(weight, jnp.uint16)
    multiply = jax.jit(partial(products.multiply, quantize_rows=True, gated=gated))
    in_place = jax.jit(partial(products.multiply, quantize_rows=True, gated=gated, values=values))
    x = jnp.asarray(RANDOM.standard_normal((rows, 128), np.float32))
    alone = [np.asarray(multiply(x, *parts)) for parts in each]
    assert not np.array_equal(alone[0], alone[1])
    for index in INDICES:
        got = in_place(x, bits, scale, expert=jnp.int32(index))
        np.testing.assert_array_equal(got, alone[clamped(index)], err_msg=f"expert {index}")


def test_what_it_does_not_multiply() -> None:
    assert not products.multiplies(2, jnp.zeros((4, 4), jnp.float8_e4m3fn))
    assert not products.multiplies(2, jnp.zeros((2, 4, 4), jnp.float32)), "stacks of experts"
    assert not products.multiplies(1000, jnp.zeros((64, 96), jnp.bfloat16)), "the inputs must fill whole vectors"
    assert not products.multiplies(1000, jnp.zeros((72, 64), jnp.bfloat16)), "the outputs must fill whole tiles"
    assert not products.multiplies(16, jnp.zeros((64, 64), jnp.int8)), "rows that must not be rounded"
    in_strips = cpu.multiplies_widened("float32")
    assert products.multiplies(16, jnp.zeros((64, 64), jnp.float32)) == in_strips
    assert not products.multiplies(16, jnp.zeros((64, 72), jnp.float32)), "the inputs must fill whole vectors"


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_rows_are_normed_results_gated_and_a_residual_is_added_on_the_way(dtype: str) -> None:
    weight, scale, _ = weights(dtype, 224, 128)
    norm = jnp.asarray(RANDOM.standard_normal(128, np.float32))
    narrow, factors = weight[:112], None if scale is None else scale[:112]
    multiply = partial(products.multiply, quantize_rows=True, eps=1.0)

    @jax.jit
    def every_way(x: jax.Array, residual: jax.Array) -> dict[str, jax.Array]:
        # Rounding a row must find the numbers that the norm gave, whatever XLA would make of the two together.
        normed = jax.lax.optimization_barrier(products.rms_norm(x, norm, 1.0))
        return {
            "wide": multiply(normed, weight, scale),
            "normed on the way": multiply(x, weight, scale, norm=norm),
            "gated": multiply(normed, weight, scale, gated=True),
            "normed and gated": multiply(x, weight, scale, norm=norm, gated=True),
            "gated and added": multiply(normed, weight, scale, residual, gated=True),
            "narrow": multiply(normed, narrow, factors),
            "added": multiply(normed, narrow, factors, residual),
        }

    tolerance = {"rtol": 1e-4, "atol": {"float32": 1e-4, "bfloat16": 0.5, "int8": 0.5}[dtype]}
    counts = [
        rows for rows in (1, 2, 3, 7, 16, 20, 47, 130, 199) if products.multiplies(rows, weight, quantize_rows=True)
    ]  # where many rows are not XLA's
    assert counts[:4] == [1, 2, 3, 7]
    for rows in counts:
        x = RANDOM.standard_normal((rows, 128), np.float32) * 6
        residual = RANDOM.standard_normal((rows, 112), np.float32) * 10
        got = {name: np.asarray(result) for name, result in every_way(x, residual).items()}
        want = silu(got["wide"][:, :112]) * got["wide"][:, 112:]
        check = partial(np.testing.assert_allclose, err_msg=f"{rows} rows")
        check(got["normed on the way"], got["wide"], **tolerance)
        check(got["gated"], want, rtol=1e-5, atol=1e-4)
        check(got["normed and gated"], want, **tolerance)
        check(got["gated and added"], want + residual, rtol=1e-5, atol=1e-4)
        check(got["added"], got["narrow"] + residual, rtol=1e-6, atol=1e-4)


def test_what_can_end_in_a_gate() -> None:
    assert products.gates(jnp.zeros((96, 64))) and not products.gates(jnp.zeros((80, 64)))


@pytest.mark.parametrize("rows", [3, 40, 300])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_only_the_first_rows_are_computed(dtype: str, rows: int) -> None:
    weight, scale, _ = weights(dtype, 96, 128)
    if not products.multiplies(rows, weight, quantize_rows=True):
        pytest.skip("this processor has no instruction for it")
    x = jnp.asarray(RANDOM.standard_normal((rows, 128), np.float32))
    multiply = jax.jit(partial(products.multiply, quantize_rows=True))
    whole = np.asarray(multiply(x, weight, scale))
    for count in (0, 1, rows // 2, rows - 1):
        poisoned = np.array(x)
        poisoned[count:] = np.nan
        got = np.asarray(multiply(poisoned, weight, scale, count=np.int32(count)))
        np.testing.assert_allclose(got[:count], whole[:count], rtol=1e-4, atol=1e-3)


def test_products_refuse_norms_and_gates_that_they_can_not_do() -> None:
    x = jnp.ones((2, 48))
    with pytest.raises(AssertionError, match="normed before"):
        products.multiply(x, jnp.ones((64, 48)), norm=jnp.ones((48,)))
    with pytest.raises(AssertionError, match="gated afterwards"):
        products.multiply(x, jnp.ones((80, 48)), gated=True)


@pytest.mark.parametrize(("dtype", "rows"), [("float32", 1), ("bfloat16", 2), ("bfloat16", 30), ("bfloat16", 300)])
def test_gates_at_the_ends_of_the_range(dtype: str, rows: int) -> None:
    gates = jnp.array([0.0, -0.0, 1e-30, 88, -88, 1e4, -1e4, 3e38, -3e38, -20, 20, 3, -3, 0.5, -0.5, 1], jnp.float32)
    gates = jnp.tile(gates, 2).astype(dtype).astype(jnp.float32)
    x, weight = jnp.concatenate([gates, jnp.full((32,), 0.5)])[None], jnp.eye(64, dtype=dtype)
    if not products.multiplies(rows, weight):
        pytest.skip("this processor has no instruction for it")
    got = products.multiply(jnp.tile(x, (rows, 1)), weight, gated=True)
    np.testing.assert_allclose(got, jnp.tile(jax.nn.silu(gates) * 0.5, (rows, 1)), rtol=1e-6, atol=1e-20)


@pytest.mark.parametrize(
    ("tokens", "head_dim", "frequencies"),
    by_default([(1, 64, 32), (40, 96, 32), (33, 128, 64), (2, 64, 32), (514, 64, 32)], 2),
)
def test_queries_and_keys_are_rotated_and_values_split_off(tokens: int, head_dim: int, frequencies: int) -> None:
    qkv = RANDOM.standard_normal((tokens, 8, head_dim), np.float32)
    normed = RANDOM.standard_normal((tokens, 6, head_dim), np.float32)
    cos, sin = RANDOM.standard_normal((2, tokens, 1, frequencies), np.float32)
    assert attention.splits(jnp.asarray(qkv), jnp.asarray(cos[:, 0]))
    for source in (qkv, normed):
        q, k, v = jax.jit(lambda qk: attention.split(qk, qkv, cos[:, 0], sin[:, 0], heads=4))(source)
        first, second, rest = np.split(source[:, :6], (frequencies, 2 * frequencies), axis=-1)
        want = np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
        np.testing.assert_allclose(np.concatenate([q, k], axis=1), want, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(v, qkv[:, 6:])
    weights = RANDOM.standard_normal((6, head_dim), np.float32)
    got = jax.jit(partial(attention.split, heads=4, eps=1e-2))(qkv, qkv, cos[:, 0], sin[:, 0], weights)
    square = np.square(qkv[:, :6]).mean(axis=-1, keepdims=True)
    before = qkv[:, :6] / np.sqrt(square + np.float32(1e-2)) * weights
    want = attention.split(before, qkv, cos[:, 0], sin[:, 0], heads=4)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    assert not attention.splits(jnp.zeros((2, 8, 40)), jnp.zeros((2, 20))), "no multiple of a vector"


@pytest.mark.parametrize("tokens", by_default([40, 1]))
def test_queries_without_keys_are_rotated(tokens: int) -> None:
    q = RANDOM.standard_normal((tokens, 8, 64), np.float32)
    cos, sin = RANDOM.standard_normal((2, tokens, 32), np.float32)
    norm = RANDOM.standard_normal((8, 64), np.float32)
    for weights in (None, norm):
        call = jax.jit(partial(rope, heads=8, norm=weights, eps=1e-2))
        assert "rekindle_rope" in call.lower(q, q, cos, sin).as_text()
        got = call(q, q, cos, sin)
        want = jax.jit(partial(rope, heads=8, norm=weights, eps=1e-2, implementation="xla"))(q, q, cos, sin)
        assert [each.shape for each in got] == [(tokens, 8, 64), (tokens, 0, 64), (tokens, 0, 64)]
        np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rows", "width"), by_default([(2, 576), (1, 32), (35, 960)]))
def test_the_norm_of_rows(rows: int, width: int) -> None:
    x, weight = RANDOM.standard_normal((rows, width), np.float32), RANDOM.standard_normal(width, np.float32)
    assert products.norms(jnp.asarray(x))
    got = jax.jit(lambda x: products.rms_norm(x, weight, 1e-5))(x)
    want = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-6, atol=1e-6)
    assert not products.norms(jnp.asarray(x)[None]), "a batch of rows"
    assert not products.norms(jnp.asarray(x)[:, :31]), "no multiple of a vector"


@pytest.mark.parametrize(("rows", "width"), by_default([(2, 576), (1, 32), (35, 960)]))
def test_a_norm_of_rows_is_added_exactly_as_by_xla(rows: int, width: int) -> None:
    x, residual = RANDOM.standard_normal((2, rows, width), np.float32)
    weight, factor = RANDOM.standard_normal(width, np.float32), np.float32([1.37])
    residual[0, :4] = np.nan, np.inf, -np.inf, 0
    want = residual + jax.jit(lambda x: products.rms_norm(x, weight, 1e-5))(x)
    got = jax.jit(lambda x: products.rms_norm(x, weight, 1e-5, residual))(x)
    np.testing.assert_array_equal(got, want)
    got = jax.jit(lambda x: products.rms_norm(x, weight, 1e-5, residual, factor))(x)
    np.testing.assert_array_equal(got, jax.lax.reduce_precision(want * factor, 8, 22))
    like = partial(plain_linear.rms_norm, x, weight, 1e-5, residual, factor)
    np.testing.assert_allclose(got, like(), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), by_default([(1, 32), (300, 96), (1, 6144), (3, 256), (2, 4128)], 2))
def test_rows_are_gated(rows: int, width: int, activation: str) -> None:
    gates, ups = RANDOM.standard_normal((2, rows, width), np.float32) * 6
    gates[0, :5] = np.nan, np.inf, -np.inf, 1e30, -1e30
    both = np.concatenate([gates, ups], axis=1)
    together = jax.jit(lambda both: gated(both, activation))
    assert "rekindle_gatedrows" in together.lower(both).as_text()
    got = np.asarray(together(both))
    apart = jax.jit(lambda gates, ups: gated(gates, activation, ups))
    assert "rekindle_gatedrows" in apart.lower(gates, ups).as_text()
    np.testing.assert_array_equal(got, apart(gates, ups))
    wide = gates.astype(np.float64)
    slope = wide if activation == "silu" else 2 * (2 / np.pi) ** 0.5 * (wide + 0.044715 * wide**3)
    with np.errstate(over="ignore", invalid="ignore"):
        want = wide / (1 + np.exp(-slope)) * ups
    np.testing.assert_allclose(got[:, 5:], want[:, 5:], rtol=1e-5, atol=1e-6)
    special = np.asarray(jax.jit(partial(gated, activation=activation, implementation="xla"))(both))[0, :5]
    np.testing.assert_array_equal(np.isnan(got[0, :2]), np.isnan(special[:2]))
    np.testing.assert_allclose(got[0, 3:5], special[3:5], rtol=1e-6, atol=1e-6)


def test_gates_that_are_left_to_xla() -> None:
    assert products.gates_rows(jnp.zeros((2, 64)), "silu")
    assert not products.gates_rows(jnp.zeros((2, 64)), "relu2")
    assert not products.gates_rows(jnp.zeros((2, 48)), "silu"), "no two vectors"
    assert not products.gates_rows(jnp.zeros((2, 64), jnp.bfloat16), "silu")
    for platform in ("gpu", "tpu"):
        call = GatedCall(platform, jax.ShapeDtypeStruct((2, 64), jnp.float32), "silu")
        assert GATED.choose(call).name == "xla"


def test_gates_of_products_by_xla_are_xlas_too() -> None:
    x, weight = RANDOM.standard_normal((2, 64), np.float32), RANDOM.standard_normal((128, 64), np.float32)

    def text(implementation: str | None) -> str:
        options = LinearOptions(gate="gelu_tanh")
        call = jax.jit(partial(linear, options=options, implementation=implementation))
        return str(call.lower(x, weight).as_text())

    assert "rekindle_gatedrows" in text(None) and "rekindle" not in text("xla")


def test_the_gradient_of_gates_and_of_norms_that_are_added() -> None:
    gates, ups = RANDOM.standard_normal((2, 3, 64), np.float32)
    weight, factor = RANDOM.standard_normal(64, np.float32), np.float32([0.7])

    def loss(implementation: str | None, gates: jax.Array, ups: jax.Array) -> jax.Array:
        y = gated(gates, "gelu_tanh", ups, implementation=implementation)
        y = rms_norm(y, weight, 1e-5, residual=ups, factor=factor, implementation=implementation)
        return (y * y).sum()

    got, want = (jax.jit(jax.grad(partial(loss, name), argnums=(0, 1)))(gates, ups) for name in (None, "xla"))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", by_default([1, 257, 49152, 15, 256, 1000], 3))
def test_the_first_index_of_the_largest(width: int) -> None:
    x = RANDOM.integers(-50, 50, (7, width)).astype(np.float32)
    x[1] = -np.inf
    x[2] = -7
    x[3, -1] = 1e30
    x[4] = -np.inf
    x[4, width // 2 :] = -1e30
    assert np.asarray(jax.jit(sampling.largest_index)(x)).tolist() == x.argmax(axis=1).tolist()
    assert sampling.largest_index(jnp.full((1, width), jnp.nan)).tolist() == [width - 1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writing_equals_the_scatter_bit_by_bit(dtype: str) -> None:
    kv = init_pages(40, 3, 16, 64, dtype)
    tokens = np.arange(500, dtype=np.int32)
    k, v = RANDOM.standard_normal((2, 500, 3, 64), np.float32) * np.float32(1e3)
    k[0, 0, :3] = np.inf, -np.inf, 1e-40
    arguments = kv, jnp.asarray(k), jnp.asarray(v), 1 + tokens // 16, tokens % 16
    got, want = jax.jit(attention.write)(*arguments), jax.jit(pages.write_kv)(*arguments)
    assert np.asarray(got.pages).tobytes() == np.asarray(want.pages).tobytes()
    k[0, 0, 0] = np.nan
    got = jax.jit(attention.write)(kv, jnp.asarray(k), jnp.asarray(v), 1 + tokens // 16, tokens % 16)
    stored = np.asarray(got.pages[1, 0, 0, 0, :1])
    assert np.isnan(stored.view(jnp.bfloat16) if dtype == "bfloat16" else stored).all()


def test_calls_from_several_threads_do_not_meet() -> None:
    weight, _, meaning = weights("float32", 512, 256)
    product = jax.jit(products.multiply)
    wrong: list[float] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(50):
            x = random.standard_normal((2, 256), np.float32)
            wrong.append(float(np.abs(np.asarray(product(x, weight)) - x @ meaning.T).max()))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 200
    assert max(wrong) < 1e-2


LARGEST = """
import platform, sys, jax, jax.numpy as jnp
from rekindle_kernels import configure
from rekindle_kernels.native import sampling
configure(cache_folder=sys.argv[1])
assert jax.jit(sampling.largest_index)(jnp.zeros((2, 64)).at[1, 7].set(1)).tolist() == [0, 7]
without_llvm = (sys.platform, platform.machine()) == ("linux", "x86_64")
print("numba" in sys.modules or (without_llvm and "llvmlite" in sys.modules))
"""


def in_a_process(folder: Path) -> bool:
    """True if a process that calls a kernel had to import a compiler."""
    printed = run_python("-c", LARGEST, str(folder), **{library.FOLDER: str(folder / "none")})
    return printed.split()[-1] == "True"


@pytest.mark.slow
def test_object_code_is_kept_and_loaded_without_numba(tmp_path: Path) -> None:
    assert in_a_process(tmp_path), "nothing was there to load"
    (kept,) = (tmp_path / "native").iterdir()
    assert not in_a_process(tmp_path)
    kept.write_bytes(kept.read_bytes()[:-100])
    assert in_a_process(tmp_path), "a truncated file must be compiled again"
    assert not in_a_process(tmp_path)


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "native").write_text("a file where the folder should be")
    assert in_a_process(tmp_path)


def test_a_kernel_that_was_not_installed_names_what_compiles_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Heads of another size, say, where an installation brought the likely kernels and numba is not there."""
    monkeypatch.setattr(kernel_files, "cache_folder", tmp_path)
    begin_with(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not build.builds("decode_float32_112") and not build.builds("decode_float32_112")
    (told,) = [record.message for record in caplog.records]
    assert "decode_float32_112" in told and "pip install 'numba>=0.66'" in told


def test_a_kernel_that_cannot_be_built_leaves_the_work_to_xla(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> str:
        raise RuntimeError(f"numba has no idea what {name} is")

    monkeypatch.setattr(build, "ensure", broken)
    begin_with(monkeypatch)
    weight = jnp.zeros((64, 64), jnp.float32)
    assert not products.multiplies(2, weight)
    assert not products.multiplies(2, weight)
    assert not attention.splits(jnp.zeros((64, 4, 64)), jnp.zeros((64, 32)))
    told = [record.message for record in caplog.records]
    assert len(told) == 2, "once per kernel"
    assert "numba has no idea what matvec_float32 is" in told[0]
