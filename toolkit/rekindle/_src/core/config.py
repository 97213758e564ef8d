"""`EngineConfig`: the options of a session. Validated once, here."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rekindle._src.core import foreign_names, html
from rekindle._src.core.dtypes import DTYPES, KV_DTYPES, checked_dtype
from rekindle._src.core.mesh_shape import checked_mesh
from rekindle._src.core.option_checks import advice, defaults_of
from rekindle._src.core.options import (
    DType,
    GenerationConfig,
    KVDType,
    Mesh,
    Policy,
    Precompile,
    SamplingOptions,
)
from rekindle._src.core.process_options import check_processes
from rekindle._src.core.quantize_plan import checked_quantize
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from typing import Unpack

    from rekindle._src.core.options import OpenOptions

POLICIES: tuple[Policy, ...] = get_args(Policy)
PRECOMPILE: tuple[Precompile, ...] = get_args(Precompile)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EngineConfig(html.Record):
    """How a session runs: the keyword options of `open()`. `None` for an option means its default.

    "auto" and None are resolved once, when the session opens; `session.config` has the result.

    Options:
        dtype ("auto"): dtype of the weights, as text or as numpy's or JAX's dtype; "auto" is the checkpoint's on GPU
            and TPU, bfloat16 on CPU.
        kv_dtype ("auto"): dtype of cached keys and values; "auto" follows dtype. "int8" and "float8_e4m3fn" take about
            half of 16 bits, with a scale for each token and head.
        quantize (None): "int8" for weights and activations, "int8-weight" for weights alone, "int4" for four bits with
            embedding and head in eight; "int4-32" and -128 choose the group. A dict says it by part: "attention",
            "mlp", "experts", "embedding" and "head"; other parts are not quantised. None keeps the groups of a
            quantised checkpoint as they are.
        max_requests (16): sequences that run at once.
        max_tokens_per_step (512): tokens that decoding and prefill chunks share in one step.
        max_model_len (None): tokens of prompt and completion together; None is the model's own, at most 4096.
        page_size (None): tokens per KV page, a power of two; None suits the platform's kernels.
        device_pages (None): KV pages on the device; None follows device_memory.
        device_memory (None): bytes for KV pages; None is a tenth of RAM on CPU, all free memory on GPU and TPU.
        host_memory (1 GiB): bytes of host memory for pages that left the device; 0 turns the tier off.
        disk_memory (4 GiB): bytes of disk for pages and snapshots; 0 turns the tier off.
        cache_dir (None): where programs, pages and weights persist; None is $REKINDLE_CACHE, else the user's cache,
            where compiled kernels, which all sessions share, always are.
        shared_cache (None): a folder or URL (s3://…, gs://…) behind cache_dir that machines share; None is
            $REKINDLE_SHARED_CACHE, if it is set.
        restore (None): name of a snapshot to restore, or "auto" for that of the last session.
        policy ("fcfs"): order of admission: "fcfs", "sjf", "priority", "lpm", "dfs-weight", "lof" or "random".
        precompile ("auto"): when programs compile: "all", "lazy" or "background"; "auto" is "background" in notebooks.
        max_queue (1024): requests that may wait; beyond, generate() waits and submit() raises QueueFull.
        prefix_cache (True): share the pages of equal beginnings of prompts.
        prompt_lookup (0): tokens that a request may draft from its own text, checked beside the next one; 0 is off.
        deterministic (False): the same prompt and seed give the same tokens, whatever runs beside them (CPU only).
        kernels (None): a rekindle_kernels implementation of attention; None picks the first that fits.
        seed (None): seeds the draw of per-request seeds and policy="random".
        log_every (0): steps between two log lines; 0 is quiet.
        step_timeout (60.0): seconds after which a step is reported as slow.
        quiet (False): no progress bars.
        generation_config ("auto"): "auto" samples as the checkpoint's generation_config.json asks; "greedy" does not.
        structured (False): precompile also the programs of structured output; otherwise its first request does.
        mesh (None): devices that share the model: 4, {"model": 4, "expert": 2} or a jax.sharding.Mesh; None is one.
            {"data": 2, "model": 4} has two such groups, each with its own pages, which share the requests.
        processes (1): processes that share the model, each with as many devices of `mesh`; the others run
            `rekindle follow`.
        coordinator (None): "host:port" at which this process waits for the others.
    """

    dtype: DType = "auto"
    kv_dtype: KVDType = "auto"
    quantize: str | None = None
    max_requests: int = 16
    max_tokens_per_step: int = 512
    max_model_len: int | None = None
    page_size: int | None = None
    device_pages: int | None = None
    device_memory: int | None = None
    host_memory: int = 1 << 30
    disk_memory: int = 4 << 30
    cache_dir: str | None = None
    shared_cache: str | None = None
    restore: str | None = None
    policy: Policy = "fcfs"
    precompile: Precompile = "auto"
    max_queue: int = 1024
    prefix_cache: bool = True
    prompt_lookup: int = 0
    deterministic: bool = False
    kernels: str | None = None
    seed: int | None = None
    log_every: int = 0
    step_timeout: float = 60.0
    quiet: bool = False
    generation_config: GenerationConfig = "auto"
    structured: bool = False
    mesh: Mesh | None = None
    processes: int = 1
    coordinator: str | None = None

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[OpenOptions]) -> None: ...

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name, default in _ENGINE_DEFAULTS:
            if getattr(self, name) is None:
                put(self, name, default)
        for name, low in _WHOLE:
            value = getattr(self, name)
            if value is None:
                continue
            try:
                if isinstance(value, bool):
                    raise TypeError
                whole = value.__index__()
            except Exception:
                raise ConfigError(name, value, "must be a whole number", "Pass an int") from None
            if whole < low:
                raise ConfigError(name, value, f"must be at least {low}", f"Use {low} or more, or leave it out")
            put(self, name, whole)
        put(self, "dtype", checked_dtype("dtype", self.dtype, DTYPES))
        put(self, "kv_dtype", checked_dtype("kv_dtype", self.kv_dtype, KV_DTYPES))
        for name, known in _CHOICES:
            value = getattr(self, name)
            if not isinstance(value, str) or value not in known:
                matches = difflib.get_close_matches(value, known, n=1) if isinstance(value, str) else []
                close = f"Did you mean {matches[0]!r}? " if matches else ""
                raise ConfigError(name, value, "is not known", f"{close}Use one of {', '.join(map(repr, known))}")
        for name in ("prefix_cache", "deterministic", "quiet", "structured"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    name, getattr(self, name), "must be True or False", f"Pass {name}=True, or leave it out"
                )
        for name in ("cache_dir", "shared_cache", "restore", "kernels"):
            value, path = getattr(self, name), name in ("cache_dir", "shared_cache")
            if path and isinstance(value, os.PathLike):
                value = os.fspath(value)
                put(self, name, value)
            if not (value is None or isinstance(value, str)):
                raise ConfigError(name, value, "is not text", "Pass a str" + " or a Path" * path)
        if isinstance(self.step_timeout, bool) or not isinstance(self.step_timeout, (int, float)):
            raise ConfigError("step_timeout", self.step_timeout, "is not a number of seconds", "Pass a float")
        if not self.step_timeout >= 0:
            raise ConfigError(
                "step_timeout", self.step_timeout, "must be at least 0", "Use a number of seconds, such as 60"
            )
        if self.page_size is not None and self.page_size & (self.page_size - 1):
            raise ConfigError("page_size", self.page_size, "is not a power of two", "Use 16, 32, 64 or 128")
        put(self, "mesh", checked_mesh(self.mesh))
        put(self, "quantize", checked_quantize(self.quantize))
        check_processes(self.processes, self.coordinator, self.mesh)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Return a config of keyword options; an unknown one raises and names the likely one."""
        known = cls.__dataclass_fields__
        for name in options:
            if name not in known:
                elsewhere = ""
                if name in SamplingOptions.__annotations__ or name == "n":
                    elsewhere = f"Pass it with the request: session.generate(prompt, {name}=…)"
                fix = advice(name, known, foreign_names.OPEN, elsewhere)
                raise ConfigError(name, options[name], "is not an option of open()", fix)
        return cls(**options)


_ENGINE_DEFAULTS = defaults_of(EngineConfig)
_CHOICES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("policy", POLICIES),
    ("precompile", PRECOMPILE),
    ("generation_config", get_args(GenerationConfig)),
)
_WHOLE = (
    ("max_requests", 1), ("max_tokens_per_step", 1), ("max_model_len", 2), ("page_size", 8), ("device_pages", 2),
    ("device_memory", 0), ("host_memory", 0), ("disk_memory", 0), ("max_queue", 1), ("seed", 0), ("log_every", 0),
    ("prompt_lookup", 0), ("processes", 1),
)  # fmt: skip


def cache_folder(cache_dir: str | None = None) -> Path:
    """Return the folder of programs, pages, snapshots and weights: `cache_dir`, $REKINDLE_CACHE or the user's cache."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    if os.environ.get("REKINDLE_CACHE"):
        return Path(os.environ["REKINDLE_CACHE"]).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rekindle"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "rekindle"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rekindle"
