"""GPU attention over pages read in place: decode and chunked prefill, both Triton-backed Pallas kernels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from rekindle_kernels import tuning
from rekindle_kernels.calls import Call, Implementation, LayerKV
from rekindle_kernels.pages import as_values
from rekindle_kernels.pallas_gpu_block import Paged, Scoring
from rekindle_kernels.pallas_gpu_decode import decode
from rekindle_kernels.pallas_gpu_prefill import prefill
from rekindle_kernels.pallas_gpu_write import write_kv

QUERY_TYPES = ("bfloat16", "float16", "float32")
PAGE_TYPES = (*QUERY_TYPES, "int8", "float8_e4m3fn", "float8_e5m2")


def supports(call: Call) -> str | None:
    """The reason why these kernels can't serve the call, or None."""
    if call.q_dtype.name not in QUERY_TYPES:
        return f"queries are {call.q_dtype.name}, not one of {', '.join(QUERY_TYPES)}"
    if call.kv_dtype.name not in PAGE_TYPES:
        return f"pages are {call.kv_dtype.name}, not one of {', '.join(PAGE_TYPES)}"
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
    q: jax.Array,
    kv: LayerKV,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_prefills: jax.Array,
    *,
    decode_rows: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    decode_config: tuning.GpuDecode | None = None,
    prefill_config: tuning.GpuPrefill | None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`paged_attention`; block sizes and splits come from `tuning` unless they are given."""
    tokens, heads, head_dim = q.shape
    pages = as_values(kv.pages, kv)
    if 2**31 < pages.nbytes <= 2**32 and pages.dtype.itemsize == 1:
        # Pallas counts elements in 32 signed bits up to 4 GiB.
        raise ValueError(
            f"{pages.nbytes / 2**30:.1f} GiB of one-byte pages in one layer; make it at most 2 GiB or over 4"
        )
    paged = Paged(pages, kv.scales, page_table)
    scoring = Scoring(float(scale), soft_cap, sliding_window, emulated=bool(interpret))
    out = None
    if decode_rows:
        config = decode_config or tuning.gpu_decode(kv.dtype, head_dim, kv.page_size)
        longest = min(page_table.shape[1] * kv.page_size, sliding_window or 2**31)
        splits = splits or tuning.gpu_splits(config, decode_rows * kv.kv_heads, longest)
        with jax.named_scope("decode"):
            out = decode(
                q, paged, kv_lens, sinks,
                decode_rows=decode_rows, scoring=scoring, config=config, splits=splits, interpret=interpret,
            )  # fmt: skip
    if tokens > decode_rows:
        rows = (tokens - decode_rows) * (heads // kv.kv_heads)
        tile = prefill_config or tuning.gpu_prefill(q.dtype, kv.dtype, head_dim, kv.page_size, rows)
        with jax.named_scope("prefill"):
            out = prefill(
                q, paged, kv_lens, cu_q_lens, num_prefills, sinks, out,
                decode_rows=decode_rows, scoring=scoring, config=tile, interpret=interpret,
            )  # fmt: skip
    return jnp.zeros_like(q) if out is None else out


IMPLEMENTATIONS = {
    "pallas_gpu": Implementation("pallas_gpu", attention, supports, write_kv),
    # The same kernels as plain JAX operations, on any device: slow, for tests.
    "pallas_gpu_interpret": Implementation(
        "pallas_gpu_interpret",
        functools.partial(attention, interpret=True),
        supports,
        functools.partial(write_kv, interpret=True),
    ),
}
