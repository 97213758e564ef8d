"""With `deterministic`, a row's result is the same to the last bit, whatever is computed along with it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.kernel_cases import Case, build
from helpers.thorough import by_default
from rekindle_kernels import AttentionInputs, LinearOptions, linear, paged_attention, unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="numba is not installed")
ROWS = (1, 3, 4, 5, 16, 17, 21, 33, 37, 200)  # each compiles a program
WEIGHTS = [("float32", None), ("bfloat16", None), ("float16", None), ("int8", "int8"), ("int8", "int8-weight")]


@pytest.mark.parametrize(("weight", "quantize"), by_default(WEIGHTS, lambda case: case in WEIGHTS[:4:3]))
@pytest.mark.parametrize("shape", by_default(map(pytest.param, [(192, 128), (128, 192), (30, 40)])), ids=str)
def test_a_product_does_not_depend_on_the_number_of_rows(
    weight: str, quantize: str | None, shape: tuple[int, int]
) -> None:
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((max(ROWS), shape[1])), jnp.float32)
    scale = jnp.asarray(random.uniform(0.01, 0.02, shape[0]), jnp.float32) if quantize else None
    stored = jnp.asarray(random.integers(-127, 128, shape) if quantize else random.standard_normal(shape), weight)
    gate = "silu" if shape[0] % 32 == 0 else None
    norm = jnp.ones(shape[1]) if shape[1] % 32 == 0 else None
    options = LinearOptions(quantize, gate, 1e-6, deterministic=True)
    multiply = jax.jit(lambda x: linear(x, stored, scale=scale, norm=norm, options=options))
    whole, numbers = np.asarray(multiply(x)), np.asarray(x)
    for rows in ROWS:
        np.testing.assert_array_equal(multiply(numbers[:rows]), whole[:rows], err_msg=f"{rows} rows")
    by_xla = partial(linear, options=replace(options, deterministic=False), implementation="xla")
    plain = jax.jit(by_xla)(x, stored, scale=scale, norm=norm)
    np.testing.assert_allclose(whole, plain, rtol=0.03, atol=0.03 * float(np.abs(plain).max()))


def query(inputs: AttentionInputs, sequence: int, token: int, length: int, rows: int) -> AttentionInputs:
    """One query of a batch as a decode row, `rows` of them, of which the others are empty."""
    table = np.zeros((rows, inputs.page_table.shape[1]), np.int32)
    table[-1], lens = np.asarray(inputs.page_table)[sequence], np.zeros(rows, np.int32)
    lens[-1] = length
    q = jnp.zeros((rows, *inputs.q.shape[1:]), inputs.q.dtype).at[-1].set(inputs.q[token])
    return replace(
        inputs,
        q=q,
        page_table=jnp.asarray(table),
        kv_lens=jnp.asarray(lens),
        cu_q_lens=jnp.zeros(1, jnp.int32),
        num_prefills=jnp.int32(0),
    )


CASES = [
    Case("float32", prefill=((130, 150), (3, 70)), decode=(40, 0), head_dim=64),
    Case("bfloat16", prefill=((130, 150), (3, 70)), decode=(40, 0), head_dim=64, kv_dtype="bfloat16"),
    Case("int8", prefill=((130, 150), (3, 70)), decode=(40, 0), head_dim=64, kv_dtype="int8"),
    Case("window", prefill=((130, 250),), head_dim=64, kv_dtype="bfloat16", sliding_window=70),
    Case("window_float32", prefill=((130, 250),), head_dim=32, sliding_window=70, sinks=True),
    Case("narrow", prefill=((130, 150),), head_dim=16, heads=9, kv_heads=3, soft_cap=3.0),
]


@pytest.mark.parametrize("case", by_default(CASES), ids=lambda case: case.name)
def test_a_query_is_the_same_in_a_chunk_and_alone(case: Case) -> None:
    problem = build(case)
    options = replace(problem.options, deterministic=True)
    together = np.asarray(jax.jit(lambda inputs: paged_attention(inputs, options))(problem.inputs))
    oracle = jax.jit(partial(paged_attention, options=problem.options, implementation="reference"))
    expected = np.asarray(oracle(problem.inputs))
    allowed = 0.03 if case.kv_dtype else 2e-5
    np.testing.assert_allclose(together[problem.used], expected[problem.used], atol=allowed)
    rows = len(case.decode)
    starts = rows + np.cumsum([0, *(count for count, _ in case.prefill)])
    alone = {
        number: jax.jit(lambda inputs, number=number: paged_attention(inputs, replace(options, decode_rows=number)))
        for number in (1, 3)
    }
    for index, (count, length) in enumerate(case.prefill):
        for at in {0, 1, 62, 63, 64, count // 2, count - 1} & set(range(count)):
            token, position = int(starts[index]) + at, length - count + at
            for number, attend in alone.items():
                found = attend(query(problem.inputs, rows + index, token, position + 1, number))
                np.testing.assert_array_equal(found[-1], together[token], err_msg=f"query {at} of {count}")


def test_what_is_not_deterministic_is_refused() -> None:
    problem = build(CASES[0])
    with pytest.raises(ValueError, match="depend on what is computed with it"):
        paged_attention(problem.inputs, replace(problem.options, deterministic=True), implementation="xla")
    odd = build(Case("odd", decode=(9,), head_dim=13))
    with pytest.raises(ValueError, match="no implementation of attention can serve this call on cpu: native: the head"):
        paged_attention(odd.inputs, replace(odd.options, deterministic=True))
