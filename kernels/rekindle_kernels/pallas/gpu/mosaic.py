"""GPU attention whose prefill is written in Mosaic GPU, for Hopper. Decode uses the Triton kernel.

No GPU has run it yet, so it is used only by its name.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rekindle_kernels import tuning
from rekindle_kernels.ops.attention import AttentionCall, AttentionInputs, AttentionOptions
from rekindle_kernels.ops.registry import Implementation
from rekindle_kernels.pallas.gpu import attention as triton
from rekindle_kernels.pallas.gpu.mosaic_prefill import prefill

TYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)  # rows of which lie at multiples of 128 bytes, as the copies need them
OLDEST = 0, 12  # the oldest version of JAX whose Mosaic GPU runs the kernel


def supports(call: AttentionCall) -> str | None:
    """Return the reason why the kernel can't serve the call, or None."""
    if jax.__version_info__ < OLDEST:
        return f"jax is {jax.__version__}; the kernel is written for the Mosaic GPU of 0.12"
    if call.q_dtype.name not in TYPES or call.kv_dtype != call.q_dtype:
        return f"queries are {call.q_dtype.name} and pages {call.kv_dtype.name}, not both {' or '.join(TYPES)}"
    if call.head_dim not in HEAD_DIMS:
        return f"head_dim {call.head_dim} is not {' or '.join(map(str, HEAD_DIMS))}"
    block = tuning.gpu_mosaic_prefill(call.kv_dtype, call.head_dim, call.page_size).block_k
    if call.page_size % 8 or (block % call.page_size and call.page_size % block):
        return f"page size {call.page_size} is not a multiple of 8 that divides {block} or is a multiple of it"
    capability = tuning.compute_capability()
    if capability is not None and not 9.0 <= capability < 10.0:
        return f"the GPU has compute capability {capability}; the kernel's matrix instructions are those of 9.0"
    return triton.supports(call)


def attention(
    inputs: AttentionInputs,
    options: AttentionOptions,
    *,
    prefill_config: tuning.GpuMosaicPrefill | None = None,
    interpret: Any = False,  # True, or JAX's InterpretGPUParams
) -> jax.Array:
    """Compute `ops.attention.paged_attention`. Block sizes default to those of `tuning`."""
    q, kv, rows, emulated = inputs.q, inputs.kv, options.decode_rows, bool(interpret)
    paged, scoring = triton.paged_and_scoring(inputs, options, interpret=emulated)
    out = triton.decode_rows(inputs, paged, scoring, rows, interpret=emulated) if rows else None
    if q.shape[0] > rows:
        config = prefill_config or tuning.gpu_mosaic_prefill(kv.dtype, q.shape[-1], kv.page_size)
        with jax.named_scope("prefill"):
            out = prefill(inputs, paged, out, decode_rows=rows, scoring=scoring, config=config, interpret=interpret)
    return jnp.zeros_like(q) if out is None else out


ATTENTION = Implementation("pallas_mosaic_gpu", attention, supports)
INTERPRETED = Implementation("pallas_mosaic_gpu_interpret", functools.partial(attention, interpret=True), supports)
