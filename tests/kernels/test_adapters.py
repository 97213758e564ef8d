"""Products of adapters: by the native kernel and by XLA, against plain sums; and in runs of native calls."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rekindle_kernels import AdaptedTokens, AdapterCall, GateCall, add_adapters, gate_rows, gated, native
from rekindle_kernels.ops.adapters import ADAPTERS
from rekindle_kernels.ops.linear import GATE

needs_numba = pytest.mark.skipif(native.unavailable_reason() is not None, reason="numba is not installed")
implementations = pytest.mark.parametrize("implementation", [pytest.param("native", marks=needs_numba), "xla"])
RANDOM = np.random.default_rng(0)
INPUTS, OUTPUTS, ROWS = 96, (80, 16, 32), 64
OWNERS = np.array([[9, 9, 9, 9], [1, 3, 0, 1], [0, 0, 0, 0]], np.int32)  # two units of the first, one of the third
PLACE = 1


class Case(NamedTuple):
    y: Any
    x: Any
    down: Any
    up: Any

    def run(self, slots: Any, implementation: str | None, place: int = PLACE) -> np.ndarray:
        def call(arrays: Case, slots: jax.Array) -> jax.Array:
            tokens = AdaptedTokens.of(slots)
            return add_adapters(
                *arrays, jnp.asarray(OWNERS), tokens, place=place, outputs=OUTPUTS, implementation=implementation
            )

        return np.asarray(jax.jit(call)(self, jnp.asarray(slots, jnp.int32)))

    def expected(self, slots: Any) -> np.ndarray:
        y, x, down, up = (np.asarray(array.astype(jnp.float32), np.float64) for array in self)
        stacked, y = down.reshape(len(OUTPUTS), ROWS, -1), y.copy()
        for token, slot in enumerate(slots):
            own = np.repeat(OWNERS[PLACE] == slot, ROWS // OWNERS.shape[1]) & (slot > 0)
            begin = 0
            for module, count in enumerate(OUTPUTS):
                y[token, begin : begin + count] += x[token] @ stacked[module, own].T @ up[own, begin : begin + count]
                begin += count
        return y


def case(tokens: int, dtype: str = "float32") -> Case:
    def floats(*shape: int) -> jax.Array:
        return jnp.asarray(RANDOM.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5))

    down, up = floats(len(OUTPUTS) * ROWS, INPUTS), floats(ROWS, sum(OUTPUTS))
    return Case(floats(tokens, sum(OUTPUTS)), floats(tokens, INPUTS) * 8, down.astype(dtype), up.astype(dtype))


@implementations
@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [*(("float32", count) for count in (1, 3, 17, 64, 65, 203)), *(("bfloat16", count) for count in (1, 65)),
     *(("float16", count) for count in (1, 65))],
)  # fmt: skip
def test_each_token_has_the_rows_of_its_own_adapter(implementation: str, dtype: str, tokens: int) -> None:
    arrays, slots = case(tokens, dtype), RANDOM.integers(0, 5, tokens)  # 2 and 4 have no rows here
    got = arrays.run(slots, implementation)
    near = 1e-5 if dtype == "float32" or implementation == "native" else 0.2  # rows of XLA's products are rounded
    np.testing.assert_allclose(got, arrays.expected(slots), rtol=0, atol=near)
    others = ~np.isin(slots, OWNERS[PLACE][OWNERS[PLACE] > 0])
    np.testing.assert_array_equal(got[others], np.asarray(arrays.y)[others])
    np.testing.assert_array_equal(arrays.run(slots, implementation, place=2), np.asarray(arrays.y))


@needs_numba
def test_a_row_does_not_depend_on_those_beside_it() -> None:
    arrays, slots = case(150), np.array([1, 3, 0, 1, 2] * 30)
    whole = arrays.run(slots, "native")
    for chosen in ([3], [0, 3], [1, 4, 6], list(range(0, 150, 7))):
        some = Case(arrays.y[np.array(chosen)], arrays.x[np.array(chosen)], arrays.down, arrays.up)
        np.testing.assert_array_equal(some.run(slots[chosen], "native"), whole[chosen])


@needs_numba
def test_a_run_of_native_calls_goes_through_adapters_and_gates() -> None:
    arrays, slots = case(6), jnp.asarray([1, 0, 3, 1, 0, 0], jnp.int32)
    weight = jnp.asarray(RANDOM.standard_normal((sum(OUTPUTS), INPUTS), np.float32))
    down = jnp.asarray(RANDOM.standard_normal((INPUTS, sum(OUTPUTS) // 2), np.float32))

    def function(x: jax.Array, slots: jax.Array) -> jax.Array:
        tokens = AdaptedTokens.of(slots)
        norm = native.differentiable(partial(native.rms_norm, eps=1e-5), lambda x, weight: x)
        y = native.multiply(norm(x, weight[0]), weight)
        for place in (1, 2):
            y = add_adapters(y, x, arrays.down, arrays.up, jnp.asarray(OWNERS), tokens, place=place, outputs=OUTPUTS)
        return native.multiply(gate_rows(y, "silu"), down)

    equations = jax.make_jaxpr(native.chained(function))(arrays.x, slots).jaxpr.eqns
    calls = [eqn.params["target_name"] for eqn in equations if eqn.primitive.name == "ffi_call"]
    assert calls == ["rekindle_chain"]
    alone, together = (jax.jit(each)(arrays.x, slots) for each in (function, native.chained(function)))
    np.testing.assert_array_equal(np.asarray(alone), np.asarray(together))


@implementations
def test_a_gate_by_itself(implementation: str) -> None:
    for rows, width in ((1, 2), (5, 70), (40, 3072)):
        x = jnp.asarray(RANDOM.standard_normal((rows, width), np.float32) * 5)
        got = jax.jit(partial(gate_rows, activation="silu", implementation=implementation))(x)
        np.testing.assert_allclose(np.asarray(got), np.asarray(gated(x, "silu")), rtol=1e-5, atol=1e-5)


@needs_numba
def test_what_is_native() -> None:
    def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def chosen(platform: str = "cpu", inputs: int = 96, outputs: tuple[int, ...] = (80, 16), units: int = 4) -> str:
        y, x, up = shape(3, sum(outputs)), shape(3, inputs), shape(ROWS, sum(outputs))
        call = AdapterCall(platform, y, x, shape(len(outputs) * ROWS, inputs), up, units, outputs)
        return ADAPTERS.choose(call).name

    assert chosen() == "native"
    others = chosen("gpu"), chosen(inputs=100), chosen(outputs=(80, 12)), chosen(units=32)
    assert set(others) == {"xla"}
    assert GATE.choose(GateCall("cpu", shape(3, 64), "silu")).name == "native"
    assert GATE.choose(GateCall("cpu", shape(3, 64), "gelu")).name == "xla"
    assert GATE.choose(GateCall("cpu", shape(3, 64, dtype=jnp.bfloat16), "silu")).name == "xla"
