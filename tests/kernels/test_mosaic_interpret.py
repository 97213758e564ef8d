"""The Mosaic GPU prefill on a CPU: JAX's interpreter runs its warpgroups as threads, and finds races among them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from helpers.kernel_cases import EVERYTHING, Case, build, in_wide_queries, mosaic_cases, tolerance
from rekindle_kernels import AttentionCall, paged_attention, tuning
from rekindle_kernels.pallas.gpu import mosaic

# JAX's interpreter waits at barriers in the threads of XLA's pool, and stands still where a program needs more of them.
# Their number is read once for each process, so the tests run in one of their own.
THREADS = "16"
ALONE = os.environ.get("NPROC") == THREADS
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        jax.__version_info__ < mosaic.OLDEST,
        reason=f"jax {jax.__version__} is older than 0.12, whose interpreter knows the matrix instructions",
    ),
    # Products with the values of masked keys: of what pages hold there, and of what was in shared memory before.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
]
alone = pytest.mark.skipif(not ALONE, reason=f"runs in a process of its own: set NPROC={THREADS}")
# Small blocks and few of them, so that short sequences go round the ring.
SMALL = tuning.GpuMosaicPrefill(block_k=64, stages=2)


def check(case: Case, **options: Any) -> None:
    problem = build(case)
    assert mosaic.supports(AttentionCall.of(problem.inputs, problem.options, "gpu")) is None
    want = paged_attention(in_wide_queries(problem.inputs), problem.options, implementation="reference")
    got = np.asarray(jax.jit(partial(mosaic.attention, options=problem.options, **options))(problem.inputs))
    assert got.dtype == problem.inputs.q.dtype
    got = got.astype(np.float32)
    assert np.all(np.isfinite(got)), "NaN leaked from a page or position that no query may read"
    np.testing.assert_allclose(got, np.asarray(want), rtol=0, atol=tolerance(case))
    assert not got[~problem.used].any(), "padding must give zeros"


@pytest.mark.skipif(ALONE, reason="this is the process")
def test_all_of_these_in_a_process_of_their_own() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=os.environ | {"NPROC": THREADS}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    print(done.stdout[-200:])


@alone
def test_prefill_matches_the_reference_and_has_no_races() -> None:
    check(EVERYTHING, prefill_config=SMALL, interpret=plgpu().InterpretGPUParams(detect_races=True))


@alone
@pytest.mark.parametrize("case", mosaic_cases(), ids=lambda case: case.name)
def test_shared_cases_match_the_reference(case: Case) -> None:
    check(case, prefill_config=SMALL, interpret=plgpu().InterpretGPUParams(detect_races=True))


@alone
@pytest.mark.parametrize("head_dim", mosaic.HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 4])
def test_blocks_of_the_rule_match_the_reference(head_dim: int, group: int) -> None:
    case = Case("long", prefill=((130, 700), (64, 64), (129, 129)), heads=group, kv_heads=1, dtype="bfloat16")
    check(replace(case, head_dim=head_dim, page_size=32), interpret=True)


def plgpu() -> Any:
    """Mosaic GPU without types: its names differ from one version of JAX to the next."""
    return mosaic_gpu
