"""Layers with a state that each token changes: short convolutions, delta rules, and Mamba-2's selective scan.

All of them take a ragged batch and the state of each sequence before it, and return a result for each token and the
states after it. A sequence whose tokens begin at position 0 begins with zeros, whatever its state holds. Rows
of padding have finite results.

Axes: T tokens, N sequences, R decode rows, C channels, L taps of a convolution, H heads, D size of a key, V size of a
value, K heads of keys, G groups of heads, P slots.

A batch may say where its sequences' states are: `slots` are the places in an array of states [P, ...] that are read and
written. Then an operation takes the whole array and returns it with the new states, written in place where it can. What
a sequence reads no other sequence writes, but for decode rows of a chain: each reads what the one before it writes, and
comes after it in a sequence's text. So the states after each token of a chain are kept, as those of drafts are. Without
slots an operation takes the states of the sequences [N, ...].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rekindle_kernels.ops.registry import Registry, current_platform

CONVOLUTION = Registry("convolution")  # run(inputs, options) -> y, tails
GATED_DELTA = Registry("gated_delta")  # run(inputs, options) -> y, states
CHANNEL_DELTA = Registry("channel_delta")  # run(inputs, options) -> y, states
SELECTIVE_SCAN = Registry("selective_scan")  # run(inputs, options) -> y, states

EDGE = 64  # positions whose multiples are the edges of chunks: then cold, cached and cut prompts add in the same order


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("lengths", "cu_lengths", "num_prefills", "slots", "places"),
    meta_fields=("decode_rows", "differentiable"),
)
@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The sequences of a step's tokens, in the layout of `AttentionInputs`; a pytree."""

    lengths: Array  # int32 [N], positions of each sequence, this step's included; 0 marks an empty row
    cu_lengths: Array  # int32 [N-R+1], half-open offsets of each prefill sequence, from token R on
    num_prefills: Array  # int32 [], how many of the N-R prefill sequences are real
    decode_rows: int  # R
    slots: tuple[Array, Array] | None = None  # int32 [N] each: which states are read, and which are written
    places: Array | None = None  # int32 [R], of decode rows in their chains, from 0 on; None: no row is in a chain
    differentiable: bool = False  # loops have a fixed number of turns, as derivatives in reverse need them

    @property
    def sequences(self) -> int:
        """The number of sequences N, decode rows and prefills."""
        return self.lengths.shape[0]

    @property
    def prefills(self) -> int:
        """The number of prefill sequences N - R."""
        return self.sequences - self.decode_rows

    def prefill_lengths(self) -> Array:
        """Return the tokens of each prefill sequence in this step [N-R], 0 for padding."""
        lengths = self.cu_lengths[1:] - self.cu_lengths[:-1]
        return jnp.where(jnp.arange(self.prefills) < self.num_prefills, lengths, 0)

    def starts(self) -> Array:
        """Return the position of each sequence's first token in this step [N]."""
        counts = jnp.concatenate([jnp.ones(self.decode_rows, jnp.int32), self.prefill_lengths()])
        return self.lengths - counts

    def begins(self) -> Array:
        """Return True for sequences [N] that begin in this step: their states begin as zeros."""
        return self.starts() <= 0


@dataclass(frozen=True, slots=True)
class ConvolutionOptions:
    """The static options of a convolution; columns refer to x."""

    first: int = 0  # the column where the channels begin
    silu: bool = False  # results are silu of the sums
    before: int | None = None  # the column where factors of the inputs begin, one for each channel
    behind: int | None = None  # the column where factors of the results begin
    deterministic: bool = False  # a token's result is the same to the last bit in prompts and in decode rows


class DeltaWeights(NamedTuple):
    """The parameters of a gated delta rule."""

    step_bias: Array  # [H]
    log_rate: Array  # [H]
    norm: Array  # [V]


@dataclass(frozen=True, slots=True)
class DeltaOptions:
    """The static options of a gated delta rule; columns refer to `projected`."""

    key_heads: int
    gate: int  # the column where the gates [H · V] begin
    beta: int  # the column where the correction weights [H] begin
    step: int  # the column where the steps [H] begin
    eps: float  # of the norm
    deterministic: bool = False  # a token's result is the same to the last bit in prompts and in decode rows


@dataclass(frozen=True, slots=True)
class ChannelDeltaOptions:
    """The static options of a delta rule with a decay for each channel; columns refer to `projected`."""

    gate: int  # the column where the gates [H · V] begin
    beta: int  # the column where the correction weights [H] begin
    step: int  # the column where the steps [H · D] begin
    eps: float  # of the norm
    bound: float | None = None  # the least logarithm of a decay; None: there is none
    deterministic: bool = False  # a token's result is the same to the last bit in prompts and in decode rows


class ScanWeights(NamedTuple):
    """The parameters of a selective scan."""

    step_bias: Array  # [H]
    log_rate: Array  # [H]
    skip: Array  # [H]


@dataclass(frozen=True, slots=True)
class ScanOptions:
    """The static options of a selective scan."""

    groups: int  # G
    step: int  # the column of `projected` where the steps [H] begin
    deterministic: bool = False  # a token's result is the same to the last bit in prompts and in decode rows


@dataclass(frozen=True, slots=True)
class RecurrenceCall:
    """The static facts that select an implementation."""

    platform: str
    x: jax.ShapeDtypeStruct  # rows of the tokens
    projected: jax.ShapeDtypeStruct  # other rows of the tokens
    state: jax.ShapeDtypeStruct
    deterministic: bool = False


class ConvolutionInputs(NamedTuple):
    """The arrays of `causal_convolution`."""

    x: Array
    weight: Array
    bias: Array | None
    tails: Array
    batch: RaggedBatch


class HeadInputs(NamedTuple):
    """The arrays of a delta rule, or of `selective_scan`."""

    rows: Array  # qkv, or channels
    projected: Array
    weights: Any
    states: Array
    batch: RaggedBatch


def _run(
    operation: Registry,
    inputs: ConvolutionInputs | HeadInputs,
    options: ConvolutionOptions | DeltaOptions | ChannelDeltaOptions | ScanOptions,
    implementation: str | None,
    platform: str | None,
) -> tuple[Array, Array]:
    rows, others = inputs[0], inputs.projected if isinstance(inputs, HeadInputs) else inputs[0]
    x, projected, state = (jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (rows, others, inputs[3]))
    call = RecurrenceCall(platform or current_platform(), x, projected, state, options.deterministic)
    y, after = operation.choose(call, implementation).run(inputs, options)
    return y, after


def causal_convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    tails: Array,
    batch: RaggedBatch,
    *,
    options: ConvolutionOptions = ConvolutionOptions(),
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Convolve each channel, a column of x [T, N], with weight [C, L] over the positions of its sequence.

    `tails` [N or P, L-1, C] are the last inputs before this step, factors included. Returns y [T, C] in float32 and the
    new tails.
    """
    inputs = ConvolutionInputs(x, weight, bias, tails, batch)
    return _run(CONVOLUTION, inputs, options, implementation, platform)


def gated_delta(
    qkv: Array,
    projected: Array,
    weights: DeltaWeights,
    states: Array,
    batch: RaggedBatch,
    options: DeltaOptions,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Apply the gated delta rule: S ← S·exp(decay); S ← S + k ⊗ beta·(v - kᵀS); o = qᵀS.

    Rows of qkv are q [K, D], k [K, D] and v [H, V], for K heads of keys that H/K heads of values share. q and k get
    length one, and q a factor of D^-½. beta is the sigmoid of a column of `projected`, and decay is
    -exp(log_rate)·softplus(step + step_bias). States [N or P, H, D, V] are in float32.

    Returns norm(o)·silu(gate) [T, H · V] in float32, with an RMS norm of each head, and the new states.
    """
    inputs = HeadInputs(qkv, projected, weights, states, batch)
    return _run(GATED_DELTA, inputs, options, implementation, platform)


def channel_delta(
    qkv: Array,
    projected: Array,
    weights: DeltaWeights,
    states: Array,
    batch: RaggedBatch,
    options: ChannelDeltaOptions,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Apply Kimi's delta rule: S ← diag(exp(decay))·S; S ← S + k ⊗ beta·(v - kᵀS); o = qᵀS.

    Rows of qkv are q [H, D], k [H, D] and v [H, V]. q and k get length one, and q a factor of D^-½. beta is the sigmoid
    of a column of `projected`. The decays of a head [D] are bound·sigmoid(exp(log_rate)·(step + step_bias)), or without
    a bound -exp(log_rate)·softplus(step + step_bias); `step_bias` is [H · D]. States [N or P, H, D, V] are in float32.

    Returns norm(o)·sigmoid(gate) [T, H · V] in float32, with an RMS norm of each head, and the new states.
    """
    inputs = HeadInputs(qkv, projected, weights, states, batch)
    return _run(CHANNEL_DELTA, inputs, options, implementation, platform)


def selective_scan(
    channels: Array,
    projected: Array,
    weights: ScanWeights,
    states: Array,
    batch: RaggedBatch,
    options: ScanOptions,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Apply Mamba-2's scan: S ← S·exp(decay·step) + step·b ⊗ x; y = cᵀS + skip·x.

    Rows of `channels` are x [H, V], b [G, D] and c [G, D], for H/G heads each. Steps are softplus of columns of
    `projected` and `step_bias`, and decay is -exp(log_rate). States [N or P, H, D, V] are in float32. Returns
    y [T, H · V] in float32 and the new states.
    """
    inputs = HeadInputs(channels, projected, weights, states, batch)
    return _run(SELECTIVE_SCAN, inputs, options, implementation, platform)
