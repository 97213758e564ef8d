"""The key of a compiled program: a digest of all its causes. Equal keys mean equal code, in any process.

The key is made of causes (sources, versions, device, model, config), not of the HLO, because computing the HLO
means tracing, which a stored program avoids. Everything that is not known to be irrelevant is part of the key.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax
import jaxlib

import rekindle_kernels
from rekindle._src.core.config import EngineConfig
from rekindle._src.models.loading.fingerprint import files_digest

# Options that change neither a shape nor a program. All others are part of the key, so a new one is safe by default.
NOT_IN_PROGRAMS = frozenset(
    {
        "cache_dir", "capture_memory", "device_memory", "disk_memory", "generation_config", "host_memory", "log_every",
        "max_queue", "policy", "precompile", "prefix_cache", "prompt_lookup", "quiet", "restore", "seed",
        "shared_cache", "step_timeout", "structured",
        "mesh", "processes", "coordinator",  # a key names the devices themselves
    }
)  # fmt: skip
JAX_OPTIONS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion", "jax_debug_nans", "jax_debug_infs", "jax_disable_jit", "jax_platforms",
)  # fmt: skip
SOURCES = ("models", "programs", "execution")  # folders of the toolkit; the kernels are added as a whole


def config_fields(config: EngineConfig) -> dict[str, Any]:
    """Return the fields of a resolved config that programs depend on."""
    fields = dataclasses.fields(config)
    return {field.name: getattr(config, field.name) for field in fields if field.name not in NOT_IN_PROGRAMS}


def environment() -> dict[str, Any]:
    """Return everything outside the session that programs depend on: sources, versions, device, processor, flags."""
    device = default_device()
    return {
        "sources": source_digest(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": device.platform,
        "platform_version": device.client.platform_version,
        "device_kind": device.device_kind,
        "devices": len(jax.devices()),
        "machine": platform.machine(),
        "cpu": cpu_features(),
        "threads": usable_cpus(),  # XLA:CPU splits work at compile time
        "kernels": rekindle_kernels.environment(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "libtpu_flags": os.environ.get("LIBTPU_INIT_ARGS", ""),
        "options": {name: str(getattr(jax.config, name, None)) for name in JAX_OPTIONS},
    }


def default_device() -> Any:
    """Return the device of computations that name none."""
    device = getattr(jax.config, "jax_default_device", None) or jax.local_devices()[0]
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device


def digest(fields: dict[str, Any]) -> str:
    """Return a digest of `fields`, the same in every process for equal fields."""
    text = json.dumps(fields, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def cpu_features() -> str:
    """Return a digest of the processor's instruction sets, since host code is compiled for exactly these."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next(line for line in lines if line.startswith(("flags", "Features")))
        text = " ".join(sorted(flags.split(":", 1)[1].split()))
    except (OSError, StopIteration):
        text = platform.processor()
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@functools.cache
def source_digest() -> str:
    """Return a digest of every source file that programs are made from."""
    private = Path(__file__).parent.parent
    folders = [*(private / name for name in SOURCES), Path(rekindle_kernels.__file__).parent]
    return files_digest(path for folder in folders for path in sorted(folder.rglob("*.py")))
