"""The keyword options of `open()` and of requests, as type checkers and editors see them.

`tests/core/test_options.py` compares every name and type with the dataclasses `Sampling` and `EngineConfig`. `None` for
an option means its default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict

from rekindle._src.core.mesh_shape import DeviceMesh

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVDType = Literal["auto", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]
ShortDType = Literal["bf16", "f16", "fp16", "half", "f32", "fp32"]


class NamedDType(Protocol):
    """A dtype of numpy's, such as `np.dtype("float32")`."""

    @property
    def name(self) -> str: ...
    @property
    def itemsize(self) -> int: ...


DTypeLike = DType | ShortDType | type[Any] | NamedDType  # types are those of numpy and JAX, such as jnp.bfloat16
KVDTypeLike = KVDType | ShortDType | Literal["fp8", "f8", "i8"] | type[Any] | NamedDType
QuantizeKind = Literal["int8", "int8-weight", "int4", "int4-32", "int4-64", "int4-128"]
QuantizePart = Literal["attention", "mlp", "experts", "embedding", "head"]
Quantize = QuantizeKind | Mapping[QuantizePart, QuantizeKind | None]
Policy = Literal["fcfs", "sjf", "priority", "lpm", "dfs-weight", "lof", "random"]
Precompile = Literal["auto", "all", "lazy", "background"]
GenerationConfig = Literal["auto", "greedy"]
Mesh = int | Mapping[str, int] | DeviceMesh


class SamplingOptions(TypedDict, total=False):
    """Keyword options of one request except `n`, which decides the type of the result; see `Sampling`."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: str | Sequence[str] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop: bool | None
    ignore_eos: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    priority: int | None
    processors: str | Sequence[str] | None
    salt: str | None
    schema: Any | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    json: bool | None
    lenient: bool | None
    whitespace_flexible: bool | None


class OpenOptions(TypedDict, total=False):
    """Keyword options of `open()` and `open_sync()`; see `EngineConfig`."""

    dtype: DTypeLike | None
    kv_dtype: KVDTypeLike | None
    quantize: Quantize | None
    max_requests: int | None
    max_tokens_per_step: int | None
    max_model_len: int | None
    page_size: int | None
    device_pages: int | None
    device_memory: int | None
    host_memory: int | None
    disk_memory: int | None
    cache_dir: str | os.PathLike[str] | None
    shared_cache: str | os.PathLike[str] | None
    restore: str | None
    policy: Policy | None
    precompile: Precompile | None
    max_queue: int | None
    prefix_cache: bool | None
    prompt_lookup: int | None
    deterministic: bool | None
    kernels: str | None
    seed: int | None
    log_every: int | None
    step_timeout: float | None
    quiet: bool | None
    generation_config: GenerationConfig | None
    structured: bool | None
    mesh: Mesh | None
    processes: int | None
    coordinator: str | None
