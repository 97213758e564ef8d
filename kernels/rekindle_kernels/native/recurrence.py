"""Layers with a state as native calls: convolutions, the gated delta rule, Mamba-2's scan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rekindle_kernels.native.calling import call
from rekindle_kernels.native.kernel_spec import KernelSpec
from rekindle_kernels.native.kernel_table import CONVOLUTION, GATED_DELTA, SELECTIVE_SCAN
from rekindle_kernels.ops.recurrence import (
    ConvolutionOptions,
    DeltaOptions,
    DeltaWeights,
    RaggedBatch,
    ScanOptions,
    ScanWeights,
)

KEYS, VALUES = 16, 32  # what sizes of keys and of values have to be multiples of
Results = tuple[jax.Array, jax.Array]  # of the tokens, and the states after them


def convolve(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    tails: jax.Array,
    batch: RaggedBatch,
    options: ConvolutionOptions,
) -> Results:
    """Implement `ops.recurrence.causal_convolution`."""
    settings = {
        "first": options.first,
        "before": -1 if options.before is None else options.before,
        "behind": -1 if options.behind is None else options.behind,
        "silu": options.silu,
    }
    operands = {"x": x, "weight": weight.astype(jnp.float32), "bias": bias, "tails": tails}
    return _call(CONVOLUTION, operands, settings, batch)


def gated_delta(
    qkv: jax.Array,
    projected: jax.Array,
    weights: DeltaWeights,
    states: jax.Array,
    batch: RaggedBatch,
    options: DeltaOptions,
) -> Results:
    """Implement `ops.recurrence.gated_delta`."""
    settings = {name: getattr(options, name) for name in ("key_heads", "gate", "beta", "step", "eps")}
    operands = {"qkv": qkv, "projected": projected, "states": states, **weights._asdict()}
    return _call(GATED_DELTA, operands, settings, batch, {"M": states.shape[1] * states.shape[3]})


def selective_scan(
    channels: jax.Array,
    projected: jax.Array,
    weights: ScanWeights,
    states: jax.Array,
    batch: RaggedBatch,
    options: ScanOptions,
) -> Results:
    """Implement `ops.recurrence.selective_scan`."""
    settings = {"groups": options.groups, "step": options.step}
    operands = {"channels": channels, "projected": projected, "states": states, **weights._asdict()}
    return _call(SELECTIVE_SCAN, operands, settings, batch, {"M": states.shape[1] * states.shape[3]})


def _call(
    spec: KernelSpec,
    operands: dict[str, Any],
    settings: dict[str, Any],
    batch: RaggedBatch,
    sizes: dict[str, int] | None = None,
) -> Results:
    """Call a kernel with its operands, and with the sequences of the batch."""
    own = jnp.arange(batch.sequences, dtype=jnp.int32)
    reads, writes = (own, own) if batch.slots is None else batch.slots
    sequences = {
        "reads": reads,
        "writes": writes,
        "lens": batch.lengths,
        "ends": batch.cu_lengths,
        "prompts": batch.num_prefills,
    }
    y, after = call(spec.variant(), operands | sequences, settings | {"decode_rows": batch.decode_rows}, sizes)
    return y, after
