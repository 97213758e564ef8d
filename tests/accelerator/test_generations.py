"""Whole steps compiled for a GPU of each generation: what `gpus.py` says serves there is what the program calls.

No GPU but an H100 has run any of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from helpers import compilers
from helpers.compilers import GPUS, Compiled, Row
from rekindle._src.bench.shapes import hf_config
from rekindle._src.core.config import EngineConfig
from rekindle._src.models.base import abstract_model
from rekindle._src.models.registry import config_from_hf
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.recipes import compiler_options
from rekindle_kernels import LinearOptions, deprecated, gpus, grouped_linear, int4, linear, tuning
from rekindle_kernels.xla import linear as xla_linear

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(compilers.folder("gpu") is None, reason=f"no compiler for GPUs: {compilers.FETCH}"),
]
MIB = 2**20


def step(
    name: str, quantize: str | None, shape: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Programs, Compiled, int]:
    """Decode rows of two layers in this GPU's default dtype, compiled, and the bytes of the weights."""
    gpu = GPUS[name]
    monkeypatch.setattr(tuning, "compute_capability", lambda: gpu.capability)
    dtype = "bfloat16" if gpus.multiplies_bfloat16() else "float16"
    with compilers.target("gpu", name), deprecated.known():
        config = config_from_hf({**hf_config(shape), "num_hidden_layers": 2, "vocab_size": 4096})
        graph, leaves = abstract_model(config, dtype, quantize)
        page = 2 * config.num_kv_heads * 64 * config.head_dim * 2
        engine = EngineConfig(
            max_requests=16, max_model_len=2048, page_size=64, device_pages=2**30 // page, kv_dtype=dtype,
            max_tokens_per_step=256, host_memory=0, disk_memory=0,
        )  # fmt: skip
        own = Programs(config, graph, leaves, engine)
        made = compilers.compiled(own.compiler.build(Bucket(16, 0)), "gpu", compiler_options())
    return own, made, nbytes(leaves)


def nbytes(leaves: Iterable[Any]) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def test_there_is_a_gpu_for_each_generation_that_the_compiler_knows() -> None:
    known = {row.capability for row in gpus.GENERATIONS}
    assert {gpu.capability for gpu in GPUS.values()} == known - {7.0}, "CUDA 13 has no compiler for 7.0"


@pytest.mark.parametrize("name", GPUS)
def test_a_step_is_one_graph_of_what_the_table_says(name: str, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.perf_counter()
    own, made, _ = step(name, None, "135m", monkeypatch)
    generation = gpus.generation(GPUS[name].capability)
    assert generation is not None
    pages = nbytes(jax.tree.leaves(own.recipes.kv))
    temp = made.memory.temp_size_in_bytes / MIB
    kernels = ", ".join(f"{kernel.name} {kernel.registers}" for kernel in made.kernels.values())
    row(
        GPUS[name].name, f"{GPUS[name].capability}", f"temp {temp:.0f} MiB", f"registers: {kernels or 'no kernels'}",
        f"{time.perf_counter() - start:.0f} s",
    )  # fmt: skip
    assert ("xla.gpu.triton" in made.text) == generation.triton == bool(made.kernels)
    assert not sum(kernel.spilled for kernel in made.kernels.values())
    assert made.memory.alias_size_in_bytes >= pages, "pages are not updated in place"
    assert not made.moves(pages // len(own.recipes.kv) // 2) and temp < 64, "pages are copied"
    assert made.host_steps == ["kCommandBuffer"], "the host waits for the device within a step"


@pytest.mark.parametrize("name", ["t4", "l4", "rtx5090"])
def test_weights_stay_in_four_bits(name: str, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton XLA widens matrices one after another, in the same memory. It copies a layer's values, as in 16
    bits."""
    own, made, weights = step(name, "int4", "0.6b", monkeypatch)
    model, precision = own.recipes.model, own.recipes.graph.precision
    temp, floats = made.memory.temp_size_in_bytes, nbytes(abstract_model(model, precision.weights)[1])
    row(
        GPUS[name].name, "int4", f"weights {weights / MIB:.0f} of {floats / MIB:.0f} MiB", f"temp {temp / MIB:.0f} MiB",
    )  # fmt: skip
    generation = gpus.generation(GPUS[name].capability)
    assert generation is not None and weights < 0.4 * floats
    assert any("int4" in kernel for kernel in made.kernels) == generation.triton
    heads, engine, inner = model.num_kv_heads * model.head_dim, own.config, model.intermediate_size
    values, largest = engine.max_requests * engine.max_model_len * heads * 2, 2 * inner * model.hidden_size * 2
    assert temp <= (8 * MIB if generation.triton else values + largest + 4 * MIB)


@pytest.mark.parametrize("rows", [1, 256])
def test_a_large_matrix_is_widened_in_tiles(rows: int, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it would take 224 MiB, and the head of a large vocabulary more than a GiB."""
    monkeypatch.setattr(tuning, "compute_capability", lambda: 7.5)
    outputs, inputs = 28672, 4096
    with compilers.target("gpu", "t4"):
        shapes = [
            jax.ShapeDtypeStruct((rows, inputs), jnp.float16),
            jax.ShapeDtypeStruct(int4.weight_shape((outputs, inputs)), jnp.uint8),
            jax.ShapeDtypeStruct(int4.scale_shape((outputs, inputs), 64), jnp.float16),
        ]
        options = LinearOptions("int4")
        lowered = jax.jit(lambda x, weight, scale: linear(x, weight, scale=scale, options=options)).lower(*shapes)
        made = compilers.compiled(lowered, "gpu", compiler_options())
    # The results in float32 and in float16, and the bits of a tile, which are cut out of the matrix.
    temp, others = made.memory.temp_size_in_bytes, 6 * rows * outputs + xla_linear.AT_ONCE // 4
    row("Tesla T4", f"int4 {outputs} x {inputs}, {rows} rows", f"temp {temp / MIB:.0f} MiB")
    assert temp <= xla_linear.AT_ONCE + others + 4 * MIB


@pytest.mark.parametrize("rows", [8, 512])
def test_experts_are_widened_in_tiles(rows: int, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 128 of a layer would take 768 MiB."""
    monkeypatch.setattr(tuning, "compute_capability", lambda: 7.5)
    of, shape = jax.ShapeDtypeStruct, (128, 1536, 2048)
    weight, scale = of(int4.weight_shape(shape), jnp.uint8), of(int4.scale_shape(shape, 32), jnp.float16)
    with compilers.target("gpu", "t4"):
        x, sizes = of((rows, shape[2]), jnp.float16), of((shape[0],), jnp.int32)
        lowered = jax.jit(grouped_linear).lower(x, weight, sizes, scale=scale)
        made = compilers.compiled(lowered, "gpu", compiler_options())
    temp = made.memory.temp_size_in_bytes
    row("Tesla T4", f"int4 {shape[0]} x {shape[1]} x {shape[2]}, {rows} rows", f"temp {temp / MIB:.0f} MiB")
    assert temp <= xla_linear.AT_ONCE + 16 * MIB
