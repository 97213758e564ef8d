"""The Mosaic GPU prefill by its real compiler: nothing spilled, wgmma, and copies that the driver would take."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from accelerator import mosaic
from helpers import compilers
from helpers.compilers import H100, Row
from rekindle_kernels import AttentionInputs, AttentionOptions, abstract_pages, deprecated, paged_attention
from rekindle_kernels.pallas.gpu import mosaic as kernels

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(mosaic.reason() is not None, reason=str(mosaic.reason())),
    pytest.mark.skipif(
        jax.__version_info__ < kernels.OLDEST, reason=f"jax is {jax.__version__}, and the kernel is written for 0.12"
    ),
]
SHARED = 227 << 10
FEATURES: tuple[dict[str, Any], ...] = ({}, {"sliding_window": 100}, {"soft_cap": 30.0, "sinks": True})
CASES = [  # head size, page size, group, what else
    (128, 16, 4, {}),
    (128, 16, 4, {"sliding_window": 100, "soft_cap": 30.0, "sinks": True}),
    (64, 16, 3, {}),
    (64, 64, 8, {"sliding_window": 100}),
]
MORE = [(d, s, g, each) for d in kernels.HEAD_DIMS for s in (8, 16, 64, 256) for g in (1, 8) for each in FEATURES]


def inputs(dtype: str, head_dim: int, page_size: int, group: int, decode_rows: int, sinks: bool) -> AttentionInputs:
    of, kv_heads, rows = jax.ShapeDtypeStruct, 2, decode_rows + 2
    integers = [of(shape, jnp.int32) for shape in ((rows, 4096 // page_size), (rows,), (3,), ())]
    q = of((decode_rows + 300, kv_heads * group, head_dim), jnp.dtype(dtype))
    found = AttentionInputs(q, abstract_pages(4096, kv_heads, page_size, head_dim, dtype), *integers)
    return replace(found, sinks=of((kv_heads * group,), jnp.float32)) if sinks else found


@pytest.mark.parametrize("dtype", kernels.TYPES)
@pytest.mark.parametrize(
    ("head_dim", "page_size", "group", "features"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_prefill_compiles(
    dtype: str, head_dim: int, page_size: int, group: int, features: dict[str, Any], row: Row
) -> None:
    given = dict(features)
    arrays = inputs(dtype, head_dim, page_size, group, 0, given.pop("sinks", False))
    options = AttentionOptions(decode_rows=0, scale=0.1, **given)
    with jax.sharding.use_abstract_mesh(H100):
        run = jax.jit(partial(kernels.attention, options=options))
        made = mosaic.compiled(run.trace(arrays).lower(lowering_platforms=("cuda",)))
    products, copies = made.counts("wgmma.mma_async"), made.counts("cp.async.bulk.tensor")
    name = "-".join(("mosaic", dtype, f"d{head_dim}", f"s{page_size}", f"g{group}", *features))
    row("gpu", name, f"{made.spilled} spilled {made.shared >> 10} KiB", f"{products} wgmma {copies} TMA")
    assert made.spilled == 0
    assert made.shared <= SHARED
    assert products
    assert copies
    assert not made.serialized, "ptxas waits after each matrix instruction"
    assert made.counts("setmaxnreg") == 2, "consumers take registers from the producer"
    assert len(made.copies) == 4, "queries, whole and single rows of the output, pages"


def test_a_step_with_it_moves_nothing(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA takes it as one call, which writes among the decode rows and reads pages where they lie."""
    for name, value in mosaic.places().items():
        monkeypatch.setenv(name, value)
    arrays = inputs("bfloat16", 128, 16, 4, 4, sinks=False)
    options = AttentionOptions(decode_rows=4, scale=0.1)
    with compilers.target("gpu"), deprecated.known():
        run = jax.jit(partial(paged_attention, options=options, implementation="pallas_mosaic_gpu"))
        made = compilers.compiled(run.lower(arrays), "gpu")
    row("gpu", "mosaic, with decode rows", f"temp {made.memory.temp_size_in_bytes >> 10} KiB", *made.host_steps)
    assert made.text.count('custom_call_target="mosaic_gpu_v2"') == 1
    assert not made.moves(arrays.kv.pages.size), "pages are copied"
    assert not made.moves(arrays.q.size), "queries are copied, or the output"
