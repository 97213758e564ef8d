"""The Pallas kernels as plain JAX operations, against the oracle, on the cases that every implementation must solve."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from helpers.kernel_cases import CASES, Case, Problem, build, in_wide_queries, tolerance
from helpers.thorough import by_default
from rekindle_kernels import paged_attention, tuning
from rekindle_kernels.pallas.gpu import attention as pallas_gpu
from rekindle_kernels.pallas.tpu import attention as pallas_tpu

# Small blocks, so that short sequences take several turns of every loop and rows several items of work.
SMALL_GPU = {
    "decode_config": tuning.GpuDecode(block_k=16, num_warps=4, num_stages=1, least_blocks=1),
    "prefill_config": tuning.GpuPrefill(block_m=16, block_k=16, num_warps=4, num_stages=1),
    "extra": 5,
}
SMALL_TPU = {"config": tuning.Tpu(tokens=8, keys=32)}
VARIANTS = {
    "gpu": partial(paged_attention, implementation="pallas_gpu_interpret"),
    "gpu_small_blocks": partial(pallas_gpu.attention, interpret=True, **SMALL_GPU),
    "tpu": partial(paged_attention, implementation="pallas_tpu_interpret"),
    "tpu_small_blocks": partial(pallas_tpu.attention, interpret=True, **SMALL_TPU),
}
# Compiling an interpreted kernel takes seconds: by default these, which differ in what the kernels do differently, and
# mostly in small blocks, where there are many turns and items. CI runs a few
# more, and by default only `DEFAULT`.
QUICK = {
    "gpu": ("mixed_int8_pages_bfloat16_queries",),
    "gpu_small_blocks": (
        "decode_lengths_around_page_borders",
        "decode_empty_rows_between",
        "decode_long",
        "prefill_none_is_real",
        "mixed_page_8",
        "mixed_group_7",
        "window_far_from_the_start",
        "mixed_window_soft_cap_sinks",
    ),
    "tpu": ("mixed_bfloat16",),
    "tpu_small_blocks": (
        "decode_empty_rows_between",
        "prefill_none_is_real",
        "mixed_group_7",
        "window_far_from_the_start",
        "mixed_window_soft_cap_sinks",
    ),
}
DEFAULT = {
    ("gpu_small_blocks", "decode_long"), ("gpu_small_blocks", "mixed_window_soft_cap_sinks"),
    ("tpu_small_blocks", "mixed_window_soft_cap_sinks"), ("gpu", "mixed_int8_pages_bfloat16_queries"),
}  # fmt: skip


def variants() -> list[Any]:
    cases = [
        pytest.param(name, case, id=f"{name}-{case.name}", marks=() if case.name in QUICK[name] else pytest.mark.slow)
        for name in VARIANTS
        for case in CASES
    ]
    return by_default(cases, lambda case: (case.values[0], case.values[1].name) in DEFAULT)


@cache
def expected(case: Case) -> tuple[Problem, np.ndarray]:
    problem = build(case)
    oracle = jax.jit(partial(paged_attention, options=problem.options, implementation="reference"))
    return problem, np.asarray(oracle(in_wide_queries(problem.inputs)))


def check(run: partial[jax.Array], case: Case) -> None:
    problem, want = expected(case)
    got = jax.jit(partial(run, options=problem.options))(problem.inputs)
    assert got.dtype == problem.inputs.q.dtype
    got = np.asarray(got.astype("float32"))
    assert np.all(np.isfinite(got)), "NaN leaked from a page or position that no query may read"
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance(case))
    assert not got[~problem.used].any(), "padding must give zeros"


@pytest.mark.parametrize(("name", "case"), variants())
def test_kernel_matches_the_reference(name: str, case: Case) -> None:
    narrow = case.dtype == "float16" or case.kv_dtype == "int8"
    if name.startswith("tpu") and narrow:
        pytest.skip("the TPU kernel refuses float16 and one-byte pages: see test_pallas_support")
    check(VARIANTS[name], case)


@pytest.mark.parametrize("copies", ["eager", "on_wait"])
def test_tpu_kernel_waits_for_every_copy_and_reuses_no_buffer_early(copies: str) -> None:
    """Copies done only when awaited leave nan where a wait is missing; copies done at once spoil a buffer in use."""
    case = Case(
        "copies", decode=(0, 33, 70), prefill=((9, 41), (2, 2)), padding=3, kv_heads=1, heads=2, sliding_window=20
    )
    parameters = pltpu.InterpretParams(uninitialized_memory="nan", dma_execution_mode=copies)
    check(partial(pallas_tpu.attention, interpret=parameters, **SMALL_TPU), case)
