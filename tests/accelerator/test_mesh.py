"""Steps over four devices, compiled for a TPU v5e and four H100s: what they exchange, and that data shards do not."""

from __future__ import annotations

import time

import jax
import numpy as np
import pytest

from helpers import compilers
from helpers.compilers import Row
from rekindle._src.bench.shapes import hf_config
from rekindle._src.core.config import EngineConfig
from rekindle._src.models.base import abstract_model
from rekindle._src.models.placement import placed
from rekindle._src.models.registry import config_from_hf
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.device_graphs import compiler_options
from rekindle._src.programs.programs import Programs
from rekindle_kernels import deprecated

pytestmark = pytest.mark.accelerator
MIB = 2**20
COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
DEVICES, LAYERS = 4, 2


def programs(devices: list[jax.Device], shards: int) -> Programs:
    """Two layers with the widths of Llama-3-8B, with 1 GiB of pages in each of them on every device."""
    config = config_from_hf({**hf_config("8b"), "num_hidden_layers": LAYERS})
    graph, leaves = abstract_model(config, "bfloat16", None)
    mesh = jax.sharding.Mesh(np.array(devices).reshape(shards, DEVICES // shards), ("data", "model"))
    placement = placed(mesh, graph)
    assert placement is not None
    page = 2 * config.num_kv_heads * 16 * config.head_dim * 2 * shards // DEVICES
    engine = EngineConfig(
        max_requests=64, max_model_len=8192, page_size=16, device_pages=2**30 // page, kv_dtype="bfloat16",
        max_tokens_per_step=512, host_memory=0, disk_memory=0,
    )  # fmt: skip
    return Programs(config, graph, placement.shapes(leaves), engine, placement=placement)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("bucket", [Bucket(64, 0), Bucket(16, 512)], ids=["decode", "mixed"])
def test_devices_of_one_data_shard_exchange_sums_and_logits(
    bucket: Bucket, shards: int, platform: str, row: Row
) -> None:
    if bucket.tokens and platform == "gpu":
        pytest.skip("takes too long to compile")
    start = time.perf_counter()
    with compilers.target(platform), deprecated.known():
        own = programs(compilers.devices(platform, DEVICES), shards)
        made = compilers.compiled(own.build(bucket), platform, compiler_options())
    seconds = time.perf_counter() - start
    pages = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(own.kv)) // DEVICES
    memory, moved = made.memory, made.moves(pages // LAYERS // 2)
    groups = {kind: made.groups(kind) for kind in COLLECTIVES}
    counts = {kind: len(found) for kind, found in groups.items() if found}
    row(
        platform, f"8b data {shards} × model {DEVICES // shards} {bucket.name}",
        f"temp {memory.temp_size_in_bytes / MIB:.0f} MiB",
        f"aliased {memory.alias_size_in_bytes / MIB:.0f} of {pages / MIB:.0f} MiB a device",
        ", ".join(f"{count} {kind}" for kind, count in counts.items()),
        f"page copies: {', '.join(moved) or 'none'}", f"{seconds:.0f} s",
    )  # fmt: skip
    shard_of = [device * shards // DEVICES for device in range(DEVICES)]
    for kind, found in groups.items():
        for group in (group for one in found for group in one):
            assert len({shard_of[device] for device in group}) == 1, f"{kind} among {group} crosses data shards"
    assert counts["all-reduce"] <= 1 + 2 * LAYERS
    assert counts["all-gather"] == 1, "the vocabulary's parts, for the choice"
    assert set(counts) == {"all-reduce", "all-gather"}
    assert memory.alias_size_in_bytes >= pages, "pages are not updated in place"
    assert not moved
    assert memory.temp_size_in_bytes <= 400 * MIB
