"""Every Pallas kernel lowers for the platform that it is written for, on a machine that has neither."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from helpers.compilers import ABSENT
from helpers.thorough import by_default
from rekindle_kernels import AttentionInputs, AttentionOptions, LayerKV, deprecated
from rekindle_kernels.pages import needs_scales
from rekindle_kernels.pallas.gpu import attention as pallas_gpu
from rekindle_kernels.pallas.gpu import mosaic
from rekindle_kernels.pallas.tpu import attention as pallas_tpu

CALLS = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ("__gpu$xla.gpu.triton", "mosaic_gpu_v2")]
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
PAGE_SIZES = (16, 32, 64, 128)
# Every (query type, page type) pair at every head size; page sizes and groups rotate through the table.
GPU_TYPES = (
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("bfloat16", "int8"),
    ("bfloat16", "float8_e4m3fn"),
    ("bfloat16", "float8_e5m2"),
)
TPU_TYPES = GPU_TYPES[:1] + GPU_TYPES[2:4]
GROUPS = (1, 3, 4, 7, 16)
EVERY = 7  # in the default run is every seventh, so that each has another head size, page size and group
FEATURES = ({}, {"sliding_window": 100}, {"soft_cap": 30.0}, {"sinks": True})


def table(types: tuple[tuple[str, str], ...]) -> list[object]:
    rows = []
    for index, ((q, kv), head_dim) in enumerate(product(types, HEAD_DIMS)):
        page, group = PAGE_SIZES[index % len(PAGE_SIZES)], GROUPS[index % len(GROUPS)]
        features = FEATURES[(index // 2) % len(FEATURES)]
        name = f"{q}-{kv}-d{head_dim}-s{page}-g{group}-{'-'.join(features) or 'plain'}"
        marks = () if index % EVERY == 0 else pytest.mark.slow
        rows.append(pytest.param(q, kv, head_dim, page, group, features, id=name, marks=marks))
    return rows


def shapes(q: str, kv: str, head_dim: int, page_size: int, group: int) -> AttentionInputs:
    """Four decode rows of long contexts and two prefill chunks."""
    of = jax.ShapeDtypeStruct
    pages = of((40, 2, 2, page_size, head_dim), jnp.dtype(kv))
    scales = of(pages.shape[:-1], jnp.float32) if needs_scales(kv) else None
    integers = [of(shape, jnp.int32) for shape in ((6, 4096 // page_size), (6,), (3,), ())]
    return AttentionInputs(of((4 + 300, 2 * group, head_dim), jnp.dtype(q)), LayerKV(pages, scales), *integers)


def lower(attention: partial[jax.Array], platform: str, inputs: AttentionInputs, features: dict[str, object]) -> str:
    options = dict(features)
    if options.pop("sinks", False):
        inputs = replace(inputs, sinks=jax.ShapeDtypeStruct((inputs.q.shape[1],), jnp.float32))
    run = jax.jit(partial(attention, options=AttentionOptions(decode_rows=4, scale=0.1, **options)))
    return exported(run, platform, (inputs,))


def exported(run: Callable[..., Any], platform: str, arguments: tuple[object, ...]) -> str:
    with deprecated.known(), jax.sharding.use_abstract_mesh(ABSENT[platform]):
        return str(jax.export.export(run, platforms=[platform], disabled_checks=CALLS)(*arguments).mlir_module())


@pytest.mark.parametrize(("q", "kv", "head_dim", "page_size", "group", "features"), by_default(table(GPU_TYPES), 12))
def test_gpu_kernels_lower_for_cuda(
    q: str, kv: str, head_dim: int, page_size: int, group: int, features: dict[str, object]
) -> None:
    module = lower(partial(pallas_gpu.attention, extra=32), "cuda", shapes(q, kv, head_dim, page_size, group), features)
    assert module.count("__gpu$xla.gpu.triton") == 3, "decode, its merge, prefill"


@pytest.mark.skipif(jax.__version_info__ < mosaic.OLDEST, reason=f"jax {jax.__version__} is older than 0.12")
@pytest.mark.parametrize("dtype", [mosaic.TYPES[0], pytest.param(mosaic.TYPES[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("head_dim", [pytest.param(mosaic.HEAD_DIMS[0], marks=pytest.mark.slow), *mosaic.HEAD_DIMS[1:]])
def test_mosaic_prefill_lowers_for_cuda(dtype: str, head_dim: int) -> None:
    features = {"sliding_window": 100, "soft_cap": 30.0, "sinks": True}
    module = lower(partial(mosaic.attention), "cuda", shapes(dtype, dtype, head_dim, 16, 3), features)
    assert module.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(("q", "kv", "head_dim", "page_size", "group", "features"), table(TPU_TYPES))
def test_tpu_kernels_lower_for_tpu(
    q: str, kv: str, head_dim: int, page_size: int, group: int, features: dict[str, object]
) -> None:
    module = lower(partial(pallas_tpu.attention), "tpu", shapes(q, kv, head_dim, page_size, group), features)
    assert module.count("tpu_custom_call") == 2, "decode and prefill"


@pytest.mark.parametrize(
    ("head_dim", "kv"),
    by_default(
        [(size, kv) for size in (64, 80, 256) for kv in ("bfloat16", "float32", "int8", "float8_e4m3fn")],
        lambda case: case in {(64, "bfloat16"), (256, "float32"), (80, "int8"), (64, "float8_e4m3fn")},
    ),
)
def test_gpu_write_lowers_for_cuda_and_writes_in_place(kv: str, head_dim: int) -> None:
    of = jax.ShapeDtypeStruct
    pages = shapes("bfloat16", kv, head_dim, 16, 1).kv
    values = of((5, 2, head_dim), jnp.bfloat16)
    run = jax.jit(pallas_gpu.write_kv, donate_argnums=0)
    ids = of((5,), jnp.int32)
    assert "output_operand_alias" in exported(run, "cuda", (pages, values, values, ids, ids))
