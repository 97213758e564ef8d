"""The Mosaic GPU prefill on a real GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu` and this file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import numpy as np
import pytest

from helpers.kernel_cases import EVERYTHING, Case, assert_attends, build, mosaic_cases
from rekindle_kernels import AttentionCall, deprecated, tuning
from rekindle_kernels.pallas.gpu import mosaic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU and JAX_PLATFORMS=cuda,cpu"),
]
LARGE = (
    Case("long", prefill=((1500, 3000), (700, 700)), heads=8, kv_heads=2, head_dim=128, dtype="bfloat16"),
    Case("long_odd_group", prefill=((1500, 3000),), heads=3, kv_heads=1, head_dim=64, dtype="float16", page_size=64),
    Case("long_window", prefill=((1500, 3000),), head_dim=64, dtype="bfloat16", sliding_window=500),
)


@pytest.fixture(autouse=True)
def no_deprecations() -> Iterator[None]:
    with deprecated.known():
        yield


def check(case: Case, **options: object) -> None:
    problem = build(case)
    reason = mosaic.supports(AttentionCall.of(problem.inputs, problem.options))
    if reason is not None:
        pytest.skip(reason)
    run = jax.jit(partial(mosaic.attention, options=problem.options, **options))
    got = assert_attends(run, case, problem)
    np.testing.assert_array_equal(np.asarray(run(problem.inputs).astype("float32")), got)


@pytest.mark.parametrize("case", [EVERYTHING, *mosaic_cases(), *LARGE], ids=lambda case: case.name)
def test_compiled_kernel_matches_the_reference(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(("block_k", "stages"), [(64, 2), (128, 2)])
def test_other_blocks_match_the_reference(block_k: int, stages: int) -> None:
    check(LARGE[0], prefill_config=tuning.GpuMosaicPrefill(block_k, stages))
