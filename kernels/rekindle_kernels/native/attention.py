"""The "native" implementation of `paged_attention`: decode and prefill read pages where they lie."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp

from rekindle_kernels.native.build import builds, unavailable_reason
from rekindle_kernels.native.calling import call
from rekindle_kernels.native.cpu import has_feature
from rekindle_kernels.native.kernel_spec import Variant
from rekindle_kernels.native.kernel_table import DECODE, PREFILL
from rekindle_kernels.native.products import DTYPES
from rekindle_kernels.native.rope_kv import LANES
from rekindle_kernels.ops.attention import AttentionCall, AttentionInputs, AttentionOptions

STRETCH = 256  # keys of one piece of work where rows are few
FAR = 1024  # where there are pieces enough for all threads without cutting
FEW = 16  # rows x kv heads
ROWS_PER_TILE = 192  # of prefill: queries x query heads of one kv head


def paged_attention(inputs: AttentionInputs, options: AttentionOptions) -> jax.Array:
    """Decode rows, then prefill tokens, each into its part of one result: a slice or a concatenation would copy.

    With `deterministic`, prefill's kernel takes all of them: it gives a query the same result whatever else is
    computed beside it, since it passes over the keys in tiles that are counted from the first key.
    """
    q, kv, deterministic = inputs.q, inputs.kv, options.deterministic
    (T, H, D), R = q.shape, options.decode_rows
    if min(T, inputs.kv_lens.shape[0]) < R or H % kv.kv_heads:
        raise ValueError(
            f"{R} decode rows of {T} tokens and {inputs.kv_lens.shape[0]} lengths, "
            f"{H} query heads of {kv.kv_heads} kv heads: every decode row needs a token and a length, "
            "and every kv head as many query heads"
        )
    operands = {
        "q": q.astype(jnp.float32),
        "pages": kv.pages,
        "scales": kv.scales,
        "page_table": inputs.page_table,
        "lens": inputs.kv_lens,
        "sinks": None if inputs.sinks is None else inputs.sinks.astype(jnp.float32),
    }
    settings = {
        "decode_rows": R,
        "window": options.sliding_window or 0,
        "scale": options.scale,
        "soft_cap": options.soft_cap or 0,
    }
    out = None
    if R and not deterministic:
        keys = STRETCH if R * kv.kv_heads < FEW else FAR
        (out,) = call(DECODE.variant(kv.dtype.name, D), operands, {**settings, "keys": keys})
    if T > R or deterministic:
        queries = max(16, ROWS_PER_TILE // (H // kv.kv_heads))
        prompts = {
            "ends": inputs.cu_q_lens, "prompts": inputs.num_prefills, "decoded": out, "unread": inputs.unread,
        }  # fmt: skip
        settings |= {"queries": queries, "together": deterministic, "amx": has_amx()}
        (out,) = call(PREFILL.variant(kv.dtype.name, D), {**operands, **prompts}, settings)
    assert out is not None, "a step without tokens"
    return out.astype(q.dtype)


def has_amx() -> bool:
    """True if prompts over pages of bfloat16 may use AMX; Linux gives it to a process that asks."""
    return has_feature("amx-bf16") and sys.platform == "linux"


def supports(wanted: AttentionCall) -> str | None:
    if wanted.platform != "cpu":
        return f"it runs on a CPU, not on {wanted.platform}"
    if wanted.kv_dtype.name not in DTYPES:
        return f"pages of {wanted.kv_dtype.name} are none of {', '.join(DTYPES)}"
    if not wanted.causal:
        return "queries see the keys behind them"
    if wanted.value_size is not None:
        return "values are a part of the keys"
    if wanted.head_dim % LANES:
        return f"the head size {wanted.head_dim} is not a multiple of {LANES}"
    reason = unavailable_reason()
    if reason is None and not all(builds(kernel.name) for kernel in _parts(wanted)):
        return "its kernels can't be built here: the log says why"
    return reason


def _parts(wanted: AttentionCall) -> list[Variant]:
    """Return the kernels that a call needs."""
    if wanted.deterministic:
        return [PREFILL.variant(wanted.kv_dtype.name, wanted.head_dim)]
    specs = [DECODE] * (wanted.decode_rows > 0) + [PREFILL] * (wanted.tokens > wanted.decode_rows)
    return [spec.variant(wanted.kv_dtype.name, wanted.head_dim) for spec in specs]
