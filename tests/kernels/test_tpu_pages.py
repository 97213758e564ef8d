"""Pages as TPUs store them: vectors of whole lanes, written as rows of a matrix; page tables beyond scalar memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.kernel_cases import CASES, Case, build, in_wide_queries, tolerance
from helpers.thorough import by_default
from rekindle_kernels import LayerKV, abstract_pages, init_pages, paged_attention, tuning, write_kv
from rekindle_kernels.ops.attention import WRITE_KV, WriteCall
from rekindle_kernels.pallas.tpu import attention as pallas_tpu


@pytest.mark.parametrize(("head_dim", "stored"), [(64, 128), (96, 128), (128, 128), (192, 256)])
def test_vectors_take_whole_lanes_on_tpus_only(head_dim: int, stored: int) -> None:
    assert abstract_pages(3, 2, 16, head_dim, "bfloat16", platform="tpu").head_dim == stored
    assert abstract_pages(3, 2, 16, head_dim, "bfloat16", platform="gpu").head_dim == head_dim
    assert abstract_pages(3, 2, 16, head_dim, "bfloat16", platform="cpu").head_dim == head_dim


@pytest.mark.parametrize(("kv_heads", "dtype"), by_default([(1, "bfloat16"), (3, "float32"), (2, "int8")]))
def test_rows_are_written_as_by_the_scatter(kv_heads: int, dtype: str) -> None:
    random = np.random.default_rng(0)
    k, v = (jnp.asarray(random.standard_normal((5, kv_heads, 64)), jnp.float32) for _ in range(2))
    ids, offsets = jnp.array([3, 1, 3, 2, 4]), jnp.array([0, 7, 1, 5, 7])
    wide, narrow = (init_pages(5, kv_heads, 8, 64, dtype, platform=platform) for platform in ("tpu", "gpu"))
    got = write_kv(wide, k, v, ids, offsets, implementation="rows")
    want = write_kv(narrow, k, v, ids, offsets, implementation="xla")
    np.testing.assert_array_equal(np.asarray(got.pages[..., :64]), np.asarray(want.pages))
    assert not np.asarray(got.pages[..., 64:].astype(jnp.float32)).any(), "what fills the lanes is zero"
    if want.scales is not None:
        np.testing.assert_array_equal(np.asarray(got.scales), np.asarray(want.scales))
    call = WriteCall("tpu", 5, kv_heads, 128, 8, jnp.dtype(dtype), want.scales is not None)
    assert WRITE_KV.choose(call).name == "rows"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "implementation", [pytest.param("pallas_tpu_interpret", marks=pytest.mark.slow), "xla", "reference"]
)
def test_wider_pages_give_the_same_attention(implementation: str) -> None:
    case = next(case for case in CASES if case.name == "mixed_head_dim_80")
    problem = build(case)
    want = paged_attention(in_wide_queries(problem.inputs), problem.options, implementation="reference")
    kv = problem.inputs.kv
    wide = LayerKV(jnp.pad(kv.pages, [(0, 0)] * 4 + [(0, 128 - case.head_dim)]))
    got = paged_attention(replace(problem.inputs, kv=wide), problem.options, implementation=implementation)
    assert got.shape == problem.inputs.q.shape
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=tolerance(case))


@pytest.mark.thorough
def test_a_page_table_larger_than_scalar_memory_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        "many_rows", decode=tuple(range(19)), prefill=tuple((1 + n % 5, 5 + 3 * n) for n in range(11)),
        idle_prefills=2, padding=4,
    )  # fmt: skip
    problem = build(case)
    want = paged_attention(in_wide_queries(problem.inputs), problem.options, implementation="reference")
    monkeypatch.setattr(pallas_tpu, "TABLE_BYTES", 8 * 128 * 4)
    assert pallas_tpu.sequences_at_once(problem.inputs.page_table.shape[1]) == 8
    run = partial(pallas_tpu.attention, options=problem.options, config=tuning.Tpu(tokens=8, keys=32), interpret=True)
    got = np.asarray(jax.jit(run)(problem.inputs))
    np.testing.assert_allclose(got, np.asarray(want), rtol=0, atol=tolerance(case))
    assert not got[~problem.used].any(), "padding must give zeros"
