"""Layers with a state as native calls: convolutions, delta rules, Mamba-2's scan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.build import builds
from rekindle_kernels.native.calling import NOT_BUILT, call, differentiable, unavailable
from rekindle_kernels.native.kernel_table import KernelSpec
from rekindle_kernels.ops.recurrence import (
    ChannelDeltaOptions,
    ConvolutionInputs,
    ConvolutionOptions,
    DeltaOptions,
    HeadInputs,
    RaggedBatch,
    RecurrenceCall,
    ScanOptions,
)
from rekindle_kernels.ops.registry import Implementation
from rekindle_kernels.xla import recurrence as plain_recurrence

KEYS, VALUES = 16, 32  # what sizes of keys and of values have to be multiples of
Results = tuple[jax.Array, jax.Array]  # of the tokens, and the states after them


def convolve(inputs: ConvolutionInputs, options: ConvolutionOptions) -> Results:
    """Implement `ops.recurrence.causal_convolution`."""
    settings = {
        "first": options.first,
        "before": -1 if options.before is None else options.before,
        "behind": -1 if options.behind is None else options.behind,
        "silu": options.silu,
    }
    x, weight, bias, tails, batch = inputs
    operands = {"x": x, "weight": weight.astype(jnp.float32), "bias": bias, "tails": tails}
    return _call(kernel_table.CONVOLUTION, operands, settings, batch)


def gated_delta(inputs: HeadInputs, options: DeltaOptions) -> Results:
    """Implement `ops.recurrence.gated_delta`."""
    settings = {name: getattr(options, name) for name in ("key_heads", "gate", "beta", "step", "eps")}
    return _of_heads(kernel_table.GATED_DELTA, "qkv", inputs, settings)


def channel_delta(inputs: HeadInputs, options: ChannelDeltaOptions) -> Results:
    """Implement `ops.recurrence.channel_delta`."""
    settings = {name: getattr(options, name) for name in ("gate", "beta", "step", "eps")}
    bound = {"bounded": options.bound is not None, "bound": options.bound or 0.0}
    return _of_heads(kernel_table.CHANNEL_DELTA, "qkv", inputs, settings | bound)


def selective_scan(inputs: HeadInputs, options: ScanOptions) -> Results:
    """Implement `ops.recurrence.selective_scan`."""
    settings = {"groups": options.groups, "step": options.step}
    return _of_heads(kernel_table.SELECTIVE_SCAN, "channels", inputs, settings)


def _of_heads(spec: KernelSpec, rows: str, inputs: HeadInputs, settings: dict[str, Any]) -> Results:
    states = inputs.states
    operands = {rows: inputs.rows, "projected": inputs.projected, "states": states, **inputs.weights._asdict()}
    return _call(spec, operands, settings, inputs.batch, {"M": states.shape[1] * states.shape[3]})


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
    lens, ends, prompts = batch.lengths, batch.cu_lengths, batch.num_prefills
    sequences = {"reads": reads, "writes": writes, "lens": lens, "ends": ends, "prompts": prompts}
    y, after = call(spec.variant(), operands | sequences, settings | {"decode_rows": batch.decode_rows}, sizes)
    return y, after


def recurs(spec: KernelSpec, call: RecurrenceCall) -> str | None:
    """Why a layer with a state can't be native: it takes float32, and states of whole vectors."""
    dtypes = {array.dtype.name for array in (call.x, call.projected, call.state)}
    if dtypes != {"float32"}:
        return f"{' and '.join(sorted(dtypes))} are not float32 alone"
    *_, keys, values = call.state.shape
    whole = values % KEYS == 0 if spec is kernel_table.CONVOLUTION else keys % KEYS == values % VALUES == 0
    if not whole:
        return f"states of {keys} x {values} are not whole vectors"
    return unavailable(call) or (None if builds(spec.variant().name) else NOT_BUILT)


def _recurrent(spec: KernelSpec, run: Callable[..., Results], plain: Implementation) -> Implementation:
    """Return an implementation of a layer with a state; its last argument are static options."""

    def either(inputs: Any, options: Any) -> Results:
        return differentiable(*(partial(form, options=options) for form in (run, plain.run)))(inputs)

    return Implementation("native", either, partial(recurs, spec), deterministic=True)


CONVOLUTION = _recurrent(kernel_table.CONVOLUTION, convolve, plain_recurrence.CONVOLUTION_ROWS)
GATED_DELTA = _recurrent(kernel_table.GATED_DELTA, gated_delta, plain_recurrence.GATED_DELTA_ROWS)
CHANNEL_DELTA = _recurrent(kernel_table.CHANNEL_DELTA, channel_delta, plain_recurrence.CHANNEL_DELTA_ROWS)
SELECTIVE_SCAN = _recurrent(kernel_table.SELECTIVE_SCAN, selective_scan, plain_recurrence.SELECTIVE_SCAN_ROWS)
