"""Steps over four devices, compiled for a TPU v5e and four H100s: what they exchange, and that data shards do not.

Layers are divided over the axes "model" and "expert", or requests over "data"."""

from __future__ import annotations

import time
from typing import NamedTuple

import jax
import numpy as np
import pytest

from helpers import compilers
from helpers.compilers import Row
from rekindle._src.bench.shapes import hf_config
from rekindle._src.core.config import EngineConfig
from rekindle._src.models.base import abstract_model
from rekindle._src.models.placement import placement_of
from rekindle._src.models.registry import config_from_hf
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.recipes import compiler_options
from rekindle_kernels import deprecated

pytestmark = pytest.mark.accelerator
MIB = 2**20
COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
DEVICES, LAYERS = 4, 2
DECODE, MIXED = Bucket(64, 0), Bucket(16, 512)
MOE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "head_dim": 128, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
}  # fmt: skip
SHAPES = {"8b": hf_config("8b"), "moe": {**hf_config("8b"), **MOE}}


class Case(NamedTuple):
    """A step over axes of devices, which exchange among themselves what `group` of them share."""

    shape: str
    axes: dict[str, int]
    bucket: Bucket

    @property
    def group(self) -> int:
        return DEVICES // self.axes.get("data", 1)

    def __str__(self) -> str:
        axes = "-".join(f"{name}{count}" for name, count in self.axes.items())
        return f"{self.shape}-{axes}-{'mixed' if self.bucket.tokens else 'decode'}"


CASE = Case("8b", {"data": 2, "model": 2}, DECODE)
MORE = [
    Case("8b", {"model": 4}, DECODE),
    Case("8b", {"model": 4}, MIXED),
    Case("8b", {"data": 2, "model": 2}, MIXED),
    Case("moe", {"expert": 4, "model": 1}, DECODE),
    Case("moe", {"expert": 2, "model": 2}, DECODE),
]


def programs(devices: list[jax.Device], case: Case) -> Programs:
    """Two layers with the widths of Llama-3-8B, with 1 GiB of pages in each of them on every device."""
    config = config_from_hf({**SHAPES[case.shape], "num_hidden_layers": LAYERS})
    graph, leaves = abstract_model(config, "bfloat16", None)
    mesh = jax.sharding.Mesh(np.array(devices).reshape(*case.axes.values()), tuple(case.axes))
    placement = placement_of(mesh, graph)
    page = 2 * config.num_kv_heads * 16 * config.head_dim * 2 // case.group
    engine = EngineConfig(
        max_requests=64, max_model_len=8192, page_size=16, device_pages=2**30 // page, kv_dtype="bfloat16",
        max_tokens_per_step=512, host_memory=0, disk_memory=0,
    )  # fmt: skip
    return Programs(config, graph, placement.shapes(leaves), engine, placement=placement)


@pytest.mark.parametrize("case", [CASE, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=str)
def test_devices_of_one_data_shard_exchange_sums_and_logits(case: Case, platform: str, row: Row) -> None:
    start = time.perf_counter()
    with compilers.target(platform), deprecated.known():
        own = programs(compilers.devices(platform, DEVICES), case)
        made = compilers.compiled(own.compiler.build(case.bucket), platform, compiler_options())
    seconds = time.perf_counter() - start
    pages = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(own.recipes.kv)) // DEVICES
    memory, moved = made.memory, made.moves(pages // LAYERS // 2)
    groups = {kind: made.groups(kind) for kind in COLLECTIVES}
    counts = {kind: len(found) for kind, found in groups.items() if found}
    row(
        platform, str(case), f"temp {memory.temp_size_in_bytes / MIB:.0f} MiB",
        f"aliased {memory.alias_size_in_bytes / MIB:.0f} of {pages / MIB:.0f} MiB a device",
        ", ".join(f"{count} {kind}" for kind, count in counts.items()),
        f"page copies: {', '.join(moved) or 'none'}", f"{seconds:.0f} s",
    )  # fmt: skip
    for kind, found in groups.items():
        for group in (group for one in found for group in one):
            assert len({device // case.group for device in group}) == 1, f"{kind} among {group} crosses data shards"
    assert counts["all-reduce"] <= 1 + 2 * LAYERS
    gathers = 1 + bool(case.bucket.tokens)  # the vocabulary's parts, for the choice, and where prompts are scored
    assert counts["all-gather"] == gathers
    assert made.branched("all-gather") >= gathers - 1, "logits of prompts are gathered although none are asked for"
    assert set(counts) == {"all-reduce", "all-gather"}
    assert memory.alias_size_in_bytes >= pages, "pages are not updated in place"
    assert not moved
    assert memory.temp_size_in_bytes <= 400 * MIB
