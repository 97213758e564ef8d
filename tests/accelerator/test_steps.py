"""Whole step programs compiled for an H100 and a TPU v5e: one graph, pages in place, little else in memory.

The models have the widths of real ones and two layers. Their pages are larger than any weight, so that a copy of a
layer's pages can't be mistaken for something else.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import jax
import pytest

from helpers import compilers
from helpers.compilers import Row
from rekindle._src.bench.shapes import hf_config
from rekindle._src.core.config import EngineConfig
from rekindle._src.models.base import abstract_model
from rekindle._src.models.registry import config_from_hf
from rekindle._src.programs import host_pages
from rekindle._src.programs.buckets import COPY, Bucket, Helper
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.recipes import compiler_options
from rekindle_kernels import deprecated, tuning

pytestmark = pytest.mark.accelerator
MIB = 2**20


@dataclass(frozen=True)
class Step:
    """A step program and the bounds that it has to keep."""

    name: str
    bucket: Bucket
    temp: int  # MiB at most
    kernels: int  # a layer at most, on a GPU
    shape: str = "8b"
    quantize: str | None = None
    platforms: tuple[str, ...] = ("gpu", "tpu")


STEPS = (
    Step("8b decode", Bucket(64, 0), temp=400, kernels=20),
    Step("8b mixed", Bucket(16, 512), temp=400, kernels=20, platforms=("gpu",)),
    Step("8b int8-weight", Bucket(64, 0), temp=400, kernels=20, quantize="int8-weight", platforms=("gpu",)),
    Step("8b int4", Bucket(64, 0), temp=400, kernels=40, quantize="int4", platforms=("gpu",)),
    Step("135m decode", Bucket(64, 0), temp=400, kernels=20, shape="135m"),
)


@functools.cache
def programs(platform: str, shape: str, quantize: str | None) -> Programs:
    """Two layers of a shape, with 2 GiB of pages in each, as the platform that is compiled for lays them out."""
    config = config_from_hf({**hf_config(shape), "num_hidden_layers": 2})
    graph, leaves = abstract_model(config, "bfloat16", quantize)
    page_size = 16
    page = 2 * config.num_kv_heads * page_size * config.head_dim * 2
    engine = EngineConfig(
        max_requests=64, max_model_len=8192, page_size=page_size, device_pages=2**31 // page, kv_dtype="bfloat16",
        max_tokens_per_step=512, host_memory=0, disk_memory=0,
    )  # fmt: skip
    return Programs(config, graph, leaves, engine)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name.replace(" ", "-"))
def test_a_step_is_one_graph_and_copies_no_pages(step: Step, platform: str, row: Row) -> None:
    if platform not in step.platforms:
        pytest.skip("takes too long to compile")
    start = time.perf_counter()
    with compilers.target(platform), deprecated.known():
        own = programs(platform, step.shape, step.quantize)
        made = compilers.compiled(own.compiler.build(step.bucket), platform, compiler_options())
    seconds = time.perf_counter() - start
    pages = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(own.recipes.kv))
    layout = own.recipes.layout(step.bucket)
    upload = 4 * (layout.ints + layout.floats)
    memory, moved = made.memory, made.moves(pages // len(own.recipes.kv) // 2)
    layer = made.between("write_kv" if platform == "gpu" else "paged_attention")
    row(
        platform, step.name, f"temp {memory.temp_size_in_bytes / MIB:.0f} MiB",
        f"aliased {memory.alias_size_in_bytes / MIB:.0f} of {pages / MIB:.0f} MiB", f"{layer} kernels a layer",
        f"page copies: {', '.join(moved) or 'none'}",
        f"host starts {', '.join(made.host_steps)}" if made.host_steps else "", f"{seconds:.0f} s",
        f"uploads {upload / 1024:.0f} KiB",
    )  # fmt: skip
    assert memory.alias_size_in_bytes >= pages, "pages are not updated in place"
    assert not moved
    assert memory.temp_size_in_bytes <= step.temp * MIB
    assert upload < 16 * 1024, "page tables travel with the step"
    if platform == "gpu":
        assert made.host_steps == ["kCommandBuffer"], "the host waits for the device within a step"
        assert layer is not None
        assert layer <= step.kernels


def test_a_t4_runs_a_step_without_triton_as_one_graph(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    if compilers.folder("gpu") is None:
        pytest.skip(f"the compiler for GPUs is not installed: {compilers.FETCH}")
    monkeypatch.setattr(tuning, "compute_capability", lambda: 7.5)
    start = time.perf_counter()
    with compilers.target("gpu", "t4"), deprecated.known():
        config = config_from_hf({**hf_config("135m"), "num_hidden_layers": 2})
        graph, leaves = abstract_model(config, "float16", None)
        page = 2 * config.num_kv_heads * 64 * config.head_dim * 2
        engine = EngineConfig(
            max_requests=16, max_model_len=2048, page_size=64, device_pages=2**30 // page, kv_dtype="float16",
            max_tokens_per_step=256, host_memory=0, disk_memory=0,
        )  # fmt: skip
        own = Programs(config, graph, leaves, engine)
        made = compilers.compiled(own.compiler.build(Bucket(16, 0)), "gpu", compiler_options())
    seconds = time.perf_counter() - start
    pages = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(own.recipes.kv))
    temp = made.memory.temp_size_in_bytes / MIB
    row("T4", "135m decode", f"temp {temp:.0f} MiB", f"host starts {', '.join(made.host_steps)}", f"{seconds:.0f} s")
    assert made.memory.alias_size_in_bytes >= pages, "pages are not updated in place"
    assert not made.moves(pages // len(own.recipes.kv) // 2)
    assert temp < 64, "keys are copied"
    assert made.host_steps == ["kCommandBuffer"], "the host waits for the device within a step"
    assert "xla.gpu.triton" not in made.text


@pytest.mark.parametrize("name", ["tables", "gather", "scatter", "copy"])
def test_pages_and_tables_move_in_few_kernels(
    name: str, platform: str, row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pages, "uses_pinned", lambda parts: True)  # such a GPU has no list of memories
    with compilers.target(platform), deprecated.known():
        own = programs.__wrapped__(platform, "8b", None)
        pages = {"tables": 0, "copy": COPY.pages}.get(name, own.lattice.moved_pages[0])
        key = Helper(name, pages)
        made = compilers.compiled(own.compiler.build(key), platform, compiler_options())
    kv = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(own.recipes.kv))
    moving, memory = kv // own.recipes.kv[0].pages.num_pages * pages, made.memory
    kernels = sum(thunk.kind not in ("kCommandBuffer", "kConditional", "kWhile") for thunk in made.thunks)
    row(
        platform, f"8b {key.name}", f"temp {memory.temp_size_in_bytes / MIB:.1f} MiB",
        f"moves {moving / MIB:.1f} MiB", f"{kernels} kernels" if made.thunks else "",
    )  # fmt: skip
    assert not made.moves(kv // len(own.recipes.kv) // 2)
    assert memory.temp_size_in_bytes <= 3 * moving + MIB
    if name in ("scatter", "copy"):
        assert memory.alias_size_in_bytes >= kv, "pages are not updated in place"
    if platform == "gpu":
        assert kernels <= 4 * len(own.recipes.kv), "a kernel for each page and layer"
