"""Prompts over pages of bfloat16: AMX and the processor without it agree with the reference."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from helpers.kernel_cases import Case, build, in_wide_queries, tolerance
from helpers.thorough import by_default
from rekindle_kernels import paged_attention, unavailable_reason
from rekindle_kernels.native import attention

pytestmark = pytest.mark.skipif(unavailable_reason("cpu") is not None, reason="numba is not installed")
there = attention.has_amx()

CASES = [
    Case("one_query", prefill=((1, 1), (1, 64), (1, 65)), head_dim=64, kv_dtype="bfloat16"),
    Case("long", prefill=((200, 330), (17, 17)), decode=(5,), head_dim=64, kv_dtype="bfloat16"),
    Case("odd_group", prefill=((70, 70),), heads=15, kv_heads=5, head_dim=64, kv_dtype="bfloat16"),
    Case("wide", prefill=((33, 140),), head_dim=128, kv_dtype="bfloat16", sinks=True),
    Case("narrow", prefill=((90, 131),), head_dim=32, kv_dtype="bfloat16", sliding_window=40, soft_cap=5.0),
    Case("both_ways", prefill=((140, 140), (33, 33)), head_dim=64, kv_dtype="bfloat16", causal=False),
    Case("near_both_ways", prefill=((200, 200),), head_dim=64, kv_dtype="bfloat16", sliding_window=40, causal=False),
]


@pytest.mark.parametrize("amx", [False, pytest.param(True, marks=pytest.mark.skipif(not there, reason="no AMX"))])
@pytest.mark.parametrize(
    "case",
    by_default(CASES, lambda case: case.name in ("long", "odd_group", "narrow", "both_ways")),
    ids=lambda case: case.name,
)
def test_results_are_those_of_the_reference(case: Case, amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "has_amx", lambda: amx)
    problem = build(case)
    oracle = jax.jit(lambda inputs: paged_attention(inputs, problem.options, implementation="reference"))
    want = oracle(in_wide_queries(problem.inputs))
    run = jax.jit(lambda inputs: paged_attention(inputs, problem.options, implementation="native"))
    got = np.asarray(run(problem.inputs).astype("float32"))
    np.testing.assert_allclose(got[problem.used], np.asarray(want)[problem.used], rtol=0, atol=tolerance(case))
