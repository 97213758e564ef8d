"""Block sizes: frozen configurations, a table of measured ones per device, and the rule that serves everything else.

`python -m kernel_workshop.tune` measures on the device at hand and prints lines for the tables below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclass(frozen=True, slots=True)
class GpuDecode:
    """The loop of a program of the GPU decode kernel over the keys of a row."""

    block_k: int  # keys per turn of the loop
    num_warps: int
    num_stages: int
    waves: int = 2  # programs per multiprocessor that a long row is split over
    least_blocks: int = 4  # an item with less work than this costs more than it saves


@dataclass(frozen=True, slots=True)
class GpuPrefill:
    """The tile of the GPU prefill kernel."""

    block_m: int  # rows: (token, head of the group) pairs
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class GpuMosaicPrefill:
    """The loop of a program of the Mosaic GPU prefill kernel over the keys; its 128 rows are fixed."""

    block_k: int  # a multiple of 64
    stages: int  # blocks of keys, and of values, in shared memory


@dataclass(frozen=True, slots=True)
class Tpu:
    """The tile of the TPU kernel."""

    tokens: int  # query tokens of a prefill tile
    keys: int  # keys per DMA block; pages are fetched whole


@dataclass(frozen=True, slots=True)
class Key:
    """The properties that a configuration depends on."""

    device: str  # a prefix of jax.Device.device_kind
    kv_dtype: str
    head_dim: int
    page_size: int


# Measured entries go here; nothing has been measured on a device yet, so the rules below decide everywhere.
GPU_DECODE: dict[Key, GpuDecode] = {}
GPU_PREFILL: dict[Key, GpuPrefill] = {}
GPU_MOSAIC_PREFILL: dict[Key, GpuMosaicPrefill] = {}
TPU: dict[Key, Tpu] = {}


Config = TypeVar("Config")


def lookup(
    table: Mapping[Key, Config], device: str, kv_dtype: DTypeLike, head_dim: int, page_size: int
) -> Config | None:
    """Return the entry measured for this kind of device, or None."""
    name = jnp.dtype(kv_dtype).name
    for key, config in table.items():
        if device.startswith(key.device) and (key.kv_dtype, key.head_dim, key.page_size) == (name, head_dim, page_size):
            return config
    return None


def device_kind(platform: str) -> str:
    """Return the kind of the platform's first device; empty without one, as when lowering for a device elsewhere."""
    try:
        return str(jax.local_devices(backend=platform)[0].device_kind)
    except RuntimeError:
        return ""


def multiprocessors() -> int:
    """Return the number of multiprocessors of the GPU at hand; without a GPU 132, as an H100 has."""
    try:
        return int(getattr(jax.local_devices(backend="gpu")[0], "core_count", None) or 132)
    except RuntimeError:
        return 132


def compute_capability() -> float | None:
    """Return the compute capability of the GPU at hand, such as 9.0; None without a GPU."""
    try:
        return float(getattr(jax.local_devices(backend="gpu")[0], "compute_capability", "nan"))
    except (RuntimeError, ValueError):
        return None


def _power_of_two(limit: int, least: int, most: int) -> int:
    """Return the largest power of two <= limit, clipped to [least, most]."""
    return max(least, min(most, 1 << (max(limit, 1).bit_length() - 1)))


def gpu_decode_rule(kv_dtype: DTypeLike, head_dim: int) -> GpuDecode:
    """Take 32 KiB of keys and values per stage: three fit the 99 KiB that any GPU since Ampere gives to a program."""
    row = 2 * _power_of_two(2 * head_dim - 1, 16, 1024) * jnp.dtype(kv_dtype).itemsize
    return GpuDecode(block_k=_power_of_two(32768 // row, 16, 128), num_warps=4, num_stages=3)


def gpu_prefill_rule(q_dtype: DTypeLike, head_dim: int, rows: int) -> GpuPrefill:
    """Take 128 rows, which keep the tensor cores busy; larger heads, float32 and short chunks get smaller tiles.

    Checked by compiling for 8.0 and 9.0: these are the largest tiles that spill no registers to speak of (< 100 bytes).
    """
    if jnp.dtype(q_dtype).itemsize == 4:
        if head_dim > 128:
            tile = GpuPrefill(block_m=16, block_k=32, num_warps=8, num_stages=1)
        elif head_dim > 64:
            tile = GpuPrefill(block_m=32, block_k=16, num_warps=4, num_stages=1)
        else:
            tile = GpuPrefill(block_m=64, block_k=32, num_warps=4, num_stages=2)
    elif head_dim > 128:
        tile = GpuPrefill(block_m=64, block_k=32, num_warps=8, num_stages=2)
    else:
        tile = GpuPrefill(block_m=128, block_k=64, num_warps=8, num_stages=3)
    return replace(tile, block_m=_power_of_two(2 * rows - 1, 16, tile.block_m))


def gpu_decode(kv_dtype: DTypeLike, head_dim: int, page_size: int) -> GpuDecode:
    entry = lookup(GPU_DECODE, device_kind("gpu"), kv_dtype, head_dim, page_size)
    return entry or gpu_decode_rule(kv_dtype, head_dim)


def gpu_prefill(q_dtype: DTypeLike, kv_dtype: DTypeLike, head_dim: int, page_size: int, rows: int) -> GpuPrefill:
    """Return the tile for a call of `rows` rows, tokens × group: measured for this device, or by the rule."""
    entry = lookup(GPU_PREFILL, device_kind("gpu"), kv_dtype, head_dim, page_size)
    return entry or gpu_prefill_rule(q_dtype, head_dim, rows)


def gpu_mosaic_prefill_rule(head_dim: int) -> GpuMosaicPrefill:
    """Take the largest blocks that spill no registers (by compiling), four: 194 of an H100's 227 KiB, or 162."""
    return GpuMosaicPrefill(block_k=128 if head_dim <= 64 else 64, stages=4)


def gpu_mosaic_prefill(kv_dtype: DTypeLike, head_dim: int, page_size: int) -> GpuMosaicPrefill:
    entry = lookup(GPU_MOSAIC_PREFILL, device_kind("gpu"), kv_dtype, head_dim, page_size)
    return entry or gpu_mosaic_prefill_rule(head_dim)


def tpu_rule(kv_dtype: DTypeLike, head_dim: int, page_size: int, heads: int, kv_heads: int) -> Tpu:
    """Take buffers of about 1 MiB, tiles of 512 rows per kv head, 2048 in all: within 16 MiB of VMEM (by compiling)."""
    row = 2 * kv_heads * max(128, head_dim) * jnp.dtype(kv_dtype).itemsize
    tokens = min(64, 512 * kv_heads // heads, 2048 // heads)
    return Tpu(tokens=max(1, tokens), keys=max(page_size, _power_of_two(2**20 // row, 128, 512)))


def tpu(kv_dtype: DTypeLike, head_dim: int, page_size: int, heads: int, kv_heads: int) -> Tpu:
    entry = lookup(TPU, device_kind("tpu"), kv_dtype, head_dim, page_size)
    return entry or tpu_rule(kv_dtype, head_dim, page_size, heads, kv_heads)


def gpu_extra_items(config: GpuDecode, rows: int, kv_heads: int, longest: int) -> int:
    """Return the items of decode work beyond one per row of at most `longest` keys; 0 where splitting never pays.

    They fill the GPU by themselves, whatever the rows: all rows but one may be short.
    """
    pieces = longest // (config.block_k * config.least_blocks)  # of a row, at most
    items = -(-config.waves * multiprocessors() // kv_heads)
    return max(0, min(items, rows * (pieces - 1)))
