"""What the tests on a GPU share."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from helpers.kernel_cases import Case, Problem, in_wide_queries, tolerance
from rekindle_kernels import paged_attention


def assert_attends(run: Any, case: Case, problem: Problem) -> np.ndarray:
    """What a kernel makes of a problem, after it was compared with the reference."""
    with jax.default_matmul_precision("highest"):
        want = paged_attention(in_wide_queries(problem.inputs), problem.options, implementation="reference")
    got = np.asarray(run(problem.inputs).astype("float32"))
    assert np.all(np.isfinite(got)), "NaN leaked from a page or position that no query may read"
    np.testing.assert_allclose(got, np.asarray(want), rtol=0, atol=tolerance(case))
    assert not got[~problem.used].any(), "padding must give zeros"
    return got
