"""What the Pallas kernels refuse and why, the tile table, writing pages, and block sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_workshop import gpu as bench_gpu
from kernel_workshop import tune
from rekindle_kernels import (
    AttentionCall,
    AttentionInputs,
    AttentionOptions,
    GroupedCall,
    LinearCall,
    WriteCall,
    gpu_path,
    gpus,
    init_pages,
    traits,
    tuning,
    write_kv,
)
from rekindle_kernels.ops.implementations import ATTENTION, GROUPED_LINEAR, LINEAR, WRITE_KV
from rekindle_kernels.pallas import tiles
from rekindle_kernels.pallas.gpu import attention as pallas_gpu
from rekindle_kernels.pallas.gpu import mosaic
from rekindle_kernels.pallas.tpu import attention as pallas_tpu

CALL = AttentionCall(
    platform="gpu", tokens=8, decode_rows=8, sequences=8, heads=8, kv_heads=2, head_dim=128, page_size=16,
    table_width=8, q_dtype=jnp.dtype("bfloat16"), kv_dtype=jnp.dtype("bfloat16"), storage=jnp.dtype("bfloat16"),
)  # fmt: skip


def test_gpu_kernels_refuse_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pallas_gpu.supports(CALL) is None
    assert "512" in str(pallas_gpu.supports(replace(CALL, head_dim=512)))
    assert "after them" in str(pallas_gpu.supports(replace(CALL, causal=False)))
    assert "int4" in str(pallas_gpu.supports(replace(CALL, kv_dtype=jnp.dtype("int4"))))
    assert "float64" in str(pallas_gpu.supports(replace(CALL, q_dtype=jnp.dtype("float64"))))
    monkeypatch.setattr(tuning, "compute_capability", lambda: 7.5)
    assert "7.5" in str(pallas_gpu.supports(CALL))
    monkeypatch.setattr(tuning, "compute_capability", lambda: 8.0)
    assert pallas_gpu.supports(CALL) is None
    assert "8.9" in str(pallas_gpu.supports(replace(CALL, kv_dtype=jnp.dtype("float8_e4m3fn"))))


def test_without_triton_every_operation_is_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "compute_capability", lambda: 7.5)
    half = jnp.dtype("float16")
    call = replace(CALL, q_dtype=half, kv_dtype=half, storage=half)
    assert ATTENTION.choose(call).name == "xla_gpu"
    write = WriteCall("gpu", 8, 2, 128, 16, half, scaled=False)
    assert WRITE_KV.choose(write).name == "xla"
    words = jax.ShapeDtypeStruct((256, 32768), jnp.uint8)
    matrix = LinearCall("gpu", jax.ShapeDtypeStruct((8, 4096), half), words, "int4")
    experts = GroupedCall("gpu", jax.ShapeDtypeStruct((8, 64), half), jax.ShapeDtypeStruct((4, 128, 64), half))
    assert [LINEAR.choose(matrix).name, GROUPED_LINEAR.choose(experts).name] == ["xla_tiles", "xla"]
    assert GROUPED_LINEAR.choose(replace(experts, scale="float16")).name == "xla_tiles"
    assert LINEAR.choose(replace(matrix, weight=experts.weight, quantize=None)).name == "xla"
    monkeypatch.setattr(tuning, "compute_capability", lambda: 8.6)
    assert [ATTENTION.choose(call).name, WRITE_KV.choose(write).name] == ["pallas_gpu", "pallas_gpu"]
    assert [LINEAR.choose(matrix).name, GROUPED_LINEAR.choose(experts).name] == ["pallas_gpu", "pallas_gpu"]
    assert ATTENTION.choose(replace(call, value_size=64)).name == "xla_gpu"
    assert "8.9" in str(pallas_gpu.supports_write(replace(write, kv_dtype=jnp.dtype("float8_e4m3fn"))))


@pytest.mark.parametrize(
    ("capability", "since"), [(6.1, 7.0), (7.5, 7.5), (8.0, 8.0), (8.7, 8.6), (9.0, 9.0), (10.3, 10.0), (12.1, 12.0)]
)
def test_each_capability_has_a_row(capability: float, since: float, monkeypatch: pytest.MonkeyPatch) -> None:
    row = gpus.generation(capability)
    assert row is not None
    assert row.capability == since
    monkeypatch.setattr(tuning, "compute_capability", lambda: capability)
    assert gpu_path().startswith(f"compute capability {capability}: {'Triton' if since >= 8.0 else 'XLA'}")
    assert traits(platform="gpu").bfloat16 == (since >= 8.0)


def test_without_a_gpu_kernels_for_one_can_be_asked_for() -> None:
    assert gpus.generation() is None
    assert gpu_path() == ""
    assert gpus.without_triton() is gpus.without_float8() is gpus.without_mosaic() is None


def test_mosaic_kernel_refuses_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic, "OLDEST", (99,))
    assert jax.__version__ in str(mosaic.supports(CALL))
    monkeypatch.setattr(mosaic, "OLDEST", (0,))
    assert mosaic.supports(CALL) is None
    for size in (8, 64, 128, 256):
        assert mosaic.supports(replace(CALL, page_size=size)) is None
    for size in (4, 48, 96):
        assert f"page size {size}" in str(mosaic.supports(replace(CALL, page_size=size)))
    assert "head_dim 80" in str(mosaic.supports(replace(CALL, head_dim=80)))
    assert "float32" in str(mosaic.supports(replace(CALL, q_dtype=jnp.dtype("float32"))))
    assert "int8" in str(mosaic.supports(replace(CALL, kv_dtype=jnp.dtype("int8"))))
    for other in (8.9, 10.0):
        monkeypatch.setattr(tuning, "compute_capability", lambda capability=other: capability)
        assert str(other) in str(mosaic.supports(CALL))


def test_mosaic_kernel_is_found_by_its_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic, "OLDEST", (0,))
    assert ATTENTION.choose(CALL).name == "pallas_gpu"
    assert ATTENTION.choose(CALL, "pallas_mosaic_gpu") is mosaic.ATTENTION
    with pytest.raises(ValueError, match="head_dim 80"):
        ATTENTION.choose(replace(CALL, head_dim=80), "pallas_mosaic_gpu")


def test_tpu_kernel_refuses_with_a_reason() -> None:
    assert pallas_tpu.supports(CALL) is None
    assert "int8" in str(pallas_tpu.supports(replace(CALL, kv_dtype=jnp.dtype("int8"))))
    assert "float16" in str(pallas_tpu.supports(replace(CALL, q_dtype=jnp.dtype("float16"))))
    assert "after them" in str(pallas_tpu.supports(replace(CALL, causal=False)))
    assert "page size 4" in str(pallas_tpu.supports(replace(CALL, page_size=4)))
    assert pallas_tpu.supports(replace(CALL, sequences=256, table_width=8192)) is None, "it is read in parts"
    assert "40000 pages" in str(pallas_tpu.supports(replace(CALL, table_width=40000)))


def test_one_byte_pages_that_overflow_the_index_are_refused() -> None:
    of = jax.ShapeDtypeStruct
    kv = jax.eval_shape(lambda: init_pages(2**15, 8, 64, 96, "int8"))
    integers = [of(shape, jnp.int32) for shape in ((1, 4), (1,), (1,), ())]
    inputs = AttentionInputs(of((1, 8, 96), jnp.bfloat16), kv, *integers)
    with pytest.raises(ValueError, match=r"3\.0 GiB"):
        jax.eval_shape(partial(pallas_gpu.attention, options=AttentionOptions(decode_rows=1, scale=1.0)), inputs)


@cache
def tile_table(group: int, block: int) -> Callable[[AttentionInputs], jax.Array]:
    return jax.jit(partial(tiles.tile_table, decode_rows=2, rows_per_token=group, block=block))


@settings(max_examples=60, deadline=None)
@given(
    queries=st.lists(st.integers(0, 40), min_size=4, max_size=4),
    real=st.integers(0, 4),
    tile=st.sampled_from([(1, 16), (3, 64), (7, 16)]),
)
def test_every_row_is_in_exactly_one_tile(queries: list[int], real: int, tile: tuple[int, int]) -> None:
    tokens, (group, block) = 160, tile
    queries = [count if index < real else 0 for index, count in enumerate(queries)]
    lens = np.array([9, 9, *(100 + count for count in queries)])
    inputs = AttentionInputs(
        q=jnp.zeros((tokens + 2, 1, 8)),
        kv=init_pages(1, 1, 8, 8, "float32"),
        page_table=jnp.zeros((len(lens), 1), jnp.int32),
        kv_lens=jnp.asarray(lens),
        cu_q_lens=jnp.asarray(np.cumsum([0, *queries])),
        num_prefills=jnp.asarray(real),
    )
    table = np.asarray(tile_table(group, block)(inputs))
    seen = np.zeros((tokens + 2) * group, int)
    for sequence, query, count, context, first in table.T:
        rows = np.arange(first, min(first + block, count * group))
        seen[query * group + rows] += 1
        if rows.size and query - 2 < sum(queries):
            assert context == lens[sequence] == 100 + count
        elif rows.size:
            assert context == 0, "padding has no keys"
    assert np.all(seen[: 2 * group] == 0) and np.all(seen[2 * group :] == 1)


@pytest.mark.parametrize(("dtype", "kv_heads", "head_dim"), [("float32", 3, 80), ("bfloat16", 2, 64), ("int8", 3, 64)])
def test_gpu_write_equals_the_scatter(dtype: str, kv_heads: int, head_dim: int) -> None:
    random = np.random.default_rng(0)
    k, v = (jnp.asarray(random.standard_normal((4, kv_heads, head_dim)), jnp.float32) for _ in range(2))
    ids, offsets = jnp.array([3, 1, 3, 2]), jnp.array([0, 7, 1, 5])
    kv = init_pages(5, kv_heads, 8, head_dim, dtype)
    want = write_kv(kv, k, v, ids, offsets)
    got = jax.jit(partial(pallas_gpu.write_kv, interpret=True))(kv, k, v, ids, offsets)
    np.testing.assert_array_equal(np.asarray(got.pages), np.asarray(want.pages))
    if want.scales is not None:
        np.testing.assert_allclose(np.asarray(got.scales), np.asarray(want.scales), rtol=1e-6)


def test_measured_entries_win_over_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = tuning.GpuDecode(block_k=32, num_warps=2, num_stages=5)
    monkeypatch.setattr(tuning, "device_kind", lambda platform: "NVIDIA H200 NVL")
    monkeypatch.setitem(tuning.GPU_DECODE, tuning.Key("NVIDIA H200", "bfloat16", 128, 16), measured)
    assert tuning.gpu_decode("bfloat16", 128, 16) is measured
    assert tuning.gpu_decode("bfloat16", 128, 32) == tuning.gpu_decode_rule("bfloat16", 128)


def test_items_of_decode_work_fill_the_gpu_whatever_the_rows() -> None:
    config = tuning.gpu_decode_rule("bfloat16", 128)
    for rows in (4, 64, 1024):
        assert tuning.gpu_extra_items(config, rows, 8, longest=32768) == 33, "132 multiprocessors, twice, 8 kv heads"
    assert tuning.gpu_extra_items(config, 1, 8, longest=512) == 1, "an item has at least four blocks"
    assert tuning.gpu_extra_items(config, 64, 8, longest=256) == 0


def test_tuner_says_when_there_is_nothing_to_tune(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main([]) == 1
    assert "cpu" in capsys.readouterr().out


@pytest.mark.thorough
def test_tuner_passes_over_what_does_not_compile_and_prints_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    inputs, options = tune.problem(16, 16, "float32", rows=1, chunks=1, chunk=8, context=16)
    small = tuning.GpuPrefill(block_m=16, block_k=16, num_warps=4, num_stages=1)
    run = partial(pallas_gpu.attention, interpret=True)
    measure = partial(tune.timed, run, "prefill_config", [(inputs, options)])
    found = tune.best(measure, small, {"block_k": (0,)})
    assert found is not None
    assert found[0] == small
    assert "block_k=0" in capsys.readouterr().err


def test_tuner_changes_one_field_after_the_other_until_nothing_helps() -> None:
    seen: list[tuning.GpuDecode] = []

    def measure(config: tuning.GpuDecode) -> list[float] | None:
        seen.append(config)
        if config.num_warps == 8:
            return None
        return [1 + abs(config.block_k - 64), 1 + abs(config.num_stages - 6) + abs(config.waves - 4)]

    start = tuning.gpu_decode_rule("float32", 64)
    found = tune.best(measure, start, tune.DECODE)
    assert found is not None
    assert (found[0].block_k, found[0].num_stages, found[0].waves) == (64, 6, 4)
    assert found[1] == [1, 1]
    assert len(seen) == len(set(seen)) < 40, "all of them would be 240"
    assert tune.best(measure, start, tune.DECODE, budget=-1) == (start, measure(start))


def test_gpu_benchmark_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu.main() == 1
    assert "needs a GPU" in capsys.readouterr().out


@pytest.mark.thorough
def test_gpu_benchmark_builds_every_contestant() -> None:
    small = replace(bench_gpu.DECODE, rows=1, context=256, chunk=256, heads=2, kv_heads=1, head_dim=64, page_size=16)
    for build in (bench_gpu.decode_runs, partial(bench_gpu.prefill_runs, with_mosaic=True)):
        runs = build(small)
        dense = runs["jax.nn.dot_product_attention xla, dense"]()
        ours = next(iter(runs.values()))()
        assert dense.size == ours.size
        rival = runs.get("jax pallas paged_attention")
        if rival is not None:
            assert jax.eval_shape(rival).shape == ours.shape
