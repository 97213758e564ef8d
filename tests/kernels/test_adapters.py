"""Products of adapters: by the native kernel and by XLA, against plain sums; and in runs of native calls."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.thorough import by_default
from rekindle_kernels import AdaptedTokens, AdapterCall, add_adapters, gated, rms_norm
from rekindle_kernels.native import build, chain, cpu, products
from rekindle_kernels.native.calling import differentiable
from rekindle_kernels.ops.linear import ADAPTERS

needs_numba = pytest.mark.skipif(build.unavailable_reason() is not None, reason="numba is not installed")
implementations = pytest.mark.parametrize("implementation", [pytest.param("native", marks=needs_numba), "xla"])
RANDOM = np.random.default_rng(0)
INPUTS, OUTPUTS, ROWS = 96, (80, 16, 32), 64
HALVES: tuple[tuple[int, ...], ...] = ((80, 80), (160,))  # gates and ups of two modules, or of one
OWNERS = np.array([[9, 9, 9, 9], [1, 3, 0, 1], [0, 0, 0, 0]], np.int32)  # two units of the first, one of the third
PLACE = 1
# Adapters in bfloat16 are left to CI: each dtype has two native kernels, which take five seconds to compile.


class Options(NamedTuple):
    outputs: tuple[int, ...]
    implementation: str | None
    place: int
    gate: str | None


@partial(jax.jit, static_argnames=("options", "eps"))
def compiled(arrays: tuple[Any, ...], slots: jax.Array, options: Options, **more: Any) -> jax.Array:
    """Calls that differ in their numbers alone share a program."""
    return add_adapters(*arrays, jnp.asarray(OWNERS), AdaptedTokens.of(slots), **options._asdict(), **more)


class Case(NamedTuple):
    y: Any
    x: Any
    down: Any
    up: Any
    outputs: tuple[int, ...]

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self[:-1]

    def run(
        self, slots: Any, implementation: str | None, place: int = PLACE, gate: str | None = None, **more: Any
    ) -> np.ndarray:
        options = Options(self.outputs, implementation, place, gate)
        return np.asarray(compiled(self.arrays, jnp.asarray(slots, jnp.int32), options, **more))

    def expected(self, slots: Any) -> np.ndarray:
        y, x, down, up = (np.asarray(array.astype(jnp.float32), np.float64) for array in self.arrays)
        stacked, y = down.reshape(len(self.outputs), ROWS, -1), y.copy()
        for token, slot in enumerate(slots):
            own = np.repeat(OWNERS[PLACE] == slot, ROWS // OWNERS.shape[1]) & (slot > 0)
            begin = 0
            for module, count in enumerate(self.outputs):
                y[token, begin : begin + count] += x[token] @ stacked[module, own].T @ up[own, begin : begin + count]
                begin += count
        return y


def case(tokens: int, dtype: str = "float32", outputs: tuple[int, ...] = OUTPUTS) -> Case:
    def floats(*shape: int) -> jax.Array:
        return jnp.asarray(RANDOM.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5))

    down, up = floats(len(outputs) * ROWS, INPUTS), floats(ROWS, sum(outputs))
    y, x = floats(tokens, sum(outputs)), floats(tokens, INPUTS) * 8
    if dtype == "bfloat16":  # x and its products with the rows of rank may be rounded: these are not changed by it
        x, down = jnp.clip(jnp.round(x), -1, 1), jnp.clip(jnp.round(down * 10), -2, 2) / 8
    return Case(y, x, down.astype(dtype), up.astype(dtype), outputs)


@implementations
@pytest.mark.parametrize(
    ("dtype", "tokens"),
    by_default([*(("float32", count) for count in (3, 65, 1, 17, 64, 203)), *(("bfloat16", count) for count in (1, 65)),
     *(("float16", count) for count in (1, 65))], 2),
)  # fmt: skip
def test_each_token_has_the_rows_of_its_own_adapter(implementation: str, dtype: str, tokens: int) -> None:
    arrays, slots = case(tokens, dtype), RANDOM.integers(0, 5, tokens)  # 2 and 4 have no rows here
    got = arrays.run(slots, implementation)
    near = 1e-5 if dtype != "float16" or implementation == "native" else 0.2  # rows of XLA's products are rounded
    np.testing.assert_allclose(got, arrays.expected(slots), rtol=0, atol=near)
    others = ~np.isin(slots, OWNERS[PLACE][OWNERS[PLACE] > 0])
    np.testing.assert_array_equal(got[others], np.asarray(arrays.y)[others])
    np.testing.assert_array_equal(arrays.run(slots, implementation, place=2), np.asarray(arrays.y))


@pytest.mark.thorough
@implementations
def test_rows_in_bfloat16_are_rounded_and_no_more(implementation: str) -> None:
    arrays, slots = case(65), RANDOM.integers(0, 5, 65)
    rounded = arrays._replace(down=arrays.down.astype(jnp.bfloat16), up=arrays.up.astype(jnp.bfloat16))
    narrow = np.abs(np.asarray(arrays.x @ rounded.down.astype(jnp.float32).T)).max()
    error = np.abs(rounded.run(slots, implementation) - rounded.expected(slots)).max()
    assert error < 2**-8 * narrow, (error, narrow)  # half of the last bit of some 32 products, of either sign


@implementations
@pytest.mark.parametrize("dtype", by_default(["float32", "bfloat16"]))
def test_x_may_be_normed_on_the_way(implementation: str, dtype: str) -> None:
    weight = jnp.asarray(RANDOM.standard_normal(INPUTS, np.float32))
    for tokens, gate in ((1, None), (6, "silu"), (67, None)):
        arrays, slots = case(tokens, dtype, HALVES[0]), RANDOM.integers(0, 5, tokens)
        normed = arrays._replace(x=rms_norm(arrays.x, weight, 1e-5, implementation=implementation))
        got = arrays.run(slots, implementation, gate=gate, norm=weight, eps=1e-5)
        # XLA rounds elsewhere where it sees both.
        near = {"rtol": 0, "atol": 0 if implementation == "native" else 1e-4 if dtype == "float32" else 0.2}
        np.testing.assert_allclose(got, normed.run(slots, implementation, gate=gate), **near)


@needs_numba
@pytest.mark.parametrize("dtype", by_default(["float32", "bfloat16"]))
def test_a_row_does_not_depend_on_those_beside_it(dtype: str) -> None:
    arrays, slots = case(150, dtype), np.array([1, 3, 0, 1, 2] * 30)
    whole = arrays.run(slots, "native")
    for chosen in ([3], [0, 3], [1, 4, 6], list(range(0, 150, 7))):
        some = arrays._replace(y=arrays.y[np.array(chosen)], x=arrays.x[np.array(chosen)])
        np.testing.assert_array_equal(some.run(slots[chosen], "native"), whole[chosen])


@implementations
@pytest.mark.parametrize("dtype", by_default(["float32", "bfloat16", "float16"]))
@pytest.mark.parametrize("outputs", by_default(map(pytest.param, HALVES)))
def test_what_is_added_may_be_gated(implementation: str, dtype: str, outputs: tuple[int, ...]) -> None:
    for tokens, gate in ((1, "silu"), (3, "silu"), (67, "silu"), (67, "gelu")):
        arrays, slots = case(tokens, dtype, outputs), RANDOM.integers(0, 5, tokens)
        got = arrays.run(slots, implementation, gate=gate)
        added = arrays.run(slots, implementation)
        # XLA rounds elsewhere where it sees all at once.
        near = 1e-5 if dtype == "float32" or implementation == "native" else 0.2
        np.testing.assert_allclose(got, np.asarray(gated(jnp.asarray(added), gate)), rtol=near, atol=near)
        np.testing.assert_allclose(added, arrays.expected(slots), rtol=0, atol=near)
        plain = arrays.run(np.zeros(tokens, np.int32), implementation, gate=gate)  # to the bit, whatever is next to it
        others = ~np.isin(slots, OWNERS[PLACE][OWNERS[PLACE] > 0])
        np.testing.assert_array_equal(got[others], plain[others])


@needs_numba
def test_a_run_of_native_calls_goes_through_adapters_and_gates() -> None:
    outputs = HALVES[0]
    arrays, slots = case(6, outputs=outputs), jnp.asarray([1, 0, 3, 1, 0, 0], jnp.int32)
    weight = jnp.asarray(RANDOM.standard_normal((sum(outputs), INPUTS), np.float32))
    down = jnp.asarray(RANDOM.standard_normal((INPUTS, sum(outputs) // 2), np.float32))

    def function(x: jax.Array, slots: jax.Array) -> jax.Array:
        tokens = AdaptedTokens.of(slots)
        norm = differentiable(partial(products.rms_norm, eps=1e-5), lambda x, weight: x)
        y = products.multiply(norm(x, weight[0]), weight)
        for place, gate in ((2, None), (1, "silu")):
            _, _, *stacks = arrays.arrays
            y = add_adapters(y, x, *stacks, jnp.asarray(OWNERS), tokens, place=place, outputs=outputs, gate=gate)
        return products.multiply(y, down)

    equations = jax.make_jaxpr(chain.chained(function))(arrays.x, slots).jaxpr.eqns
    calls = [eqn.params["target_name"] for eqn in equations if eqn.primitive.name == "ffi_call"]
    assert calls == ["rekindle_chain"]
    alone, together = (jax.jit(each)(arrays.x, slots) for each in (function, chain.chained(function)))
    np.testing.assert_array_equal(np.asarray(alone), np.asarray(together))


@needs_numba
@pytest.mark.skipif(not cpu.multiplies_many("bfloat16"), reason="XLA multiplies many rows on this processor")
@pytest.mark.parametrize("gate", by_default([None, "silu"], 0))
def test_products_prefetch_what_their_adapters_read_and_results_stay_the_same(
    gate: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, with_stacks = list[int](), chain._with_stacks

    def noted(product: Any, stacks: Any, place: int) -> Any:
        places.append(place)
        return with_stacks(product, stacks, place)

    monkeypatch.setattr(chain, "_with_stacks", noted)
    inputs, outputs = 128, (96, 96)
    values = {"y": (13, 192), "x": (13, inputs), "weight": (192, inputs), "down": (2 * ROWS, inputs), "up": (ROWS, 192)}
    y, x, *matrices = (jnp.asarray(RANDOM.standard_normal(shape, np.float32)) for shape in values.values())
    weight, down, up = (matrix.astype(jnp.bfloat16) for matrix in matrices)
    slots = jnp.asarray([1, 0, 3, 1, 0, 0, 3, 3, 3, 1, 1, 3, 0], jnp.int32)  # 4, 5 and 4 tokens

    def function(x: jax.Array, slots: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"place": PLACE, "outputs": outputs, "gate": gate}
        product = products.multiply(x, weight, residual=y)
        return add_adapters(product, x, down, up, jnp.asarray(OWNERS), AdaptedTokens.of(slots), **options)

    alone, together = (np.asarray(jax.jit(each)(x, slots)) for each in (function, chain.chained(function)))
    assert places == [PLACE]
    np.testing.assert_array_equal(alone, together)


@needs_numba
@pytest.mark.parametrize("dtype", by_default(["float32", "bfloat16"]))
def test_one_and_two_tokens_of_an_adapter_have_the_numbers_that_they_have_among_more(dtype: str) -> None:
    arrays = case(9, dtype, (96, 16, 80))
    slots = np.array([1, 1, 1, 1, 3, 3, 3, 3, 3])
    among = arrays.run(slots, "native")
    for kept in ([0], [1, 2], [0, 4, 8], [3, 5, 6]):
        few = arrays.run(np.where(np.isin(np.arange(9), kept), slots, 0), "native")
        np.testing.assert_array_equal(few[kept], among[kept])


@needs_numba
def test_what_is_native() -> None:
    def call(
        platform: str = "cpu", inputs: int = 96, outputs: tuple[int, ...] = (80, 16), units: int = 4, **more: Any
    ) -> AdapterCall:
        y, x, up = (jax.ShapeDtypeStruct((n, m), jnp.float32) for n, m in ((3, sum(outputs)), (3, inputs), (ROWS, 0)))
        down = jax.ShapeDtypeStruct((len(outputs) * ROWS, inputs), jnp.float32)
        return AdapterCall(platform, y, x, down, up, units, outputs, **more)

    def chosen(**changes: Any) -> str:
        return ADAPTERS.choose(call(**changes)).name

    assert chosen() == "native"
    assert chosen(norm=True) == "native"
    narrow = ADAPTERS.choose(call(inputs=80))  # whose norm comes before
    assert narrow.name == "native" and narrow.supports(call(inputs=80, norm=True)) is not None
    others = chosen(platform="gpu"), chosen(inputs=100), chosen(outputs=(80, 12)), chosen(units=32)
    assert set(others) == {"xla"}
    halves: tuple[tuple[int, ...], ...] = ((32, 32), (64,), (32, 16), (16, 16, 32))
    with_gates = [(outputs, gate) for outputs in halves for gate in ("silu", "gelu")]
    taken = [(outputs, gate) for outputs, gate in with_gates if chosen(outputs=outputs, gate=gate) == "native"]
    assert taken == [((32, 32), "silu"), ((64,), "silu")]
