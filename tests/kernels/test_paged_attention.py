"""Every implementation against the oracle, on every case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.kernel_cases import BIDIRECTIONAL, CASES, LATENT, MIXED, Case, Problem, build, in_wide_queries, tolerance
from helpers.thorough import by_default
from rekindle_kernels import LayerKV, paged_attention, unavailable_reason
from rekindle_kernels.native.attention import LANES
from rekindle_kernels.native.products import DTYPES
from rekindle_kernels.reference import sequence_keys_values

# One line per implementation that runs on any machine. Kernels that need the interpreter pass their own function with
# `paged_attention`'s signature.
IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "xla": partial(paged_attention, implementation="xla"),
    "xla_gpu": partial(paged_attention, implementation="xla_gpu"),
    "native": partial(paged_attention, implementation="native"),
}


# Building a native kernel takes seconds. By default without these, whose loops a case of another size goes through as
# often, and those that an installation does not compile: 256 is mixed_head_dim_128 with more turns.
SLOW = {("native", "mixed_head_dim_256"), ("native", "mixed_float16"), ("native", "mixed_head_dim_80")}
# Other sizes of what is there already, and options that a later case has together.
THOROUGH = {
    "mixed_page_64", "mixed_page_128", "mixed_head_dim_64", "mixed_group_1", "mixed_group_3", "mixed_group_16",
    "mixed_window_1", "mixed_window_of_a_page", "mixed_window_wider_than_all", "prefill_wide_table",
    "decode_single_row", "prefill_one_token_chunks", "mixed_scale", "decode_wide_table", "prefill_whole_prompts",
    "mixed_window_across_pages", "mixed_page_8", "mixed_soft_cap", "mixed_sinks",
}  # fmt: skip
# XLA's own attention has no loops of a fixed size: other sizes, and options that a later case has together, are CI's.
SIZES_OF_XLA = {
    "decode_empty_rows_between", "mixed_head_dim_80", "mixed_head_dim_128", "mixed_head_dim_256", "mixed_group_7",
    "mixed_float16",
    "prefill_long_chunk", "mixed", "mixed_bfloat16_pages", "mixed_int8_pages_bfloat16_queries",
    "decode_and_tokens_of_no_prompt", "decode_all_rows_empty", "mixed_bfloat16", "prefill_none_is_real",
    "decode_lengths_around_page_borders",
}  # fmt: skip
# A GPU's form differs in how it reads pages: by default in each of its ways.
QUICK_OF_GPU = {"decode_long", "mixed_window_soft_cap_sinks", "mixed_int8_pages"}


def implementations() -> list[Any]:
    cases = [
        pytest.param(name, case, id=f"{name}-{case.name}", marks=pytest.mark.slow if (name, case.name) in SLOW else ())
        for name in IMPLEMENTATIONS
        for case in CASES
    ]
    return by_default(cases, lambda case: quick(case.values[0], case.values[1].name))


def quick(implementation: str, case: str) -> bool:
    """True if a case is one of the default run."""
    if implementation == "xla_gpu":
        return case in QUICK_OF_GPU
    return case not in THOROUGH and not (implementation == "xla" and case in SIZES_OF_XLA)


@cache
def expected(case: Case) -> tuple[Problem, np.ndarray]:
    problem = build(case)
    oracle = jax.jit(partial(paged_attention, options=problem.options, implementation="reference"))
    out = oracle(in_wide_queries(problem.inputs))
    return problem, np.asarray(out)


def test_pages_of_fp8_are_stored_as_their_bits_and_read_as_numbers() -> None:
    case = Case("fp8_pages", decode=(1, 17, 0, 40), prefill=((16, 33),), kv_dtype="float8_e4m3fn", head_dim=64)
    problem, want = expected(case)
    kv = problem.inputs.kv
    assert kv.dtype == jnp.float8_e4m3fn and (kv.pages.dtype == jnp.uint8) == (jax.default_backend() == "cpu")
    for name in (None, "xla"):
        got = jax.jit(partial(paged_attention, options=problem.options, implementation=name))(problem.inputs)
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance(case))
    wide, _ = expected(replace(case, kv_dtype="float32"))
    exact = jax.jit(partial(paged_attention, options=wide.options))(wide.inputs)
    assert 0 < np.abs(want - exact).max() < 0.2, "three bits of fraction"


@pytest.mark.parametrize(("name", "case"), implementations())
def test_implementation_matches_the_reference(name: str, case: Case) -> None:
    if name == "native":
        known = (case.kv_dtype or case.dtype) in DTYPES and case.head_dim % LANES == 0
        if unavailable_reason("cpu") or not known:
            pytest.skip("not its business, or numba is not installed")
    problem, want = expected(case)
    got = jax.jit(partial(IMPLEMENTATIONS[name], options=problem.options))(problem.inputs)
    assert got.dtype == problem.inputs.q.dtype
    got = np.asarray(got.astype("float32"))
    assert np.all(np.isfinite(got)), "NaN leaked from a page or position that no query may read"
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance(case))
    assert not got[~problem.used].any(), "padding must give zeros"


@pytest.mark.parametrize("case", by_default(BIDIRECTIONAL), ids=lambda case: case.name)
def test_queries_may_see_the_keys_behind_them(case: Case) -> None:
    """The oracle is a plain softmax over all keys of a sequence that are within the window."""
    problem, want = expected(case)
    inputs, group = problem.inputs, case.heads // case.kv_heads
    ends = np.asarray(inputs.cu_q_lens)
    for row in range(len(case.prefill)):
        q = np.asarray(inputs.q, np.float64)[ends[row] : ends[row + 1]] * problem.options.scale
        keys, values = map(np.asarray, sequence_keys_values(inputs.kv, inputs.page_table[row]))
        keys, values = (np.repeat(x[: len(q)].astype(np.float64), group, axis=1) for x in (keys, values))
        scores = np.einsum("thd,lhd->htl", q, keys)
        scores = scores if case.soft_cap is None else case.soft_cap * np.tanh(scores / case.soft_cap)
        distance = abs(np.arange(len(q))[:, None] - np.arange(len(q)))
        weights = np.exp(np.where(distance < (case.sliding_window or len(q)), scores, -np.inf))
        plain = np.einsum("htl,lhd->thd", weights / weights.sum(axis=-1, keepdims=True), values)
        np.testing.assert_allclose(want[ends[row] : ends[row + 1]], plain, rtol=0, atol=tolerance(case))
    for name in (None, "xla"):
        got = jax.jit(partial(paged_attention, options=problem.options, implementation=name))(inputs)
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance(case))
        assert not np.asarray(got)[~problem.used].any(), "padding must give zeros"


@pytest.mark.slow
@pytest.mark.skipif(unavailable_reason("cpu") is not None, reason="no native kernels")
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_native_kernels_take_heads_of_512(kv_dtype: str) -> None:
    case = Case("mixed_head_dim_512", **MIXED, heads=8, kv_heads=1, head_dim=512, kv_dtype=kv_dtype)
    problem, want = expected(case)
    got = jax.jit(partial(paged_attention, options=problem.options, implementation="native"))(problem.inputs)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance(case))


@pytest.mark.parametrize(
    "case", by_default(LATENT, lambda case: case.name == "latent_group_16"), ids=lambda case: case.name
)
def test_values_may_be_a_part_of_the_keys(case: Case) -> None:
    """The oracle is the one for keys and values, with the first numbers of the keys stored again as values."""
    problem = build(case)
    pages, scales, *_ = problem.inputs.kv
    twice = LayerKV(jnp.concatenate([pages, pages], axis=1), None if scales is None else jnp.tile(scales, (1, 2, 1, 1)))
    options = replace(problem.options, value_size=None)
    oracle = jax.jit(partial(paged_attention, options=options, implementation="reference"))
    want = np.asarray(oracle(in_wide_queries(replace(problem.inputs, kv=twice))))[..., : case.value_size]
    for name in (None, "xla", "reference"):
        got = jax.jit(partial(paged_attention, options=problem.options, implementation=name))(problem.inputs)
        assert got.shape == want.shape and np.all(np.isfinite(got))
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance(case))
        assert not np.asarray(got)[~problem.used].any(), "padding must give zeros"
