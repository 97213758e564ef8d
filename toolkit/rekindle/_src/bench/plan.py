"""A model's needs on a mesh of devices, on paper: memory, room for keys and values, and the least time of a step.

Nothing is measured or allocated, so that one can plan for a machine that is not at hand. A step takes at least as
long as reading its weights and pages, or multiplying with them, whichever is longer, and its sums over the devices on
top. The result is a bound, and a good engine reaches 60 to 90 % of it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rekindle._src.bench.shapes import SHAPES, hf_config
from rekindle._src.core.drawable import Record
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.models.base import abstract_model
from rekindle._src.models.config import ModelConfig, Pages
from rekindle._src.models.loading.four_bits import stored_kinds
from rekindle._src.models.loading.gguf.files import is_file, is_gguf
from rekindle._src.models.loading.named_tensors import named_tensors
from rekindle._src.models.loading.stored import StoredCheckpoint, look
from rekindle._src.models.loading.stores.known import store_of
from rekindle._src.models.partition import Partition, roles_of
from rekindle._src.models.registry import config_from_hf, manifest
from rekindle._src.models.roles import local_shape
from rekindle._src.programs.kv_layout import check_format
from rekindle._src.programs.side_caches import span
from rekindle.errors import CheckpointError, ConfigError
from rekindle_kernels import abstract_pages

USABLE = 0.9  # of a device's memory: the rest is for programs, their temporary arrays and the runtime
ALONE, MANY = 1, 64  # rows of the planned steps


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device by its vendor's data sheet, in GB, GB/s, dense TFLOP/s of bfloat16 and of int8, and microseconds."""

    memory: float
    read: float
    bf16: float
    int8: float
    link: float  # from a device to the others of its machine, in one direction
    latency: float = 10.0  # of a sum over the devices of a machine; of the order of published figures
    page_size: int = 64  # tokens of a page, by default on such a device


DEVICES: dict[str, DeviceSpec] = {
    "A100": DeviceSpec(80, 2039, 312, 624, 300),
    "H100": DeviceSpec(80, 3350, 989, 1979, 450),
    "H200": DeviceSpec(141, 4800, 989, 1979, 450),
    "B200": DeviceSpec(180, 8000, 2250, 4500, 900),
    "L4": DeviceSpec(24, 300, 121, 242, 32),
    "L40S": DeviceSpec(48, 864, 362, 733, 32),
    "v5e": DeviceSpec(16, 819, 197, 394, 200, page_size=128),
    "v5p": DeviceSpec(95, 2765, 459, 918, 600, page_size=128),
    "v6e": DeviceSpec(32, 1640, 918, 1836, 448, page_size=128),
}
_LLAMA_3 = {**SHAPES["8b"], "max_position_embeddings": 131072}
PLANNED: dict[str, dict[str, Any]] = {
    **SHAPES,
    "1b": {
        **_LLAMA_3, "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "70b": {
        **_LLAMA_3, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
        "intermediate_size": 28672,
    },
    "405b": {
        **_LLAMA_3, "hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128,
        "intermediate_size": 53248,
    },
    "8x7b": {
        **_LLAMA_3, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 32000, "max_position_embeddings": 32768,
    },
    "30b-a3b": {
        **SHAPES["0.6b"], "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Plan(Record):
    """A model's needs on each of several devices, and the bounds of its speed there."""

    devices: int  # in all
    shards: int  # groups of devices, each with the whole model and its own requests
    weight_bytes: int  # on each device
    read_bytes: int  # of them, read by a step of one row: an embedding is looked up, and few experts are chosen
    # Keys and values of a token, on each device; of layers with a window, the share that a request of half the context
    # has of them
    token_bytes: int
    memory_bytes: int  # usable, of each device
    page_size: int  # tokens
    context: int  # tokens of a request
    alone_seconds: float  # least time of a step of one row
    many_seconds: float  # least time of a step of 64 rows, which shards divide among them
    sum_seconds: float  # of either, for the sums over devices in a step of one row

    @property
    def free_bytes(self) -> int:
        """Room for keys and values on each device; negative where the weights do not fit."""
        return self.memory_bytes - self.weight_bytes

    @property
    def fits(self) -> bool:
        """True if the weights and one whole context fit."""
        return self.kv_tokens >= self.context

    @property
    def pages(self) -> int:
        """KV pages that each device has room for: the option `device_pages`."""
        return max(0, self.free_bytes) // (self.token_bytes * self.page_size)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache of one shard holds."""
        return max(0, self.free_bytes) // self.token_bytes

    @property
    def contexts(self) -> int:
        """Requests of a whole context at once, in all shards."""
        return self.shards * (self.kv_tokens // self.context)


def is_planned(model: str) -> bool:
    """True if `model` names a shape, which has no weights."""
    return model in PLANNED


def shape_config(model: str) -> tuple[ModelConfig, str]:
    """Return config and dtype of a shape by its name, of a folder's config.json or of a GGUF file."""
    if model in PLANNED:
        raw = {**hf_config("8b"), **PLANNED[model]} if model not in SHAPES else hf_config(model)
    elif is_gguf(Path(model)) or is_file(model) or store_of(model) is not None:
        raw = look(model).raw
    else:
        path = Path(model).expanduser() / "config.json"
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            known = ", ".join(PLANNED)
            raise ConfigError(
                "--plan", model, f"is no shape, and {path} can't be read ({error})", f"Use a folder, or one of {known}"
            ) from None
    config = config_from_hf(raw)
    return config, config.dtype or "bfloat16"


def stored_model(model: str) -> StoredCheckpoint | None:
    """Return the checkpoint, with its headers, of a model that is planned; None for a shape, or a config.json alone."""
    if model in PLANNED:
        return None
    try:
        return look(model)
    except CheckpointError:  # a folder with a config.json alone is enough for a plan
        return None


def stored_in_groups(
    seen: StoredCheckpoint | None, config: ModelConfig, *, divided: bool
) -> tuple[tuple[str, str], ...]:
    """Return the kinds of the matrices that a checkpoint stores in groups of four bits, which an accelerator keeps."""
    if seen is None or not seen.may_be_quantized:
        return ()
    return stored_kinds(*named_tensors(seen, config), eight=False, steps=not divided)


def device_spec(name: str) -> DeviceSpec:
    """Return a device by its name in any case."""
    device = {known.casefold(): spec for known, spec in DEVICES.items()}.get(name.casefold())
    if device is None:
        raise ConfigError("--device", name, "is not known", f"Use one of {', '.join(DEVICES)}")
    return device


def make_plan(
    config: ModelConfig,
    partition: Partition,
    device: DeviceSpec,
    *,
    dtype: str = "bfloat16",
    quantize: str | None = None,
    context: int | None = None,
    kv_dtype: str | None = None,
    shards: int = 1,
    kinds: tuple[tuple[str, str], ...] = (),
) -> Plan:
    """Return the plan for a model; raises ConfigError if the devices can't share it. `kinds` lists the matrices that
    stay as they are stored.
    """
    partition.check(config)
    length = min(8192 if context is None else context, config.max_position_embeddings)
    weights, one_row, many_rows = _weights(config, partition, dtype, quantize, -(-MANY // shards), kinds)
    stored = kv_dtype if kv_dtype not in (None, "auto") else "float32" if dtype == "float32" else "bfloat16"
    by_kind = [0, 0]  # of layers that keep everything, and of layers that give pages back
    apart = shards == 1 and config.window > 0
    for cache, windowed in zip(config.caches, config.windowed, strict=True):
        if isinstance(pages := cache.pages, Pages):
            check_format(pages, stored, config.model_type)
            heads = partition.kv_heads(pages.heads)
            one = abstract_pages(1, heads, 1, pages.key_size, stored, latent=pages.latent, platform="gpu")
            by_kind[windowed and apart] += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(one))
    token = by_kind[0]
    if apart:
        half = max(1, pages_for(length, 2 * device.page_size))
        token += int(by_kind[1] * min(1.0, (span(config, device.page_size) + 2) / half))
    numbers = _weights(config, partition, "int8", None, 1)[1]  # multiplied with each token on one device
    speed = (device.int8 if quantize == "int8" else device.bf16) * 1e12
    sums = 1 + 2 * config.num_layers

    def seconds(rows: int, read: int) -> float:
        seen = length * by_kind[0] + min(length, config.window) * by_kind[1]
        moved = (read + rows * seen) / (device.read * 1e9)
        return max(moved, 2 * rows * numbers / speed) + summing(rows)

    def summing(rows: int) -> float:
        if partition.size == 1:
            return 0.0
        # A ring sends nearly all of it twice; logits are gathered once.
        width = 2 * rows * (config.hidden_size * sums * 2 + config.vocab_size * 2)
        return (sums + 1) * device.latency * 1e-6 + width / (device.link * 1e9)

    return Plan(
        devices=shards * partition.size,
        shards=shards,
        weight_bytes=weights,
        read_bytes=one_row,
        token_bytes=token,
        memory_bytes=int(device.memory * 1e9 * USABLE),
        page_size=device.page_size,
        context=length,
        alone_seconds=seconds(ALONE, one_row),
        many_seconds=seconds(-(-MANY // shards), many_rows),
        sum_seconds=summing(ALONE),
    )


def _weights(
    config: ModelConfig,
    partition: Partition,
    dtype: str,
    quantize: str | None,
    rows: int,
    kinds: tuple[tuple[str, str], ...] = (),
) -> tuple[int, int, int]:
    """Return the bytes of weights on a device, and the bytes that steps of one row and of `rows` rows read."""
    graph, leaves = abstract_model(config, dtype, quantize, kinds=kinds)
    partition.check_packed(graph)
    roles, sources = roles_of(graph), manifest(config).sources
    total = one_row = many_rows = 0
    for path, leaf in zip(graph.paths, leaves, strict=True):
        size = int(np.prod(local_shape(roles[path], leaf.shape, partition.sizes))) * np.dtype(leaf.dtype).itemsize
        total += size
        looked_up = path.startswith(("embed.", "position_embed.", "layer_embed."))
        if looked_up and not (config.tie_embeddings and path.startswith("embed.")):
            continue  # some of its rows
        spec = config.moe[int(path.split(".")[1])] if config.moe and path.startswith("layers.") else None
        chosen = chosen_by_many = 1.0
        matrix = path if path in sources else f"{path.rpartition('.')[0]}.weight"  # of a scale
        if spec is not None and sources[matrix].stack:
            chosen = spec.top_k / spec.num_experts
            chosen_by_many = 1 - (1 - chosen) ** rows
        one_row, many_rows = one_row + int(size * chosen), many_rows + int(size * chosen_by_many)
    return total, one_row, many_rows
