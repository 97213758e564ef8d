"""A first text's programs in parts, compiled for GPUs: few kernels to compile, pages in place, nothing spilled.

Seconds to compile are those of the kernels, about 40 ms of a processor each, so that counts stand for seconds:
`toolkit/workshop/bench/gpu_first_programs.py` measures both.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest

from helpers import compilers
from helpers.compilers import GPUS, Compiled, Row
from rekindle._src.bench.shapes import hf_config
from rekindle._src.core.config import EngineConfig
from rekindle._src.models.base import abstract_model
from rekindle._src.models.registry import config_from_hf
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.warming import first_needed
from rekindle_kernels import deprecated, gpus, tuning

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(compilers.folder("gpu") is None, reason=f"no compiler for GPUs: {compilers.FETCH}"),
]
MIB = 2**20
LAYERS = 12  # as deep as a model that begins in parts; parts are as many with any more
# Kernels of both programs together: with whole programs it is those of all layers, and of the ends three times as many.
MOST = {"t4": 190, "l4": 106, "h100": 106}


def parts_of(programs: Programs, key: Bucket) -> dict[str, Compiled]:
    """Each part that the program begins with, by its name without the program's size."""
    layered, made = programs._layered, {}
    for part in layered._first(key):
        lowered = layered._traced(part).lower()
        made[part.name.split("parts ")[1]] = compilers.compiled(lowered, "gpu", programs.recipes.part_options)
    return made


def nbytes(arrays: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


@pytest.mark.parametrize("name", MOST)
def test_a_first_text_waits_for_few_kernels(name: str, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "compute_capability", lambda: GPUS[name].capability)
    dtype = "bfloat16" if gpus.multiplies_bfloat16() else "float16"
    kernels = 0
    with compilers.target("gpu", name), deprecated.known():
        config = config_from_hf({**hf_config("135m"), "num_hidden_layers": LAYERS})
        graph, leaves = abstract_model(config, dtype, None)
        page = 2 * config.num_kv_heads * 16 * config.head_dim * 2
        engine = EngineConfig(
            max_requests=16, max_model_len=2048, page_size=16, device_pages=2**28 // page, kv_dtype=dtype,
            max_tokens_per_step=256, host_memory=0, disk_memory=0,
        )  # fmt: skip
        own = Programs(config, graph, leaves, engine)
        first = [key for key in first_needed(own, restoring=False)[:2] if isinstance(key, Bucket)]
        assert own.quicker_in_parts(first), "a first text would wait for whole programs"
        for key in first:
            made = parts_of(own, key)
            assert [*made] == ["opening", "layer 0", "greedy closing"], "layers are compiled once"
            layer, pages = made["layer 0"], nbytes(own.recipes.kv[0])
            assert layer.memory.alias_size_in_bytes >= pages, "pages are not updated in place"
            assert not layer.moves(pages // 2), "pages are copied"
            assert made["opening"].memory.alias_size_in_bytes >= nbytes(own.recipes.state.tables), "tables are copied"
            for part in made.values():
                kernels += len(part.launched)
                assert part.host_steps == ["kCommandBuffer"], "the host waits for the device within a part"
                assert not sum(kernel.spilled for kernel in part.kernels.values())
    row(GPUS[name].name, "135m in parts", f"{kernels} kernels until a first text")
    assert kernels <= MOST[name]
