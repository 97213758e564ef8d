"""The shared cases compiled for a real GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/kernels`.

They run with XLA's own optimisations, which tests/conftest.py turns off for CPUs alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.kernel_cases import CASES, Case, assert_attends, build
from rekindle_kernels import (
    LinearOptions,
    deprecated,
    gather_pages,
    gpus,
    grouped_linear,
    init_pages,
    int4,
    linear,
    paged_attention,
    top_k,
    tuning,
    write_kv,
)
from rekindle_kernels.pallas.gpu import attention as pallas_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU and JAX_PLATFORMS=cuda,cpu"),
]
WITHOUT_TRITON = gpus.without_triton()
triton = pytest.mark.skipif(WITHOUT_TRITON is not None, reason=str(WITHOUT_TRITON))
FP8 = (
    Case(
        "fp8_pages", decode=(1, 17, 0, 40), prefill=((16, 33),), dtype="bfloat16", kv_dtype="float8_e4m3fn", head_dim=64
    ),
    Case("fp8_e5m2_pages", decode=(9, 70), prefill=((16, 33),), dtype="bfloat16", kv_dtype="float8_e5m2", head_dim=128),
)
LARGE = (
    Case("long_decode", decode=(4096, 1, 3000, 0), heads=16, kv_heads=2, head_dim=128, dtype="bfloat16"),
    Case("long_prefill", prefill=((1500, 3000), (700, 700)), heads=8, kv_heads=2, head_dim=128, dtype="bfloat16"),
    Case("long_prefill_window", prefill=((1500, 3000),), head_dim=64, dtype="bfloat16", sliding_window=500),
)


@pytest.fixture(autouse=True)
def no_deprecations() -> Iterator[None]:
    with deprecated.known():
        yield


def check(case: Case, **options: object) -> None:
    problem = build(case)
    assert_attends(jax.jit(partial(pallas_gpu.attention, options=problem.options, **options)), case, problem)


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=lambda case: case.name)
def test_what_serves_here_matches_the_reference(case: Case) -> None:
    problem = build(case)
    assert_attends(jax.jit(partial(paged_attention, options=problem.options)), case, problem)


@triton
@pytest.mark.parametrize("case", [*CASES, *FP8, *LARGE], ids=lambda case: case.name)
def test_compiled_kernel_matches_the_reference(case: Case) -> None:
    check(case)


@triton
@pytest.mark.parametrize("case", [case for case in CASES if case.decode], ids=lambda case: case.name)
def test_split_decode_matches_the_reference(case: Case) -> None:
    rule = tuning.gpu_decode_rule(case.kv_dtype or case.dtype, case.head_dim)
    check(case, extra=24, decode_config=replace(rule, block_k=16, least_blocks=1))


@triton
def test_the_gpu_kernel_is_the_default() -> None:
    case = next(case for case in CASES if case.name == "mixed_bfloat16")
    problem = build(case)
    compiled = jax.jit(partial(paged_attention, options=problem.options)).lower(problem.inputs)
    assert "triton" in compiled.as_text()


@triton
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_write_kernel_equals_the_scatter(dtype: str) -> None:
    random = np.random.default_rng(0)
    k, v = (jnp.asarray(random.standard_normal((64, 3, 80)), jnp.float32) for _ in range(2))
    places = random.permutation(8 * 16)[:64]
    ids, offsets = jnp.asarray(1 + places // 16, jnp.int32), jnp.asarray(places % 16, jnp.int32)
    kv = init_pages(10, 3, 16, 80, dtype)
    # By its name: the default on a GPU is the kernel itself.
    want = write_kv(kv, k, v, ids, offsets, implementation="xla")
    got = jax.jit(pallas_gpu.write_kv)(kv, k, v, ids, offsets)
    assert np.asarray(want.pages.astype(jnp.float32)).any()
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        left, right = (np.asarray(leaf.astype(jnp.float32)) for leaf in (left, right))
        # Dividing by the scale may differ in the last bit, which moves a quantised value by one step.
        np.testing.assert_allclose(
            left, right, rtol=2**-3 if dtype == "float8_e4m3fn" else 1e-6, atol=1.0 * (dtype == "int8")
        )


@triton
def test_the_write_kernel_is_the_default() -> None:
    kv, values, at = init_pages(10, 3, 16, 80, "bfloat16"), jnp.ones((4, 3, 80), jnp.bfloat16), jnp.arange(4)
    assert "triton" in jax.jit(write_kv).lower(kv, values, values, at, at).as_text()


@pytest.mark.parametrize("k", [20, 64])
def test_the_largest_logits_are_those_of_a_sort(k: int) -> None:
    logits = jnp.round(jax.random.normal(jax.random.key(0), (8, 151936)) * 30)  # with ties
    got, want = (jax.jit(partial(top_k, k=k, implementation=name))(logits) for name in ("blocks", "xla"))
    for left, right in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def test_float32_products_are_exact() -> None:
    x, weight = (jax.random.normal(jax.random.key(n), (64, 512), jnp.float32) for n in range(2))
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(np.asarray(jax.jit(linear)(x, weight)), want, rtol=0, atol=1e-4)  # TF32: 3e-2


@triton
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_rows_meet_the_matrices_of_their_experts(dtype: str) -> None:
    rng, sizes = np.random.default_rng(0), jnp.array([3, 0, 200, 5], jnp.int32)
    x, weight = (jnp.asarray(rng.integers(-9, 10, shape), dtype) for shape in ((208, 256), (4, 384, 256)))
    summed = jnp.int32 if dtype == "int8" else jnp.float32
    run = partial(grouped_linear, dtype=summed)
    got, want = (jax.jit(partial(run, implementation=name))(x, weight, sizes) for name in ("pallas_gpu", "xla"))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))  # small integers: sums are exact


def test_offloaded_pages_come_back() -> None:
    kv = init_pages(6, 2, 16, 64, "bfloat16")
    kv = kv._replace(pages=jax.random.normal(jax.random.key(0), kv.pages.shape, jnp.bfloat16))
    taken = gather_pages(kv, jnp.array([3, 1]))
    np.testing.assert_array_equal(np.asarray(taken.pages), np.asarray(kv.pages)[[3, 1]])


@triton
@pytest.mark.parametrize("rows", [1, 5, 64, 300])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_in_groups_are_exact(rows: int, bits: int) -> None:
    random = np.random.default_rng(bits)
    q = random.integers(0, 16, (256, 1024)) if bits == 4 else random.integers(-128, 128, (256, 1024))
    weight = jnp.asarray(int4.pack(q.astype(np.uint8 if bits == 4 else np.int8)))
    scale = jnp.asarray(int4.pack_scales(2.0 ** random.integers(-3, 3, (256, 32)).astype(np.float16)))
    x = jnp.asarray(random.integers(-8, 9, (rows, 1024)), jnp.bfloat16)
    run = partial(linear, scale=scale, options=LinearOptions("int4"), dtype=jnp.float32)
    got, want = (jax.jit(partial(run, implementation=name))(x, weight) for name in ("pallas_gpu", "xla"))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))  # sums of these numbers are exact
