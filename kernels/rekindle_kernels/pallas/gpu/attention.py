"""GPU attention over pages read in place: decode and chunked prefill, both Triton-backed Pallas kernels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from rekindle_kernels import tuning
from rekindle_kernels.ops.attention import AttentionCall, AttentionInputs, AttentionOptions
from rekindle_kernels.ops.registry import Implementation
from rekindle_kernels.pages import as_values
from rekindle_kernels.pallas.gpu.block import Paged, Scoring
from rekindle_kernels.pallas.gpu.decode import decode
from rekindle_kernels.pallas.gpu.prefill import prefill

QUERY_TYPES = ("bfloat16", "float16", "float32")
PAGE_TYPES = (*QUERY_TYPES, "int8", "float8_e4m3fn", "float8_e5m2")


def supports(call: AttentionCall) -> str | None:
    """Return the reason why these kernels can't serve the call, or None."""
    if call.q_dtype.name not in QUERY_TYPES:
        return f"queries are {call.q_dtype.name}, not one of {', '.join(QUERY_TYPES)}"
    if call.kv_dtype.name not in PAGE_TYPES:
        return f"pages are {call.kv_dtype.name}, not one of {', '.join(PAGE_TYPES)}"
    if not call.causal:
        return "queries see the keys behind them"
    if call.value_size is not None:
        return "values are a part of the keys"
    if call.head_dim > 256:
        return f"head_dim {call.head_dim} is more than 256, whose tiles overflow the registers"
    capability = tuning.compute_capability()
    if capability is not None and capability < 8.0:
        # Compiled for 7.5 the dots become scalar code: 27 KiB of spilled registers per thread, a minute of compiling.
        return f"the GPU has compute capability {capability}; Triton's matrix products need 8.0"
    if capability is not None and capability < 8.9 and call.kv_dtype.name == "float8_e4m3fn":
        return f"the GPU has compute capability {capability}; float8_e4m3fn needs 8.9, use float8_e5m2 or int8"
    return None


def attention(
    inputs: AttentionInputs,
    options: AttentionOptions,
    *,
    decode_config: tuning.GpuDecode | None = None,
    prefill_config: tuning.GpuPrefill | None = None,
    extra: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute `ops.attention.paged_attention`. Block sizes and `extra` items of work default to those of `tuning`."""
    q, kv, rows = inputs.q, inputs.kv, options.decode_rows
    tokens, heads, head_dim = q.shape
    paged, scoring = paged_and_scoring(inputs, options, interpret=interpret)
    out = None
    if rows:
        out = decode_rows(inputs, paged, scoring, rows, config=decode_config, extra=extra, interpret=interpret)
    if tokens > rows:
        pairs = (tokens - rows) * (heads // kv.kv_heads)
        tile = prefill_config or tuning.gpu_prefill(q.dtype, kv.dtype, head_dim, kv.page_size, pairs)
        with jax.named_scope("prefill"):
            out = prefill(inputs, paged, out, decode_rows=rows, scoring=scoring, config=tile, interpret=interpret)
    return jnp.zeros_like(q) if out is None else out


def paged_and_scoring(inputs: AttentionInputs, options: AttentionOptions, *, interpret: bool) -> tuple[Paged, Scoring]:
    """Return the pages and the scoring in the kernels' form."""
    pages = as_values(inputs.kv.pages, inputs.kv)
    if 2**31 < pages.nbytes <= 2**32 and pages.dtype.itemsize == 1:
        # Pallas counts elements in 32 signed bits up to 4 GiB.
        raise ValueError(
            f"{pages.nbytes / 2**30:.1f} GiB of one-byte pages in one layer; make it at most 2 GiB or over 4"
        )
    scoring = Scoring(float(options.scale), options.soft_cap, options.sliding_window, emulated=interpret)
    return Paged(pages, inputs.kv.scales, inputs.page_table), scoring


def decode_rows(
    inputs: AttentionInputs,
    paged: Paged,
    scoring: Scoring,
    rows: int,
    *,
    config: tuning.GpuDecode | None = None,
    extra: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute attention of the decode rows: [T, H, D], where only rows 0..R-1 are written."""
    kv = inputs.kv
    config = config or tuning.gpu_decode(kv.dtype, inputs.q.shape[-1], kv.page_size)
    longest = min(inputs.page_table.shape[1] * kv.page_size, scoring.sliding_window or 2**31)
    if extra is None:
        extra = tuning.gpu_extra_items(config, rows, kv.kv_heads, longest)
    with jax.named_scope("decode"):
        return decode(inputs, paged, decode_rows=rows, scoring=scoring, config=config, extra=extra, interpret=interpret)


ATTENTION = Implementation("pallas_gpu", attention, supports)
# The same kernels as plain JAX operations, on any device: slow, for tests.
INTERPRETED = Implementation("pallas_gpu_interpret", functools.partial(attention, interpret=True), supports)
